"""The QUIC engine: aioquic's protocol core under our own shell.

aioquic (written for 1.7.2) does the handshake, loss detection and the rare frames. This package
drives it without its asyncio package, and replaces what does not fit:

* packets full of stream data are built and taken apart here, a batch at a time;
* receive windows follow what the application consumed, not what arrived;
* control and request streams leave before data streams, and data in the order it was written;
* datagrams are as large as the path is found to take;
* what is sent follows NewReno, whose window grows only while that brings more, or a model of the
  path; the pacer cannot stall;
* keys are updated before the AEAD's limit, idle connections are kept alive.

All that aioquic keeps private is touched in this package and nowhere else; the rest of the
project needs only the two names below. There is one clock, that of :func:`time.monotonic`.
"""

from moqt.aio.aioquic.dialling import dial
from moqt.aio.aioquic.listener import listen

__all__ = ["dial", "listen"]
