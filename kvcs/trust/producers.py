"""Producers whose manifests are believed: their keys, and from when to when. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvcs.errors import ConfigError
from kvcs.profile.signing import ProducerKey, PublicKey, key_id

MAX_KID_OCTETS = 256
_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class KnownProducer:
    """A producer's key, as a scope lists it.

    Raises:
        ConfigError: If the key identifier or the name is too long, or the time is none.
    """

    key: PublicKey = field(repr=False)

    kid: bytes = b""
    """Key identifier, as its manifests name it; left out, :func:`~kvcs.profile.signing.key_id`."""

    name: str = ""
    """For people."""

    not_before: float | None = None
    """Wall clock, in seconds, from which on its manifests are believed."""

    not_after: float | None = None
    """Wall clock, in seconds, from which on they are believed no more."""

    def __post_init__(self) -> None:
        if not self.kid:
            object.__setattr__(self, "kid", key_id(self.key))
        if len(self.kid) > MAX_KID_OCTETS:
            raise ConfigError(f"kid of {len(self.kid)} octets, expected 1 to {MAX_KID_OCTETS}")
        if len(self.name) > _MAX_NAME or not self.name.isprintable():
            raise ConfigError(f"name of {len(self.name)} characters, expected {_MAX_NAME} at most")
        if None not in (self.not_before, self.not_after) and not self._opens_before_it_closes:
            raise ConfigError("not_after is not later than not_before, expected it to be")

    @property
    def _opens_before_it_closes(self) -> bool:
        return (self.not_before or 0.0) < (self.not_after or 0.0)

    def is_trusted_at(self, now: float) -> bool:
        """Whether its manifests are believed at this time."""
        begun = self.not_before is None or self.not_before <= now
        return begun and (self.not_after is None or now < self.not_after)


class KeysByDate(Mapping[bytes, PublicKey]):
    """Public keys by their identifiers, each for as long as it is believed.

    Who runs for long has a key expire by asking again. It counts as true if any key is listed, so
    that one whose keys have all expired believes nobody, and not everybody.

    Args:
        producers: With dates, or without.
        clock: Tells the wall clock, in seconds.
        always: Further keys, which do not expire.

    Raises:
        ConfigError: If two keys have one identifier.
    """

    def __init__(
        self,
        producers: Iterable[KnownProducer],
        clock: Callable[[], float],
        always: Mapping[bytes, PublicKey] | None = None,
    ) -> None:
        self._listed = {kid: KnownProducer(key, kid) for kid, key in (always or {}).items()}
        for one in producers:
            if one.kid in self._listed and self._listed[one.kid].key != one.key:
                raise ConfigError(f"two producers have the key identifier {one.kid.hex()}")
            self._listed.setdefault(one.kid, one)
        self._clock = clock

    def __getitem__(self, kid: bytes) -> PublicKey:
        found = self._listed[kid]
        if not found.is_trusted_at(self._clock()):
            raise KeyError(kid)
        return found.key

    def __iter__(self) -> Iterator[bytes]:
        now = self._clock()
        return (kid for kid, one in self._listed.items() if one.is_trusted_at(now))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._listed)

    def __repr__(self) -> str:
        return f"KeysByDate({', '.join(kid.hex()[:8] for kid in self._listed)})"


def check_listed(
    producers: Iterable[KnownProducer], own: ProducerKey | None, now: float
) -> KnownProducer | None:
    """Say as whom a producer of a scope signs; None: the scope lists nobody.

    Raises:
        ConfigError: If the members of the scope would not believe what is signed with this key, or
            not signed: the message says what they expect.
    """
    listed = {one.kid: one for one in producers}
    if not listed:
        return None
    if own is None:
        raise ConfigError(
            "producer_key_file is not set, expected one since the scope lists producers: its "
            "members believe signed manifests only"
        )
    found = listed.get(own.kid)
    if found is None or found.key != own.public_key:
        raise ConfigError(
            f"producer_key_file: the key {own.kid.hex()[:8]} is none of the "
            f"{len(listed)} that the scope lists"
        )
    if not found.is_trusted_at(now):
        early = found.not_before is not None and now < found.not_before
        raise ConfigError(
            f"producer_key_file: the scope believes the key {own.kid.hex()[:8]} "
            f"{'not yet' if early else 'no more'}, expected one that it believes now"
        )
    return found
