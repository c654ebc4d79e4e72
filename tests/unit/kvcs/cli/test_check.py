"""``kvcs check``: what a command would accept, and why not; the same as the command itself says."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcs.cli.findings import SOON_S, State, findings_of
from kvcs.cli.main import main
from kvcs.config import (
    ConsumerSettings,
    IndexSettings,
    ProducerSettings,
    RelaySettings,
    StoreSettings,
)
from kvcs.profile.signing import ProducerKey
from kvcs.trust.producers import KnownProducer
from kvcs.trust.scope import Protection
from kvcs.trust.scopefile import add_producer, new_scope
from moqt.aio.tls import make_certificates
from tests.pki import CLIENT, NOW, SERVER, Ca, dns, pem, uri

RELAY = "moqt://relay.example:4443"
#: RFC 8032 Section 7.1, test 1.
PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
IDENTITIES = f"""[[identities]]
uri = "spiffe://kvcs.example/decode/*"
role = "consumer"
scopes = ["{"00" * 32}"]
"""
Lines = list[tuple[str, str, str]]


class Site:
    """A folder with good files, and settings that name them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Ca()
        (folder / "ca.pem").write_bytes(pem(self.ca.certificate))
        self.certificate, self.key = self.ca.write(
            folder, "server", dns("relay.example"), usage=SERVER
        )
        self.client = self.ca.write(folder, "client", uri("spiffe://kvcs.example/decode/7"))
        for file in folder.glob("*.key"):
            file.chmod(0o600)
        self.scope = folder / "scope.toml"
        new_scope(self.scope, Protection())
        self.producer = ProducerKey.generate()
        self.producer.to_file(folder / "producer.pem")
        add_producer(self.scope, KnownProducer(self.producer.public_key, name="mine"))

    def listening(self, **changed: Any) -> dict[str, Any]:
        return {
            "listen": "127.0.0.1:4443",
            "certificate_file": self.certificate,
            "key_file": self.key,
            "ca_file": self.folder / "ca.pem",
            "client_ca_file": self.folder / "ca.pem",
        } | changed

    def producing(self, **changed: Any) -> ProducerSettings:
        return ProducerSettings(
            **self.listening(
                **{
                    "scope_file": (self.scope,),
                    "producer_key_file": self.folder / "producer.pem",
                }
                | changed
            )
        )

    def consuming(self, **changed: Any) -> ConsumerSettings:
        given: dict[str, Any] = {
            "connect": (RELAY,),
            "ca_file": self.folder / "ca.pem",
            "client_certificate_file": self.client[0],
            "client_key_file": self.client[1],
            "scope_file": (self.scope,),
        }
        return ConsumerSettings(**(given | changed))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    return Site(tmp_path)


def looked(settings: Any, now: float | None = None) -> Lines:
    return [
        (one.state.value, one.topic, one.text)
        for one in findings_of(settings, time.time() if now is None else now)
    ]


def of_state(lines: Lines, state: State) -> list[str]:
    return [f"{topic}: {text}" for found, topic, text in lines if found == state.value]


# -- good ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda site: site.producing(),
        lambda site: site.consuming(),
        lambda site: RelaySettings(**site.listening()),
        lambda site: StoreSettings(**site.listening(scope_file=(site.scope,))),
    ],
    ids=["produce", "consume", "relay", "store"],
)
def test_where_all_is_as_it_should_be_nothing_is_wrong_or_open(
    site: Site, make: Callable[[Site], Any]
) -> None:
    lines = looked(make(site))

    assert {state for state, *_ in lines} == {"ok"}, lines


def test_what_is_shown_and_who_is_believed_is_told(site: Site) -> None:
    told = [text for _, _, text in looked(site.producing())]

    assert any("relay.example; 1 in its chain" in text for text in told)
    assert "whoever believes our ca_file believes the certificate" in told
    assert any("with a certificate of" in text and "whomever" in text for text in told)
    assert any("sealed with aes-128-gcm" in text for text in told)
    assert any("(mine) is believed without end" in text for text in told)
    assert any("which the scope lists" in text for text in told)


@pytest.mark.parametrize("where", ["issuers file", "scope file"])
def test_whose_tokens_are_believed_and_for_whom_they_must_be_is_told(
    site: Site, where: str
) -> None:
    names: dict[str, Any] = {"audience": ("moqt://relay.example:4433",)}
    if where == "issuers file":
        names["issuers_file"] = issuers(site)
    else:
        with site.scope.open("a") as file:
            file.write(f'[[issuers]]\nissuer = "cluster.example"\npublic_key = "{PUBLIC}"\n')
    lines = looked(site.producing(**names))

    assert {state for state, *_ in lines} == {"ok"}, lines
    told = of_state(lines, State.OK)
    assert any("tokens: of cluster.example, key " in text for text in told)
    assert "audience: tokens must be for moqt://relay.example:4433" in told


