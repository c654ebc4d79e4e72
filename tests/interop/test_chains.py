"""Trees of our relay and the peer's, in both orders; only ours dials.

Ours asks at the peer's for what nobody publishes at ours, and announces there what can be had at
ours and not there, so producers may dial the one and consumers the other, either way round. (The
peer's can dial too, ``--upstream``, but passes no SUBSCRIBE_NAMESPACE on: nothing is discovered
through it.)

What the peer's relay does differently from the draft, and a test has to allow for:

* an Object is passed on once it is there whole, and a fill once all of it is;
* for a Track that had begun when it was first asked, it sends a FETCH of its own for what there is
  of the latest Group, and one more for the fill: the producer sends that Group twice, and
  subscribers get it twice. So production begins once somebody is subscribed;
* it takes what such a FETCH has brought after 2 s, or 10 s for a fill, for all there is. An Object
  that was half sent for so long is lost to everybody behind it, without a word. So production
  does not rest while an Object is half sent;
* a SUBSCRIBE goes to whoever announced the namespace last, be it the one who asks;
* two NAMESPACE_DONE tell of a publisher that is lost.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvcs.consumer.events import PublicationComplete
from kvcs.consumer.retrieval import ConnectionSpec
from kvcs.consumer.trust import Expectations
from kvcs.profile.signing import ProducerKey
from kvcs.telemetry import Counter
from moqt.aio import ClientTls, ServerTls, connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.relay.server import Relay
from moqt.session.events import NamespaceAppeared, NamespaceGone, ObjectReceived
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.scene import (
    BLOCKS,
    EVERYTHING,
    CountingSink,
    Scene,
    assert_same_cache,
    expectations,
    fill,
    filled,
    of_kind,
    run,
)
from tests.integration.relay.crowd import CONSUMERS, enlarge_blocks, octets_of, produce_for_crowd
from tests.integration.relay.stage import Stage, counting_sent_octets, producing_behind
from tests.interop.conftest import StartPeer, start_relay
from tests.interop.peer import MARKS
from tests.interop.published import Publisher, TrackMaker, binary_track

pytestmark = MARKS

OURS_FIRST = pytest.param(True, id="producer, ours, theirs, consumers")
THEIRS_FIRST = pytest.param(False, id="producer, theirs, ours, consumers")


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    enlarge_blocks(monkeypatch)


@asynccontextmanager
async def chained(
    start_peer: StartPeer, files: CertificateFiles, *, ours_first: bool
) -> AsyncIterator[Stage]:
    """Have two relays listen, ours with a session at the peer's; producers go to the first."""
    trust = ClientTls(ca_file=files.ca_file)
    theirs = ConnectionSpec(uri=start_relay(start_peer, files).uri, tls=trust)
    async with Relay() as relay:
        _, port = await relay.listen(
            "127.0.0.1", 0, tls=ServerTls(files.certificate_file, files.key_file)
        )
        relay.ask_at(theirs.uri, tls=trust)
        ours = ConnectionSpec(uri=f"moqt://127.0.0.1:{port}/", tls=trust)
        yield Stage([relay], [ours, theirs] if ours_first else [theirs, ours])


async def retrieved(scene: Scene, expected: Expectations | None = None) -> None:
    """Retrieve everything, once."""
    sink = CountingSink()
    events = await run(scene.retrieve(sink, expected=expected))
    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sink.placed == EVERYTHING
    assert_same_cache(sink)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("ours_first", [OURS_FIRST, THEIRS_FIRST])
