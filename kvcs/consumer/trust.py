"""What a consumer knows beforehand, and the checks that follow from it. Pure.

Nothing of a publication is used before :func:`check_manifest` has passed (decision 6), and no
Object before :func:`~kvcs.consumer.examining.examine` has, which is to be had here as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from numpy.typing import NDArray

from kvcs.consumer.examining import Examined, examine
from kvcs.errors import BadManifest, ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Octets
from kvcs.profile.manifest import DEFAULT_LIMITS, Manifest, ManifestLimits
from kvcs.profile.naming import MANIFEST_COSE, PROFILE, PublicationName
from kvcs.profile.payload import MAX_DATA_OCTETS
from kvcs.profile.signing import PublicKey, verify_manifest
from kvcs.trust.scope import Protection, Scope
from kvcs.trust.sealing import Opener, Sealing, opener
from moqt.names import FullTrackName, TrackNamespace

__all__ = ["Examined", "Expectations", "check_manifest", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What a publication is held against.

    Raises:
        ConfigError: If signatures are required but no producer is trusted.
    """

    scope_key: ScopeKey

    protection: Protection | None = None
    """How Objects of the scope are sealed. None: in clear, and sealed ones are not used."""

    descriptor: Descriptor
    """Descriptor of the engine that will use the cache."""

    block_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """Block Keys of the prompt, from its first block on; empty if its tokens are not known."""

    rest: tuple[int, ...] = field(default=(), repr=False)
    """Tokens of the prompt after its last whole block, as far as they are known."""

    rest_extra: bytes = field(default=b"", repr=False)
    """Extra key material of the block that they begin."""

    trusted: Mapping[bytes, PublicKey] = field(default_factory=dict, repr=False)
    """Public keys of the producers that are believed, by key identifier."""

    require_signature: bool = False
    """Take ``manifest.cose`` only, never ``manifest`` (KVCS Section 5.2)."""

    limits: ManifestLimits = DEFAULT_LIMITS

    max_data_octets: int = MAX_DATA_OCTETS
    """Limit on Data Length (decision 13)."""

    wanted_blocks: int | None = None
    """How many of ``block_keys`` are wanted; None: all. Those behind them only confirm segments
    that go on."""

    sealing: Sealing | None = field(init=False, repr=False, compare=False)
    """What follows from key and protection."""

    def __post_init__(self) -> None:
        sealing = Sealing.of(Scope(self.scope_key, self.protection))
        object.__setattr__(self, "sealing", sealing)
        if self.require_signature and not self.trusted:
            raise ConfigError("signed manifests are required, but no producer's key is trusted")

    @classmethod
    def of_tokens(
        cls,
        scope: Scope | ScopeKey,
        descriptor: Descriptor,
        tokens: Sequence[int] | NDArray[Any],
        extra: Sequence[bytes] = (),
        **others: Any,
    ) -> Self:
        """Make expectations of a prompt: its Block Keys are computed here.

        Args:
            scope: The scope; of a key alone, one whose Objects go in clear.
            descriptor: Descriptor of the engine that will use the cache.
            tokens: Token ids of the whole prompt.
            extra: Extra key material, as for :meth:`ScopeKey.block_keys`.
            others: Further fields, by name.

        Raises:
            ConfigError: If a token is not one, or the prompt is shorter than a block.
        """
        scope = Scope.of(scope)
        made = cls(
            scope_key=scope.key, protection=scope.protection, descriptor=descriptor, **others
        )
        return made.with_tokens(tokens, extra)

    def with_tokens(
        self, tokens: Sequence[int] | NDArray[Any], extra: Sequence[bytes] = ()
    ) -> Self:
        """Return the same of a prompt; arguments and errors are those of :meth:`of_tokens`."""
        keys = self.scope_key.block_keys(self.descriptor, tokens, extra)
        if not keys:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, fewer than a block of "
                f"{self.descriptor.block_tokens}: there is nothing to retrieve"
            )
        rest = tokens[len(keys) * self.descriptor.block_tokens :]
        return replace(
            self,
            block_keys=tuple(keys),
            rest=tuple(int(token) for token in rest),
            rest_extra=b"".join(extra[len(keys) :]),  # one at most, or the keys were refused
        )

    def extended(self, tokens: Sequence[int] | NDArray[Any]) -> Self:
        """Return them with tokens that follow the prompt: more Block Keys, nothing else changes.

        What is appended has no extra key material: that is of the prompt alone.

        Raises:
            ConfigError: If a token is not one.
        """
        rest = [int(token) for token in (*self.rest, *tokens)]
        keys = self.scope_key.block_keys(
            self.descriptor,
            rest,
            [self.rest_extra] if self.rest_extra else (),
            after=self.block_keys[-1] if self.block_keys else None,
        )
        return replace(
            self,
            block_keys=(*self.block_keys, *keys),
            rest=tuple(rest[len(keys) * self.descriptor.block_tokens :]),
            rest_extra=b"" if keys else self.rest_extra,
        )

    def opener(self, track: FullTrackName) -> Opener:
        """Return what opens the Objects of a track."""
        return opener(self.sealing, track)

    def prefix(self, blocks: int) -> TrackNamespace:
        """Return the namespace prefix of all publications of the first ``blocks`` blocks."""
        return TrackNamespace((*self.model_prefix.fields, self.block_keys[blocks - 1]))

    @property
    def model_prefix(self) -> TrackNamespace:
        """The namespace prefix of all publications of the scope that have this descriptor."""
        compatibility_id = self.scope_key.compatibility_id(self.descriptor)
        return TrackNamespace((PROFILE, self.scope_key.scope_id, compatibility_id))

    def going_on(self, blocks: int, following: Sequence[bytes]) -> Self:
        """Return what is expected of a publication that is the prompt's for some blocks only.

        Args:
            blocks: Blocks, from the first one on, that it has in common with the prompt.
            following: Block Keys of the publication behind them, from whoever knows them. No
                trust is placed in these: a segment is used only if they and our own keys
                together have the digest that its manifest states.
        """
        return replace(
            self,
            block_keys=(*self.block_keys[:blocks], *following),
            wanted_blocks=blocks,
        )

    def blocks_of(self, name: PublicationName) -> int | None:
        """Return how many blocks the prefix of a publication has; None if that is not known."""
        try:
            return self.block_keys.index(name.anchor_key) + 1
        except ValueError:
            return None

    def wanted_of(self, name: PublicationName) -> int | None:
        """Return how many blocks are wanted of a publication; None if that is not known."""
        found = (self.blocks_of(name), self.wanted_blocks)
        return min((blocks for blocks in found if blocks is not None), default=None)

    def known_of(self, name: PublicationName) -> int | None:
        """Return of how many of its blocks the keys are known; None if of none."""
        return self.blocks_of(name) or len(self.block_keys) or None


