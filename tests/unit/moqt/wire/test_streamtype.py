import pytest

from moqt.codepoints import MAX_VI64, StreamType
from moqt.errors import ProtocolError
from moqt.wire.streamtype import SUBGROUP, classify_uni, padding_stream
from moqt.wire.subgroup import is_subgroup_type

OTHERS = {0x05: StreamType.FETCH_HEADER, 0x2F00: StreamType.SETUP, 0x132B3E28: StreamType.PADDING}


@pytest.mark.parametrize(("number", "kind"), OTHERS.items())
def test_a_registered_type_is_named(number: int, kind: StreamType) -> None:
    assert classify_uni(number) is kind


def test_every_other_number_is_a_subgroup_or_refused() -> None:
    for number in {*range(0x200), *range(0x2EFF, 0x2F02), 0x132B3E29, MAX_VI64} - set(OTHERS):
        if is_subgroup_type(number):
            assert classify_uni(number) is SUBGROUP
        else:
            with pytest.raises(ProtocolError, match=f"{number:#x}"):
                classify_uni(number)


def test_padding_is_zeros_behind_its_type() -> None:
    assert padding_stream(2).hex() == "f0132b3e280000"
