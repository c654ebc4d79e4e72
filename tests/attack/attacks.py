"""What an attacker tries, each as a coroutine that goes on until it is cancelled.

Every attack counts the answers that it gets. :data:`ATTACKS` says which of them are documented
(`docs/limits.md`): another answer is a finding, and so is none at all where one is promised.
"""

import asyncio
import contextlib
import itertools
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from moqt.aio import ClientTls, MoqtConnection, QuicSettings, open_connection
from moqt.codepoints import MessageType, StreamErrorCode, TokenAliasType
from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode as R
from moqt.codepoints import SessionErrorCode as S
from moqt.errors import MoqtError, RequestRejected
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import Command, ReleaseCredit
from moqt.session.config import SessionConfig
from moqt.wire.filters import LocationFilter, RangeFilter
from moqt.wire.framing import MessageBuffer, encode_message
from moqt.wire.messages.base import Message
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestError, RequestUpdate
from moqt.wire.messages.subscribe import Subscribe
from moqt.wire.parameters import Parameters
from moqt.wire.token import AuthorizationToken
from moqt.wire.varint import encode_vi64
from tests.attack.first_packets import ANOTHER, ATTACKER, Sender

#: Seconds for an answer. A busy machine is no finding.
PATIENCE_S = 20.0
#: Turns of an attack that wants to be quick, ahead of letting others run.
BURST = 32
FROM_START = LocationFilter.absolute_start(0, 0)


@dataclass
class Target:
    """Whom to attack.

    Attributes:
        address: Host and UDP port.
        tls: Whom to believe.
        prefix: Namespace under which things are published, as the attacker knows it.
        token: What the attacker has been given, good for a session and nothing that is there; None
            where nobody is asked for one.
        source: The attacker's own address.
        answers: What came back, by attack and answer.
    """

    address: tuple[str, int]
    tls: ClientTls
    prefix: TrackNamespace
    token: AuthorizationToken | None = None
    source: str = ATTACKER
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)

    @asynccontextmanager
    async def session(self, attack: str, **quic: Any) -> AsyncIterator[MoqtConnection]:
        """Open a session from the attacker's address; how it ends is counted."""
        host, port = self.address
        shown = () if self.token is None else (self.token,)
        try:
            with dialling_from(self.source):
                connection = await open_connection(
                    f"moqt://{host}:{port}/",
                    tls=self.tls,
                    quic=QuicSettings(**quic),
                    config=SessionConfig(tokens=lambda: shown),
                    timeout_s=PATIENCE_S,
                )
        except TimeoutError:
            raise _NoSession from None
        except (OSError, MoqtError) as exc:
            refused = "CONNECTION_REFUSED" in str(exc)
            self.count(attack, "CONNECTION_REFUSED" if refused else f"no session: {exc}")
            await asyncio.sleep(0.1)
            raise _NoSession from None
        try:
            yield connection
        finally:
            if (closed := connection.closed) is not None and closed.by_peer:
                self.count(attack, f"closed {name_of(S, closed.code)}")
            await connection.close(drain_s=0.0)

    def count(self, attack: str, answer: str) -> None:
        """Note an answer."""
        self.answers[attack, answer] += 1


class _NoSession(Exception):
    """The target let nobody in; try again."""


def name_of(registry: Any, code: int) -> str:
    """Return the name of a code, or the code."""
    try:
        return str(registry(code).name)
    except ValueError:
        return f"{code:#x}"


@contextlib.contextmanager
def dialling_from(source: str) -> Any:
    """Have sockets of connections that are dialled meanwhile be bound to an address."""

    def bound(family: int, address: Any) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.bind((source, 0))
        sock.connect(address)
        return sock

    with mock.patch("moqt.aio.aioquic.dialling.connected_socket", bound):
        yield


