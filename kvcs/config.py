"""Settings: each is declared once, with its type, bounds, default and help.

A flag beats the environment (``KVCS_NAME``), which beats the file (``kvcs.toml``, or the one that
``--config`` or ``KVCS_CONFIG`` names). In the file, settings stand at the top, for every command,
or in a table named after the command: ``[produce]``, ``[consume]``; the table wins.

What is wrong is refused before anything starts, in one line that names the setting, where it came
from, what was found and what was expected. A name that nobody knows is wrong, too. Secrets have no
flag, since command lines are public on a machine, and no message shows one.
"""

import difflib
import os
import re
import tomllib
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvcs.errors import BadName, ConfigError
from kvcs.kvsp.http.uris import ServiceUri
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.signing import ProducerKey, PublicKey, trusted_keys
from kvcs.telemetry import LogFormat

ENV_PREFIX = "KVCS_"
#: The file that is read if it exists and no other one is named.
DEFAULT_FILE = "kvcs.toml"
#: Variables of ours that are not settings: of this module, the connectors, scripts and tests.
_OTHER_VARIABLES = frozenset(
    {
        "KVCS_BENCH_BASELINE",
        "KVCS_COMPOSE_INSTALL",
        "KVCS_CONFIG",
        "KVCS_MODEL_DIR",
        "KVCS_PEER_PYTHON",
        "KVCS_PYTHON",
        "KVCS_SETUP_LOCKED",
        "KVCS_STORE_KILLS",
    }
)
#: What container platforms put into every environment for a service named kvcs.
_PLATFORM_VARIABLE = re.compile(r"KVCS_(.+_)?(PORT(_\d+.*|_.+)?|SERVICE_(HOST|PORT)(_.+)?)")

#: Second names of flags. In the environment and the file a setting has one name.
_ALSO: Mapping[str, tuple[str, ...]] = {
    "encodings": ("--codec",),
    "http_listen": ("--http",),
    "index_uri": ("--index",),
}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([kmg]i?|)b?", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:/\s]*)):(?P<port>\d{1,5})")


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: object) -> object:
    """Read ``HOST:PORT``; ``[HOST]:PORT`` for IPv6, ``:PORT`` for every address of the machine."""
    if not isinstance(text, str):
        return text
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not int(match["port"]) <= 65_535:
        raise ValueError("expected HOST:PORT with a port of 0 to 65535")
    return Address(match["v6"] or match["host"] or "::", int(match["port"]))


def parse_octets(text: object) -> object:
    """Read a number of octets with an optional unit, such as ``512MiB``."""
    if not isinstance(text, str):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected octets, such as 1048576, 512MiB or 4GB")
    return int(match[1]) * _UNITS[match[2].lower()]


def parse_datagram(value: object) -> object:
    """Read a size of datagrams in octets; ``auto`` is None, which has it found."""
    text = str(value).strip()
    if value is None or text == "auto":
        return None
    if not text.isdecimal() or not 1200 <= int(text) <= 16_000:
        raise ValueError("expected auto, or octets from 1200 to 16000")
    return int(text)


def parse_list(text: object) -> object:
    """Read several values separated by commas, as environment variables have them."""
    if isinstance(text, str):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def parse_uri(value: object) -> object:
    """Read a ``moqt://HOST:PORT/PATH``."""
    if not isinstance(value, str) or not re.fullmatch(r"moqt://[^/\s]+:\d{1,5}(/\S*)?", value):
        raise ValueError(f"expected moqt://HOST:PORT/PATH instead of {value!r:.100}")
    return value


def parse_service(value: object) -> object:
    """Read the ``https://HOST:PORT/PATH`` of a service."""
    try:
        return ServiceUri.parse(value).base if isinstance(value, str) else value
    except BadName as exc:
        raise ValueError(f"expected https://HOST:PORT/PATH: {exc}") from None


def parse_services(value: object) -> object:
    """Read a list of ``https://HOST:PORT/PATH``."""
    found = parse_list(value)
    return tuple(map(parse_service, found)) if isinstance(found, list | tuple) else found


