"""What may be done where: permissions, as tokens for MOQT carry them (C4M, "moqt claim").

A permission names actions, and where they are allowed: fields that a Track Namespace must begin
with, and what the Track Name must be. Nothing is allowed by default. All of it is pure, and none of
it knows where a permission came from: a token, or a client's certificate.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, Self

from kvcs.kvsp.keys import ID_OCTETS
from kvcs.profile.naming import PROFILE
from moqt.authority import Action
from moqt.names import MAX_FIELDS, TrackNamespace

MAX_PERMISSIONS: Final = 64
#: With the nil that may end it, a match may be one longer than a namespace.
MAX_FIELD_MATCHES: Final = MAX_FIELDS + 1

_ACTIONS: Final = frozenset(Action)
#: Actions on a session, of which no namespace is looked at.
SETUPS: Final = frozenset({Action.CLIENT_SETUP, Action.SERVER_SETUP})


class BadPermission(ValueError):
    """A permission, or a list of them, is none; the text says what was found."""


class MatchKind(IntEnum):
    """How octets are compared (C4M, "moqt claim"). Zero stands for octets that are just there."""

    EXACT = 0
    PREFIX = 1
    SUFFIX = 2


@dataclass(frozen=True, slots=True)
class Match:
    """What one field of a namespace, or a Track Name, is compared with, octet by octet."""

    octets: bytes
    kind: MatchKind = MatchKind.EXACT

    def fits(self, octets: bytes) -> bool:
        """Say whether these octets are meant."""
        match self.kind:
            case MatchKind.PREFIX:
                return octets.startswith(self.octets)
            case MatchKind.SUFFIX:
                return octets.endswith(self.octets)
        return octets == self.octets

    @classmethod
    def from_cbor(cls, value: object) -> Self:
        """Read ``bstr``, ``[1, bstr]`` or ``[2, bstr]``.

        Raises:
            BadPermission: If it is anything else.
        """
        if isinstance(value, bytes):
            return cls(value)
        if isinstance(value, list) and len(value) == 2:
            kind, octets = value
            if type(kind) is int and kind in (1, 2) and isinstance(octets, bytes):
                return cls(octets, MatchKind(kind))
        raise BadPermission("a match is neither octets, nor [1, octets], nor [2, octets]")

    def to_cbor(self) -> object:
        """Return what :meth:`from_cbor` reads."""
        return self.octets if self.kind is MatchKind.EXACT else [int(self.kind), self.octets]


@dataclass(frozen=True, slots=True)
class Permission:
    """One scope of the claim: actions, and where they are allowed.

    Raises:
        BadPermission: If there are no fields to match, or too many.
    """

    actions: frozenset[Action]
    """Those that are known; others do nothing."""

    fields: tuple[Match, ...] | None = None
    """For the first fields of a namespace; None: any namespace."""

    exact_length: bool = False
    """Whether the namespace must have no more fields: a nil at the end."""

    track: Match | None = None
    """For the Track Name; None: any track."""

    def __post_init__(self) -> None:
        if self.fields is None:
            if self.exact_length or self.track is not None:
                raise BadPermission("a match of tracks without one of namespaces")
            return
        elements = len(self.fields) + self.exact_length
        if not 1 <= elements <= MAX_FIELD_MATCHES:
            found = f"namespace match of {elements} elements"
            raise BadPermission(f"{found}, expected 1 to {MAX_FIELD_MATCHES}")

    @classmethod
    def from_cbor(cls, value: object) -> Self:
        """Read ``[actions, ? namespace match, ? track match]``.

        Raises:
            BadPermission: If it is anything else. A token with such a thing in it is refused as a
                whole: what could not be read might have been a limit.
        """
        if not isinstance(value, list) or not 1 <= len(value) <= 3:
            raise BadPermission("a scope is not an array of 1 to 3 elements")
        actions, *where = value
        if not isinstance(actions, list) or not actions:
            raise BadPermission("the actions are not an array of one at least")
        if not all(type(action) is int for action in actions):
            raise BadPermission("an action is not an integer")
        known = frozenset(Action(action) for action in actions if action in _ACTIONS)
        if not where:
            return cls(known)
        elements, *tracks = where
        if not isinstance(elements, list):
            raise BadPermission("the namespace match is not an array")
        if len(elements) > MAX_FIELD_MATCHES:  # before anything is made of them
            found = f"namespace match of {len(elements)} elements"
            raise BadPermission(f"{found}, expected 1 to {MAX_FIELD_MATCHES}")
        exact_length = bool(elements) and elements[-1] is None
        fields = elements[:-1] if exact_length else elements
        return cls(
            known,
            tuple(Match.from_cbor(element) for element in fields),
            exact_length,
            Match.from_cbor(tracks[0]) if tracks else None,
        )

    def to_cbor(self) -> list[object]:
        """Return what :meth:`from_cbor` reads."""
        value: list[object] = [sorted(int(action) for action in self.actions)]
        if self.fields is not None:
            end = [None] if self.exact_length else []
            value.append([*(field.to_cbor() for field in self.fields), *end])
        if self.track is not None:
            value.append(self.track.to_cbor())
        return value

    def allows(self, action: Action, namespace: TrackNamespace | None, track: bytes | None) -> bool:
        """See :func:`allows`, of which this is the rule for one permission."""
        if action not in self.actions:
            return False
        if action in SETUPS:
            return True
        if namespace is None:
            return False
        if self.fields is None:
            return True
        return self._fits(namespace.fields, self.fields, track)

    def _fits(self, fields: Sequence[bytes], matches: Sequence[Match], track: bytes | None) -> bool:
        if len(fields) < len(matches):
            return False
        if track is None:
            # A prefix stands for all that is below it, which must be allowed as a whole.
            if self.exact_length or self.track is not None:
                return False
        else:
            if self.exact_length and len(fields) != len(matches):
                return False
            if self.track is not None and not self.track.fits(track):
                return False
        return all(match.fits(field) for match, field in zip(matches, fields, strict=False))


def allows(
    permissions: Iterable[Permission],
    action: Action,
    namespace: TrackNamespace | None,
    track: bytes | None,
) -> bool:
    """Say whether one of several permissions allows an action.

    Args:
        permissions: Of which one that allows is enough.
        action: What is asked for.
        namespace: The namespace of one track, or the prefix that is asked for. None for a SETUP,
            of which namespaces are not looked at.
        track: The Track Name. None: a prefix is asked for, so that all below it must be allowed;
            a permission for one length of namespace, or for some tracks, is none for a prefix.
    """
    return any(permission.allows(action, namespace, track) for permission in permissions)


def permissions_from_cbor(value: object) -> tuple[Permission, ...]:
    """Read the claim: 1 to 64 scopes.

    Raises:
        BadPermission: If it is anything else.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PERMISSIONS:
        raise BadPermission(f"not an array of 1 to {MAX_PERMISSIONS} scopes")
    return tuple(Permission.from_cbor(scope) for scope in value)


