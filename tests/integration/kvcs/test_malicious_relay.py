"""Relays that lie: no layer is told that is not the producer's, and whatever they do, it ends.

Each run draws what a relay does from its seed; a failure says the seed, the lies and what was told.
``KVCS_MALICE_RUNS`` and ``KVCS_MALICE_SEED`` make for longer runs, and for others.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    ObjectRejected,
    PublicationComplete,
)
from kvcs.consumer.retrieval import BadPublications, ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.trust import Expectations
from kvcs.profile.naming import MANIFEST_COSE
from kvcs.profile.signing import ProducerKey
from kvcs.trust.scope import Protection, Scope
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import PublishDoneCode
from tests.integration.kvcs.faults import other_run, standing
from tests.integration.kvcs.malice import LIES, Goods, Liar, Loot, forged, lied_about
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    COMPAT,
    LAYERS,
    QUICK,
    SCOPE,
    TOKENS,
    CountingSink,
    filled,
    of_kind,
    on_stage,
    tensors,
)

pytestmark = pytest.mark.network

PRODUCER, STRANGER = ProducerKey.generate(kid=b"producer"), ProducerKey.generate(kid=b"stranger")
#: Seconds that a retrieval has, and that the machine may be late.
DEADLINE_S, SLACK_S = 30.0, 10.0
#: Seconds that a relay may be silent. Where an honest one seems to be, it has five times as long.
PATIENCE_S = 0.8
#: Retrievals at a time: most of them wait for what does not come.
AT_ONCE = 8


@dataclass(frozen=True)
class Market:
    """Two publications of one prompt by one producer, of which each is right by itself."""

    ours: Goods
    other: Goods
    expected: Expectations

    @property
    def loot(self) -> Loot:
        return Loot((self.other,), STRANGER)


@asynccontextmanager
async def market(
    certificates: CertificateFiles, protection: Protection | None = None
) -> AsyncIterator[Market]:
    scope = Scope(SCOPE, protection)
    async with on_stage(certificates, scope=scope, producer_key=PRODUCER) as scene:
        ours = Goods.of(await filled(scene.open(), [3, 2]))
        other = Goods.of(await other_run(scene.open()))
    trusted = {PRODUCER.kid: PRODUCER.public_key}
    expected = Expectations.of_tokens(
        scope, COMPAT, TOKENS, trusted=trusted, require_signature=True
    )
    yield Market(ours, other, expected)


def settings_of(rng: random.Random, patience_s: float) -> RetrievalSettings:
    return RetrievalSettings(
        deadline_s=DEADLINE_S,
        discovery_timeout_s=patience_s,
        another_s=0.02,
        request_timeout_s=patience_s,
        stall_timeout_s=patience_s,
        silence_s=2 * patience_s,
        again_s=0.02,
        again_max_s=0.1,
        eager=rng.random() < 0.3,
        fetch=rng.choice(["auto", "never"]),
        resubscribe=rng.randint(0, 1),
    )


def assert_of_the_producer(sink: CountingSink, told: list[LayerReady]) -> None:
    """What was told of a segment is all of one publication, which the producer signed."""
    runs: dict[int, list[bool]] = {}
    for event in told:
        tokens = slice(event.token_start, event.token_end)
        both = runs.setdefault(event.segment, [True, True])
        parts = (sink.k[event.layer], sink.v[event.layer])
        for found, ours in zip(parts, tensors(event.layer), strict=True):
            for run, right in enumerate((ours, -ours)):
                both[run] &= np.array_equal(
                    found[tokens].view(np.uint16), right[tokens].view(np.uint16)
                )
    assert all(map(any, runs.values())), f"{told[-1]} is not what the producer made"


def assert_whole(told: list[LayerReady]) -> None:
    """Every layer was told of all tokens."""
    for layer in range(LAYERS):
        spans = sorted((e.token_start, e.token_end) for e in told if e.layer == layer)
        assert spans[0][0] == 0
        assert spans[-1][1] == BLOCKS * BLOCK_TOKENS
        assert all(before[1] == after[0] for before, after in pairwise(spans))


@dataclass
class Outcome:
    """What came of one run."""

    last: Event
    told: list[LayerReady]
    lies: list[str]


class Starved(AssertionError):
    """An honest relay was there and did not help: perhaps the machine stood still."""


async def attempt(
    certificates: CertificateFiles,
    market: Market,
    honest: ConnectionSpec,
    seed: int,
    patience_s: float,
) -> Outcome:
    """Retrieve over relays of which some lie, and check what is told as it is told."""
    rng = random.Random(seed)
    sink, told = CountingSink(), list[LayerReady]()
    loop = asyncio.get_running_loop()
    has_honest = rng.random() < 0.6
    async with AsyncExitStack() as stack:
        specs, lies, liars = [], [], list[Liar]()
        for _ in range(rng.choice([1, 1, 2])):
            changed, did = lied_about(market.ours, rng, market.loot)
            held = [changed.passed_on()]
            if rng.random() < 0.2:
                more, also = lied_about(market.other, rng, Loot((market.ours,), STRANGER))
                held.append(more.passed_on())
                did += also
            liars.append(Liar(*held))
            relay = await stack.enter_async_context(standing(certificates, handler=liars[-1]))
            if rng.random() < 0.1:
                relay.handler.silent.add(rng.choice(list(market.ours.tracks)))
                did.append("is silent")
            specs.append(relay.spec)
            lies += did
        if has_honest:
            specs.insert(rng.randint(0, len(specs)), honest)
        began = loop.time()
        last: Event | None = None
        try:
            async with (
                asyncio.timeout(DEADLINE_S + SLACK_S),
                consume(
                    market.expected,
                    specs,
                    sink,
                    settings=settings_of(rng, patience_s),
                    bad=BadPublications(),
                ) as retrieval,
            ):
                async for event in retrieval:
                    last = event
                    if isinstance(event, LayerReady):
                        if not told and rng.random() < 0.5:
                            for liar in liars:
                                liar.go_on(rng, market.loot)
                        told.append(event)
                        assert_of_the_producer(sink, told)
            assert last is not None
            assert_of_the_producer(sink, told)
            if isinstance(last, PublicationComplete):
                assert_whole(told)
            else:
                assert isinstance(last, Failed), last
            if has_honest and isinstance(last, Failed):
                raise Starved(f"seed {seed}: an honest relay was there: {lies}: {last}")
        except Starved:
            raise
        except Exception as exc:
            after = loop.time() - began
            raise AssertionError(f"seed {seed}, {after:.1f} s: {lies}: {exc!r}") from exc
    return Outcome(last, told, lies)


async def attempts(
    certificates: CertificateFiles, seeds: range, protection: Protection | None
) -> list[Outcome]:
    """Run many, some at a time."""
    turn = asyncio.Semaphore(AT_ONCE)

    async with market(certificates, protection) as goods:
        whole = [goods.ours.passed_on(), goods.other.passed_on()]
        async with standing(certificates, *whole) as honest:

            async def one(seed: int) -> Outcome:
                async with turn:
                    try:
                        return await attempt(certificates, goods, honest.spec, seed, PATIENCE_S)
                    except Starved:
                        patience_s = 5 * PATIENCE_S
                        return await attempt(certificates, goods, honest.spec, seed, patience_s)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(seed)) for seed in seeds]
    return [task.result() for task in tasks]


def assert_telling(outcomes: list[Outcome]) -> None:
    """The lies hurt, but not always: neither would tell anything."""
    failed = sum(isinstance(outcome.last, Failed) for outcome in outcomes)
    assert 0 < failed < len(outcomes)
    assert any(outcome.told for outcome in outcomes if isinstance(outcome.last, Failed))


scopes = pytest.mark.parametrize("protection", [None, Protection()], ids=["clear", "sealed"])


@pytest.mark.parametrize(
    ("seeds", "protection"),
    [
        pytest.param(range(8), None, id="clear"),
        # Some of these wait to the end of their deadline.
        pytest.param(range(20), None, id="clear, more", marks=pytest.mark.slow),
        pytest.param(range(20), Protection(), id="sealed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(180)
async def test_whatever_a_relay_does_no_wrong_layer_is_told_and_it_ends(
    certificates: CertificateFiles, seeds: range, protection: Protection | None
) -> None:
    assert_telling(await attempts(certificates, seeds, protection))


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_so_it_is_a_thousand_times(certificates: CertificateFiles) -> None:
    """Half of them in a scope that seals."""
    first = int(os.environ.get("KVCS_MALICE_SEED", "1000"))
    count = int(os.environ.get("KVCS_MALICE_RUNS", "1000"))
    print(f"seeds {first} to {first + count - 1}")
    outcomes: list[Any] = []
    for number, begin in enumerate(range(first, first + count, 100)):
        seeds = range(begin, min(begin + 100, first + count))
        outcomes += await attempts(certificates, seeds, Protection() if number % 2 else None)

    assert_telling(outcomes)
    assert {lie for outcome in outcomes for lie in outcome.lies} >= {lie.__name__ for lie in LIES}


@scopes
async def test_without_a_lie_everything_is_told(
    certificates: CertificateFiles, protection: Protection | None
) -> None:
    sink = CountingSink()

    async with (
        market(certificates, protection) as goods,
        standing(certificates, goods.ours.copy().passed_on()) as relay,
        consume(goods.expected, [relay.spec], sink) as retrieval,
    ):
        events = [event async for event in retrieval]

    assert isinstance(events[-1], PublicationComplete)
    told = of_kind(events, LayerReady)
    assert_whole(told)
    assert_of_the_producer(sink, told)


def lacking_the_last(goods: Goods) -> Goods:
    """Return what a relay serves that has all but one Object, and whose tracks never end."""
    changed = goods.copy()
    name = changed.data_tracks[-1]
    last = max(item.group for item in changed.tracks[name] if item.is_data)
    changed.tracks[name] = [item for item in changed.tracks[name] if item.group < last]
    changed.ends = dict.fromkeys(changed.ends)
    return changed


@pytest.mark.parametrize("has_honest", [True, False], ids=["beside an honest one", "alone"])
async def test_a_later_manifest_that_nobody_signed_costs_its_relay_and_nothing_that_was_told(
    certificates: CertificateFiles, has_honest: bool
) -> None:
    sink, told = CountingSink(), list[LayerReady]()

    async with market(certificates) as goods:
        liar = Liar(lacking_the_last(goods.ours).passed_on())
        async with (
            standing(certificates, handler=liar) as relay,
            standing(certificates, goods.ours.passed_on()) as honest,
            consume(
                goods.expected,
                [relay.spec, honest.spec] if has_honest else [relay.spec],
                sink,
                settings=replace(QUICK, fetch="never"),
            ) as retrieval,
        ):
            async with asyncio.timeout(DEADLINE_S):
                async for last in retrieval:
                    if isinstance(last, LayerReady):
                        if not told:
                            liar.go_on(random.Random(1), goods.loot, b"nobody signed this")
                        told.append(last)

    assert_of_the_producer(sink, told)
    if has_honest:
        assert isinstance(last, PublicationComplete), last
        assert_whole(told)
    else:
        assert isinstance(last, Failed)
        assert last.reason is FailureReason.INCOMPLETE
        assert last.text.startswith("manifest refused: ")
        assert {n for r in last.ready for n in range(r.first_layer, r.last_layer + 1)}


async def test_a_relay_that_says_a_publication_was_abandoned_keeps_nobody_from_asking_another(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with market(certificates) as goods:
        lies = lacking_the_last(goods.ours)
        done = PublishDoneCode.INTERNAL_ERROR, "abandoned: so they say"
        lies.ends[lies.data_tracks[-1]] = done
        async with (
            asyncio.timeout(DEADLINE_S),
            standing(certificates, handler=Liar(lies.passed_on())) as relay,
            standing(certificates, goods.ours.passed_on()) as honest,
            consume(
                goods.expected,
                [relay.spec, honest.spec],
                sink,
                settings=replace(QUICK, fetch="never"),
            ) as retrieval,
        ):
            events = [event async for event in retrieval]

    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert_whole(of_kind(events, LayerReady))


async def test_what_a_later_manifest_proves_bad_is_asked_for_where_that_manifest_came_from(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with market(certificates) as goods:
        lies = goods.ours.copy()
        manifests = lies.tracks[MANIFEST_COSE]
        # Segment 1 is listed there, and none of its digests is.
        del manifests[-1]
        last = lies.tracks[b"k.raw.s1"]
        last[:] = [
            replace(item, payload=forged(item.payload, random.Random(at))) if item.is_data else item
            for at, item in enumerate(last)
        ]
        async with (
            asyncio.timeout(DEADLINE_S),
            standing(certificates, handler=Liar(lies.passed_on())) as relay,
            standing(certificates, goods.ours.passed_on()) as honest,
            consume(goods.expected, [relay.spec, honest.spec], sink, settings=QUICK) as retrieval,
        ):
            events = [event async for event in retrieval]

    assert isinstance(events[-1], PublicationComplete), events[-1]
    told = of_kind(events, LayerReady)
    assert_whole(told)
    assert_of_the_producer(sink, told)
    assert of_kind(events, ObjectRejected), "nothing bad was ever placed"
