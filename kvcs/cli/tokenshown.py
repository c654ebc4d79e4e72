"""What ``kvcs token`` prints of a token: for people, and as JSON."""

import datetime
from typing import Any

from kvcs.kvsp.keys import ID_OCTETS
from kvcs.trust.claims import Claims
from kvcs.trust.grants import SETUPS, Match, MatchKind, Permission
from kvcs.trust.issuers import shown_kid
from kvcs.trust.tokens import UnverifiedToken


def described(token: UnverifiedToken) -> dict[str, Any]:
    """Return everything but the signature, by the names that ``--json`` prints."""
    claims = token.claims
    return {
        "kid": shown_kid(token.kid),
        "algorithm": token.algorithm.name,
        "issuer": claims.issuer,
        "subject": claims.subject or None,
        "audience": list(claims.audience),
        "issued_at": claims.issued_at,
        "not_before": claims.not_before,
        "expires_at": claims.expires_at,
        "token_id": claims.token_id.hex() or None,
        "bound_to": None if claims.thumbprint is None else claims.thumbprint.hex(),
        "revalidate_s": claims.revalidate_s,
        "permissions": [_permission(permission) for permission in claims.permissions],
    }


def lines_of(token: UnverifiedToken, now: float) -> list[str]:
    """Return the same in words, a line each."""
    claims = token.claims
    rows = [
        ("issuer", claims.issuer),
        ("subject", claims.subject or "nobody is named"),
        ("for", ", ".join(map(_printable, claims.audience))),
        ("signed by", f"{shown_kid(token.kid)} ({token.algorithm.name})"),
        ("identifier", claims.token_id.hex() or "none: it cannot be revoked alone"),
        ("issued", _time(claims.issued_at, now)),
        ("valid from", _time(claims.not_before, now)),
        ("expires", _time(claims.expires_at, now)),
        ("checked again", _revalidation(claims)),
        ("bound to", _binding(claims)),
    ]
    allowed = [_in_words(permission) for permission in claims.permissions]
    rows += [("allows", text) for text in allowed or ["nothing: there is no claim of MOQT"]]
    return [f"{label:<15}{text}" for label, text in rows if text]


def _permission(permission: Permission) -> dict[str, Any]:
    fields = permission.fields
    return {
        "actions": [action.name for action in sorted(permission.actions)],
        "namespace": None if fields is None else [_match(match) for match in fields],
        "exact_length": permission.exact_length,
        "track": None if permission.track is None else _match(permission.track),
    }


def _match(match: Match) -> dict[str, str]:
    return {"match": match.kind.name.lower(), "octets": match.octets.hex()}


def _in_words(permission: Permission) -> str:
    actions = ", ".join(action.name for action in sorted(permission.actions)) or "no known action"
    if permission.actions <= SETUPS:
        return actions
    if permission.fields is None:
        return f"{actions} anywhere"
    fields = [_match_in_words(match) for match in permission.fields]
    where = "/".join(fields if permission.exact_length else [*fields, "..."])
    track = "" if permission.track is None else f", track {_match_in_words(permission.track)}"
    return f"{actions} in {where}{track}"


def _match_in_words(match: Match) -> str:
    octets = match.octets
    is_text = octets.isascii() and octets.decode("ascii").isprintable() and len(octets) < ID_OCTETS
    text = octets.decode("ascii") if is_text else octets.hex()
    match match.kind:
        case MatchKind.PREFIX:
            return f"{text}*"
        case MatchKind.SUFFIX:
            return f"*{text}"
    return text


def _revalidation(claims: Claims) -> str:
    if not claims.revalidate_s:
        return "never: what it allowed may outlive it"
    return f"at least every {claims.revalidate_s:g} s"


def _binding(claims: Claims) -> str:
    if claims.thumbprint is None:
        return "nobody: whoever has it can use it"
    return f"the client certificate of the key {claims.thumbprint.hex()}"


def _time(seconds: float | None, now: float) -> str:
    if seconds is None:
        return ""
    try:
        shown = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"
    away = abs(seconds - now)
    unit, name = next(
        (size, text) for size, text in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"), (0, "s"))
        if away >= size
    )  # fmt: skip
    distance = f"{away / (unit or 1):.0f} {name}"
    when = f"in {distance}" if seconds > now else f"{distance} ago"
    return f"{shown:%Y-%m-%dT%H:%M:%SZ} ({when})"


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)
