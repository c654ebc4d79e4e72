"""A session that is fed nonsense closes cleanly or goes on; nothing else can happen.

Valid traffic of two sessions is recorded, spoiled and played to a fresh one. Set
``KVCS_FUZZ_SECONDS`` for a longer run; a failure names the seed that repeats it.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest

from moqt.codepoints import MessageType, ObjectStatus, PublishDoneCode
from moqt.codepoints import ParameterType as P
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import (
    CloseSession,
    ReleaseCredit,
    ResetStream,
    SendStreamData,
    StopSending,
    StreamId,
)
from moqt.session.config import Role, SessionConfig
from moqt.session.core import Session
from moqt.session.events import (
    Event,
    ObjectReceived,
    RequestId,
    SessionEstablished,
    SessionTerminated,
    SubscribeAccepted,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter
from moqt.wire.framing import encode_message
from moqt.wire.messages.setup import Goaway
from moqt.wire.parameters import Parameters
from moqt.wire.varint import encode_vi64
from tests.session.pair import NAME, End, Pair, make_track, payload_of, publish_group

SECONDS = float(os.environ.get("KVCS_FUZZ_SECONDS", "1.5"))
CONFIG = SessionConfig(
    authority="a",
    max_object_octets=20_000,
    max_partial_octets=50_000,
    max_parked_octets=20_000,
    max_parked_streams=5,
    max_auth_token_cache_octets=100,
    max_requests=20,
)
NAMESPACE = NAME.namespace


@dataclass(frozen=True)
class Piece:
    """Something that arrives: octets or FIN, a reset, a STOP_SENDING, or a datagram."""

    stream_id: int
    data: bytes = b""
    fin: bool = False
    kind: str = "data"


def ask(session: Session) -> RequestId:
    """Make one request of each kind, the same ones every time; return the first's ID."""
    only = RangeFilter(P.OBJECTID_FILTER, ranges=((0, 2), (5, None)))
    inner = Parameters({P.LOCATION_FILTER: LocationFilter.absolute_start(0, 0)})
    first = session.subscribe(NAME, fill=FillParameters(inner), priority=3)
    session.fetch(NAME, location_filter=LocationFilter.group_end(0, 1, 2))
    session.subscribe(NAME, location_filter=LocationFilter.range(1, 1, 9, 9))
    session.track_status(NAME)
    session.subscribe_namespace(TrackNamespace.of("kvcs-1"))
    session.publish_namespace(NAMESPACE)
    session.subscribe_tracks(TrackNamespace.of("kvcs-1"))
    session.subscribe(FullTrackName.of("no", "such"))
    if session.peer_setup is not None:
        session.subscribe(NAME, range_filters=[only])
    return first


def publish(end: End) -> LocalTrack:
    """Give an end something to serve."""
    track = make_track(2, 3, octets=300, ended=False, properties=((0x3801, b"x"), (0x3802, 9)))
    end.publish(track)
    end.directory.add(NAMESPACE)
    return track


def record() -> dict[Role, list[Piece]]:
    """Return all that arrived at each end in the life of a valid pair."""
    arrived: dict[Role, list[Piece]] = {Role.CLIENT: [], Role.SERVER: []}
    pair = Pair(client=CONFIG, server=CONFIG, chunk=400, start=False)
    for end in pair.ends:
        pieces = arrived[end.role]
        receive = end.session.receive_stream_data

        def tapped(
            stream_id: StreamId,
            data: bytes,
            *,
            fin: bool = False,
            pieces: list[Piece] = pieces,
            receive: Callable[..., None] = receive,
        ) -> None:
            pieces.append(Piece(stream_id, data, fin))
            receive(stream_id, data, fin=fin)

        end.session.receive_stream_data = tapped  # type: ignore[method-assign]
        end.session.start()
    tracks = [publish(end) for end in pair.ends]
    pair.settle()
    subscribed = [(end, ask(end.session)) for end in pair.ends]
    pair.settle()
    for end, request_id in subscribed:
        end.session.update(request_id, Parameters({P.SUBSCRIBER_PRIORITY: 9}))
    pair.settle()
    for track in tracks:
        publish_group(track, 2, 3)
        last = track.open_subgroup(3, 1, has_properties=True)
        last.publish(1, payload_of(Location(3, 1)), properties=((0x3C, 0), (0x3E, 1)))
        last.publish(2, status=ObjectStatus.END_OF_TRACK)
        last.close()
        track.end(PublishDoneCode.TRACK_ENDED, "done")
    for end in pair.ends:
        end.directory.remove(NAMESPACE)
    pair.settle()
    assert pair.client.closed is None
    assert pair.server.closed is None
    return arrived


