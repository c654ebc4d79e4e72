"""Scope keys and the identifiers derived from them."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey, anchor_key, block_keys_sha256

SECRET = bytes(range(32))
KEY = ScopeKey(SECRET)
ROOT = Path(__file__).parents[4]


def descriptor(**changes: Any) -> Descriptor:
    fields: dict[str, Any] = {
        "model": "m",
        "revision": "r",
        "layers": 2,
        "block_tokens": 4,
        "dtype": "float16",
        "k_shape": (1, 2),
        "v_shape": (1, 2),
    }
    return Descriptor(**fields | changes)


def test_the_secret_is_in_no_text_about_the_key() -> None:
    for text in (repr(KEY), str(KEY), f"{KEY}", f"{[KEY]}"):
        assert SECRET.hex() not in text
        assert repr(SECRET) not in text
        assert "secret" in text


def test_a_key_cannot_leave_in_a_pickle() -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(KEY)


@pytest.mark.parametrize("octets", [0, 1, 31, 1025])
def test_a_key_of_a_wrong_length_is_refused_with_the_length(octets: int) -> None:
    with pytest.raises(ConfigError, match=r"31|has \d octets|more than 1024"):
        ScopeKey(bytes(octets))


def test_keys_are_equal_by_their_secret() -> None:
    assert ScopeKey(SECRET) == KEY
    assert hash(ScopeKey(SECRET)) == hash(KEY)
    assert ScopeKey(bytes(32)) != KEY
    assert KEY != SECRET


def test_generated_keys_differ() -> None:
    assert ScopeKey.generate() != ScopeKey.generate()


@pytest.mark.parametrize(
    "content",
    [
        SECRET,
        SECRET.hex().encode(),
        SECRET.hex().upper().encode(),
        b"\n " + SECRET.hex().encode() + b"\r\n",
    ],
    ids=["raw", "hex", "upper-case", "white-space"],
)
def test_a_file_may_hold_the_key_raw_or_in_hex(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "scope.key"
    path.write_bytes(content)

    assert ScopeKey.from_file(path) == KEY
    assert ScopeKey.from_file(str(path)) == KEY


def test_raw_octets_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "scope.key"
    path.write_bytes(SECRET + b"\n")

    assert ScopeKey.from_file(path) == ScopeKey(SECRET + b"\n")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 octets"),
        (bytes(31), r"\(raw\) has 31 octets"),
        (b"ab" * 31, r"\(in hex\) has 31 octets"),
        (b"0123456789abcdef" * 2, r"\(in hex\) has 16 octets"),
        (b"a" * 65, "odd number of hex digits"),
        (bytes(5000), "more than 1024 octets"),
        (b"ab" * 1200, "more than 1024 octets"),
    ],
)
def test_a_bad_file_is_named_with_the_length_found(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "scope.key"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=says) as caught:
        ScopeKey.from_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.key"):
        ScopeKey.from_file(tmp_path / "missing.key")


def test_a_written_key_is_read_back_is_private_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "scope.key"
    KEY.to_file(path)

    assert ScopeKey.from_file(path) == KEY
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"scope\.key"):
        ScopeKey.generate().to_file(path)
    assert ScopeKey.from_file(path) == KEY


def test_derived_keys_differ_by_purpose_and_not_by_anything_else() -> None:
    """The value is that of "Object key" in the vectors of the sealing of Objects."""
    base = KEY.derive(b"kvcs-1 object-key")

    assert base.hex() == "18391682b96d9f2a72b992dca052d07439922f1fa8941844593cb3b22c34dfab"
    assert base == ScopeKey(SECRET).derive(b"kvcs-1 object-key")
    assert base != KEY.derive(b"kvcs-1 another")
    assert len(KEY.derive(b"x", octets=48)) == 48


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.lists(st.binary(max_size=5), max_size=3),
)
def test_keys_of_a_longer_prompt_begin_with_those_of_a_shorter_one(
    tokens: list[int], size: int, extra: list[bytes]
) -> None:
    blocks = -(-len(tokens) // size)
    used = descriptor(block_tokens=size)
    keys = KEY.block_keys(used, tokens, extra[:blocks])

    assert len(keys) == len(tokens) // size
    assert all(len(key) == 32 for key in keys)
    for cut in range(len(keys)):
        shorter = KEY.block_keys(used, tokens[: cut * size], extra[:cut])
        assert shorter == keys[:cut]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.integers(0, 7))
def test_another_token_changes_its_block_and_all_after_it(tokens: list[int], where: int) -> None:
    changed = list(tokens)
    changed[where] ^= 1

    before = KEY.block_keys(descriptor(), tokens)
    after = KEY.block_keys(descriptor(), changed)

    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < where // 4 for i in range(2)]


@pytest.mark.parametrize("form", [list, tuple, np.uint32, np.int64, np.uint64, ">u4"])
def test_tokens_come_in_any_integer_sequence(form: Any) -> None:
    tokens = [1, 2, 3, 2**31 - 1, 5, 6, 7, 8]
    given_as: Any = form(tokens) if form in (list, tuple) else np.array(tokens, dtype=form)

    assert KEY.block_keys(descriptor(), given_as) == KEY.block_keys(descriptor(), tokens)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, 2, -1, 4], "token 2 is -1"),
        ([1, 2**32, 3], "token 1 is 4294967296"),
        ([2**64, 1], "integers of 0 to"),
        ([1.0, 2.0], "type float64"),
        ([True, False], "type bool"),
        (["1", "2"], "expected integers"),
        ([[1, 2], [3, 4]], "2 dimensions"),
        ([[1], [2, 3]], "tokens"),
        ([None], "integers of 0 to"),
        (7, "0 dimensions"),
    ],
)
def test_tokens_out_of_range_or_of_another_type_are_refused(tokens: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KEY.block_keys(descriptor(), tokens)


def test_extra_material_changes_its_block_and_is_not_the_same_as_tokens() -> None:
    tokens = list(range(8))
    plain = KEY.block_keys(descriptor(), tokens)

    first = KEY.block_keys(descriptor(), tokens, [b"image"])
    second = KEY.block_keys(descriptor(), tokens, [b"", b"image"])

    assert first[0] != plain[0]
    assert second[0] == plain[0]
    assert second[1] not in (plain[1], first[1])
    assert KEY.block_keys(descriptor(), tokens, [b"", b""]) == plain


def test_extra_material_for_blocks_the_prompt_does_not_have_is_refused() -> None:
    assert KEY.block_keys(descriptor(), [1], [b"image"]) == []
    with pytest.raises(ConfigError, match="for 2 blocks, the prompt has 1"):
        KEY.block_keys(descriptor(), [1, 2, 3, 4], [b"", b"image"])


def test_a_compatibility_id_serves_in_place_of_its_descriptor() -> None:
    identifier = KEY.compatibility_id(descriptor())

    assert KEY.block_keys(identifier, range(8), block_tokens=4) == (
        KEY.block_keys(descriptor(), range(8))
    )
    assert KEY.block_keys(descriptor(), range(8), block_tokens=4)


@pytest.mark.parametrize(
    ("given_as", "block_tokens", "says"),
    [
        (bytes(32), None, "block_tokens is None"),
        (bytes(32), 0, "block_tokens is 0"),
        (bytes(31), 4, "31 octets, expected 32"),
        (descriptor(), 5, "block_tokens is 5, the descriptor's 4"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    given_as: Any, block_tokens: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        KEY.block_keys(given_as, range(8), block_tokens=block_tokens)


def test_the_anchor_is_the_last_key_and_a_short_prompt_has_none() -> None:
    keys = KEY.block_keys(descriptor(), range(8))

    assert anchor_key(keys) == keys[-1]
    assert anchor_key([]) is None
    assert block_keys_sha256(keys) != block_keys_sha256(keys[:1])


def test_a_hundred_thousand_tokens_take_well_under_a_second() -> None:
    """Measured at 25 ms on two cores; the bound leaves room for a machine that is busy."""
    used = descriptor(block_tokens=16)
    start = time.process_time()

    keys = KEY.block_keys(used, list(range(100_000)))

    assert time.process_time() - start < 0.8
    assert len(keys) == 6250


PROGRAM = """
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
d = Descriptor(model="m", revision="r", layers=2, block_tokens=4, dtype="float16",
               k_shape=(1, 2), v_shape=(1, 2),
               extra={name: {"b": 1, "a": [name]} for name in {"x", "y", "zeta", "alpha", "mu"}})
