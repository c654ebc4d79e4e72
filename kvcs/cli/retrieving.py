"""What subcommands that retrieve have in common: flags, what is expected, the run, the telling."""

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from kvcs.cli.clients import block_clients, index_client
from kvcs.cli.inputs import descriptor_and_tokens, parse_json, parse_tokens, read_octets, shown_name
from kvcs.cli.inputs import tokens_from as checked_tokens
from kvcs.cli.output import Output
from kvcs.cli.scopes import believed, turns
from kvcs.config import ConsumerSettings
from kvcs.consumer.events import Event, Failed, FailureReason, LayerReady
from kvcs.consumer.retrieval import ConnectionSpec, Retrieval, RetrievalSettings, consume
from kvcs.consumer.selection import Wish
from kvcs.consumer.services import HttpIndex, HttpSections
from kvcs.consumer.trust import Expectations
from kvcs.errors import ConfigError, NotFound
from kvcs.kvsp.descriptor import Descriptor
from kvcs.lifecycle import cancelled_by_sigterm
from kvcs.link import client_config, client_tls, quic_settings
from kvcs.profile.manifest import DEFAULT_LIMITS
from kvcs.profile.naming import PublicationName
from kvcs.store.shared import SharedArraySink
from kvcs.store.sink import ArraySink, BlockSink, GrowingSafetensorsSink, SafetensorsSink
from kvcs.telemetry import LogEvent
from kvcs.trust.scope import Scope

log = structlog.get_logger("kvcs")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a cache is of."""

    descriptor: Descriptor

    tokens: NDArray[np.uint32] | None
    """None: they are not known."""


def add_prompt(parser: ArgumentParser) -> None:
    """Declare the flags that :func:`read_prompt` reads."""
    parser.add_argument(
        "prompt", metavar="PROMPT", help="JSON file with descriptor and tokens; - for stdin"
    )
    parser.add_argument("--tokens", metavar="FILE", help="the tokens, if PROMPT is a descriptor")


def add_output(parser: ArgumentParser) -> None:
    """Declare the flags that say what is wanted, and where it goes."""
    parser.add_argument(
        "--out", metavar="FILE", help="write a .safetensors file (default: verify and discard)"
    )
    parser.add_argument(
        "--layers", metavar="FIRST-LAST", help="only these layers, counted from 0 (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def read_prompt(args: Namespace, *, may_lack_tokens: bool = False) -> Prompt:
    """Read descriptor and tokens.

    Args:
        args: The arguments that were given.
        may_lack_tokens: Whether a descriptor alone will do.

    Raises:
        ConfigError: If a file cannot be used, or the tokens are missing.
        BadDescriptor: If the descriptor is none.
    """
    name = shown_name(args.prompt)
    descriptor, found = descriptor_and_tokens(parse_json(read_octets(args.prompt), name), name)
    if args.tokens is not None:
        return Prompt(descriptor, parse_tokens(read_octets(args.tokens), shown_name(args.tokens)))
    if found is not None:
        return Prompt(descriptor, checked_tokens(found, name))
    if may_lack_tokens:
        return Prompt(descriptor, None)
    raise ConfigError(f"{name}: no member 'tokens', expected it there or --tokens FILE")


def expectations(settings: ConsumerSettings, prompt: Prompt) -> list[Expectations]:
    """Return what a publication is held against, for each scope that is looked in.

    Raises:
        ConfigError: If a key cannot be used, or the prompt has no whole block.
    """
    return [_expectations_in(scope, settings, prompt) for scope in settings.load_scopes()]


def _expectations_in(scope: Scope, settings: ConsumerSettings, prompt: Prompt) -> Expectations:
    trusted, required = believed(settings, scope)
    expected = Expectations(
        scope_key=scope.key,
        protection=scope.protection,
        descriptor=prompt.descriptor,
        trusted=trusted,
        require_signature=required,
        max_data_octets=settings.max_object_octets,
    )
    return expected if prompt.tokens is None else expected.with_tokens(prompt.tokens)


def wished(
    settings: ConsumerSettings,
    *,
    layers: range | None,
    blocks: range | None = None,
    segments: frozenset[int] | None = None,
    follow: bool = False,
) -> Wish:
    """Return what is wanted: a part, in the codecs that the settings allow."""
    return Wish(
        segments=segments,
        layers=layers,
        blocks=blocks,
        codecs=tuple(dict.fromkeys(name.removeprefix("kv.") for name in settings.encodings))
        or None,
        require_lossless=settings.require_lossless,
        follow=follow,
    )


def parse_layers(text: str | None, layers: int) -> range | None:
    """Read ``--layers``; None: all of them.

    Raises:
        ConfigError: If it is no range within the model's layers.
    """
    if text is None:
        return None
    found = parse_range(text)
    if found is None or found.stop > layers:
        raise ConfigError(f"--layers is {text!r}, expected FIRST-LAST within 0-{layers - 1}")
    return found


def parse_range(text: str) -> range | None:
    """Read FIRST-LAST, both included, or one number; None if it is neither."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    # No digits but ASCII's, and no more of them than any of these numbers has.
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in (first, last)):
        return None
    found = range(int(first), int(last) + 1)
    return found or None


