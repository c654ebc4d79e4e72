from kvcs.trust.grants import Match, MatchKind, Permission, Role, permissions_of
from kvcs.trust.prefixes import discoverable
from moqt.authority import Action
from moqt.names import TrackNamespace

DISCOVER = frozenset({Action.SUBSCRIBE_NAMESPACE})
ONE, OTHER = bytes(32), bytes([1] * 32)


def test_a_role_may_discover_its_scopes() -> None:
    assert discoverable(permissions_of(Role.RELAY, [ONE, OTHER])) == (
        TrackNamespace((b"kvcs-1", ONE)),
        TrackNamespace((b"kvcs-1", OTHER)),
    )
    assert discoverable(permissions_of(Role.PRODUCER, [ONE])) == ()


def test_no_prefix_is_one_of_another() -> None:
    permissions = [
        Permission(DISCOVER, (Match(b"a"), Match(b"b"))),
        Permission(DISCOVER, (Match(b"a"),)),
        Permission(DISCOVER, (Match(b"b"), Match(b"b"))),
    ]
    assert discoverable(permissions) == (
        TrackNamespace((b"a",)),
        TrackNamespace((b"b", b"b")),
    )
    assert discoverable([*permissions, Permission(DISCOVER)]) == (TrackNamespace(),)


def test_what_is_no_prefix_is_left_out() -> None:
    for permission in (
        Permission(DISCOVER, (Match(b"a", MatchKind.PREFIX),)),
        Permission(DISCOVER, (Match(b"a"),), exact_length=True),
        Permission(DISCOVER, (Match(b"a"),), track=Match(b"t")),
        Permission(frozenset({Action.SUBSCRIBE}), (Match(b"a"),)),
    ):
        assert discoverable([permission]) == ()