class Raw:
    """Writes octets of its own on streams of a session, past all rules of ours.

    What is answered on these streams is counted, and told to nobody else.
    """

    def __init__(self, connection: MoqtConnection, target: Target, attack: str) -> None:
        self.connection = connection
        self._context = connection.session._context
        self._ids = connection.session._ids
        self._transport = connection._transport
        self._target, self._attack = target, attack
        self._answers: dict[int, MessageBuffer] = {}
        self._stopped: set[int] = set()
        session_data = connection.stream_data_received

        def data_received(stream_id: int, data: bytes, fin: bool) -> None:
            if stream_id not in self._answers:
                session_data(stream_id, data, fin)
                return
            self._transport.consumed(stream_id, len(data))
            buffer = self._answers[stream_id]
            buffer.feed(data)
            with contextlib.suppress(MoqtError):  # of what is no refusal we know no context
                for message in buffer.messages(MessageType.SUBSCRIBE):
                    if isinstance(message, RequestError):
                        self._count(name_of(R, message.error_code))

        def reset_received(stream_id: int, code: int) -> None:
            self._count(f"reset {name_of(StreamErrorCode, code)}")

        def stop_received(stream_id: int, code: int) -> None:
            self._stopped.add(stream_id)
            self._count(f"stopped {name_of(StreamErrorCode, code)}")

        connection.stream_data_received = data_received  # type: ignore[method-assign]
        connection.stream_reset_received = reset_received  # type: ignore[method-assign]
        connection.stop_sending_received = stop_received  # type: ignore[method-assign]

    def _count(self, answer: str) -> None:
        self._target.count(self._attack, answer)

    @property
    def is_over(self) -> bool:
        return self.connection.closed is not None

    def request_id(self) -> int:
        return self._ids.next_id()

    def bidi(self) -> int:
        stream_id = self._context.stream_ids.bidi()
        self._answers[stream_id] = MessageBuffer()
        return stream_id

    def take_over(self, stream_id: int) -> None:
        """Have the session hear no more of a request of its own."""
        self._answers[stream_id] = MessageBuffer()

    def uni(self) -> int:
        return self._context.stream_ids.uni()

    def write(self, stream_id: int, data: bytes) -> bool:
        """Write, if the peer grants the stream and the octets, and has not stopped it."""
        if stream_id in self._stopped or self._transport.stream_credit(stream_id) < len(data):
            return False
        self._transport.send_stream_data(stream_id, data)
        return True

    def say(self, stream_id: int, *messages: Message) -> bool:
        return self.write(stream_id, b"".join(map(encode_message, messages)))


def name(target: Target, number: int) -> FullTrackName:
    """Return a Track Name that nobody has."""
    return FullTrackName(target.prefix + TrackNamespace((b"none",)), str(number).encode())


# -- the attacks ---------------------------------------------------------------------------------


async def handshakes(target: Target) -> None:
    """Begin handshakes and complete none of them."""
    sender = Sender(target.address, ANOTHER)  # or none of the other attacks would get in
    try:
        while True:
            sender.begin(2)
            for answer in sender.answers():
                long_header = answer[:1] >= b"\x80"
                kind = (answer[0] & 0x30) >> 4 if long_header else -1
                names = {0: "INITIAL", 2: "HANDSHAKE", 3: "RETRY"}
                target.count("handshakes", names.get(kind, "other"))
            await asyncio.sleep(0.02)
    finally:
        sender.close()


async def requests(target: Target) -> None:
    """Ask for what there is not, as fast as it goes, whatever is answered."""
    async with target.session("requests") as connection:
        waiting: set[asyncio.Task[None]] = set()
        number = 0

        async def ask(number: int) -> None:
            with counting(target, "requests"):
                await connection.track_status(name(target, number), timeout_s=PATIENCE_S)

        while connection.closed is None:
            while len(waiting) < 120 and connection.closed is None:
                number += 1
                task = asyncio.create_task(ask(number))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*waiting, return_exceptions=True)


async def namespaces(target: Target) -> None:
    """Announce as many namespaces as it can, and keep them."""
    async with target.session("namespaces") as connection:
        for number in range(10_000):
            prefix = TrackNamespace((b"attack", target.source.encode(), str(number).encode()))
            with counting(target, "namespaces"):
                await connection.publish_namespace(prefix, timeout_s=PATIENCE_S)
            if connection.closed is not None:
                return


async def filters(target: Target) -> None:
    """Ask with more ranges than the target says that it takes."""
    async with target.session("filters") as connection:
        ranges = RangeFilter(P.OBJECTID_FILTER, ranges=tuple((2 * n, 2 * n) for n in range(65)))
        with lenient(connection):
            for number in range(1_000_000):
                if connection.closed is not None:
                    return
                with counting(target, "filters"):
                    await connection.subscribe(
                        name(target, number), range_filters=(ranges,), timeout_s=PATIENCE_S
                    )


