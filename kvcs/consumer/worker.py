"""What runs in a process of :mod:`kvcs.consumer.processes`: one connection, and its errands. Shell.

It is told what to do through a socket, whose number is its one argument, and ends when that is
closed. It knows no manifest and no key of the scope; what it needs of both comes with each errand.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import uvloop

from kvcs.consumer.errands import (
    LENGTH_OCTETS,
    Accepted,
    Bad,
    BadErrand,
    Brought,
    Dial,
    Dialled,
    Dropped,
    Ended,
    Errand,
    HangUp,
    How,
    HungUp,
    Leaving,
    Misplaced,
    NotDialled,
    Ping,
    Placed,
    Placing,
    Pong,
    Ready,
    Report,
    Run,
    Silent,
    Stop,
    TimedOut,
    Wanted,
    length_of,
    pack,
    unpack,
)
from kvcs.consumer.events import FailureReason
from kvcs.consumer.examining import Examined, Examiner
from kvcs.consumer.failures import Failure
from kvcs.consumer.intake import Intake
from kvcs.consumer.lanes import ask, max_ranges
from kvcs.consumer.sessions import Sessions
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.tasks import Tasks, tasks
from kvcs.errors import BadObject, ConfigError
from kvcs.garbage import collected_aside
from kvcs.kvsp.standard import standard_codecs
from kvcs.store.shared import SharedPlaces
from kvcs.telemetry import set_up_logging
from kvcs.trust.sealing import Cover, opener_with
from moqt.aio import MoqtConnection
from moqt.codepoints import ObjectStatus, RangeMarkerKind
from moqt.errors import MoqtError, RequestRejected
from moqt.session.events import FetchEnded, ObjectReceived, RangeMarked, SubscriptionEnded


class Connection:
    """The connection of this process, and the errands that run over it."""

    def __init__(
        self, conn: MoqtConnection, settings: RetrievalSettings, pool: ThreadPoolExecutor,
        mouth: "Mouth",
    ) -> None:  # fmt: skip
        self._conn = conn
        self._settings = settings
        self._mouth = mouth
        self._crash: BaseException | None = None
        self._crashed = asyncio.Event()
        self._intake = Intake(pool, settings, crashed=self._note_crash, idle=lambda: None)
        self._codecs = standard_codecs()
        self._errands: dict[int, asyncio.Task[None]] = {}
        self._places: SharedPlaces | None = None
        self._file = ""

    async def serve(self, group: Tasks) -> None:
        """Watch over the connection until it is gone.

        Raises:
            Exception: Whatever an examination raised unexpectedly.
        """
        self._mouth.say(Dialled(max_ranges(self._conn)))
        watching = [group.start(self._watch_silence()), group.start(self._watch_leaving())]
        over = group.start(self._conn.wait_closed())
        crash = group.start(self._crashed.wait())
        await asyncio.wait({over, crash}, return_when=asyncio.FIRST_COMPLETED)
        if self._crash is not None:
            raise self._crash
        for task in (*watching, crash):
            task.cancel()
        if self._errands:
            await asyncio.wait(self._errands.values())
        closed = self._conn.closed
        self._mouth.say(HungUp("" if closed is None else closed.reason or f"{closed.code!r}"))

    def begin(self, number: int, errand: Errand, group: Tasks) -> None:
        """Run an errand."""
        self._errands[number] = task = group.start(self._run(number, errand))
        task.add_done_callback(lambda _: self._errands.pop(number, None))

    def stop(self, number: int) -> None:
        """Give an errand up."""
        if (task := self._errands.get(number)) is not None:
            task.cancel()

    async def hang_up(self) -> None:
        """Close the connection."""
        await self._conn.close(drain_s=0.0)

    def close(self) -> None:
        """Let go of the sink's memory."""
        if self._places is not None:
            self._places.close()

    async def _run(self, number: int, errand: Errand) -> None:
        end = Ended(number, How.STOPPED)
        try:
            end = await self._run_to_end(number, errand)
        except RequestRejected as exc:
            end = Ended(number, How.REFUSED, int(exc.code), exc.reason)
        except MoqtError as exc:
            end = Ended(number, How.LOST, reason=str(exc))
        except TimeoutError as exc:
            end = Ended(number, How.UNANSWERED, reason=str(exc))
        finally:
            # From now on nothing is placed on it: see _judge().
            self._errands.pop(number, None)
            self._mouth.say(end)

    async def _run_to_end(self, number: int, errand: Errand) -> Ended:
        placing = errand.placing
        assert placing is not None
        try:
            places = self._open(placing)
        except ConfigError as exc:
            self._mouth.say(Accepted(number))
            self._mouth.report(number, Misplaced(str(exc)))
            return Ended(number, How.STOPPED)
        wanted = Wanted(placing.missing)
        examiner = Examiner(
            placing.track,
            placing.entry(),
            placing.compat(),
            self._codecs,
            placing.max_data_octets,
            opener_with(placing.key),
        )
        request = await ask(self._conn, errand)
        self._mouth.say(Accepted(number))
        try:
            async for item in request:
                if isinstance(item, RangeMarked) and item.kind is RangeMarkerKind.TIMED_OUT:
                    self._mouth.report(number, TimedOut())
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue
                layer, block = item.location
                if (layer, block) not in wanted:
                    self._mouth.report(number, Dropped(layer, block))
                    continue
                judge = partial(self._judge, number, placing, wanted, places, layer, block)
                cover = Cover(item.publisher_priority, item.properties)
                self._intake.take(examiner, item.payload, layer, block, cover, judge)
                await self._intake.keep_bound()
                await self._mouth.breathe()
        finally:
            request.cancel()
            if self._conn.closed is not None:  # what has come is good
                await self._intake.down_to(0)
        await self._intake.down_to(0)
        match request.ended:
            case None:
                return Ended(number, How.STOPPED)
            case FetchEnded(complete=True):
                return Ended(number, How.FETCHED)
            case FetchEnded(code=code):
                return Ended(number, How.RESET, int(code or 0))
            case SubscriptionEnded(code=code, reason=reason):
                return Ended(number, How.DONE, int(code), reason)

    def _judge(
        self,
        number: int,
        placing: Placing,
        wanted: Wanted,
        places: SharedPlaces,
        layer: int,
        block: int,
        verdict: Examined | BadObject,
    ) -> None:
        """Place an Object that passed its examination, if its errand still runs."""
        if number not in self._errands:
            return
        report: Report
        if isinstance(verdict, BadObject):
            report = Bad(layer, block, verdict.reason, str(verdict))
        elif not wanted.claim(layer, block):
            report = Dropped(layer, block)
        else:
            try:
                places.put(placing.track.component, layer, placing.position + block, verdict.tensor)
                report = Placed(layer, block, verdict.digest, verdict.octets)
            except ValueError as exc:
                report = Misplaced(f"{placing.track} layer {layer}: {exc}")
        self._mouth.report(number, report)

    def _open(self, placing: Placing) -> SharedPlaces:
        """Return the places of a sink, which is the same one nearly always."""
        if self._places is None or self._file != placing.file:
            self.close()
            self._places = None
            self._places = SharedPlaces(placing.file, placing.compat(), placing.places)
            self._file = placing.file
        return self._places

    async def _watch_silence(self) -> None:
        silence_s = self._settings.silence_s
        while self._conn.closed is None:
            await self._conn.wait_silent(silence_s)
            if self._conn.closed is not None:
                return
            self._mouth.say(Silent(True))
            heard_at = self._conn.heard_at
            while self._conn.heard_at == heard_at:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(silence_s / 4):
                        await self._conn.wait_closed()
                        return
            self._mouth.say(Silent(False))

    async def _watch_leaving(self) -> None:
        await self._conn.wait_going_away()
        if self._conn.closed is None:
            self._mouth.say(Leaving())

    def _note_crash(self, error: BaseException) -> None:
        self._crash = error
        self._crashed.set()


