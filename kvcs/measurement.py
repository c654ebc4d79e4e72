"""What ``kvcs bench`` measures, as values: single retrievals, and what they say together.

Rates are in MB of the cache, 10**6 octets of its tensors, whatever a codec makes of them on the
way. Times are in seconds. Nothing here measures; the figures are arguments.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any, Self

from kvcs.errors import ConfigError

#: The member ``event`` of a measurement as JSON.
EVENT = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieved:
    """One retrieval of the whole cache, over a connection of its own."""

    seconds: float
    """From dialling until the last layer was ready, every Object verified."""

    first_layer_s: float
    """From dialling until the first layer was."""

    data_octets: int
    """Data of all Objects, as it was on the way."""

    cpu_s: float
    """Processor seconds of the consumer's process."""

    datagrams: int = 0
    """That came from the other end; 0 where the engine does not count them."""

    datagrams_sent: int = 0
    """That the other end has sent; 0 where neither end can tell."""

    datagrams_lost: int = 0
    """Of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was measured, and over what."""

    uri: str
    engine: str
    codec: str
    lossless: bool
    model: str
    """The shape, as it was asked for."""

    layers: int
    tokens: int
    cache_octets: int
    """Of the tensors."""

    object_octets: int
    """Of the K tensor of one block in one layer, which is the Data of an Object where the codec is
    ``raw``."""

    datagram_octets: int | None
    """UDP payload sent at most, by the end that is known best: the producer, else this one; None
    where the engine does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Setting):
    """What several retrievals say of the link, the engine and the codec. Medians, but for sums."""

    retrievals: int

    mb_per_s: float
    """MB of the cache for each second, from dialling to the last layer."""

    mb_per_s_least: float
    mb_per_s_most: float

    steady_mb_per_s: float
    """The same without what goes before the first layer, and that layer."""

    first_layer_s: float
    per_layer_s: float
    """From one layer to the next; 0 where there is only one."""

    data_to_cache: float
    """Octets of Data for each octet of the cache: what the codec makes of it."""

    wire_to_cache: float | None
    """The same of UDP payload, each datagram counted as a full one; None if nobody can tell."""

    cpu_s_per_gb: float
    """Processor seconds of the consumer's process for each 10**9 octets of the cache."""

    producer_cpu_s_per_gb: float | None
    """The same of the producer's; None where it is not ours to ask."""

    rtt_s: float
    """The least time in which a request was answered, with nothing else on its way."""

    loss: float | None
    """Share of the producer's datagrams that were lost: as it says, or by the gaps in what came,
    of which some stacks leave a few on purpose. None if nobody can tell."""

    @property
    def start_s(self) -> float:
        """What goes before a layer begins to come: handshakes, discovery, manifest, slow start."""
        layer_octets = self.cache_octets / self.layers
        return max(0.0, self.first_layer_s - layer_octets / (self.steady_mb_per_s * 1e6))

    @property
    def octets_per_token(self) -> int:
        """Of the cache, over all layers."""
        return self.cache_octets // self.tokens

    @classmethod
    def of(
        cls,
        setting: Setting,
        retrieved: Sequence[Retrieved],
        *,
        rtt_s: float,
        producer_cpu_s: float | None = None,
    ) -> Self:
        """Say what retrievals say together.

        Args:
            setting: What was retrieved.
            retrieved: At least one.
            rtt_s: See :attr:`rtt_s`.
            producer_cpu_s: Processor seconds of the producer's process for all of them.
        """
        octets, layers = setting.cache_octets, setting.layers
        rates = [octets / one.seconds / 1e6 for one in retrieved]
        gaps = [(one.seconds - one.first_layer_s) / max(layers - 1, 1) for one in retrieved]
        # Layers that are ready at the same moment, as in a cache of a few octets, have no rate.
        steady = [
            octets / layers / gap / 1e6 if gap > 0 else rate
            for gap, rate in zip(gaps, rates, strict=True)
        ]
        carried = [max(one.datagrams_sent, one.datagrams) for one in retrieved]
        # An engine that does not count what comes chooses the size of datagrams itself.
        is_counted = all(one.datagrams for one in retrieved)
        size = setting.datagram_octets
        sent = sum(one.datagrams_sent for one in retrieved)
        gb = len(retrieved) * octets / 1e9
        return cls(
            **asdict(setting),
            retrievals=len(retrieved),
            mb_per_s=median(rates),
            mb_per_s_least=min(rates),
            mb_per_s_most=max(rates),
            steady_mb_per_s=median(steady),
            first_layer_s=median(one.first_layer_s for one in retrieved),
            per_layer_s=median(gaps),
            data_to_cache=median(one.data_octets / octets for one in retrieved),
            wire_to_cache=median(carried) * size / octets if is_counted and size else None,
            cpu_s_per_gb=sum(one.cpu_s for one in retrieved) / gb,
            producer_cpu_s_per_gb=None if producer_cpu_s is None else producer_cpu_s / gb,
            rtt_s=rtt_s,
            loss=sum(one.datagrams_lost for one in retrieved) / sent if sent else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``kvcs bench --json`` prints: six digits of each figure."""
        members = {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }
        return {"event": EVENT, **members}

    @classmethod
    def from_json(cls, value: object, name: str) -> Self:
        """Read what :meth:`to_json` made.

        Args:
            value: Parsed JSON.
            name: Of the file, for messages.

        Raises:
            ConfigError: If it is something else; the message names the member.
        """
        if not isinstance(value, Mapping) or value.get("event") != EVENT:
            raise ConfigError(f"{name}: expected the object that kvcs bench --json prints")
        members: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in value:
                raise ConfigError(
                    f"{name}: no member {field.name!r}, expected all that kvcs bench --json prints"
                )
            found = members[field.name] = value[field.name]
            if not _fits(field.name, field.type, found):
                raise ConfigError(
                    f"{name}: {field.name} is {found!r:.40}, expected {_WORDS[field.type]}"
                )
        if members["cache_octets"] < members["tokens"]:
            raise ConfigError(f"{name}: cache_octets is less than one for each token")
        return cls(**members)


#: What a member must be, by the type of its field.
_WORDS: Mapping[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number above 0",
    int | None: "a whole number above 0, or null",
    float: "a number, 0 or more",
    float | None: "a number, 0 or more, or null",
}
#: Figures that others are divided by.
_ABOVE_ZERO = frozenset({"mb_per_s", "mb_per_s_least", "mb_per_s_most", "steady_mb_per_s"})


def _fits(name: str, kind: Any, found: object) -> bool:
    if kind in (str, bool):
        return type(found) is kind
    if found is None:
        return kind in (int | None, float | None)
    if kind in (int, int | None):
        return type(found) is int and found > 0
    if not isinstance(found, int | float) or isinstance(found, bool):
        return False
    # No number at all is not JSON, but some write it; it is not below anything.
    return 0 <= found < math.inf and (found > 0 or name not in _ABOVE_ZERO)
