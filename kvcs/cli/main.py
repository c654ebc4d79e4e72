"""``kvcs``: the parser, and the dispatch to subcommands."""

import argparse
import asyncio
import importlib
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import uvloop

from kvcs import __version__
from kvcs.garbage import collected_aside
from moqt import DRAFT

#: What each subcommand is for, in the order in which ``kvcs --help`` lists them. Each is the module
#: of its name beside this one, which is imported when it is wanted: some take a second.
SUBCOMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "demo": "stream a real cache to two consumers on this machine, and watch",
        "produce": "publish a KV cache and serve it until stopped",
        "consume": "retrieve the KV cache of a prompt, layer by layer",
        "fetch": "retrieve a finished KV cache, or some layers and blocks of it",
        "relay": "pass publications on between producers and consumers, and keep them",
        "store": "keep publications on disk, and publish them again",
        "index": "tell who holds which blocks, and which publication covers most of a prompt",
        "ping": "ask a producer or relay whether it serves",
        "check": "tell what a command would accept with its settings, and why not",
        "bench": "measure what a link, an engine and a codec give",
        "advise": "tell whether fetching a cache beats computing it again",
        "keys": "print the identifiers of a descriptor and tokens; make scopes and keys",
        "token": "issue authorization tokens, explain and check them",
        "show": "explain an object, a manifest, a descriptor or a name",
    }
)
#: 128 and the number of the signal, as shells say it.
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_BROKEN_PIPE = 141

_EPILOG = """\
A first look, with nothing but this machine:
  kvcs keys new-scope scope.toml           make a scope: a key, and that objects are sealed
  kvcs keys --scope-file scope.toml CACHE.json
                                           the identifiers of a descriptor and its tokens
  kvcs token --help                        who may do what, and how to say so
  kvcs show FILE                           explain an object, a manifest, a descriptor, a name
  kvcs bench                               how fast it is
  kvcs COMMAND --help                      what else a command can do

Exit status: 0 done; 2 a flag, setting or file is unusable; 3 not found; 4 bad manifest;
5 bad object; 6 bad descriptor; 7 bad name; 8 incomplete; 9 the publication failed; 10 the
deadline passed; 11 the network, or the other end; 12 a service over HTTP; 13 a token is refused;
1 anything else; 70 a mistake of this program; 130, 143 ended by SIGINT, SIGTERM.
Results go to standard output, messages to standard error.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="kvcs",
        description="Stream the KV caches of language models, layer by layer, over MOQT.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"kvcs {__version__} (MOQT draft {DRAFT}, kvcs-1)"
    )
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", parser_class=_Subcommand
    )
    for name, purpose in SUBCOMMANDS.items():
        sub = commands.add_parser(
            name,
            help=purpose,
            description=f"{purpose[:1].upper()}{purpose[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.module_name = name
    return parser


class _Subcommand(argparse.ArgumentParser):
    """The parser of a subcommand, which knows its arguments once it is used."""

    #: Whose arguments are to be learnt; None once they are, and in the parsers below this one.
    module_name: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.module_name is not None:
            module, self.module_name = load(self.module_name), None
            if about := textwrap.dedent(getattr(module, "DESCRIPTION", "")).strip():
                self.description = about
            self.epilog = textwrap.dedent(getattr(module, "EPILOG", "")).strip() or None
            module.add_arguments(self)
            self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def load(name: str) -> ModuleType:
    """Return the module of a subcommand."""
    return importlib.import_module(f"kvcs.cli.{name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status.

    Raises:
        SystemExit: From the parser: 0 after ``--help``, 2 for an unknown flag.
    """
    args = make_parser().parse_args(argv)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(_run(args))
        sys.stdout.flush()  # here, where a reader that is gone can still be reported
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except asyncio.CancelledError:  # by SIGTERM: nothing else cancels a subcommand
        return EXIT_TERMINATED
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as exc:  # the outermost line of the program
        from kvcs.cli.exits import report

        return report(exc)
    return status


async def _run(args: argparse.Namespace) -> int:
    async with collected_aside():
        status: int = await args.run(args)
    return status