def parse_places(value: object) -> object:
    """Read a list of ``moqt://HOST:PORT/PATH`` and ``https://HOST:PORT/PATH``."""
    found = parse_list(value)
    for uri in found if isinstance(found, list | tuple) else ():
        if isinstance(uri, str) and uri.startswith("https:"):
            parse_service(uri)
        else:
            parse_uri(uri)
    return found


def parse_uris(value: object) -> object:
    """Read a list of ``moqt://HOST:PORT/PATH``."""
    found = parse_list(value)
    for uri in found if isinstance(found, list | tuple) else ():
        parse_uri(uri)
    return found


AddressSetting = Annotated[Address, BeforeValidator(parse_address)]
DatagramSetting = Annotated[int | None, BeforeValidator(parse_datagram)]
OctetsSetting = Annotated[int, BeforeValidator(parse_octets)]
UriSetting = Annotated[str, BeforeValidator(parse_uri)]
ServiceSetting = Annotated[str, BeforeValidator(parse_service)]
ServicesSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_services)]
PlacesSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_places)]
UrisSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_uris)]
NamesSetting = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_list)]
PathsSetting = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(parse_list)]


class CommonSettings(BaseSettings):
    """What every command can be told. Frozen; made by :func:`settings_from`, or in code.

    Made in code, it takes what it is given and reads neither environment nor file.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )
    #: The table of the file that is for this command.
    table: ClassVar[str] = ""

    # Log lines.
    log_format: LogFormat = Field(
        default="auto", description="lines for people, JSON, or what suits"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="what is below is not written"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave environment and file to :func:`settings_from`, which knows what came from where."""
        return (init_settings,)


class Settings(CommonSettings):
    """What every command can be told that speaks MOQT."""

    # What TLS is told.
    ca_file: Path | None = Field(
        default=None, description="PEM file with the CAs to believe; the public ones if left out"
    )
    server_name: str | None = Field(
        default=None,
        description="name that the peer's certificate must show, if not the host dialled",
    )
    insecure_skip_verify: bool = Field(
        default=False,
        description="believe any peer: for measurements and tests, never for data that matter",
    )

    # QUIC.
    engine: Literal["aioquic", "picoquic"] | None = Field(
        default=None,
        description="what carries QUIC, aioquic if left out; picoquic needs kvcs[picoquic]",
    )
    congestion_control: Literal["bbr", "reno"] | None = Field(
        default=None,
        description="how fast to send: reno, until packets are lost, or bbr, as fast as the path "
        "delivers; reno if left out",
    )
    max_datagram_octets: DatagramSetting = Field(
        default=None,
        description="UDP payload sent at most, 1200 to 16000, which the path must take; auto, the "
        "default: what it is found to take",
    )
    connection_window: OctetsSetting = Field(
        default=16 << 20,
        ge=1 << 16,
        description="octets received and not yet consumed, over all streams",
    )
    stream_window: OctetsSetting = Field(
        default=8 << 20, ge=1 << 16, description="the same for one stream"
    )
    idle_timeout_s: float = Field(
        default=30.0, gt=0, description="seconds of silence that end a session"
    )

    # Deadlines.
    connect_timeout_s: float = Field(
        default=10.0, gt=0, description="seconds until a connection must be up, handshake included"
    )
    request_timeout_s: float = Field(
        default=10.0, gt=0, description="seconds until a request must be answered"
    )

    @model_validator(mode="after")
    def _check_windows(self) -> "Settings":
        if self.stream_window > self.connection_window:
            raise ValueError(
                f"stream_window is {self.stream_window}, "
                f"expected at most connection_window, {self.connection_window}"
            )
        return self


class ScopedSettings(Settings):
    """What every command can be told that belongs to a scope."""

    scope_key_file: Path | None = Field(
        default=None, description="file with the scope key, raw or in hex, at least 32 octets"
    )
    scope_key: SecretStr | None = Field(
        default=None, description="the scope key itself, in hex; not a flag"
    )

    def load_scope_key(self) -> ScopeKey:
        """Return the scope key.

        Raises:
            ConfigError: If there is none or two, or if it cannot be read or is too short.
        """
        if self.scope_key is not None and self.scope_key_file is not None:
            raise ConfigError("scope_key and scope_key_file are both set, expected one of them")
        if self.scope_key_file is not None:
            return ScopeKey.from_file(self.scope_key_file)
        if self.scope_key is None:
            raise ConfigError(
                "no scope key: set scope_key_file (--scope-key-file, KVCS_SCOPE_KEY_FILE) "
                "or KVCS_SCOPE_KEY"
            )
        try:
            secret = bytes.fromhex(self.scope_key.get_secret_value().strip())
        except ValueError:
            raise ConfigError("scope_key is not hex") from None
        return ScopeKey(secret)


