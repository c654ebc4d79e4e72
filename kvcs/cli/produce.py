"""``kvcs produce``: publish one KV cache, and serve it until stopped."""

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path

import orjson

from kvcs.audit import auditing
from kvcs.cli.authorizing import Authorizing
from kvcs.cli.output import Output
from kvcs.cli.overhttp import OverHttp
from kvcs.cli.renewal import renewing_certificate
from kvcs.config import ProducerSettings, add_settings, settings_from
from kvcs.errors import ConfigError
from kvcs.lifecycle import run_until_stopped
from kvcs.link import (
    client_config,
    client_tls,
    guests,
    quic_settings,
    server_tls,
    serving_quic,
    session_config,
)
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.handle import PublicationHandle
from kvcs.store.source import MODEL_SHAPES, BlockSource, SafetensorsSource, SyntheticSource
from kvcs.telemetry import Counter, set_up_logging
from kvcs.trust.producers import check_listed

DESCRIPTION = """\
Publish one KV cache, layer by layer, and serve it until SIGINT or SIGTERM: to consumers that
connect here (--listen), or through relays (--connect). On the first signal, sessions have
--drain-s seconds to end. On SIGHUP, and when they change, certificate and key are read again, for
those who connect from then on.

  kvcs produce cache.safetensors --listen 127.0.0.1:4443 \\
      --certificate-file cert.pem --key-file key.pem --scope-file scope.toml
  kvcs produce --synthetic llama-3.1-8b --tokens 4096 --layer-interval-ms 40 --listen ...

With --http, blocks are served over HTTPS as well, to who has a token of --tokens-file. With
--index, publications are listed at an index, for who looks for the longest beginning of a prompt:

  kvcs produce cache.safetensors --listen ... --http 127.0.0.1:8444 --tokens-file tokens \\
      --index https://index:8443 --index-token-file mine.token --ca-file ca.pem

With --repeat-s it is published again and again, each time under a new Publication ID; earlier ones
are kept for --ttl-s. With --append the last blocks follow one by one, for those who consume with
--follow. With --prompt-to it only writes what kvcs consume takes as PROMPT, and ends.

A cache file holds the tensors k.LAYER and v.LAYER, [tokens, heads, dim] each. Beside it lies a
JSON file of the same name with the members "descriptor" and "tokens".
"""

