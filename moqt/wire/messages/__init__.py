"""Control messages, one file per chapter of the draft. :mod:`moqt.wire.framing` frames them."""