async def test_sixteen_that_join_at_any_moment_get_everything_once_of_one_copy(
    start_peer: StartPeer, certificates: CertificateFiles, ours_first: bool, seed: int
) -> None:
    with counting_sent_octets() as sent:
        async with (
            chained(start_peer, certificates, ours_first=ours_first) as stage,
            producing_behind(stage, certificates) as scene,
        ):
            crowd = await produce_for_crowd(scene, seed=seed, gently=True)
            [connection] = (link.connection for link in scene.producer._relays)
            assert connection is not None
            copies = sent[connection] / octets_of(crowd.publication)
            sessions = scene.counters[Counter.SESSIONS]

    for events, sink in zip(crowd.events, crowd.sinks, strict=True):
        [complete] = of_kind(events, PublicationComplete)
        assert sink.placed == EVERYTHING
        assert sink.calls == ["begin", "done"]
        assert (complete.summary.duplicates, complete.summary.unwanted) == (0, 0)
        assert_same_cache(sink)
    assert crowd.joined_half_sent > CONSUMERS // 4
    assert sessions == 1
    assert 1.0 <= copies <= 1.02


async def test_a_later_segment_comes_through_although_ours_has_kept_an_earlier_one(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    async with (
        chained(start_peer, certificates, ours_first=False) as stage,
        producing_behind(stage, certificates) as scene,
    ):
        handle = scene.open()
        sink = CountingSink()
        retrieval = asyncio.ensure_future(run(scene.retrieve(sink)))
        await fill(handle, segment=await handle.add_segment(3))
        await sink.reached(2 * 6 * 3)
        await fill(handle, segment=await handle.add_segment(BLOCKS - 3))
        await handle.finish()
        await retrieval
        await retrieved(scene)

    assert sink.placed == EVERYTHING
    assert_same_cache(sink)


@pytest.mark.parametrize("ours_first", [OURS_FIRST, THEIRS_FIRST])
async def test_what_ours_has_kept_is_had_at_both_when_its_producer_is_gone(
    start_peer: StartPeer, certificates: CertificateFiles, ours_first: bool
) -> None:
    key = ProducerKey.generate()
    expected = expectations(trusted={key.kid: key.public_key}, require_signature=True)
    async with chained(start_peer, certificates, ours_first=ours_first) as stage:
        async with producing_behind(stage, certificates, producer_key=key) as scene:
            await filled(scene.open())
            await retrieved(scene, expected)
        for scene.spec in stage.specs:
            await retrieved(scene, expected)


async def test_who_asks_what_it_is_asked_for_is_refused_at_once_and_waits_for_nobody(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    """Theirs asks us for what we ask of it, once the producer that it had is gone."""
    async with chained(start_peer, certificates, ours_first=False) as stage:
        async with producing_behind(stage, certificates) as scene:
            await filled(scene.open())
            await retrieved(scene)
        await retrieved(scene)  # unsigned, so it asks for a manifest that is nowhere


async def test_a_producer_that_leaves_theirs_costs_ours_nothing_of_another(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    maker = TrackMaker(binary_track("stays"))
    name, gone = maker.track.name, binary_track("leaves").namespace
    async with chained(start_peer, certificates, ours_first=False) as stage, asyncio.timeout(30):
        theirs, ours = stage.specs
        async with (
            connect(theirs.uri, tls=theirs.tls, handler=Publisher(maker.track)) as staying,
            connect(theirs.uri, tls=theirs.tls) as leaving,
            connect(ours.uri, tls=ours.tls) as consumer,
        ):
            found = await consumer.subscribe_namespace(gone)
            await staying.publish_namespace(name.namespace)
            await leaving.publish_namespace(gone)
            assert isinstance(await anext(found), NamespaceAppeared)
            subscription = await consumer.subscribe(name, fill=LocationFilter.absolute_start(0, 0))
            await leaving.close()
            assert isinstance(await anext(found), NamespaceGone)
            maker.publish_groups(range(2))
            maker.end()
            taken = [event async for event in subscription if isinstance(event, ObjectReceived)]

    payloads = {e.location: e.payload for e in taken if e.status is ObjectStatus.NORMAL}
    assert payloads == maker.expected
    assert subscription.ended is not None
    assert subscription.ended.code is PublishDoneCode.TRACK_ENDED
