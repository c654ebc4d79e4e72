"""A model that is prefilled in chunks and goes on, and another one that goes on from what came."""

import asyncio
import random
from concurrent.futures import Future
from typing import Any

import pytest

from kvcs.connectors import transformers as adapter
from kvcs.consumer.retrieval import Retrieval
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.descriptor import Descriptor
from kvcs.producer.handle import PublicationHandle
from kvcs.store.sink import ArraySink
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import SCOPE, Scene, hasty, on_stage

torch: Any = pytest.importorskip("torch", reason="needs the extra `transformers`: torch is missing")
transformers: Any = pytest.importorskip(
    "transformers", reason="needs the extra `transformers`: transformers is missing"
)

pytestmark = [pytest.mark.network, pytest.mark.model, pytest.mark.timeout(600)]

SEGMENTS = 4
PATIENT = hasty(deadline_s=400, stall_timeout_s=60, request_timeout_s=30, discovery_timeout_s=60)
TEXT = (
    "The harbour master keeps a small book in the drawer of his desk. In it he writes down every "
    "boat that leaves before dawn, who is aboard, and what the sky looked like when they cast off. "
    "When a boat comes back he draws a line through its name. This morning there are four names "
    "without a line, and the wind has begun to turn. He puts on his coat, takes the lamp and"
)


class Setting:
    """A model, a prompt, and how long the text after it is."""

    def __init__(self, model: Any, prompt: list[int], size: int, count: int, origin: Any) -> None:
        self.model, self.prompt, self.size, self.count = model, prompt, size, count
        self.cached = adapter.whole_blocks(len(prompt), size)
        described = adapter.descriptor_for(model, size, origin=origin)
        self.descriptor = Descriptor.from_json(described)

    @property
    def prefix(self) -> list[int]:
        return self.prompt[: self.cached]


@pytest.fixture(scope="module", params=["tiny", "real"])
def setting(request: pytest.FixtureRequest) -> Setting:
    if request.param == "tiny":
        torch.manual_seed(7)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
            num_hidden_layers=3, num_key_value_heads=2, max_position_embeddings=1024,
        )  # fmt: skip
        config.initializer_range = 0.6
        model = transformers.LlamaForCausalLM(config).eval()
        prompt = [random.Random(1).randrange(64) for _ in range(39)]
        # Two hundred blocks of four tokens are appended.
        return Setting(model, prompt, 4, 800, adapter.ModelOrigin("tiny", "sha256:00", "sha256:11"))
    try:
        tokenizer, model = adapter.load_model(adapter.download_model())
    except adapter.ModelUnavailable as exc:
        pytest.skip(str(exc))
    return Setting(model, list(tokenizer(TEXT).input_ids), 16, 100, None)


async def publish(handle: PublicationHandle, setting: Setting) -> list[int]:
    """Prefill in chunks and go on, publishing both meanwhile; return the text."""
    loop = asyncio.get_running_loop()
    handed: list[Future[Any]] = []
    blocks = setting.cached // setting.size
    cache: Any = None
    for number in range(SEGMENTS):
        first, stop = blocks * number // SEGMENTS, blocks * (number + 1) // SEGMENTS
        segment = await handle.add_segment(stop - first)

        def on_layer(layer: int, k: Any, v: Any, segment: Any = segment) -> None:
            adding = handle.add_layer(layer, k, v, segment=segment)
            handed.append(asyncio.run_coroutine_threadsafe(adding, loop))

        chunk = setting.prompt[first * setting.size : stop * setting.size]
        tap = adapter.LayerTap(setting.model, on_layer)
        cache = await asyncio.to_thread(tap.prefill, chunk, cache)
    for future in handed:
        await asyncio.wrap_future(future)

    def on_block(tokens: list[int], layers: list[Any]) -> None:
        # Waited for, so that what is said never runs far ahead of what is published.
        asyncio.run_coroutine_threadsafe(handle.append(tokens, layers), loop).result(60)

    adapter.BlockTap(cache, setting.size, on_block)
    return await asyncio.to_thread(
        adapter.continue_greedy, setting.model, setting.prompt, cache, setting.cached, setting.count
    )


def follower(scene: Scene, setting: Setting, sink: ArraySink) -> Retrieval:
    expected = Expectations.of_tokens(SCOPE, setting.descriptor, setting.prefix)
    return scene.retrieve(sink, expected=expected, wish=Wish(follow=True), settings=PATIENT)


async def stop_at(retrieval: Retrieval, token_end: int, last_layer: int) -> int:
    """Follow up to some token, and stop there; return how many tokens there are."""
    async with retrieval:
        await retrieval.whole_layer(last_layer, token_end=token_end, timeout_s=300)
        retrieval.stop()
        return (await retrieval.result()).token_end


async def test_whoever_joins_and_stops_anywhere_goes_on_token_for_token(
    certificates: CertificateFiles, setting: Setting
) -> None:
    chance = random.Random(11)
    last_block = (len(setting.prompt) + setting.count - 1) // setting.size
    ends = [setting.cached // setting.size, last_block]
    ends += [chance.randrange(ends[0], last_block) for _ in range(3)]
    sinks = [ArraySink() for _ in ends]
    async with (
        asyncio.timeout(500),
        on_stage(certificates) as scene,
        asyncio.TaskGroup() as group,
    ):
        handle = scene.producer.open(setting.descriptor, setting.prefix)
        layer = setting.descriptor.layers - 1
        following = [
            group.create_task(stop_at(follower(scene, setting, sink), end * setting.size, layer))
            for sink, end in zip(sinks, ends, strict=True)
        ]
        text = await publish(handle, setting)
        reached = [await task for task in following]

    context = [*setting.prompt, *text]
    assert len(handle.publication.segments) == SEGMENTS + last_block - ends[0]
    for sink, end, held in zip(sinks, ends, reached, strict=True):
        assert held >= end * setting.size
        said = max(held + 1 - len(setting.prompt), 0)
        cache = adapter.cache_from_arrays(
            setting.model, list(zip(sink.k, sink.v, strict=True)), tokens=held
        )
        known = context[: len(setting.prompt) + said]
        left = setting.count - said
        more = await asyncio.to_thread(
            adapter.continue_greedy, setting.model, known, cache, held, left, decoded=said
        )
        assert more == text[said:]