RECORDED = record()


def spoil(pieces: list[Piece], rng: random.Random) -> list[Piece]:
    """Return ``pieces`` with a few things wrong."""
    spoiled = list(pieces)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(spoiled))
        piece = spoiled[at]
        data = bytearray(piece.data)
        match rng.randrange(12):
            case 0 | 1 | 2 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 3 if data:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xC0, 0xFE, 0xFF])
            case 4:
                data[rng.randrange(len(data) + 1) :] = b""
            case 5:
                where = rng.randrange(len(data) + 1)
                data[where:where] = rng.randbytes(rng.randint(1, 9))
            case 6:
                where = rng.randrange(len(data) + 1)
                data[where:where] = encode_vi64(rng.choice([1 << 63, (1 << 64) - 1, 1 << 32]))
            case 7:
                spoiled.insert(at, replace(piece, fin=False))
                continue
            case 8:
                del spoiled[at]
                if not spoiled:
                    return spoiled
                continue
            case 9:
                spoiled.insert(at, spoiled.pop(rng.randrange(len(spoiled))))
                continue
            case 10:
                kind = rng.choice(["reset", "stop", "datagram"])
                spoiled.insert(at, Piece(piece.stream_id, bytes(data[:100]), kind=kind))
                continue
            case 11:
                spoiled[at] = replace(piece, stream_id=rng.choice(spoiled).stream_id)
                continue
        spoiled[at] = replace(piece, data=bytes(data), fin=piece.fin or rng.random() < 0.1)
    return spoiled


class Subject:
    """The session that is tortured, and what may be expected of it."""

    def __init__(self, role: Role, rng: random.Random) -> None:
        self.end = End(role, CONFIG)
        self.rng = rng
        self.now = 0.0
        self.closes = 0
        self.ended: list[Event] = []
        self.over: set[int] = set()
        self.arrived: dict[int, int] = {}
        self.untaken: list[ObjectReceived] = []
        self.end.consumes = False
        self.end.on_event = self._act
        self.tracks = [publish(self.end)]
        self.first: RequestId | None = None
        self.end.session.start()
        self.drain()

    def drain(self) -> None:
        session = self.end.session
        session.handle_timer(self.now)
        for command in session.data_to_send(self.rng.choice([0, 100, 1 << 20])):
            assert not self.closes, f"{command} after the close"
            match command:
                case CloseSession():
                    self.closes += 1
                case ReleaseCredit(stream_id, octets):
                    self.arrived[stream_id] -= octets
                    assert self.arrived[stream_id] >= 0, "more released than arrived"
                case SendStreamData(_, data):
                    assert isinstance(data, bytes | memoryview)
                case ResetStream() | StopSending():
                    pass
        for event in session.events():
            assert not self.ended, f"{event} after the end"
            if isinstance(event, SessionTerminated):
                self.ended.append(event)
            if isinstance(event, ObjectReceived):
                self.untaken.append(event)
            self.end.handle(event)
        self.end.seen.clear()

    def _act(self, event: Event) -> None:
        """Do what the recorded session did."""
        match event:
            case SessionEstablished():
                with suppress(UsageError):  # the session may be going away already
                    self.first = ask(self.end.session)
            case SubscribeAccepted(request_id=request_id) if request_id == self.first:
                with suppress(UsageError):  # it may have ended in the same breath
                    self.end.session.update(request_id, Parameters({P.SUBSCRIBER_PRIORITY: 9}))

    def play(self, piece: Piece) -> None:
        session, stream_id = self.end.session, StreamId(piece.stream_id)
        match piece.kind:
            case "data" if stream_id not in self.over:  # a transport delivers nothing after FIN
                if not session.terminated:
                    self.arrived[stream_id] = self.arrived.get(stream_id, 0) + len(piece.data)
                session.receive_stream_data(stream_id, piece.data, fin=piece.fin)
                if piece.fin:
                    self.over.add(stream_id)
            case "reset" if stream_id not in self.over:
                session.receive_reset(stream_id, self.rng.randrange(200))
                self.over.add(stream_id)
            case "stop":
                session.receive_stop_sending(stream_id, self.rng.randrange(200))
            case "datagram":
                session.receive_datagram(piece.data)

    def meddle(self) -> None:
        """Do what an application may do at any time."""
        session, rng = self.end.session, self.rng
        match rng.randrange(12):
            case 0 if session._requests.by_id:
                session.cancel(rng.choice(list(session._requests.by_id)))
            case 1:
                self.now += rng.choice([0.5, 5.0, 40.0])
            case 2 | 3 | 4:
                for event in self.untaken:
                    session.consumed(event)
                self.untaken.clear()
            case 5:
                track = self.tracks[0]
                if track.ended is None and not track.end_of_track:
                    publish_group(track, track.opened + 10, 2)
            case 6 if rng.random() < 0.1:
                self.tracks[0].end()
            case 7 if rng.random() < 0.05:
                session.goaway(timeout_ms=1000)

    def check(self) -> None:
        assert len(self.ended) == bool(self.end.session.terminated)
        if self.closes:
            assert self.closes == 1
            assert self.ended