# -- what is wrong -------------------------------------------------------------------------------


def issuers(site: Site, more: str = "") -> Path:
    """Write a file of issuers."""
    file = site.folder / f"issuers-{len(more)}.toml"
    file.write_text(f'[[issuers]]\nissuer = "cluster.example"\npublic_key = "{PUBLIC}"\n{more}')
    return file


def spoilt(site: Site) -> dict[str, tuple[Any, str]]:
    other = make_certificates(site.folder / "other")
    tokens = site.folder / "tokens"
    tokens.write_text(f"{'00' * 32} read {'t' * 40}")
    tokens.chmod(0o600)
    nobody = new_scope(site.folder / "nobody.toml", Protection())
    assert nobody.producers == ()
    stranger = ProducerKey.generate()
    stranger.to_file(site.folder / "stranger.pem")
    (site.folder / "open.toml").write_bytes(site.scope.read_bytes())
    (site.folder / "old.toml").write_bytes(site.scope.read_bytes())
    (site.folder / "old.toml").chmod(0o600)
    text = (site.folder / "old.toml").read_text()
    (site.folder / "old.toml").write_text(text + "not_after = 2020-01-01T00:00:00Z\n")
    old = site.ca.write(site.folder, "past", dns("x"), usage=SERVER, until_days=-0.5)
    nameless = site.ca.write(site.folder, "nameless", usage=CLIENT)
    return {
        "another key": (site.producing(key_file=other.key_file), "does not belong to the certific"),
        "expired": (site.producing(certificate_file=old[0], key_file=old[1]), "expired on"),
        "no file": (site.producing(certificate_file=Path("none.pem")), "none.pem: No such file"),
        "no CA": (site.producing(client_ca_file=Path("none.pem")), "none.pem: No such file"),
        "no scope": (site.producing(scope_file=()), "no scope key: set scope_file"),
        "open file": (site.producing(scope_file=(Path("open.toml"),)), "mode 0644, expected 0600"),
        "no signature": (site.producing(producer_key_file=None), "producer_key_file is not set"),
        "not listed": (
            site.producing(producer_key_file=Path("stranger.pem")),
            "is none of the 1 that the scope lists",
        ),
        "too late": (site.producing(scope_file=(Path("old.toml"),)), "believes the key"),
        "nobody is believed": (
            site.consuming(scope_file=(Path("old.toml"),)),
            "those of nobody are believed now",
        ),
        "a client without a name": (
            site.consuming(client_certificate_file=nameless[0], client_key_file=nameless[1]),
            "no listener of ours takes it",
        ),
        "two scopes of a store": (
            StoreSettings(**site.listening(scope_file=(site.scope, Path("nobody.toml")))),
            "2 scopes, expected one",
        ),
        "no audience": (
            RelaySettings(**site.listening(issuers_file=issuers(site))),
            "audience: issuers without an audience",
        ),
        "issuers that are none": (
            RelaySettings(**site.listening(issuers_file=Path("none.toml"))),
            "issuers file none.toml: No such file",
        ),
        "nobody asks for their certificates": (
            RelaySettings(
                **site.listening(
                    issuers_file=issuers(site, IDENTITIES),
                    client_ca_file=None,
                    audience=("moqt://relay.example:4433",),
                )
            ),
            "nobody is asked for a certificate: set client_ca_file",
        ),
        "a token that is none": (site.consuming(token_file=tokens), "token file"),
        "an engine that cannot": (site.producing(engine="picoquic"), "picoquic"),
        "tokens": (
            IndexSettings(
                listen="127.0.0.1:1",  # type: ignore[arg-type]  # read as in a file
                certificate_file=site.certificate,
                key_file=site.key,
                tokens_file=Path("none"),
            ),
            "tokens file none: No such file",
        ),
    }


