"""Several scopes: whose manifests are believed in each, and in which one to look when."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcs.cli.main import main
from kvcs.cli.scopes import FIRST_TURN_S, believed, turns
from kvcs.config import ConsumerSettings
from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.signing import ProducerKey
from kvcs.trust.producers import KnownProducer
from kvcs.trust.scope import Scope
from kvcs.trust.scopefile import add_producer, new_scope
from tests.unit.kvcs.cli.samples import Folder

SCOPE = ScopeKey(bytes(range(32)))
RELAY = "moqt://relay.example:4443"


@given(st.integers(1, 5), st.floats(0.01, 1000))
@example(2, 2 * FIRST_TURN_S)
def test_each_scope_is_looked_in_for_the_whole_time_and_one_is_the_last(
    scopes: int, seconds: float
) -> None:
    taken = list(turns(scopes, seconds))

    for number in range(scopes):
        spent = sum(length for which, length, _ in taken if which == number)
        assert spent == pytest.approx(seconds)
    assert [last for *_, last in taken] == [False] * (len(taken) - 1) + [True]
    assert [which for which, *_ in taken] == list(range(scopes)) * (len(taken) // scopes)
    if scopes > 1 and seconds >= 2 * FIRST_TURN_S:
        assert taken[0][1] == FIRST_TURN_S
    else:
        assert len(taken) == scopes


def test_a_scope_that_lists_producers_wants_signatures_of_them() -> None:
    listed, other = ProducerKey.generate(), ProducerKey.generate()
    scope = Scope(SCOPE, producers=(KnownProducer(listed.public_key),))

    trusted, required = believed(ConsumerSettings(connect=(RELAY,)), scope)
    assert dict(trusted) == {listed.kid: listed.public_key}
    assert required
    assert other.kid not in trusted


def test_keys_of_the_settings_are_believed_beside_those_of_the_scope(tmp_path: Path) -> None:
    listed, other = ProducerKey.generate(), ProducerKey.generate()
    (tmp_path / "other.pem").write_bytes(other.public_pem())
    settings = ConsumerSettings(connect=(RELAY,), trust=(tmp_path / "other.pem",))
    scope = Scope(SCOPE, producers=(KnownProducer(listed.public_key),))

    assert set(believed(settings, scope)[0]) == {listed.kid, other.kid}
    assert believed(settings, Scope(SCOPE))[1] is False


def test_a_key_that_expired_is_believed_no_more_and_does_not_make_unsigned_ones_good() -> None:
    scope = Scope(SCOPE, producers=(KnownProducer(ProducerKey.generate().public_key, not_after=1),))

    trusted, required = believed(ConsumerSettings(connect=(RELAY,)), scope)
    assert (dict(trusted), required) == ({}, True)


def test_signatures_cannot_be_required_of_nobody() -> None:
    settings = ConsumerSettings(
        connect=(RELAY,), require_signature=True, scope_file=(Path("scope.toml"),)
    )

    with pytest.raises(ConfigError, match="neither trust nor the scope file lists a producer"):
        believed(settings, Scope(SCOPE))


@pytest.mark.parametrize(
    ("signs", "says"),
    [
        (None, "producer_key_file is not set, expected one since the scope lists producers"),
        ("stranger.pem", "is none of the 1 that the scope lists"),
        ("old.pem", "no more, expected one that it believes now"),
    ],
)
def test_a_producer_that_nobody_would_believe_does_not_start(
    signs: str | None, says: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ProducerKey.generate()
    new_scope("scope.toml", None)
    add_producer("scope.toml", KnownProducer(old.public_key, not_after=1.0))
    old.to_file("old.pem")
    ProducerKey.generate().to_file("stranger.pem")

    signing = [] if signs is None else ["--producer-key-file", signs]
    scope = ["--scope-file", "scope.toml", *signing]
    assert main(["produce", "--synthetic", "smollm2-135m", "--connect", RELAY, *scope]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_a_store_keeps_one_scope(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one.toml", "two.toml"):
        new_scope(name, None)
    scopes = ["--scope-file", "one.toml", "--scope-file", "two.toml"]

    assert main(["store", "kept", "--connect", RELAY, *scopes]) == 2
    assert "scope_file names 2 files, expected one" in capsys.readouterr().err
    assert not Path("kept").exists()
