"""What may be discovered with permissions: the prefixes that a relay asks its upstream about."""

from collections.abc import Iterable

from kvcs.trust.grants import MatchKind, Permission
from moqt.authority import Action
from moqt.names import TrackNamespace


def discoverable(permissions: Iterable[Permission]) -> tuple[TrackNamespace, ...]:
    """Return the shortest prefixes that may be asked for with SUBSCRIBE_NAMESPACE.

    None of them is a prefix of another, which a session must not ask for at the same time.
    Permissions that name a field by its beginning or its end, or single Tracks, have none.
    """
    found = set()
    for permission in permissions:
        fields = permission.fields or ()
        if Action.SUBSCRIBE_NAMESPACE not in permission.actions:
            continue
        if permission.exact_length or permission.track is not None:
            continue
        if all(match.kind is MatchKind.EXACT for match in fields):
            found.add(TrackNamespace(tuple(match.octets for match in fields)))
    return tuple(
        prefix
        for prefix in sorted(found)
        if not any(other != prefix and other.is_prefix_of(prefix) for other in found)
    )
