"""Discovery: which publications of a prompt are announced, and which of them is opened. Shell.

Implements KVCS Section 5.1 over one connection. Which one to try next is decided by
:mod:`kvcs.consumer.candidates`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvcs.consumer.candidates import Candidates, Offer, rank
from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.opening import Job, Opened, Refused, open_publication, refused
from kvcs.consumer.prefixes import MAX_LISTED, Questions
from kvcs.consumer.tasks import Tasks, set_within, tasks
from kvcs.errors import BadName
from kvcs.profile.naming import PublicationName
from moqt.aio import MoqtConnection, NamespaceSubscription
from moqt.codepoints import RequestErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.names import TrackNamespace
from moqt.session.events import NamespaceAppeared, NamespaceGone

#: Prefixes that are looked for at the same time.
PREFIXES_AT_ONCE = 16
#: Publications of one prefix whose manifests are compared before one is chosen.
CANDIDATES_AT_ONCE = 4


class Discovery:
    """What is announced on one connection.

    Args:
        conn: The connection.
        job: The retrieval that looks for publications.
        found: Called with each publication that is announced, and the blocks of its prefix.
        job_of: Returns what a publication is opened with, if that differs.
        octets_per_s: How fast finished Objects have come over the connection; None: not known.
        deadline_at: When everything must be there, as the loop tells the time; None: whenever.
    """

    def __init__(
        self,
        conn: MoqtConnection,
        job: Job,
        found: Callable[[PublicationName, int], None],
        *,
        job_of: Callable[[PublicationName], Job] | None = None,
        octets_per_s: float | None = None,
        deadline_at: float | None = None,
    ) -> None:
        self._conn = conn
        self._job = job
        self._job_of = job_of or (lambda _: job)
        self._settings = job.settings
        self._octets_per_s = octets_per_s
        self._deadline_at = deadline_at
        self._loop = asyncio.get_running_loop()
        self._lengths = {key: n for n, key in enumerate(job.expected.block_keys, start=1)}
        self._listed = 0  # publications told of, ours and others
        self._heard = asyncio.Event()  # set with each
        self._told = found
        self._candidates = Candidates()
        self._appeared = asyncio.Event()

    def tried(self, name: PublicationName) -> None:
        """Note that a publication need not be tried again."""
        self._candidates.tried(name)

    def noted(self, name: PublicationName, blocks: int) -> None:
        """Note a publication that was found elsewhere."""
        if self._candidates.appeared(name, blocks):
            self._told(name, blocks)

    def best(self) -> list[PublicationName]:
        """Return those worth a look, the longest prefix first.

        Only where the speed is known can a longer one be worth less than a shorter one.
        """
        may_be_late = self._octets_per_s is not None and self._deadline_at is not None
        return self._candidates.best(CANDIDATES_AT_ONCE, shorter=may_be_late)

    async def appears(self, seconds: float) -> bool:
        """Wait until something is announced; return whether that was in time."""
        self._appeared.clear()
        return await set_within(self._appeared, seconds)

    async def look_for(self, prefixes: Sequence[int], group: Tasks) -> Failure | None:
        """Subscribe to prefixes, the longest first, until one has a publication.

        The subscriptions of the first group stay, so that the longest prefix is found also when
        it is published later.

        Args:
            prefixes: Their lengths in blocks.
            group: For whoever watches the subscriptions.
        """
        return await self._look_for(prefixes, group, again=False)

    async def look_through(self, questions: Questions, group: Tasks) -> Failure | None:
        """Ask for all publications of the model, or for a few lengths where that does not do.

        The subscriptions stay, so that what is published later is found as well.
        """
        questions.for_all()
        asked_at = self._loop.time()
        answer = await self._subscribe(self._job.expected.model_prefix)
        if isinstance(answer, str):
            return await self._look_for(questions.for_lengths(), group, again=False)
        watching = group.start(self._watch(answer, self._job.expected.model_prefix))
        if await self._is_listed(self._loop.time() - asked_at):
            return None
        watching.cancel()
        # The peer may take the next question before it hears that this one is taken back.
        return await self._look_for(questions.for_lengths(each=2), group, again=True)

    async def _is_listed(self, answer_s: float) -> bool:
        """Wait until a list seems to have come whole; return whether it was not too long.

        Args:
            answer_s: How long the answer took: the path is not quiet before that time has passed
                again, twice.
        """
        quiet_s = max(self._settings.settle_s, 2 * answer_s)
        until = self._loop.time() + self._settings.discovery_timeout_s
        while await set_within(self._heard, quiet_s) and self._loop.time() < until:
            self._heard.clear()
            if self._listed > MAX_LISTED:
                return False
        return True

    async def _look_for(
        self, prefixes: Sequence[int], group: Tasks, *, again: bool
    ) -> Failure | None:
        refusals: list[str] = []
        answered = 0
        for start in range(0, len(prefixes), PREFIXES_AT_ONCE):
            lengths = prefixes[start : start + PREFIXES_AT_ONCE]
            named = [self._job.expected.prefix(blocks) for blocks in lengths]
            asked = [self._subscribe(prefix, again=again) for prefix in named]
            watched: list[asyncio.Task[None]] = []
            for prefix, answer in zip(named, await asyncio.gather(*asked), strict=True):
                if isinstance(answer, str):
                    refusals.append(answer)
                else:
                    answered += 1
                    watched.append(group.start(self._watch(answer, prefix)))
            is_last = start + PREFIXES_AT_ONCE >= len(prefixes)
            wait_s = self._settings.settle_s * (1 if is_last else 10)
            if await set_within(self._appeared, wait_s):
                if len(prefixes) > 1:
                    # That of a longer one may be on its way.
                    await asyncio.sleep(self._settings.settle_s)
                return None
            if start and not is_last:
                for task in watched:
                    task.cancel()
        if answered:
            return None
        return Failure(FailureReason.NOT_FOUND, f"discovery was refused: {refusals[0]}")

    async def choose(
        self, tell_refused: Callable[[PublicationName, Failure], None]
    ) -> tuple[Opened | None, Failure | None]:
        """Open the best publications side by side and keep one; the rest stays untried.

        Those that are announced meanwhile are opened, too. Once one is open, the others are waited
        for briefly, if there are any: one alone costs no wait.

        Args:
            tell_refused: Called with each that cannot be used, and why.
        """
        opened: list[Opened] = []
        refusal: Failure | None = None
        async with tasks() as group:
            opening: dict[asyncio.Task[Opened | Failure], PublicationName] = {}
            pending: set[asyncio.Task[Any]] = set()
            until_s: float | None = None
            loop = asyncio.get_running_loop()
            while True:
                self._appeared.clear()
                for name in self.best():
                    if name not in opening.values() and len(opening) < CANDIDATES_AT_ONCE:
                        task = group.start(self._try_to_open(name))
                        opening[task] = name
                        pending.add(task)
                if not pending:
                    break
                news = group.start(self._appeared.wait())
                done, _ = await asyncio.wait(
                    {*pending, news},
                    timeout=None if until_s is None else until_s - loop.time(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                news.cancel()
                if not done:
                    break
                pending -= done
                for task in opening.keys() & done:
                    found = task.result()
                    if isinstance(found, Opened):
                        opened.append(found)
                        until_s = until_s or loop.time() + self._settings.settle_s
                        continue
                    self._candidates.tried(opening[task])
                    refusal = found
                    tell_refused(opening[task], found)
        if not opened:
            return None, refusal
        opened.sort(key=lambda one: rank(self._offer(one)))
        best = opened.pop()
        for other in opened:
            other.subscription.cancel()
        return best, None

    def _offer(self, opened: Opened) -> Offer:
        left_s = None if self._deadline_at is None else self._deadline_at - self._loop.time()
        return Offer(
            manifest=opened.manifest,
            version=opened.version,
            blocks=self._job_of(opened.name).expected.wanted_of(opened.name),
            wish=self._job.wish,
            codecs=self._job.codecs,
            octets_per_s=self._octets_per_s,
            left_s=left_s,
        )

    async def _subscribe(
        self, prefix: TrackNamespace, *, again: bool = False
    ) -> NamespaceSubscription | str:
        """Ask for a prefix; once more if it overlaps another one, and ``again`` says so."""
        try:
            return await self._conn.subscribe_namespace(
                prefix, timeout_s=self._settings.request_timeout_s
            )
        except RequestRejected as exc:
            if not again or exc.code != RequestErrorCode.PREFIX_OVERLAP:
                return str(exc)
        except (MoqtError, TimeoutError) as exc:
            return str(exc)
        await asyncio.sleep(self._settings.settle_s)
        return await self._subscribe(prefix)

    async def _watch(self, announcements: NamespaceSubscription, prefix: TrackNamespace) -> None:
        """Take note of what appears and goes of the prompt's publications."""
        try:
            async for event in announcements:
                self._listed += 1
                self._heard.set()
                try:
                    name = PublicationName.from_namespace(event.namespace)
                except BadName:
                    continue  # whatever it is, it is no publication
                blocks = self._lengths.get(name.anchor_key)
                if blocks is None or not prefix.is_prefix_of(name.namespace):
                    continue
                match event:
                    case NamespaceAppeared():
                        if self._candidates.appeared(name, blocks):
                            self._told(name, blocks)
                        self._appeared.set()
                    case NamespaceGone():
                        self._candidates.gone(name)
        except MoqtError:
            self._appeared.set()  # the session is gone, as whoever waits will find
        finally:
            announcements.cancel()

    async def _try_to_open(self, name: PublicationName) -> Opened | Failure:
        try:
            return await open_publication(self._conn, name, self._job_of(name))
        except Refused as exc:
            return refused(exc)
