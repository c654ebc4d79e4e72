"""Settings of each command."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from kvcs.config.common import (
    CertifiedSettings,
    CommonSettings,
    HoldingSettings,
    IndexedSettings,
    ListeningSettings,
    ScopedSettings,
    Settings,
)
from kvcs.config.readers import (
    AddressSetting,
    NamesSetting,
    OctetsSetting,
    PathsSetting,
    ServicesSetting,
    UriSetting,
    UrisSetting,
)
from kvcs.profile.signing import ProducerKey, PublicKey, trusted_keys


class ProducerSettings(HoldingSettings):
    """What ``kvcs produce`` can be told."""

    table: ClassVar[str] = "produce"

    connect: UrisSetting = Field(
        default=(), description="relays to dial and to announce at, moqt://HOST:PORT/PATH"
    )
    producer_key_file: Path | None = Field(
        default=None,
        description="PEM file with the key that signs manifests; plain manifests without it",
    )
    encodings: NamesSetting = Field(
        default=("raw",),
        description="forms to offer: CODEC for k and v apart, kv.CODEC for one track; codecs are "
        "raw, shuffle-zstd, shuffle-lz4 (lossless), int8, fp8 (lossy, k and v apart)",
    )
    deterministic: bool = Field(
        default=False, description="promise that every run gives bit-identical objects"
    )
    manifest_every: int = Field(
        default=8, ge=1, le=8, description="completed layers between two manifests, at most"
    )
    store_octets: OctetsSetting = Field(
        default=4 << 30, ge=1, description="octets of publications that are held at most"
    )
    ttl_s: float = Field(
        default=3600.0, gt=0, description="seconds that a finished publication is kept"
    )
    store_wait_s: float = Field(
        default=30.0, ge=0, description="seconds that a layer waits for room before it fails"
    )

    @model_validator(mode="after")
    def _check_listener(self) -> "ProducerSettings":
        if self.listen is None and not self.connect:
            raise ValueError("neither listen nor connect is set, expected one of them or both")
        return self

    def load_producer_key(self) -> ProducerKey | None:
        """Return the key that signs manifests, if there is one.

        Raises:
            ConfigError: If the file cannot be used; the message names it.
        """
        if self.producer_key_file is None:
            return None
        return ProducerKey.from_file(self.producer_key_file)


class ConsumerSettings(IndexedSettings):
    """What ``kvcs consume`` can be told."""

    table: ClassVar[str] = "consume"

    connect: UrisSetting = Field(
        min_length=1, description="relays or producers to try in order, moqt://HOST:PORT/PATH"
    )
    block_services: ServicesSetting = Field(
        default=(),
        description="block services to ask for what no relay has, https://HOST:PORT/PATH",
    )
    block_token_file: Path | None = Field(
        default=None, description="file with the token that they know us by"
    )
    trust: PathsSetting = Field(
        default=(),
        description="PEM files with public keys of producers whose manifests are believed",
    )
    require_signature: bool = Field(
        default=False, description="take no publication without a signed manifest"
    )
    encodings: NamesSetting = Field(
        default=(),
        description="codecs to take, the preferred one first: raw, shuffle-zstd, shuffle-lz4, "
        "int8, fp8 (default: every lossless one)",
    )
    require_lossless: bool = Field(
        default=False,
        description="take no tensors that a codec has rounded, in any case",
    )
    prefixes: Literal["longest", "any", "auto"] = Field(
        default="longest",
        description="take the whole prefix only, or also a shorter one: any asks for each length, "
        "auto for all that there is of the model, in one question",
    )
    fetch: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="ask with FETCH for segments that are complete, for none, or for nothing that "
        "is not complete yet",
    )
    deadline_s: float = Field(
        default=60.0, gt=0, description="seconds until everything must be there"
    )
    discovery_timeout_s: float = Field(
        default=5.0, gt=0, description="seconds until a publication must be found"
    )
    stall_timeout_s: float = Field(
        default=30.0, gt=0, description="seconds without anything new until it is given up"
    )
    recompute_tokens_per_s: int | None = Field(
        default=None,
        ge=1,
        description="tokens computed here in a second: what is missing is not waited for longer "
        "than computing it takes (default: the deadline alone counts)",
    )
    connections: int = Field(
        default=1, ge=1, le=16, description="connections to one relay or producer, side by side"
    )
    processes: bool = Field(
        default=False, description="give each of these connections a process of its own"
    )
    max_object_octets: OctetsSetting = Field(
        default=64 << 20, ge=1, le=64 << 20, description="Data Length that is accepted at most"
    )
    max_cache_octets: OctetsSetting = Field(
        default=8 << 30, ge=1, description="octets of tensors that are allocated at most"
    )

    @model_validator(mode="after")
    def _check_block_services(self) -> "ConsumerSettings":
        if self.block_services and self.block_token_file is None:
            raise ValueError("block_token_file is not set, expected a file since block_services is")
        return self

    @model_validator(mode="after")
    def _check_trust(self) -> "ConsumerSettings":
        if self.require_signature and not self.trust and not self.scope_file:
            raise ValueError("trust is not set, expected a public key since require_signature is")
        return self

    def load_trusted_keys(self) -> dict[bytes, PublicKey]:
        """Return the public keys that are believed, by key identifier.

        Raises:
            ConfigError: If a file cannot be used; the message names it.
        """
        return trusted_keys(self.trust)


class RelaySettings(ListeningSettings):
    """What ``kvcs relay`` can be told."""

    table: ClassVar[str] = "relay"

    listen: AddressSetting = Field(
        description="address and UDP port to listen on, such as 0.0.0.0:4443"
    )
    certificate_file: Path = Field(description="PEM file with the certificate chain to listen with")
    key_file: Path = Field(description="PEM file with the certificate's key")
    connect: UrisSetting = Field(
        default=(), description="relays to ask for what no producer here has, moqt://HOST:PORT/PATH"
    )
    cache_octets: OctetsSetting = Field(
        default=4 << 30, ge=1, description="octets of publications that are kept at most"
    )
    linger_s: float = Field(
        default=5.0, ge=0, description="seconds that a track is received after its last consumer"
    )
    new_session_uri: UriSetting | None = Field(
        default=None,
        max_length=8192,
        description="where sessions are told to go after SIGTERM, moqt://HOST:PORT/PATH",
    )
    max_namespaces: int = Field(
        default=4096, ge=1, description="namespaces that one session may announce"
    )
    max_behind_octets: OctetsSetting = Field(
        default=256 << 20, ge=1, description="octets that a consumer may fall behind"
    )
    stall_s: float = Field(
        default=10.0,
        ge=0,
        description="seconds that a consumer may take nothing while others are refused for room",
    )
    max_tracks: int = Field(
        default=65_536, ge=1, description="tracks that are kept or passed on at once"
    )
    publisher_grace_s: float = Field(
        default=2.0, ge=0, description="seconds that a track waits for another producer when lost"
    )
    fill_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="seconds that what is past is waited for in vain; 0: for ever",
    )
    pause_after_s: float = Field(
        default=1.0, ge=0, description="seconds until producers of what all have paused are paused"
    )


class StoreSettings(HoldingSettings):
    """What ``kvcs store`` can be told."""

    table: ClassVar[str] = "store"

    connect: UrisSetting = Field(
        default=(), description="relays and producers to follow, moqt://HOST:PORT/PATH"
    )
    only: NamesSetting = Field(
        default=(),
        description="keep these of the scope only: COMPATIBILITY[/ANCHOR[/PUBLICATION]] in hex; "
        "everything if left out",
    )
    announce: UrisSetting = Field(
        default=(), description="relays to announce at what is held whole, moqt://HOST:PORT/PATH"
    )
    trust: PathsSetting = Field(
        default=(),
        description="PEM files with public keys of producers; if there are any, signed manifests "
        "are held to them",
    )
    require_signature: bool = Field(
        default=False, description="keep no publication without a signed manifest"
    )
    budget_octets: OctetsSetting = Field(
        default=64 << 30, ge=1 << 20, description="octets of disk that publications take at most"
    )
    memory_octets: OctetsSetting = Field(
        default=128 << 20,
        ge=16 << 20,
        description="octets of memory for what is being served",
    )
    partial_s: float = Field(
        default=3600.0,
        gt=0,
        description="seconds that a publication is kept of which something is missing",
    )
    stall_s: float = Field(
        default=10.0,
        ge=0,
        description="seconds that a consumer may take nothing while there is no room for others",
    )
    at_once: int = Field(
        default=16, ge=1, description="publications that are brought at the same time"
    )
    stall_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds without anything new until one is left alone"
    )

    @model_validator(mode="after")
    def _check_ways(self) -> "StoreSettings":
        if self.listen is None and not self.connect and not self.announce:
            raise ValueError("none of connect, listen and announce is set, expected one at least")
        if self.http_listen is not None and self.index_uri is None:
            raise ValueError(
                "index_uri is not set, expected an index since http_listen is: it knows the Block "
                "Keys of what is kept, which nobody can compute without the tokens"
            )
        if self.require_signature and not self.trust and not self.scope_file:
            raise ValueError("trust is not set, expected a public key since require_signature is")
        return self

    def load_trusted_keys(self) -> dict[bytes, PublicKey]:
        """Return the public keys that are believed, by key identifier.

        Raises:
            ConfigError: If a file cannot be used; the message names it.
        """
        return trusted_keys(self.trust)


class IndexSettings(CertifiedSettings):
    """What ``kvcs index`` can be told."""

    table: ClassVar[str] = "index"

    listen: AddressSetting = Field(
        description="address and TCP port to listen on, such as 0.0.0.0:8443"
    )
    certificate_file: Path = Field(description="PEM file with the certificate chain to listen with")
    key_file: Path = Field(description="PEM file with the certificate's key")
    tokens_file: Path = Field(
        description="file of mode 0600 with who may ask, a line each: SCOPE_ID RIGHTS TOKEN"
    )
    drain_s: float = Field(
        default=10.0, ge=0, description="seconds for requests to end after SIGTERM"
    )
    max_connections: int = Field(
        default=1024, ge=1, description="connections at once; more are refused"
    )
    max_open_requests: int = Field(
        default=256, ge=1, description="requests at once; more are refused"
    )
    max_holders: int = Field(default=65_536, ge=1, description="holders that are listed at most")
    max_holders_of_token: int = Field(
        default=16_384, ge=1, description="of them those that one token has registered"
    )
    max_keys: int = Field(
        default=1_000_000, ge=1, description="keys of all holders, at some 300 octets of memory"
    )
    max_keys_of_token: int = Field(
        default=500_000, ge=1, description="of them those that one token has registered"
    )
    max_lease_s: float = Field(
        default=3600.0, ge=1, description="seconds that a holder is listed without renewal"
    )
    request_timeout_s: float = Field(
        default=10.0, gt=0, description="seconds for a handshake, and until a request is there"
    )
    idle_timeout_s: float = Field(
        default=30.0, gt=0, description="seconds of silence that end a connection"
    )


class BenchSettings(ScopedSettings):
    """What ``kvcs bench`` can be told. Names nothing that another command does not know."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="what is below is not written"
    )
    listen: AddressSetting | None = Field(
        default=None, description="address and UDP port to serve on, such as :4443"
    )
    deadline_s: float = Field(
        default=60.0, gt=0, description="seconds until all that is measured must be there"
    )
    max_cache_octets: OctetsSetting = Field(
        default=8 << 30, ge=1, description="octets of tensors that are allocated at most"
    )


class PingSettings(Settings):
    """What ``kvcs ping`` can be told. Names nothing that another command does not know."""

    listen: AddressSetting | None = Field(
        default=None, description="ask who listens here, over loopback, if no URI is given"
    )


#: Every class of settings with names of its own. One in the file or the environment must be known
#: to one of them.
SETTINGS: tuple[type[CommonSettings], ...] = (
    ProducerSettings,
    ConsumerSettings,
    RelaySettings,
    StoreSettings,
    IndexSettings,
)