class Role(StrEnum):
    """What a grant is for; each stands for some actions."""

    #: Discovers and retrieves publications.
    CONSUMER = "consumer"
    #: Announces and publishes them.
    PRODUCER = "producer"
    #: A relay towards its upstream, or a store: all of that.
    RELAY = "relay"


_CONSUMER_ACTIONS: Final = frozenset(
    {
        Action.SUBSCRIBE_NAMESPACE,
        Action.SUBSCRIBE,
        Action.REQUEST_UPDATE,
        Action.FETCH,
        Action.TRACK_STATUS,
    }
)
_PRODUCER_ACTIONS: Final = frozenset(
    {Action.PUBLISH_NAMESPACE, Action.REQUEST_UPDATE, Action.PUBLISH}
)
ROLE_ACTIONS: Final = {
    Role.CONSUMER: _CONSUMER_ACTIONS,
    Role.PRODUCER: _PRODUCER_ACTIONS,
    Role.RELAY: _CONSUMER_ACTIONS | _PRODUCER_ACTIONS,
}
#: Seconds that a grant may last at most, by default of who issues it.
ROLE_LIFETIMES_S: Final = {Role.CONSUMER: 3600, Role.PRODUCER: 86_400, Role.RELAY: 86_400}


def permissions_of(
    role: Role, scope_ids: Iterable[bytes], compatibility_id: bytes | None = None
) -> tuple[Permission, ...]:
    """Return what a role may do in some scopes: all of it under (``kvcs-1``, Scope ID).

    Args:
        role: What it is for.
        scope_ids: The scopes, 32 octets each.
        compatibility_id: Of the one model that it is good for; None: every model.

    Raises:
        BadPermission: If there is no scope, or an identifier does not have 32 octets.
    """
    below = () if compatibility_id is None else (compatibility_id,)
    listed = tuple(scope_ids)
    if not 1 <= len(listed) < MAX_PERMISSIONS:
        raise BadPermission(f"{len(listed)} scopes, expected 1 to {MAX_PERMISSIONS - 1}")
    for octets in (*listed, *below):
        if len(octets) != ID_OCTETS:
            raise BadPermission(f"identifier of {len(octets)} octets, expected {ID_OCTETS}")
    setup = Permission(frozenset({Action.CLIENT_SETUP}))
    scopes = [
        Permission(
            ROLE_ACTIONS[role], tuple(Match(octets) for octets in (PROFILE, scope_id, *below))
        )
        for scope_id in listed
    ]
    return (setup, *scopes)
