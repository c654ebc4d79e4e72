"""A path between two ends that is slower, narrower and less reliable than loopback.

A proxy for UDP in a process of its own. What becomes of a datagram is decided by a :class:`Line`,
one for each direction of each client, which knows no clock and no socket; the same seed makes the
same decisions for the same datagrams.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

from benchcases.ends import Place, Role
from moqt.aio.udp import Address, UdpEndpoint, bound_socket, connected_socket, cut

#: Octets on their way in one direction at most; what comes beyond them is dropped.
HELD_OCTETS = 64 << 20
#: Addresses that are served; what comes from others is dropped.
MAX_CLIENTS = 64
#: Seconds of a timer that a loop can tell from nothing.
TICK_S = 0.001


@dataclass(frozen=True)
class Path:
    """What a path does to datagrams, in each direction by itself. The default is: nothing."""

    delay_s: float = 0.0
    """One way: half a round trip."""

    loss: float = 0.0
    """Share of the datagrams that are lost, each by itself."""

    octets_per_s: float | None = None
    """Rate of the link; None: none. Payload of UDP is what counts."""

    queue_s: float = 0.05
    """How long a datagram may wait for the link: the next one is dropped."""

    burst_octets: int = 64 << 10
    """What an idle link takes at once: one segmented send."""

    seed: int = 0


class Line:
    """One direction of a path: which datagrams come out of it, and when.

    Times are arguments, seconds of any clock that does not go back.
    """

    def __init__(self, path: Path, direction: str) -> None:
        self._path = path
        self._random = Random(f"{path.seed} {direction}")
        self._octet_s = 1 / path.octets_per_s if path.octets_per_s else 0.0
        self._free_at = float("-inf")  # when the link will have sent all that it was given
        self._on_their_way: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self.passed = 0
        """Datagrams that came out."""

        self.octets = 0
        """Octets of those."""

        self.lost = 0
        """Datagrams lost on the way."""

        self.overflowed = 0
        """Datagrams for which the queue had no room."""

    @property
    def next_at(self) -> float | None:
        """When the next datagram comes out; None if there is none."""
        return self._on_their_way[0][0] if self._on_their_way else None

    def put(self, now: float, datagrams: Sequence[bytes]) -> None:
        """Let datagrams in; each is lost, or dropped, by itself."""
        path = self._path
        for datagram in datagrams:
            if path.loss and self._random.random() < path.loss:
                self.lost += 1
                continue
            octets = len(datagram)
            leaves_at = now
            if self._octet_s:
                since = max(self._free_at, now - path.burst_octets * self._octet_s)
                free_at = since + octets * self._octet_s
                leaves_at = max(now, free_at)
                if leaves_at - now > path.queue_s:
                    self.overflowed += 1
                    continue
                self._free_at = free_at
            if self._held + octets > HELD_OCTETS:
                self.overflowed += 1
                continue
            self._held += octets
            self._on_their_way.append((leaves_at + path.delay_s, datagram))

    def take(self, now: float) -> list[bytes]:
        """Return what has come out by now, in order."""
        waiting = self._on_their_way
        due: list[bytes] = []
        while waiting and waiting[0][0] <= now:
            due.append(waiting.popleft()[1])
        octets = sum(map(len, due))
        self._held -= octets
        self.octets += octets
        self.passed += len(due)
        return due


class _Carrier:
    """Moves datagrams through a line, on the event loop."""

    def __init__(self, line: Line, send: Callable[[list[bytes]], object]) -> None:
        self.line = line
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, datagrams: Sequence[bytes]) -> None:
        self.line.put(time.monotonic(), datagrams)

    def release(self) -> None:
        """Send what is due, and come back for the rest."""
        if due := self.line.take(time.monotonic()):
            self._send(due)
        at = self.line.next_at
        if at is not None and self._timer is None:
            self._timer = self._loop.call_later(max(TICK_S, at - time.monotonic()), self._fired)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fired(self) -> None:
        self._timer = None
        self.release()


class _Client:
    """One address that sends to the proxy: a socket towards the other end, and two lines."""

    def __init__(self, front: UdpEndpoint, address: Address, port: int, path: Path) -> None:
        towards = connected_socket(socket.AF_INET, ("127.0.0.1", port))
        self._back = UdpEndpoint(towards, self)
        self.up = _Carrier(Line(path, "up"), lambda due: self._back.send(due, None))
        self.down = _Carrier(Line(path, "down"), lambda due: front.send(due, address))

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        self.down.put(cut(data, size))

    def batch_received(self) -> None:
        self.down.release()

    def error_received(self, error: OSError) -> None:
        """Nobody listens there: what was sent is lost."""

    def close(self) -> None:
        self.up.stop()
        self.down.stop()
        self._back.close()


class ProxyEnd(Role):
    """Listens, and passes on what comes to a port, and back.

    Args:
        place: See :class:`Role`.
        port: Where to.
        path: What is done to it.
    """

    def __init__(self, place: Place, *, port: int, path: Path) -> None:
        super().__init__(place)
        self._to = port
        self._path = path
        self._clients: dict[Address, _Client] = {}

    async def start(self, stack: AsyncExitStack) -> None:
        self._front = UdpEndpoint(bound_socket(socket.AF_INET, ("127.0.0.1", 0)), self)
        stack.callback(self._close)

    async def port(self) -> int:
        port: int = self._front.address[1]
        return port

    async def counts(self) -> dict[str, dict[str, int]]:
        """Datagrams and octets of all clients, ``up`` towards the port and ``down`` from it."""
        lines: dict[str, list[Line]] = {
            "up": [client.up.line for client in self._clients.values()],
            "down": [client.down.line for client in self._clients.values()],
        }
        return {
            direction: {
                "datagrams": sum(line.passed for line in found),
                "octets": sum(line.octets for line in found),
                "lost": sum(line.lost for line in found),
                "overflowed": sum(line.overflowed for line in found),
            }
            for direction, found in lines.items()
        }

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        client = self._clients.get(address)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                return
            client = _Client(self._front, address, self._to, self._path)
            self._clients[address] = client
        client.up.put(cut(data, size))

    def batch_received(self) -> None:
        for client in self._clients.values():
            client.up.release()

    def error_received(self, error: OSError) -> None:
        """A client is gone: what was sent to it is lost."""

    def _close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._front.close()
