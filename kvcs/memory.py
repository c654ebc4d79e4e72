"""Memory that was freed, and stays with the process all the same."""

import ctypes
from contextlib import suppress

#: Below this it is not worth a walk through the heap.
WORTH_OCTETS = 16 << 20


def give_back_freed(octets: int) -> None:
    """Have the C library give freed memory back to the system, after ``octets`` came and went.

    Copies of whole layers are tens of mebibytes each; glibc keeps what they leave behind for
    later, which after a large publication is a tenth of it. Takes milliseconds, and releases the
    interpreter's lock meanwhile. Does nothing where the C library has no such call.
    """
    if octets >= WORTH_OCTETS:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
