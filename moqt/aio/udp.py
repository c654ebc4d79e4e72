"""A UDP endpoint that receives and sends in batches, on any asyncio event loop.

One wake-up of the loop reads many datagrams, and one system call carries many of equal size where
the kernel offers it (UDP_GRO and UDP_SEGMENT of Linux; elsewhere the same code sends and receives
them one by one). What a datagram means is not known here.
"""

import asyncio
import errno
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import structlog

log = structlog.get_logger()

#: ``(host, port)`` of IPv4, ``(host, port, flow, scope)`` of IPv6, as :mod:`socket` spells them.
Address = tuple[Any, ...]

#: From ``linux/udp.h``; :mod:`socket` does not name them.
UDP_SEGMENT = 103
UDP_GRO = 104

#: Octets asked for in each direction; the system may grant less.
SOCKET_BUFFER = 4 << 20

#: With less, bursts are lost that the path would have carried, and people are told.
ENOUGH_BUFFER = 1 << 20

#: From ``asm-generic/socket.h``: as SO_SNDBUF and SO_RCVBUF, for who may go beyond the limits of
#: the system.
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

#: Octets of datagrams kept while the socket takes none. More are dropped, which QUIC repairs.
SEND_BACKLOG = 4 << 20

#: One read takes so much: the most that the kernel puts together.
READ_OCTETS = 65_536

#: One wake-up reads at most so many times, so that timers and other sockets get their turn.
READS_PER_WAKEUP = 32

#: The kernel refuses more segments or octets in one send.
MAX_SEGMENTS = 64
MAX_RUN_OCTETS = 65_000

#: Answers that mean "not with UDP_SEGMENT here": an old kernel, a device, a segment over the MTU.
_NO_SEGMENTATION = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO})

_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
_PMTUDISC_PROBE = 3
_IS_LINUX = hasattr(socket, "SO_BINDTODEVICE")

#: Whether a datagram arrives whole or not at all, so that what passes tells of the path.
FORBIDS_FRAGMENTS = _IS_LINUX


class DatagramReceiver(Protocol):
    """Called by an endpoint, always from the event loop."""

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        """Some datagrams arrived from one address; more of the same batch may follow.

        They are end to end in ``data``, each of ``size`` octets, the last perhaps of fewer: see
        :func:`cut`.
        """

    def batch_received(self) -> None:
        """The batch is over: act on it and answer it, once."""

    def error_received(self, error: OSError) -> None:
        """The socket reported an error, such as a port nobody listens on."""


def bound_socket(family: int, address: Address) -> socket.socket:
    """Return a prepared socket bound to ``address``.

    Raises:
        OSError: If the address cannot be bound, for instance because it is in use.
    """
    return _prepared(family, lambda sock: sock.bind(address))


def connected_socket(family: int, address: Address) -> socket.socket:
    """Return a prepared socket that exchanges datagrams with ``address`` alone.

    Raises:
        OSError: If there is no route to it.
    """
    return _prepared(family, lambda sock: sock.connect(address))


def spell(address: Address) -> str:
    """Write an address for people: ``host:port``, with brackets around an IPv6 one."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"


def _prepared(family: int, attach: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        _widen(sock, socket.SO_SNDBUF, SO_SNDBUFFORCE, "net.core.wmem_max")
        _widen(sock, socket.SO_RCVBUF, SO_RCVBUFFORCE, "net.core.rmem_max")
        _forbid_fragments(sock)
        attach(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _widen(sock: socket.socket, option: int, force: int, limit: str) -> None:
    """Ask for a buffer of :data:`SOCKET_BUFFER`; say which ``limit`` is in the way, if one is."""
    try:
        if not _IS_LINUX:
            raise OSError(errno.ENOPROTOOPT, "known to Linux alone")
        sock.setsockopt(socket.SOL_SOCKET, force, SOCKET_BUFFER)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    granted = _granted(sock, option)
    if granted < ENOUGH_BUFFER:
        _tell_small_buffer(limit, granted)


def _granted(sock: socket.socket, option: int) -> int:
    octets = sock.getsockopt(socket.SOL_SOCKET, option)
    return octets // 2 if _IS_LINUX else octets  # which doubles it, for its own records


@cache
def _tell_small_buffer(limit: str, granted: int) -> None:
    """Say once what was granted: it will be the same for the next socket."""
    log.info(
        "small socket buffer, bursts may be lost",
        granted=granted,
        wanted=SOCKET_BUFFER,
        help=f"sysctl -w {limit}={SOCKET_BUFFER}",
    )


def _forbid_fragments(sock: socket.socket) -> None:
    """QUIC datagrams must not be fragmented (RFC 9000 Section 14)."""
    if not FORBIDS_FRAGMENTS:
        return
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
    # An IPv6 socket may serve IPv4, too, and then this one counts.
    sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)


def cut(data: bytes, size: int) -> list[bytes]:
    """Return the datagrams that are end to end in ``data``, each of ``size`` octets at most."""
    if len(data) <= size:
        return [data]
    return [data[at : at + size] for at in range(0, len(data), size)]


def runs(datagrams: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Cut ``datagrams`` into runs that one segmented send can carry, order kept.

    All of a run have the same size, but for the last, which may be shorter.
    """
    start, count = 0, len(datagrams)
    while start < count:
        size = total = len(datagrams[start])
        stop = start + 1
        while stop < count and stop - start < MAX_SEGMENTS:
            following = len(datagrams[stop])
            if following > size or total + following > MAX_RUN_OCTETS:
                break
            stop += 1
            total += following
            if following < size:
                break
        yield datagrams[start:stop]
        start = stop


