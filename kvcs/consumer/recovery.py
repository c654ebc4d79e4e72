"""What is tried next while something is missing, in which order, and until when (KVCS Section 5.4).

Pure: no sockets, no tensors, no clock. Whoever carries it out asks :meth:`Recovery.next_step`, does
that, tells what came of it with :meth:`Recovery.tried`, and asks again, until the step is to
compute what is missing. What *is* missing is the assembler's to say. In this order:

1. the same relay again, as often as a retrieval's settings say, which its download does itself;
2. every other relay of the list, for the same publication;
3. another publication: at once where nothing was handed out yet; where something was, when no
   relay brings more of this one, and only if Objects of both may be in one cache (see
   :mod:`kvcs.consumer.joining`);
4. the block services, one after the other;
5. all of it again after a pause, if something was lost that may come back;
6. computing.

The whole ends at the deadline, and, where the caller says how fast it computes, when computing what
was missing as recovery began would have taken as long. It begins with the first failure, or when a
relay falls silent and another one takes over.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure, more_telling
from kvcs.consumer.joining import Bond
from kvcs.consumer.settings import RetrievalSettings

#: Failures of a relay after which no other publication is looked for there.
_NOT_HERE = (FailureReason.UNREACHABLE, FailureReason.UNUSABLE)


class Ask(Enum):
    """Which publication a relay is asked for."""

    #: The one that was begun; another one only if nothing of it was handed out.
    SAME = auto()
    #: Another one, which goes on where that one ended.
    ANOTHER = auto()


@dataclass(frozen=True, slots=True)
class AskRelay:
    """Ask a relay or producer of the list."""

    number: int
    """Its place in the list, from 0."""

    which: Ask = Ask.SAME


@dataclass(frozen=True, slots=True)
class AskBlocks:
    """Ask a block service for what is missing."""

    number: int
    """Its place in the list, from 0."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, then ask on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Recompute:
    """Give up: what is missing has to be computed."""

    failure: Failure


Step = AskRelay | AskBlocks | Pause | Recompute


class Pauses(Protocol):
    """How long to wait before everything is tried again, such as :class:`kvcs.link.Backoff`."""

    def reset(self) -> None:
        """Begin with short pauses again."""

    def next_s(self) -> float:
        """Return how many seconds to wait now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a retrieval stands when something failed."""

    objects: int = 0
    """Objects in place, or were."""

    tokens: int | None = None
    """Tokens that would have to be computed now; None: nobody knows."""

    bond: Bond = Bond.FREE
    """Whether another publication may go on; BOUND where the caller wants exactly this one."""

    told: bool = False
    """Whether a layer of it was handed out."""

    blocks_may_help: bool = False
    """Whether a block service can be asked: a manifest says what is missing, and its Block Keys
    are known."""


def recompute_s(tokens: int | None, settings: RetrievalSettings) -> float:
    """Return how many seconds computing takes, by the caller's estimate; infinite if unknown."""
    if tokens is None or settings.recompute_tokens_per_s is None:
        return math.inf
    return tokens / settings.recompute_tokens_per_s


