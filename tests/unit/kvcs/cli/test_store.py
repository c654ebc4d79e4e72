"""What ``kvcs store`` is told reaches the part that it is about."""

from dataclasses import asdict
from typing import Any

import pytest

from kvcs.cli.main import main
from kvcs.config import StoreSettings
from kvcs.depot.daemon import StoreOptions

#: The limits of a store, each with a value that is not the default one.
LIMITS: dict[str, Any] = {
    "budget_octets": 1 << 30,
    "memory_octets": 32 << 20,
    "partial_s": 7.0,
    "at_once": 3,
    "stall_timeout_s": 8.0,
    "drain_s": 9.0,
    "connect_timeout_s": 11.0,
    "request_timeout_s": 12.0,
}


def options(**changed: Any) -> dict[str, Any]:
    settings = StoreSettings(connect=("moqt://relay:4443/",), **changed)
    found = asdict(StoreOptions.of(settings))
    return found | {"stall_timeout_s": found["stall_s"]}


def test_every_limit_reaches_the_store() -> None:
    reached = options(**LIMITS)

    assert {name: reached[name] for name in LIMITS} == LIMITS


def test_the_limits_by_default_are_those_of_the_library() -> None:
    assert StoreOptions.of(StoreSettings(connect=("moqt://relay:4443/",))) == StoreOptions()


def test_the_help_names_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["store", "--help"])

    told = capsys.readouterr().out
    for name in (*LIMITS, "only", "announce", "trust", "list"):
        assert f"--{name.replace('_', '-')} " in told