async def updates(target: Target) -> None:
    """Change one request again and again."""
    async with target.session("updates") as connection:
        raw = Raw(connection, target, "updates")
        stream_id = raw.bidi()
        raw.say(stream_id, Subscribe(raw.request_id(), name(target, 0), Parameters({})))
        while not raw.is_over:
            for _ in range(BURST):
                update = RequestUpdate(raw.request_id(), Parameters({P.SUBSCRIBER_PRIORITY: 7}))
                if not raw.say(stream_id, update):
                    stream_id = raw.bidi()
                    again = Subscribe(raw.request_id(), name(target, 0), Parameters({}))
                    if not raw.say(stream_id, again):
                        return
            await asyncio.sleep(0)


async def real_updates(target: Target) -> None:
    """Change a request that is served, again and again."""
    async with target.session("real-updates") as connection:
        raw = Raw(connection, target, "real-updates")
        with counting(target, "real-updates", ends=True):
            listing = await connection.subscribe_namespace(target.prefix, timeout_s=PATIENCE_S)
        stream_id = connection.session._requests.by_id[listing.request_id].stream_id
        raw.take_over(stream_id)
        while not raw.is_over:
            for _ in range(BURST):
                if not raw.say(stream_id, RequestUpdate(raw.request_id(), Parameters({}))):
                    break
            await asyncio.sleep(0)


async def halves(target: Target) -> None:
    """Open streams of both kinds, write half of a message or a header, and leave them open."""
    async with target.session("halves") as connection:
        raw = Raw(connection, target, "halves")
        whole = encode_message(Subscribe(0, name(target, 0), Parameters({})))
        while not raw.is_over:
            for stream_id, data in ((raw.bidi(), whole[:-1]), (raw.uni(), b"\xd0")):
                raw.write(stream_id, data)
            await asyncio.sleep(0.01)


async def unread(target: Target) -> None:
    """Ask for all that is published, and consume nothing of it."""
    async with target.session("unread") as connection:
        with counting(target, "unread", ends=True):
            tracks = await _found(connection, target.prefix)
        with never_consuming(connection):
            for namespace in tracks:
                for track in (b"k.raw.s0", b"v.raw.s0", b"manifest"):
                    with counting(target, "unread"):
                        await connection.subscribe(
                            FullTrackName(namespace, track), fill=FROM_START, timeout_s=PATIENCE_S
                        )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await connection.wait_closed()


async def tokens(target: Target) -> None:
    """Register one token after the other."""
    async with target.session("tokens") as connection:
        raw = Raw(connection, target, "tokens")
        for alias in range(100_000):
            token = AuthorizationToken(TokenAliasType.REGISTER, alias, 0, bytes(1000))
            parameters = Parameters({P.AUTHORIZATION_TOKEN: (token,)})
            raw.say(raw.bidi(), Subscribe(raw.request_id(), name(target, alias), parameters))
            if raw.is_over:
                return
            await asyncio.sleep(0)


async def forgeries(target: Target) -> None:
    """Show tokens that look like good ones, each another one, with all that is asked for."""
    shown = target.token or AuthorizationToken.use_value(0, bytes(200))
    async with target.session("forgeries") as connection:

        async def ask(number: int) -> None:
            signed, signature = shown.value[:-64], secrets.token_bytes(64)
            forged = replace(shown, value=signed + signature)
            with counting(target, "forgeries"):
                await connection.track_status(
                    FullTrackName(target.prefix, str(number).encode()),
                    tokens=[forged],
                    timeout_s=PATIENCE_S,
                )

        for first in itertools.count(0, BURST):
            await asyncio.gather(*(ask(first + number) for number in range(BURST)))
            if connection.closed is not None:
                return


async def lengths(target: Target) -> None:
    """Declare Objects of 2**60 octets, and send some of each."""
    async with target.session("lengths") as connection:
        raw = Raw(connection, target, "lengths")
        track = FullTrackName(TrackNamespace((b"attack", b"lengths")), target.source.encode())
        raw.say(raw.bidi(), Publish(raw.request_id(), track, 1))
        while not raw.is_over:
            head = bytes([0x10, 1, 0, 128, 0]) + encode_vi64(1 << 60)
            raw.write(raw.uni(), head + bytes(1000))
            await asyncio.sleep(0.005)


# -- what they share -----------------------------------------------------------------------------


