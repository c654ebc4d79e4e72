"""What ``kvcs index`` is told reaches the part that it is about."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvcs.cli.index import directory_limits, service_options
from kvcs.cli.main import main
from kvcs.config import Address, IndexSettings
from kvcs.kvsp.http.directory import DirectoryLimits
from kvcs.kvsp.http.service import ServiceOptions

#: The limits of an index, each with a value that is not the default one, and what it is there.
LIMITS = {
    "max_connections": ("max_connections", 11),
    "max_open_requests": ("max_requests", 12),
    "request_timeout_s": ("request_timeout_s", 13.0),
    "idle_timeout_s": ("idle_timeout_s", 14.0),
    "max_holders": ("max_holders", 15),
    "max_holders_of_token": ("max_holders_of_subject", 16),
    "max_keys": ("max_keys", 17),
    "max_keys_of_token": ("max_keys_of_subject", 18),
    "max_lease_s": ("max_lease_s", 19.0),
}


def settings(**changed: Any) -> IndexSettings:
    return IndexSettings(
        listen=Address("::1", 0),
        certificate_file=Path("c"),
        key_file=Path("k"),
        tokens_file=Path("t"),
        **changed,
    )


def test_every_limit_reaches_its_part() -> None:
    told = settings(**{name: value for name, (_, value) in LIMITS.items()})

    reached = asdict(directory_limits(told)) | asdict(service_options(told))
    assert {there: reached[there] for there, _ in LIMITS.values()} == dict(LIMITS.values())


def test_the_limits_by_default_are_those_of_the_library() -> None:
    assert directory_limits(settings()) == DirectoryLimits()
    assert service_options(settings()) == ServiceOptions()


def test_the_help_names_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["index", "--help"])

    told = capsys.readouterr().out
    for name in (*LIMITS, "tokens_file", "drain_s"):
        assert f"--{name.replace('_', '-')} " in told
    assert "--connection-window" not in told, "it speaks no QUIC"
