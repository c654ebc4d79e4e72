"""``kvcs token``: from nothing to a token that is believed, and every way to go astray."""

import base64
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from kvcs.cli import main as cli
from kvcs.cli.main import main
from kvcs.trust.keys import thumbprint
from kvcs.trust.policy import PolicyFiles
from kvcs.trust.tokenfile import TokenFile
from kvcs.trust.tokens import read_token
from tests.unit.kvcs.cli.samples import Folder
from tests.unit.kvcs.trust.certificates import certificate
from tests.unit.kvcs.trust.vectors import TOKENS, valid

SCOPE = "74a7a6fc6da8c20ea5a7eeebe4539768bd8f93ae174652389b977ac3f08ee3d1"
MODEL = "49db976dc57b31bc6577baa5b14f954e3eae57672e08cf4c0a73026987878649"
AUDIENCE = "moqt://relay.example:4433"
ISSUE = ("token", "issue", "--key-file", "issuer.key", "--scope", SCOPE, "--audience", AUDIENCE)
FROM_FILE = (*ISSUE, "--issuers", "issuers.toml")
CHECK = ("token", "check", "token", "--issuers", "issuers.toml", "--audience", AUDIENCE)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what a program does about garbage: here it takes most of the time of a call."""
    monkeypatch.setattr(cli, "collected_aside", _nothing)


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


@pytest.fixture
def issuer(folder: Folder, capsys: Capture) -> Path:
    """An issuer's key and file of issuers, made as the help says; returns the folder."""
    assert main(["token", "issuer", "issuer.key", "--issuer", "cluster.example"]) == 0
    Path("issuers.toml").write_text(capsys.readouterr().out)
    return Path.cwd()


@pytest.fixture
def token(issuer: Path, capsys: Capture) -> Path:
    """A consumer's token in a file."""
    assert main([*FROM_FILE, "--role", "consumer", "--subject", "decode-7", "--out", "token"]) == 0
    capsys.readouterr()
    return Path("token")


def test_an_issuer_is_a_key_of_its_owner_and_a_table_for_servers(
    issuer: Path, capsys: Capture
) -> None:
    [key] = PolicyFiles("issuers.toml").read().issuers.values()

    assert os.stat("issuer.key").st_mode & 0o777 == 0o600
    assert key.issuer == "cluster.example"
    assert main(["token", "issuer", "issuer.key", "--issuer", "x"]) == 2
    assert "issuer.key: File exists" in capsys.readouterr().err


def test_an_issuer_is_named_as_it_was_asked_for(folder: Folder, capsys: Capture) -> None:
    name = 'a "quoted" name'
    arguments = ["token", "issuer", "k", "--issuer", name, "--kid", "2026-11", "--json"]
    assert main(arguments) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["issuer"], table["kid"], len(table["public_key"])) == (name, "2026-11", 64)

    assert main(["token", "issuer", "k2", "--issuer", name, "--kid", "2026-12"]) == 0
    Path("issuers.toml").write_text(capsys.readouterr().out)
    [key] = PolicyFiles("issuers.toml").read().issuers.values()
    assert (key.issuer, key.kid) == (name, b"2026-12")

    assert main(["token", "issuer", "k3", "--issuer", "x", "--kid", "x" * 65]) == 2
    assert "kid of 65 octets, expected 1 to 64" in capsys.readouterr().err
    assert not Path("k3").exists()


@pytest.mark.parametrize(
    ("role", "ttl", "seconds"),
    [
        ("consumer", None, 3600),
        ("producer", None, 86_400),
        ("relay", None, 86_400),
        ("consumer", "90", 90),
        ("consumer", "15m", 900),
        ("producer", "1d", 86_400),
    ],
)
def test_what_is_issued_is_believed_for_as_long_as_was_asked(
    role: str, ttl: str | None, seconds: int, issuer: Path, capsys: Capture
) -> None:
    extra = [] if ttl is None else ["--ttl", ttl]
    before = int(time.time())

    assert main([*FROM_FILE, "--role", role, "--out", "token", *extra]) == 0

    assert capsys.readouterr().out == ""
    held = TokenFile("token").read(time.time())
    found = read_token(held.value, PolicyFiles("issuers.toml").read().issuers, [AUDIENCE])
    claims = found.claims
    assert claims.issued_at is not None
    assert before <= claims.issued_at <= time.time()
    assert claims.expires_at - claims.issued_at == seconds
    assert len(claims.token_id) == 16
    assert claims.revalidate_s == 60.0


def test_a_token_goes_to_standard_output_unless_it_has_a_file(
    issuer: Path, capsys: Capture
) -> None:
    assert main([*FROM_FILE, "--role", "consumer"]) == 0
    text = capsys.readouterr().out
    assert main([*FROM_FILE, "--role", "consumer", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)

    for value in (text.strip(), shown["token"]):
        tag = cbor2.loads(base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)))
        assert (tag.tag, tag.value.tag) == (61, 18)
    assert main([*FROM_FILE, "--role", "consumer", "--json", "--out", "token"]) == 0
    out, err = capsys.readouterr()
    assert "token" not in json.loads(out)
    assert "token: token" in err


