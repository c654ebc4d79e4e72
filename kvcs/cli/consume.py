"""``kvcs consume``: retrieve the KV cache of a prompt, layer by layer."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from kvcs.cli.inputs import descriptor_and_tokens, parse_json, parse_tokens, read_octets, shown_name
from kvcs.cli.inputs import tokens_from as checked_tokens
from kvcs.cli.output import Output
from kvcs.config import ConsumerSettings, add_settings, settings_from
from kvcs.consumer.events import Event
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.errors import ConfigError
from kvcs.lifecycle import cancelled_by_sigterm
from kvcs.link import client_tls, quic_settings
from kvcs.store.shared import SharedArraySink
from kvcs.store.sink import ArraySink, BlockSink, SafetensorsSink
from kvcs.telemetry import set_up_logging

NAME = "consume"
HELP = "retrieve the KV cache of a prompt, layer by layer"
DESCRIPTION = """\
Compute the names that a descriptor and tokens give a KV cache, find a publication of it at a
relay or producer, retrieve it, verify every object, and tell layer by layer what can be computed
with. Works before, during and after production.

  kvcs consume prompt.json --connect moqt://127.0.0.1:4443/ --ca-file ca.pem \\
      --scope-key-file scope.key --out cache.safetensors

PROMPT is a JSON file with the members "descriptor" and "tokens". With --json, every event is one
JSON object on standard output; the last one is publication-complete or failed, and failed lists
exactly which layers, tracks and blocks are missing, and which tokens are left to be computed, from
which layer on.
"""
EPILOG = """\
Exit status: 0 everything is there; 3 no publication was found; 4 every one was refused; 8 objects
are missing; 9 the publication was given up; 10 the deadline passed; 11 nobody was reached.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    parser.add_argument(
        "prompt", metavar="PROMPT", help="JSON file with descriptor and tokens; - for stdin"
    )
    parser.add_argument("--tokens", metavar="FILE", help="the tokens, if PROMPT is a descriptor")
    parser.add_argument(
        "--out", metavar="FILE", help="write a .safetensors file (default: verify and discard)"
    )
    parser.add_argument(
        "--layers", metavar="FIRST-LAST", help="only these layers, counted from 0 (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    add_settings(parser, ConsumerSettings)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    settings = settings_from(ConsumerSettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    name = shown_name(args.prompt)
    descriptor, found = descriptor_and_tokens(parse_json(read_octets(args.prompt), name), name)
    if args.tokens is not None:
        tokens = parse_tokens(read_octets(args.tokens), shown_name(args.tokens))
    elif found is not None:
        tokens = checked_tokens(found, name)
    else:
        raise ConfigError(f"{name}: no member 'tokens', expected it there or --tokens FILE")
    expected = Expectations.of_tokens(
        settings.load_scope_key(),
        descriptor,
        tokens,
        trusted=settings.load_trusted_keys(),
        require_signature=settings.require_signature,
        max_data_octets=settings.max_object_octets,
    )
    wish = Wish(
        layers=_layers(args.layers, descriptor.layers),
        codecs=_codecs(settings.encodings),
        require_lossless=settings.require_lossless,
    )
    if args.out and not os.access(Path(args.out).parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {args.out}: {Path(args.out).parent} is no folder to write to")
    sink: BlockSink
    if args.out:
        sink = SafetensorsSink(args.out, tokens=tokens.tolist())
    elif settings.processes:
        sink = SharedArraySink(limit_octets=settings.max_cache_octets)
    else:
        sink = ArraySink(limit_octets=settings.max_cache_octets)
    connections = [
        ConnectionSpec(uri=uri, tls=client_tls(settings), quic=quic_settings(settings))
        for uri in settings.connect
    ]
    output = Output(as_json=args.json)

    def tell(event: Event) -> None:
        line = event.to_json()
        if args.json:
            output.write(line)
        else:
            output.tell(line.pop("event"), **_flat(event, line))

    retrieval_settings = RetrievalSettings(
        deadline_s=settings.deadline_s,
        connect_timeout_s=settings.connect_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        discovery_timeout_s=settings.discovery_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        prefixes=settings.prefixes,
        connections=settings.connections,
        processes=settings.processes,
        recompute_tokens_per_s=settings.recompute_tokens_per_s,
    )
    retrieval = consume(
        expected, connections, sink, wish=wish, settings=retrieval_settings, on_event=tell
    )
    with cancelled_by_sigterm():
        async with retrieval:
            await retrieval.result()
    return 0


def _codecs(encodings: tuple[str, ...]) -> tuple[str, ...] | None:
    if not encodings:
        return None
    return tuple(dict.fromkeys(name.removeprefix("kv.") for name in encodings))


def _layers(text: str | None, layers: int) -> range | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < layers):
        raise ConfigError(f"--layers is {text!r}, expected FIRST-LAST within 0-{layers - 1}")
    return range(int(first), int(last) + 1)


def _flat(event: Event, line: dict[str, Any]) -> dict[str, Any]:
    """Return one level of values, as people read them: nested ones by their own names."""
    flat: dict[str, Any] = {}
    for name, value in line.items():
        if name == "publication" and isinstance(value, dict):
            flat[name] = value["publication"]
        elif isinstance(value, dict):
            flat |= value
        elif isinstance(value, list):
            # As the event has them: what is missing reads better than its JSON.
            flat[name] = "; ".join(map(str, getattr(event, name))) or None
        else:
            flat[name] = value
    return flat
