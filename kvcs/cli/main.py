"""``kvcs``: the parser, the dispatch to subcommands, and the exit codes."""

import argparse
import asyncio
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType

import uvloop

from kvcs import __version__, errors
from kvcs.cli import (
    advise,
    bench,
    check,
    consume,
    demo,
    fetch,
    index,
    keys,
    ping,
    produce,
    relay,
    show,
    store,
    token,
)
from kvcs.consumer.retrieval import Unreachable
from kvcs.garbage import collected_aside
from moqt import DRAFT
from moqt.aio import TlsSettingsError
from moqt.errors import MoqtError

#: In the order in which ``kvcs --help`` lists them.
SUBCOMMANDS: tuple[ModuleType, ...] = (
    demo, produce, consume, fetch, relay, store, index, ping, check, bench, advise, keys, token,
    show,
)  # fmt: skip

#: Scripts branch on these, so they are part of the public interface. The first row that fits.
EXIT_CODES: Mapping[type[Exception], int] = MappingProxyType(
    {
        errors.ConfigError: 2,
        TlsSettingsError: 2,
        errors.NotFound: 3,
        errors.BadManifest: 4,
        errors.BadObject: 5,
        errors.BadDescriptor: 6,
        errors.BadName: 7,
        errors.Incomplete: 8,
        errors.PublicationFailed: 9,
        errors.Expired: 10,
        errors.ServiceFailed: 12,
        errors.BadToken: 13,
        Unreachable: 11,
        errors.KvcsError: 1,
        MoqtError: 11,
        OSError: 11,
    }
)
#: A mistake of ours: the one case in which a traceback is printed. EX_SOFTWARE of sysexits.h.
EXIT_INTERNAL = 70
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for module in SUBCOMMANDS:
        about = textwrap.dedent(getattr(module, "DESCRIPTION", "")).strip()
        sub = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=about or f"{module.HELP[:1].upper()}{module.HELP[1:]}.",
            epilog=textwrap.dedent(getattr(module, "EPILOG", "")).strip() or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


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
        return report(exc)
    return status


async def _run(args: argparse.Namespace) -> int:
    async with collected_aside():
        status: int = await args.run(args)
    return status


def report(exc: Exception) -> int:
    """Say on standard error what went wrong, in one line for each cause; return the exit code.

    What nobody expected is a mistake of this program, and is shown with its traceback.
    """
    leaves = list(_leaves(exc))
    codes = [exit_code(leaf) for leaf in leaves]
    if None in codes:
        traceback.print_exception(exc)
        print("kvcs: this is a mistake in kvcs itself, please report it", file=sys.stderr)
        return EXIT_INTERNAL
    for text in dict.fromkeys(_one_line(leaf) for leaf in leaves):
        print(f"kvcs: {text}", file=sys.stderr)
    return next(code for code in codes if code is not None)


def exit_code(exc: BaseException) -> int | None:
    """Return the exit code of an exception, ``None`` if nobody expected it."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(exc, kind)), None)


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    """Yield what failed, out of the groups that task groups make of it."""
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc


def _one_line(exc: BaseException) -> str:
    if isinstance(exc, TimeoutError) and not str(exc):
        return "the other end did not answer in time"
    if isinstance(exc, OSError) and exc.strerror:
        where = f"{exc.filename}: " if exc.filename else ""
        return f"{where}{exc.strerror}"
    return " ".join(str(exc).split()) or type(exc).__name__
