"""Memory of two sessions over very many Groups: what was sent and taken leaves nothing."""

import pytest

from moqt.session.config import SessionConfig
from moqt.session.events import ObjectReceived, SubscriptionEnded
from moqt.session.localtrack import LocalTrack
from tests.memory import MIB, objects_alive, resident_octets
from tests.session.pair import NAME, Pair, publish_group


def forget_what_is_over(pair: Pair) -> None:
    """Have the wire between the sessions forget streams that are over, but for the last one."""
    for end in pair.ends:
        last = max(end.outgoing)
        end.outgoing = {s: d for s, d in end.outgoing.items() if not d.over or s == last}
        end.seen.clear()
    pair.log.clear()


@pytest.mark.parametrize("groups", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_groups_that_were_sent_and_taken_leave_nothing_behind(groups: int) -> None:
    # The shape of some Groups is remembered, to notice when a Track is malformed.
    pair, at_once = Pair(client=SessionConfig(max_malformed_groups=100)), 20
    track = pair.server.publish(LocalTrack(NAME, retain=False))
    pair.client.session.subscribe(NAME)
    pair.settle()
    settled, before, received = 0, 0, 0
    for group in range(groups):
        if group == groups // 2:
            settled, before = objects_alive(), resident_octets()
        publish_group(track, group, 1)
        if group % at_once == at_once - 1:
            pair.settle()
            received += len(pair.client.take(ObjectReceived))
            forget_what_is_over(pair)

    assert received == groups
    assert objects_alive() - settled < 200
    assert resident_octets() - before < 4 * MIB
    assert track.octets == 0
    track.end()
    pair.settle()
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []
