"""The QUIC engine picoquic, where it differs from others or is asked for more than they are."""

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moqt.aio.engine import EngineUnavailableError, engine_named
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import CertificateFiles, ClientTls, ServerTls, TlsSettingsError
from moqt.aio.transport import QuicTransport
from tests.integration.aio.test_engines import PATIENCE_S, SMALL, Ends, Pump, Recorder

pytestmark = pytest.mark.network


@pytest.fixture
def ends(certificates: CertificateFiles) -> Ends:
    try:
        return Ends(engine_named("picoquic"), certificates)
    except EngineUnavailableError as error:
        pytest.skip(str(error))


async def turns(condition: Callable[[], bool]) -> None:
    """Look again and again until ``condition`` holds, of which nobody tells."""
    loop, holds = asyncio.get_running_loop(), asyncio.Event()

    def look() -> None:
        if condition():
            holds.set()
        else:
            loop.call_later(0.001, look)

    look()
    async with asyncio.timeout(PATIENCE_S):
        await holds.wait()


def alive_records() -> int:
    """Return how many records of streams there are in the process."""
    from aiopquic._binding import _transport

    return int(_transport.TransportContext().counters["sc_alive_total"])


@pytest.fixture
def nothing_is_left(ends: Ends) -> Iterator[None]:
    gc.collect()
    before = alive_records()
    yield
    gc.collect()
    assert alive_records() == before


@pytest.mark.usefixtures("nothing_is_left")
async def test_streams_of_every_fate_leave_no_record_behind(ends: Ends) -> None:
    async with ends.connected(server=SMALL) as pair:
        client, server = pair.client.transport, pair.server.transport
        pair.server.consumes = False
        client.send_stream_data(6, b"whole", True)
        client.send_stream_data(10, bytes(100_000), True)
        client.send_stream_data(14, b"begun")
        client.send_stream_data(18, b"to be stopped")
        client.send_stream_data(22, b"", True)
        client.reset_stream(26, 1)
        client.send_stream_data(0, b"question", True)
        await pair.server.until(lambda: {6, 22, 0} <= pair.server.fins and 18 in pair.server.data)
        server.stop_sending(18, 2)
        server.send_stream_data(0, b"answer", True)
        client.reset_stream(10, 3)
        await pair.server.until(lambda: {10, 18, 26} <= set(pair.server.resets))
        await pair.client.until(lambda: 0 in pair.client.fins)


@pytest.mark.usefixtures("nothing_is_left")
async def test_connections_abandoned_amid_a_transfer_leave_no_record_behind(ends: Ends) -> None:
    for _ in range(5):
        async with ends.connected() as pair:
            Pump(pair.client, 4_000_000, (6, 10))
            Pump(pair.server, 4_000_000, (7, 11))
            await pair.client.until(lambda: pair.client.received > 100_000)
            pair.server.transport.abandon()


async def test_what_overtakes_the_end_of_the_handshake_is_told_after_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moqt.aio.picoquic.library import Event
    from moqt.aio.picoquic.transport import PicoquicTransport
    from moqt.aio.picoquic.worker import Told

    tell, late = PicoquicTransport.tell, list[Told]()

    def overtaken(self: PicoquicTransport, told: Told) -> None:
        if self._is_client and told.kind == Event.READY and not self._early:
            late.append(told)
            return
        tell(self, told)
        if late and self._is_client and told.kind == Event.STREAM_DESTROY:
            tell(self, late.pop())

    class Eager(Recorder):
        def connected(self) -> None:
            super().connected()
            self.transport.send_stream_data(3, b"setup")
            self.transport.send_stream_data(7, b"whole", True)

    monkeypatch.setattr(PicoquicTransport, "tell", overtaken)
    async with ends.listening(factory=Eager) as listener:
        client = await ends.dialled(listener.address)

        assert client.data == {3: b"setup", 7: b"whole"}
        assert client.fins == {7}
        client.transport.abandon()


async def test_a_record_that_died_with_its_stream_does_not_die_again_with_its_connection(
    ends: Ends,
) -> None:
    from moqt.aio.picoquic.library import Event
    from moqt.aio.picoquic.worker import Told, Worker

    worker = Worker(lambda connection: None)
    records = {5, 6}
    worker.bury(1, records, is_over=False)
    worker._decay(1, Told(Event.STREAM_DESTROY, 0, None, 0, 5))
    worker._decay(1, Told(Event.STREAM_DATA, 4, None, 0, 7))

    assert records == {6, 7}
    worker._graves.clear()  # they are none of the library's


async def test_streams_that_are_over_are_forgotten(ends: Ends) -> None:
    async with ends.connected() as pair:
        client: Any = pair.client.transport
        server: Any = pair.server.transport
        client.send_stream_data(22, b"", True)
        for stream_id in range(2, 2 + 4 * 100, 4):
            client.send_stream_data(stream_id, b"x", True)
        await pair.server.until(lambda: len(pair.server.fins) == 100)
        client.close(0, "", drain_s=PATIENCE_S)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert not client._outbound.unacknowledged
        assert not client._passed_over
        assert not server._inbound.unconsumed


async def test_a_reset_after_delivery_waits_until_all_has_arrived(ends: Ends) -> None:
    async with ends.connected() as pair:
        transport: Any = pair.client.transport
        for stream_id in range(6, 6 + 4 * 20, 4):
            payload = os.urandom(300_000)
            transport.send_stream_data(stream_id, payload)
            transport.reset_stream(stream_id, 9, after_delivery=True)
            transport.send_stream_data(stream_id, b"after the reset")
            await pair.server.until(partial(pair.server.resets.__contains__, stream_id))

            assert pair.server.data[stream_id] == payload
            assert pair.server.resets[stream_id] == 9


