from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from kvcs.config import (
    SETTINGS,
    Access,
    Address,
    CommonSettings,
    ConsumerSettings,
    ListeningSettings,
    ProducerSettings,
    RelaySettings,
    StoreSettings,
    add_settings,
    origins_of,
    settings_from,
)
from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.trust.scope import Protection, Scope, Suite
from kvcs.trust.scopefile import new_scope

S = TypeVar("S", bound=CommonSettings)
RELAY = "moqt://relay.example:4443/"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty folder, so that no kvcs.toml is found by chance."""
    monkeypatch.chdir(tmp_path)


def read(cls: type[S], *flags: str, env: Mapping[str, str] | None = None) -> S:
    parser = ArgumentParser()
    add_settings(parser, cls)
    return settings_from(cls, parser.parse_args(flags), environ=env or {})


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    (tmp_path / "kvcs.toml").write_text(
        f'connect = ["{RELAY}"]\nttl_s = 1\nidle_timeout_s = 1\nlog_level = "error"\n'
    )
    env = {"KVCS_IDLE_TIMEOUT_S": "2", "KVCS_LOG_LEVEL": "debug"}

    settings = read(ProducerSettings, "--log-level", "warning", env=env)
    assert (settings.ttl_s, settings.idle_timeout_s, settings.log_level) == (1, 2, "warning")
    parser = ArgumentParser()
    add_settings(parser, ProducerSettings)
    args = parser.parse_args(["--log-level", "warning"])
    assert origins_of(ProducerSettings, args, environ=env) == {
        "connect": "kvcs.toml",
        "ttl_s": "kvcs.toml",
        "idle_timeout_s": "KVCS_IDLE_TIMEOUT_S",
        "log_level": "--log-level",
    }


def test_a_table_of_the_file_is_for_its_command_alone_and_beats_the_top(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text(
        f'connect = ["{RELAY}"]\nidle_timeout_s = 5\ndeadline_s = 7\n'
        "[produce]\nidle_timeout_s = 6\n[consume]\ndeadline_s = 8\n"
    )

    producer = read(ProducerSettings, "--config", str(file))
    consumer = read(ConsumerSettings, env={"KVCS_CONFIG": str(file)})
    assert (producer.idle_timeout_s, consumer.idle_timeout_s) == (6, 5)
    assert consumer.deadline_s == 8


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        read(ConsumerSettings, "--config", str(tmp_path / "missing.toml"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ttl = 3", r"kvcs\.toml: ttl is not a setting; did you mean ttl_s\?"),
        ("[produce]\nlissen = 1", r"lissen is not a setting; did you mean listen\?"),
        ("[produce]\ndeadline_s = 1", "deadline_s is not a setting"),
        ("[prodce]\nttl_s = 1", r"prodce is not a setting; did you mean produce\?"),
        ("produce = 1", "produce is not a setting"),
        ("ttl_s = ", "not TOML"),
        ("ttl_s = 'x'", r"ttl_s is 'x' \(from kvcs\.toml\), expected a valid number"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "kvcs.toml").write_text(text)

    with pytest.raises(ConfigError, match=complaint):
        read(ProducerSettings, "--connect", RELAY)


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"KVCS_LISTN": "x"}, r"KVCS_LISTN is not a setting; did you mean KVCS_LISTEN\?"),
        ({"KVCS_QQQQQQQQ": "x"}, "KVCS_QQQQQQQQ is not a setting$"),
        ({"KVCS_LISTEN": "x"}, r"listen is 'x' \(from KVCS_LISTEN\), expected HOST:PORT"),
        ({"KVCS_STORE_OCTETS": "much"}, r"'much' \(from KVCS_STORE_OCTETS\), expected octets"),
        ({"KVCS_LOG_FORMAT": "xml"}, r"log_format is 'xml' .*expected 'auto', 'text' or 'json'"),
        ({"KVCS_DETERMINISTIC": "maybe"}, "deterministic is 'maybe'"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(env: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(ProducerSettings, "--connect", RELAY, env=env)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--listen", "host"], r"listen is 'host' \(from --listen\), expected HOST:PORT"),
        (["--listen", "host:99999"], "port of 0 to 65535"),
        (["--manifest-every", "9"], r"manifest_every is '9' .*less than or equal to 8"),
        (
            ["--max-datagram-octets", "100"],
            "is '100' .*expected auto, or octets from 1200 to 16000",
        ),
        (["--max-datagram-octets", "16001"], "expected auto, or octets from 1200 to 16000"),
        (["--max-datagram-octets", "large"], "is 'large' .*expected auto, or octets from 1200"),
        (["--connect", "https://relay"], "expected moqt://HOST:PORT/PATH instead of 'https"),
        (["--stream-window", "32MiB"], "stream_window is 33554432, expected at most"),
        (["--listen", ":1"], "certificate_file is not set, expected a PEM file"),
        (["--listen", ":1", "--certificate-file", "x"], "key_file is not set"),
    ],
)
def test_a_wrong_flag_is_one_line_that_says_what_was_found_and_expected(
    flags: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        read(ProducerSettings, "--connect", RELAY, *flags)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("told", "octets"),
    [("'auto'", None), ("'1452'", 1452), ("1452", 1452), ("16000", 16_000), ("1200", 1200)],
)
def test_a_size_of_datagrams_is_a_number_or_found(
    tmp_path: Path, told: str, octets: int | None
) -> None:
    (tmp_path / "kvcs.toml").write_text(f"max_datagram_octets = {told}\n")

    flags = ["--connect", RELAY]
    assert read(ConsumerSettings, *flags).max_datagram_octets == octets
    flags += ["--max-datagram-octets", told.strip("'")]
    assert read(ConsumerSettings, *flags).max_datagram_octets == octets


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read(ProducerSettings, "--connect", RELAY, "--ttl-s", "0", "--drain-s", "-1")
    assert {part.split()[0] for part in str(refused.value).split("; ")} == {"ttl_s", "drain_s"}


def test_what_must_be_set_is_named_with_its_flag_and_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"connect is not set \(--connect or KVCS_CONNECT\)"):
        read(ConsumerSettings)
    with pytest.raises(ConfigError, match="neither listen nor connect"):
        read(ProducerSettings)


def test_variables_that_platforms_put_there_are_no_settings() -> None:
    env = {
        "KVCS_PORT": "udp://10.0.0.1:4443",
        "KVCS_SERVICE_HOST": "10.0.0.1",
        "KVCS_PORT_4443_UDP_ADDR": "10.0.0.1",
        "KVCS_RELAY_SERVICE_PORT": "4443",
        "KVCS_MODEL_DIR": "models",
        "KVCS_PYTHON": "python3.12",
        "OTHER": "x",
    }

    assert read(ProducerSettings, "--connect", RELAY, env=env).connect == (RELAY,)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:4443", ("127.0.0.1", 4443)),
        ("[::1]:0", ("::1", 0)),
        (":4443", ("::", 4443)),
        ("relay.example:1", ("relay.example", 1)),
    ],
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    flags = ["--listen", text, "--certificate-file", "c", "--key-file", "k", "--insecure-open"]

    assert read(ProducerSettings, *flags).listen == Address(*address)


LISTENING = ("--listen", "0.0.0.0:4443", "--certificate-file", "c", "--key-file", "k")


@pytest.mark.parametrize("kind", [ProducerSettings, RelaySettings, StoreSettings])
@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["--listen", "127.0.0.1:4443"], Access.LOOPBACK),
        (["--listen", "[::1]:4443"], Access.LOOPBACK),
        (["--listen", "localhost:4443"], Access.LOOPBACK),
        (["--issuers-file", "i"], Access.AUTHORIZED),
        (["--issuers-file", "i", "--client-ca-file", "ca"], Access.AUTHORIZED),
        (["--client-ca-file", "ca"], Access.CERTIFIED),
        (["--insecure-open"], Access.EVERYBODY),
    ],
)
def test_who_is_let_in_follows_from_the_settings(
    kind: type[ListeningSettings], more: list[str], found: Access
) -> None:
    assert read(kind, *LISTENING, *more).access is found


@pytest.mark.parametrize("kind", [ProducerSettings, RelaySettings, StoreSettings])
@pytest.mark.parametrize("listen", ["0.0.0.0:4443", ":4443", "192.0.2.1:4443", "relay.example:1"])
def test_nobody_listens_for_everybody_without_saying_so(
    kind: type[ListeningSettings], listen: str
) -> None:
    complaint = "where anybody could do everything: expected issuers_file, client_ca_file, a loop"
    with pytest.raises(ConfigError, match=complaint):
        read(kind, *LISTENING, "--listen", listen)


@pytest.mark.parametrize("name", ["audience", "revocations-file"])
def test_what_tokens_are_held_against_is_nothing_without_issuers(name: str) -> None:
    with pytest.raises(ConfigError, match="issuers_file is not set, expected a file since"):
        read(RelaySettings, *LISTENING, "--insecure-open", f"--{name}", "x")


def test_who_does_not_listen_lets_nobody_in() -> None:
    assert read(ProducerSettings, "--connect", RELAY).access is Access.NOBODY


@pytest.mark.parametrize(
    ("text", "octets"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("4 GB", 4 * 10**9),
        ("2gi", 2 << 30),
        ("1k", 1000),
    ],
)
def test_octets_have_units(text: str, octets: int) -> None:
    settings = read(ProducerSettings, "--connect", RELAY, "--store-octets", text)

    assert settings.store_octets == octets


def test_a_list_is_repeated_as_a_flag_and_separated_by_commas_elsewhere() -> None:
    other = "moqt://other.example:1"

    for settings in (
        read(ProducerSettings, "--connect", RELAY, "--connect", other),
        read(ProducerSettings, "--connect", f"{RELAY},{other}"),
        read(ProducerSettings, env={"KVCS_CONNECT": f"{RELAY}, {other}"}),
    ):
        assert settings.connect == (RELAY, other)


def test_a_switch_can_be_turned_off_again() -> None:
    env = {"KVCS_INSECURE_SKIP_VERIFY": "true", "KVCS_CONNECT": RELAY}

    assert read(ConsumerSettings, env=env).insecure_skip_verify
    assert not read(ConsumerSettings, "--no-insecure-skip-verify", env=env).insecure_skip_verify
    assert not read(ConsumerSettings, "--connect", RELAY).insecure_skip_verify


def test_a_signature_cannot_be_required_of_nobody() -> None:
    with pytest.raises(ConfigError, match="trust is not set"):
        read(ConsumerSettings, "--connect", RELAY, "--require-signature")


# -- secrets -------------------------------------------------------------------------------------

SECRET = "5e" * 32


def test_a_secret_has_no_flag_not_even_by_abbreviation(capsys: pytest.CaptureFixture[str]) -> None:
    for cls in SETTINGS:
        with pytest.raises(SystemExit):
            read(cls, "--connect", RELAY, "--scope-key", SECRET)
        assert "unrecognized arguments" in capsys.readouterr().err


def test_the_scope_key_comes_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scope.key"
    file.write_text(SECRET)

    for settings in (
        read(ProducerSettings, "--connect", RELAY, env={"KVCS_SCOPE_KEY": SECRET}),
        read(ProducerSettings, "--connect", RELAY, "--scope-key-file", str(file)),
    ):
        assert settings.load_scope_key() == ScopeKey(bytes.fromhex(SECRET))
        assert SECRET not in repr(settings)
        assert SECRET not in str(settings)


@pytest.mark.parametrize(
    ("flags", "env", "complaint"),
    [
        ([], {}, "no scope key: set scope_file .*, scope_key_file"),
        (["--scope-key-file", "x"], {"KVCS_SCOPE_KEY": SECRET}, "both set"),
        (["--scope-key-file", "x"], {}, "scope key file x: No such file"),
        ([], {"KVCS_SCOPE_KEY": "5e5e"}, "scope key has 2 octets, at least 32"),
        ([], {"KVCS_SCOPE_KEY": "secret!"}, "scope_key is not hex"),
    ],
)
def test_a_scope_key_that_cannot_be_used_is_refused_without_showing_it(
    flags: list[str], env: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        read(ProducerSettings, "--connect", RELAY, *flags, env=env).load_scope_key()
    assert "5e5e" not in str(refused.value)
    assert "secret!" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "protection"),
    [
        ([], None),
        (["--sealing", "clear"], None),
        (["--sealing", "sealed"], Protection()),
        (
            ["--sealing", "sealed", "--suite", "aes-256-gcm", "--padding", "bucket"],
            Protection(Suite.AES_256_GCM_SHA512_128, "bucket"),
        ),
    ],
)
def test_a_scope_is_sealed_if_that_is_said(flags: list[str], protection: Protection | None) -> None:
    env = {"KVCS_SCOPE_KEY": SECRET}
    for cls in (ProducerSettings, ConsumerSettings, StoreSettings):
        scope = read(cls, "--connect", RELAY, *flags, env=env).load_scope()
        assert scope == Scope(ScopeKey(bytes.fromhex(SECRET)), protection)


@pytest.mark.parametrize("flags", [["--suite", "aes-256-gcm"], ["--padding", "none"]])
@pytest.mark.parametrize("clear", [[], ["--sealing", "clear"]])
def test_how_objects_are_sealed_is_not_said_where_they_are_not(
    flags: list[str], clear: list[str]
) -> None:
    settings = read(
        ProducerSettings, "--connect", RELAY, *clear, *flags, env={"KVCS_SCOPE_KEY": SECRET}
    )

    with pytest.raises(ConfigError, match=f"{flags[0][2:]} is '{flags[1]}', expected sealing"):
        settings.load_scope()


def test_a_secret_of_a_wrong_type_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "kvcs.toml").write_text("scope_key = 123456789")

    with pytest.raises(ConfigError, match="scope_key is a value") as refused:
        read(ProducerSettings, "--connect", RELAY)
    assert "123456789" not in str(refused.value)


def test_a_scope_comes_from_files_of_which_the_first_is_published_in(tmp_path: Path) -> None:
    paths = [tmp_path / "current.toml", tmp_path / "previous.toml"]
    current, previous = (new_scope(path, Protection()) for path in paths)
    settings = read(
        ProducerSettings, "--connect", RELAY, *(f"--scope-file={path}" for path in paths)
    )

    assert settings.load_scopes() == (current, previous)
    assert settings.load_scope() == current
    assert settings.load_scope_key() == current.key
    by_variable = {"KVCS_SCOPE_FILE": ",".join(map(str, paths))}
    again = read(ProducerSettings, "--connect", RELAY, env=by_variable)
    assert again.load_scopes() == (current, previous)


def test_a_scope_is_told_in_one_way_and_once(tmp_path: Path) -> None:
    file = tmp_path / "scope.toml"
    new_scope(file, None)
    (tmp_path / "same.toml").write_bytes(file.read_bytes())
    (tmp_path / "same.toml").chmod(0o600)
    told = ["--connect", RELAY, "--scope-file", str(file)]

    for more, env, complaint in (
        (["--scope-key-file", "x"], {}, "scope_file and scope_key_file are both set"),
        ([], {"KVCS_SCOPE_KEY": SECRET}, "scope_file and scope_key are both set"),
        (["--scope-file", str(tmp_path / "same.toml")], {}, "names the scope [0-9a-f]{8} twice"),
        (["--scope-file", "none"], {}, "scope file none: No such file"),
    ):
        settings = read(ProducerSettings, *told, *more, env=env)
        with pytest.raises(ConfigError, match=complaint):
            settings.load_scope()


@pytest.mark.parametrize(
    ("protection", "flags", "says"),
    [
        (Protection(), ["--sealing", "clear"], "sealing is 'clear', but scope file .* 'sealed'"),
        (None, ["--sealing", "sealed"], "sealing is 'sealed', but scope file .* says 'clear'"),
        (None, ["--suite", "aes-128-gcm"], "suite is 'aes-128-gcm', but .* sealing is clear"),
        (Protection(), ["--suite", "aes-256-gcm"], "but scope file .* says 'aes-128-gcm'"),
        (Protection(), ["--padding", "none"], "padding is 'none', but scope file .* says 'auto'"),
    ],
)
def test_settings_beat_no_scope_file_and_a_contradiction_is_told(
    protection: Protection | None, flags: list[str], says: str, tmp_path: Path
) -> None:
    made = new_scope(tmp_path / "scope.toml", protection)
    told = ["--connect", RELAY, "--scope-file", str(tmp_path / "scope.toml")]

    with pytest.raises(ConfigError, match=says):
        read(ProducerSettings, *told, *flags).load_scope()
    agreeing = ["--sealing", "clear" if protection is None else "sealed"]
    assert read(ProducerSettings, *told, *agreeing).load_scope() == made


def test_clients_are_named_only_where_their_cas_are(tmp_path: Path) -> None:
    listening = ["--listen", ":1", "--certificate-file", "c", "--key-file", "k"]
    for flags, complaint in (
        (["--client-names", "spiffe://a/*"], "client_ca_file is not set, expected a PEM file"),
        (["--client-key-file", "k"], "client_certificate_file is not set, expected a PEM file"),
        (["--client-certificate-file", "k"], "client_key_file is not set, expected a PEM file"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read(ProducerSettings, *listening, *flags)


def test_a_producer_key_is_read_from_its_file(tmp_path: Path) -> None:
    settings = read(ProducerSettings, "--connect", RELAY, "--producer-key-file", "nothing.pem")

    with pytest.raises(ConfigError, match=r"producer key file nothing\.pem"):
        settings.load_producer_key()
    assert read(ProducerSettings, "--connect", RELAY).load_producer_key() is None


def test_settings_made_in_code_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCS_TTL_S", "1")

    assert ProducerSettings(connect=(RELAY,)).ttl_s == 3600


# -- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", SETTINGS)
def test_every_setting_is_described_and_all_but_secrets_have_a_flag(
    cls: type[CommonSettings],
) -> None:
    parser = ArgumentParser()
    add_settings(parser, cls)
    flags = {flag for action in parser._actions for flag in action.option_strings}

    for name, field in cls.model_fields.items():
        assert field.description, name
        assert ("--" + name.replace("_", "-") in flags) == (name != "scope_key"), name
    assert "default: 30.0" in " ".join(parser.format_help().split())