class UdpEndpoint:
    """Carries datagrams between a socket and a :class:`DatagramReceiver`.

    Owns ``sock``, which must not block, from now on until :meth:`close`.
    """

    def __init__(self, sock: socket.socket, receiver: DatagramReceiver) -> None:
        self._sock = sock
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._segments = _IS_LINUX
        self._waiting: deque[tuple[Sequence[bytes], Address | None]] = deque()
        self._waiting_octets = 0
        self._oversize_told = False
        try:
            sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
            self._control_octets = socket.CMSG_SPACE(struct.calcsize("i"))
        except OSError:
            self._control_octets = 0
        self._loop.add_reader(sock, self._readable)

    @property
    def address(self) -> Address:
        """The local address."""
        address: Address = self._sock.getsockname()
        return address

    @property
    def receive_buffer(self) -> int:
        """Octets that the system keeps for us while we are busy, about."""
        return _granted(self._sock, socket.SO_RCVBUF)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._sock.fileno() < 0

    def send(self, datagrams: Sequence[bytes], address: Address | None) -> bool:
        """Send ``datagrams`` in order, now or as soon as the socket takes them.

        What the network refuses is lost, as it might be on the way.

        Args:
            datagrams: UDP payloads.
            address: Where to; None on a connected socket.

        Returns:
            False when one of them was refused, and lost, because it is larger than the path takes,
            as far as this machine knows. Of those that wait for the socket nobody is told.
        """
        if self.closed:
            return True
        if self._waiting:
            self._keep(datagrams, address)
            return True
        sent, taken = 0, True
        for run in runs(datagrams) if self._segments else _each(datagrams):
            try:
                self._send_run(run, address)
            except (BlockingIOError, InterruptedError):
                self._keep(datagrams[sent:], address)
                self._loop.add_writer(self._sock, self._writable)
                return taken
            except OSError as error:
                if len(run) > 1 and error.errno in _NO_SEGMENTATION:
                    return self._send_singly(datagrams[sent:], address, error) and taken
                self._watch_again()
                taken &= error.errno != errno.EMSGSIZE
                if isinstance(error, ConnectionRefusedError):
                    # The answer to an earlier datagram; not told at once, since the receiver is
                    # sending.
                    self._loop.call_soon(self._receiver.error_received, error)
            sent += len(run)
        return taken

    def warn_too_large(self, octets: int) -> None:
        """Tell people, once, that datagrams of a size that they chose are refused."""
        if not self._oversize_told:
            self._oversize_told = True
            log.warning("datagram is larger than the path takes", octets=octets)

    def close(self) -> None:
        """Stop receiving and close the socket. Datagrams still kept are lost."""
        if self.closed:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._waiting.clear()
        self._sock.close()

    def _readable(self) -> None:
        try:
            for _ in range(READS_PER_WAKEUP):
                if self.closed or not self._read():
                    break
        finally:
            self._receiver.batch_received()

    def _read(self) -> bool:
        """Receive once; return False when there is nothing more."""
        try:
            data, control, _, address = self._sock.recvmsg(READ_OCTETS, self._control_octets)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._watch_again()
            self._receiver.error_received(error)
            return True
        size = max(len(data), 1)
        for _, kind, value in control:
            if kind == UDP_GRO:
                (size,) = struct.unpack("i", value[:4])
        self._receiver.datagrams_received(data, size, address)
        return True

    def _send_run(self, run: Sequence[bytes], address: Address | None) -> None:
        control = []
        if len(run) > 1:
            control = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("H", len(run[0])))]
        to = () if address is None else (0, address)
        try:
            self._sock.sendmsg(run, control, *to)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            # Perhaps a router has returned an earlier datagram, which the system tells once and
            # then takes this one.
            self._watch_again()
            self._sock.sendmsg(run, control, *to)

    def _watch_again(self) -> None:
        """Go on watching the socket: uvloop 0.23 ceases to when it has an error to report."""
        self._loop.remove_reader(self._sock)
        self._loop.add_reader(self._sock, self._readable)

    def _send_singly(
        self, datagrams: Sequence[bytes], address: Address | None, error: OSError
    ) -> bool:
        """Do without segmented sends, unless the size of the datagrams was what is refused."""
        self._segments = False
        taken = self.send(datagrams, address)
        if taken:
            log.debug("segmented sends refused", error=error.strerror)
        else:
            self._segments = True
        return taken

    def _keep(self, datagrams: Sequence[bytes], address: Address | None) -> None:
        octets = sum(map(len, datagrams))
        if self._waiting_octets + octets <= SEND_BACKLOG:
            self._waiting.append((datagrams, address))
            self._waiting_octets += octets

    def _writable(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        self._waiting_octets = 0
        self._loop.remove_writer(self._sock)
        for datagrams, address in waiting:
            self.send(datagrams, address)


def _each(datagrams: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for datagram in datagrams:
        yield (datagram,)
