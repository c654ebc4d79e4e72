"""``kvcs demo``: a producer, a relay and two consumers on loopback, each a process of its own.

The first consumer is there from the start, the second joins in the middle of production. Both
must end with every layer, each Object once, and the very octets that were published.
"""

import asyncio
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kvcs.cli import demo_model
from kvcs.cli.livetable import Board, Column
from kvcs.cli.output import Output
from kvcs.cli.processes import Prefill, Workplace, events_of, process
from kvcs.errors import ConfigError, Expired, KvcsError
from kvcs.kvsp.codecs import RAW, Codec
from kvcs.kvsp.standard import STANDARD, standard_codecs
from kvcs.store.source import BlockSource, SafetensorsSource

DESCRIPTION = """\
Stream a KV cache on loopback from one producer through a relay to two consumers, each a process of
its own: one from the start, one that joins in the middle of production. Certificates and keys are
made for the occasion and thrown away.

Exit status 0: both consumers verified every object, none came twice, and the tensors they wrote
are the published ones, octet for octet; with a lossy codec, exactly what it makes of them.

  kvcs demo                        the cache of a real prompt, recorded with a 135 M model
  kvcs demo --model                the model itself: prefill here, continuation elsewhere
  kvcs demo --codec shuffle-zstd   the cache compressed, without loss
  kvcs demo --segments 2 --append 4   a chunked prefill of half of it, the rest appended
  kvcs demo --model --segments 3 --append 2   the same with what the model goes on to say
  kvcs demo my-cache.safetensors   a cache of yours (see kvcs produce --help)
"""

