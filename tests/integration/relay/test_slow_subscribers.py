"""Subscribers that read slowly, or not at all, beside others: what they cost, and how it ends."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from moqt.aio import MoqtConnection, QuicSettings, connect
from moqt.aio.tls import CertificateFiles
from moqt.aio.tracks import Fetch, Subscription
from moqt.codepoints import MessageType, PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.relay.server import RelayOptions
from moqt.session.commands import Command, ResetStream, SendStreamData, StreamId
from moqt.session.events import ObjectReceived
from moqt.session.localtrack import LocalTrack
from moqt.session.streams import is_unidirectional
from moqt.wire.filters import LocationFilter
from moqt.wire.framing import MessageBuffer
from moqt.wire.messages.subscribe import PublishDone
from tests.integration.relay.origin import held_by, publishing, rest_of
from tests.integration.relay.stage import relaying
from tests.session.pair import make_track, payload_of, publish_group, whole

pytestmark = pytest.mark.network

NAME = FullTrackName.of("slow", "track")
FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
#: The windows of who stands still.
NARROW = QuicSettings(stream_window=1 << 16, connection_window=1 << 17)
MIB = 1 << 20


@contextmanager
def noting_commands() -> Iterator[dict[MoqtConnection, list[Command]]]:
    """Note what each session wants its transport to do."""
    noted: dict[MoqtConnection, list[Command]] = {}
    carry_out = MoqtConnection._carry_out

    def note(connection: MoqtConnection, command: Command) -> None:
        noted.setdefault(connection, []).append(command)
        carry_out(connection, command)

    with mock.patch.object(MoqtConnection, "_carry_out", note):
        yield noted


def data_streams(commands: list[Command]) -> dict[StreamId, list[Command]]:
    """Return what was done with each data stream, by its ID."""
    found: dict[StreamId, list[Command]] = {}
    for command in commands:
        if isinstance(command, SendStreamData | ResetStream):
            stream_id = command.stream_id
            if is_unidirectional(stream_id) and stream_id not in (2, 3):
                found.setdefault(stream_id, []).append(command)
    return found


def handed_over(commands: list[Command]) -> int:
    """Return how many octets a transport was given."""
    return sum(len(command.data) for command in commands if isinstance(command, SendStreamData))


async def end_of(track: LocalTrack | None) -> None:
    """Return when a Track has ended."""
    assert track is not None
    changed = asyncio.Event()
    track.watch(changed.set)
    while track.ended is None:
        changed.clear()
        await changed.wait()
    track.unwatch(changed.set)


async def brought(track: LocalTrack | None, octets: int) -> None:
    """Return when so much of a Track is held."""
    assert track is not None
    changed = asyncio.Event()
    track.watch(changed.set)
    while track.octets < octets:
        changed.clear()
        await changed.wait()
    track.unwatch(changed.set)


def publish_done(commands: list[Command], request_stream: StreamId) -> tuple[int, PublishDone]:
    """Return the PUBLISH_DONE on a request stream, and which of the commands it ended with."""
    buffer = MessageBuffer()
    at = 0
    for index, command in enumerate(commands):
        if isinstance(command, SendStreamData) and command.stream_id == request_stream:
            buffer.feed(bytes(command.data))
            at = index
    *_, done = buffer.messages(MessageType.SUBSCRIBE)
    assert isinstance(done, PublishDone)
    return at, done


@pytest.mark.aioquic  # picoquic bounds what waits on each stream, not their sum
@pytest.mark.parametrize(
    "octets", [8 * MIB, pytest.param(200 * MIB, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)
async def test_who_stands_still_is_left_behind_and_holds_nothing(
    certificates: CertificateFiles, octets: int
) -> None:
    length, objects = 100_000, 10
    groups = octets // (length * objects)
    payloads = [payload_of(Location(0, number), length) for number in range(objects)]
    track = LocalTrack(NAME)
    options = RelayOptions(max_behind_octets=4 * MIB)
    with noting_commands() as noted:
        async with (
            asyncio.timeout(100),
            relaying(certificates, options=options) as stage,
            publishing(stage, track),
            connect(stage.nearest.uri, tls=stage.nearest.tls, quic=NARROW) as frozen,
            connect(stage.nearest.uri, tls=stage.nearest.tls) as healthy,
        ):
            still = await frozen.subscribe(NAME)
            reading = await healthy.subscribe(NAME)
            [to_frozen, to_healthy] = stage.relays[0]._servers[0].connections[-2:]
            most_kept = 0
            for group in range(groups):
                subgroup = track.open_subgroup(group, holds_end_of_group=True)
                for number in range(objects):
                    subgroup.publish(number, payloads[number])
                subgroup.close()
                # The healthy one is sent each Group while the other one stands where it stood.
                for number in range(objects):
                    event = await anext(reading)
                    assert isinstance(event, ObjectReceived)
                    assert event.location == Location(group, number)
                noted[to_healthy].clear()
                most_kept = max(most_kept, to_frozen._transport.stats().octets_in_flight)
            await still.finished.wait()
            held = held_by(stage.relays[0], NAME)
            assert held is not None
            # What is kept is one copy, whoever reads it; nothing of it waits for the frozen one.
            assert held.octets == groups * objects * length == stage.relays[0].octets_held
            assert most_kept <= NARROW.connection_window
            # One Object came whole, and its window was used up once more.
            most_handed_over = length + NARROW.connection_window + 4096
            assert handed_over(noted[to_frozen]) <= most_handed_over
            assert not to_frozen.session.has_data_waiting
            track.end()
            assert await rest_of(reading) == Counter()
    assert still.ended is not None
    assert still.ended.code is PublishDoneCode.TOO_FAR_BEHIND
    cut = {
        command.code
        for command in noted[to_frozen]
        if isinstance(command, ResetStream) and is_unidirectional(command.stream_id)
    }
    assert cut == {StreamErrorCode.TOO_FAR_BEHIND}


@pytest.mark.parametrize("hops", [1, 2])
async def test_the_end_is_told_after_the_last_stream_with_the_count_of_the_relays_own(
    certificates: CertificateFiles, hops: int
) -> None:
    groups, octets = 6, 40_000
    track = LocalTrack(NAME)
    with noting_commands() as noted:
        async with (
            asyncio.timeout(PATIENCE_S),
            relaying(certificates, hops=hops) as stage,
            publishing(stage, track) as origin,
            connect(stage.nearest.uri, tls=stage.nearest.tls, quic=NARROW) as slow,
            connect(stage.nearest.uri, tls=stage.nearest.tls, quic=NARROW) as late,
        ):
            subscription = await slow.subscribe(NAME)
            for group in range(groups):
                publish_group(track, group, 3, octets=octets)
            track.end()
            # The nearest relay has all of it, and the slow one has read nothing yet.
            await end_of(held_by(stage.relays[-1], NAME))
            joined = await late.subscribe(NAME, fill=FROM_START)
            assert not subscription.finished.is_set()
            to_slow, to_late = stage.relays[-1]._servers[0].connections[-2:]
            assert await rest_of(subscription) == Counter(whole(groups, 3))
            assert await rest_of(joined) == Counter(whole(groups, 3))
            [from_origin] = origin.subscribed
            upstream = noted[origin.connection]

    counts = {}
    for connection, of in ((to_slow, subscription), (to_late, joined)):
        commands = noted[connection]
        assert of.ended is not None
        assert of.ended.complete
        streams = data_streams(commands)
        at, done = publish_done(commands, StreamId(of.request_id * 2))
        assert done.status_code == PublishDoneCode.TRACK_ENDED
        assert done.stream_count == len(streams)
        for stream in streams.values():
            last = stream[-1]
            assert isinstance(last, SendStreamData)
            assert last.fin
            assert commands.index(last) < at
        counts[connection] = done.stream_count
    # A live stream for each Group; and for who came at the end the fill alone, whatever the
    # publisher counted.
    assert counts == {to_slow: groups, to_late: 1}
    assert len(data_streams(upstream)) == groups
    assert from_origin.track == NAME


@pytest.mark.parametrize("way", ["fill", "fetch"])
@pytest.mark.parametrize("ended", [True, False])
async def test_who_stands_still_in_the_past_keeps_nobody_from_what_there_is_no_room_for(
    certificates: CertificateFiles, way: str, ended: bool
) -> None:
    pinned, wanted = LocalTrack(NAME), make_track(3, name=FullTrackName.of("other", "track"))
    publish_group(pinned, 0, 60, octets=50_000)
    if ended:
        pinned.end()
    options = RelayOptions(cache_octets=2_900_000, linger_s=0, stall_s=0.1)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, options=options) as stage,
        publishing(stage, pinned, wanted),
        connect(stage.nearest.uri, tls=stage.nearest.tls, quic=NARROW) as frozen,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as healthy,
    ):
        [relay] = stage.relays
        still: Subscription | Fetch
        if way == "fill":
            still = await frozen.subscribe(NAME, fill=FROM_START)
        else:
            still = await frozen.fetch(NAME, location_filter=FROM_START)
        await brought(held_by(relay, NAME), options.cache_octets)
        with pytest.raises(RequestRejected) as refused:
            await healthy.subscribe(wanted.name, fill=FROM_START)
        assert refused.value.code is RequestErrorCode.EXCESSIVE_LOAD
        await still.finished.wait()

        reading = await healthy.subscribe(wanted.name, fill=FROM_START)
        assert await rest_of(reading) == Counter(whole(3, 4))
        assert held_by(relay, NAME) is None
        assert frozen.closed is None
    assert still.ended is not None
    assert still.ended.code == (
        PublishDoneCode.TOO_FAR_BEHIND if way == "fill" else StreamErrorCode.TOO_FAR_BEHIND
    )
