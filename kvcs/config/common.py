"""Settings that several commands have."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvcs.config.access import Access, access
from kvcs.config.readers import (
    AddressSetting,
    DatagramSetting,
    NamesSetting,
    OctetsSetting,
    PathsSetting,
    PlacesSetting,
    ServiceSetting,
)
from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.telemetry import LogFormat
from kvcs.trust.scope import SUITES, Padding, Protection, Scope
from kvcs.trust.scopefile import read_scope

ENV_PREFIX = "KVCS_"


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
    client_certificate_file: Path | None = Field(
        default=None,
        description="PEM file with the certificate chain to show to who asks for one",
    )
    client_key_file: Path | None = Field(
        default=None, description="PEM file with that certificate's key"
    )
    token_file: Path | None = Field(
        default=None,
        description="file of mode 0600 with the token to show to whom we dial; read again for each "
        "connection",
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

    @property
    def issuers_in_scope(self) -> Path | None:
        """The scope file whose issuers are believed; None: there is none, or it lists none."""
        return None

    @model_validator(mode="after")
    def _check_client_certificate(self) -> "Settings":
        if (self.client_certificate_file is None) != (self.client_key_file is None):
            found, missing = "client_certificate_file", "client_key_file"
            if self.client_certificate_file is None:
                found, missing = missing, found
            raise ValueError(f"{missing} is not set, expected a PEM file since {found} is")
        return self

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

    scope_file: PathsSetting = Field(
        default=(),
        description="file of mode 0600 with a scope, as kvcs keys new-scope makes it: the key, how "
        "objects are sealed, whose manifests and tokens are believed. Of several the first is "
        "published in, and consumers look in all",
    )
    scope_key_file: Path | None = Field(
        default=None,
        description="instead, file with the scope key alone, raw or in hex, at least 32 octets",
    )
    scope_key: SecretStr | None = Field(
        default=None, description="the scope key itself, in hex; not a flag"
    )
    sealing: Literal["sealed", "clear"] | None = Field(
        default=None,
        description="sealed: objects of the scope are sealed, so that nobody outside can read or "
        "make them, and others are not used; clear, the default: the reverse",
    )
    suite: Literal["aes-128-gcm", "aes-256-gcm"] | None = Field(
        default=None, description="what objects are sealed with; aes-128-gcm if left out"
    )
    padding: Padding | None = Field(
        default=None,
        description="which sealed objects are made longer, so that lengths tell less: auto, the "
        "default, those of codecs whose lengths depend on content; none; or bucket, all",
    )

    @property
    def issuers_in_scope(self) -> Path | None:
        """The scope file whose issuers are believed: the one published in, if it lists any."""
        if not self.scope_file:
            return None
        try:
            return self.scope_file[0] if read_scope(self.scope_file[0]).issuers else None
        except ConfigError:
            return None  # which is told when the scope is loaded

    def load_scope_key(self) -> ScopeKey:
        """Return the scope key.

        Raises:
            ConfigError: If there is none or two, or if it cannot be read or is too short.
        """
        return self.load_scope().key

    def load_scope(self) -> Scope:
        """Return the scope that is published in: its key, and what goes with it.

        Raises:
            ConfigError: As :meth:`load_scopes` does.
        """
        return self.load_scopes()[0]

    def load_scopes(self) -> tuple[Scope, ...]:
        """Return all scopes, the one that is published in first.

        Raises:
            ConfigError: If there is none, or it is told in two ways, or a file or key cannot be
                used, or settings contradict a file; the message names what it is about.
        """
        told = [n for n in ("scope_file", "scope_key_file", "scope_key") if getattr(self, n)]
        if len(told) > 1:
            raise ConfigError(f"{' and '.join(told)} are both set, expected one of them")
        if not told:
            raise ConfigError(
                "no scope key: set scope_file (--scope-file, KVCS_SCOPE_FILE), scope_key_file "
                "(--scope-key-file, KVCS_SCOPE_KEY_FILE) or KVCS_SCOPE_KEY"
            )
        if not self.scope_file:
            return (Scope(self._load_bare_key(), self.load_protection()),)
        scopes = tuple(read_scope(path) for path in self.scope_file)
        for number, scope in enumerate(scopes):
            self._check_agrees(self.scope_file[number], scope.protection)
            if scope.key in [before.key for before in scopes[:number]]:
                raise ConfigError(
                    f"scope_file names the scope {scope.key.scope_id.hex()[:8]} twice, expected "
                    "another one"
                )
        return scopes

    def _load_bare_key(self) -> ScopeKey:
        if self.scope_key_file is not None:
            return ScopeKey.from_file(self.scope_key_file)
        # Raised where no variable holds a secret: some programs print those of a traceback.
        key, wrong = _key_from_hex(self.scope_key)
        if key is None:
            raise ConfigError(wrong)
        return key

    def load_protection(self) -> Protection | None:
        """Return how the settings say that objects are sealed; None: they go in clear.

        Where there is a scope file, that says so instead, and settings may only agree.

        Raises:
            ConfigError: If it is said how objects are sealed that are not.
        """
        if self.sealing == "sealed":
            return Protection(SUITES[self.suite or "aes-128-gcm"], self.padding or "auto")
        for name in ("suite", "padding"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name} is {value!r}, expected sealing to be sealed then")
        return None

    def _check_agrees(self, file: Path, found: Protection | None) -> None:
        """Refuse settings that say otherwise than a scope file: neither beats the other."""
        suites = {suite: name for name, suite in SUITES.items()}
        for name, says in (
            ("sealing", "clear" if found is None else "sealed"),
            ("suite", None if found is None else suites[found.suite]),
            ("padding", None if found is None else found.padding),
        ):
            told = getattr(self, name)
            if told is not None and told != says:
                raise ConfigError(
                    f"{name} is {told!r}, but scope file {file} says "
                    f"{'sealing is clear' if says is None else repr(says)}: leave it out"
                )


def _key_from_hex(secret: SecretStr | None) -> tuple[ScopeKey | None, str]:
    """Return the key, or what is wrong with it."""
    assert secret is not None, "that is how it was found to be told"
    try:
        return ScopeKey(bytes.fromhex(secret.get_secret_value().strip())), ""
    except ConfigError as exc:
        return None, str(exc)
    except ValueError:
        return None, "scope_key is not hex"


class CertifiedSettings(CommonSettings):
    """What every command can be told that shows a certificate to who connects."""

    client_ca_file: Path | None = Field(
        default=None,
        description="PEM file with the CAs of clients: who shows no certificate of theirs is "
        "refused; nobody is asked for one if left out",
    )
    client_names: NamesSetting = Field(
        default=(),
        description="names of clients that may connect, URIs such as spiffe://DOMAIN/PATH or DNS "
        "names, whole or with /* at the end; whomever client_ca_file vouches for if left out",
    )
    watch_s: float = Field(
        default=1.0,
        ge=0,
        description="seconds between looks at certificate files and others that are read again "
        "when they change; 0: only on SIGHUP",
    )

    @model_validator(mode="after")
    def _check_clients(self) -> "CertifiedSettings":
        if self.client_names and self.client_ca_file is None:
            raise ValueError("client_ca_file is not set, expected a PEM file since client_names is")
        return self


class ListeningSettings(CertifiedSettings, Settings):
    """What every command can be told that listens for MOQT sessions."""

    listen: AddressSetting | None = Field(
        default=None, description="address and UDP port to listen on, such as 127.0.0.1:4443"
    )
    certificate_file: Path | None = Field(
        default=None, description="PEM file with the certificate chain to listen with"
    )
    key_file: Path | None = Field(default=None, description="PEM file with the certificate's key")
    max_connections: int = Field(
        default=1024, ge=1, description="connections at once; more are refused"
    )
    max_connections_of_peer: int = Field(
        default=512, ge=1, description="connections at once from one address, an IPv6 network too"
    )
    max_handshakes: int = Field(
        default=128, ge=1, description="handshakes under way, a quarter of them from one address"
    )
    max_handshakes_per_s_of_peer: float = Field(
        default=100.0, gt=0, description="handshakes in a second from one address, on average"
    )
    retry_above: int = Field(
        default=32,
        ge=0,
        description="handshakes under way from which on clients must prove their address",
    )
    max_sessions_of_peer: int = Field(
        default=512, ge=1, description="sessions of one identity, or of one address without tokens"
    )
    max_requests: int = Field(
        default=4096, ge=1, description="requests of one session at once; more are refused"
    )
    max_requests_of_peer: int = Field(
        default=16_384, ge=1, description="requests at once of one identity or address"
    )
    max_requests_per_s: float = Field(
        default=1000.0,
        gt=0,
        description="requests of one session in a second, on average, and as many updates",
    )
    max_requests_per_s_of_peer: float = Field(
        default=2000.0, gt=0, description="requests in a second of one identity or address"
    )
    max_filter_ranges: int = Field(
        default=64, ge=0, description="ranges in the filters of one request"
    )
    max_request_updates: int = Field(
        default=32, ge=1, description="unanswered updates of one request; more end the session"
    )
    max_unread_octets: OctetsSetting = Field(
        default=16 << 20,
        ge=1 << 16,
        description="octets of answers that a session may leave unread; more end it",
    )
    drain_s: float = Field(
        default=10.0,
        ge=0,
        description="seconds for sessions to end after SIGTERM before they are closed",
    )
    audit_file: Path | None = Field(
        default=None,
        description="file that lines of audit are added to, as JSON (default: among the log lines)",
    )

    # Who may ask.
    issuers_file: Path | None = Field(
        default=None,
        description="TOML file with the keys whose tokens are believed; every session and request "
        "needs a token then",
    )
    revocations_file: Path | None = Field(
        default=None, description="file with revoked tokens and keys, lines cti HEX and kid HEX"
    )
    audience: NamesSetting = Field(
        default=(),
        description="names of this endpoint that tokens must be for, moqt://HOST:PORT",
    )
    insecure_open: bool = Field(
        default=False,
        description="listen beyond loopback although anybody may do everything there",
    )

    @property
    def believed_issuers(self) -> Path | None:
        """File with those whose tokens every request needs; None: no token is asked for."""
        return self.issuers_file or self.issuers_in_scope

    @property
    def access(self) -> Access:
        """Who may use what listens for MOQT."""
        return access(
            None if self.listen is None else self.listen.host,
            asks_tokens=self.believed_issuers is not None,
            asks_certificates=self.client_ca_file is not None,
        )

    @model_validator(mode="after")
    def _check_certificate(self) -> "ListeningSettings":
        if self._listens():
            for name in ("certificate_file", "key_file"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is not set, expected a PEM file to listen with")
        return self

    @model_validator(mode="after")
    def _check_access(self) -> "ListeningSettings":
        if self.believed_issuers is None:
            for name in ("revocations_file", "audience"):
                if getattr(self, name):
                    raise ValueError(f"issuers_file is not set, expected a file since {name} is")
        if self.access is Access.EVERYBODY and not self.insecure_open:
            raise ValueError(
                f"listen is {self.listen}, where anybody could do everything: expected "
                "issuers_file, client_ca_file, a loopback address, or insecure_open"
            )
        return self

    def _listens(self) -> bool:
        """Whether a certificate is needed."""
        return self.listen is not None


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


class HoldingSettings(IndexedSettings, ListeningSettings):
    """What those commands can be told that hold publications: serve blocks, and be listed."""

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

    @model_validator(mode="after")
    def _check_tokens(self) -> "HoldingSettings":
        if self.http_listen is not None and self.tokens_file is None:
            raise ValueError("tokens_file is not set, expected a file since http_listen is")
        return self

    def _listens(self) -> bool:
        return self.listen is not None or self.http_listen is not None
