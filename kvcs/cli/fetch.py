"""``kvcs fetch``: retrieve a finished KV cache, or a part of it."""

from argparse import ArgumentParser, Namespace
from typing import Any

from kvcs.cli.inputs import parse_name
from kvcs.cli.output import Output
from kvcs.cli.retrieving import (
    Telling,
    add_output,
    add_prompt,
    expectations,
    parse_layers,
    parse_range,
    read_prompt,
    retrieve,
    sink_for,
    wished,
)
from kvcs.config import ConsumerSettings, add_settings, settings_from
from kvcs.consumer.trust import Expectations
from kvcs.errors import BadName, ConfigError
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import set_up_logging

DESCRIPTION = """\
Retrieve a KV cache that has been published, or a part of it: nothing else is asked for than is
wanted. Every object is verified. What is not there is told line by line, and the exit status is 8
then; no file is written.

  kvcs fetch prompt.json --layers 8-15 --blocks 10 --connect moqt://127.0.0.1:4443/ \\
      --ca-file ca.pem --scope-file scope.toml --out part.safetensors
  kvcs fetch descriptor.json --publication kvcs-1/HEX/HEX/HEX/HEX --segment 1 ...

PROMPT is a JSON file with the members "descriptor" and "tokens"; with --publication the tokens
are not needed. A file of a part has room for all layers, and a member "part" in the JSON file
beside it that says which of them, and which blocks, it holds. What is still being produced is
waited for, until the deadline.
"""
EPILOG = """\
Settings are those of kvcs consume, also in the environment and the file.

Exit status: 0 everything is there; 3 no publication was found; 4 every one was refused; 8 objects
are missing; 9 the publication was given up; 10 the deadline passed; 11 nobody was reached.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    add_prompt(parser)
    add_output(parser)
    parser.add_argument(
        "--blocks",
        metavar="N|FIRST-LAST",
        help="only the first N blocks, or those from FIRST to LAST, counted from 0 at the start "
        "of the context (default: all)",
    )
    parser.add_argument(
        "--segment",
        metavar="N",
        help="only this segment, counted from 0 (default: all that hold wanted blocks)",
    )
    parser.add_argument(
        "--publication",
        metavar="NAME",
        help="exactly this one, as kvcs-1/HEX/HEX/HEX/HEX or as logs of MOQT print it",
    )
    add_settings(parser, ConsumerSettings)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    settings = settings_from(ConsumerSettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    prompt = read_prompt(args, may_lack_tokens=args.publication is not None)
    layers = parse_layers(args.layers, prompt.descriptor.layers)
    blocks, segment = _blocks(args.blocks), _segment(args.segment)
    expected = expectations(settings, prompt)
    known = len(expected[0].block_keys)
    if blocks is not None and known and blocks.stop > known:
        raise ConfigError(f"--blocks is {args.blocks!r}, the prompt has {known} blocks")
    publication, expected = _publication(args.publication, expected)
    wish = wished(
        settings,
        layers=layers,
        blocks=blocks,
        segments=None if segment is None else frozenset({segment}),
    )
    first = 0 if blocks is None else blocks.start
    tokens = prompt.tokens if segment is None else None  # where it begins the manifest says
    sink = sink_for(
        args.out,
        settings,
        tokens=None if tokens is None else tokens[first * prompt.descriptor.block_tokens :],
        notes=_notes(layers, blocks, segment),
    )
    telling = Telling(Output(as_json=args.json), progress=True)
    await retrieve(expected, settings, sink, wish, telling, publication=publication)
    return 0


def _blocks(text: str | None) -> range | None:
    if text is None:
        return None
    found = parse_range(text)
    if found is not None and "-" not in text:
        found = range(found.start) or None
    if found is None:
        raise ConfigError(f"--blocks is {text!r}, expected a number of blocks or FIRST-LAST")
    return found


def _segment(text: str | None) -> int | None:
    if text is None:
        return None
    found = parse_range(text)
    if found is None or "-" in text:
        raise ConfigError(f"--segment is {text!r}, expected the number of a segment, from 0")
    return found.start


def _publication(
    text: str | None, expected: list[Expectations]
) -> tuple[PublicationName | None, list[Expectations]]:
    """Return which publication is wanted, if only one is, and what is expected in its scope."""
    if text is None:
        return None, expected
    namespace, track = parse_name(text)
    if track is not None:
        raise BadName(f"--publication is {text[:160]!r}, expected a namespace without a track")
    name = PublicationName.from_namespace(namespace)
    here = [one for one in expected if one.scope_key.scope_id == name.scope_id]
    if not here:
        raise ConfigError(f"--publication {name} is of another scope than the scope key")
    if name.compatibility_id != here[0].scope_key.compatibility_id(here[0].descriptor):
        raise ConfigError(f"--publication {name} is of another descriptor")
    return name, here


def _notes(layers: range | None, blocks: range | None, segment: int | None) -> dict[str, Any]:
    """Return what the JSON file beside a part says of it; first and last are both included."""
    part: dict[str, Any] = {}
    for name, wanted in (("layers", layers), ("blocks", blocks)):
        if wanted is not None:
            part[name] = [wanted.start, wanted.stop - 1]
    if segment is not None:
        part["segment"] = segment
    return {"part": part} if part else {}
