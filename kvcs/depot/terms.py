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


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is taken, and how patiently."""

    scope_key: ScopeKey
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

    def read_manifest(
        self, track: bytes, payload: bytes, name: PublicationName, version: int
    ) -> Manifest:
        """Check one version of a manifest (KVCS Section 3.6).

        Args:
            track: Track Name it came on.
            payload: The Object's payload.
            name: The publication it is of.
            version: Group ID it came under.

        Raises:
            BadManifest: If a check fails. Nothing that came with it can be relied on.
        """
        if version > MAX_GROUP_ID:
            raise BadManifest(f"manifest in Group {version}, limit {MAX_GROUP_ID}")
        text = payload
        if track == MANIFEST_COSE:
            # Whoever uses it knows whom to believe. Without keys that is left to them.
            text = (
                verify_manifest(payload, self.trusted, self.limits)
                if self.trusted
                else read_unverified(payload, self.limits).text
            )
        manifest = Manifest.from_json(text, self.limits)
        manifest.check_identity(name, version)
        manifest.check_compatibility(self.scope_key, name.compatibility_id)
        return manifest
