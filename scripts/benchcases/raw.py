"""One stream straight on the engine seam: what an engine carries without sessions and digests.

Whoever dials says on a stream how many octets it wants, and gets them on another one.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from benchcases.ends import LIMIT_S, Place, Role, engine
from moqt.aio import ClientTls, QuicSettings, ServerTls
from moqt.aio.engine import engine_named
from moqt.aio.transport import ConnectionLost, QuicReceiver, QuicTransport

_ALPN = "bench-raw"
#: The first stream that a client opens in one direction.
_REQUEST = 2
#: The second one that a server opens: engines serve the first, that of control messages, apart.
_DATA = 7
#: Handed over at once, at most: two Objects and their headers.
_PIECE = memoryview(bytes(64 << 10))
#: Seconds that a handshake, and a farewell, may take.
_PATIENCE_S = 10.0


class _Receiver:
    """A :class:`~moqt.aio.transport.QuicReceiver` that nothing happens to."""

    def __init__(self, transport: QuicTransport) -> None:
        self._transport = transport

    def connected(self) -> None:
        pass

    def stream_data_received(self, stream_id: int, data: bytes, fin: bool) -> None:
        pass

    def stream_reset_received(self, stream_id: int, code: int) -> None:
        pass

    def stop_sending_received(self, stream_id: int, code: int) -> None:
        pass

    def datagram_received(self, data: bytes) -> None:
        pass

    def flush(self) -> None:
        pass

    def connection_lost(self, lost: ConnectionLost) -> None:
        pass


class _Sender(_Receiver):
    """Sends what it is asked for, never more than the engine has room for."""

    def __init__(self, transport: QuicTransport) -> None:
        super().__init__(transport)
        self._asked = b""
        self._left = 0

    def stream_data_received(self, stream_id: int, data: bytes, fin: bool) -> None:
        self._asked += data
        self._transport.consumed(stream_id, len(data))
        if fin:
            self._left = int.from_bytes(self._asked, "big")

    def flush(self) -> None:
        transport = self._transport
        while self._left:
            room = min(transport.send_budget(), transport.stream_credit(_DATA))
            octets = min(self._left, len(_PIECE), room)
            if octets <= 0:
                return  # flush is called again when there is room
            self._left -= octets
            transport.send_stream_data(_DATA, _PIECE[:octets], fin=not self._left)


class _Taker(_Receiver):
    """Asks for octets and takes them as they come."""

    def __init__(self, transport: QuicTransport, octets: int) -> None:
        super().__init__(transport)
        self._octets = octets
        self.taken = 0
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connected(self) -> None:
        self._transport.send_stream_data(_REQUEST, self._octets.to_bytes(8, "big"), fin=True)

    def stream_data_received(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.taken += len(data)
        self._transport.consumed(stream_id, len(data))
        if fin and not self.whole.done():
            self.whole.set_result(None)

    def connection_lost(self, lost: ConnectionLost) -> None:
        if not self.whole.done():
            self.whole.set_exception(ConnectionError(f"lost amid the stream: {lost}"))
            self.whole.exception()  # nobody may be waiting


class RawSenderEnd(Role):
    """Listens, and sends as much as it is asked for."""

    def __init__(self, place: Place, *, datagram: int = 1452) -> None:
        super().__init__(place)
        self._quic = QuicSettings(max_datagram_octets=datagram, engine=engine())

    async def start(self, stack: AsyncExitStack) -> None:
        files = self.place.certificates
        self._listener = await engine_named(engine()).listen(
            "127.0.0.1",
            0,
            self._quic,
            ServerTls(files.certificate_file, files.key_file),
            _Sender,
            alpn=[_ALPN],
        )
        stack.callback(self._listener.close)

    async def port(self) -> int:
        return self._listener.address[1]


class RawReceiverEnd(Role):
    """Dials, and takes a stream."""

    def __init__(self, place: Place, *, port: int, datagram: int = 1452) -> None:
        super().__init__(place)
        self._port = port
        self._quic = QuicSettings(max_datagram_octets=datagram, engine=engine())

    async def receive(self, octets: int) -> dict[str, Any]:
        """Take so many octets, over a connection of their own."""
        takers: list[_Taker] = []

        def taker(transport: QuicTransport) -> QuicReceiver:
            takers.append(_Taker(transport, octets))
            return takers[-1]

        cpu, began = time.process_time(), time.monotonic()
        transport = await engine_named(engine()).dial(
            "127.0.0.1",
            self._port,
            self._quic,
            ClientTls(ca_file=self.place.certificates.ca_file),
            taker,
            alpn=[_ALPN],
            timeout_s=_PATIENCE_S,
        )
        [one] = takers
        try:
            async with asyncio.timeout(LIMIT_S):
                await one.whole
            seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        finally:
            transport.close(0, "")
            async with asyncio.timeout(_PATIENCE_S):
                await transport.wait_closed()
        if one.taken != octets:
            raise ConnectionError(f"{one.taken} octets came, expected {octets}")
        return {"octets": one.taken, "seconds": seconds, "cpu_s": cpu_s}