def sink_for(
    out: str | None,
    settings: ConsumerSettings,
    *,
    tokens: NDArray[np.uint32] | None,
    notes: dict[str, Any] | None = None,
    grows: bool = False,
) -> BlockSink:
    """Return where tensors land.

    Args:
        out: A file to write; None: memory, to verify and discard.
        settings: How much memory, and whether processes share it.
        tokens: The tokens of what is written, from its first block on, if they are known.
        notes: Members of the JSON file beside ``out``, where it does not grow.
        grows: Whether more may come than is known of at first.

    Raises:
        ConfigError: If the folder cannot be written to, or a file is to grow between processes.
    """
    limit_octets = settings.max_cache_octets
    if out is not None:
        if not os.access(Path(out).parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {out}: {Path(out).parent} is no folder to write to")
        listed = None if tokens is None else tokens.tolist()
        if not grows:
            return SafetensorsSink(out, tokens=listed, notes=notes)
        if settings.processes:
            raise ConfigError("--follow --out is for one process, expected it without --processes")
        return GrowingSafetensorsSink(out, tokens=listed or (), limit_octets=limit_octets)
    if settings.processes:
        # As much as may be: what nothing is placed in takes no memory.
        reserve_blocks = DEFAULT_LIMITS.blocks if grows else 0
        return SharedArraySink(limit_octets=limit_octets, reserve_blocks=reserve_blocks)
    return ArraySink(limit_octets=limit_octets)


async def retrieve(
    expected: Sequence[Expectations],
    settings: ConsumerSettings,
    sink: BlockSink,
    wish: Wish,
    tell: Callable[[Event, Retrieval], None],
    *,
    publication: PublicationName | None = None,
) -> None:
    """Retrieve, until everything is there.

    Of several scopes one is looked in after the other, until there is a publication in one.

    Args:
        expected: What a publication is held against, for each scope that is looked in.
        settings: Whom to ask, and how patiently.
        sink: Where tensors land.
        wish: What is wanted.
        tell: Called with every event, and the retrieval.
        publication: Retrieve exactly this one.

    Raises:
        KvcsError: As :meth:`~kvcs.consumer.retrieval.Retrieval.result` does.
    """
    ends_at = time.monotonic() + settings.deadline_s
    for number, seconds, is_last in turns(len(expected), settings.discovery_timeout_s):
        left = ends_at - time.monotonic()
        hurried = {"deadline_s": max(left, 0.001), "discovery_timeout_s": seconds}
        this = settings.model_copy(update=hurried) if len(expected) > 1 else settings
        try:
            await _retrieve_in(
                expected[number], this, sink, wish,
                tell if is_last else _without_the_end(tell), publication,
            )  # fmt: skip
        except NotFound:
            if is_last:
                raise
            log.info(LogEvent.SCOPE_WITHOUT, scope=expected[number].scope_key.scope_id)
        else:
            return


def _without_the_end(
    tell: Callable[[Event, Retrieval], None],
) -> Callable[[Event, Retrieval], None]:
    """Return who tells everything, but not that nothing was found: it is looked for elsewhere."""

    def telling(event: Event, retrieval: Retrieval) -> None:
        if not isinstance(event, Failed) or event.reason is not FailureReason.NOT_FOUND:
            tell(event, retrieval)

    return telling


async def _retrieve_in(
    expected: Expectations,
    settings: ConsumerSettings,
    sink: BlockSink,
    wish: Wish,
    tell: Callable[[Event, Retrieval], None],
    publication: PublicationName | None,
) -> None:
    config = client_config(settings)
    connections = [
        ConnectionSpec(
            uri=uri, tls=client_tls(settings), quic=quic_settings(settings), config=config
        )
        for uri in settings.connect
    ]
    index = index_client(settings, expected.scope_key.scope_id)
    services = block_clients(settings)
    retrieval = consume(
        expected,
        connections,
        sink,
        index=None if index is None else HttpIndex(index),
        blocks=[HttpSections(service) for service in services],
        wish=wish,
        settings=RetrievalSettings(
            deadline_s=settings.deadline_s,
            connect_timeout_s=settings.connect_timeout_s,
            request_timeout_s=settings.request_timeout_s,
            discovery_timeout_s=settings.discovery_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            prefixes=settings.prefixes,
            fetch=settings.fetch,
            connections=settings.connections,
            processes=settings.processes,
            recompute_tokens_per_s=settings.recompute_tokens_per_s,
        ),
        publication=publication,
        on_event=lambda event: tell(event, retrieval),
    )
    with cancelled_by_sigterm():
        async with AsyncExitStack() as stack:
            for service in services:
                await stack.enter_async_context(service)
            if index is not None:
                await stack.enter_async_context(index)
            await stack.enter_async_context(retrieval)
            await retrieval.result()


class Telling:
    """Tells what becomes of a retrieval: JSON lines, or lines for people.

    Args:
        output: Where.
        progress: Whether people are told with each layer how much has come so far, and at last
            what is not there, line by line.
    """

    def __init__(self, output: Output, *, progress: bool = False) -> None:
        self._output = output
        self._progress = progress

    def __call__(self, event: Event, retrieval: Retrieval) -> None:
        """Tell one event."""
        line = event.to_json()
        if self._output.as_json:
            self._output.write(line)
            return
        name, values = line.pop("event"), _flat(event, line)
        if self._progress and isinstance(event, LayerReady):
            summary = retrieval.summary
            values |= {"objects": summary.objects, "octets": summary.octets}
        if self._progress and isinstance(event, Failed):
            values["missing"] = values["unattested"] = None  # each has a line of its own
        self._output.tell(name, **values)
        if self._progress and isinstance(event, Failed):
            self._tell_missing(event)

    def _tell_missing(self, failed: Failed) -> None:
        for gap in failed.missing:
            self._output.tell("not-there", what=str(gap))
        if failed.unlisted is not None:
            first, last = failed.unlisted
            self._output.tell("not-published", blocks=f"{first}-{last}")
        for gap in failed.unattested:
            self._output.tell("not-attested", what=str(gap))


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
