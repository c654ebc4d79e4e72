"""What a peer may do: asked at every request, and again while what was granted goes on.

(MOQT, "Authorization"; what an Authority is asked stands in :mod:`moqt.authority`.) Every request
of the peer comes by here before the application hears of it, so no handler can forget to ask, and
what is refused is refused before anything is looked up. Pure: the wall clock is handed in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from moqt.authority import Action, Authority, Bearer, Denial, Denied, Everyone, Granted
from moqt.codepoints import MessageType as M
from moqt.codepoints import PublishDoneCode, RequestErrorCode, SessionErrorCode, StreamErrorCode
from moqt.limits import peer_of
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import AccessDecided, RequestId
from moqt.wire.token import AuthorizationToken

#: What each request needs; all of it, on the same names. SUBSCRIBE_TRACKS has no action of its own.
NEEDED: Final[Mapping[M, tuple[Action, ...]]] = {
    M.SUBSCRIBE: (Action.SUBSCRIBE,),
    M.FETCH: (Action.FETCH,),
    M.TRACK_STATUS: (Action.TRACK_STATUS,),
    M.PUBLISH: (Action.PUBLISH,),
    M.PUBLISH_NAMESPACE: (Action.PUBLISH_NAMESPACE,),
    M.SUBSCRIBE_NAMESPACE: (Action.SUBSCRIBE_NAMESPACE,),
    M.SUBSCRIBE_TRACKS: (Action.SUBSCRIBE_NAMESPACE, Action.SUBSCRIBE),
}
#: How each refusal is told: on a request, and when it is the SETUP that is refused.
REQUEST_CODES: Final[Mapping[Denial, RequestErrorCode]] = {
    Denial.MALFORMED: RequestErrorCode.MALFORMED_AUTH_TOKEN,
    Denial.EXPIRED: RequestErrorCode.EXPIRED_AUTH_TOKEN,
    Denial.UNAUTHORIZED: RequestErrorCode.UNAUTHORIZED,
}
SESSION_CODES: Final[Mapping[Denial, SessionErrorCode]] = {
    Denial.MALFORMED: SessionErrorCode.MALFORMED_AUTH_TOKEN,
    Denial.EXPIRED: SessionErrorCode.EXPIRED_AUTH_TOKEN,
    Denial.UNAUTHORIZED: SessionErrorCode.UNAUTHORIZED,
}
#: Seconds ahead of the end of a session's token at which the peer is asked to leave, so that it
#: can have another session with a fresh one by then; half of the time left, if that is less.
FAREWELL_S: Final = 10.0
#: Seconds from GOAWAY to the end of a session whose token was revoked.
REVOKED_S: Final = 1.0
#: Seconds after which the wall clock is looked at again in any case: it may be set.
_LOOK_S: Final = 30.0
#: Requests that are asked about in one look, so that others are served in between.
_AT_ONCE: Final = 256
#: Seconds between two looks at least, whatever an Authority says.
_SOONEST_S: Final = 0.05


def done_code(why: Denial) -> PublishDoneCode:
    """Return what PUBLISH_DONE says of a subscription that lost its right."""
    expired = why is Denial.EXPIRED
    return PublishDoneCode.EXPIRED if expired else PublishDoneCode.UNAUTHORIZED


def stream_code(why: Denial) -> StreamErrorCode:
    """Return what the streams of a request that lost its right are reset with."""
    expired = why is Denial.EXPIRED
    return StreamErrorCode.EXPIRED_AUTH_TOKEN if expired else StreamErrorCode.CANCELLED


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about one request: each of the actions, on the same names."""

    actions: tuple[Action, ...]
    namespace: TrackNamespace | None
    """None: of the session as a whole."""

    track: bytes | None = None
    """None: ``namespace`` is a prefix."""

    @classmethod
    def about(cls, kind: M, names: FullTrackName | TrackNamespace) -> "Question":
        """Return the question about a request of ``kind``, for a Track or a prefix."""
        if isinstance(names, FullTrackName):
            return cls(NEEDED[kind], names.namespace, names.name)
        return cls(NEEDED[kind], names)


@dataclass(frozen=True, slots=True)
class Permit:
    """What was granted and goes on. Times are of the wall clock, in seconds."""

    question: Question
    tokens: tuple[AuthorizationToken, ...]
    """The request's own; empty: those of SETUP count."""

    check_at: float | None
    expires_at: float | None
    granted_at: float
    granted: Granted
    """What was said: of several actions, of the last."""

    @property
    def who(self) -> str:
        """Whom it was granted to, for limits; empty where nobody is asked who they are."""
        return self.granted.who

    @property
    def due_at(self) -> float | None:
        """When it must be asked about again; None: never."""
        due = [at for at in (self.check_at, self.expires_at) if at is not None]
        return min(due, default=None)

    def is_due(self, now: float) -> bool:
        """Whether it is time to ask."""
        due_at = self.due_at
        return due_at is not None and due_at <= now

    @property
    def farewell_at(self) -> float | None:
        """When a session with this permit is to be left; None: never."""
        if self.expires_at is None:
            return None
        return self.expires_at - min(FAREWELL_S, (self.expires_at - self.granted_at) / 2)


