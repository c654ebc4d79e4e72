"""Many consumers behind relays: each gets every Object once, and the producer sends one copy."""

import pytest

from kvcs.consumer.events import PublicationComplete
from kvcs.telemetry import Counter
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import EVERYTHING, assert_same_cache, of_kind
from tests.integration.relay.crowd import CONSUMERS, enlarge_blocks, octets_of, produce_for_crowd
from tests.integration.relay.stage import counting_sent_octets, producing_behind, relaying

pytestmark = pytest.mark.network


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    enlarge_blocks(monkeypatch)


@pytest.mark.parametrize(
    ("hops", "seed"),
    [
        pytest.param(1, 1, id="one relay"),
        pytest.param(2, 2, id="two relays"),
        # Of its two tracks one is joined just at the end of a Group: the gap up to the next one
        # has to be closed for those who want the past, although no stream shows where it ends.
        pytest.param(1, 18, id="one relay, joined at the end of a group"),
    ],
)
async def test_sixteen_that_join_at_any_moment_get_everything_once_of_one_copy(
    certificates: CertificateFiles, hops: int, seed: int
) -> None:
    with counting_sent_octets() as sent:
        async with (
            relaying(certificates, hops=hops) as stage,
            producing_behind(stage, certificates) as scene,
        ):
            crowd = await produce_for_crowd(scene, seed=seed)
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
