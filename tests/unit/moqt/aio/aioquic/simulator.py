"""A path in virtual time, and senders with our loss recovery, window and pacer on it.

Nothing here knows a clock or a socket, so that what comes out is the same on every machine::

    python -m tests.unit.moqt.aio.aioquic.simulator     # how the algorithms compare

A bottleneck passes datagrams on at its rate, from a queue that drops what does not fit. Both ends
look at what has come a moment after the first of it came, and take all of it then.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, product
from random import Random
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketSpace

from moqt.aio.aioquic.bbr import Bbr
from moqt.aio.aioquic.congestion import DataPacket, Recovery, recovery_for
from moqt.aio.settings import CongestionControl, QuicSettings

#: UDP payload of a packet, and what of it is data.
OCTETS = 1452
DATA = 1416
#: Packets of one segmented send.
BURST = 44
#: Ranges of packets that are acknowledged again with what is new.
AGAIN = 8
#: What a timer can tell from nothing.
TICK_S = 0.001


@dataclass(frozen=True)
class Path:
    """A bottleneck, and how long everything else takes."""

    rtt_s: float = 0.020
    """Without a queue, both ways, and with ends that are never busy."""

    rate: float = 25e6
    """Octets per second."""

    queue: float = 1.0
    """What fits into the queue, in multiples of what is on a full path without one."""

    loss: float = 0.0
    """Share of the datagrams that are lost at random, in each direction."""

    turn_s: float = 0.001
    """How long an end takes at most until it looks at what has come."""

    seed: int = 0

    @property
    def held(self) -> float:
        """Octets on a full path without a queue."""
        return self.rtt_s * self.rate

    @property
    def queue_octets(self) -> float:
        """What fits into the queue; some packets at least, as in every real one."""
        return max(self.queue * self.held, 32 * OCTETS)


class World:
    """The time, and what happens at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Have something done, not before now."""
        heappush(self._due, (max(when, self.now), next(self._serial), do))

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._due and self._due[0][0] <= until and not is_over():
            self.now, _, do = heappop(self._due)
            do()
        if not is_over():
            self.now = until


class Bottleneck:
    """One direction of a path, which several may share."""

    def __init__(self, world: World, path: Path) -> None:
        self.path = path
        self._world = world
        self._random = Random(path.seed)
        self._free_at = 0.0
        self.passed = 0
        self.dropped = 0
        """Datagrams for which there was no room in the queue."""

        self.queued_s = 0.0
        """How long all that passed has waited, together."""

    def send(self, octets: int, arrived: Callable[[], None]) -> None:
        """Pass a datagram on, or drop it."""
        world, path = self._world, self.path
        waits_s = max(0.0, self._free_at - world.now)
        if waits_s * path.rate + octets > path.queue_octets + OCTETS:
            self.dropped += 1
            return
        self._free_at = world.now + waits_s + octets / path.rate
        if self._random.random() < path.loss:
            return
        self.passed += 1
        self.queued_s += waits_s
        world.at(self._free_at + path.rtt_s / 2, arrived)


class Inbox:
    """What has come to an end, until it looks."""

    def __init__(self, world: World, turn_s: float, random: Random, look: Any) -> None:
        self._world = world
        self._turn_s = turn_s
        self._random = random
        self._look = look
        self._waiting: list[Any] = []

    def put(self, item: Any) -> None:
        """Something comes."""
        if not self._waiting:
            self._world.at(self._world.now + self._random.random() * self._turn_s, self._turn)
        self._waiting.append(item)

    def _turn(self) -> None:
        items, self._waiting = self._waiting, []
        self._look(items)


class Flow:
    """A sender with so much to send, and its receiver."""

    def __init__(
        self,
        world: World,
        bottleneck: Bottleneck,
        algorithm: CongestionControl,
        *,
        packets: float = math.inf,
        seed: int = 0,
    ) -> None:
        path = bottleneck.path
        self._world = world
        self._bottleneck = bottleneck
        self._random = Random(f"{path.seed} {seed}")
        settings = QuicSettings(max_datagram_octets=OCTETS, congestion_control=algorithm)
        connection = QuicConnection(configuration=QuicConfiguration(max_datagram_size=OCTETS))
        self.recovery: Recovery = recovery_for(connection, settings)
        self.recovery._send_probe = self._probe
        self.recovery.handshake_confirmed = True
        self.recovery.peer_completed_address_validation = True
        if isinstance(self.control, Bbr):
            self.control._between = self._random.uniform
        self._space = QuicPacketSpace(is_application_data=True)
        self.recovery.spaces = [self._space]
        self.waiting = packets
        """Packets of data to send, those that were lost again."""

        self.delivered = 0
        """Packets that are known to have arrived."""

        self.sent = 0
        self._number = 0
        self._probes = 0
        self._timer_at = math.inf
        self._received = RangeSet()
        self._packets = Inbox(world, path.turn_s, self._random, self._packets_come)
        self._acks = Inbox(world, path.turn_s, self._random, self._acks_come)
        self.watch: Callable[[], None] = lambda: None
        """Called after each turn of the sender."""

    @property
    def control(self) -> Any:
        """The controller."""
        return self.recovery._cc

    @property
    def is_over(self) -> bool:
        """Whether all was delivered."""
        return not self.waiting and not self._space.sent_packets

    def start(self, at: float = 0.0) -> None:
        """Begin to send."""
        self._world.at(at, self.turn)

    def add(self, packets: int) -> None:
        """Have more to send."""
        self.waiting += packets
        self._world.at(self._world.now, self.turn)

    def turn(self) -> None:
        """Send what may be sent, and set the timer."""
        now, recovery, pacer = self._world.now, self.recovery, self.recovery._pacer
        paced_at = None
        while paced_at is None:
            room = recovery.congestion_window - recovery.bytes_in_flight
            room = max(room, self._probes * OCTETS)
            burst: list[DataPacket] = []
            while room >= OCTETS and self.waiting >= 1 and len(burst) < BURST:
                if pacer.is_active and not self._probes:
                    paced_at = pacer.next_send_time(now)
                    if paced_at is not None:
                        break
                pacer.update_after_send(now)
                start, self._probes = self._number, 0
                frame = (self, start, start + 1, False)
                burst.append(DataPacket(start, now, OCTETS, [frame], self._on_delivery))
                self._number += 1
                self.waiting -= 1
                room -= OCTETS
            if not burst:
                break
            self.sent += len(burst)
            recovery.on_data_sent(burst, self._space, now)
            for packet in burst:
                self._send(packet.packet_number)
        if self.waiting < 1:
            recovery.on_starved(now)
        loss_at = recovery.get_loss_detection_time(amplification_limited=False)
        due = [at for at in (paced_at, loss_at) if at is not None]
        if due and (min(due) < self._timer_at or self._timer_at <= now):
            self._timer_at = max(min(due), now + TICK_S)
            self._world.at(self._timer_at, self._timer_fires)
        self.watch()

    def _send(self, number: int) -> None:
        self._bottleneck.send(OCTETS, lambda: self._packets.put(number))

    def _packets_come(self, numbers: Sequence[int]) -> None:
        """Acknowledge what came, in one go, and again some of what came before."""
        while len(self._received) > AGAIN:
            self._received.shift()
        for number in numbers:
            self._received.add(number, number + 1)
        while len(self._received) > MAX_ACK_RANGES:
            self._received.shift()
        ack = RangeSet()
        for known in self._received:
            ack.add(known.start, known.stop)
        path = self._bottleneck.path
        if self._random.random() >= path.loss:
            self._world.at(self._world.now + path.rtt_s / 2, lambda: self._acks.put(ack))

    def _acks_come(self, acks: Sequence[RangeSet]) -> None:
        for ack in acks:
            self.recovery.on_ack_received(
                ack_rangeset=ack, ack_delay=0.0, now=self._world.now, space=self._space
            )
        self.turn()

    def _timer_fires(self) -> None:
        now, recovery = self._world.now, self.recovery
        if now < self._timer_at:
            return  # another one was set since
        self._timer_at = math.inf
        loss_at = recovery.get_loss_detection_time(amplification_limited=False)
        if loss_at is not None and now >= loss_at:
            recovery.on_loss_detection_timeout(now=now)
        self.turn()

    def _probe(self) -> None:
        self._probes = 1

    def _on_delivery(
        self, delivery: QuicDeliveryState, flow: Any, start: int, stop: int, fin: bool
    ) -> None:
        if delivery is QuicDeliveryState.ACKED:
            self.delivered += stop - start
        else:
            self.waiting += stop - start


@dataclass(frozen=True)
class Outcome:
    """What became of one flow."""

    rate: float
    """Octets of data per second."""

    lost: float
    """Share of its packets that did not arrive."""

    queued_s: float
    """How long a packet waited at the bottleneck, on average; of all flows."""


def transfer(
    path: Path, algorithm: CongestionControl, *, octets: int = 50_000_000, limit_s: float = 60.0
) -> Outcome:
    """Carry ``octets``, or what is carried of them in ``limit_s``."""
    world = World()
    bottleneck = Bottleneck(world, path)
    flow = Flow(world, bottleneck, algorithm, packets=octets // DATA)
    flow.start()
    world.run(limit_s, lambda: flow.is_over)
    return _outcome(flow, bottleneck, 0.0, world.now, 0)


def share(
    path: Path,
    algorithms: Sequence[CongestionControl],
    *,
    seconds: float = 30.0,
    after_s: float = 5.0,
    apart_s: float = 1.0,
) -> list[Outcome]:
    """Have several flows share a path; say what became of each after some seconds.

    They begin one after the other, ``apart_s`` apart.
    """
    world = World()
    bottleneck = Bottleneck(world, path)
    flows = [Flow(world, bottleneck, name, seed=n) for n, name in enumerate(algorithms)]
    for n, flow in enumerate(flows):
        flow.start(n * apart_s)
    world.run(after_s)
    before = [flow.delivered for flow in flows]
    world.run(seconds)
    return [
        _outcome(flow, bottleneck, after_s, world.now, delivered)
        for flow, delivered in zip(flows, before, strict=True)
    ]


def _outcome(flow: Flow, bottleneck: Bottleneck, since: float, now: float, before: int) -> Outcome:
    return Outcome(
        rate=(flow.delivered - before) * DATA / (now - since),
        lost=flow.recovery.lost / max(1, flow.sent),
        queued_s=bottleneck.queued_s / max(1, bottleneck.passed),
    )


# The comparison


ALGORITHMS: tuple[CongestionControl, ...] = ("reno", "bbr")
RTTS_S = (0.0002, 0.002, 0.020, 0.080)
LOSSES = (0.0, 0.001, 0.01, 0.03)
QUEUES = (0.25, 1.0, 4.0)


def comparison(algorithms: Sequence[CongestionControl] = ALGORITHMS) -> Iterator[str]:
    """Yield the lines of a table: how fast each algorithm is on each path."""
    yield "RTT    queue loss   " + "".join(f"{name:^24}" for name in algorithms)
    for rtt_s, queue, loss in product(RTTS_S, QUEUES, LOSSES):
        path = Path(rtt_s=rtt_s, queue=queue, loss=loss)
        line = f"{rtt_s * 1000:4.1f} {queue:6.2f} {loss:6.1%}"
        for name in algorithms:
            found = transfer(path, name, limit_s=8.0)
            line += (
                f"{found.rate / 1e6:7.2f} MB/s {found.lost:5.1%} {found.queued_s * 1000:4.0f} ms"
            )
        yield line


def fairness() -> Iterator[str]:
    """Yield the lines of another: what two flows make of one path."""
    pairs: tuple[tuple[CongestionControl, CongestionControl], ...] = (
        ("reno", "reno"),
        ("bbr", "bbr"),
        ("bbr", "reno"),
        ("reno", "bbr"),
    )
    for rtt_s, queue in product((0.002, 0.020, 0.080), QUEUES):
        path = Path(rtt_s=rtt_s, queue=queue)
        line = f"{rtt_s * 1000:4.1f} {queue:6.2f} "
        for pair in pairs:
            found = share(path, pair)
            rates = " : ".join(f"{outcome.rate / 1e6:5.2f}" for outcome in found)
            lost = max(outcome.lost for outcome in found)
            line += f"  {pair[0]:>4}:{pair[1]:<4} {rates} {lost:4.1%}"
        yield line


def main() -> None:
    """Print both."""
    which = sys.argv[1:] or ["comparison", "fairness"]
    for name in which:
        for line in {"comparison": comparison, "fairness": fairness}[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
