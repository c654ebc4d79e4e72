"""A retrieval that is brought what it lacks by a block service over HTTPS."""

import pytest

from kvcs.consumer.events import ObjectRejected
from kvcs.consumer.retrieval import consume
from kvcs.consumer.services import HttpSections
from kvcs.kvsp.http.holder import MemoryHolder
from kvcs.producer.answers import Answers
from kvcs.producer.blocks import PublishedBlocks
from kvcs.store.source import ArraySource
from kvcs.telemetry import Counter
from kvcs.trust.scope import Protection, Scope
from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import FOREIGNER, READER
from tests.integration.http.scene import on_stage as service_on_stage
from tests.integration.kvcs.faults import copied, other_run, standing
from tests.integration.kvcs.scene import (
    BLOCKS,
    COMPAT,
    EVERYTHING,
    LAYERS,
    QUICK,
    SCOPE,
    TOKENS,
    CountingSink,
    expectations,
    filled,
    of_kind,
    on_stage,
    tensors,
)
from tests.integration.kvcs.test_recovery import assert_exact, assert_whole, beside, rest_of

pytestmark = pytest.mark.network

LACKS = (b"v.raw.s0", 3)


def holder(*, wrong_layer: int | None = None) -> MemoryHolder:
    """The cache of the scene; one layer of it may be another's."""
    made = MemoryHolder()
    whole = BLOCKS * COMPAT.block_tokens
    sides = [tensors(5 - n if n == wrong_layer else n) for n in range(LAYERS)]
    source = ArraySource(
        COMPAT, TOKENS[:whole], [k for k, _ in sides], [v for _, v in sides]
    )  # fmt: skip
    made.add_source(SCOPE, source)
    return made


async def test_what_no_relay_has_is_brought_over_https_and_attested(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        service_on_stage(certificates, holder=holder()) as stage,
        stage.blocks(READER) as client,
        beside(certificates, False, lacks=LACKS) as specs,
        consume(
            expectations(), specs, sink, blocks=[HttpSections(client)], settings=QUICK
        ) as retrieval,
    ):
        events = await rest_of(retrieval)

    complete = assert_whole(events, sink)
    assert complete.summary.attested == EVERYTHING.total()


@pytest.mark.parametrize(
    "scope", [Scope(SCOPE), Scope(SCOPE, Protection())], ids=["in clear", "sealed"]
)
async def test_what_a_producer_serves_over_https_is_what_it_published(
    certificates: CertificateFiles, scope: Scope
) -> None:
    """The publication itself is over at the relay, but for what is lacking there."""
    sink, answers = CountingSink(), Answers(SCOPE.scope_id)
    async with on_stage(certificates, scope=scope) as scene:
        publication = await filled(scene.open())
        answers.add(publication)
        copy = copied(publication, lacks=LACKS)
        async with (
            service_on_stage(certificates, holder=PublishedBlocks(answers)) as stage,
            stage.blocks(READER) as client,
            standing(certificates, copy) as stand_in,
            consume(
                expectations(scope),
                [stand_in.spec],
                sink,
                blocks=[HttpSections(client)],
                settings=QUICK,
            ) as retrieval,
        ):
            events = await rest_of(retrieval)

    assert_whole(events, sink)


async def test_of_several_publications_that_a_service_has_the_one_that_is_missing_is_taken(
    certificates: CertificateFiles,
) -> None:
    """The newest one was computed otherwise, and would be served to who does not say."""
    sink, answers = CountingSink(), Answers(SCOPE.scope_id)
    async with on_stage(certificates) as scene:
        publication = await filled(scene.open())
        answers.add(publication)
        answers.add(await other_run(scene.open()))
        copy = copied(publication, lacks=LACKS)
        async with (
            service_on_stage(certificates, holder=PublishedBlocks(answers)) as stage,
            stage.blocks(READER) as client,
            standing(certificates, copy) as stand_in,
            consume(
                expectations(),
                [stand_in.spec],
                sink,
                blocks=[HttpSections(client)],
                settings=QUICK,
            ) as retrieval,
        ):
            events = await rest_of(retrieval)
            assert stage.counters[Counter.HTTP_REQUESTS] == 1

    assert_whole(events, sink)
    assert of_kind(events, ObjectRejected) == []


async def test_what_a_service_has_in_clear_is_not_taken_in_a_scope_that_seals(
    certificates: CertificateFiles,
) -> None:
    sink, scope = CountingSink(), Scope(SCOPE, Protection())
    async with on_stage(certificates, scope=scope) as scene:
        copy = copied(await filled(scene.open()), lacks=LACKS)
    async with (
        service_on_stage(certificates, holder=holder()) as stage,
        stage.blocks(READER) as client,
        standing(certificates, copy) as stand_in,
        consume(
            expectations(scope),
            [stand_in.spec],
            sink,
            blocks=[HttpSections(client)],
            settings=QUICK,
        ) as retrieval,
    ):
        events = await rest_of(retrieval)

    failed = assert_exact(events, sink)
    assert failed.summary.unopened == BLOCKS
    assert {gap.first_layer for gap in failed.missing} == {3}


async def test_what_a_service_has_of_another_computation_is_not_taken(
    certificates: CertificateFiles,
) -> None:
    """It has its own digest, as the service says, and not the one that the manifest lists."""
    sink = CountingSink()
    async with (
        service_on_stage(certificates, holder=holder(wrong_layer=3)) as stage,
        stage.blocks(READER) as client,
        beside(certificates, False, lacks=LACKS) as specs,
        consume(
            expectations(), specs, sink, blocks=[HttpSections(client)], settings=QUICK
        ) as retrieval,
    ):
        events = await rest_of(retrieval)

    failed = assert_exact(events, sink)
    assert {gap.first_layer for gap in failed.missing} == {3}


async def test_a_service_that_does_not_know_us_costs_no_more_than_a_question(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        service_on_stage(certificates, holder=holder()) as stage,
        stage.blocks(FOREIGNER) as stranger,
        stage.blocks(READER) as client,
        beside(certificates, False, lacks=LACKS) as specs,
        consume(
            expectations(),
            specs,
            sink,
            blocks=[HttpSections(stranger), HttpSections(client)],
            settings=QUICK,
        ) as retrieval,
    ):
        events = await rest_of(retrieval)

    assert_whole(events, sink)


async def test_it_says_who_it_is(certificates: CertificateFiles) -> None:
    async with service_on_stage(certificates) as stage, stage.blocks() as client:
        assert HttpSections(client).name == stage.base
        assert not HttpSections(client).deterministic
        assert HttpSections(client, deterministic=True).deterministic
