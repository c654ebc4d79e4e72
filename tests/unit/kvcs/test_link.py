import sys
from pathlib import Path

import pytest

from kvcs.config import ConsumerSettings, ProducerSettings
from kvcs.errors import ConfigError
from kvcs.link import (
    SERVING_WINDOW,
    Backoff,
    client_tls,
    quic_settings,
    server_tls,
    serving_quic,
    why_not_there,
)
from kvcs.producer.daemon import ProducerOptions
from kvcs.producer.publication import Encoding
from moqt.aio import ClientTls, QuicSettings, ServerTls

RELAY = "moqt://relay.example:4443"


def test_settings_by_default_are_those_of_the_library() -> None:
    settings = ProducerSettings(connect=(RELAY,))

    assert quic_settings(settings) == QuicSettings()
    assert quic_settings(ConsumerSettings(connect=(RELAY,))) == QuicSettings()
    assert client_tls(settings) == ClientTls()
    assert ProducerOptions.of(settings) == ProducerOptions()


def test_settings_reach_what_they_are_about() -> None:
    settings = ProducerSettings(
        connect=(RELAY,),
        max_datagram_octets=1452,
        congestion_control="bbr",
        max_connections=3,
        idle_timeout_s=7,
        ca_file=Path("ca.pem"),
        server_name="relay",
        insecure_skip_verify=True,
        encodings=("raw", "kv.raw"),
        store_octets=1000,
    )

    quic = quic_settings(settings)
    assert (quic.max_datagram_octets, quic.max_connections, quic.idle_timeout_s) == (1452, 3, 7)
    assert quic.congestion_control == "bbr"
    assert client_tls(settings) == ClientTls(Path("ca.pem"), verify=False, server_name="relay")
    options = ProducerOptions.of(settings)
    assert options.encodings == (Encoding(), Encoding(joint=True))
    assert options.store_octets == 1000


def test_who_takes_nothing_grants_no_more_than_requests_need() -> None:
    settings = ProducerSettings(connect=(RELAY,), max_connections=3)
    quic = serving_quic(settings)

    assert (quic.connection_window, quic.stream_window) == (SERVING_WINDOW, SERVING_WINDOW)
    assert quic.max_connections == 3
    smaller = ProducerSettings(connect=(RELAY,), connection_window=1 << 17, stream_window=1 << 16)
    assert serving_quic(smaller) == quic_settings(smaller)


def test_an_engine_that_cannot_be_used_is_a_setting_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    settings = ConsumerSettings(connect=("moqt://host:1/",), engine="picoquic")

    with pytest.raises(ConfigError, match=r"engine is picoquic, .* needs Python 3\.12"):
        quic_settings(settings)


def test_a_listener_needs_a_certificate_and_its_key() -> None:
    settings = ProducerSettings(
        listen="127.0.0.1:0",  # type: ignore[arg-type]  # read as in a file
        certificate_file=Path("c.pem"),
        key_file=Path("k.pem"),
    )

    assert server_tls(settings) == ServerTls(Path("c.pem"), Path("k.pem"))
    with pytest.raises(ConfigError, match="certificate_file is not set"):
        server_tls(ProducerSettings(connect=(RELAY,)))


def test_pauses_double_up_to_a_limit_and_are_shortened_by_up_to_a_half() -> None:
    backoff = Backoff(0.25, 2.0)

    for _ in range(2):
        for most in (0.25, 0.5, 1.0, 2.0, 2.0, 2.0):
            assert most / 2 <= backoff.next_s() <= most
        backoff.reset()


def test_two_that_lost_the_same_do_not_come_back_at_the_same_time() -> None:
    assert len({Backoff(0.25, 2.0).next_s() for _ in range(20)}) > 1


HERE = "moqt://relay.example:4443/a"


@pytest.mark.parametrize("uri", ["moqt://relay.example:4444/b", "moqt://other.example/"])
def test_it_may_be_sent_to_whoever_has_a_good_certificate(uri: str) -> None:
    assert why_not_there(uri, HERE, ClientTls()) is None


def test_without_verification_it_may_be_sent_to_the_same_host_only() -> None:
    trusting = ClientTls(verify=False)

    assert why_not_there("moqt://relay.example:1/", HERE, trusting) is None
    assert why_not_there("moqt://other.example:4443/a", HERE, trusting) == (
        "other.example is another host, and certificates are not verified"
    )


@pytest.mark.parametrize("uri", ["https://relay.example/", "moqt:///path", "moqt://h:99999/", "x"])
def test_it_may_not_be_sent_to_what_is_no_moqt_uri(uri: str) -> None:
    reason = why_not_there(uri, HERE, ClientTls())

    assert reason is not None
    assert uri in reason