def seeds() -> Iterator[int]:
    """Yield seeds until the time is up."""
    deadline = time.monotonic() + SECONDS
    seed = int(os.environ.get("KVCS_FUZZ_SEED", "0"))
    while time.monotonic() < deadline:
        yield seed
        seed += 1


def torture(role: Role, seed: int, pieces: Callable[[random.Random], list[Piece]]) -> bool:
    """Play pieces to a session; return whether it closed."""
    rng = random.Random(seed)
    subject = Subject(role, rng)
    began = time.monotonic()
    try:
        for piece in pieces(rng):
            subject.play(piece)
            subject.drain()
            if rng.random() < 0.2:
                subject.meddle()
                subject.drain()
        subject.now += 100.0
        subject.drain()
    except Exception as exc:
        raise AssertionError(f"seed {seed}") from exc
    subject.check()
    assert time.monotonic() - began < 5.0, f"seed {seed} takes too long"
    return subject.closes > 0


@pytest.mark.parametrize("role", Role)
def test_spoiled_traffic_closes_the_session_cleanly_or_not_at_all(role: Role) -> None:
    closed = [torture(role, seed, lambda rng: spoil(RECORDED[role], rng)) for seed in seeds()]

    assert 0 < sum(closed) < len(closed), "the spoiling is either too mild or too strong"


@pytest.mark.parametrize("role", Role)
def test_the_recorded_traffic_itself_is_fine(role: Role) -> None:
    subject = Subject(role, random.Random(1))
    for piece in RECORDED[role]:
        subject.play(piece)
        subject.drain()

    assert not subject.closes


def random_octets(rng: random.Random) -> list[Piece]:
    """Return octets without any sense, now and then behind a SETUP that has some."""
    pieces = []
    if rng.random() < 0.8:
        pieces.append(Piece(2, bytes.fromhex("af000000")))
        pieces.append(Piece(3, bytes.fromhex("af000000")))
    heads = [b"\x10\x01", b"\x05\x00", b"\x05\x02", b"\xf0\x13\x2b\x3e\x28", b"\x3f", b""]
    heads += [encode_vi64(kind) + b"\x00\x05" for kind in MessageType]
    heads.append(encode_message(Goaway()))
    for _ in range(rng.randint(1, 30)):
        data = rng.choice(heads) + rng.randbytes(rng.choice([0, 1, 3, 20, 400]))
        kind = rng.choice(["data"] * 8 + ["reset", "stop", "datagram"])
        stream_id = rng.randrange(40)
        if stream_id in (2, 3):
            stream_id += 4
        pieces.append(Piece(stream_id, data, rng.random() < 0.2, kind))
    return pieces


@pytest.mark.parametrize("role", Role)
def test_random_octets_close_the_session_cleanly_or_not_at_all(role: Role) -> None:
    closed = [torture(role, seed, random_octets) for seed in seeds()]

    assert sum(closed) > 0