k = ScopeKey(bytes(range(32)))
print(d.canonical().decode(), k.compatibility_id(d).hex())
print(k.scope_id.hex(), [b.hex() for b in k.block_keys(d, range(8))])
"""


def test_two_interpreters_with_different_hash_seeds_agree_on_every_identifier() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            timeout=30,
        ).stdout
        for seed in ("0", "1", "4242")
    }

    assert len(outputs) == 1
    assert len(outputs.pop()) > 400


@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
    st.lists(st.binary(max_size=4), max_size=2),
)
def test_a_chain_goes_on_from_any_key_as_if_all_tokens_were_given(
    tokens: list[int], cuts: list[int], extra: list[bytes]
) -> None:
    key, identifier, size = ScopeKey(bytes(32)), bytes(32), 4
    extra = extra[: -(-len(tokens) // size)]
    whole = key.block_keys(identifier, tokens, extra, block_tokens=size)

    keys: list[bytes] = []
    for end in [*sorted(cuts), len(tokens)]:
        done = len(keys)
        rest = tokens[done * size : end]
        keys += key.block_keys(
            identifier,
            rest,
            extra[done : done + -(-len(rest) // size)],
            block_tokens=size,
            after=keys[-1] if keys else None,
        )

    assert keys == whole


def test_a_block_key_to_go_on_from_has_32_octets() -> None:
    with pytest.raises(ConfigError, match="Block Key of 31 octets, expected 32"):
        ScopeKey(bytes(32)).block_keys(bytes(32), [1], block_tokens=1, after=bytes(31))