def check_manifest(
    payload: Octets, *, track: bytes, name: PublicationName, version: int, expected: Expectations
) -> Manifest:
    """Check one version of a manifest against all that is known (KVCS Section 3.6, decision 6).

    Args:
        payload: The Object's payload, opened.
        track: Track Name it came on: decides whether it must be signed.
        name: The publication it is of.
        version: Group ID it came under.
        expected: What the consumer knows.

    Raises:
        BadManifest: If any check fails; where the descriptor is another one, the message names
            the members that differ. Nothing of the publication can be used.

    Costs time in proportion to its length; worth a thread when it lists many digests.
    """
    if track == MANIFEST_COSE:
        text: Octets = verify_manifest(payload, expected.trusted, expected.limits)
    else:
        text = payload
    manifest = Manifest.from_json(text, expected.limits)
    manifest.check_identity(name, version)
    if differing := expected.descriptor.differences(manifest.compat):
        raise BadManifest(f"compat is not the descriptor expected: {'; '.join(differing)}")
    if name.scope_id != expected.scope_key.scope_id:
        raise BadManifest(f"{name} is of another scope")
    manifest.check_compatibility(expected.scope_key, name.compatibility_id)
    # What was appended behind the prefix is not looked at: it may go on otherwise.
    if keys := expected.block_keys[: expected.blocks_of(name)]:
        manifest.check_tokens(keys)
    return manifest
