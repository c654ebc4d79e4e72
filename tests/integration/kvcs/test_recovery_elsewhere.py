"""Who falls silent, is named and gone, or stalls at whatever moment costs its time and no more."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from kvcs.consumer.events import Failed, FailureReason, ObjectRejected
from kvcs.consumer.retrieval import consume
from kvcs.consumer.services import HttpIndex, HttpSections
from kvcs.kvsp.http.holder import HeldBlock, MemoryHolder
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.records import Holding, Runs
from kvcs.kvsp.http.uris import PublicationUri
from kvcs.kvsp.layout import Layout, Octets
from kvcs.profile.naming import PublicationName
from moqt.aio.tls import CertificateFiles
from moqt.session.localtrack import LocalTrack
from tests.integration.http.scene import READER, WRITER, Stage
from tests.integration.http.scene import on_stage as services_on_stage
from tests.integration.http.test_retrieval_over_http import holder
from tests.integration.kvcs.faults import DATA, Moment, copied, standing
from tests.integration.kvcs.scene import (
    BLOCKS,
    COMPAT,
    LAYERS,
    SCOPE,
    TOKENS,
    CountingSink,
    expectations,
    filled,
    hasty,
    of_kind,
    on_stage,
)
from tests.integration.kvcs.test_loss import SLACK_S
from tests.integration.kvcs.test_recovery import (
    assert_exact,
    assert_whole,
    beside,
    moments,
    rest_of,
    somewhere,
)

pytestmark = pytest.mark.network

#: What may be said of holders of whom none is left, by what the last one was like.
GONE = (FailureReason.NOT_FOUND, FailureReason.UNREACHABLE, FailureReason.REFUSED)
#: Seconds that anybody is waited for.
LIMIT_S = 0.4
COMPAT_ID = SCOPE.compatibility_id(COMPAT)
KEYS = SCOPE.block_keys(COMPAT, TOKENS)


# -- relays that fall silent ---------------------------------------------------------------------


def begun(whole: LocalTrack, moment: Moment) -> LocalTrack:
    """Return a copy of a track up to a moment, behind which nothing comes, not even an end."""
    copy = LocalTrack(whole.name)
    for layer in range(moment.layers + 1):
        [subgroup] = whole._groups[layer]
        made = copy.open_subgroup(layer, 0, priority=0, holds_end_of_group=True)
        objects = subgroup.objects
        for obj in objects if layer < moment.layers else objects[: moment.objects]:
            made.publish(obj.object_id, *obj.parts, status=obj.status)
        if layer < moment.layers:
            made.close()
    payload = b"".join(objects[moment.objects].parts)
    half = made.begin(moment.objects, len(payload))
    made.extend(half, payload[: len(payload) // 2])
    return copy


@moments
async def test_a_relay_that_falls_silent_in_the_middle_of_an_object_is_left_for_the_next_one(
    certificates: CertificateFiles, seed: int
) -> None:
    moment, sink, loop = Moment.at_random(seed), CountingSink(), asyncio.get_running_loop()
    silent = [DATA, DATA[:1], DATA[1:]][seed % 3]
    settings = hasty(request_timeout_s=LIMIT_S, stall_timeout_s=LIMIT_S, fetch="never")

    async with on_stage(certificates) as scene:
        copy = copied(await filled(scene.open()))
    async with standing(certificates, copy) as mute, standing(certificates, copy) as good:
        mute.handler.instead = {name: [begun(copy.tracks[name], moment)] * 9 for name in silent}
        began = loop.time()
        async with consume(
            expectations(), [mute.spec, good.spec], sink, settings=settings
        ) as retrieval:
            events = await rest_of(retrieval)
        ended = loop.time()

    assert_whole(events, sink)
    assert LIMIT_S < ended - began < 2 * LIMIT_S + SLACK_S


# -- an index that names those who are gone ------------------------------------------------------


@contextmanager
def deaf() -> Iterator[int]:
    """A UDP port at which nobody ever answers, and nothing says that nobody will."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        yield made.getsockname()[1]


def closed() -> int:
    """A UDP port that is closed."""
    with deaf() as port:
        return port


async def list_at(stage: Stage, number: int, session: str, name: PublicationName) -> None:
    """Have a publication be listed that covers all of the prompt, and more if it is not there."""
    async with stage.index(WRITER) as index:
        await index.register(
            COMPAT_ID,
            bytes([number]) * 16,
            Holding(
                PublicationUri(session, name),
                tuple(KEYS[:BLOCKS]),
                Runs(((0, LAYERS - 1),)),
                complete=True,
            ),
            lease_s=60,
        )


