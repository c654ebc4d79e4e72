"""How a connection fails before it exists, whichever engine was to carry it.

* :exc:`DialError`: whatever it was; the message says to whom and what failed
    * :exc:`TlsAlertError`: the TLS handshake
        * :exc:`AlpnMismatchError`: no protocol in common
"""


class DialError(ConnectionError):
    """A connection could not be made. The message says to whom and what failed."""


class TlsAlertError(DialError):
    """The TLS handshake failed. ``alert`` is the name RFC 8446 gives the reason."""

    def __init__(self, message: str, alert: str) -> None:
        super().__init__(message)
        self.alert = alert


class AlpnMismatchError(TlsAlertError):
    """The peer speaks none of the protocols that were offered."""
