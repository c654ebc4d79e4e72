"""What a store takes, as far as one can tell who knows no prompt. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcs.depot.archive import MAX_GROUP_ID
from kvcs.errors import BadManifest
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.standard import standard_codecs
from kvcs.profile.manifest import DEFAULT_LIMITS, Manifest, ManifestLimits
from kvcs.profile.naming import MANIFEST_COSE, PublicationName
from kvcs.profile.payload import MAX_DATA_OCTETS
from kvcs.profile.signing import PublicKey, read_unverified, verify_manifest
from kvcs.trust.scope import Protection, Scope
from kvcs.trust.sealing import BARE, Cover, DigestMask, Opener, Sealing, opener
from moqt.location import Location
from moqt.names import FullTrackName


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is taken, and how patiently."""

    scope_key: ScopeKey
    protection: Protection | None = None
    """How Objects of the scope are sealed; they are kept as they come. None: in clear."""

    trusted: Mapping[bytes, PublicKey] = field(default_factory=dict, repr=False)
    """Public keys of producers. If there are any, a signed manifest must be by one of them."""

    require_signature: bool = False
    """Take no plain manifest."""

    codecs: CodecRegistry = field(default_factory=standard_codecs)
    limits: ManifestLimits = DEFAULT_LIMITS
    max_data_octets: int = MAX_DATA_OCTETS
    request_timeout_s: float = 10.0
    stall_s: float = 600.0
    """Seconds without anything new until a publication is left alone."""

    sealing: Sealing | None = field(init=False, repr=False, compare=False)
    """What follows from key and protection."""

    def __post_init__(self) -> None:
        sealing = Sealing.of(Scope(self.scope_key, self.protection))
        object.__setattr__(self, "sealing", sealing)

    def opener(self, track: FullTrackName) -> Opener:
        """Return what opens the Objects of a track."""
        return opener(self.sealing, track)

    def mask(self, track: FullTrackName) -> DigestMask | None:
        """Return what hides the digests of a track on the disk; None: its Objects are in clear."""
        return None if self.sealing is None else self.sealing.mask(track)

    def read_manifest(
        self,
        track: bytes,
        payload: bytes,
        name: PublicationName,
        version: int,
        cover: Cover = BARE,
    ) -> Manifest:
        """Check one version of a manifest (KVCS Section 3.6).

        Args:
            track: Track Name it came on.
            payload: The Object's payload, as it came.
            name: The publication it is of.
            version: Group ID it came under.
            cover: What it came with.

        Raises:
            BadObject: If it cannot be opened. It is as if it had not come.
            BadManifest: If a check fails. Nothing that came with it can be relied on.
        """
        if version > MAX_GROUP_ID:
            raise BadManifest(f"manifest in Group {version}, limit {MAX_GROUP_ID}")
        opener = self.opener(name.track(track))
        longest = opener.longest(self.limits.octets, fixed_length=False)
        text = opener.open(Location(version, 0), cover, payload, longest)
        if track == MANIFEST_COSE:
            # Whoever uses it knows whom to believe. Without keys that is left to them.
            text = (
                verify_manifest(text, self.trusted, self.limits)
                if self.trusted
                else read_unverified(text, self.limits).text
            )
        manifest = Manifest.from_json(text, self.limits)
        manifest.check_identity(name, version)
        manifest.check_compatibility(self.scope_key, name.compatibility_id)
        return manifest
