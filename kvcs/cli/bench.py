"""``kvcs bench``: what a link, an engine, a codec and a model's shape give."""

import asyncio
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcs.cli.bench_cache import BLOCK_TOKENS, MEGABYTES, BenchCache
from kvcs.cli.bench_measure import Bench, Board, Served
from kvcs.cli.bench_serve import serve
from kvcs.cli.output import Output
from kvcs.cli.processes import events_of, process
from kvcs.config import BenchSettings, add_settings, settings_from
from kvcs.consumer.retrieval import ConnectionSpec
from kvcs.errors import ConfigError, KvcsError
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.standard import STANDARD, standard_codecs
from kvcs.lifecycle import cancelled_by_sigterm
from kvcs.link import client_config, client_tls, quic_settings
from kvcs.measurement import Measurement
from kvcs.store.source import MODEL_SHAPES
from kvcs.telemetry import set_up_logging
from kvcs.trust.scope import Scope
from moqt.aio import ClientTls, MoqtUri

DESCRIPTION = """\
Retrieve a synthetic cache again and again, every object verified, and tell how fast it comes. Both
ends are told the same shape, size and codec; --serve says what to run at the other one.

  kvcs bench                                    loopback, two processes of this machine
  kvcs bench --codec int8 --model qwen3-8b      what a codec changes, and a shape
  kvcs bench --serve --listen :4443             on the far machine; it prints the next line
  kvcs bench moqt://far:4443/ --ca-file ca.pem --scope-key-file scope.key --token-file token \
      --json > far.json
  kvcs advise --bench far.json --prefill 8000   and whether that beats computing

TLS is always verified. The throwaway producer makes a certificate, a scope key and a token of its
own, in a folder of which three files go to the other end; whoever shows no token gets nothing. A
URI may also lead to a relay or to kvcs produce --synthetic.
"""
EPILOG = """\
MB are 10**6 octets of tensors. The goodput is that of whole retrievals, from dialling to the last
layer; the steady rate begins with the first one. What is told of this end is told of the consumer.
On loopback the producer tells what was lost; over a link, gaps in the numbers of its packets do, of
which some stacks leave a few on purpose.

Exit status: 0 measured; 2 a flag, setting or file cannot be used; 3 no such cache there; 10 the
deadline passed; 11 nobody was reached.
"""