class IndexedSettings(ScopedSettings):
    """What those commands can be told that tell an index, or ask one."""

    index_uri: ServiceSetting | None = Field(
        default=None,
        description="index to be listed at, or to ask who covers most, https://HOST:PORT/PATH",
    )
    index_token_file: Path | None = Field(
        default=None, description="file with the token that the index knows us by"
    )

    @model_validator(mode="after")
    def _check_index(self) -> "IndexedSettings":
        if self.index_uri is not None and self.index_token_file is None:
            raise ValueError("index_token_file is not set, expected a file since index_uri is")
        return self


class ProducerSettings(IndexedSettings):
    """What ``kvcs produce`` can be told."""

    table: ClassVar[str] = "produce"

    listen: AddressSetting | None = Field(
        default=None, description="address and UDP port to listen on, such as 127.0.0.1:4443"
    )
    connect: UrisSetting = Field(
        default=(), description="relays to dial and to announce at, moqt://HOST:PORT/PATH"
    )
    certificate_file: Path | None = Field(
        default=None, description="PEM file with the certificate chain to listen with"
    )
    key_file: Path | None = Field(default=None, description="PEM file with the certificate's key")
    producer_key_file: Path | None = Field(
        default=None,
        description="PEM file with the key that signs manifests; plain manifests without it",
    )
    encodings: NamesSetting = Field(
        default=("raw",),
        description="forms to offer: CODEC for k and v apart, kv.CODEC for one track; codecs are "
        "raw, shuffle-zstd, shuffle-lz4 (lossless), int8, fp8 (lossy, k and v apart)",
    )
    http_listen: AddressSetting | None = Field(
        default=None, description="address and TCP port to serve blocks at over HTTPS"
    )
    tokens_file: Path | None = Field(
        default=None,
        description="file of mode 0600 with who may ask over HTTPS, a line each: SCOPE_ID RIGHTS "
        "TOKEN",
    )
    reached_at: PlacesSetting = Field(
        default=(),
        description="where others reach us, as the index is told: moqt://HOST:PORT/PATH and "
        "https://HOST:PORT/PATH (default: the relays, and the addresses listened on)",
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
    max_connections: int = Field(
        default=1024, ge=1, description="connections at once; more are refused"
    )
    drain_s: float = Field(
        default=10.0,
        ge=0,
        description="seconds for sessions to end after SIGTERM before they are closed",
    )

    @model_validator(mode="after")
    def _check_listener(self) -> "ProducerSettings":
        if self.listen is None and not self.connect:
            raise ValueError("neither listen nor connect is set, expected one of them or both")
        if self.listen is not None or self.http_listen is not None:
            for name in ("certificate_file", "key_file"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is not set, expected a PEM file to listen with")
        if self.http_listen is not None and self.tokens_file is None:
            raise ValueError("tokens_file is not set, expected a file since http_listen is")
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
        if self.require_signature and not self.trust:
            raise ValueError("trust is not set, expected a public key since require_signature is")
        return self

    def load_trusted_keys(self) -> dict[bytes, PublicKey]:
        """Return the public keys that are believed, by key identifier.

        Raises:
            ConfigError: If a file cannot be used; the message names it.
        """
        return trusted_keys(self.trust)


class RelaySettings(Settings):
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
    drain_s: float = Field(
        default=10.0,
        ge=0,
        description="seconds for sessions to end after SIGTERM before they are closed",
    )
    max_connections: int = Field(
        default=1024, ge=1, description="connections at once; more are refused"
    )
    max_requests: int = Field(
        default=4096, ge=1, description="requests of one session at once; more are refused"
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
    max_filter_ranges: int = Field(
        default=64, ge=0, description="ranges in the filters of one request"
    )
    max_request_updates: int = Field(
        default=32, ge=1, description="unanswered updates of one request; more end the session"
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


class StoreSettings(ScopedSettings):
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
    listen: AddressSetting | None = Field(
        default=None, description="address and UDP port to serve on, such as 0.0.0.0:4443"
    )
    announce: UrisSetting = Field(
        default=(), description="relays to announce at what is held whole, moqt://HOST:PORT/PATH"
    )
    certificate_file: Path | None = Field(
        default=None, description="PEM file with the certificate chain to listen with"
    )
    key_file: Path | None = Field(default=None, description="PEM file with the certificate's key")
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
    at_once: int = Field(
        default=16, ge=1, description="publications that are brought at the same time"
    )
    stall_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds without anything new until one is left alone"
    )
    max_connections: int = Field(
        default=1024, ge=1, description="connections at once; more are refused"
    )
    drain_s: float = Field(
        default=10.0,
        ge=0,
        description="seconds for sessions to end after SIGTERM before they are closed",
    )

    @model_validator(mode="after")
    def _check_ways(self) -> "StoreSettings":
        if self.listen is None and not self.connect and not self.announce:
            raise ValueError("none of connect, listen and announce is set, expected one at least")
        if self.listen is not None:
            for name in ("certificate_file", "key_file"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is not set, expected a PEM file to listen with")
        if self.require_signature and not self.trust:
            raise ValueError("trust is not set, expected a public key since require_signature is")
        return self

    def load_trusted_keys(self) -> dict[bytes, PublicKey]:
        """Return the public keys that are believed, by key identifier.

        Raises:
            ConfigError: If a file cannot be used; the message names it.
        """
        return trusted_keys(self.trust)


class IndexSettings(CommonSettings):
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

S = TypeVar("S", bound=CommonSettings)


class Origin(NamedTuple):
    """Where a value came from, in words for messages: ``--listen``, ``KVCS_LISTEN``, a file."""

    text: str


def add_settings(
    parser: ArgumentParser, cls: type[CommonSettings], *, but: Collection[str] = ()
) -> None:
    """Declare a flag for every setting that is not secret, and ``--config``; ``but`` these."""
    parser.allow_abbrev = False  # --scope-key must be an error, and not --scope-key-file
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=SUPPRESS,
        help=f"TOML file with settings (default: {DEFAULT_FILE} if there is one)",
    )
    group = parser.add_argument_group(
        "settings", f"also {ENV_PREFIX}NAME in the environment, or name = value in the file"
    )
    for name, field in cls.model_fields.items():
        if _is_secret(field) or name in but:
            continue
        options: dict[str, Any] = {"dest": name, "default": SUPPRESS, "help": _help(field)}
        if field.annotation is bool:
            options["action"] = BooleanOptionalAction
        else:
            options["metavar"] = _metavar(field)
            if _is_many(field):
                options["action"] = _Collect
        group.add_argument(_flag(name), *_ALSO.get(name, ()), **options)


class _Collect(Action):
    """Gather a flag that may be given several times, each with values separated by commas."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        gathered = [*getattr(namespace, self.dest, ())]
        gathered += [part.strip() for part in str(values).split(",") if part.strip()]
        setattr(namespace, self.dest, gathered)


def settings_from(cls: type[S], args: Namespace, *, environ: Mapping[str, str] | None = None) -> S:
    """Put together what flags, environment and file say.

    Args:
        cls: The settings of the command.
        args: What the parser made of the flags that :func:`add_settings` declared.
        environ: The environment; the process's by default.

    Raises:
        ConfigError: In one line: what is wrong, where it came from, what was expected.
    """
    variables = os.environ if environ is None else environ
    found: dict[str, tuple[Any, Origin]] = {}
    found |= _from_file(cls, getattr(args, "config", None) or variables.get("KVCS_CONFIG"))
    found |= _from_environment(cls, variables)
    found |= {
        name: (getattr(args, name), Origin(_flag(name)))
        for name in cls.model_fields
        if hasattr(args, name)
    }
    try:
        return cls(**{name: value for name, (value, _) in found.items()})
    except ValidationError as exc:
        raise ConfigError(
            "; ".join(_explain(cls, error, found) for error in exc.errors(include_url=False))
        ) from None


def origins_of(
    cls: type[CommonSettings], args: Namespace, *, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return, for each setting that is set at all, where its value comes from."""
    variables = os.environ if environ is None else environ
    found = _from_file(cls, getattr(args, "config", None) or variables.get("KVCS_CONFIG"))
    found |= _from_environment(cls, variables)
    told = {name: origin.text for name, (_, origin) in found.items()}
    return told | {name: _flag(name) for name in cls.model_fields if hasattr(args, name)}


def _from_environment(
    cls: type[CommonSettings], variables: Mapping[str, str]
) -> dict[str, tuple[Any, Origin]]:
    found: dict[str, tuple[Any, Origin]] = {}
    known = {f"{ENV_PREFIX}{name.upper()}" for name in _all_names()} | _OTHER_VARIABLES
    for variable, value in variables.items():
        if not variable.startswith(ENV_PREFIX) or _PLATFORM_VARIABLE.fullmatch(variable):
            continue
        if variable not in known:
            raise ConfigError(f"{variable} is not a setting{_suggest(variable, known)}")
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in cls.model_fields:
            found[name] = value, Origin(variable)
    return found


def _from_file(cls: type[CommonSettings], named: str | None) -> dict[str, tuple[Any, Origin]]:
    path = Path(named or DEFAULT_FILE)
    try:
        members = tomllib.loads(path.read_text())
    except FileNotFoundError as exc:
        if named is None:
            return {}
        raise ConfigError(f"settings file {path}: {exc.strerror}") from None
    except OSError as exc:
        raise ConfigError(f"settings file {path}: {exc.strerror or exc}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"settings file {path}: not TOML: {exc}") from None
    tables = {other.table: other for other in SETTINGS}
    found: dict[str, tuple[Any, Origin]] = {}
    for name, value in members.items():
        if name in tables and isinstance(value, dict):
            continue
        _check_known(path, name, _all_names(), tables)
        if name in cls.model_fields:
            found[name] = value, Origin(str(path))
    for table, other in tables.items():
        inner = members.get(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"settings file {path}: {table} is not a table, expected [{table}]")
        for name, value in inner.items():
            _check_known(path, name, other.model_fields, ())
            if other.table == cls.table:
                found[name] = value, Origin(f"{path} [{table}]")
    return found


def _check_known(path: Path, name: str, known: Iterable[str], tables: Iterable[str]) -> None:
    if name not in set(known):
        raise ConfigError(
            f"settings file {path}: {name} is not a setting{_suggest(name, [*known, *tables])}"
        )


def _all_names() -> set[str]:
    return {name for cls in SETTINGS for name in cls.model_fields}


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _explain(
    cls: type[CommonSettings], error: ErrorDetails, found: Mapping[str, tuple[Any, Origin]]
) -> str:
    """Put one complaint of the validator in our words."""
    message = error["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "expected")
    if not error["loc"]:
        return message  # a check of several settings, which names them itself
    name = str(error["loc"][0])
    field = cls.model_fields.get(name)
    if error["type"] == "missing":
        return f"{name} is not set ({_flag(name)} or {ENV_PREFIX}{name.upper()}): {_help(field)}"
    if field is None:
        return f"{name} is not a setting{_suggest(name, cls.model_fields)}"
    value, origin = found.get(name, ("", Origin("default")))
    shown = "a value" if _is_secret(field) else f"{value!r:.100}"
    if not message.startswith("expected") and "expected" not in message:
        message = f"expected otherwise: {message}"
    return f"{name} is {shown} (from {origin.text}), {message}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: FieldInfo | None) -> str:
    if field is None:
        return ""
    default = field.get_default()
    if field.is_required() or default is None or default == ():
        return field.description or ""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{field.description} (default: {shown})"


def _metavar(field: FieldInfo) -> str:
    kinds = _kinds(field.annotation)
    readers = [m.func for m in field.metadata if isinstance(m, BeforeValidator)]
    if parse_datagram in readers:
        return "auto|N"
    if Address in kinds:
        return "HOST:PORT"
    if Path in kinds:
        return "FILE"
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    if int in kinds:
        return "N"
    if {parse_uris, parse_service, parse_services, parse_places} & set(readers):
        return "URI"
    return "SECONDS" if float in kinds else "TEXT"


def _is_many(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in _kinds(field.annotation)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of."""
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation)))
