"""What ``kvcs relay`` is told reaches the part that it is about."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvcs.cli.main import main
from kvcs.cli.relay import relay_options
from kvcs.config import Address, RelaySettings
from kvcs.link import guests, quic_settings, session_config
from moqt.aio import QuicSettings
from moqt.relay.options import RelayOptions
from moqt.session.config import SessionConfig
from moqt.session.guests import GuestLimits

#: The limits of a relay, each with a value that is not the default one.
LIMITS = {
    "cache_octets": 1 << 20,
    "linger_s": 7.0,
    "max_tracks": 8,
    "max_namespaces": 9,
    "max_behind_octets": 10,
    "stall_s": 20.0,
    "max_connections": 11,
    "max_connections_of_peer": 10,
    "max_handshakes": 21,
    "max_handshakes_per_s_of_peer": 22.0,
    "retry_above": 23,
    "max_sessions_of_peer": 24,
    "max_requests_of_peer": 25,
    "max_requests_per_s": 26.0,
    "max_requests_per_s_of_peer": 27.0,
    "max_unread_octets": 1 << 17,
    "max_requests": 12,
    "max_request_updates": 13,
    "max_filter_ranges": 14,
    "request_timeout_s": 15.0,
    "publisher_grace_s": 16.0,
    "fill_timeout_s": 17.0,
    "pause_after_s": 18.0,
    "idle_timeout_s": 19.0,
}


def settings(**changed: Any) -> RelaySettings:
    return RelaySettings(
        listen=Address("::1", 0), certificate_file=Path("c"), key_file=Path("k"), **changed
    )


def in_force(values: RelaySettings) -> dict[str, Any]:
    parts = (
        relay_options(values),
        session_config(values),
        quic_settings(values),
        guests(values).limits,
    )
    return {name: value for part in parts for name, value in asdict(part).items()}


def test_every_limit_reaches_the_relay() -> None:
    reached = in_force(settings(**LIMITS))

    assert {name: reached[name] for name in LIMITS if name != "fill_timeout_s"} == {
        name: value for name, value in LIMITS.items() if name != "fill_timeout_s"
    }
    assert relay_options(settings(**LIMITS)).fill_timeout_s == LIMITS["fill_timeout_s"]


def test_the_limits_by_default_are_those_of_the_library() -> None:
    assert relay_options(settings()) == RelayOptions()
    assert session_config(settings()) == SessionConfig()
    assert quic_settings(settings()) == QuicSettings()
    assert guests(settings()).limits == GuestLimits()


def test_the_help_names_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["relay", "--help"])

    told = capsys.readouterr().out
    for name in (*LIMITS, "new_session_uri", "drain_s"):
        assert f"--{name.replace('_', '-')} " in told
