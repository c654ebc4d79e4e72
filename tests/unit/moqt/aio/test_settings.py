"""What a connection may be told, and what is refused before it starts."""

from typing import Any

import pytest

from moqt.aio.settings import QuicSettings


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_datagram_octets": 1199}, "max_datagram_octets"),
        ({"max_datagram_octets": 16_001}, "max_datagram_octets is 16001, not 1200..16000"),
        ({"stream_window": 1000}, "stream_window"),
        ({"stream_window": 2 << 20, "connection_window": 1 << 20}, "connection_window"),
        ({"idle_timeout_s": 0.0}, "idle_timeout_s"),
        ({"key_update_packets": 0}, "key_update_packets"),
        ({"key_update_packets": (1 << 23) + 1}, "key_update_packets"),
        ({"congestion_control": "vegas"}, "congestion_control"),
        ({"max_connections": 0}, "max_connections"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        QuicSettings(**settings)
