"""QUIC's integers."""

import pytest
from aioquic._buffer import Buffer

from moqt.aio.aioquic.varint import encode_varint, peek_varint, varint_size


@pytest.mark.parametrize(
    ("value", "encoded"),
    # RFC 9000 Appendix A.1.
    [
        (37, "25"),
        (15_293, "7bbd"),
        (494_878_333, "9d7f3e7d"),
        (151_288_809_941_952_652, "c2197c5eff14e88c"),
    ],
)
def test_integers_are_encoded_as_the_rfc_does(value: int, encoded: str) -> None:
    assert encode_varint(value).hex() == encoded
    assert varint_size(value) == len(encoded) // 2


def test_a_look_at_an_integer_leaves_it_unread() -> None:
    buf = Buffer(data=b"\x00\x7b\xbd")
    buf.seek(1)

    assert peek_varint(buf) == 15_293
    assert buf.tell() == 1
