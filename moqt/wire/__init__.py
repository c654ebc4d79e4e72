"""Octets to values and back (MOQT draft 22). Knows no session, no stream and no time.

On a stream running short is normal, and decoders that work there return None for "not yet":
:func:`~moqt.wire.varint.decode_vi64`, the stream headers, the buffers. Inside a counted body it
is the peer's mistake, and :class:`~moqt.wire.reader.Reader` raises.
"""
