"""``kvcs advise``: whether fetching a cache beats computing it again."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcs.advice import CODECS, MAX_TOKENS, CacheShape, CodecFigures, Comparison, Link, Question
from kvcs.cli.inputs import descriptor_and_tokens, parse_json, read_octets, shown_name
from kvcs.cli.output import Output
from kvcs.errors import ConfigError
from kvcs.measurement import Measurement
from kvcs.store.source import MODEL_SHAPES, ModelShape

DESCRIPTION = """\
Compare the time to fetch the KV cache of a prefix with the time to compute it: at which length
fetching begins to win, and what both take for prefixes of 1k to 128k tokens. It opens no
connection: the link is one that kvcs bench has measured, or is told.

  kvcs bench moqt://far:4443/ ... --json > far.json
  kvcs advise --bench far.json --prefill 8000
  kvcs advise --model llama-3.3-70b --prefill 8000 --mb-per-s 500 --rtt-ms 2 --tokens 20000
  kvcs advise --model 32,8,128 --prefill 500 --mb-per-s 60 --codec shuffle-zstd --json

--prefill is what your engine computes in a second at the length you care about; a loaded engine
computes less. Consumers get layer after layer, so computing can begin with the first one: the last
two columns tell after which time --new-tokens more, behind the prefix, are computed: each layer as
soon as it is there, or all behind a computed prefix.
"""
EPILOG = """\
The start is what goes before the first octet: measured, or six round trips; after it a congestion
window grows from a few datagrams, one doubling in a round trip. Not counted: that attention makes
long prompts dearer than their length, that others use the link, and that a fetch leaves the
accelerator to other requests.

