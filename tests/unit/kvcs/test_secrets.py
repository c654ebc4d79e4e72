"""No secret is in any text: of settings, of errors, of tracebacks with all their variables."""

import json
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from kvcs.cli.main import main
from kvcs.config import ProducerSettings, RelaySettings
from kvcs.errors import ConfigError
from kvcs.kvsp.http.tokens import TokenFile, read_token
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.signing import ProducerKey
from kvcs.telemetry import set_up_logging
from kvcs.trust.keyfiles import private_key_from_file
from kvcs.trust.scopefile import new_scope, read_scope
from kvcs.trust.tokenfile import TokenFile as ClientToken
from kvcs.trust.tokenfile import token_to_text
from moqt.aio.tls import ServerTls, TlsSettingsError, load_identity, make_certificates
from tests.issuing import Issuer

SECRET = bytes(range(64, 96))
RELAY = "moqt://relay.example:4443"
#: As text, as hex, as Python shows octets, as PEM: whatever a secret may look like.
Forms = tuple[str, ...]


def forms(secret: bytes) -> Forms:
    return secret.hex(), repr(secret)[2:-1], str(list(secret))[1:-1]


def texts_of(exc: BaseException) -> str:
    """Return all that a program could print of an error: every frame with every variable.

    But that of the test, which knows the secret.
    """
    assert exc.__traceback__ is not None
    below = exc.__traceback__.tb_next
    told = traceback.TracebackException(type(exc), exc, below, capture_locals=True)
    return "".join(told.format()) + repr(exc) + str(vars(exc))


def assert_in_no_text(secrets: Forms, *texts: str) -> None:
    for text in texts:
        for secret in secrets:
            assert secret not in text


def test_a_secret_would_be_found_in_a_traceback() -> None:
    """What the others rely on."""
    with pytest.raises(ValueError, match="no") as caught:
        _raise_with(SECRET.hex())

    assert SECRET.hex() in texts_of(caught.value)


def _raise_with(secret: str) -> None:
    raise ValueError("no" if secret else "none")


# -- settings ------------------------------------------------------------------------------------


def test_settings_show_no_secret_in_any_form() -> None:
    settings = ProducerSettings(connect=(RELAY,), scope_key=SECRET.hex())  # type: ignore[arg-type]

    assert_in_no_text(
        forms(SECRET),
        repr(settings),
        str(settings),
        str(settings.model_dump()),
        str(settings.model_dump(mode="json")),
        settings.model_dump_json(),
        json.dumps(settings.model_dump(), default=str),
        repr(settings.load_scope()),
        str(settings.load_scope()),
    )


def test_a_scope_shows_no_key_and_does_not_travel_in_a_pickle(tmp_path: Path) -> None:
    made = new_scope(tmp_path / "scope.toml", None)
    [line] = [ln for ln in (tmp_path / "scope.toml").read_text().splitlines() if ln[:3] == "key"]
    secret = bytes.fromhex(line.split('"')[1])

    assert_in_no_text(forms(secret), repr(made), str(made), f"{made}")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(made)


# -- files that cannot be used -------------------------------------------------------------------

KEY = f'key = "{SECRET.hex()}"\n'
SCOPES = {
    "not TOML": KEY + "= 5",
    "too short": f'key = "{SECRET[:31].hex()}"',
    "not hex": f'key = "{SECRET.hex()}g"',
    "unknown member": KEY + "other = 5",
    "a key as a name": f'"{SECRET.hex()}" = 5',
    "bad suite": KEY + 'sealing = "sealed"\nsuite = "none"',
    "bad producer": KEY + "[[producers]]\n",
    "bad issuer": KEY + "[[issuers]]\n",
    "too long": KEY + "#" * (1 << 20),
}


@pytest.mark.parametrize("case", SCOPES)
def test_a_scope_file_that_cannot_be_used_shows_nothing(case: str, tmp_path: Path) -> None:
    file = tmp_path / "scope.toml"
    file.touch(mode=0o600)
    file.write_text(SCOPES[case])

    with pytest.raises(ConfigError) as caught:
        read_scope(file)
    assert_in_no_text((*forms(SECRET), SECRET[:31].hex()), texts_of(caught.value))


def test_one_that_others_may_read_shows_nothing_either(tmp_path: Path) -> None:
    file = tmp_path / "scope.toml"
    file.write_text(KEY)
    file.chmod(0o644)

    with pytest.raises(ConfigError) as caught:
        read_scope(file)
    assert_in_no_text(forms(SECRET), texts_of(caught.value))


@pytest.mark.parametrize("content", [SECRET[:31], SECRET.hex()[:-1].encode(), SECRET * 40])
def test_a_scope_key_file_that_cannot_be_used_shows_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "scope.key").write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        ScopeKey.from_file(tmp_path / "scope.key")
    assert_in_no_text((*forms(content), content.decode("latin-1")[:30]), texts_of(caught.value))


