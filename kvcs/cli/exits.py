"""What went wrong, as a line for people and as an exit code for scripts.

Imported when something did: it knows the errors of everything, and so imports nearly all there is.
"""

import sys
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kvcs import errors
from kvcs.consumer.retrieval import Unreachable
from moqt.aio import TlsSettingsError
from moqt.errors import MoqtError

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