class Mouth:
    """What is told to the parent: many reports at once, and never more than it takes."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._reports: dict[int, list[Report]] = defaultdict(list)

    def report(self, number: int, report: Report) -> None:
        """Tell what became of an Object, soon and in order."""
        if not self._reports:
            self._loop.call_soon(self._flush)
        self._reports[number].append(report)

    def say(self, message: object) -> None:
        """Tell something, after what has been reported."""
        self._flush()
        self._writer.write(pack(message))

    async def breathe(self) -> None:
        """Wait until the parent has taken most of what was told."""
        await self._writer.drain()

    def _flush(self) -> None:
        reports, self._reports = self._reports, defaultdict(list)
        for number, several in reports.items():
            self._writer.write(pack(Brought(number, tuple(several))))


class Worker:
    """Does what the parent says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._mouth = Mouth(writer)
        self._connecting: asyncio.Task[None] | None = None
        self._connection: Connection | None = None

    async def serve(self) -> None:
        """Do what is told until the parent closes the socket."""
        self._mouth.say(Ready())
        async with tasks() as group:
            while (message := await self._next()) is not None:
                self._obey(message, group)

    async def _next(self) -> object:
        try:
            length = length_of(await self._reader.readexactly(LENGTH_OCTETS))
            return unpack(await self._reader.readexactly(length))
        except (EOFError, OSError, BadErrand):
            return None

    def _obey(self, message: object, group: Tasks) -> None:
        connection = self._connection
        match message:
            case Dial():
                self._connecting = group.start(self._connect(message, group))
            case Run(number, errand):
                if connection is None:  # it was lost, and the parent is about to hear of that
                    self._mouth.say(Ended(number, How.LOST, reason="the connection was lost"))
                else:
                    connection.begin(number, errand, group)
            case Stop(number):
                if connection is not None:
                    connection.stop(number)
            case Ping():
                self._mouth.say(Pong())
            case HangUp():
                if connection is not None:
                    group.start(connection.hang_up())
                elif self._connecting is not None and not self._connecting.done():
                    self._connecting.cancel()
                    self._mouth.say(NotDialled(Failure(FailureReason.UNREACHABLE, "given up")))

    async def _connect(self, dial: Dial, group: Tasks) -> None:
        sessions = Sessions()
        made = await sessions.dial(dial.spec, dial.uri, dial.timeout_s)
        if isinstance(made, Failure):
            self._mouth.say(NotDialled(made))
            return
        pool = ThreadPoolExecutor(dial.settings.workers, "kvcs-examine")
        connection = self._connection = Connection(made, dial.settings, pool, self._mouth)
        try:
            await connection.serve(group)
        finally:
            self._connection = None
            pool.shutdown(wait=False, cancel_futures=True)
            connection.close()
            await sessions.close()


async def _serve(parent: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=parent)
    try:
        async with collected_aside():
            await Worker(reader, writer).serve()
    finally:
        writer.close()


def main() -> None:
    """Run as a process of :mod:`kvcs.consumer.processes`."""
    # Whoever interrupts means the parent, which ends this one by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging(level="warning")
    parent = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parent))