#: Seconds for which new retrievals begin, if nothing is said.
SECONDS = 10.0
#: Seconds until the producer of a bench on loopback must serve, and until it tells something.
_START_S = 60.0
_TELL_S = 10.0
#: Settings that both ends on loopback are told alike, where flags say them.
_SHARED = (
    "config",
    "sealing",
    "suite",
    "padding",
    "engine",
    "max_datagram_octets",
    "connection_window",
    "stream_window",
    "idle_timeout_s",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument(
        "uri", nargs="?", metavar="URI", help="moqt://HOST:PORT/PATH (default: loopback)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="be the other end: a throwaway producer"
    )
    cache = parser.add_argument_group("what is transferred")
    cache.add_argument(
        "--model", default="llama-3.1-8b", metavar="MODEL",
        help=f"a shape: {', '.join(MODEL_SHAPES)}, or LAYERS,HEADS,DIM[,DTYPE] for K and V alike "
        "(default: %(default)s)",
    )  # fmt: skip
    cache.add_argument(
        "--mb", type=float, default=MEGABYTES, metavar="N",
        help="MB of tensors, up to whole blocks (default: %(default)g)",
    )  # fmt: skip
    cache.add_argument(
        "--block-tokens", type=int, default=BLOCK_TOKENS, metavar="N",
        help="tokens of a block (default: %(default)s)",
    )  # fmt: skip
    cache.add_argument(
        "--codec", metavar="NAME", choices=("raw", *STANDARD), default="raw",
        help=f"how it is encoded: raw, {', '.join(STANDARD)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S",
        help="begin no further retrieval after so long; one is always made (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--files", metavar="DIR",
        help="with --serve: make certificate and key here, and keep them",
    )  # fmt: skip
    parser.add_argument(
        "--name", action="append", default=[], metavar="HOST",
        help="with --serve: what the other end calls this machine; may be given again",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    add_settings(parser, BenchSettings, but={"insecure_skip_verify"})


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    settings = settings_from(BenchSettings, args)
    if settings.insecure_skip_verify:
        raise ConfigError("insecure_skip_verify is set, expected it not to be: bench verifies TLS")
    if not args.seconds >= 0:
        raise ConfigError(f"--seconds is {args.seconds}, expected 0 or more")
    codec = standard_codecs()[args.codec]
    cache = BenchCache.of(
        args.model, megabytes=args.mb, block_tokens=args.block_tokens, codec=codec
    )
    output = Output(as_json=args.json)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    if args.serve:
        if args.uri is not None:
            raise ConfigError("--serve and a URI are both given, expected one of them")
        files = None if args.files is None else Path(args.files)
        await serve(cache, settings, names=args.name, files=files, output=output)
        return 0
    if args.files is not None or args.name:
        raise ConfigError("--files and --name go with --serve")
    with cancelled_by_sigterm():
        measured = await (
            _over_loopback(args, settings, cache)
            if args.uri is None
            else _over_link(args, settings, cache)
        )
    if args.json:
        output.write(measured.to_json())
    else:
        show(measured)
    return 0


async def _over_link(args: Namespace, settings: BenchSettings, cache: BenchCache) -> Measurement:
    try:
        MoqtUri.parse(args.uri)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    tls = replace(client_tls(settings), verify=True)
    spec = ConnectionSpec(
        uri=args.uri, tls=tls, quic=quic_settings(settings), config=client_config(settings)
    )
    scope = settings.load_scope()
    with Board(cache) as board:
        return await Bench(cache, spec, scope, settings, seconds=args.seconds, board=board).run()


async def _over_loopback(
    args: Namespace, settings: BenchSettings, cache: BenchCache
) -> Measurement:
    """Measure against a producer in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as folder:
        async with _producer(args, cache, folder) as (started, listening):
            port, files = listening["port"], Path(listening["files"])
            spec = ConnectionSpec(
                uri=f"moqt://127.0.0.1:{port}/",
                tls=ClientTls(ca_file=files / "ca.pem"),
                quic=quic_settings(settings),
                config=client_config(settings.model_copy(update={"token_file": files / "token"})),
            )
            events = events_of(started, "served")

            async def ask() -> Served:
                async with asyncio.timeout(_TELL_S):
                    event = await anext(events, None)
                if event is None:
                    raise KvcsError("the producer ended while it was measured")
                return Served(
                    event["datagrams"], event["lost"], event["datagram_octets"], event["cpu_s"]
                )

            with Board(cache) as board:
                key = ScopeKey.from_file(files / "scope.key")
                scope = Scope(key, settings.load_protection())
                bench = Bench(
                    cache, spec, scope, settings, seconds=args.seconds, board=board, ask=ask
                )
                return await bench.run()


@asynccontextmanager
async def _producer(
    args: Namespace, cache: BenchCache, folder: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Run a producer until the end of the block; yield it, and what it says when it serves."""
    command = [
        "bench", "--serve", "--listen", "127.0.0.1:0", "--json", "--files", folder, *cache.flags(),
    ]  # fmt: skip
    for name in _SHARED:
        if hasattr(args, name):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    async with process(command) as started:
        async with asyncio.timeout(_START_S):
            listening = await anext(events_of(started, "listening"), None)
        if listening is None:
            raise KvcsError(f"the producer ended with status {await started.wait()}")
        yield started, listening


def show(measured: Measurement) -> None:
    """Print a measurement for people."""
    m, none = measured, "not known here"
    kept = "lossless" if m.lossless else "lossy"
    size = "unknown" if m.datagram_octets is None else f"{m.datagram_octets:,}"
    lines = {
        "link": f"{m.uri} over {m.engine}, datagrams of {size} octets",
        "cache": f"{m.model}: {m.cache_octets / 1e6:,.1f} MB, {m.layers} layers, {m.tokens:,} "
        f"tokens, objects of {m.object_octets:,} octets, {m.codec} ({kept})",
        "goodput": f"{m.mb_per_s:,.1f} MB/s verified, steady {m.steady_mb_per_s:,.1f}; "
        + (
            "one retrieval"
            if m.retrievals == 1
            else f"{m.mb_per_s_least:,.1f} to {m.mb_per_s_most:,.1f} in {m.retrievals} retrievals"
        ),
        "first layer": f"after {m.first_layer_s:.4f} s",
        "per layer": f"{m.per_layer_s:.4f} s",
        "on the way": f"{m.data_to_cache:.3f} octets of data for each octet of the cache"
        + ("" if m.wire_to_cache is None else f", {m.wire_to_cache:.3f} in datagrams"),
        "processor": f"{m.cpu_s_per_gb:.2f} s for each GB at the consumer"
        + (
            ""
            if m.producer_cpu_s_per_gb is None
            else f", {m.producer_cpu_s_per_gb:.2f} at the producer"
        ),
        "round trip": f"{m.rtt_s * 1e3:.2f} ms",
        "lost": none if m.loss is None else f"{m.loss:.3%} of the datagrams",
    }
    for label, text in lines.items():
        print(f"{label:<12}{text}")
    print(
        "\nWhether that beats computing: --json > FILE here, then "
        "kvcs advise --bench FILE --prefill TOKENS_PER_S",
        file=sys.stderr,
    )
