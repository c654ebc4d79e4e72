"""``kvcs consume``: retrieve the KV cache of a prompt, layer by layer."""

from argparse import ArgumentParser, Namespace

from kvcs.cli.output import Output
from kvcs.cli.retrieving import (
    Telling,
    add_output,
    add_prompt,
    expectations,
    parse_layers,
    read_prompt,
    retrieve,
    sink_for,
    wished,
)
from kvcs.config import ConsumerSettings, add_settings, settings_from
from kvcs.telemetry import set_up_logging

DESCRIPTION = """\
Compute the names that a descriptor and tokens give a KV cache, find a publication of it at a
relay or producer, retrieve it, verify every object, and tell layer by layer what can be computed
with. Works before, during and after production.

  kvcs consume prompt.json --connect moqt://127.0.0.1:4443/ --ca-file ca.pem \\
      --scope-file scope.toml --out cache.safetensors

PROMPT is a JSON file with the members "descriptor" and "tokens". With --json, every event is one
JSON object on standard output; the last one is publication-complete or failed, and failed lists
exactly which layers, tracks and blocks are missing, and which tokens are left to be computed, from
which layer on.

With --follow it goes on behind the prefix for as long as blocks are appended there, until the
publication ends; --deadline-s bounds that as well. What is appended is told to be confirmed as far
as PROMPT has tokens for it: of which prefix a publication is to be is said by --prefixes.
"""
EPILOG = """\
Exit status: 0 everything is there; 3 no publication was found; 4 every one was refused; 8 objects
are missing; 9 the publication was given up; 10 the deadline passed; 11 nobody was reached.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of this subcommand."""
    add_prompt(parser)
    add_output(parser)
    parser.add_argument(
        "--follow", action="store_true",
        help="retrieve what is appended behind the prefix as well, until the publication ends",
    )  # fmt: skip
    add_settings(parser, ConsumerSettings)


async def run(args: Namespace) -> int:
    """Do the work and return the exit status."""
    settings = settings_from(ConsumerSettings, args)
    set_up_logging(log_format=settings.log_format, level=settings.log_level)
    prompt = read_prompt(args)
    expected = expectations(settings, prompt)
    layers = parse_layers(args.layers, prompt.descriptor.layers)
    wish = wished(settings, layers=layers, follow=args.follow)
    sink = sink_for(args.out, settings, tokens=prompt.tokens, grows=args.follow)
    await retrieve(expected, settings, sink, wish, Telling(Output(as_json=args.json)))
    return 0