def test_a_file_is_written_in_place_of_the_one_before(token: Path, capsys: Capture) -> None:
    before = token.read_bytes()
    token.chmod(0o644)

    assert main([*FROM_FILE, "--role", "consumer", "--out", "token"]) == 0

    assert token.read_bytes() != before
    assert token.stat().st_mode & 0o777 == 0o600


def test_no_secret_is_ever_printed(token: Path, capsys: Capture) -> None:
    value = token.read_text().strip()
    signature = cbor2.loads(base64.urlsafe_b64decode(value + "==")).value.value[3]
    for arguments in (
        ["token", "show", "token"],
        ["token", "show", "token", "--issuers", "issuers.toml", "--json"],
        [*CHECK, "--json"],
        CHECK,
        [*FROM_FILE, "--role", "consumer", "--out", "token"],
    ):
        assert main(list(arguments)) == 0
        shown = "".join(capsys.readouterr())
        for secret in (value, signature.hex(), base64.b64encode(signature).decode()[:40]):
            assert secret not in shown
        assert "PRIVATE KEY" not in shown


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--ttl", "2d"], "--ttl is '2d', expected a time of 1s to 1d"),
        (["--ttl", "0"], "--ttl is '0'"),
        (["--ttl", "1w"], "--ttl is '1w'"),
        (["--scope", "zz"], "--scope is 'zz', expected hex"),
        (["--scope", "00"], "identifier of 1 octets, expected 32"),
        (["--compatibility", "0g"], "--compatibility is '0g', expected hex"),
        (["--audience", "relay.example:4433"], "expected moqt://HOST:PORT and no path"),
        (["--audience", AUDIENCE + "/path"], "expected moqt://HOST:PORT and no path"),
        (["--subject", "a\nb"], "sub of the token: not printable text"),
        (["--issuer", "x"], "expected one of --issuers and --issuer"),
        (["--kid", "x"], "--kid is for --issuer"),
        (["--key-file", "nowhere"], "issuer key file nowhere: No such file"),
        (["--issuers", "nowhere"], "issuers file nowhere: No such file"),
        (["--bind", "issuer.key"], "issuer.key: not a certificate in PEM"),
        (["--out", "nowhere/token"], "token file nowhere/token: No such file"),
    ],
)
def test_what_cannot_be_issued_is_refused_in_one_line(
    change: list[str], says: str, issuer: Path, capsys: Capture
) -> None:
    assert main([*FROM_FILE, "--role", "consumer", *change]) in (2, 13)

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcs: ")
    assert says in err
    assert err.count("\n") == 1


