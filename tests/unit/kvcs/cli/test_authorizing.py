"""Whom a daemon believes: a file of issuers, or the scope file, which is read again as well."""

import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcs.cli.authorizing import Authorizing, policy_files
from kvcs.config import Access, ProducerSettings, StoreSettings
from kvcs.errors import ConfigError
from kvcs.trust.scopefile import new_scope
from kvcs.trust.tokens import CAT_TOKEN_TYPE
from moqt.authority import Action, Bearer, Denial, Denied, Granted
from moqt.wire.token import AuthorizationToken
from tests.issuing import AUDIENCE, Issuer
from tests.pki import Ca, der, uri


def table(issuer: Issuer) -> str:
    key = issuer.key.key
    assert isinstance(key, Ed25519PrivateKey)
    return (
        f'[[issuers]]\nissuer = "{issuer.key.issuer}"\nkid = "{issuer.key.kid.decode()}"\n'
        f'public_key = "{key.public_key().public_bytes_raw().hex()}"\n'
    )


@pytest.fixture
def scope_file(tmp_path: Path) -> Path:
    new_scope(tmp_path / "scope.toml", None)
    return tmp_path / "scope.toml"


def settings(scope_file: Path, **more: object) -> ProducerSettings:
    given: dict[str, object] = {
        "listen": "0.0.0.0:4443",
        "certificate_file": Path("c.pem"),
        "key_file": Path("k.pem"),
        "scope_file": (scope_file,),
        "audience": (AUDIENCE,),
    }
    return ProducerSettings(**(given | more))  # type: ignore[arg-type]


def asked(authorizing: Authorizing, token: bytes) -> Granted | Denied:
    assert authorizing.authority is not None
    shown = AuthorizationToken.use_value(CAT_TOKEN_TYPE, token)
    return authorizing.authority.decide(Action.CLIENT_SETUP, None, None, Bearer((shown,)), NOW)


NOW = time.time()


def test_issuers_of_a_scope_file_are_believed_and_nobody_is_let_in_without(
    scope_file: Path,
) -> None:
    issuer = Issuer()
    with scope_file.open("a") as file:
        file.write(table(issuer))
    found = settings(scope_file)
    authorizing = Authorizing(found, lambda: None)

    assert found.access is Access.AUTHORIZED
    assert isinstance(asked(authorizing, issuer.issue()), Granted)
    refused = asked(authorizing, Issuer().issue())
    assert isinstance(refused, Denied)
    assert refused.why is Denial.MALFORMED


def test_a_scope_file_that_changed_is_noticed(scope_file: Path) -> None:
    before = scope_file.read_text()
    scope_file.write_text(before + table(Issuer()))
    files = policy_files(settings(scope_file))
    assert files is not None
    files.read()
    assert not files.have_changed()

    scope_file.write_text(before + table(Issuer()) + "# another\n")
    assert files.have_changed()
    scope_file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644, expected 0600"):
        files.read()


def test_where_certificates_are_asked_for_and_no_tokens_they_say_who_it_is(
    scope_file: Path,
) -> None:
    ca = Ca()
    found = settings(scope_file, audience=(), client_ca_file=Path("clients.pem"))
    authority = Authorizing(found, lambda: None).authority

    assert found.access is Access.CERTIFIED
    assert authority is not None
    shown = Bearer(certificate=der(ca.issue(uri("spiffe://kvcs.example/decode/7"))))
    granted = authority.decide(Action.CLIENT_SETUP, None, None, shown, NOW)
    assert isinstance(granted, Granted)
    assert granted.who == "spiffe://kvcs.example/decode/7"


def test_a_scope_file_that_lists_no_issuers_asks_for_no_tokens(scope_file: Path) -> None:
    with pytest.raises(ValueError, match="issuers_file is not set, expected a file since audience"):
        settings(scope_file)
    with pytest.raises(ValueError, match="where anybody could do everything"):
        settings(scope_file, audience=())
    for cls in (ProducerSettings, StoreSettings):
        open_to_all = cls(
            listen="127.0.0.1:1",  # type: ignore[arg-type]  # read as in a file
            certificate_file=Path("c.pem"),
            key_file=Path("k.pem"),
            scope_file=(scope_file,),
        )
        assert policy_files(open_to_all) is None
        assert Authorizing(open_to_all, lambda: None).authority is None
