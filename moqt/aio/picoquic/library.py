"""aiopquic as it is used here: its numbers, its pointers, and the one field it has no call for.

Its documented face ties receive windows to what was read from it, drains into events it makes
itself, and says nothing of octets that wait. So its ``TransportContext`` is used directly, and of
the record it keeps for each stream, ``aiopquic_stream_ctx_t``, one field is written: the octets
that the worker subtracts from the window it grants. Loading this module checks that the library
that is installed still has it where it was.
"""

import ctypes
import re
from enum import IntEnum
from pathlib import Path

import aiopquic
from aiopquic._binding._transport import (
    TransportContext,
    stream_ctx_create,
    stream_ctx_destroy,
    stream_ctx_ensure_rx,
    stream_ctx_ensure_tx,
    stream_ctx_get_rx,
    stream_ctx_get_tx,
    stream_ctx_rx_consumed,
)

__all__ = ["Command", "Event", "TransportContext", "Withheld", "stream_ctx_create",
           "stream_ctx_destroy"]  # fmt: skip


class Event(IntEnum):
    """What the worker tells (``c/spsc_ring.h``); the kinds that are missing concern nobody here."""

    STREAM_DATA = 0
    STREAM_FIN = 1
    STREAM_RESET = 2
    STOP_SENDING = 3
    #: The connection is over: the peer's transport error, or 0.
    CLOSE = 4
    #: The peer closed it with a code of the application.
    APP_CLOSE = 5
    READY = 6
    ALMOST_READY = 7
    DATAGRAM = 8
    #: Octets of a stream were taken that waited for it.
    STREAM_TX_DRAINED = 15
    #: A stream is over in both directions and all was acknowledged; its record dies.
    STREAM_DESTROY = 17


class Command(IntEnum):
    """What the worker can be asked."""

    CLOSE = 131
    STREAM_RESET = 132
    STOP_SENDING = 133
    OPEN_FLOW_CONTROL = 143
    #: Also opens the stream, and those below it. Carries the priority where others have a code.
    SET_STREAM_PRIORITY = 149


#: Where ``bytes_pending_release`` stands in the record of a stream.
_WITHHELD_AT = 24

#: How that record begins: the fields that put it there.
_RECORD = re.compile(
    r"typedef struct \{\s*"
    r"aiopquic_stream_buf_t\* tx;\s*"
    r"aiopquic_stream_buf_t\* rx;\s*"
    r"_Atomic\(uint64_t\) rx_consumed;\s*"
    r"_Atomic\(uint64_t\) bytes_pending_release;"
)


class Withheld:
    """Octets that the worker subtracts when it is asked to widen the window of a stream.

    Only the thread of the event loop writes it, and an aligned store of 64 bits is whole, so the
    worker reads either the old value or the new one. It must not be used after the record died.
    """

    __slots__ = ("_cell",)

    #: More than any window: nothing is granted.
    ALL = 1 << 62

    def __init__(self, record: int) -> None:
        self._cell = ctypes.c_uint64.from_address(record + _WITHHELD_AT)

    def set(self, octets: int) -> None:
        """Have ``octets`` subtracted from now on."""
        self._cell.value = octets


def _check_layout() -> None:
    """See whether the installed library keeps its records as this module believes.

    Raises:
        ImportError: If it does not.
    """
    header = Path(str(aiopquic.__file__)).parent / "_binding" / "c" / "stream_ctx.h"
    try:
        source = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    except OSError as error:
        raise ImportError(
            f"aiopquic lacks {header.name}, which tells how it is laid out"
        ) from error
    record = stream_ctx_create()
    try:
        stream_ctx_ensure_tx(record, 4096)
        stream_ctx_ensure_rx(record, 4096)
        words = (ctypes.c_uint64 * 4).from_address(record)
        words[2] = 0x5EED
        found = (words[0], words[1], stream_ctx_rx_consumed(record), words[3])
        expected = (stream_ctx_get_tx(record), stream_ctx_get_rx(record), 0x5EED, 0)
    finally:
        stream_ctx_destroy(record)
    if found != expected or _RECORD.search(source) is None:
        raise ImportError("this version of aiopquic is laid out differently, expected 0.6.1")


_check_layout()