async def test_a_reset_after_delivery_gives_way_to_one_at_once(ends: Ends) -> None:
    async with ends.connected(server=SMALL) as pair:
        transport: Any = pair.client.transport
        pair.server.consumes = False
        transport.send_stream_data(6, bytes(200_000))
        await pair.server.until(lambda: pair.server.received == SMALL.stream_window)
        transport.reset_stream(6, 9, after_delivery=True)
        transport.reset_stream(6, 4)
        await pair.server.until(lambda: pair.server.resets == {6: 4})


async def test_few_octets_wait_on_a_stream_that_the_peer_has_stopped(ends: Ends) -> None:
    async with ends.connected(server=SMALL) as pair:
        pair.server.consumes = False
        transport: Any = pair.client.transport
        Pump(pair.client, 10_000_000, (6, 10, 14))
        await pair.server.until(lambda: pair.server.received == 3 * SMALL.stream_window)
        await turns(lambda: all(stream.blocked for stream in transport._outbound._active))

        waiting = [stream.queued for stream in transport._outbound._active]
        assert len(waiting) == 3
        assert max(waiting) <= 8 << 10
        assert transport.send_budget() > 0


async def test_who_comes_in_at_another_address_is_closed_unheard(ends: Ends) -> None:
    """The port is bound everywhere, for want of anything else; the listener is not."""
    accepted: asyncio.Queue[Recorder] = asyncio.Queue()

    def factory(transport: QuicTransport) -> Recorder:
        recorder = Recorder(transport)
        accepted.put_nowait(recorder)
        return recorder

    async with ends.listening(factory=factory) as listener, asyncio.timeout(PATIENCE_S):
        _, port = listener.address
        try:
            elsewhere = await ends.dialled(("127.0.0.2", port), client_tls=ClientTls(verify=False))
        except ConnectionError:
            pass
        else:
            await elsewhere.until(lambda: bool(elsewhere.losses))
        here = await ends.dialled(("127.0.0.1", port))
        here.transport.send_stream_data(0, b"hello", True)
        recorder = await accepted.get()
        await recorder.until(lambda: bool(recorder.fins))

        assert accepted.empty()
        here.transport.abandon()


async def test_another_certificate_is_refused_and_nothing_changes(
    ends: Ends, certificates: CertificateFiles
) -> None:
    async with ends.listening() as listener:
        identify: Any = getattr(listener, "identify")  # noqa: B009
        with pytest.raises(TlsSettingsError, match="restart to change it"):
            identify(ServerTls(certificates.certificate_file, certificates.key_file))
        client = await ends.dialled(listener.address)

        assert client.is_connected
        client.transport.abandon()


async def test_certificates_of_clients_are_refused_before_anything_starts(
    ends: Ends, certificates: CertificateFiles
) -> None:
    """What it cannot ask for, and cannot show, must not look as if it were done."""
    engine = engine_named("picoquic")

    def nobody(transport: QuicTransport) -> Recorder:
        raise AssertionError("nobody gets that far")

    own = certificates.certificate_file, certificates.key_file
    asking = ServerTls(*own, client_ca_file=certificates.ca_file)
    shown = ClientTls(certificates.ca_file, certificate_file=own[0], key_file=own[1])
    with pytest.raises(TlsSettingsError, match=r"picoquic asks no client .* expected the engine"):
        await engine.listen("127.0.0.1", 0, QuicSettings(), asking, nobody, alpn=["x"])
    with pytest.raises(TlsSettingsError, match=r"picoquic shows no certificate .* expected the"):
        await engine.dial("127.0.0.1", 9, QuicSettings(), shown, nobody, alpn=["x"], timeout_s=1.0)


async def test_a_sign_of_life_is_seen_in_silence(ends: Ends) -> None:
    async with ends.connected(QuicSettings(idle_timeout_s=1.5)) as pair:
        transport: Any = pair.client.transport
        before = transport.heard_at

        def is_heard() -> bool:
            transport.ping()
            return bool(transport.heard_at > before)

        await turns(is_heard)


async def test_a_file_that_is_no_certificate_is_named(ends: Ends, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    files = CertificateFiles(wrong, wrong, wrong)

    with pytest.raises(TlsSettingsError, match=r"wrong\.pem"):
        async with ends.listening(files=files):
            pass


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    ("octets", "policy"), [(None, "basic"), (1200, "blocked"), (1252, "blocked"), (1452, "basic")]
)
async def test_picoquic_probes_unless_told_a_size_that_needs_none(
    monkeypatch: pytest.MonkeyPatch, octets: int | None, policy: str
) -> None:
    from moqt.aio.picoquic.worker import Worker

    told: dict[str, Any] = {}
    readable, writable = os.pipe()

    class Context:
        eventfd, started = readable, True

        def start(self, **arguments: Any) -> None:
            told.update(arguments)

        def stop(self, seconds: float) -> None: ...

    worker = Worker(lambda connection: None)
    monkeypatch.setattr(worker, "context", Context())
    worker.start(QuicSettings(max_datagram_octets=octets), socket.AF_INET)
    worker.stop()
    os.close(readable)
    os.close(writable)

    assert told["pmtud_policy"] == policy