#: How often the number of sessions is looked at while production waits for consumers.
_LOOK_S = 0.02


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    source = parser.add_argument_group("what is published")
    source.add_argument(
        "cache", nargs="?", metavar="CACHE", help="a .safetensors file with every layer"
    )
    source.add_argument("--side", metavar="FILE", help="its JSON file, if named otherwise")
    source.add_argument(
        "--synthetic",
        metavar="MODEL",
        help=f"instead of CACHE: noise of a model's shape ({', '.join(MODEL_SHAPES)}; or "
        "LAYERS,HEADS,DIM[,DTYPE])",
    )
    source.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="tokens of it (default: %(default)s)"
    )
    source.add_argument(
        "--block-tokens", type=int, default=16, metavar="N",
        help="tokens of a block of it (default: %(default)s)",
    )  # fmt: skip
    source.add_argument(
        "--seed", type=int, default=0, metavar="N", help="what it follows from (default: 0)"
    )
    source.add_argument(
        "--segment-blocks", type=int, metavar="N",
        help="blocks of one segment, as a chunked prefill makes them (default: all in one)",
    )  # fmt: skip
    source.add_argument(
        "--append", type=int, default=0, metavar="N",
        help="append the last N blocks one after the other, as decoding makes them: they are no "
        "part of the prefix that is announced (default: 0)",
    )  # fmt: skip
    source.add_argument(
        "--append-blocks", type=int, default=1, metavar="N",
        help="blocks of one segment that is appended (default: 1)",
    )  # fmt: skip
    source.add_argument(
        "--append-interval-ms", type=float, default=0.0, metavar="MS",
        help="milliseconds from one such segment to the next (default: all at once)",
    )  # fmt: skip
    source.add_argument(
        "--layer-interval-ms", type=float, default=0.0, metavar="MS",
        help="milliseconds from one layer to the next (default: all at once)",
    )  # fmt: skip
    source.add_argument(
        "--after-sessions", type=int, default=0, metavar="N",
        help="begin once N sessions have come (default: at once)",
    )  # fmt: skip
    source.add_argument(
        "--repeat-s", type=float, metavar="SECONDS",
        help="publish it again so many seconds after it was finished, and so on until stopped",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-to",
        metavar="FILE",
        help="write descriptor and tokens to FILE, as kvcs consume takes them, and end",
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    add_settings(parser, ProducerSettings)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    if args.prompt_to is not None:
        source = _source(args)
        _write_prompt(source, _prefix(source, args), args.prompt_to)
        return 0
    settings = settings_from(ProducerSettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    source = _source(args)
    _prefix(source, args)  # one that cannot be is refused here
    scope, producer_key = settings.load_scope(), settings.load_producer_key()
    check_listed(scope.producers, producer_key, time.time())
    producer = Producer(scope, ProducerOptions.of(settings), producer_key=producer_key)
    authorizing, config = Authorizing(settings, producer.ask_again), client_config(settings)
    over_http = OverHttp.of_producer(producer, settings)
    output = Output(as_json=args.json)

    async def serve(stopping: asyncio.Event) -> None:
        async with producer:
            address: tuple[str, int] | None = None
            if settings.listen is not None:
                address = await producer.listen(
                    *settings.listen,
                    tls=server_tls(settings),
                    quic=serving_quic(settings),
                    config=session_config(settings),
                    guests=guests(settings),
                    authority=authorizing.authority,
                )
                output.tell("listening", host=address[0], port=address[1])
            for uri in settings.connect:
                producer.announce_at(
                    uri, tls=client_tls(settings), quic=quic_settings(settings), config=config
                )
            async with over_http.serving(address, output):
                await _publish(producer, source, args, output, stopping)
                while args.repeat_s is not None and not await _set_within(stopping, args.repeat_s):
                    await _publish(producer, source, args, output, stopping)
                await stopping.wait()
        output.tell("stopped", **{c.value: n for c, n in producer.counters.items() if n})

    listens = settings.listen is not None or settings.http_listen is not None
    renew = authorizing.renewing(over_http.renewing(producer.identify))
    renewing = renewing_certificate(settings, renew, [settings.tokens_file])
    with auditing(settings.audit_file), renewing if listens else nullcontext():
        # What is over HTTP is drained first, then the sessions.
        await run_until_stopped(serve, authorizing.keep, grace=2 * settings.drain_s + 8.0)
    return 0


async def _publish(
    producer: Producer,
    source: BlockSource,
    args: Namespace,
    output: Output,
    stopping: asyncio.Event,
) -> None:
    prefix = _prefix(source, args)
    handle = producer.open(source.descriptor, prefix)
    name = handle.name
    output.tell(
        "publication-opened",
        scope=name.scope_id.hex(),
        compatibility=name.compatibility_id.hex(),
        anchor=name.anchor_key.hex(),
        publication=name.publication_id.hex(),
        tokens=len(prefix),
        usable_tokens=handle.usable_tokens,
        layers=source.descriptor.layers,
        encodings=list(map(str, producer.encodings)),
    )
    wanted = args.after_sessions
    while producer.counters[Counter.SESSIONS] < wanted and not stopping.is_set():  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    if stopping.is_set():
        await handle.abandon("stopped before production")
        return
    began = time.monotonic()
    await _until_stopped(handle, source, args, stopping)
    if not stopping.is_set():
        output.tell(
            "publication-finished",
            publication=name.publication_id.hex(),
            seconds=round(time.monotonic() - began, 3),
            octets=producer.octets_held,
        )


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return whether it was set in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


async def _until_stopped(
    handle: PublicationHandle,
    source: BlockSource,
    args: Namespace,
    stopping: asyncio.Event,
) -> None:
    """Feed the publication to its end, or abandon it when the process is told to stop."""
    feeding = asyncio.create_task(
        handle.feed(
            source,
            segment_blocks=args.segment_blocks,
            append_blocks=args.append_blocks,
            append_interval_s=args.append_interval_ms / 1000,
        )
    )
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({feeding, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not feeding.done():
            feeding.cancel()
            await asyncio.wait({feeding})
            return
        await feeding
    finally:
        waiting.cancel()


def _source(args: Namespace) -> BlockSource:
    if (args.cache is None) == (args.synthetic is None):
        raise ConfigError("what to publish: expected either CACHE or --synthetic MODEL")
    if args.layer_interval_ms < 0:
        raise ConfigError(f"--layer-interval-ms is {args.layer_interval_ms}, expected 0 or more")
    if args.segment_blocks is not None and args.segment_blocks < 1:
        raise ConfigError(f"--segment-blocks is {args.segment_blocks}, expected 1 or more")
    if not args.append_interval_ms >= 0:
        raise ConfigError(f"--append-interval-ms is {args.append_interval_ms}, expected 0 or more")
    if args.append_blocks < 1:
        raise ConfigError(f"--append-blocks is {args.append_blocks}, expected 1 or more")
    if args.repeat_s is not None and not args.repeat_s >= 0:
        raise ConfigError(f"--repeat-s is {args.repeat_s}, expected 0 or more")
    interval_s = args.layer_interval_ms / 1000
    if args.synthetic is not None:
        return SyntheticSource.of_model(
            args.synthetic,
            args.tokens,
            block_tokens=args.block_tokens,
            seed=args.seed,
            layer_interval_s=interval_s,
        )
    source = SafetensorsSource(args.cache, side=args.side)
    if interval_s:
        source.ready_at_s = tuple(accumulate([interval_s] * source.descriptor.layers))
    return source


def _prefix(source: BlockSource, args: Namespace) -> Sequence[int]:
    """Return the tokens of the prefix: all but those of the blocks that are appended."""
    size = source.descriptor.block_tokens
    blocks = len(source.tokens) // size
    if not 0 <= args.append < max(blocks, 1):
        raise ConfigError(
            f"--append is {args.append}, expected 0 to {blocks - 1}: the cache has {blocks} blocks"
        )
    return source.tokens[: (blocks - args.append) * size] if args.append else source.tokens


def _write_prompt(source: BlockSource, tokens: Sequence[int], path: str) -> None:
    members = {"descriptor": source.descriptor.members(), "tokens": list(map(int, tokens))}
    try:
        Path(path).write_bytes(orjson.dumps(members) + b"\n")
    except OSError as exc:
        raise ConfigError(f"--prompt-to {path}: {exc.strerror or exc}") from None
