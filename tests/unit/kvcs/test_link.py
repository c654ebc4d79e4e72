import pickle
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvcs.config import ConsumerSettings, ProducerSettings
from kvcs.errors import ConfigError
from kvcs.link import (
    SERVING_WINDOW,
    Backoff,
    ShownToken,
    client_config,
    client_tls,
    quic_settings,
    server_tls,
    serving_quic,
    upstream_prefixes,
    why_not_there,
)
from kvcs.producer.daemon import ProducerOptions
from kvcs.producer.segment import Encoding
from kvcs.telemetry import LogEvent
from kvcs.trust.grants import Role
from kvcs.trust.tokenfile import token_to_text
from moqt.aio import ClientTls, QuicSettings, ServerTls
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig
from tests.integration.kvcs.scene import SCOPE
from tests.issuing import Issuer, shown

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


def test_a_token_is_read_again_for_each_session(tmp_path: Path) -> None:
    issuer = Issuer()
    first, second = issuer.issue(), issuer.issue(Role.RELAY)
    settings = ConsumerSettings(connect=(RELAY,), token_file=issuer.file(tmp_path, "token", first))
    source = client_config(settings).tokens
    assert source() == (shown(first),)

    issuer.file(tmp_path, "token", second)
    assert source() == (shown(second),)
    (tmp_path / "token").write_text("no token")
    with capture_logs() as lines:
        assert source() == (shown(second),)
    [line] = lines
    assert (line["event"], line["log_level"]) == (LogEvent.TOKEN_REFUSED, "warning")


def test_what_shows_a_token_goes_to_other_processes_and_tells_nobody(tmp_path: Path) -> None:
    issuer = Issuer()
    token = issuer.issue()
    source = ShownToken.read(issuer.file(tmp_path, "token", token))

    assert pickle.loads(pickle.dumps(source))() == (shown(token),)
    assert token_to_text(token) not in repr(source)
    assert repr(token)[2:20] not in repr(source.__dict__)


def test_without_a_token_nothing_is_shown_and_everything_is_asked_for() -> None:
    settings = ConsumerSettings(connect=(RELAY,))

    assert client_config(settings) == SessionConfig()
    assert upstream_prefixes(settings) == (TrackNamespace(),)


def test_an_upstream_is_asked_for_what_the_token_allows(tmp_path: Path) -> None:
    issuer = Issuer()
    path = issuer.file(tmp_path, "token", issuer.issue(Role.RELAY))
    settings = ConsumerSettings(connect=(RELAY,), token_file=path)

    assert upstream_prefixes(settings) == (TrackNamespace((b"kvcs-1", SCOPE.scope_id)),)
    issuer.file(tmp_path, "token", issuer.issue(Role.PRODUCER))
    with pytest.raises(ConfigError, match="allows no SUBSCRIBE_NAMESPACE"):
        upstream_prefixes(settings)
