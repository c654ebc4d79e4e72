"""The longest prefix of a prompt that is published, in few questions (KVCS Section 5.1)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvcs.consumer import discovery
from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    PublicationComplete,
    PublicationFound,
    PublicationRefused,
)
from kvcs.consumer.prefixes import QUESTIONS, Index, Replica, spaced
from kvcs.consumer.retrieval import ConnectionSpec, consume
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.trust import Expectations
from kvcs.errors import Expired, KvcsError
from kvcs.kvsp.layout import Component
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.publication import Publication
from kvcs.profile.naming import PublicationName
from kvcs.profile.signing import ProducerKey
from kvcs.store.sink import ArraySink
from kvcs.telemetry import LogEvent
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode
from moqt.names import TrackNamespace
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    COMPAT,
    LAYERS,
    SCOPE,
    CountingSink,
    Scene,
    hasty,
    of_kind,
    on_stage,
    ready,
    run,
)
from tests.integration.kvcs.served import serving
from tests.integration.relay.stage import producing_behind, relaying

pytestmark = pytest.mark.network

#: A prompt of 40 blocks, and one that is the same for 10 blocks and then goes on otherwise.
PROMPT = list(range(1000, 1000 + 40 * BLOCK_TOKENS))
OTHER = PROMPT[: 10 * BLOCK_TOKENS] + list(range(5000, 5000 + 30 * BLOCK_TOKENS))
KEYS, OTHER_KEYS = (tuple(SCOPE.block_keys(COMPAT, tokens)) for tokens in (PROMPT, OTHER))
AUTO = hasty(prefixes="auto", discovery_timeout_s=0.3)


def expected_of(tokens: Sequence[int] = PROMPT, **others: Any) -> Expectations:
    return Expectations.of_tokens(SCOPE, COMPAT, tokens, **others)


def k_of(layer: int, blocks: int) -> Any:
    shape = (blocks * BLOCK_TOKENS, *COMPAT.k_shape)
    return np.random.default_rng(layer).integers(0, 1 << 15, shape, np.uint16).view(np.float16)


async def publish(
    scene: Scene, tokens: Sequence[int], layers: int = LAYERS
) -> tuple[PublicationHandle, Publication]:
    """Publish a cache of tokens in one segment; finish if all layers are published."""
    handle = scene.producer.open(COMPAT, tokens)
    segment = await handle.add_segment()
    for layer in range(layers):
        k = k_of(layer, segment.blocks)
        await handle.add_layer(layer, k, k[..., : COMPAT.v_shape[1]])
    if layers == LAYERS:
        await handle.finish()
    return handle, handle.publication


async def publish_prefixes(scene: Scene, *blocks: int) -> dict[int, PublicationName]:
    """Publish prefixes of the prompt, of so many blocks each."""
    names = {}
    for count in blocks:
        _, publication = await publish(scene, PROMPT[: count * BLOCK_TOKENS])
        names[count] = publication.name
    return names


async def retrieve(
    spec: ConnectionSpec,
    *more: ConnectionSpec,
    settings: RetrievalSettings = AUTO,
    expected: Expectations | None = None,
    sink: ArraySink | None = None,
    index: Index | None = None,
) -> list[Event]:
    expected, sink = expected or expected_of(), sink or ArraySink()
    return await run(consume(expected, [spec, *more], sink, settings=settings, index=index))


def taken(events: list[Event]) -> PublicationName:
    assert isinstance(events[-1], PublicationComplete), events[-1]
    return events[-1].publication


# -- by questions --------------------------------------------------------------------------------


async def test_the_longest_of_forty_boundaries_is_found_with_one_question(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        await publish(scene, OTHER)  # of the same model, but nothing of ours
        names = await publish_prefixes(scene, 3, 17, 5)
        events = await retrieve(spec)

    assert taken(events) == names[17]
    [found] = of_kind(events, PublicationFound)[:1]
    assert {e.publication for e in of_kind(events, PublicationFound)} == set(names.values())
    assert found.blocks in names
    assert [len(prefix.fields) for prefix in server.prefixes] == [3]


async def test_through_a_relay_it_is_one_question_as_well(certificates: CertificateFiles) -> None:
    async with relaying(certificates) as stage, producing_behind(stage, certificates) as scene:
        names = await publish_prefixes(scene, 2, 11)
        [relay] = scene.producer._relays
        await relay.wait_announced(5)
        events = await retrieve(scene.spec)

    assert taken(events) == names[11]


@pytest.mark.parametrize(
    "code",
    [
        RequestErrorCode.UNAUTHORIZED,
        RequestErrorCode.NAMESPACE_TOO_LARGE,
        RequestErrorCode.NOT_SUPPORTED,
    ],
)
async def test_where_not_all_are_told_eight_questions_find_the_longest_of_seven(
    certificates: CertificateFiles, code: RequestErrorCode
) -> None:
    lengths = spaced(40, QUESTIONS - 1)
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        server.refuse = lambda prefix: code if len(prefix.fields) < 4 else None
        names = await publish_prefixes(scene, lengths[3], lengths[5], lengths[3] - 1)
        events = await retrieve(spec)

    assert taken(events) == names[lengths[3]]
    assert len(server.prefixes) == QUESTIONS
    asked = [prefix.fields[3] for prefix in server.prefixes[1:]]
    assert asked == [KEYS[length - 1] for length in lengths]


async def test_a_list_that_is_too_long_is_not_gone_through(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MAX_LISTED", 3)
    overlaps: list[TrackNamespace] = []

    def overlapping_once(prefix: TrackNamespace) -> RequestErrorCode | None:
        if len(prefix.fields) < 4 or prefix in overlaps:
            return None
        overlaps.append(prefix)
        return RequestErrorCode.PREFIX_OVERLAP

    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        server.refuse = overlapping_once
        for first in range(4):
            await publish(scene, [first, *OTHER[1:]])
        names = await publish_prefixes(scene, 39)
        events = await retrieve(spec)

    assert taken(events) == names[39]
    assert len(server.prefixes) <= QUESTIONS


async def test_a_longer_prefix_that_appears_later_is_not_missed(
    certificates: CertificateFiles,
) -> None:
    settings = replace(AUTO, discovery_timeout_s=5.0)
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        retrieval = consume(expected_of(), [spec], ArraySink(), settings=settings)
        async with asyncio.timeout(20), retrieval:
            await server.prefix_asked()
            names = await publish_prefixes(scene, 23)
            assert (await retrieval.result()).publication == names[23]

    assert len(server.prefixes) == 1


async def test_nothing_published_is_told_as_not_found(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        await publish(scene, OTHER)
        events = await retrieve(spec)

    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.NOT_FOUND
    assert len(server.prefixes) == 1


# -- by an index ---------------------------------------------------------------------------------


class Told:
    """An index that tells what it was made with, and notes what it is asked."""

    def __init__(self, *replicas: Replica, error: Exception | None = None) -> None:
        self.asked: list[Sequence[bytes]] = []
        self._replicas = replicas
        self._error = error

    async def lookup(
        self, scope_id: bytes, compatibility_id: bytes, block_keys: Sequence[bytes]
    ) -> Sequence[Replica]:
        assert scope_id == SCOPE.scope_id
        assert compatibility_id == SCOPE.compatibility_id(COMPAT)
        self.asked.append(block_keys)
        if self._error is not None:
            raise self._error
        return self._replicas


async def test_a_longer_publication_is_used_for_the_blocks_that_are_the_prompts(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        _, longer = await publish(scene, OTHER)
        index = Told(Replica(publication=longer.name, blocks=10, following=OTHER_KEYS[10:]))
        events = await retrieve(spec, sink=sink, index=index)

    assert taken(events) == longer.name
    assert index.asked == [KEYS]
    assert server.prefixes == []
    assert [ranges for _, _, ranges in server.asked] == [[(0, 9)], [(0, 9)]]
    assert of_kind(events, PublicationFound)[0].blocks == 10
    assert of_kind(events, PublicationComplete)[0].token_end == 10 * BLOCK_TOKENS
    assert {e.token_end for e in of_kind(events, LayerReady)} == {10 * BLOCK_TOKENS}
    assert sink.placed.total() == 2 * LAYERS * 10
    assert set(sink.placed) == {
        (component, layer, block)
        for component in (Component.K, Component.V)
        for layer in range(LAYERS)
        for block in range(10)
    }
    for layer in range(LAYERS):
        expected = k_of(layer, 40)[: 10 * BLOCK_TOKENS]
        np.testing.assert_array_equal(sink.k[layer].view("u2"), expected.view("u2"))


async def test_a_prompt_that_ends_before_the_publication_does_is_served_by_it(
    certificates: CertificateFiles,
) -> None:
    key = ProducerKey.generate()
    expected = expected_of(
        PROMPT[: 7 * BLOCK_TOKENS], trusted={key.kid: key.public_key}, require_signature=True
    )
    async with on_stage(certificates, producer_key=key) as scene:
        _, longer = await publish(scene, PROMPT)
        index = Told(Replica(publication=longer.name, blocks=7, following=KEYS[7:]))
        events = await retrieve(scene.spec, expected=expected, index=index)

    assert taken(events) == longer.name
    [complete] = of_kind(events, PublicationComplete)
    assert complete.summary.attested == complete.summary.objects == 2 * LAYERS * 7


@pytest.mark.parametrize(
    ("following", "reason"),
    [
        (OTHER_KEYS[10:-1], "not"),
        ((), "not"),
        ((bytes(32), *OTHER_KEYS[11:]), "covers other tokens than the prompt"),
        ((*OTHER_KEYS[10:-1], bytes(32)), "covers other tokens than the prompt"),
    ],
    ids=["too few keys", "none", "a wrong one", "a wrong last one"],
)
async def test_a_segment_that_its_keys_do_not_bear_out_is_not_used(
    certificates: CertificateFiles, following: tuple[bytes, ...], reason: str
) -> None:
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        _, longer = await publish(scene, OTHER)
        index = Told(Replica(publication=longer.name, blocks=10, following=following))
        events = await retrieve(spec, index=index, settings=replace(AUTO, deadline_s=3.0))

    assert ready(events) == []
    [failed] = of_kind(events, Failed)
    assert server.data_subscribed == []
    assert server.fetches == []
    if reason != "not":
        assert reason in of_kind(events, PublicationRefused)[0].text
    assert failed.reason in (
        FailureReason.INCOMPLETE, FailureReason.REFUSED, FailureReason.NOT_FOUND,
    )  # fmt: skip


async def test_an_index_that_tells_of_the_wrong_publication_is_not_believed(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        _, other = await publish(scene, OTHER[11 * BLOCK_TOKENS :])
        names = await publish_prefixes(scene, 12)
        index = Told(Replica(publication=other.name, blocks=29))
        events = await retrieve(scene.spec, index=index)

    assert taken(events) == names[12]
    refused = of_kind(events, PublicationRefused)
    assert [e.publication for e in refused] == [other.name]


@pytest.mark.parametrize(
    "error", [KvcsError("no answer"), Expired("late"), OSError("nobody listens"), TimeoutError()]
)
async def test_where_an_index_cannot_be_asked_it_goes_on_without(
    certificates: CertificateFiles, error: Exception
) -> None:
    with capture_logs() as lines:
        async with on_stage(certificates) as scene:
            names = await publish_prefixes(scene, 12)
            events = await retrieve(scene.spec, index=Told(error=error))

    assert taken(events) == names[12]
    assert [line for line in lines if line["event"] == LogEvent.INDEX_FAILED]


async def test_an_index_that_never_answers_costs_a_timeout_and_nothing_else(
    certificates: CertificateFiles,
) -> None:
    class Silent:
        async def lookup(
            self, scope_id: bytes, compatibility_id: bytes, block_keys: Sequence[bytes]
        ) -> Sequence[Replica]:
            await asyncio.Event().wait()
            return ()

    async with on_stage(certificates) as scene:
        names = await publish_prefixes(scene, 12)
        settings = replace(AUTO, request_timeout_s=0.3)
        events = await retrieve(scene.spec, index=Silent(), settings=settings)

    assert taken(events) == names[12]


async def test_what_is_nowhere_but_where_the_index_says_is_retrieved_there(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as nothing, on_stage(certificates) as scene:
        _, there = await publish(scene, PROMPT)
        uri = scene.spec.uri
        index = Told(Replica(publication=there.name, blocks=40, uris=(uri, "https://not.moqt/")))
        with capture_logs() as lines:
            events = await retrieve(nothing.spec, index=index)

    assert taken(events) == there.name
    [line] = [line for line in lines if line["event"] == LogEvent.INDEX_REFUSED]
    assert line["uri"] == "https://not.moqt/"


# -- choice --------------------------------------------------------------------------------------


async def test_a_shorter_prefix_is_taken_when_the_longer_one_cannot_come_in_time(
    certificates: CertificateFiles,
) -> None:
    # 40 blocks of 6 layers are 23,040 octets of K and V, 5 blocks 2,880.
    slow = replace(AUTO, deadline_s=10.0, octets_per_s=1000.0, settle_s=0.2)
    async with on_stage(certificates) as scene:
        names = await publish_prefixes(scene, 40, 5)
        in_haste = await retrieve(scene.spec, settings=slow)
        in_time = await retrieve(scene.spec, settings=replace(slow, octets_per_s=1e6))
        unmeasured = await retrieve(scene.spec, settings=replace(slow, octets_per_s=None))

    assert taken(in_haste) == names[5]
    assert taken(in_time) == names[40]
    assert taken(unmeasured) == names[40]


async def test_of_two_of_one_prefix_the_finished_one_is_taken(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        _, finished = await publish(scene, PROMPT)
        await publish(scene, PROMPT, layers=2)
        events = await retrieve(scene.spec, settings=replace(AUTO, settle_s=0.2))

    assert taken(events) == finished.name
