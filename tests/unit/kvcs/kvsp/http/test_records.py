"""Holdings, questions and answers: what is written is read again, and nothing else is."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.kvsp.http.questions import (
    MAX_TOLD,
    BatchQuestion,
    Found,
    Lease,
    Longest,
    LookupQuestion,
    batches,
)
from kvcs.kvsp.http.records import (
    MAX_RUNS,
    BadRecord,
    Candidate,
    Holding,
    Runs,
    read_candidate,
    read_registration,
)
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.profile.naming import PublicationName

OCTETS, KEYS = 1 << 20, 100
URI = ServiceUri("https://host:8443")
MOQT = PublicationUri(
    "moqt://relay:4443/", PublicationName(b"s" * 32, b"c" * 32, b"a" * 32, b"p" * 16)
)
IDS = st.binary(min_size=32, max_size=32)
RUNS = st.sets(st.integers(0, 200)).map(Runs.of)
SOME_RUNS = RUNS.filter(len)
HOLDINGS = st.builds(
    Holding,
    uri=st.just(URI),
    keys=st.lists(IDS, min_size=1, max_size=8, unique=True).map(tuple),
    layers=RUNS,
    first_block=st.integers(0, 1 << 20),
    encodings=st.lists(st.sampled_from(["raw", "kv.raw", "shuffle-zstd"]), min_size=1).map(
        lambda found: tuple(dict.fromkeys(found))
    ),
    complete=st.booleans(),
    publication=st.none() | st.binary(min_size=16, max_size=16),
)
CANDIDATES = st.builds(
    Candidate,
    uri=st.sampled_from([URI, MOQT]),
    first_block=st.integers(0, 1 << 20),
    blocks=st.integers(0, 1 << 20),
    layers=RUNS,
    encodings=st.just(("raw",)),
    complete=st.booleans(),
    publication=st.none() | st.binary(min_size=16, max_size=16),
    expires_s=st.integers(0, 3_600_000).map(lambda ms: ms / 1000),
    covers=st.none() | st.integers(0, 1 << 20),
    following=st.none() | st.lists(IDS, max_size=3).map(tuple),
)


def members(**changed: Any) -> dict[str, Any]:
    holding = Holding(URI, (b"k" * 32, b"l" * 32), Runs(((0, 31),)))
    return holding.json(60.0) | changed


def registration(**changed: Any) -> bytes:
    found = {name: value for name, value in members(**changed).items() if value is not ...}
    return orjson.dumps(found)


# -- what is registered --------------------------------------------------------------------------


@given(HOLDINGS, st.integers(1, 3600))
def test_a_holding_is_read_as_it_was_written(holding: Holding, lease_s: int) -> None:
    text = orjson.dumps(holding.json(lease_s))

    assert read_registration(text, octets=OCTETS, max_keys=KEYS) == (holding, lease_s)


def test_a_publication_over_moqt_is_read_too() -> None:
    holding = Holding(MOQT, (b"k" * 32,), Runs(((0, 0), (2, 5))), encodings=("raw", "kv.raw"))

    text = orjson.dumps(holding.json(1.5))
    assert read_registration(text, octets=OCTETS, max_keys=KEYS) == (holding, 1.5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"uri": ...}, "member 'uri' is missing"),
        ({"more": 1}, "member 'more' is not known"),
        ({"uri": "http://host"}, "expected moqt:// or https://"),
        ({"uri": None}, "is no text"),
        ({"keys": []}, "0 keys, expected 1 to 100"),
        ({"keys": ["6b" * 32] * 101}, "101 keys"),
        ({"keys": ["6b" * 32] * 2}, "stands there twice"),
        ({"keys": "6b" * 32}, "keys are no list"),
        ({"keys": ["6b" * 31]}, "Block Key of 62 characters"),
        ({"keys": [7]}, "Block Key is no text"),
        ({"first_block": -1}, "first_block is -1, expected 0"),
        ({"first_block": 1 << 24}, "limit 16777216"),
        ({"first_block": True}, "first_block is no integer"),
        ({"first_block": 0.5}, "first_block is no integer"),
        ({"first_block": 1e300}, "limit 16777216|expected 0 to 16777216"),
        ({"first_block": "0"}, "first_block is no integer"),
        ({"layers": [[0, 1], [1, 2]]}, "layers 1 to 2 after 1"),
        ({"layers": [[2, 1]]}, "layers 2 to 1"),
        ({"layers": [[0, 65_535]]}, "below 65535"),
        ({"layers": [[0]]}, "not pairs"),
        ({"layers": [[0, True]]}, "layer is no integer"),
        ({"layers": [[0, 0.5]]}, "layer is no integer"),
        ({"layers": 3}, "layers are no list"),
        ({"layers": [[n, n] for n in range(0, 2 * MAX_RUNS + 2, 2)]}, "no list of at most 256"),
        ({"encodings": []}, "0 encodings"),
        ({"encodings": ["RAW"]}, "encoding 'RAW'"),
        ({"encodings": ["raw"] * 17}, "no list of at most 16"),
        ({"encodings": [1]}, "not all text"),
        ({"complete": 1}, "neither true nor false"),
        ({"publication": "70"}, "Publication ID of 2 characters"),
        ({"uri": str(MOQT), "publication": "70" * 16}, "names it already"),
        ({"lease_s": 0}, "lease of 0 seconds"),
        ({"lease_s": 1e9}, "lease of 1000000000.0 seconds"),
        ({"lease_s": "60"}, "no number of seconds"),
        ({"lease_s": True}, "no number of seconds"),
    ],
)
def test_what_is_no_holding_is_refused_and_says_why(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRecord, match=says):
        read_registration(registration(**changed), octets=OCTETS, max_keys=KEYS)


def test_a_number_without_a_fraction_is_an_integer_however_it_is_written() -> None:
    text = registration(first_block=3.0, layers=[[0.0, 1.0]])

    holding, _ = read_registration(text, octets=OCTETS, max_keys=KEYS)
    assert (holding.first_block, holding.layers) == (3, Runs(((0, 1),)))
    assert type(holding.first_block) is int


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not acceptable JSON"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"a":1,"a":2}', "occurs twice"),
        (b"[" * 100 + b"]" * 100, "nested deeper"),
        (b'{"lease_s":NaN}', "NaN is not JSON"),
        (b"\xff", "not acceptable JSON"),
        (b'{"keys":[' + b"1," * 5000 + b"1]}", "values, limit"),
        (b" " * (OCTETS + 1), "octets, limit"),
    ],
)
def test_what_is_no_such_json_is_refused_before_anything_is_built(text: bytes, says: str) -> None:
    with pytest.raises(BadRecord, match=says):
        read_registration(text, octets=OCTETS, max_keys=KEYS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
NAMES = st.sampled_from([*members(), "publication", "limit", "holders", "by_key", "candidates"])


@given(st.binary() | st.dictionaries(NAMES, JSON).map(lambda v: json.dumps(v).encode()))
def test_no_text_raises_anything_undocumented(text: bytes) -> None:
    for read in (
        lambda: read_registration(text, octets=OCTETS, max_keys=KEYS),
        lambda: BatchQuestion.parse(text, octets=OCTETS, max_keys=KEYS),
        lambda: LookupQuestion.parse(text, octets=OCTETS, max_keys=KEYS),
        lambda: Found.parse(text, octets=OCTETS, keys=1),
        lambda: Longest.parse(text, octets=OCTETS, keys=1),
        lambda: Lease.parse(text),
    ):
        try:
            read()
        except BadRecord:
            continue


@given(NAMES, JSON)
def test_no_member_of_another_kind_raises_anything_undocumented(name: str, value: Any) -> None:
    text = json.dumps(members() | {name: value}).encode()
    with contextlib.suppress(BadRecord):
        read_registration(text, octets=OCTETS, max_keys=KEYS)


# -- layers --------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 300)))
def test_runs_are_the_layers_they_were_made_of(layers: set[int]) -> None:
    runs = Runs.of(layers)

    assert list(runs) == sorted(layers)
    assert len(runs) == len(layers)
    assert Runs.parse(runs.json()) == runs
    assert all((layer in runs) == (layer in layers) for layer in range(302))
    # No two of them touch.
    assert all(a[1] + 1 < b[0] for a, b in zip(runs.runs, runs.runs[1:], strict=False))


def test_a_holder_may_have_no_layer_yet_and_a_question_asks_for_one_at_least() -> None:
    holding, _ = read_registration(registration(layers=[]), octets=OCTETS, max_keys=KEYS)

    assert holding.layers == Runs.of(()) == Runs(())
    text = orjson.dumps({"keys": ["6b" * 32], "layers": []})
    with pytest.raises(BadRecord, match="no layers, expected at least one run"):
        BatchQuestion.parse(text, octets=OCTETS, max_keys=KEYS)


def test_there_may_not_be_more_runs_than_one_record_has() -> None:
    assert len(Runs.of(range(0, 2 * MAX_RUNS, 2)).runs) == MAX_RUNS
    with pytest.raises(BadRecord, match="257 runs of layers, limit 256"):
        Runs.of(range(0, 2 * MAX_RUNS + 2, 2))


# -- questions and answers -----------------------------------------------------------------------


@given(
    st.lists(IDS, min_size=1, max_size=5),
    SOME_RUNS,
    st.none() | st.binary(min_size=16, max_size=16),
)
def test_a_question_for_many_blocks_is_read_as_it_was_written(
    keys: list[bytes], layers: Runs, publication: bytes | None
) -> None:
    asked = BatchQuestion(tuple(keys), layers, publication)

    assert BatchQuestion.parse(asked.body(), octets=OCTETS, max_keys=KEYS) == asked
    order = list(asked.order())
    assert len(order) == asked.sections
    assert order == sorted(order)
    assert {layer for layer, _ in order} == set(layers)


@given(
    st.sets(st.tuples(st.sampled_from([bytes([n]) * 32 for n in range(6)]), st.integers(0, 12))),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_whatever_is_wanted_is_asked_for_once_within_the_limits_and_nothing_else(
    wanted: set[tuple[bytes, int]], max_keys: int, max_sections: int
) -> None:
    asked = batches(wanted, max_keys=max_keys, max_sections=max_sections)

    places = [
        (one.keys[block], layer) for one in asked for layer, block in one.order()
    ]  # fmt: skip
    assert len(places) == len(set(places))
    assert set(places) == wanted
    assert all(len(one.keys) <= max_keys and one.sections <= max_sections for one in asked)
    firsts = [min(one.layers) for one in asked]
    assert firsts == sorted(firsts)


def test_layers_of_which_the_same_blocks_are_wanted_share_a_question() -> None:
    keys = [bytes([n]) * 32 for n in range(3)]
    asked = batches([*((k, n) for n in (5, 4, 0, 9) for k in keys), (keys[0], 7)])

    assert [(one.keys, one.layers.runs) for one in asked] == [
        (tuple(keys), ((0, 0), (4, 5))),
        (tuple(keys[:1]), ((7, 7),)),
        (tuple(keys), ((9, 9),)),
    ]
    many = batches([(keys[0], layer) for layer in range(0, 4 * MAX_RUNS, 2)])
    assert [len(one.layers.runs) for one in many] == [MAX_RUNS] * 2
    assert batches([]) == []


@given(st.lists(IDS, min_size=1, max_size=5), st.integers(1, MAX_TOLD), st.booleans())
def test_a_question_for_holders_is_read_as_it_was_written(
    keys: list[bytes], limit: int, following: bool
) -> None:
    asked = LookupQuestion(tuple(keys), limit, following)

    assert LookupQuestion.parse(asked.body(), octets=OCTETS, max_keys=KEYS) == asked


@pytest.mark.parametrize("limit", [0, MAX_TOLD + 1, -1, True, "1", 1.5, None])
def test_nobody_is_told_more_than_may_be_told(limit: object) -> None:
    text = orjson.dumps({"keys": ["6b" * 32], "limit": limit})

    with pytest.raises(BadRecord, match=r"limit is (no integer|-?[0-9]+, expected 1 to 64)"):
        LookupQuestion.parse(text, octets=OCTETS, max_keys=KEYS)


@given(CANDIDATES)
def test_a_candidate_is_read_as_it_was_written(candidate: Candidate) -> None:
    assert read_candidate(orjson.loads(orjson.dumps(candidate.json()))) == candidate


@given(st.lists(CANDIDATES, max_size=4), st.data())
def test_what_was_found_is_read_as_it_was_written(
    holders: list[Candidate], data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(0, len(holders) - 1)) if holders else st.just([])
    by_key = data.draw(st.lists(numbers.map(tuple), min_size=1, max_size=4))
    found = Found(tuple(holders), tuple(by_key))

    assert Found.parse(found.body(), octets=OCTETS, keys=len(by_key)) == found
    assert [len(found.of(n)) for n in range(len(by_key))] == [len(n) for n in by_key]
    with pytest.raises(BadRecord, match="by_key is no list of"):
        Found.parse(found.body(), octets=OCTETS, keys=len(by_key) + 1)


@given(st.lists(CANDIDATES, max_size=4), st.integers(1, 50))
def test_who_covers_most_is_read_as_it_was_written(holders: list[Candidate], keys: int) -> None:
    longest = Longest(tuple(replace(one, covers=1 + n % keys) for n, one in enumerate(holders)))

    assert Longest.parse(longest.body(), octets=OCTETS, keys=keys) == longest


@pytest.mark.parametrize("covers", [0, 6, None])
def test_who_covers_more_than_was_asked_about_is_not_believed(covers: int | None) -> None:
    one = Candidate(URI, 0, 9, Runs(((0, 1),)), ("raw",), True, None, 1.0, covers)

    with pytest.raises(BadRecord, match="expected 1 to 5"):
        Longest.parse(Longest((one,)).body(), octets=OCTETS, keys=5)


def test_an_index_that_contradicts_itself_is_not_believed() -> None:
    with pytest.raises(BadRecord, match="what the candidates cover"):
        Longest.parse(b'{"blocks":3,"candidates":[]}', octets=OCTETS, keys=5)
    with pytest.raises(BadRecord, match="no index of a holder"):
        Found.parse(b'{"holders":[],"by_key":[[0]]}', octets=OCTETS, keys=1)


def test_a_window_counts_for_no_beginning() -> None:
    window = Candidate(URI, 3, 9, Runs(((0, 1),)), ("raw",), True, None, 1.0, 5)

    assert Longest((window,)).blocks == 0
    assert Longest((window, replace(window, first_block=0, covers=2))).blocks == 2


def test_a_lease_is_read_as_it_was_written() -> None:
    assert Lease.parse(Lease(12.5).body()) == Lease(12.5)
