"""The codecs that come with kvcs: names and values that both ends must have alike."""

import pytest

from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry, Raw
from kvcs.kvsp.standard import STANDARD, standard_codecs

#: Objects on relays and on disks carry these: none may ever change.
ALL = [
    ("raw", 0x0000, True),
    ("shuffle-zstd", 0xC001, True),
    ("shuffle-lz4", 0xC002, True),
    ("int8", 0xC003, False),
    ("fp8", 0xC004, False),
]


def test_each_has_its_name_its_value_and_says_whether_it_is_lossless() -> None:
    assert [(c.name, c.value, c.lossless) for c in standard_codecs()] == ALL
    assert ["raw", *STANDARD] == [name for name, _, _ in ALL]


def test_others_may_be_added_and_registries_share_nothing() -> None:
    mine = Raw(name="mine", value=0x8001)

    assert [codec.name for codec in standard_codecs(mine)][-1] == "mine"
    assert "mine" not in standard_codecs()
    assert len(CodecRegistry()) == 1
    with pytest.raises(ConfigError, match="0xc003 is already that of 'int8'"):
        standard_codecs(Raw(name="mine", value=0xC003))


def test_what_is_registered_is_never_unavailable() -> None:
    codecs = CodecRegistry()
    codecs.note_unavailable("mine", "it is not here")
    assert codecs.unavailable("mine") == "it is not here"

    codecs.register(Raw(name="mine", value=0x8001))
    assert codecs.unavailable("mine") is None
    assert codecs.unavailable("other") is None
