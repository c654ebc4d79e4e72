"""Two sessions whose wire says half right what they said: in other orders, with other numbers.

What goes over is cut into messages and headers. Each may be dropped, doubled, moved to the front,
put on another stream, or have a number in it replaced, so that the grammar is right and the
conversation is wrong. Both ends are victims of it.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moqt.codepoints import ParameterType as P
from moqt.codepoints import (
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.errors import UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import CloseSession, Command, SendStreamData, StreamId
from moqt.session.config import SessionConfig
from moqt.session.events import Event, SessionTerminated
from moqt.session.streams import is_unidirectional
from moqt.wire.filters import LocationFilter, RangeFilter
from moqt.wire.framing import MESSAGES
from moqt.wire.parameters import Parameters
from moqt.wire.varint import decode_vi64, encode_vi64
from tests.fuzz.choices import Octets
from tests.session.pair import NAME, Direction, End, Pair, make_track, publish_group

CONFIG = SessionConfig(
    authority="a",
    max_object_octets=2_000,
    max_partial_octets=5_000,
    max_parked_octets=2_000,
    max_parked_streams=5,
    max_auth_token_cache_octets=100,
    max_requests=20,
    max_request_updates=4,
)
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 63, 64, 1 << 14, (1 << 62) - 1, 1 << 63, (1 << 64) - 1)
#: What the application may be told at once, and a session may hold without a bound of its own.
MAX_STEPS = 60
#: Streams of the peer's that nobody of ours opened: out of the way of those that are.
FIRST_STRAY = 4 * 10_000


class Twisted(Pair):
    """A pair whose wire is driven by choices."""

    def __init__(self, choices: Octets) -> None:
        super().__init__(client=CONFIG, server=CONFIG, start=False, max_streams=40)
        self.choices = choices
        self.seen: list[bytes] = []
        self.stray = FIRST_STRAY
        self.ends_told: dict[int, int] = {id(end): 0 for end in self.ends}
        self.tracks = []
        for end in self.ends:
            track = make_track(2, 2, octets=50, ended=False)
            end.publish(track)
            end.directory.add(NAME.namespace)
            end.on_event = self._note(end)
            self.tracks.append(track)
            end.session.start()

    def _note(self, end: End) -> Any:
        def note(event: Event) -> None:
            assert not self.ends_told[id(end)], f"{event} after the end"
            self.ends_told[id(end)] += isinstance(event, SessionTerminated)

        return note

    def _carry_out(self, end: End, command: Command) -> None:
        assert end.closed is None, f"{command} after the close"
        if isinstance(command, SendStreamData) and command.stream_id < FIRST_STRAY:
            direction = end.outgoing.get(command.stream_id)
            if direction is not None and direction.fin:
                return  # it was ended in its name
        if isinstance(command, CloseSession):
            assert command.code in set(SessionErrorCode), command
            assert command.code != SessionErrorCode.INTERNAL_ERROR, command
        super()._carry_out(end, command)

    # -- what goes wrong ---------------------------------------------------------------------

    def step(self) -> None:
        """Do one thing: somebody acts, something arrives, or something is made of it."""
        choices = self.choices
        end = self.ends[choices.below(2)]
        match choices.below(8):
            case 0 | 1:
                self.act(end)
            case 2 | 3:
                self.twist(end)
            case 4:
                self.stray_stream(end)
            case 5:
                for _ in range(1 + choices.below(8)):
                    self.deliver_one()
            case 6:
                self.now += (0.0, 0.5, 5.0, 40.0)[choices.below(4)]
            case _:
                self.carry(200)
        for each in self.ends:
            self.drain(each)

    def carry(self, pieces: int) -> None:
        """Let so many pieces arrive at most."""
        for _ in range(pieces):
            for each in self.ends:
                self.drain(each)
            if not self.deliver_one():
                return

    def act(self, end: End) -> None:
        """Have an application do something, with any of its requests."""
        session: Any = end.session
        choices = self.choices
        known = sorted(session._requests.by_id)
        number = choices.pick(known) if known else 0
        track = self.tracks[self.ends.index(end)]
        prefix = TrackNamespace.of("kvcs-1", f"n{choices.below(3)}")
        verbs: tuple[Callable[[], object], ...] = (
            lambda: session.subscribe(NAME, fill=LocationFilter.absolute_start(0, 0)),
            lambda: session.subscribe(FullTrackName.of("no", "such")),
            lambda: session.fetch(NAME, location_filter=LocationFilter.group_end(0, 0, 1)),
            lambda: session.track_status(NAME),
            lambda: session.subscribe_namespace(prefix),
            lambda: session.publish_namespace(prefix),
            lambda: session.subscribe_tracks(TrackNamespace.of("kvcs-1")),
            lambda: session.publish(track),
            lambda: session.update(number, Parameters({P.SUBSCRIBER_PRIORITY: 9})),
            lambda: session.cancel(number),
            lambda: session.notify_state(number),
            lambda: publish_group(track, 10 + track.opened, 2),
            lambda: track.end(PublishDoneCode.TRACK_ENDED),
            lambda: session.goaway(timeout_ms=500),
            lambda: session.subscribe(
                NAME, range_filters=[RangeFilter(P.OBJECTID_FILTER, ranges=((0, 1),))]
            ),
            lambda: session.reject(number, RequestErrorCode.UNAUTHORIZED),
        )
        with suppress(UsageError):
            choices.pick(verbs)()

    def twist(self, end: End) -> None:
        """Make something else of what an end has on the way."""
        choices = self.choices
        waiting = [s for s, d in end.outgoing.items() if d.waiting and not d.over]
        if not waiting:
            return
        stream_id = choices.pick(waiting)
        direction = end.outgoing[stream_id]
        data = b"".join(direction.waiting)
        control = not is_unidirectional(stream_id) or stream_id in (2, 3)
        pieces = frames(data) if control else [data]
        self.seen = [*self.seen, *pieces][-30:]
        at = choices.below(len(pieces))
        match choices.below(9):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, pieces[at])
            case 2:
                pieces.insert(0, pieces.pop(at))
            case 3 | 4:
                pieces[at] = renumbered(pieces[at], choices)
            case 5:
                pieces.insert(at, choices.pick(self.seen))
            case 6:
                kind, body = encode_vi64(choices.pick(sorted(MESSAGES))), pieces[at]
                pieces[at] = kind + body[1:]
            case 7:
                direction.fin = True
            case _:
                if direction.reset is None and not direction.fin:
                    self.reset(
                        end, stream_id, choices.pick((0, 1, 2, StreamErrorCode.EXCESSIVE_LOAD))
                    )
        direction.waiting = deque(piece for piece in pieces if piece)

    def stray_stream(self, end: End) -> None:
        """Open a stream, with what was said before or with a header of any kind."""
        choices = self.choices
        peer = self.peer(end).session
        if choices.below(4) == 0:
            data = encode_vi64(choices.pick((0, 1, 4, 8))) + bytes(choices.octets(12))
            peer.receive_datagram(data)
            return
        is_uni = choices.below(2)
        self.stray += 4
        stream_id = StreamId(self.stray + 2 * is_uni + (1 if end is self.server else 0))
        if choices.below(2) and self.seen:
            data = renumbered(choices.pick(self.seen), choices)
        elif is_uni:
            kinds = (0x05, 0x10, 0x12, 0x14, 0x50, 0x70)
            numbers = b"".join(encode_vi64(choices.pick(NUMBERS)) for _ in range(3))
            data = encode_vi64(choices.pick(kinds)) + numbers + choices.octets(30)
        else:
            body = choices.octets(30)
            kind = encode_vi64(choices.pick(sorted(MESSAGES)))
            data = kind + len(body).to_bytes(2, "big") + body
        direction = end.outgoing.setdefault(stream_id, Direction())
        direction.waiting.append(data or b"\x00")
        direction.handed_over += len(data) or 1
        direction.fin = bool(choices.below(2))

    # -- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        """Say whether both ends are what they may be."""
        for _ in range(100):  # one hears of the other's close at its next turn
            moved = [self.drain(end) for end in self.ends]
            if not any(moved):
                break
        for end in self.ends:
            session: Any = end.session
            assert self.ends_told[id(end)] == bool(session.terminated)
            if session.terminated is not None:
                continue
            delivery = session._delivery
            assert delivery._parked_octets <= CONFIG.max_parked_octets
            assert len(session._arrivals.early_stops) <= 256
            alive = sum(not request.over for request in session._requests.by_id.values())
            assert alive <= 2 * CONFIG.max_requests + 2 * MAX_STEPS
            partial = delivery._intake._partial_octets if hasattr(delivery, "_intake") else 0
            assert partial <= CONFIG.max_partial_octets + CONFIG.max_object_octets


def frames(data: bytes) -> list[bytes]:
    """Cut octets into messages by their lengths; the last piece may be none."""
    pieces = []
    at = 0
    while at < len(data):
        header = decode_vi64(data, at)
        end = len(data)
        if header is not None and len(data) >= header[1] + 2:
            end = header[1] + 2 + int.from_bytes(data[header[1] : header[1] + 2], "big")
        pieces.append(data[at:end])
        at = end
    return pieces or [b""]


def renumbered(piece: bytes, choices: Octets) -> bytes:
    """Replace one of the first numbers of a message's body, or of a header, and mend its length."""
    header = decode_vi64(piece)
    if header is None:
        return piece
    start = header[1]
    framed = len(piece) >= start + 2 and int.from_bytes(piece[start : start + 2], "big") == len(
        piece
    ) - (start + 2)
    body = piece[start + 2 :] if framed else piece[start:]
    at = 0
    for _ in range(choices.below(6)):
        number = decode_vi64(body, at)
        if number is None or number[1] >= len(body):
            break
        at = number[1]
    number = decode_vi64(body, at)
    if number is None:
        return piece
    body = body[:at] + encode_vi64(choices.pick(NUMBERS)) + body[number[1] :]
    return piece[:start] + (len(body).to_bytes(2, "big") if framed else b"") + body


def play(data: bytes) -> None:
    """Have two sessions talk, and the wire between them do what ``data`` says."""
    choices = Octets(data)
    pair = Twisted(choices)
    if choices.below(8):
        pair.carry(20)
    for _ in range(MAX_STEPS):
        if choices.is_exhausted or all(end.session.terminated for end in pair.ends):
            break
        pair.step()
        pair.check()
    pair.carry(500)
    pair.now += 100.0
    pair.carry(500)
    pair.check()
