"""What upstream does not bring in time is told as timed out, and nobody hangs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moqt.aio import MoqtConnection, RequestHandler, connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import MAX_VI64, RangeMarkerKind, RequestErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.relay.options import RelayOptions
from moqt.session.coverage import Coverage, Knowledge
from moqt.session.events import FillEnded, ObjectReceived, RangeMarked, SubscribeReceived
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.parameters import Parameters
from tests.integration.relay.stage import Serving, relaying
from tests.session.pair import NAME, payload_of, publish_group

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
SHORT = RelayOptions(fill_timeout_s=0.2)
LONG = RelayOptions(fill_timeout_s=60.0)
#: The first Object of what does not come: nor does what is behind it on the stream of the fill.
MISSING = "timed out from {0, 1}"


def slow_track() -> LocalTrack:
    """A Track of which one Group is not there, and nobody knows when it will be."""
    coverage = Coverage(Knowledge.COMPLETE)
    coverage.mark(Location(1, 0), Location(1, MAX_VI64), Knowledge.PENDING)
    track = LocalTrack(NAME, coverage=coverage)
    for group in (0, 2):
        publish_group(track, group, 1)
    return track


@asynccontextmanager
async def staged(
    files: CertificateFiles, options: RelayOptions, publisher: RequestHandler, *, hops: int = 1
) -> AsyncIterator[MoqtConnection]:
    """Relays with a publisher behind them; yield a subscriber's session."""
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(files, hops=hops, options=options) as stage,
        connect(
            stage.farthest.uri, tls=stage.farthest.tls, handler=publisher, drain_s=0.1
        ) as origin,
        connect(stage.nearest.uri, tls=stage.nearest.tls, drain_s=0.1) as consumer,
    ):
        await origin.publish_namespace(NAME.namespace)
        yield consumer


def told(event: Any) -> list[Any]:
    """Return what an event says of Locations."""
    match event:
        case ObjectReceived():
            assert event.payload in (b"", payload_of(event.location))
            return [event.location] if event.payload else []
        case RangeMarked(kind=RangeMarkerKind.TIMED_OUT, start=start):
            return [f"timed out from {start}"]
        case RangeMarked():
            assert event.kind is RangeMarkerKind.NON_EXISTENT
    return []


@pytest.mark.parametrize(
    ("options", "stated_ms"), [(SHORT, None), (LONG, 200), (LONG, 0)],
    ids=["as the relay says", "as the request says", "at once"],
)  # fmt: skip
async def test_a_fetch_is_told_what_did_not_come_and_gets_the_rest(
    certificates: CertificateFiles, options: RelayOptions, stated_ms: int | None
) -> None:
    async with staged(certificates, options, Serving(slow_track())) as consumer:
        # Live, and with what is known of the past: only the Group that is missing is missing.
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        assert await anext(told_by(subscription)) == Location(0, 0)
        began = time.monotonic()
        fetch = await consumer.fetch(
            NAME, location_filter=LocationFilter.range(0, 0, 1, 5), fill_timeout_ms=stated_ms
        )
        found = [word async for word in told_by(fetch)]

    assert found == [Location(0, 0), MISSING]
    assert fetch.ended is not None
    assert fetch.ended.complete
    if stated_ms != 0:
        assert time.monotonic() - began >= 0.2


async def told_by(stream: Any) -> AsyncIterator[Any]:
    async for event in stream:
        for word in told(event):
            yield word


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_fill_is_told_what_did_not_come_and_the_subscription_goes_on(
    certificates: CertificateFiles, hops: int
) -> None:
    track = slow_track()
    fill = FillParameters(Parameters({P.LOCATION_FILTER: FROM_START, P.FILL_TIMEOUT: 300}))
    async with staged(certificates, LONG, Serving(track), hops=hops) as consumer:
        subscription = await consumer.subscribe(NAME, fill=fill)
        found: list[Any] = []
        async for event in subscription:
            found += told(event)
            if isinstance(event, FillEnded):
                assert event.complete
                publish_group(track, 3, 1)
            if found[-1:] == [Location(3, 0)]:
                break

    assert found[0] == Location(0, 0)
    assert [word for word in found if isinstance(word, str)] == [MISSING]


async def test_a_fetch_waits_for_a_publisher_that_does_not_answer_no_longer_than_it_says(
    certificates: CertificateFiles,
) -> None:
    class Silent(RequestHandler):
        def subscribe_received(
            self, connection: MoqtConnection, request: SubscribeReceived
        ) -> None:
            pass

    async with staged(certificates, LONG, Silent()) as consumer:
        began = time.monotonic()
        with pytest.raises(RequestRejected) as refused:
            await consumer.fetch(NAME, location_filter=FROM_START, fill_timeout_ms=200)

    assert refused.value.code is RequestErrorCode.TIMEOUT
    assert time.monotonic() - began < 5.0