Exit status: 0 whatever the advice; 2 a flag or file cannot be used; 6 the descriptor is refused.
"""

#: Lengths of the table.
LENGTHS = tuple(k * 1024 for k in (1, 4, 16, 64, 128))
#: Tokens behind the prefix, if nothing is said: a question about a long text.
NEW_TOKENS = 256


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    shape = parser.add_argument_group("the cache")
    shape.add_argument(
        "--model",
        metavar="MODEL",
        help=f"its shape: {', '.join(MODEL_SHAPES)}, or LAYERS,HEADS,DIM[,DTYPE] for K and V alike "
        "(default: that of --bench)",
    )
    shape.add_argument(
        "--descriptor", metavar="FILE",
        help="a JSON file with a Compatibility Descriptor instead; - for standard input",
    )  # fmt: skip
    shape.add_argument(
        "--tokens", type=int, metavar="N", help="the length you ask about, beside the table's"
    )
    shape.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, metavar="N",
        help="tokens behind it that are computed in any case (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", type=float, required=True, metavar="TOKENS_PER_S",
        help="tokens that the engine computes in a second",
    )  # fmt: skip
    link = parser.add_argument_group("the link")
    link.add_argument("--bench", metavar="FILE", help="what kvcs bench --json printed; - for stdin")
    link.add_argument(
        "--mb-per-s", type=float, metavar="MB",
        help="instead: what it carries of Data in a second, 10**6 octets",
    )  # fmt: skip
    link.add_argument(
        "--rtt-ms", type=float, metavar="MS", help="its round trip, with --mb-per-s (default: 0)"
    )
    link.add_argument(
        "--codec", metavar="NAME", choices=tuple(CODECS),
        help=f"how tensors are encoded on it: {', '.join(CODECS)} (default: raw, or that of "
        "--bench)",
    )  # fmt: skip
    link.add_argument(
        "--codec-ratio", type=float, metavar="RATIO",
        help="octets that the codec leaves of each octet, where you know better",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    measured = _measured(args)
    name, shape = _shape(args, measured)
    question = Question(
        shape=shape, link=_link(args, measured), prefill=args.prefill, new_tokens=args.new_tokens
    )
    if args.tokens is not None and not 1 <= args.tokens <= MAX_TOKENS:
        raise ConfigError(f"--tokens is {args.tokens}, expected 1 to {MAX_TOKENS}")
    lengths = sorted({*LENGTHS, *([] if args.tokens is None else [args.tokens])})
    rows = [question.compare(tokens) for tokens in lengths]
    advice = advise(question, args.tokens)
    if args.json:
        Output(as_json=True).write(
            {
                "event": "advice",
                "model": name,
                "layers": shape.layers,
                "octets_per_token": shape.octets_per_token,
                "prefill": question.prefill,
                "link_mb_per_s": question.link.octets_per_s / 1e6,
                "computed_mb_per_s": question.computed_octets_per_s / 1e6,
                "start_s": question.link.start_s,
                "break_even_tokens": question.break_even(),
                "advice": advice,
                "lengths": [_row(row) for row in rows],
            }
        )
        return 0
    console = Console(highlight=False)
    console.print(
        f"{name}: {shape.layers} layers, {shape.octets_per_token:,} octets a token; the link "
        f"brings {_rate(question.link.octets_per_s)} of cache, prefill makes "
        f"{_rate(question.computed_octets_per_s)}",
        soft_wrap=True,
    )
    console.print(_table(rows, args.tokens))
    console.print(advice, soft_wrap=True)
    return 0


def advise(question: Question, tokens: int | None) -> str:
    """Say in a sentence or two what to do, for one length or for all."""
    link, made = _rate(question.link.octets_per_s), _rate(question.computed_octets_per_s)
    at = question.break_even()
    if tokens is None:
        if at is None:
            return (
                f"Recompute, whatever the length: prefill makes {made} of this cache and the link "
                f"brings {link}."
            )
        return (
            f"Fetch prefixes of {at:,} tokens or more, recompute shorter ones: the link brings "
            f"{link} and prefill makes {made}."
        )
    row = question.compare(tokens)
    times = f"it is there after {_time(row.fetch_s)}, computed after {_time(row.recompute_s)}"
    if row.faster:
        return f"Fetch {tokens:,} tokens: {times}. Fetching wins from {at:,} tokens on."
    if at is not None:
        words = f"Recompute {tokens:,} tokens: {times}. Fetching wins from {at:,} tokens on."
    else:
        words = f"Recompute {tokens:,} tokens: {times}. Fetching wins at no length"
        needed = question.needed(tokens)
        words += "." if needed is None else f"; for this one it would above {_rate(needed)}."
    if row.overlapped_faster:
        words += (
            f" But where each layer is computed as soon as it is there, {row.new_tokens:,} tokens "
            f"behind it are computed after {_time(row.overlapped_s)} instead of "
            f"{_time(row.recompute_then_s)}: fetch, if your engine can do that."
        )
    return words


def _measured(args: Namespace) -> Measurement | None:
    if (args.bench is None) == (args.mb_per_s is None):
        raise ConfigError("which link: expected either --bench FILE or --mb-per-s MB")
    if args.bench is None:
        return None
    for flag in ("rtt_ms", "codec_ratio"):
        if getattr(args, flag) is not None:
            shown = flag.replace("_", "-")
            raise ConfigError(f"--{shown} goes with --mb-per-s: --bench has measured all of it")
    name = shown_name(args.bench)
    measured = Measurement.from_json(parse_json(read_octets(args.bench), name), name)
    if args.codec not in (None, measured.codec):
        raise ConfigError(
            f"--codec is {args.codec}, but {name} was measured with {measured.codec}: "
            f"run kvcs bench --codec {args.codec}"
        )
    return measured


def _shape(args: Namespace, measured: Measurement | None) -> tuple[str, CacheShape]:
    if args.model is not None and args.descriptor is not None:
        raise ConfigError("--model and --descriptor are both given, expected one of them")
    if args.descriptor is not None:
        if args.descriptor == args.bench:
            raise ConfigError("--descriptor and --bench are one file, expected two")
        name = shown_name(args.descriptor)
        descriptor, _ = descriptor_and_tokens(parse_json(read_octets(args.descriptor), name), name)
        return descriptor.model, CacheShape.of(descriptor)
    if args.model is not None:
        return args.model, CacheShape.of(ModelShape.parse(args.model).descriptor(args.model))
    if measured is None:
        raise ConfigError("which cache: expected --model MODEL or --descriptor FILE")
    return measured.model, CacheShape(measured.layers, measured.octets_per_token)


def _link(args: Namespace, measured: Measurement | None) -> Link:
    if measured is not None:
        return Link.measured(measured)
    if not args.mb_per_s > 0:
        raise ConfigError(f"--mb-per-s is {args.mb_per_s}, expected more than 0")
    rtt_ms = args.rtt_ms or 0.0
    if not rtt_ms >= 0:
        raise ConfigError(f"--rtt-ms is {rtt_ms}, expected 0 or more")
    codec = CODECS[args.codec or "raw"]
    if args.codec_ratio is not None:
        if not 0 < args.codec_ratio <= 2:
            raise ConfigError(f"--codec-ratio is {args.codec_ratio}, expected above 0, at most 2")
        codec = CodecFigures(args.codec_ratio, codec.decoded_octets_per_s)
    return Link.told(args.mb_per_s * 1e6, rtt_ms / 1e3, codec)


def _row(row: Comparison) -> dict[str, Any]:
    members: dict[str, Any] = asdict(row)
    return members | {"faster": row.faster, "overlapped_faster": row.overlapped_faster}


def _table(rows: list[Comparison], asked: int | None) -> Table:
    new = f"+{rows[0].new_tokens:,}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in (
        "tokens", "cache", "first\nlayer", "\nfetched", "\ncomputed", "\nsooner",
        f"fetched,\n{new}", f"computed,\n{new}",
    ):  # fmt: skip
        table.add_column(head, justify="left" if "sooner" in head else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.tokens:,}",
            _size(row.cache_octets),
            _time(row.first_layer_s),
            _time(row.fetch_s),
            _time(row.recompute_s),
            "fetched" if row.faster else "computed",
            _time(row.overlapped_s),
            _time(row.recompute_then_s),
            style="bold" if row.tokens == asked else None,
        )
    return table


def _size(octets: int) -> str:
    return f"{_digits(octets / 1e6)} MB" if octets < 999.5e6 else f"{_digits(octets / 1e9)} GB"


def _time(seconds: float) -> str:
    """Return a time with three digits: ``12.3 ms``, ``1.23 s``, ``123 s``."""
    if seconds < 0.9995:
        return f"{_digits(seconds * 1000)} ms"
    return f"{_digits(seconds)} s"


def _rate(octets_per_s: float) -> str:
    return f"{_digits(octets_per_s / 1e6)} MB/s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"
