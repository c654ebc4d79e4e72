"""picoquic's thread, seen from the event loop: what it tells, what it is asked, its end."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from moqt.aio.picoquic.library import Command, Event, TransportContext, stream_ctx_destroy
from moqt.aio.picoquic.streams import Stream
from moqt.aio.settings import QuicSettings
from moqt.aio.udp import SOCKET_BUFFER

#: Events and commands that may be under way between the threads. More commands wait here.
RING_ENTRIES = 16_384

#: Streams that a peer may have open at once. Each bidirectional one is a request.
MAX_STREAMS_BIDI = 4096
MAX_STREAMS_UNI = 1024

#: Silence that a PING breaks, where the settings want it broken.
KEEPALIVE_S = 0.5

#: The largest DATAGRAM frame that is accepted; more than any packet carries.
MAX_DATAGRAM_FRAME = 65_535

#: UDP payload that picoquic sends without having probed the path, in octets.
UNPROBED_OCTETS = 1252

#: How soon it is tried again when the ring of commands is full.
RETRY_S = 0.001

#: Octets of streams that are much for one batch of events, and how long nothing more is read after
#: as many: what comes meanwhile costs one turn of the event loop, and not many.
MUCH_OCTETS, REST_S = 64 << 10, 0.001

#: Nor is rested when there was more than this part of a stream's window: its writer may be waiting.
REST_WINDOWS = 8


class Told(NamedTuple):
    """What the worker tells of a connection."""

    kind: int
    stream_id: int
    data: memoryview | None
    code: int
    record: int
    """Of the stream, if it is of one."""


class Route(Protocol):
    """A connection, to whom events are handed."""

    def tell(self, told: Told) -> None:
        """Take one event, amid others: nothing may stop the worker now. Must not raise.

        :meth:`answer` follows at the end of the batch.
        """

    def answer(self) -> None:
        """Act on the batch."""


class Worker:
    """One thread of picoquic with one UDP socket, and the connections that it carries.

    Args:
        accept: Called with a connection that nobody knows; returns who takes its events, None if
            it is refused and nobody does.
    """

    def __init__(self, accept: Callable[[int], Route | None]) -> None:
        self.context = TransportContext(ring_capacity=RING_ENTRIES)
        self._accept = accept
        self._routes: dict[int, Route] = {}
        self._graves: dict[int, set[int]] = {}
        self._dead: list[set[int]] = []  # records, once the events that name them are read
        self._touched: dict[Route, None] = {}
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[tuple[Command, int, int, int, Stream | None]] = deque()
        self._waking: asyncio.Handle | None = None
        self._resting: asyncio.Handle | None = None
        self._octets = 0  # of streams, in the batch of events that is being read
        self._most_octets = 0  # after which is rested
        self._stopped = False
        self.listening = asyncio.Event()
        """Set once the thread has bound its socket."""

    def start(self, settings: QuicSettings, family: int, **arguments: Any) -> None:
        """Start the thread. ``arguments`` are those of aiopquic's ``start``, beyond ``settings``.

        Raises:
            RuntimeError: If picoquic refuses to, as it does with files it cannot read.
        """
        self._most_octets = stream_window(settings) // REST_WINDOWS
        octets = settings.max_datagram_octets
        probes = octets is None or octets > UNPROBED_OCTETS
        keepalive_s = min(KEEPALIVE_S, settings.idle_timeout_s / 3) if settings.keepalive else 0.0
        self.context.start(
            idle_timeout_ms=max(1, round(settings.idle_timeout_s * 1000)),
            keep_alive_interval_ms=round(keepalive_s * 1000),
            max_datagram_frame_size=MAX_DATAGRAM_FRAME,
            rx_data_ring_cap=stream_window(settings),
            initial_max_data=settings.connection_window,
            initial_max_streams_bidi=MAX_STREAMS_BIDI,
            initial_max_streams_uni=MAX_STREAMS_UNI,
            congestion_control_algorithm=settings.congestion_control or "reno",
            key_update_interval=settings.key_update_packets,
            socket_buffer_size=SOCKET_BUFFER,
            ip_family=family if family == socket.AF_INET6 else socket.AF_INET,
            pmtud_policy="basic" if probes else "blocked",
            **arguments,
        )
        self._loop.add_reader(self.context.eventfd, self._readable)

    def stop(self) -> None:
        """End the thread; what it had not sent is lost."""
        if self._stopped:
            return
        self._stopped = True
        if self.context.started:
            self._loop.remove_reader(self.context.eventfd)
        for handle in (self._waking, self._resting):
            if handle is not None:
                handle.cancel()
        self._routes.clear()
        self.context.stop(0.0)
        for records in self._graves.values():
            _destroy(records)
        self._graves.clear()

    def bury(self, connection: int, records: set[int], *, is_over: bool) -> None:
        """Tell nobody of a connection any more, and let the records of its streams die.

        Unless it ``is_over``, the thread still uses them, so that they die when it is.
        """
        self._routes.pop(connection, None)
        if is_over or self._stopped:
            _destroy(records)
        else:
            self._graves[connection] = records

    def ask(
        self, command: Command, connection: int, stream: Stream | int = 0, code: int = 0
    ) -> None:
        """Have the worker do something, in the order in which it is asked."""
        if self._stopped:
            return
        if isinstance(stream, int):
            self._backlog.append((command, connection, stream, code, None))
        else:
            self._backlog.append((command, connection, stream.stream_id, code, stream))
        if self._waking is None:
            self.hand_over()

    def hand_over(self) -> bool:
        """Give the worker what it was asked to do; False while its ring is full."""
        if self._stopped:
            return False
        backlog = self._backlog
        while backlog:
            command, connection, stream_id, code, stream = backlog[0]
            record = stream.record if stream is not None else 0
            try:
                self.context.push_tx_event(
                    command, stream_id, error_code=code, cnx_ptr=connection, stream_ctx=record
                )
            except BufferError:
                if self._waking is None:
                    self._waking = self._loop.call_later(RETRY_S, self._try_again)
                self.context.wake_up()
                return False
            backlog.popleft()
        self.context.wake_up()
        return True

    def _try_again(self) -> None:
        self._waking = None
        self.hand_over()

    def _readable(self) -> None:
        self._octets = 0
        self.context.drain_rx_callback(self._take)
        if MUCH_OCTETS <= self._octets <= self._most_octets:
            self._loop.remove_reader(self.context.eventfd)
            self._resting = self._loop.call_later(REST_S, self._rested)
        dead, self._dead = self._dead, []
        for records in dead:
            _destroy(records)
        touched, self._touched = self._touched, {}
        for route in touched:
            route.answer()

    def _rested(self) -> None:
        self._resting = None
        self._loop.add_reader(self.context.eventfd, self._readable)
        self._readable()

    def _take(
        self,
        kind: int,
        stream_id: int,
        data: memoryview | None,
        fin: int,
        code: int,
        connection: int,
        record: int,
        _: int,
    ) -> None:
        """Take one event, before the library widens a window for what it read with it."""
        told = Told(kind, stream_id, data, code, record)
        if data is not None:
            self._octets += len(data)
        ends = kind in (Event.CLOSE, Event.APP_CLOSE)
        route = self._routes.get(connection)
        if route is None:
            if not connection and kind == Event.READY:
                self.listening.set()
            if not connection or connection in self._graves or ends:
                self._decay(connection, told)
                return
            route = self._accept(connection)
            if route is None:
                self._graves[connection] = set()
                return
            self._routes[connection] = route
        route.tell(told)
        self._touched[route] = None
        if ends:
            self._routes.pop(connection, None)

    def _decay(self, connection: int, told: Told) -> None:
        """Take an event of a connection that nobody is told of."""
        records = self._graves.get(connection)
        if records is None:
            return  # of the thread itself, or the echo of an end
        if told.kind in (Event.CLOSE, Event.APP_CLOSE):
            self._dead.append(self._graves.pop(connection))
        elif told.kind == Event.STREAM_DESTROY:
            records.discard(told.record)
        elif told.record:
            records.add(told.record)


def _destroy(records: set[int]) -> None:
    for record in records:
        stream_ctx_destroy(record)


def stream_window(settings: QuicSettings) -> int:
    """Return the window of each stream: the ring that holds it, whose size is a power of two."""
    return 1 << (settings.stream_window.bit_length() - 1)