class Recovery:
    """Decides what is tried next. One for each retrieval.

    Args:
        settings: The deadline, and how fast the caller computes.
        relays: How many relays and producers are in the list.
        services: How many block services are.
        pauses: How long to wait before everything is tried again.
        now: When the retrieval began, in seconds of the clock that every ``now`` is of.

    Attributes:
        something_lost: Whether something that was there was lost: a connection, or a publisher
            behind it. It may come back, so everything is tried again until the time is up.
        last: The last failure.
    """

    def __init__(
        self,
        settings: RetrievalSettings,
        *,
        relays: int,
        services: int = 0,
        pauses: Pauses,
        now: float,
    ) -> None:
        self.something_lost = False
        self.last: Failure | None = None
        self._settings = settings
        self._pauses = pauses
        self._deadline_at = now + settings.deadline_s
        self._relays = deque(range(relays))
        self._relays_left = relays
        self._joins_left = 0
        self._services = list(range(services))
        self._services_left: deque[int] = deque()
        self._began_at: float | None = None
        self._bound_s: float | None = None
        self._failure: Failure | None = None
        self._is_final = False
        self._again = False  # in this round something failed that may be had later
        self._objects = 0
        self._standing = Standing()

    # -- until when ------------------------------------------------------------------------------

    @property
    def until(self) -> float:
        """When it ends at the latest."""
        if self._began_at is None or self._bound_s is None:
            return self._deadline_at
        return min(self._deadline_at, self._began_at + self._bound_s)

    @property
    def expired(self) -> Failure:
        """What ended when the time was up."""
        if self.until < self._deadline_at:
            assert self._bound_s is not None
            text = f"not recovered within {self._bound_s:.3g} s, in which it can be recomputed"
        else:
            text = f"not complete within {self._settings.deadline_s:g} s"
        if self.last is not None:
            text = f"{text}: {self.last.text}"
        return Failure(FailureReason.EXPIRED, text)

    # -- what next -------------------------------------------------------------------------------

    def next_step(self) -> Step:
        """Return what to do now; each call is a step, which :meth:`tried` is told the end of.

        There is an end: each round asks everybody once, there is another round only after
        something was lost, and all of it is cut off at :attr:`until`.
        """
        if not self._is_final:
            if self._relays_left:
                return AskRelay(self._relays[0])
            if self._joins_left:
                return AskRelay(self._relays[0], Ask.ANOTHER)
            if self._services_left and self._standing.blocks_may_help:
                return AskBlocks(self._services_left[0])
            if self.something_lost and self._again:
                self._new_round()
                return Pause(self._pauses.next_s())
        assert self._failure is not None, "nothing has failed yet"
        return Recompute(self._failure)

    def found_relays(self, count: int) -> None:
        """Note relays that were found beside those of the list; they come last."""
        first = len(self._relays)
        self._relays.extend(range(first, first + count))
        self._relays_left += count

    def moved(self, relay: int) -> None:
        """Note that a relay has been left for another one, or for another session with it."""
        self._relays.rotate(-self._relays.index(relay))
        self._new_round()

    def begin(self, stands: Standing, now: float) -> None:
        """Note that something was lost, or failed: from the first time on, recovery lasts.

        Its bound is fixed with the first estimate of what has to be computed.

        Args:
            stands: How the retrieval stands now.
            now: The time.
        """
        if self._began_at is None:
            self._began_at = now
        if self._bound_s is None and math.isfinite(
            bound_s := recompute_s(stands.tokens, self._settings)
        ):
            self._bound_s = bound_s

    def tried(
        self, step: AskRelay | AskBlocks, found: Failure, stands: Standing, now: float
    ) -> None:
        """Note that a step did not bring all that is missing.

        Args:
            step: What was done.
            found: How it ended.
            stands: How the retrieval stands now.
            now: The time.
        """
        self.begin(stands, now)
        if progress := stands.objects > self._objects:
            self._pauses.reset()
        self._objects, self._standing = stands.objects, stands
        self._failure = more_telling(self._failure, found)
        self.last = found
        self._is_final = is_final(found, stands)
        self._again |= found.again
        self.something_lost |= found.lost
        match step:
            case AskRelay(_, Ask.SAME):
                self._relays.rotate(-1)
                self._relays_left -= 1
                if not self._relays_left:
                    self._after_relays(stands)
            case AskRelay(_, Ask.ANOTHER):
                self._relays.rotate(-1)
                self._joins_left -= 1
                if progress:
                    # Another one has gone on; every relay may have more of that.
                    self._new_round(again=self._again)
                elif stands.bond is not Bond.JOINABLE:
                    self._joins_left = 0
            case AskBlocks(number):
                self._services_left.popleft()
                if not found.again:
                    self._services.remove(number)

    def _after_relays(self, stands: Standing) -> None:
        """Turn to what comes after the relays of a round."""
        if stands.told and stands.bond is Bond.JOINABLE:
            self._joins_left = len(self._relays)
        if stands.blocks_may_help:
            self._services_left = deque(self._services)

    def _new_round(self, *, again: bool = False) -> None:
        self._relays_left, self._joins_left = len(self._relays), 0
        self._services_left.clear()
        self._again = again


def is_final(failure: Failure, stands: Standing) -> bool:
    """Whether no other way, no other publication and no other time makes a failure good."""
    match failure.reason:
        case FailureReason.UNUSABLE:
            return True
        case FailureReason.CONTRADICTED:
            # What was handed out may be wrong, whoever brings the rest.
            return stands.told or stands.bond is Bond.BOUND
    # That it was abandoned is said by whoever was asked. Others say so, too, if it is true.
    return False


def may_look_for_another(failure: Failure, stands: Standing, which: Ask) -> bool:
    """Whether another publication is looked for at the relay at which one has failed.

    Args:
        failure: How that one ended.
        stands: How the retrieval stands.
        which: What the relay is being asked for.
    """
    if failure.reason in _NOT_HERE or is_final(failure, stands):
        return False
    if which is Ask.ANOTHER:
        return stands.bond is not Bond.BOUND
    return not stands.told and stands.bond is Bond.FREE
