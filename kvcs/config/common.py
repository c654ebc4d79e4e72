"""Settings that several commands have."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvcs.config.readers import (
    AddressSetting,
    DatagramSetting,
    OctetsSetting,
    PlacesSetting,
    ServiceSetting,
)
from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.telemetry import LogFormat
from kvcs.trust.scope import SUITES, Padding, Protection, Scope

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

    def load_scope(self) -> Scope:
        """Return the scope: its key, and what goes with it.

        Raises:
            ConfigError: As :meth:`load_scope_key` does, or if it is said how objects are sealed
                that are not.
        """
        return Scope(self.load_scope_key(), self.load_protection())

    def load_protection(self) -> Protection | None:
        """Return how objects are sealed; None: they go in clear.

        Raises:
            ConfigError: If it is said how objects are sealed that are not.
        """
        if self.sealing == "sealed":
            return Protection(SUITES[self.suite or "aes-128-gcm"], self.padding or "auto")
        for name in ("suite", "padding"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name} is {value!r}, expected sealing to be sealed then")
        return None


class ListeningSettings(Settings):
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
    drain_s: float = Field(
        default=10.0,
        ge=0,
        description="seconds for sessions to end after SIGTERM before they are closed",
    )

    @model_validator(mode="after")
    def _check_certificate(self) -> "ListeningSettings":
        if self._listens():
            for name in ("certificate_file", "key_file"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is not set, expected a PEM file to listen with")
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
