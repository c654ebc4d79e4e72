"""Matching: what the vectors and the draft say of permissions, and what follows for all of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.trust.grants import (
    BadPermission,
    Match,
    MatchKind,
    Permission,
    Role,
    allows,
    permissions_from_cbor,
    permissions_of,
)
from moqt.authority import Action
from moqt.names import TrackNamespace
from tests.unit.kvcs.trust.vectors import ALL, valid

C4M = json.loads((Path(__file__).parents[3] / "vectors" / "c4m-matches.json").read_text())
SCOPE = bytes.fromhex(ALL["decisions"][1]["namespace"][1])
MODEL = bytes.fromhex(ALL["decisions"][-1]["namespace"][2])
GRANTS = {
    "consumer": permissions_of(Role.CONSUMER, [SCOPE]),
    "producer": permissions_of(Role.PRODUCER, [SCOPE]),
    "relay": permissions_of(Role.RELAY, [SCOPE]),
    "one model": permissions_of(Role.CONSUMER, [SCOPE], MODEL),
}


def claim_of(payload: bytes) -> object:
    return cbor2.loads(payload)[327]


def payload_of(token: bytes) -> bytes:
    payload: bytes = cbor2.loads(token).value.value[2]
    return payload


def draft_examples() -> Iterator[Any]:
    for case in C4M["cases"]:
        for number, (action, fields, track, expected) in enumerate(case["tests"]):
            name = f"{case['name']}-{number}"
            yield pytest.param(case["claims"], action, fields, track, expected, id=name)


@pytest.mark.parametrize(
    ("claims", "action", "fields", "track", "expected"), list(draft_examples())
)
def test_the_examples_of_the_draft_come_out_as_it_says(
    claims: str, action: int, fields: list[str], track: str, expected: bool
) -> None:
    permissions = permissions_from_cbor(claim_of(bytes.fromhex(claims)))

    found = allows(permissions, Action(action), TrackNamespace.of(*fields), track.encode())
    assert found is expected


def test_all_examples_of_the_draft_are_there() -> None:
    assert len(list(draft_examples())) == 19
    assert len(ALL["decisions"]) == 19


@pytest.mark.parametrize("case", ALL["decisions"], ids=lambda case: case["what"])
def test_what_our_roles_allow_is_what_the_vectors_say(case: dict[str, Any]) -> None:
    fields = case["namespace"]
    namespace = None if fields is None else TrackNamespace.of(*map(bytes.fromhex, fields))
    track = None if case["name"] is None else case["name"].encode()

    found = allows(GRANTS[case["token"]], Action(case["action"]), namespace, track)
    assert found is case["allowed"]


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("consumer, EdDSA", "consumer"),
        ("producer, EdDSA", "producer"),
        ("relay, EdDSA", "relay"),
        ("consumer of one model", "one model"),
    ],
)
def test_our_roles_are_written_as_in_the_tokens_of_the_vectors(token: str, name: str) -> None:
    claim = claim_of(payload_of(valid(token)))

    assert [permission.to_cbor() for permission in GRANTS[name]] == claim
    assert permissions_from_cbor(claim) == GRANTS[name]


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ([], "not an array of 1 to 64 scopes"),
        ({}, "not an array of 1 to 64 scopes"),
        ([[[4]]] * 65, "not an array of 1 to 64 scopes"),
        ([[]], "not an array of 1 to 3 elements"),
        ([[[4], [b"a"], b"t", b"u"]], "not an array of 1 to 3 elements"),
        ([{0: [4]}], "not an array of 1 to 3 elements"),
        ([[4]], "the actions are not an array of one"),
        ([[[]]], "the actions are not an array of one"),
        ([[[True]]], "an action is not an integer"),
        ([[[4.0]]], "an action is not an integer"),
        ([[["4"]]], "an action is not an integer"),
        ([[[4], b"a"]], "the namespace match is not an array"),
        ([[[4], None]], "the namespace match is not an array"),
        ([[[4], []]], "namespace match of 0 elements"),
        ([[[4], [b"a"] * 34]], "namespace match of 34 elements, expected 1 to 33"),
        ([[[4], [None, b"a"]]], "a match is neither"),
        ([[[4], [None, None]]], "a match is neither"),
        ([[[4], ["a"]]], "a match is neither"),
        ([[[4], [{0: b"a"}]]], "a match is neither"),
        ([[[4], [[0, b"a"]]]], "a match is neither"),
        ([[[4], [[3, b"a"]]]], "a match is neither"),
        ([[[4], [[True, b"a"]]]], "a match is neither"),
        ([[[4], [[1.0, b"a"]]]], "a match is neither"),
        ([[[4], [[1, "a"]]]], "a match is neither"),
        ([[[4], [[1, b"a", b"b"]]]], "a match is neither"),
        ([[[4], [b"a"], None]], "a match is neither"),
        ([[[4], [b"a"], "t"]], "a match is neither"),
    ],
)
def test_a_claim_that_is_not_of_the_draft_is_refused_whole(claim: Any, says: str) -> None:
    with pytest.raises(BadPermission, match=says):
        permissions_from_cbor(claim)
    if isinstance(claim, list) and 0 < len(claim) < 64:
        with pytest.raises(BadPermission):
            permissions_from_cbor([[[4]], *claim])


def test_actions_that_nobody_knows_are_ignored() -> None:
    [permission] = permissions_from_cbor([[[4, 9, -1, 2**64 - 1], [b"a"]]])

    assert permission.actions == {Action.SUBSCRIBE}
    [nothing] = permissions_from_cbor([[[99]]])
    assert not any(nothing.allows(action, TrackNamespace.of("a"), b"t") for action in Action)


@pytest.mark.parametrize(
    ("scopes", "model", "says"),
    [
        ([], None, "0 scopes, expected 1 to 63"),
        ([SCOPE] * 64, None, "64 scopes, expected 1 to 63"),
        ([SCOPE[:31]], None, "identifier of 31 octets, expected 32"),
        ([SCOPE], b"", "identifier of 0 octets, expected 32"),
    ],
)
def test_a_grant_that_cannot_be_written_is_refused(
    scopes: list[bytes], model: bytes | None, says: str
) -> None:
    with pytest.raises(BadPermission, match=says):
        permissions_of(Role.CONSUMER, scopes, model)


def test_tracks_are_matched_only_beside_namespaces() -> None:
    with pytest.raises(BadPermission, match="without one of namespaces"):
        Permission(frozenset(), None, track=Match(b"t"))


# -- what holds for all permissions ----------------------------------------------------------------

OCTETS = st.binary(min_size=1, max_size=2).map(lambda b: bytes(97 + o % 2 for o in b))
MATCHES = st.builds(Match, OCTETS, st.sampled_from(MatchKind))
NAMESPACES = st.builds(TrackNamespace, st.lists(OCTETS, max_size=4).map(tuple))
PERMISSIONS = st.builds(
    Permission,
    st.frozensets(st.sampled_from(Action), min_size=1),
    st.lists(MATCHES, min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.none() | MATCHES,
)
ACTIONS = st.sampled_from([action for action in Action if action > Action.SERVER_SETUP])


@given(st.lists(PERMISSIONS, min_size=1, max_size=4))
def test_permissions_come_back_as_they_were_written(permissions: list[Permission]) -> None:
    claim = [permission.to_cbor() for permission in permissions]

    assert permissions_from_cbor(cbor2.loads(cbor2.dumps(claim))) == tuple(permissions)


@given(PERMISSIONS, ACTIONS, NAMESPACES, NAMESPACES, OCTETS)
def test_who_may_ask_for_a_prefix_may_ask_for_all_that_is_below_it(
    permission: Permission,
    action: Action,
    prefix: TrackNamespace,
    rest: TrackNamespace,
    name: bytes,
) -> None:
    if permission.allows(action, prefix, None):
        assert permission.allows(action, prefix + rest, None)
        assert permission.allows(action, prefix + rest, name)


@given(PERMISSIONS, ACTIONS, NAMESPACES, OCTETS)
def test_nobody_may_ask_for_a_prefix_above_what_is_allowed(
    permission: Permission, action: Action, namespace: TrackNamespace, name: bytes
) -> None:
    assert permission.fields is not None
    if len(namespace.fields) < len(permission.fields):
        assert not permission.allows(action, namespace, None)
        assert not permission.allows(action, namespace, name)


@given(PERMISSIONS, ACTIONS, NAMESPACES, st.none() | OCTETS)
def test_an_action_that_is_not_listed_is_never_allowed(
    permission: Permission, action: Action, namespace: TrackNamespace, name: bytes | None
) -> None:
    if action not in permission.actions:
        assert not permission.allows(action, namespace, name)


@given(PERMISSIONS, ACTIONS, NAMESPACES, OCTETS)
def test_a_track_is_allowed_as_the_draft_says_in_its_own_words(
    permission: Permission, action: Action, namespace: TrackNamespace, name: bytes
) -> None:
    """The rule once more, as slowly and plainly as it can be said."""
    claim: list[Any] = permission.to_cbor()
    elements = claim[1]
    counted = elements[:-1] if elements[-1] is None else elements

    def fits(match: Any, octets: bytes) -> bool:
        if isinstance(match, bytes):
            return match == octets
        kind, part = match
        edge = octets[: len(part)] if kind == 1 else octets[max(len(octets) - len(part), 0) :]
        return bool(edge == part)

    expected = (
        int(action) in claim[0]
        and len(namespace.fields) >= len(counted)
        and (elements[-1] is not None or len(namespace.fields) == len(counted))
        and all(fits(match, namespace.fields[i]) for i, match in enumerate(counted))
        and (len(claim) < 3 or fits(claim[2], name))
    )

    assert permission.allows(action, namespace, name) is expected


@given(st.lists(PERMISSIONS, max_size=3), ACTIONS, NAMESPACES, st.none() | OCTETS)
def test_one_permission_that_allows_is_enough_and_none_allows_nothing(
    permissions: list[Permission], action: Action, namespace: TrackNamespace, name: bytes | None
) -> None:
    each = [permission.allows(action, namespace, name) for permission in permissions]

    assert allows(permissions, action, namespace, name) is (True in each)


@given(st.recursive(st.integers(-2, 9) | st.none() | OCTETS | st.booleans(), st.lists))
def test_only_bad_permission_leaves_the_reader_of_anything(claim: Any) -> None:
    try:
        permissions = permissions_from_cbor(claim)
    except BadPermission:
        return
    assert 1 <= len(permissions) <= 64