@pytest.mark.parametrize("lives", [True, False], ids=["one lives", "all are gone"])
@moments
async def test_an_index_that_names_dead_holders_costs_their_time_and_no_more(
    certificates: CertificateFiles, seed: int, lives: bool
) -> None:
    draw, sink, loop = random.Random(seed), CountingSink(), asyncio.get_running_loop()
    settings = hasty(
        connect_timeout_s=LIMIT_S, request_timeout_s=LIMIT_S, discovery_timeout_s=LIMIT_S,
        stall_timeout_s=LIMIT_S, silence_s=0.3,
    )  # fmt: skip

    async with on_stage(certificates) as scene:
        copy = copied(await filled(scene.open()))
    name = copy.name
    bogus = replace(name, publication_id=draw.randbytes(16))
    with deaf() as mute:
        async with (
            services_on_stage(certificates) as stage,
            standing(certificates) as empty,
            standing(certificates, copy) as good,
        ):
            dead = [f"moqt://127.0.0.1:{mute}/", f"moqt://127.0.0.1:{closed()}/", empty.spec.uri]
            listed = [(draw.choice(dead), draw.choice([name, bogus])) for _ in range(4)]
            if lives:
                listed += [(good.spec.uri, name)]
            draw.shuffle(listed)
            for number, (session, publication) in enumerate(listed):
                await list_at(stage, number, session, publication)
            began = loop.time()
            async with (
                stage.index(READER) as index,
                consume(
                    expectations(), [empty.spec], sink, index=HttpIndex(index), settings=settings
                ) as retrieval,
            ):
                events = await rest_of(retrieval)
            ended = loop.time()

    # The caller's relay, and each that is named, is waited for once.
    assert ended - began < 4 * 2 * LIMIT_S + SLACK_S
    if lives:
        assert assert_whole(events, sink).publication == name
        return
    failed = assert_exact(events, sink)
    assert failed.reason in GONE
    assert [str(one) for one in failed.recompute] == [f"tokens 0-{BLOCKS * 4 - 1} from layer 0"]


# -- block services that stall -------------------------------------------------------------------


class Stalling:
    """Has every block, and stands still at some moment: before it answers, or in the middle.

    Args:
        whole: What it has.
        finds: Blocks that it finds before that.
        reads: Layers of blocks that it reads before that.
    """

    def __init__(self, whole: MemoryHolder, finds: int, reads: int) -> None:
        self._whole, self._finds, self.reads = whole, finds, reads

    async def find(self, name: BlockName, publication: bytes | None) -> HeldBlock | None:
        self._finds -= 1
        if self._finds < 0:
            await asyncio.Event().wait()
        found = await self._whole.find(name, None)
        return None if found is None else _Slow(found, self)


class _Slow:
    def __init__(self, block: HeldBlock, of: Stalling) -> None:
        self._block, self._of = block, of
        self.identity = None

    @property
    def layout(self) -> Layout:
        return self._block.layout

    def has(self, layer: int) -> bool:
        return self._block.has(layer)

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        self._of.reads -= 1
        if self._of.reads < 0:
            await asyncio.Event().wait()
        return await self._block.read(layer)


@asynccontextmanager
async def mute_service() -> AsyncIterator[str]:
    """A TCP port that takes connections and says nothing, not even for TLS."""
    over = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("rescued", [True, False], ids=["another has it", "nobody has it"])
@moments
async def test_a_block_service_that_stalls_is_left_with_what_it_has_given(
    certificates: CertificateFiles, seed: int, rescued: bool
) -> None:
    draw, sink, loop = random.Random(seed), CountingSink(), asyncio.get_running_loop()
    track, layer, _ = somewhere(seed)
    settings = hasty(request_timeout_s=LIMIT_S, silence_s=0.3)
    given = draw.randrange(BLOCKS)
    finds, reads = (draw.randrange(BLOCKS), BLOCKS) if seed % 3 else (BLOCKS, given)

    async with (
        services_on_stage(certificates, holder=Stalling(holder(), finds, reads)) as stalls,
        services_on_stage(certificates, holder=holder()) as good,
        mute_service() as mute,
        stalls.blocks(READER) as first,
        good.blocks(READER) as last,
        type(first)(mute, READER, tls=stalls.tls) as deaf_one,
        beside(certificates, False, lacks=(track, layer)) as specs,
    ):
        services = [HttpSections(deaf_one if seed % 3 == 2 else first)]
        if rescued:
            services.append(HttpSections(last))
        began = loop.time()
        async with consume(
            expectations(), specs, sink, blocks=services, settings=settings
        ) as retrieval:
            events = await rest_of(retrieval)
        ended = loop.time()

    assert ended - began < 2 * LIMIT_S + SLACK_S
    assert of_kind(events, ObjectRejected) == []
    if rescued:
        assert_whole(events, sink)
        return
    failed = assert_exact(events, sink)
    assert isinstance(failed, Failed)
    missing = 0 if seed % 3 else given
    start = 4 * missing
    assert [str(one) for one in failed.recompute] == [
        f"tokens {start}-{BLOCKS * 4 - 1} from layer {layer}"
    ]