@contextlib.contextmanager
def counting(target: Target, attack: str, *, ends: bool = False) -> Any:
    """Count how a request ends; if it ``ends`` an attack that it is refused, raise it again."""
    try:
        yield
    except RequestRejected as exc:
        target.count(attack, name_of(R, exc.code))
        if ends:
            raise
    except TimeoutError:
        target.count(attack, "no answer")
        if ends:
            raise
    except MoqtError:
        if ends:
            raise
        # The session is over, which is counted there.
    else:
        if not ends:
            target.count(attack, "accepted")


@contextlib.contextmanager
def lenient(connection: MoqtConnection) -> Any:
    """Have our own session send what it knows to be refused."""
    with mock.patch.object(connection.session, "_check_filters", return_value=None):
        yield


@contextlib.contextmanager
def never_consuming(connection: MoqtConnection) -> Any:
    """Have a session never grant more than it began with."""
    carry_out = connection._carry_out

    def keep(command: Command) -> None:
        if not isinstance(command, ReleaseCredit):
            carry_out(command)

    with mock.patch.object(connection, "_carry_out", keep):
        yield


async def _found(connection: MoqtConnection, prefix: TrackNamespace) -> list[TrackNamespace]:
    """Return what is published under a prefix."""
    listing = await connection.subscribe_namespace(prefix, timeout_s=PATIENCE_S)
    found: list[TrackNamespace] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            async for event in listing:
                found.append(event.namespace)
                break
    listing.cancel()
    return found


@dataclass(frozen=True)
class Attack:
    """One attack, and what is documented as its answer."""

    run: Callable[[Target], Awaitable[None]]
    known: frozenset[str]
    at_relay: frozenset[str]
    """What else a relay answers."""


def _attack(run: Callable[[Target], Awaitable[None]], known: str, *, relay: str = "") -> Attack:
    everywhere = frozenset(known.split()) | {"CONNECTION_REFUSED"}
    return Attack(run, everywhere, frozenset(relay.split()))


_FLOOD = "EXCESSIVE_LOAD closed:INTERNAL_ERROR"
_CUT = "reset:EXCESSIVE_LOAD stopped:EXCESSIVE_LOAD"
#: A request that ended is not read any further.
_OVER = "stopped:CANCELLED reset:CANCELLED"
ATTACKS: dict[str, Attack] = {
    "handshakes": _attack(handshakes, "INITIAL HANDSHAKE RETRY other"),
    "requests": _attack(requests, f"DOES_NOT_EXIST {_FLOOD}"),
    # A relay takes them as far as there are request streams; then nothing more can be asked.
    "namespaces": _attack(namespaces, f"UNINTERESTED {_FLOOD}", relay="accepted no:answer"),
    "filters": _attack(filters, f"INVALID_FILTER {_FLOOD}"),
    "updates": _attack(updates, f"DOES_NOT_EXIST closed:TOO_MANY_REQUEST_UPDATES {_FLOOD} {_OVER}"),
    "real-updates": _attack(real_updates, f"closed:TOO_MANY_REQUEST_UPDATES {_FLOOD} {_OVER}"),
    "halves": _attack(halves, f"{_CUT} {_FLOOD}"),
    "unread": _attack(unread, f"accepted DOES_NOT_EXIST {_FLOOD}"),
    "tokens": _attack(tokens, f"DOES_NOT_EXIST closed:AUTH_TOKEN_CACHE_OVERFLOW {_FLOOD} {_OVER}"),
    "forgeries": _attack(forgeries, f"DOES_NOT_EXIST {_FLOOD}"),
    "lengths": _attack(
        lengths, f"UNINTERESTED {_CUT} {_FLOOD} {_OVER}", relay="closed:DUPLICATE_TRACK_ALIAS"
    ),
}


#: What all are answered where tokens are asked for, by who has none for it.
_NO_RIGHT = frozenset({"UNAUTHORIZED", "MALFORMED_AUTH_TOKEN", "closed:UNAUTHORIZED"})


def undocumented(attack: str, answer: str, where: str) -> bool:
    """Whether an answer is none of those that are documented."""
    one = ATTACKS[attack]
    known = one.known
    if where == "relay":
        known |= one.at_relay
    if where == "guarded":
        known |= _NO_RIGHT
    return answer.replace(" ", ":") not in known


async def attack_until_cancelled(which: str, target: Target) -> None:
    """Go on with one attack, in ever new sessions."""
    while True:
        with contextlib.suppress(_NoSession, MoqtError, TimeoutError, OSError):
            await ATTACKS[which].run(target)
        await asyncio.sleep(0)
