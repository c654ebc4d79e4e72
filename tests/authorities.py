"""An Authority that knows tokens by their octets, for tests of what asks it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from moqt.authority import Action, Bearer, Denial, Denied, Granted
from moqt.names import TrackNamespace
from moqt.wire.token import AuthorizationToken

SCOPE = TrackNamespace((b"kvcs-1", b"scope"))
EVERYTHING = frozenset(Action)


@dataclass
class Pass:
    """What one token allows."""

    actions: frozenset[Action] = EVERYTHING
    prefix: TrackNamespace = SCOPE
    expires_at: float | None = None
    check_every_s: float | None = None
    revoked: bool = False
    valid_from: float = 0.0


@dataclass
class Table:
    """An Authority: a table of tokens by value. Who shows none may do nothing."""

    passes: dict[bytes, Pass] = field(default_factory=dict)
    asked: list[tuple[Action, TrackNamespace | None, bytes | None]] = field(default_factory=list)
    bearers: list[Bearer] = field(default_factory=list)

    def decide(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        self.asked.append((action, namespace, track))
        self.bearers.append(bearer)
        worst = Denied(Denial.UNAUTHORIZED, "no token")
        for token in bearer.tokens:
            match self.passes.get(token.value):
                case None:
                    worst = Denied(Denial.MALFORMED, "not known")
                case Pass(revoked=True):
                    pass
                case Pass(valid_from=at) if now < at:
                    worst = Denied(Denial.UNAUTHORIZED, "too early", retry_after_s=at - now)
                case Pass(expires_at=float(at)) if now >= at:
                    worst = Denied(Denial.EXPIRED, "too late")
                case known if action not in known.actions:
                    pass
                case known if namespace is not None and not known.prefix.is_prefix_of(namespace):
                    pass
                case known:
                    every = known.check_every_s
                    return Granted(
                        "somebody", None if every is None else now + every, known.expires_at
                    )
        return worst


def token(value: bytes) -> AuthorizationToken:
    """Return a token to show."""
    return AuthorizationToken.use_value(1, value)


class Showing:
    """Shows tokens in SETUP; others, when ``values`` is changed."""

    def __init__(self, *values: bytes) -> None:
        self.values: Iterable[bytes] = values

    def __call__(self) -> list[AuthorizationToken]:
        return [token(value) for value in self.values]
