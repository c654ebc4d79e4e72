"""Who may do what: what a publisher or a relay asks before it answers (MOQT, "Authorization").

How tokens travel is MOQT's; what they allow is not. So the sessions, the publisher and the relay
ask an :class:`Authority`, and know nothing of what is in a token. All of it is pure: the time is an
argument.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from moqt.names import TrackNamespace
from moqt.wire.token import AuthorizationToken


class Action(IntEnum):
    """What a peer wants to do; the numbers are those of tokens for MOQT (C4M, "actions")."""

    CLIENT_SETUP = 0
    SERVER_SETUP = 1
    PUBLISH_NAMESPACE = 2
    SUBSCRIBE_NAMESPACE = 3
    SUBSCRIBE = 4
    REQUEST_UPDATE = 5
    PUBLISH = 6
    FETCH = 7
    TRACK_STATUS = 8


class Denial(enum.Enum):
    """Why a peer may not, as far as it is told."""

    MALFORMED = "malformed"
    EXPIRED = "expired"
    UNAUTHORIZED = "unauthorized"


@dataclass(frozen=True, slots=True)
class Bearer:
    """What a peer shows of itself."""

    tokens: Sequence[AuthorizationToken] = ()
    """With values, aliases resolved: those of the request if it has any, else those of SETUP."""

    certificate: bytes | None = field(default=None, repr=False)
    """DER of the client's certificate, if there is one and its chain was verified."""

    address: str = ""
    """Host it comes from, for limits and logs."""


@dataclass(frozen=True, slots=True)
class Granted:
    """It may."""

    who: str = ""
    """Who is served, for limits and logs; empty where nobody is asked who they are."""

    check_at: float | None = None
    """Wall clock, in seconds, at which a thing that still runs must be asked about again."""

    expires_at: float | None = None
    """Wall clock, in seconds, at which a thing that still runs must end unless renewed."""

    token: str = ""
    """Which token it was, shortened, for logs: the first digits of its identifier."""


@dataclass(frozen=True, slots=True)
class Denied:
    """It may not."""

    why: Denial
    reason: str
    """For our own log; a peer is told the code alone."""

    retry_after_s: float | None = None
    """Only where waiting helps: a token that is not valid yet."""

    who: str = ""
    """Who was refused, for logs; empty where nothing that was shown is believed."""

    token: str = ""
    """As :attr:`Granted.token`."""


class Authority(Protocol):
    """Decides. One for each endpoint; asked before anything is looked up."""

    def decide(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        """Say whether the bearer may do this now.

        Args:
            action: What is asked for.
            namespace: The Track Namespace, or its prefix for PUBLISH_NAMESPACE and
                SUBSCRIBE_NAMESPACE; None for a SETUP.
            track: The Track Name, where one track is asked for.
            bearer: Who asks.
            now: Wall clock, in seconds.
        """
        ...


class Everyone:
    """Grants everything: an endpoint without tokens and client certificates."""

    def decide(
        self,
        action: Action,
        namespace: TrackNamespace | None,
        track: bytes | None,
        bearer: Bearer,
        now: float,
    ) -> Granted | Denied:
        """Say yes."""
        return Granted()
