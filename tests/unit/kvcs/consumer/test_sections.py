"""What a block service is asked for, and what is believed of it."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import pytest

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.sections import Found, Section, SectionKey, check_section, wanted_sections
from kvcs.consumer.selection import Wish
from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.layout import Component
from kvcs.profile.naming import DataTrack
from tests.unit.kvcs.consumer.recovering import BLOCKS, KEYS, LAYERS, content
from tests.unit.kvcs.consumer.test_joining import LIVE, ONE, PART, SAME, assembler, begun

#: Nothing of it is listed, and it is not deterministic.
UNLISTED = replace(ONE, listed=0)


def section(
    run: str, layer: int, block: int, *, layer_digest: bytes | None = None
) -> tuple[Section, bytes, bytes]:
    k, v = (content(run, (c, layer, block)) for c in (Component.K, Component.V))
    key = SectionKey(KEYS[block], layer)
    return Section(key=key, k=k, v=v, layer_digest=layer_digest), k, v


def asked(subject: Assembler, *, deterministic: bool = False) -> list[tuple[int, int]]:
    wanted = wanted_sections(subject, KEYS, deterministic=deterministic)
    return [(key.layer, KEYS.index(key.block_key)) for key in wanted]


def test_what_is_missing_and_listed_is_asked_for_the_lowest_layers_first() -> None:
    assert asked(begun(ONE, PART)) == [(0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


def test_one_half_that_is_missing_is_asked_for_and_the_other_one_is_not_taken() -> None:
    subject = begun(ONE, PART)
    k0 = DataTrack(Component.K, "raw", 0)
    assert subject.admit(k0, 1, 1, sha256(content(ONE.run, (Component.K, 1, 1))).digest(), 32)

    wanted = wanted_sections(subject, KEYS, deterministic=False)

    assert [str(place.track) for place in wanted[SectionKey(KEYS[1], 1)]] == ["v.raw.s0"]


@pytest.mark.parametrize(
    ("of", "deterministic", "taken"),
    [
        pytest.param(UNLISTED, False, False, id="neither"),
        pytest.param(UNLISTED, True, False, id="the service"),
        pytest.param(LIVE, False, False, id="the publication"),
        pytest.param(LIVE, True, True, id="both"),
    ],
)
def test_what_nobody_lists_is_another_publications_unless_both_are_deterministic(
    of: object, deterministic: bool, taken: bool
) -> None:
    assert of in (UNLISTED, LIVE)
    publication = UNLISTED if of == UNLISTED else LIVE

    assert bool(asked(begun(publication, PART), deterministic=deterministic)) is taken


def test_layers_that_the_manifest_does_not_list_yet_are_not_asked_for() -> None:
    assert asked(begun(replace(ONE, listed=1), [])) == [(0, block) for block in range(BLOCKS)]


def test_a_block_whose_key_is_not_known_is_not_asked_for() -> None:
    wanted = wanted_sections(begun(ONE, PART), KEYS[:3], deterministic=False)

    assert [(key.layer, key.block_key) for key in wanted] == [
        (0, KEYS[2]), (1, KEYS[1]), (1, KEYS[2]),
    ]  # fmt: skip


def test_a_part_is_asked_for_without_the_rest() -> None:
    subject = assembler(ONE, wish=Wish(layers=range(1, LAYERS), blocks=range(1, 3)))
    subject.accept(ONE.manifest(0), 0)

    assert asked(subject) == [(1, 1), (1, 2)]


# -- what comes ----------------------------------------------------------------------------------


def checked(subject: Assembler, what: Section) -> Sequence[object]:
    wanted = wanted_sections(subject, KEYS, deterministic=True)
    return check_section(what, wanted[what.key], subject)


def test_a_section_that_is_what_the_manifest_lists_is_the_data_of_its_objects() -> None:
    good, k, v = section(ONE.run, 1, 1)

    found = checked(begun(ONE, PART), good)

    assert all(isinstance(one, Found) for one in found)
    assert {(str(one.place.track), one.place.layer, one.place.block) for one in found} == {  # type: ignore[attr-defined]
        ("k.raw.s0", 1, 1),
        ("v.raw.s0", 1, 1),
    }
    assert [one.data for one in found] == [k, v]  # type: ignore[attr-defined]
    assert [one.digest for one in found] == [sha256(k).digest(), sha256(v).digest()]  # type: ignore[attr-defined]


def test_a_half_that_is_another_one_is_refused_and_the_other_half_is_not() -> None:
    good, k, _ = section(ONE.run, 1, 1)
    half = replace(good, v=bytes(32))

    first, second = checked(begun(ONE, PART), half)

    assert isinstance(first, Found)
    assert first.data == k
    assert isinstance(second, tuple)
    assert isinstance(second[1], BadObject)
    assert second[1].reason is Rejection.DIGEST
    assert "the section has the digest" in str(second[1])


def test_a_layer_digest_that_does_not_fit_refuses_both() -> None:
    wrong, _, _ = section(ONE.run, 1, 1, layer_digest=bytes(32))

    assert [one[1].reason for one in checked(begun(ONE, PART), wrong)] == [  # type: ignore[index]
        Rejection.DIGEST,
        Rejection.DIGEST,
    ]


def test_a_layer_digest_that_fits_is_enough_where_nothing_is_listed() -> None:
    _, k, v = section(SAME.run, 1, 1)
    good, _, _ = section(SAME.run, 1, 1, layer_digest=sha256(k + v).digest())

    assert [type(one) for one in checked(begun(LIVE, PART), good)] == [Found, Found]


@pytest.mark.parametrize(("name", "octets"), [("k", 31), ("v", 33), ("k", 0)])
def test_a_section_of_another_length_is_refused(name: str, octets: int) -> None:
    good, _, _ = section(ONE.run, 1, 1)
    wrong = replace(good, k=bytes(octets)) if name == "k" else replace(good, v=bytes(octets))

    for one in checked(begun(ONE, PART), wrong):
        assert isinstance(one, tuple)
        assert isinstance(one[1], BadObject)
        assert one[1].reason is Rejection.DATA_LENGTH
        assert str(one[1]) == f"{name.upper()} section of {octets} octets, expected 32"