#: The recorded cache, where the checkout has it.
RECORDED = Path(__file__).parents[2] / "tests" / "data" / "smollm2-128.safetensors"
#: Seconds that a process may take to do what it was started for.
_START_S = 30.0
_STOP_S = 20.0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument(
        "cache", nargs="?", metavar="CACHE", help="a .safetensors cache instead of the recorded one"
    )
    parser.add_argument(
        "--layer-interval-ms", type=float, default=200.0, metavar="MS",
        help="milliseconds from one layer to the next (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--deadline-s", type=float, default=120.0, metavar="S",
        help="seconds after which it gives up (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--model", action="store_true",
        help="run the real model (needs the extra kvcs[transformers])",
    )  # fmt: skip
    parser.add_argument(
        "--direct", action="store_true", help="without a relay: the consumers dial the producer"
    )
    parser.add_argument(
        "--codec", metavar="NAME", choices=("raw", *STANDARD), default="raw",
        help=f"how tensors are encoded: raw, {', '.join(STANDARD)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--segments", type=int, default=1, metavar="N",
        help="passes of a chunked prefill, each a segment (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--append", type=int, default=0, metavar="N",
        help="append the last N blocks one by one, as decoding does, with --model the first N of "
        "what it says; the consumers follow (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="what the model is asked, with --model")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    if args.model:
        if args.codec != "raw":
            raise ConfigError(f"--codec {args.codec} is for caches from files, not for --model")
        return await demo_model.run(args)
    path = Path(args.cache) if args.cache else RECORDED
    if not path.exists():
        hint = "" if args.cache else "; name one, see kvcs produce --help"
        raise ConfigError(f"no cache at {path}{hint}")
    with tempfile.TemporaryDirectory(prefix="kvcs-demo-") as folder:
        demo = Demo(path, Path(folder), args)
        async with asyncio.timeout(args.deadline_s) as limit:
            status = await demo.run()
        if limit.expired():
            raise Expired(f"the demo did not end within {args.deadline_s} s")
        return status


def _prefill_of(source: BlockSource, segments: int, append: int) -> Prefill:
    blocks = len(source.tokens) // source.descriptor.block_tokens
    if not 0 <= append < blocks:
        raise ConfigError(f"--append is {append}, expected 0 to {blocks - 1} of {blocks} blocks")
    return Prefill.of(blocks - append, segments)


class Demo:
    """The demo with a cache from a file."""

    def __init__(self, cache: Path, folder: Path, args: Namespace) -> None:
        self._cache = cache
        self._folder = folder
        self._args = args
        self._place = Workplace(folder)
        self._output = Output(as_json=args.json)
        source = SafetensorsSource(cache)
        self._codec = standard_codecs()[args.codec]
        self._layers = source.descriptor.layers
        self._source: BlockSource = source
        self._prefill = _prefill_of(source, args.segments, args.append)
        self._middle = asyncio.Event()
        self._board = Board(
            title=f"{source.descriptor.model}: {self._layers} layers, "
            f"{len(source.tokens)} tokens, {self._codec.name}, "
            f"a layer every {args.layer_interval_ms:g} ms",
            layers=self._layers,
            columns=[Column("from the start"), Column("joins in the middle")],
            live=not args.json,
        )

    async def run(self) -> int:
        """Run the processes; return the exit status."""
        async with AsyncExitStack() as stack:
            if self._args.direct:
                port = await stack.enter_async_context(self._producer())
            else:
                port = await stack.enter_async_context(self._relay())
            group = await stack.enter_async_context(asyncio.TaskGroup())
            with self._board:
                early = group.create_task(self._consumer(0, port))
                if not self._args.direct:
                    # It begins as soon as the relay is there, so the first consumer goes ahead.
                    await stack.enter_async_context(self._producer(port))
                await self._middle.wait()
                late = group.create_task(self._consumer(1, port))
                outcomes = [await early, await late]
        return self._summarize(outcomes)

    @asynccontextmanager
    async def _relay(self) -> AsyncIterator[int]:
        command = ("relay", *self._listening(), "--drain-s", "1", "--log-level", "warning")
        async with self._daemon("relay", command) as relay:
            yield await _port_of(relay)

    @asynccontextmanager
    async def _producer(self, relay: int | None = None) -> AsyncIterator[int]:
        """Run the producer, at a relay if there is one; yield the port to dial."""
        where: tuple[str, ...] = self._listening()
        if relay is not None:
            ca_file = str(self._place.certificates.ca_file)
            where = ("--json", "--connect", f"moqt://127.0.0.1:{relay}/", "--ca-file", ca_file)
        command = (
            "produce", str(self._cache), *where,
            "--scope-key-file", str(self._place.scope_key),
            "--producer-key-file", str(self._place.producer_key),
            "--layer-interval-ms", str(self._args.layer_interval_ms),
            "--manifest-every", "1", "--after-sessions", "1", "--log-level", "warning",
            "--codec", self._codec.name, "--segment-blocks", str(self._prefill.segment_blocks),
            "--append", str(self._args.append),
            "--append-interval-ms", str(self._args.layer_interval_ms),
        )  # fmt: skip
        async with self._daemon("producer", command) as producer:
            yield await _port_of(producer) if relay is None else relay

    def _listening(self) -> tuple[str, ...]:
        certificates = self._place.certificates
        return (
            "--listen", "127.0.0.1:0", "--json",
            "--certificate-file", str(certificates.certificate_file),
            "--key-file", str(certificates.key_file),
        )  # fmt: skip

    @asynccontextmanager
    async def _daemon(
        self, name: str, command: Sequence[str]
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a command until the end of the block, and tell it to stop then."""
        async with process(command) as started:
            try:
                yield started
            finally:
                if started.returncode is None:
                    started.terminate()
            status = await asyncio.wait_for(started.wait(), _STOP_S)
            if status:
                raise KvcsError(f"the {name} ended with status {status}")

    async def _consumer(self, column: int, port: int) -> "Outcome":
        out = self._folder / f"received-{column}.safetensors"
        command = (
            "consume", str(self._cache.with_suffix(".json")), "--json", "--out", str(out),
            "--connect", f"moqt://127.0.0.1:{port}/",
            "--ca-file", str(self._place.certificates.ca_file),
            "--scope-key-file", str(self._place.scope_key),
            "--trust", str(self._place.trusted_key), "--require-signature",
            "--deadline-s", str(self._args.deadline_s), "--log-level", "warning",
            "--discovery-timeout-s", str(_START_S), "--codec", self._codec.name,
            # Those that follow know all tokens, so that what is appended is confirmed.
            *(("--follow", "--prefixes", "any") if self._args.append else ()),
        )  # fmt: skip
        began = time.monotonic()
        self._board.started(column)
        outcome = Outcome(out)
        async with process(command) as consumer:
            async for event in events_of(consumer):
                if self._args.json:
                    self._output.write({"consumer": column, **event})
                match event["event"]:
                    case "layer-ready" if event["segment"] < self._prefill.segments:
                        outcome.ready_in[event["layer"]] += 1
                        if outcome.ready_in[event["layer"]] < self._prefill.segments:
                            continue  # it is not there for the whole prompt yet
                        outcome.ready_s.append(time.monotonic() - began)
                        self._board.ready(column, event["layer"], event["trust"])
                        # A process takes a while to start, so it is started well before.
                        if len(outcome.ready_s) * 4 >= self._layers:
                            self._middle.set()
                    case "segment-complete" if event["segment"] >= self._prefill.segments:
                        outcome.appended += 1
                    case "publication-complete" | "failed":
                        outcome.last = event
            outcome.status = await consumer.wait()
        self._middle.set()  # also when the first one failed
        return outcome

    def _summarize(self, outcomes: Sequence["Outcome"]) -> int:
        good = True
        for column, outcome in zip(self._board.columns, outcomes, strict=True):
            summary = (outcome.last or {}).get("summary", {})
            same = outcome.status == 0 and same_tensors(self._source, outcome.out, self._codec)
            good &= same and summary.get("duplicates") == 0
            good &= outcome.appended == self._args.append
            self._output.tell(
                "consumer",
                name=column.name,
                objects=summary.get("objects", 0),
                octets=summary.get("octets", 0),
                attested=summary.get("attested", 0),
                duplicates=summary.get("duplicates", 0),
                rejected=summary.get("rejected", 0),
                first_layer_s=summary.get("first_layer_s"),
                last_layer_s=summary.get("last_layer_s"),
                appended=outcome.appended,
                codec=self._codec.name,
                lossless=self._codec.lossless,
                identical=same and self._codec.lossless,
                as_encoded=same,
            )
            if outcome.status:
                self._output.tell("failed", name=column.name, status=outcome.status,
                                  reason=(outcome.last or {}).get("text", ""))  # fmt: skip
        self._output.tell("demo-complete" if good else "demo-failed")
        return 0 if good else 1


async def _port_of(daemon: asyncio.subprocess.Process) -> int:
    """Return where a daemon listens, once it does."""
    async with asyncio.timeout(_START_S):
        listening = await anext(events_of(daemon, "listening"))
    port: int = listening["port"]
    return port


@dataclass
class Outcome:
    """How a consumer process ended."""

    out: Path
    status: int = -1
    ready_s: list[float] = field(default_factory=list)
    ready_in: Counter[int] = field(default_factory=Counter)
    """By layer, in how many segments of the prefill it is ready."""

    appended: int = 0
    """Appended segments that are complete."""

    last: dict[str, Any] | None = None


def same_tensors(published: BlockSource, received: Path, codec: Codec = RAW) -> bool:
    """Whether a received file has the very octets of the whole blocks that were published.

    With a lossy codec: those that it makes of them.
    """
    if not received.exists():
        return False
    blocks = len(published.tokens) // published.descriptor.block_tokens
    other = SafetensorsSource(received)
    return all(
        _as_decoded(tensor, codec) == came.tobytes()
        for ours, theirs in zip(published.layers(0, blocks), other.layers(0, blocks), strict=True)
        for tensor, came in ((ours.k, theirs.k), (ours.v, theirs.v))
    )


def _as_decoded(tensor: NDArray[Any], codec: Codec) -> bytes:
    if codec.lossless:
        return tensor.tobytes()
    # A scale is for one token and head, so how the tensor is cut into blocks changes nothing.
    return codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype).tobytes()
