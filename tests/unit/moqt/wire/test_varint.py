import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64
from moqt.errors import UsageError
from moqt.wire.varint import decode_vi64, encode_vi64, size_vi64

#: Octets -> greatest value, row by row from the draft's table.
GREATEST = {
    1: 127,
    2: 16_383,
    3: 2_097_151,
    4: 268_435_455,
    5: 34_359_738_367,
    6: 4_398_046_511_103,
    7: 562_949_953_421_311,
    8: 72_057_594_037_927_935,
    9: 18_446_744_073_709_551_615,
}

VALUES = st.integers(0, 9).flatmap(lambda n: st.integers(0, min(2 ** (7 * n), MAX_VI64)))


@pytest.mark.parametrize(("size", "greatest"), GREATEST.items())
def test_each_length_holds_what_the_table_says(size: int, greatest: int) -> None:
    assert size_vi64(greatest) == len(encode_vi64(greatest)) == size
    if greatest < MAX_VI64:
        assert size_vi64(greatest + 1) == len(encode_vi64(greatest + 1)) == size + 1


@given(VALUES)
def test_round_trips_in_the_shortest_form(value: int) -> None:
    data = encode_vi64(value)

    assert len(data) == size_vi64(value)
    assert decode_vi64(data) == (value, len(data))


@given(VALUES, st.integers(1, 9))
def test_any_length_that_fits_is_read(value: int, size: int) -> None:
    if value > GREATEST[size]:
        value %= GREATEST[size] + 1
    ones = (1 << 8) - (1 << (9 - size)) if size < 9 else 0xFF
    body = value.to_bytes(size if size < 9 else 8, "big")
    data = bytes([ones | body[0]]) + body[1:] if size < 9 else b"\xff" + body

    assert decode_vi64(data) == (value, size)


@given(st.integers(0x80, MAX_VI64), st.data())
def test_asks_for_more_at_every_cut(value: int, data: st.DataObject) -> None:
    encoded = encode_vi64(value)
    cut = data.draw(st.integers(0, len(encoded) - 1))

    assert decode_vi64(encoded[:cut]) is None
    assert decode_vi64(b"\x00" + encoded[:cut], 1) is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_reads_from_anything_octets_live_in(kind: type) -> None:
    assert decode_vi64(kind(bytes.fromhex("00bbbd00")), 1) == (15_293, 3)


@pytest.mark.parametrize("value", [-1, MAX_VI64 + 1])
def test_what_does_not_fit_is_the_callers_mistake(value: int) -> None:
    with pytest.raises(UsageError, match="does not fit"):
        encode_vi64(value)
    with pytest.raises(UsageError, match="does not fit"):
        size_vi64(value)
