"""What is tried next, in which order, and until when."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.joining import Bond
from kvcs.consumer.recovery import (
    Ask,
    AskBlocks,
    AskRelay,
    Pause,
    Recompute,
    Recovery,
    Standing,
    Step,
)
from kvcs.consumer.settings import RetrievalSettings
from tests.unit.kvcs.consumer.recovering import (
    BLOCKS,
    EVERYTHING,
    LAYERS,
    OBJECTS,
    SEGMENTS,
    Evenly,
    Luck,
    Publication,
    Relay,
    Service,
    World,
)

INCOMPLETE = Failure(FailureReason.INCOMPLETE, "not everything came")
LOST = Failure(FailureReason.UNREACHABLE, "connection lost", again=True, lost=True)
USED = Standing(objects=3, tokens=20, bond=Bond.BOUND, told=True, blocks_may_help=True)
JOINABLE = replace(USED, bond=Bond.JOINABLE)


def recovery(relays: int = 2, services: int = 0, **settings: Any) -> Recovery:
    return Recovery(
        RetrievalSettings(**({"deadline_s": 100.0} | settings)),
        relays=relays,
        services=services,
        pauses=Evenly(),
        now=1000.0,
    )


def steps(subject: Recovery, found: Failure, stands: Standing, count: int) -> list[Step]:
    """Return the next steps, each of which ends the same way."""
    done: list[Step] = []
    for _ in range(count):
        done.append(step := subject.next_step())
        if isinstance(step, Recompute):
            break
        if isinstance(step, AskRelay | AskBlocks):
            subject.tried(step, found, stands, 1001.0)
    return done


# -- in which order ------------------------------------------------------------------------------


def test_relays_come_first_then_other_publications_then_block_services_then_computing() -> None:
    subject = recovery(relays=2, services=2)

    assert steps(subject, INCOMPLETE, JOINABLE, 9) == [
        AskRelay(0),
        AskRelay(1),
        AskRelay(0, Ask.ANOTHER),
        AskRelay(1, Ask.ANOTHER),
        AskBlocks(0),
        AskBlocks(1),
        Recompute(INCOMPLETE),
    ]


def test_where_nobody_else_can_go_on_no_other_publication_is_looked_for() -> None:
    assert steps(recovery(services=1), INCOMPLETE, USED, 9) == [
        AskRelay(0),
        AskRelay(1),
        AskBlocks(0),
        Recompute(INCOMPLETE),
    ]


def test_block_services_are_not_asked_before_a_manifest_says_what_is_missing() -> None:
    nothing = Standing(tokens=20)

    assert steps(recovery(services=1), INCOMPLETE, nothing, 9)[2:] == [Recompute(INCOMPLETE)]


def test_after_a_loss_everybody_is_asked_again_after_a_pause_for_ever() -> None:
    subject = recovery(relays=2)

    assert steps(subject, LOST, USED, 6) == [
        AskRelay(0), AskRelay(1), Pause(1.0), AskRelay(0), AskRelay(1), Pause(1.0),
    ]  # fmt: skip


def test_one_relay_that_may_have_it_later_is_enough_for_another_round() -> None:
    subject = recovery(relays=2)
    subject.tried(AskRelay(0), LOST, USED, 1001.0)
    subject.tried(AskRelay(1), INCOMPLETE, USED, 1001.0)

    assert subject.next_step() == Pause(1.0)


def test_a_round_in_which_nothing_can_be_had_later_is_the_last_one() -> None:
    subject = recovery(relays=1)
    steps(subject, LOST, USED, 2)

    assert steps(subject, INCOMPLETE, USED, 5) == [AskRelay(0), Recompute(INCOMPLETE)]


def test_a_service_that_has_not_all_of_it_is_not_asked_twice_and_one_that_stalls_is() -> None:
    subject = recovery(relays=1, services=2)
    stalls = Failure(FailureReason.UNREACHABLE, "it stalls", again=True)
    lacks_some = Failure(FailureReason.NOT_FOUND, "not all of it")
    subject.tried(AskRelay(0), LOST, USED, 1001.0)

    assert subject.next_step() == AskBlocks(0)
    subject.tried(AskBlocks(0), lacks_some, USED, 1001.0)
    assert subject.next_step() == AskBlocks(1)
    subject.tried(AskBlocks(1), stalls, USED, 1001.0)
    assert steps(subject, LOST, USED, 3) == [Pause(1.0), AskRelay(0), AskBlocks(1)]


def test_a_publication_that_goes_on_is_asked_for_at_every_relay() -> None:
    subject = recovery(relays=2)
    steps(subject, INCOMPLETE, JOINABLE, 2)
    assert subject.next_step() == AskRelay(0, Ask.ANOTHER)

    subject.tried(AskRelay(0, Ask.ANOTHER), INCOMPLETE, replace(JOINABLE, objects=4), 1001.0)

    assert subject.next_step() == AskRelay(1)
    assert isinstance(steps(subject, INCOMPLETE, replace(JOINABLE, objects=4), 20)[-1], Recompute)


def test_relays_that_were_found_come_behind_those_of_the_list() -> None:
    subject = recovery(relays=1)
    subject.found_relays(2)

    assert steps(subject, LOST, USED, 5) == [
        AskRelay(0), AskRelay(1), AskRelay(2), Pause(1.0), AskRelay(0),
    ]  # fmt: skip


def test_one_that_was_left_for_another_relay_is_asked_last() -> None:
    subject = recovery(relays=3)
    subject.tried(AskRelay(0), LOST, USED, 1001.0)
    subject.moved(2)

    assert steps(subject, LOST, USED, 3) == [AskRelay(2), AskRelay(0), AskRelay(1)]


@pytest.mark.parametrize(
    ("reason", "stands", "final"),
    [
        (FailureReason.UNUSABLE, Standing(), True),
        (FailureReason.CONTRADICTED, Standing(), False),
        (FailureReason.CONTRADICTED, JOINABLE, True),
        (FailureReason.CONTRADICTED, Standing(bond=Bond.BOUND), True),
        (FailureReason.ABANDONED, Standing(), False),
        (FailureReason.ABANDONED, JOINABLE, False),
        (FailureReason.ABANDONED, USED, False),
        (FailureReason.STALLED, USED, False),
    ],
)
def test_what_nobody_can_make_good_ends_it_at_once(
    reason: FailureReason, stands: Standing, final: bool
) -> None:
    subject = recovery(relays=2, services=2)
    failure = Failure(reason, "why", again=True, lost=True)

    subject.tried(AskRelay(0), failure, stands, 1001.0)
    assert (subject.next_step() == Recompute(failure)) is final


def test_who_says_that_it_was_abandoned_keeps_nobody_else_from_being_asked() -> None:
    abandoned = Failure(FailureReason.ABANDONED, "so they say")

    assert steps(recovery(relays=2, services=1), abandoned, USED, 9) == [
        AskRelay(0),
        AskRelay(1),
        AskBlocks(0),
        Recompute(abandoned),
    ]


# -- until when ----------------------------------------------------------------------------------


def test_without_an_estimate_only_the_deadline_ends_it() -> None:
    subject = recovery()
    subject.tried(AskRelay(0), LOST, USED, 1001.0)

    assert subject.until == 1100.0
    assert subject.expired.text == "not complete within 100 s: connection lost"


def test_recovery_lasts_no_longer_than_computing_what_was_missing_when_it_began() -> None:
    subject = recovery(recompute_tokens_per_s=10.0)
    assert subject.until == 1100.0

    subject.tried(AskRelay(0), LOST, USED, 1001.0)
    assert subject.until == 1003.0
    subject.tried(AskRelay(1), LOST, replace(USED, tokens=500), 1002.0)
    assert subject.until == 1003.0
    assert subject.expired.reason is FailureReason.EXPIRED
    assert subject.expired.text.startswith("not recovered within 2 s, in which it can be recomp")


def test_recovery_begins_as_well_where_another_relay_takes_over_from_a_silent_one() -> None:
    subject = recovery(recompute_tokens_per_s=10.0)
    subject.moved(1)
    assert subject.until == 1100.0

    subject.begin(USED, 1001.0)
    subject.tried(AskRelay(1), LOST, USED, 1002.0)
    assert subject.until == 1003.0


def test_the_deadline_ends_it_where_computing_takes_longer() -> None:
    subject = recovery(recompute_tokens_per_s=0.1)
    subject.tried(AskRelay(0), LOST, USED, 1001.0)

    assert subject.until == 1100.0


def test_the_bound_counts_from_the_first_failure_although_the_tokens_are_known_later() -> None:
    subject = recovery(recompute_tokens_per_s=10.0)
    subject.tried(AskRelay(0), LOST, Standing(), 1001.0)
    assert subject.until == 1100.0

    subject.tried(AskRelay(1), LOST, USED, 1001.5)
    assert subject.until == 1003.0


# -- whatever happens ----------------------------------------------------------------------------

places = st.frozensets(st.sampled_from(sorted(EVERYTHING)))
usually = st.sampled_from([True, True, True, False])
mostly_all = st.one_of(st.just(EVERYTHING), places.map(lambda some: EVERYTHING - some))
publications = st.builds(
    Publication,
    number=st.just(0),
    deterministic=st.booleans(),
    blocks=st.sampled_from([BLOCKS, BLOCKS, BLOCKS, BLOCKS // SEGMENTS]),
    listed=st.sampled_from([0, LAYERS, 1]),
    segments=st.sampled_from([SEGMENTS, SEGMENTS, 1]),
)
lucks = st.builds(
    Luck,
    seconds=st.floats(0.0, 3.0),
    reached=st.sampled_from([True] * 5 + [False]),
    # A layer of a segment is there with four of them.
    objects=st.sampled_from([5, 4, 7, 12, 1, 0, OBJECTS]),
    bad=st.one_of(st.just(frozenset()), places),
    lies=st.sampled_from([False] * 9 + [True]),
    end=st.sampled_from(
        [
            FailureReason.INCOMPLETE,
            FailureReason.STALLED,
            FailureReason.UNREACHABLE,
            FailureReason.ABANDONED,
        ]
    ),
    lost=st.sampled_from([False, False, True]),
)


class Retrieving(RuleBasedStateMachine):
    """Relays that are lost, refuse, lack or damage something; services that stall or lie."""

    world: World

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        found = data.draw(st.lists(publications, min_size=2, max_size=3))
        made = [replace(one, number=number) for number, one in enumerate(found)]
        self.runs = [one.run for one in made]
        relays = [
            Relay({one: data.draw(mostly_all) for one in made if data.draw(usually)})
            for _ in range(data.draw(st.integers(1, 3)))
        ]
        services = [
            # Who says that it is deterministic is: nobody can tell, where nothing is listed.
            Service(
                run="every" if honest else data.draw(st.sampled_from(self.runs)),
                deterministic=honest,
                has=data.draw(mostly_all),
                bad=frozenset() if honest else data.draw(places),
            )
            for honest in data.draw(st.lists(st.booleans(), max_size=2))
        ]
        rate = data.draw(st.sampled_from([None, 0.2, 1.0]))
        settings = RetrievalSettings(deadline_s=40.0, recompute_tokens_per_s=rate)
        self.world = World(relays, services, settings)
        self.asked = 0  # since the last pause

    @precondition(lambda self: not self.world.over)
    @rule(luck=lucks)
    def something_is_tried(self, luck: Luck) -> None:
        self.do(luck)

    @precondition(lambda self: not self.world.over and self.world.began_at is not None)
    @rule(data=st.data())
    def a_relay_is_left_for_another(self, data: st.DataObject) -> None:
        self.world.recovery.moved(data.draw(st.integers(0, len(self.world.relays) - 1)))
        self.asked = 0

    @precondition(lambda self: self.world.over)
    @rule()
    def it_is_over(self) -> None:
        """Nothing is tried any more."""

    def do(self, luck: Luck) -> None:
        step = self.world.step(luck)
        self.asked = 0 if isinstance(step, Pause) else self.asked + 1
        # Everybody is asked once in a round, and again where another publication has gone on.
        everybody = 2 * len(self.world.relays) + len(self.world.services) + 1
        assert self.asked <= everybody * (OBJECTS + 1)

    @invariant()
    def nothing_is_mixed_told_too_early_or_missing_unsaid(self) -> None:
        self.world.check([*self.runs, "every"])

    @invariant()
    def it_lasts_no_longer_than_it_may(self) -> None:
        world = self.world
        assert world.now <= world.settings.deadline_s
        if world.began_at is not None:
            assert world.now <= world.began_at + world.bound_s + 1e-6

    @invariant()
    def what_is_complete_is(self) -> None:
        if self.world.complete:
            assert self.world.current is not None
            assert self.world.current.is_complete
            extent = self.world.current.extent
            assert extent is not None
            assert {p for p in EVERYTHING if p[2] in extent} == set(self.world.sink)

    def teardown(self) -> None:
        """Whatever has happened, it ends, even if everything is lost again and again."""
        if not hasattr(self, "world"):
            return
        nothing = Luck(seconds=0.0, objects=0, end=FailureReason.UNREACHABLE, lost=True)
        for _ in range(2_000):
            if self.world.over:
                break
            self.do(nothing)
        assert self.world.over
        self.world.check([*self.runs, "every"])


Retrieving.TestCase.settings = hypothesis_settings(
    max_examples=50, stateful_step_count=25, deadline=None
)
TestRetrieving = Retrieving.TestCase
