"""Processes: connections that each have an interpreter, and so a core, of their own. Shell.

Such a process asks, examines and places into memory that the sink shares with it; what it tells is
that an Object is in its place. Everything else stays here: the manifest, keys, what counts as
missing, and the events. What it is told goes through a socket and never through its arguments or
its environment. :mod:`kvcs.consumer.worker` is what runs in it.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count

import structlog

from kvcs.consumer.errands import (
    LENGTH_OCTETS,
    Accepted,
    BadErrand,
    Brought,
    Dial,
    Dialled,
    Ended,
    Errand,
    HangUp,
    How,
    HungUp,
    Leaving,
    NotDialled,
    Ping,
    Ready,
    Report,
    Run,
    Shown,
    Silent,
    Stop,
    length_of,
    pack,
    unpack,
)
from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.sessions import ConnectionSpec
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.tasks import in_any_case, set_within
from moqt.aio import engine
from moqt.codepoints import SessionErrorCode
from moqt.errors import RequestRejected, SessionClosed
from moqt.session.events import FetchEnded, RequestId, SubscriptionEnded

log = structlog.get_logger("kvcs.consumer")

#: Seconds that an interpreter may take to start.
START_S = 20.0
#: Seconds beyond its own limit that a process may take to say what became of something.
GRACE_S = 1.0
#: How often a process that says nothing is asked for a sign of life before it counts as silent.
SILENT_PINGS = 3
#: What became of so many Objects may wait to be taken note of; then nothing more is read.
MAX_WAITING = 65_536
#: What the interpreter is started with.
_PROGRAM = "from kvcs.consumer.worker import main; main()"


class ProcessBringing:
    """What comes of an errand in another process."""

    def __init__(self, lane: "ProcessLane", number: int) -> None:
        self.ended: SubscriptionEnded | FetchEnded | None = None
        """See :class:`~kvcs.consumer.lanes.Bringing`."""

        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lane = lane
        self._number = number
        self._waiting: deque[Report] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._over = asyncio.Event()
        self._is_stopped = False

    def __aiter__(self) -> AsyncIterator[Report]:
        """Iterate over what became of Objects, in order."""
        return self

    async def __anext__(self) -> Report:
        """Return what became of the next Object.

        Raises:
            SessionClosed: If the connection, or its process, is lost.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._over.is_set():
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        self._room.set()
        return self._waiting.popleft()

    async def stop(self) -> None:
        """See :class:`~kvcs.consumer.lanes.Bringing`. Costs the process, if it does not obey."""
        self._is_stopped = True
        self._waiting.clear()
        self._room.set()
        if not self._over.is_set():
            await in_any_case(self._stop())

    async def _stop(self) -> None:
        self._lane.tell(Stop(self._number))
        for patience_s in (GRACE_S, GRACE_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._over.wait()
                    return
            self._lane.kill()

    # -- told by the lane ------------------------------------------------------------------------

    async def brought(self, reports: tuple[Report, ...]) -> None:
        """Take note of what came, once there is room."""
        if self._is_stopped:
            return
        self._waiting.extend(reports)
        self._news.set()
        while len(self._waiting) > MAX_WAITING:
            self._room.clear()
            await self._room.wait()

    def finish(self, end: Ended) -> None:
        """Nothing more will come."""
        match end.how:
            case How.DONE:
                self.ended = SubscriptionEnded(
                    request_id=RequestId(0),
                    code=end.code,
                    reason=end.reason,
                    complete=False,
                    by_peer=True,
                )
            case How.FETCHED | How.RESET:
                complete = end.how is How.FETCHED
                self.ended = FetchEnded(
                    request_id=RequestId(0), complete=complete, code=None if complete else end.code
                )
            case How.REFUSED:
                self._error = RequestRejected(end.code, end.reason, None)
            case How.UNANSWERED:
                self._error = TimeoutError(end.reason)
            case How.LOST:
                self._error = SessionClosed(
                    SessionErrorCode.INTERNAL_ERROR, end.reason, by_peer=False
                )
        if not self.accepted.done():
            self.accepted.set_exception(self._error or TimeoutError("given up"))
            self.accepted.exception()  # the asker may be gone
        self._over.set()
        self._news.set()


class ProcessLane:
    """A connection in a process of its own; see :class:`~kvcs.consumer.lanes.Lane`."""

    is_apart = True

    def __init__(self, process: "Process") -> None:
        self.max_ranges = 0
        self.is_over = False
        self.is_left = False  # from here, not by the peer
        self.end = ""
        self.dialled: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._process = process
        self._errands: dict[int, ProcessBringing] = {}
        self._numbers = count()
        self._is_leaving = False
        self._is_silent = False
        self._patience: asyncio.TimerHandle | None = None
        self._heard_at = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """See :class:`~kvcs.consumer.lanes.Lane`."""
        return not self.is_over and not self._is_leaving

    def is_good(self, silence_s: float) -> bool:
        """See :class:`~kvcs.consumer.lanes.Lane`; the process has to give a sign of life, too."""
        heard_s = time.monotonic() - self._heard_at
        return self.is_usable and not self._is_silent and heard_s < silence_s

    async def run(self, errand: Errand) -> ProcessBringing:
        """See :class:`~kvcs.consumer.lanes.Lane`."""
        if self.is_over:
            raise SessionClosed(SessionErrorCode.INTERNAL_ERROR, self.end, by_peer=False)
        number = next(self._numbers)
        bringing = self._errands[number] = ProcessBringing(self, number)
        self.tell(Run(number, errand))
        try:
            async with asyncio.timeout(errand.timeout_s + GRACE_S):
                await asyncio.shield(bringing.accepted)
        except BaseException:
            await bringing.stop()
            raise
        return bringing

    async def until_silent(self, silence_s: float) -> None:
        """See :class:`~kvcs.consumer.lanes.Lane`."""
        await self._until(lambda: False, silence_s)

    async def until_in_doubt(self, silence_s: float) -> None:
        """See :class:`~kvcs.consumer.lanes.Lane`."""
        await self._until(lambda: self._is_leaving, silence_s)

    def leave(self) -> None:
        """See :class:`~kvcs.consumer.lanes.Lane`. Costs the process, if it does not obey."""
        if not self.is_over and not self.is_left:
            self.is_left = self._is_leaving = True
            self.tell(HangUp())
            self._patience = asyncio.get_running_loop().call_later(GRACE_S, self.kill)

    def tell(self, message: object) -> None:
        """Tell the process something, as long as this is its lane."""
        if not self.is_over:
            self._process.tell(message)

    def kill(self) -> None:
        """End the process at once."""
        if not self.is_over:
            self._process.kill()

    # -- told by the process ---------------------------------------------------------------------

    async def handle(self, message: object) -> None:
        """Take what the process tells of its connection and its errands."""
        self._heard_at = time.monotonic()
        match message:
            case Dialled(max_ranges):
                self.max_ranges = max_ranges
                self._answer(None)
            case NotDialled(failure):
                self.finish(failure.text, failure)
            case Accepted(number):
                bringing = self._errands.get(number)
                if bringing is not None and not bringing.accepted.done():
                    bringing.accepted.set_result(None)
            case Brought(number, reports):
                if (bringing := self._errands.get(number)) is not None:
                    await bringing.brought(reports)
            case Ended(number):
                if (bringing := self._errands.pop(number, None)) is not None:
                    bringing.finish(message)
            case Silent(is_silent):
                self._is_silent = is_silent
                self._tell_change()
            case Leaving():
                self._is_leaving = True
                self._tell_change()
            case HungUp(reason):
                self.finish(reason)

    def finish(self, reason: str, failure: Failure | None = None) -> None:
        """The connection, or the whole process, is gone."""
        if self.is_over:
            return
        self.is_over, self.end = True, reason
        if self._patience is not None:
            self._patience.cancel()
        self._answer(failure or Failure(FailureReason.UNREACHABLE, reason, again=True))
        errands, self._errands = self._errands, {}
        for number, bringing in errands.items():
            bringing.finish(Ended(number, How.LOST, reason=reason))
        self._tell_change()

    def _answer(self, failure: Failure | None) -> None:
        if not self.dialled.done():
            self.dialled.set_result(failure)

    async def _until(self, left: Callable[[], bool], silence_s: float) -> None:
        """Return when the peer or the process is silent, the lane is over, or ``left`` says so.

        The peer is watched by the process. The process is asked, and is silent when it has
        answered none of several questions: an event loop of ours that stands still costs one.
        """
        unanswered = 0
        while not (self.is_over or self._is_silent or left() or unanswered == SILENT_PINGS):
            heard_at = self._heard_at
            self.tell(Ping())
            await set_within(self._changed, silence_s / (SILENT_PINGS + 1))
            unanswered = 0 if self._heard_at != heard_at else unanswered + 1

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Process:
    """An interpreter that has one connection at a time, as its parent sees it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.lane: ProcessLane | None = None
        self.is_gone = False
        self.idle = asyncio.Event()
        """Set when it has no connection, also because it is gone."""

        self._process = process
        self._reader = reader
        self._writer = writer
        self._ready = asyncio.Event()
        self._end = ""  # how it ended
        # Awaited by close().
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> "Process":
        """Start one.

        Raises:
            OSError: If the system does not let us.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), env=_environment(),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            return cls(process, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def dial(
        self, spec: ConnectionSpec, uri: str, timeout_s: float, settings: RetrievalSettings
    ) -> ProcessLane | Failure:
        """Have it make a connection; it has none."""
        # What the name of an engine stands for that is not said is decided in this process.
        quic = replace(spec.quic, engine=spec.quic.engine or engine.DEFAULT)
        # So are the tokens: whoever gives them stays here, with what it reads them from.
        config = replace(spec.config, tokens=Shown(tuple(spec.config.tokens())))
        spec = replace(spec, quic=quic, config=config)
        lane = self.lane = ProcessLane(self)
        self.idle.clear()
        if self._end:
            lane.finish(self._end)
        try:
            async with asyncio.timeout(START_S):
                await self._ready.wait()
            self.tell(Dial(spec=spec, uri=uri, timeout_s=timeout_s, settings=settings))
            async with asyncio.timeout(timeout_s + GRACE_S):
                failure = await asyncio.shield(lane.dialled)
        except TimeoutError:
            self.kill()
            return Failure(
                FailureReason.UNREACHABLE, f"{uri}: a process for it does not answer", again=True
            )
        except asyncio.CancelledError:
            lane.leave()
            raise
        return lane if failure is None else failure

    @property
    def is_leaving(self) -> bool:
        """Whether its connection is being closed."""
        return self.lane is not None and self.lane.is_left

    def tell(self, message: object) -> None:
        """Send a message; nothing happens if it is gone."""
        if not self.is_gone:
            self._writer.write(pack(message))

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End it, and wait for that."""
        self._writer.close()
        if not self._ready.is_set():
            self.kill()  # it would only hear of it once it has started
        for patience_s in (GRACE_S, GRACE_S):
            done, _ = await asyncio.wait([self._reading], timeout=patience_s)
            if done:
                return
            self.kill()

    async def _read(self) -> None:
        sent = ""
        try:
            while True:
                length = length_of(await self._reader.readexactly(LENGTH_OCTETS))
                message = unpack(await self._reader.readexactly(length))
                if isinstance(message, Ready):
                    self._ready.set()
                elif self.lane is not None:
                    await self.lane.handle(message)
                    if self.lane.is_over:
                        self.lane = None
                        self.idle.set()
        except (EOFError, OSError):
            pass  # it has ended, or is being ended
        except BadErrand as exc:
            sent = f" after it sent what cannot be read: {exc}"
            self.kill()
        finally:
            self.is_gone = True
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
            self.kill()
            status = await self._process.wait()
            self._ready.set()
            self.idle.set()
            self._end = f"its process ended with status {status}{sent}"
            if self.lane is not None:
                self.lane.finish(self._end)


class Processes:
    """The processes of one retrieval. They are used again for one connection after the other.

    Args:
        settings: How many there are to be, among other things that they are told.
    """

    def __init__(self, settings: RetrievalSettings) -> None:
        self._settings = settings
        self._starting: deque[asyncio.Task[Process]] = deque()
        self._all: list[Process] = []

    def start(self) -> None:
        """Start them, without waiting for that: there is something to do until they are needed."""
        for _ in range(self._settings.connections):
            # Awaited by dial() or close().
            self._starting.append(asyncio.create_task(Process.start()))

    async def dial(self, spec: ConnectionSpec, uri: str, timeout_s: float) -> ProcessLane | Failure:
        """Make a connection in a process that has none."""
        try:
            process = await self._idle()
        except OSError as exc:
            text = f"no process for a connection: {exc.strerror or exc}"
            return Failure(FailureReason.UNREACHABLE, text, again=True)
        return await process.dial(spec, uri, timeout_s, self._settings)

    async def close(self) -> None:
        """End all of them."""
        for found in await asyncio.gather(*self._starting, return_exceptions=True):
            if isinstance(found, Process):
                self._all.append(found)
        await asyncio.gather(*(process.close() for process in self._all))

    async def _idle(self) -> Process:
        """Return a process that has no connection: one that is left, or a new one."""
        while True:
            self._all = [process for process in self._all if not process.is_gone]
            for process in self._all:
                if process.lane is None:
                    return process
            leaving = [process for process in self._all if process.is_leaving]
            if not leaving:
                return await self._new()
            if not await set_within(leaving[0].idle, GRACE_S):
                leaving[0].kill()

    async def _new(self) -> Process:
        if not self._starting:
            self._starting.append(asyncio.create_task(Process.start()))
        starting = self._starting.popleft()
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._starting.append(starting)  # for close()
            raise
        self._all.append(process)
        return process


def _environment() -> dict[str, str]:
    """Return what the interpreter finds modules by, without what commands are told."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("KVCS_")}
    found["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return found