@dataclass(frozen=True, slots=True)
class Lost:
    """What may not go on."""

    requests: tuple[tuple[RequestId, Denial], ...]
    farewell: tuple[float, Denial] | None
    """In how many seconds the session must end, and why; told once."""


class Guard:
    """Asks an Authority for one session, and remembers what goes on by its leave.

    Args:
        authority: Whom to ask; None: nobody, everything is allowed.
        wall_clock: Seconds since the epoch.
        set_timer: Called with the seconds until :meth:`look` is to be called.
        tell: Called with each decision of the authority.
    """

    def __init__(
        self,
        authority: Authority | None,
        wall_clock: Callable[[], float],
        set_timer: Callable[[float], None],
        tell: Callable[[AccessDecided], None] = lambda event: None,
    ) -> None:
        self.address = ""
        self.certificate: bytes | None = None
        self._authority = authority or Everyone()
        self._tell = tell if authority is not None else None
        self._now = wall_clock
        self._set_timer = set_timer
        self._timer_at: float | None = None
        self._session_tokens: tuple[AuthorizationToken, ...] = ()
        self._session: Permit | None = None
        self._who = ""
        self._permits: dict[RequestId, Permit] = {}

    @property
    def session_tokens(self) -> tuple[AuthorizationToken, ...]:
        """What the peer showed in SETUP, with values."""
        return self._session_tokens

    # -- what comes ------------------------------------------------------------------------------

    def setup(self, tokens: tuple[AuthorizationToken, ...], *, asked: bool) -> Denied | None:
        """Take the tokens of the peer's SETUP; return why it is refused, if it is.

        ``asked`` is False for a server's SETUP: that one has proved itself by its certificate.
        """
        self._session_tokens = tokens
        if not asked:
            return None
        answer = self._ask_and_tell(Question((Action.CLIENT_SETUP,), None), ())
        if isinstance(answer, Permit):
            self._session, self._who = answer, answer.who
            self._until(_earlier(answer.due_at, answer.farewell_at))
            return None
        return answer

    def admit(
        self, request_id: RequestId, question: Question, tokens: tuple[AuthorizationToken, ...]
    ) -> Denied | None:
        """Return why a request is refused; None: it is not, and is remembered until forgotten."""
        answer = self._ask_and_tell(question, tokens)
        if isinstance(answer, Denied):
            return answer
        self._permits[request_id] = answer
        self._until(answer.due_at)
        return None

    def admit_offer(
        self, request_id: RequestId, track: FullTrackName, wish: RequestId | None
    ) -> Denied | None:
        """Return why a PUBLISH of ours may not go to the peer: it would be its subscription.

        ``wish`` is the SUBSCRIBE_TRACKS that asks for it, whose tokens count.
        """
        permit = None if wish is None else self._permits.get(wish)
        tokens = () if permit is None else permit.tokens
        return self.admit(request_id, Question.about(M.SUBSCRIBE, track), tokens)

    def admit_update(
        self,
        request_id: RequestId,
        tokens: tuple[AuthorizationToken, ...],
        prefix: TrackNamespace | None,
    ) -> Denied | None:
        """Return why a REQUEST_UPDATE is refused, if it is.

        It needs REQUEST_UPDATE; with tokens of its own, which count from then on, all that the
        request itself needs; and that at a new prefix, too.
        """
        permit = self._permits.get(request_id)
        if permit is None:
            return Denied(Denial.UNAUTHORIZED, "nothing was granted that could be changed")
        question = permit.question
        changed = permit if not tokens else replace(permit, tokens=tokens)
        update = replace(question, actions=(Action.REQUEST_UPDATE,))
        asked = self._ask_and_tell(update, changed.tokens)
        if isinstance(asked, Denied):
            return asked
        if prefix is not None and prefix != question.namespace:
            question = replace(question, namespace=prefix)
        if tokens or question != permit.question:
            for wanted in dict.fromkeys((permit.question, question)):
                answer = self._ask_and_tell(wanted, changed.tokens)
                if isinstance(answer, Denied):
                    return answer
                if wanted == question:
                    changed = answer
        self._permits[request_id] = changed
        self._until(changed.due_at)
        return None

    def whose(self, request_id: RequestId | None = None) -> str:
        """Return whose a request is, or the session: who was granted it, else where it is from."""
        permit = None if request_id is None else self._permits.get(request_id)
        return (permit.who if permit is not None else "") or self._who or peer_of(self.address)

    def forget(self, request_id: RequestId) -> None:
        """A request is over."""
        self._permits.pop(request_id, None)

    def expires_ms(self, request_id: RequestId) -> int | None:
        """Return the milliseconds that a request may go on, for EXPIRES; None: not limited."""
        permit = self._permits.get(request_id)
        if permit is None or permit.expires_at is None:
            return None
        return max(1, round((permit.expires_at - self._now()) * 1000))

    # -- what goes on ----------------------------------------------------------------------------

    def look(self, *, everything: bool = False) -> "Lost":
        """Ask again about what is due, and forget what lost its right.

        ``everything``: also what is not due, since something was revoked, say. What is never due
        was checked for good as far as time goes, and ends only if it is revoked. Of very many that
        are due some are left to the next look, which is soon.
        """
        now, self._timer_at = self._now(), None
        lost: list[tuple[RequestId, Denial]] = []
        looked_at = [
            (request_id, permit)
            for request_id, permit in self._permits.items()
            if everything or permit.is_due(now)
        ]
        for request_id, permit in looked_at[: None if everything else _AT_ONCE]:
            answer = self._look(permit)
            if isinstance(answer, Denied):
                lost.append((request_id, answer.why))
                del self._permits[request_id]
            else:
                self._permits[request_id] = answer
        farewell = self._look_at_session(now, everything=everything)
        due = [permit.due_at for permit in self._permits.values()]
        if self._session is not None:
            due += [self._session.due_at, self._session.farewell_at]
        self._until(min((at for at in due if at is not None), default=None))
        return Lost(tuple(lost), farewell)

    # -- parts -----------------------------------------------------------------------------------

    def _look_at_session(self, now: float, *, everything: bool) -> tuple[float, Denial] | None:
        if self._session is None:
            return None
        is_due = everything or self._session.is_due(now)
        answer = self._look(self._session) if is_due else self._session
        if isinstance(answer, Denied):
            self._session = None
            return FAREWELL_S if answer.why is Denial.EXPIRED else REVOKED_S, answer.why
        if answer.farewell_at is not None and answer.farewell_at <= now:
            self._session = None
            assert answer.expires_at is not None, "there is no farewell otherwise"
            return answer.expires_at - now, Denial.EXPIRED
        self._session = answer
        return None

    def _look(self, permit: Permit) -> Permit | Denied:
        answer = self._ask(permit.question, permit.tokens)
        if isinstance(answer, Denied):
            is_for_good = permit.due_at is None and answer.why is Denial.EXPIRED
            if is_for_good:
                return permit
            self._tell_of(permit.question, answer, is_running=True)
            return answer
        # What is left is not a new whole, of which half would be a farewell.
        is_same = answer.expires_at == permit.expires_at
        return replace(answer, granted_at=permit.granted_at) if is_same else answer

    def _ask_and_tell(
        self, question: Question, tokens: tuple[AuthorizationToken, ...]
    ) -> Permit | Denied:
        answer = self._ask(question, tokens)
        told = answer if isinstance(answer, Denied) else answer.granted
        self._tell_of(question, told, is_running=False)
        return answer

    def _tell_of(self, question: Question, answer: Granted | Denied, *, is_running: bool) -> None:
        if self._tell is not None:
            [action, *_] = question.actions
            self._tell(
                AccessDecided(
                    action=action,
                    namespace=question.namespace,
                    answer=answer,
                    is_running=is_running,
                )
            )

    def _ask(self, question: Question, tokens: tuple[AuthorizationToken, ...]) -> Permit | Denied:
        now = self._now()
        bearer = Bearer(tokens or self._session_tokens, self.certificate, self.address)
        check_at: float | None = None
        expires_at: float | None = None
        granted = Granted()
        for action in question.actions:
            answer = self._authority.decide(action, question.namespace, question.track, bearer, now)
            if isinstance(answer, Denied):
                return answer
            check_at = _earlier(check_at, answer.check_at)
            expires_at = _earlier(expires_at, answer.expires_at)
            granted = answer
        if expires_at is not None and expires_at <= now:
            return Denied(Denial.EXPIRED, "what was granted is over")
        return Permit(question, tokens, check_at, expires_at, now, granted)

    def _until(self, at: float | None) -> None:
        """Have the timer run no longer than to ``at``."""
        if at is None:
            return
        now = self._now()
        at = max(now + _SOONEST_S, min(at, now + _LOOK_S))
        if self._timer_at is None or at < self._timer_at:
            self._timer_at = at
            self._set_timer(at - now)


def _earlier(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
