"""Why a retrieval, or a part of it, ends without all that was wanted. Pure.

Inside, a :class:`Failure` goes up from where it happened and is weighed against others; outside, it
is an event (:class:`~kvcs.consumer.events.Failed`) and, for who waits, an exception.
"""

from typing import NamedTuple

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.events import Failed, FailureReason, Summary
from kvcs.consumer.recomputing import everything, lacks, ranges, ready_layers
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.errors import (
    BadManifest,
    ConfigError,
    Expired,
    Incomplete,
    KvcsError,
    NotFound,
    PublicationFailed,
)
from moqt.codepoints import SessionErrorCode
from moqt.errors import SessionClosed
from moqt.session.events import SessionTerminated

#: What a session is closed with that will be closed so again, as long as the token is the same.
#: One that has expired may be another one by then.
_BARRED = (SessionErrorCode.UNAUTHORIZED, SessionErrorCode.MALFORMED_AUTH_TOKEN)
#: Failures that say that there was nobody to ask.
_VAGUE = (FailureReason.UNREACHABLE, FailureReason.NOT_FOUND)
#: Missing Objects that an exception lists one by one; the event has them all.
_LISTED = 1 << 20


class Unreachable(KvcsError):
    """No relay and no producer could be reached, or all that were reached were lost."""


class Failure(NamedTuple):
    """Why something ended without all that was wanted."""

    reason: FailureReason
    text: str

    again: bool = False
    """Whether there may be more of it when it is asked for again, here or elsewhere."""

    lost: bool = False
    """Whether something that was there is lost: a connection, or a publisher behind it."""

    barred: bool = False
    """Whether who was asked takes nothing from us, whatever it is and how often."""


def session_refused(closed: SessionTerminated | SessionClosed) -> Failure | None:
    """Return the failure that a session is which the peer does not let us have; None: it does."""
    if not closed.by_peer or closed.code not in _BARRED:
        return None
    name = SessionErrorCode(closed.code).name
    text = f"the session was refused: {name}, for the token that was shown or for want of one"
    return Failure(FailureReason.UNREACHABLE, text, barred=True)


def connection_lost(closed: SessionTerminated | None) -> Failure:
    """Return the failure that a closed session is."""
    if closed is not None and (refused := session_refused(closed)) is not None:
        return refused
    why = "" if closed is None else closed.reason or f"{closed.code!r}"
    return Failure(FailureReason.UNREACHABLE, f"connection lost: {why}", again=True, lost=True)


def more_telling(one: Failure | None, other: Failure) -> Failure:
    """Return the later failure, unless it says less: that there was nobody to ask."""
    return other if one is None or one.reason in _VAGUE or other.reason not in _VAGUE else one


def lacking(assembler: Assembler) -> tuple[FailureReason, str]:
    """Say what is wrong with a publication of which nothing more can come."""
    if (gap := next(assembler.gaps(), None)) is not None:
        more = sum(other.objects for other in assembler.gaps()) - gap.objects
        rest = f", and {more} more Objects" if more else ""
        return FailureReason.INCOMPLETE, f"{gap} did not come{rest}"
    if unlisted := assembler.unlisted:
        text = f"blocks {unlisted[0]} to {unlisted[-1]} are in no segment that can be used"
        return FailureReason.INCOMPLETE, text
    if (gap := next(assembler.unattested(), None)) is not None:
        return FailureReason.UNATTESTED, f"the manifest ended without the digests of {gap}"
    if assembler.is_following:
        return FailureReason.INCOMPLETE, "the manifest ended, which does not end the publication"
    return FailureReason.INCOMPLETE, "the manifest lists nothing that is wanted"


def last_event(
    failure: Failure,
    assembler: Assembler | None,
    summary: Summary,
    wish: Wish,
    expected: Expectations,
) -> Failed:
    """Return the last event of a retrieval that failed.

    Args:
        failure: Why.
        assembler: How far its publication was; None: it had not come to one.
        summary: The figures.
        wish: What was wanted.
        expected: What is known of the prompt.
    """
    # What was handed out of a publication that contradicts itself may be wrong.
    contradicted = failure.reason is FailureReason.CONTRADICTED
    left = (everything if contradicted else lacks)(
        assembler, wish, len(expected.block_keys) or None
    )
    recompute = ranges(left, expected.descriptor.block_tokens)
    if assembler is None:
        return Failed(
            reason=failure.reason,
            text=failure.text,
            publication=None,
            missing=(),
            unlisted=None,
            unattested=(),
            summary=summary,
            recompute=recompute,
        )
    unlisted = assembler.unlisted
    return Failed(
        reason=failure.reason,
        text=failure.text,
        publication=assembler.publication,
        missing=tuple(assembler.gaps()),
        unlisted=(unlisted[0], unlisted[-1]) if unlisted else None,
        unattested=tuple(assembler.unattested()),
        summary=summary,
        ready=() if contradicted else ready_layers(assembler),
        recompute=recompute,
    )


def error_of(failed: Failed, what: str) -> KvcsError:
    """Return what is raised for a retrieval that failed.

    Args:
        failed: Its last event.
        what: What was waited for.
    """
    text = f"{what}: {failed.text}"
    match failed.reason:
        case FailureReason.NOT_FOUND:
            return NotFound(text)
        case FailureReason.UNREACHABLE:
            return Unreachable(text)
        case FailureReason.REFUSED:
            return BadManifest(text)
        case FailureReason.ABANDONED | FailureReason.CONTRADICTED:
            return PublicationFailed(text)
        case FailureReason.INCOMPLETE | FailureReason.UNATTESTED:
            return Incomplete(text, _expanded(failed))
        case FailureReason.STALLED | FailureReason.EXPIRED:
            return Expired(text)
        case FailureReason.UNUSABLE:
            return ConfigError(text)
    return KvcsError(text)


def _expanded(failed: Failed) -> list[tuple[int, str, int]]:
    """List the missing Objects one by one, as far as that is bearable."""
    found: list[tuple[int, str, int]] = []
    for gap in failed.missing:
        for layer in range(gap.first_layer, gap.last_layer + 1):
            room = _LISTED - len(found)
            if room <= 0:
                return found
            blocks = range(gap.first_block, gap.last_block + 1)[:room]
            found += ((layer, str(gap.track), block) for block in blocks)
    return found
