"""The course of one attempt at a publication: what came of it so far, for who supervises it."""

import asyncio

from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.spreading import Share
from kvcs.profile.ending import End
from kvcs.profile.naming import DataTrack
from moqt.codepoints import StreamErrorCode
from moqt.errors import MoqtError
from moqt.session.events import FetchEnded, SubscriptionEnded


class Course:
    """An attempt lasts as long as the connections to one relay or producer, or as a block service.

    Attributes:
        wake: Set with everything that may matter to the supervisor.
        failure: Why the publication cannot be had here, the first reason of all; None: it may.
        crash: What was raised where nobody would learn of it.
        moved_at: When anything new came last, by the clock of the event loop.
        is_settled: Whether data may be asked for.
        is_over: Whether nothing is placed any more.
        gone: Shares whose publisher was lost, and how; None stands for the manifest.
        rejected: Track, layer and block of what would come as bad again over these connections.
        not_now: Whether a track was refused that may be had later.
    """

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.failure: Failure | None = None
        self.crash: BaseException | None = None
        self.is_settled = False
        self.is_over = False
        self.gone: dict[Share | None, str] = {}
        self.rejected: set[tuple[DataTrack, int, int]] = set()
        self.not_now = False
        self._loop = asyncio.get_running_loop()
        self.moved_at = self._loop.time()

    @property
    def takes_objects(self) -> bool:
        """Whether Objects that come now are of use."""
        return not self.is_over and self.failure is None

    def moved(self) -> None:
        """Something new came, or nothing is to be waited for."""
        self.moved_at = self._loop.time()

    def settled(self) -> None:
        """The connections are there that there will be: what counts begins now."""
        self.is_settled = True
        self.moved()
        self.wake.set()

    def left_of(self, seconds: float) -> float:
        """Return how much is left of so many seconds since anything new came; may be negative."""
        return self.moved_at + seconds - self._loop.time()

    def fail(self, failure: Failure) -> None:
        """The publication cannot be had here."""
        if self.failure is None:
            self.failure = failure
        self.wake.set()

    def lost(self, error: MoqtError) -> None:
        """The last connection is gone."""
        text = f"connection lost: {error}"
        self.fail(Failure(FailureReason.UNREACHABLE, text, again=True, lost=True))

    def crashed(self, error: BaseException) -> None:
        """Have the supervisor raise what nobody else would learn of."""
        self.crash = error
        self.wake.set()

    def ended(self, share: Share | None, end: SubscriptionEnded | FetchEnded | None) -> None:
        """Note what the end of a request says of the publication or of who serves it.

        Args:
            share: What was asked for; None: the manifest.
            end: How the request ended; None: it was given up.
        """
        name = "manifest" if share is None else str(share.track)
        match end:
            case SubscriptionEnded(code=code, reason=reason):
                match End.of(code, reason):
                    case End.ABANDONED:
                        self.fail(Failure(FailureReason.ABANDONED, f"{name} was {reason}"))
                    case End.LOST:
                        self.gone[share] = f"{name} broke off: {reason or repr(code)}"
            case FetchEnded(complete=False, code=code):
                # Who does not know what became of something has not lost it.
                if code != StreamErrorCode.UNKNOWN_OBJECT_STATUS:
                    self.gone[share] = f"{name} broke off: {code!r}"

    def incomplete(self, reason: FailureReason, text: str) -> Failure:
        """Return the failure that it is when nothing more comes."""
        lost = bool(self.gone)
        if lost:
            text = f"{text}: {next(iter(self.gone.values()))}"
        return Failure(reason, text, again=lost or self.not_now, lost=lost)
