"""The one place where the draft that is spoken becomes an ALPN."""

from moqt import DRAFT

#: Offered and accepted over native QUIC (MOQT, "Session establishment").
ALPN = f"moqt-{DRAFT}"
