import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64, ObjectStatus
from moqt.errors import ProtocolError, UsageError
from moqt.wire.datagram import ObjectDatagram, decode_datagram, encode_datagram, padding_datagram

NUMBERS = st.integers(0, 200) | st.integers(0, MAX_VI64)
COMMON = (NUMBERS, NUMBERS, NUMBERS, st.none() | st.integers(0, 255))
DATAGRAMS = st.one_of(
    st.builds(
        ObjectDatagram,
        *COMMON,
        end_of_group=st.booleans(),
        properties=st.sampled_from([(), ((0x3800, 7),), ((0x3801, b"x"),)]),
        payload=st.binary(max_size=50),
    ),
    st.builds(
        ObjectDatagram,
        *COMMON,
        status=st.sampled_from([ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK]),
    ),
)

#: The flags that may stand together, copied once from the draft.
VALID = {*range(0x10), 0x20, 0x21, 0x24, 0x25, 0x28, 0x29, 0x2C, 0x2D}


@given(DATAGRAMS)
def test_a_datagram_round_trips(datagram: ObjectDatagram) -> None:
    assert decode_datagram(encode_datagram(datagram)) == datagram


@pytest.mark.parametrize("flags", range(256))
def test_the_types_are_those_of_the_draft(flags: int) -> None:
    fields = b"\x01\x02"
    fields += b"" if flags & 0x04 else b"\x05"
    fields += b"" if flags & 0x08 else b"\x80"
    fields += bytes.fromhex("03b80007") if flags & 0x01 else b""
    fields += b"\x00" if flags & 0x20 else b"payload"
    type_ = bytes([flags]) if flags < 0x80 else bytes([0x80, flags])

    if flags in VALID:
        found = decode_datagram(type_ + fields)
        assert found is not None
        assert found.object_id == (0 if flags & 0x04 else 5)
        assert found.publisher_priority == (None if flags & 0x08 else 128)
        assert found.properties == (((0x3800, 7),) if flags & 0x01 else ())
        assert found.payload == (b"" if flags & 0x20 else b"payload")
    else:
        with pytest.raises(ProtocolError):
            decode_datagram(type_ + fields)


@given(DATAGRAMS.filter(lambda d: not d.payload), st.data())
def test_a_cut_datagram_is_refused(datagram: ObjectDatagram, data: st.DataObject) -> None:
    encoded = encode_datagram(datagram)
    end = data.draw(st.integers(0, len(encoded) - 1))

    with pytest.raises(ProtocolError):
        decode_datagram(encoded[:end])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cut short"),
        ("2001050380" + "01", "unknown Object Status"),
        ("2001050380" + "0300", "after the last field"),
        ("2001050380" + "0000", "after the last field"),
        ("0101050380" + "00", "has none"),
        ("2101050380" + "03b80007" + "03", "with Object Properties"),
        ("f0132b3e28", "unknown datagram type"),
    ],
)
def test_what_the_draft_forbids_is_refused(text: str, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode_datagram(bytes.fromhex(text))


@pytest.mark.parametrize(
    "datagram",
    [
        ObjectDatagram(1, 2, 3, status=ObjectStatus.END_OF_GROUP, payload=b"x"),
        ObjectDatagram(1, 2, 3, status=ObjectStatus.END_OF_GROUP, end_of_group=True),
        ObjectDatagram(1, 2, 3, status=ObjectStatus.END_OF_TRACK, properties=((0x3800, 7),)),
        ObjectDatagram(1, 2, 3, publisher_priority=256),
        ObjectDatagram(1, 2, MAX_VI64 + 1),
    ],
)
def test_a_datagram_that_has_no_form_is_the_callers_mistake(datagram: ObjectDatagram) -> None:
    with pytest.raises(UsageError):
        encode_datagram(datagram)


def test_padding_is_told_apart_and_carries_nothing() -> None:
    assert padding_datagram(3).hex() == "f0132b3e29000000"
    assert decode_datagram(padding_datagram(0)) is None
    assert decode_datagram(padding_datagram(1000)) is None
