"""Compatibility Descriptors: what is accepted, what is refused, and what is said about it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import BadDescriptor
from kvcs.kvsp.descriptor import ELEMENT_OCTETS, MAX_INTEGER, MAX_OCTETS, Descriptor


def members(**changes: Any) -> dict[str, Any]:
    return {
        "kvsp": 1,
        "model": "example/llama-tiny",
        "revision": "sha256:00ff",
        "layers": 4,
        "block_tokens": 4,
        "dtype": "float16",
        "k_shape": [2, 8],
        "v_shape": [2, 8],
        "layout": "NHD",
        **changes,
    }


#: One character of each kind that JSON writers treat differently.
TEXT = st.text('aZ0 "\\/\n\x00\x07\x1f\x7f\u2028é€ﬁ\ue000\ufffd😀\U0010ffff', max_size=20)
JSON_WITHOUT_FLOATS = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["rope", "é", "😀", "zz", ""]), JSON_WITHOUT_FLOATS))
def test_reads_back_what_it_writes_in_every_form(extra: dict[str, Any]) -> None:
    descriptor = Descriptor.from_json(members(**extra))

    assert Descriptor.from_json(descriptor.to_json()) == descriptor
    assert Descriptor.from_json(descriptor.canonical()) == descriptor
    assert Descriptor.from_json(descriptor.canonical().decode()) == descriptor
    assert json.loads(descriptor.canonical()) == members(**extra)


@given(st.permutations(list(members(rope={"b": 1, "a": 2}))))
def test_the_order_of_members_does_not_matter(order: list[str]) -> None:
    source = members(rope={"b": 1, "a": 2})

    assert (
        Descriptor.from_json({name: source[name] for name in order}).canonical()
        == Descriptor.from_json(source).canonical()
    )


def test_unknown_members_are_kept_and_are_part_of_the_identity() -> None:
    plain = Descriptor.from_json(members())
    adapted = Descriptor.from_json(members(adapter={"lora": "x", "rank": 8}))

    assert adapted.extra == {"adapter": {"lora": "x", "rank": 8}}
    assert b'"adapter":{"lora":"x","rank":8}' in adapted.canonical()
    assert adapted != plain


def test_extra_members_cannot_be_changed_from_outside() -> None:
    rope = {"theta": "1"}
    descriptor = Descriptor.from_json(members(rope=rope))
    before = descriptor.canonical()

    rope["theta"] = "2"
    descriptor.members()["rope"]["theta"] = "3"

    assert descriptor.extra["rope"] == {"theta": "1"}
    assert Descriptor.from_json(descriptor.members()).canonical() == before


@pytest.mark.parametrize("name", list(members()))
def test_a_missing_member_is_named(name: str) -> None:
    source = members()
    del source[name]

    with pytest.raises(BadDescriptor, match=f"no member '{name}'"):
        Descriptor.from_json(source)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("kvsp", 2, "kvsp is 2, expected 1"),
        ("kvsp", True, "kvsp is a boolean"),
        ("kvsp", "1", "kvsp is a string"),
        ("model", "", "model is empty"),
        ("model", None, "model is null"),
        ("model", "\ud800", "model is not Unicode"),
        ("revision", 7, "revision is an integer"),
        ("layers", 0, "layers is 0, expected 1 to 65535"),
        ("layers", 65536, "layers is 65536"),
        ("layers", True, "layers is a boolean"),
        ("layers", 4.0, "layers is the float 4.0"),
        ("block_tokens", 0, "block_tokens is 0, expected 1 to 65536"),
        ("block_tokens", 65537, "block_tokens is 65537"),
        ("dtype", "float64", 'dtype is "float64", expected one of float16'),
        ("dtype", ["float16"], "dtype is an array"),
        ("dtype", {}, "dtype is an object"),
        ("k_shape", [2], r"k_shape is \[2\], expected \[heads, dim\]"),
        ("k_shape", [2, 8, 1], "k_shape is"),
        ("k_shape", "28", "k_shape is"),
        ("k_shape", [0, 8], r"k_shape\[0\] is 0"),
        ("k_shape", [2, 0], r"k_shape\[1\] is 0"),
        ("k_shape", [False, False], r"k_shape\[0\] is a boolean"),
        ("v_shape", [2, 8.0], r"v_shape\[1\] is the float"),
        ("v_shape", [-2, 8], r"v_shape\[0\] is -2"),
        ("layout", "HND", "layout is \"HND\", expected 'NHD'"),
        ("layout", None, "layout is null"),
        ("rope", {"theta": 10000.0}, r"rope\.theta is the float 10000\.0: write it as a string"),
        ("rope", [1, {"x": [0.5]}], r"rope\[1\]\.x\[0\] is the float 0\.5"),
        ("big", 2**53, "big is an integer beyond"),
        ("big", -(2**53), "big is an integer beyond"),
        ("odd", {"\udfff": 1}, "the name of a member is not Unicode"),
        ("odd", {1: 1}, "odd has a member name that is not text"),
        ("odd", {"a": b"x"}, r"odd\.a is a bytes"),
        ("odd", {"a": {1, 2}}, r"odd\.a is a set"),
    ],
)
def test_a_bad_member_is_named_with_what_was_found(name: str, value: object, says: str) -> None:
    with pytest.raises(BadDescriptor, match=says):
        Descriptor.from_json(members(**{name: value}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "Expecting value"),
        (b"[]", "descriptor is an array, expected an object"),
        (b"null", "descriptor is null"),
        (b"\xff{}", "not UTF-8"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 1}', "member 'a' occurs twice"),
        (b'{"x": {"a": 1, "a": 2}}', "member 'a' occurs twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": ' + b"[" * 33 + b"]" * 33 + b"}", "limit of 32"),
        (b'{"a": "' + b"x" * MAX_OCTETS + b'"}', f"limit {MAX_OCTETS}"),
        (b"{} {}", "Extra data"),
    ],
)
def test_text_that_is_not_one_strict_json_object_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(BadDescriptor, match=says):
        Descriptor.from_json(text)


def test_a_float_in_text_is_refused_and_says_what_to_write() -> None:
    text = json.dumps(members(rope_theta=1e6))

    with pytest.raises(BadDescriptor, match=r'rope_theta is the float.*"1000000\.0"'):
        Descriptor.from_json(text)


def test_a_duplicate_of_a_known_member_is_refused() -> None:
    text = json.dumps(members())[:-1] + ', "layers": 5}'

    with pytest.raises(BadDescriptor, match="member 'layers' occurs twice"):
        Descriptor.from_json(text)


def test_deep_and_long_objects_are_refused_as_well_as_text() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]

    with pytest.raises(BadDescriptor, match="limit of 32"):
        Descriptor.from_json(members(deep=deep))
    with pytest.raises(BadDescriptor, match=f"limit {MAX_OCTETS}"):
        Descriptor.from_json(members(long="x" * MAX_OCTETS))


def test_a_layer_too_large_for_a_data_length_is_refused() -> None:
    with pytest.raises(BadDescriptor, match="make block_tokens smaller"):
        Descriptor.from_json(members(k_shape=[1024, 128], block_tokens=65536))


def test_one_empty_section_is_fine_and_two_are_not() -> None:
    assert Descriptor.from_json(members(v_shape=[0, 0])).v_shape == (0, 0)
    assert Descriptor.from_json(members(k_shape=[0, 0])).k_shape == (0, 0)
    with pytest.raises(BadDescriptor, match="nothing to store"):
        Descriptor.from_json(members(k_shape=[0, 0], v_shape=[0, 0]))


def test_extra_cannot_shadow_a_member() -> None:
    with pytest.raises(BadDescriptor, match="extra holds the member 'layers'"):
        Descriptor(
            model="m",
            revision="r",
            layers=1,
            block_tokens=1,
            dtype="int8",
            k_shape=(1, 1),
            v_shape=(1, 1),
            extra={"layers": 2},
        )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("dtype", "bfloat16", 'dtype: "float16" and "bfloat16"'),
        ("layers", 5, "layers: 4 and 5"),
        ("v_shape", [1, 8], "v_shape: [2, 8] and [1, 8]"),
        ("model", "other", 'model: "example/llama-tiny" and "other"'),
        ("tokenizer", True, "tokenizer: 1 and true"),
        ("adapter", None, "adapter: absent and null"),
    ],
)
def test_the_one_member_that_differs_is_named_with_both_values(
    name: str, value: object, says: str
) -> None:
    ours = Descriptor.from_json(members(tokenizer=1))
    theirs = Descriptor.from_json(members(**{"tokenizer": 1, name: value}))

    assert ours.differences(theirs) == (says,)
    assert ours.differences(ours) == ()
    assert len(theirs.differences(ours)) == 1


def test_a_difference_is_found_behind_a_long_common_beginning() -> None:
    ours = Descriptor.from_json(members(note="x" * 200 + "a"))
    theirs = Descriptor.from_json(members(note="x" * 200 + "b"))

    [difference] = ours.differences(theirs)

    assert difference.startswith("note: ")
    assert len(difference) < 200


def test_equal_descriptors_are_one_key_of_a_mapping() -> None:
    one = Descriptor.from_json(members(a=1, b=2))
    two = Descriptor.from_json(members(b=2, a=1))

    assert {one: "x"}[two] == "x"
    assert one != "something else"


@pytest.mark.parametrize("dtype", ELEMENT_OCTETS)
def test_every_element_type_is_accepted(dtype: str) -> None:
    assert Descriptor.from_json(members(dtype=dtype)).dtype == dtype


@given(st.binary(max_size=200) | TEXT)
def test_only_bad_descriptor_leaves_the_parser(text: bytes | str) -> None:
    with pytest.raises(BadDescriptor):
        Descriptor.from_json(text)


@given(st.sampled_from(list(members())), JSON_WITHOUT_FLOATS | st.floats() | st.binary(max_size=3))
def test_only_bad_descriptor_leaves_the_checks(name: str, value: object) -> None:
    try:
        descriptor = Descriptor.from_json(members(**{name: value}))
    except BadDescriptor:
        return
    assert descriptor.members()[name] == value


@pytest.mark.parametrize("value", [1.5, 1 << 60, "\ud800"], ids=["float", "integer", "text"])
def test_a_refusal_is_short_however_long_the_names_are_that_lead_to_it(value: object) -> None:
    extra: Any = value
    for _ in range(20):
        extra = {"n" * 2_000: extra}

    with pytest.raises(BadDescriptor) as caught:
        Descriptor.from_json(members(x=extra))

    assert len(str(caught.value)) < 500