CASES = (
    "another key", "expired", "no file", "no CA", "no scope", "open file", "no signature",
    "not listed", "too late", "nobody is believed", "a client without a name",
    "two scopes of a store", "an engine that cannot", "tokens", "no audience",
    "issuers that are none", "nobody asks for their certificates", "a token that is none",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_the_command_would_refuse_is_wrong(site: Site, case: str) -> None:
    cases = spoilt(site)
    assert set(cases) == set(CASES)
    settings, says = cases[case]

    wrong = of_state(looked(settings), State.WRONG)
    assert any(says in text for text in wrong), wrong
    assert len(wrong) == 1, "one cause, one line"


# -- what is open, and what a person should know -------------------------------------------------


def test_whatever_is_open_is_told(site: Site) -> None:
    clear = site.folder / "clear.toml"
    new_scope(clear, None)
    site.key.chmod(0o644)

    told = looked(site.producing(client_ca_file=None, scope_file=(clear,), producer_key_file=None))
    told += looked(site.consuming(scope_file=(clear,), insecure_skip_verify=True))
    everywhere = site.listening(client_ca_file=None, listen="0.0.0.0:4443", insecure_open=True)
    told += looked(RelaySettings(**everywhere))
    texts = of_state(told, State.OPEN)
    for says in (
        "access: whoever is on this machine may do everything: no token is asked for",
        "access: anybody who reaches 0.0.0.0:4443",
        "in clear: relays can read its objects",
        "lists no producers: who has the key can publish",
        "producer key: manifests are not signed",
        "has mode 0644: others may read or change it",
        "believed without a signature",
        "peers: whoever answers is believed",
    ):
        assert any(says in text for text in texts), (says, texts)
    assert of_state(told, State.WRONG) == []


def test_what_expires_soon_is_worth_a_word(site: Site) -> None:
    soon = NOW.timestamp() + 30 * 86_400 - SOON_S / 2

    [text] = of_state(looked(RelaySettings(**site.listening()), soon), State.NOTE)
    assert "it expires soon" in text
    listed = KnownProducer(ProducerKey.generate().public_key, not_after=time.time() + SOON_S / 2)
    add_producer(site.scope, listed)
    assert any(
        "is believed until" in text for text in of_state(looked(site.producing()), State.NOTE)
    )
    early = KnownProducer(ProducerKey.generate().public_key, not_before=time.time() + 1000)
    add_producer(site.scope, early)
    assert any("believed from" in text for text in of_state(looked(site.producing()), State.NOTE))


def test_a_certificate_of_another_ca_than_ours_is_worth_a_word(site: Site) -> None:
    (site.folder / "others.pem").write_bytes(pem(Ca("others").certificate))

    lines = looked(RelaySettings(**site.listening(ca_file=site.folder / "others.pem")))
    [text] = of_state(lines, State.NOTE)
    assert text.startswith("chain: ca_file would not believe it as relay.example")


# -- the command ---------------------------------------------------------------------------------


def test_the_command_reads_the_settings_of_the_other_one(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("kvcs.toml").write_text(
        f'ca_file = "ca.pem"\n[relay]\nlisten = "127.0.0.1:4443"\n'
        f'certificate_file = "{site.certificate}"\nkey_file = "{site.key}"\n'
    )

    assert main(["check", "relay", "--client-ca-file", "ca.pem", "--json"]) == 0
    *found, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last == {
        "event": "checked", "command": "relay", "ok": len(found), "note": 0, "open": 0, "wrong": 0,
    }  # fmt: skip
    assert {line["state"] for line in found} == {"ok"}
    assert main(["check", "relay"]) == 0
    assert "open  access: whoever is on this machine" in capsys.readouterr().out
    assert main(["check", "relay", "--strict"]) == 2


def test_settings_that_are_wrong_themselves_are_a_finding(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "produce", "--listen", "nowhere"]) == 2
    told = capsys.readouterr()
    assert "wrong settings: listen is 'nowhere' (from --listen), expected HOST:PORT" in told.out
    assert told.err == ""


def test_no_secret_is_in_what_is_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = bytes(range(64, 96)).hex()
    [line] = [ln for ln in site.scope.read_text().splitlines() if ln.startswith("key")]
    token = "s3cr3t-" + "x" * 40
    for name, text in (("tokens", f"{'00' * 32} read {token}\n"), ("token", token)):
        Path(name).write_text(text)
        Path(name).chmod(0o600)
    files = [f"--certificate-file={site.certificate}", f"--key-file={site.key}"]
    index = ["--index-uri", "https://index:1", "--index-token-file", "token"]
    listening = ["--listen", "127.0.0.1:1", *files]

    for as_json in (["--json"], []):
        scope = ["--scope-file", str(site.scope), "--producer-key-file", "producer.pem"]
        main(["check", "produce", *listening, *scope, *index, "--tokens-file", "tokens", *as_json])
        main(["check", "index", *listening, "--tokens-file", "tokens", *as_json])
        with monkeypatch.context() as patch:
            patch.setenv("KVCS_SCOPE_KEY", secret)
            main(["check", "consume", "--connect", RELAY, *as_json])
            patch.setenv("KVCS_SCOPE_KEY", secret[:20])
            main(["check", "consume", "--connect", RELAY, *as_json])
    told = capsys.readouterr()
    inside = [
        *Path("producer.pem").read_text().splitlines()[1:-1],
        *site.key.read_text().splitlines()[1:-1],
    ]
    for hidden in (secret, secret[:20], line.split('"')[1], token, *inside):
        assert hidden not in told.out + told.err
    assert "tokens over HTTP" in told.out
