"""What was read for many connections and is not taken yet, and whose turn it is. Pure.

Many connections share one socket, and one of them may bring as much as an event loop can take in.
Were datagrams taken in the order in which they came, an acknowledgement that another connection
waits for would stand behind all of that. So all is read first, which costs little, and then taken
in rounds: of each connection so much at most, and first of those that bring the least.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from moqt.aio.udp import Address

C = TypeVar("C")

#: Octets of one connection that are taken before others get their turn.
ROUND_OCTETS = 256 << 10


class Read(NamedTuple):
    """Datagrams of one connection that were read at once."""

    data: bytes
    """The datagrams, end to end."""

    size: int
    """Octets of each; the last one may be shorter."""

    address: Address


class Inboxes(Generic[C]):
    """What waits to be taken, by connection."""

    def __init__(self) -> None:
        self._waiting: dict[C, deque[Read]] = {}
        self._octets: dict[C, int] = {}
        self.octets = 0
        """Of all that waits."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, connection: C, read: Read) -> None:
        """Keep what was read until its turn comes."""
        self._waiting.setdefault(connection, deque()).append(read)
        self._octets[connection] = self._octets.get(connection, 0) + len(read.data)
        self.octets += len(read.data)

    def round(self) -> list[C]:
        """Return who has something to be taken, whoever has the least first."""
        return sorted(self._waiting, key=self._octets.__getitem__)

    def take(self, connection: C) -> list[Read]:
        """Return what a connection may have taken in one round, in the order in which it came."""
        waiting, found, octets = self._waiting[connection], list[Read](), 0
        while waiting and octets < ROUND_OCTETS:
            found.append(waiting.popleft())
            octets += len(found[-1].data)
        self.octets -= octets
        self._octets[connection] -= octets
        if not waiting:
            del self._waiting[connection], self._octets[connection]
        return found
