"""A second QUIC engine: picoquic, a library in C, through aiopquic's binding.

picoquic runs in a thread of its own, which holds no lock of the interpreter: one for each dialled
connection, one for each listener with all its connections. Octets pass between the threads in
rings of memory, one for each direction of each stream. Written for aiopquic 0.6.1.

What the seam asks for and picoquic or its binding do not offer is made here:

* receive windows follow what the application consumed; the binding's follow what was read;
* little is handed over ahead of the wire, so that the session's order means something, and so that
  picoquic gets through it in batches of packets and not two by two;
* events are read about once a millisecond while much arrives, and at once while little does;
* control and request streams leave before data streams;
* a close waits for what was written, a port nobody listens on is told at once.

What cannot be made, and is different from the engine ``aioquic`` therefore:

* **A listener binds its port on every address of the family**, whatever host it was given. Clients
  that came in at another address are closed before anything is read of them, but they learn that
  there is a server.
* Reasons are not carried: a close of ours has none, and one of the peer's is read as "".
* Why a connection ended at this end is not told. So an idle timeout, and a peer that broke the
  rules of QUIC, are one `ConnectionLost` with code 0; and a certificate that is not believed, for
  whatever reason, is the alert ``bad_certificate``.
* What the peer's flow control allows is not told. ``send_budget`` and ``stream_credit`` know the
  limits of the handshake, and learn of later ones by trying: a stream that makes no headway counts
  as blocked and no longer against the budget. For want of it no connection credit can be kept for
  control messages: they wait with the data if a peer has stopped its connection window.
* ``connection_window`` bounds how windows are widened, not what streams may carry that begin
  while it is exhausted: each of them may bring one ``stream_window``, which is rounded down to a
  power of two.
* Datagrams are 1,252 octets at first; unless ``max_datagram_octets`` is no more than that, picoquic
  probes for 1,440, and never more.
* ``abandon`` of an accepted connection closes it, with code 0: the peer is told.
* A listener that stopped accepting, or at the address of another host, refuses a client when its
  handshake is through.
* A sign of life (``heard_at``) is noticed when the figures of the connection are looked at, which
  ``ping`` asks for; PINGs are sent every half second of silence, where ``keepalive`` is set.
* A listener cannot change its certificate.
* What a listener has in its handshake is not told. So addresses are proved always (``retry``) or
  never, whatever ``retry_above`` says, and of the limits on handshakes and on the connections of
  one peer only ``max_connections`` holds.
* No client is asked for a certificate, and none shows one: both are refused when they are set.
* ``stats`` knows no ``packets_received``, ``packets_expected``, ``key_updates`` and
  ``datagram_octets``.

All that is touched of aiopquic beneath its documented face is in ``library.py``.
"""

from moqt.aio.picoquic.dialling import dial
from moqt.aio.picoquic.listener import listen

__all__ = ["dial", "listen"]