def test_the_issuer_may_be_named_instead_of_its_file(issuer: Path, capsys: Capture) -> None:
    assert main([*ISSUE, "--role", "consumer", "--issuer", "cluster.example", "--json"]) == 0
    by_name = json.loads(capsys.readouterr().out)
    assert main([*FROM_FILE, "--role", "consumer", "--json"]) == 0
    by_file = json.loads(capsys.readouterr().out)
    assert (by_name["issuer"], by_name["kid"]) == (by_file["issuer"], by_file["kid"])

    assert main([*ISSUE, "--role", "consumer", "--issuer", "y", "--kid", "k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kid"] == "k"
    assert main(["token", "issuer", "other.key", "--issuer", "z"]) == 0
    capsys.readouterr()
    assert main([*FROM_FILE, "--role", "consumer", "--key-file", "other.key"]) == 2
    assert "does not have the key of other.key" in capsys.readouterr().err


# -- looking at one --------------------------------------------------------------------------------


def test_a_token_is_explained_in_words(token: Path, capsys: Capture) -> None:
    assert main(["token", "show", "token"]) == 0

    shown = capsys.readouterr().out
    for text in (
        "issuer         cluster.example\n",
        "subject        decode-7\n",
        f"for            {AUDIENCE}\n",
        "checked again  at least every 60 s\n",
        "bound to       nobody: whoever has it can use it\n",
        "allows         CLIENT_SETUP\n",
        f"REQUEST_UPDATE, FETCH, TRACK_STATUS in kvcs-1/{SCOPE}/...\n",
        "signature      not checked: no --issuers\n",
    ):
        assert text in shown


def test_a_token_is_explained_whole_in_json(token: Path, capsys: Capture) -> None:
    assert main(["token", "show", "token", "--issuers", "issuers.toml", "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert (shown["signed"], shown["verdict"], shown["algorithm"]) == (True, "good", "EDDSA")
    assert shown["permissions"][1] == {
        "actions": ["SUBSCRIBE_NAMESPACE", "SUBSCRIBE", "REQUEST_UPDATE", "FETCH", "TRACK_STATUS"],
        "namespace": [
            {"match": "exact", "octets": b"kvcs-1".hex()},
            {"match": "exact", "octets": SCOPE},
        ],
        "exact_length": False,
        "track": None,
    }


@pytest.mark.parametrize("case", TOKENS["valid"], ids=lambda case: case["name"])
def test_tokens_of_others_are_explained_as_well(
    case: dict[str, Any], issuer: Path, capsys: Capture
) -> None:
    Path("other").write_bytes(bytes.fromhex(case["token"]))

    assert main(["token", "show", "other", "--issuers", "issuers.toml"]) == 0

    shown = capsys.readouterr().out
    assert "subject        decode-7\n" in shown
    assert "expires        2027-01-1" in shown
    assert "which is not trusted\n" in shown


def test_what_is_no_token_is_said_to_be_none_and_why(issuer: Path, capsys: Capture) -> None:
    Path("other").write_bytes(valid("consumer, EdDSA")[:-1])

    for arguments in (["token", "show", "other"], [*CHECK[:2], "other", *CHECK[3:]]):
        assert main(arguments) == 13
        err = capsys.readouterr().err
        assert err.startswith("kvcs: token of 243 octets is not in the form that is taken: ends")
    Path("text").write_text("no token!")
    assert main(["token", "show", "text"]) == 13
    assert "text: neither a token nor one in base64url" in capsys.readouterr().err


# -- checking one ----------------------------------------------------------------------------------


def test_a_token_that_would_be_believed_is_said_to_be_so(token: Path, capsys: Capture) -> None:
    assert main([*CHECK]) == 0
    assert capsys.readouterr().out == "believed: cluster.example/decode-7\n"
    assert main([*CHECK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "allowed": True,
        "who": "cluster.example/decode-7",
    }


@pytest.mark.parametrize(
    ("action", "name", "allowed"),
    [
        ("client-setup", None, True),
        ("server-setup", None, False),
        ("subscribe-namespace", f"kvcs-1/{SCOPE}", True),
        ("subscribe-namespace", "kvcs-1", False),
        ("subscribe", f"kvcs-1/{SCOPE}/00--manifest", True),
        ("subscribe", f"kvcs-1/{MODEL}/00--manifest", False),
        ("publish-namespace", f"kvcs-1/{SCOPE}/00", False),
    ],
)
def test_a_request_is_answered_as_an_endpoint_would(
    action: str, name: str | None, allowed: bool, token: Path, capsys: Capture
) -> None:
    named = [] if name is None else ["--name", name]
    assert main([*CHECK, "--action", action, *named]) == (0 if allowed else 13)

    out, err = capsys.readouterr()
    assert out == (f"allowed to {action}: cluster.example/decode-7\n" if allowed else "")
    assert allowed or err.startswith("kvcs: token does not allow ")


def test_why_a_token_would_be_refused_is_said_in_full(token: Path, capsys: Capture) -> None:
    other = ["--audience", "moqt://other.example:4433"]
    arguments = [*CHECK[:-2], *other, "--json"]
    assert main(arguments) == 13
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["allowed"], answer["told"]) == (False, "MALFORMED")
    assert "expected moqt://other.example:4433" in answer["reason"]
    assert answer["reason"] in err

    identifier = TokenFile(token).read(time.time()).token_id.hex()
    Path("revoked").write_text(f"cti {identifier}\n")
    assert main([*CHECK, "--revocations", "revoked"]) == 13
    assert capsys.readouterr().err == "kvcs: token was revoked\n"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--name", "kvcs-1"], "--name is for --action"),
        (["--action", "publish"], "--action publish needs --name"),
        (["--action", "publish", "--name", "kvcs-1/zz"], "a field is not hex"),
        (["--audience", "x"], "--audience is 'x'"),
        (["--issuers", "nowhere"], "issuers file nowhere: No such file"),
        (["--revocations", "nowhere"], "revocations file nowhere: No such file"),
        (["--client-certificate", "token"], "token: not a certificate in PEM"),
    ],
)
def test_a_question_that_is_none_is_refused_in_one_line(
    extra: list[str], says: str, token: Path, capsys: Capture
) -> None:
    assert main([*CHECK, *extra]) in (2, 7)

    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_bound_token_is_good_with_its_certificate_alone(issuer: Path, capsys: Capture) -> None:
    own = Ed25519PrivateKey.generate()
    for name, key in (("own.pem", own), ("other.pem", Ed25519PrivateKey.generate())):
        der = certificate(expires_at=time.time() + 1000, key=key)
        Path(name).write_bytes(x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM))

    assert main([*FROM_FILE, "--role", "consumer", "--bind", "own.pem", "--out", "token"]) == 0
    assert main(["token", "show", "token"]) == 0
    assert thumbprint(own.public_key()).hex() in capsys.readouterr().out

    assert main([*CHECK, "--client-certificate", "own.pem"]) == 0
    assert main([*CHECK, "--client-certificate", "other.pem"]) == 13
    assert main([*CHECK]) == 13
    assert "bound to a client certificate, and there is none" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["issuer", "issue", "show", "check"])
def test_every_part_explains_itself(what: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["token", what, "--help"])

    out = capsys.readouterr().out
    assert f"  kvcs token {what} " in out