@pytest.mark.parametrize("value", [SECRET[:31].hex(), SECRET.hex() + "g"])
def test_a_scope_key_of_the_environment_that_cannot_be_used_shows_nothing(value: str) -> None:
    settings = ProducerSettings(connect=(RELAY,), scope_key=value)  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as caught:
        settings.load_scope()
    assert_in_no_text((value, *forms(SECRET[:31])), texts_of(caught.value))


TOKEN = "s3cr3t-" + "x" * 40
TOKEN_FILES = {
    "others may read it": (f"{'00' * 32} read {TOKEN}", 0o644),
    "a word too many": (f"{'00' * 32} read {TOKEN} more", 0o600),
    "not ASCII": (f"{'00' * 32} read {TOKEN}\n\u00e9", 0o600),
    "twice": (f"{'00' * 32} read {TOKEN}\n" * 2, 0o600),
    "too long": (f"{'00' * 32} read {TOKEN}{'x' * 2000}", 0o600),
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_a_file_of_tokens_that_cannot_be_used_shows_nothing(case: str, tmp_path: Path) -> None:
    text, mode = TOKEN_FILES[case]
    (tmp_path / "tokens").write_text(text)
    (tmp_path / "tokens").chmod(mode)

    for read in (TokenFile.read, read_token):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path / "tokens")
        assert_in_no_text((TOKEN,), texts_of(caught.value))


@pytest.mark.parametrize("case", ["cut", "expired", "others may read it"])
def test_an_authorization_token_that_cannot_be_used_shows_nothing(
    case: str, tmp_path: Path
) -> None:
    token = Issuer().issue(lives_s=-100.0 if case == "expired" else 600.0)
    path = tmp_path / "token"
    path.write_text(token_to_text(token)[: 40 if case == "cut" else None])
    path.chmod(0o644 if case.startswith("others") else 0o600)

    with pytest.raises(ConfigError) as caught:
        ClientToken(path).read(time.time())
    assert_in_no_text(
        (token_to_text(token)[:40], repr(token[:40])[2:-1], token[:40].hex()),
        texts_of(caught.value),
    )


@pytest.mark.parametrize("change", [lambda pem: pem[:-20], lambda pem: b"\0" + pem[:60]])
def test_the_key_of_an_issuer_that_cannot_be_used_shows_nothing(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    pem = ProducerKey.generate().private_pem()
    (tmp_path / "issuer.key").touch(mode=0o600)
    (tmp_path / "issuer.key").write_bytes(change(pem))

    with pytest.raises(ConfigError) as caught:
        private_key_from_file(tmp_path / "issuer.key")
    assert_in_no_text((pem.decode().splitlines()[1][:20],), texts_of(caught.value))


def test_a_producer_key_that_cannot_be_used_shows_nothing(tmp_path: Path) -> None:
    pem = ProducerKey.generate().private_pem()
    (tmp_path / "producer.pem").write_bytes(pem.replace(b"END PRIVATE", b"END PUBLIC"))
    inside = pem.decode().splitlines()[1]

    with pytest.raises(ConfigError) as caught:
        ProducerKey.from_file(tmp_path / "producer.pem")
    assert_in_no_text((inside,), texts_of(caught.value))


@pytest.mark.parametrize(
    "change", [lambda pem: pem.replace(b"END PRIVATE", b"END PUBLIC"), lambda pem: pem]
)
def test_a_certificates_key_that_cannot_be_used_shows_nothing(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    files, other = make_certificates(tmp_path / "a"), make_certificates(tmp_path / "b")
    pem = other.key_file.read_bytes()
    files.key_file.write_bytes(change(pem))  # which is another certificate's

    with pytest.raises(TlsSettingsError) as caught:
        load_identity(ServerTls(files.certificate_file, files.key_file))
    assert_in_no_text(tuple(pem.decode().splitlines()[1:-1]), texts_of(caught.value))


# -- what a program tells ------------------------------------------------------------------------


def test_the_program_shows_no_secret_of_a_setting_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCS_SCOPE_KEY", SECRET.hex() + "00" * 2000)
    (tmp_path / "side.json").write_text("{}")

    for arguments in (["produce", "--synthetic", "smollm2-135m"], ["keys", "side.json"]):
        assert main([*arguments]) != 0
    told = capsys.readouterr()
    assert_in_no_text(forms(SECRET), told.out, told.err)


def test_a_secret_has_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("produce", "consume", "store", "keys"):
        with pytest.raises(SystemExit):
            main([command, "x", "--scope-key", SECRET.hex()])
    told = capsys.readouterr()
    assert "--scope-key" in told.err
    assert not [cls for cls in (ProducerSettings, RelaySettings) if "token" in cls.model_fields]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_line_about_an_error_shows_no_variables(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(log_format=log_format, stream=sys.stderr)  # type: ignore[arg-type]
    try:
        try:
            _raise_with(SECRET.hex())
        except ValueError:
            structlog.get_logger().exception("failed")
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers.clear()
    told = capsys.readouterr().err
    assert "failed" in told
    assert "_raise_with" in told
    assert_in_no_text(forms(SECRET), told)
