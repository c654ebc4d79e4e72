"""The Index Service: who holds which blocks, told to who asks. Shell.

What is listed, for how long and for whom is decided by :mod:`kvcs.kvsp.http.directory`.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from kvcs.kvsp.http.directory import Directory, Full
from kvcs.kvsp.http.names import HOLDER_ID_OCTETS
from kvcs.kvsp.http.problems import Problem, Refused
from kvcs.kvsp.http.questions import Found, Lease, Longest, LookupQuestion
from kvcs.kvsp.http.records import BadRecord, read_registration
from kvcs.kvsp.http.routes import Routes
from kvcs.kvsp.http.service import Call, Handler
from kvcs.kvsp.http.tokens import Right
from kvcs.kvsp.http.uris import PublicationUri
from kvcs.profile.naming import PUBLICATION_ID_OCTETS
from kvcs.telemetry import Counter, Counters

T = TypeVar("T")

#: Octets of JSON that are read on the event loop; more go to a thread.
_READ_AT_ONCE = 64 << 10
#: A key in JSON: 64 digits, quotes and a comma, and white space of people.
_KEY_OCTETS = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLimits:
    """What one request may say or ask."""

    max_keys_asked: int = 16_384
    max_keys_registered: int = 65_536


class IndexService:
    """Serves a directory.

    Args:
        directory: What is listed.
        limits: What one request may say or ask.
        counters: Where things are counted.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        limits: IndexLimits | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.directory = directory
        self._limits = limits or IndexLimits()
        self._counters = Counters() if counters is None else counters

    @property
    def handlers(self) -> Mapping[Routes, Handler]:
        """Who answers at which path."""
        return {
            Routes.LOOK_UP: self._look_up,
            Routes.LONGEST: self._longest,
            Routes.CHAIN: self._chain,
            Routes.HOLDER: self._holder,
            Routes.LEASE: self._lease,
        }

    # -- asking ----------------------------------------------------------------------------------

    async def _look_up(self, call: Call) -> web.StreamResponse:
        asked, shelf = await self._question(call)
        if shelf is None:
            found = Found((), ((),) * len(asked.keys))
        else:
            found = await _in_turns(
                self.directory.look_up_in_turns(shelf, asked.keys, limit=asked.limit, now=_now())
            )
        return _json(await _made(found.body, len(asked.keys)))

    async def _longest(self, call: Call) -> web.StreamResponse:
        asked, shelf = await self._question(call)
        if shelf is None:
            return _json(Longest(()).body())
        found = await _in_turns(
            self.directory.longest_in_turns(
                shelf, asked.keys, limit=asked.limit, now=_now(), following=asked.following
            )
        )
        told = sum(len(one.following or ()) for one in found.candidates)
        return _json(await _made(found.body, told))

    async def _chain(self, call: Call) -> web.StreamResponse:
        _no_query(call)
        shelf = call.scope_id, call.compatibility_id
        publication_id = call.variable("published", PUBLICATION_ID_OCTETS)
        found = None
        if call.bearer.may(Right.READ, *shelf):
            found = self.directory.chain(shelf, publication_id, now=_now())
        if found is None:
            raise Refused(Problem.NOT_FOUND)
        return _json(await _made(found.body, len(found.keys)))

    async def _question(self, call: Call) -> tuple[LookupQuestion, tuple[bytes, bytes] | None]:
        """Return what is asked, and about what; ``None`` if the token is not good for that.

        Who asks about the scope of others gets what who asks about unknown keys gets: nothing.
        """
        _no_query(call)
        limit = self._limits.max_keys_asked
        octets = 1024 + _KEY_OCTETS * limit
        body = await call.body(octets)
        asked = await _read(body, lambda: LookupQuestion.parse(body, octets=octets, max_keys=limit))
        await self._expire()
        shelf = call.scope_id, call.compatibility_id
        return asked, shelf if call.bearer.may(Right.READ, *shelf) else None

    # -- registering -----------------------------------------------------------------------------

    async def _holder(self, call: Call) -> web.StreamResponse:
        shelf, holder_id = self._may_write(call)
        if call.request.method == "DELETE":
            # Whether it was listed makes no difference: it is not, now.
            await _in_turns(self.directory.withdraw_in_turns(call.bearer.subject, holder_id, shelf))
            return web.Response(status=204)
        limit = self._limits.max_keys_registered
        octets = 8192 + _KEY_OCTETS * limit
        body = await call.body(octets)
        holding, lease_s = await _read(
            body, lambda: read_registration(body, octets=octets, max_keys=limit)
        )
        if isinstance(holding.uri, PublicationUri):
            name = holding.uri.name
            if (name.scope_id, name.compatibility_id) != shelf:
                raise Refused(Problem.BAD_REQUEST, "the MOQT URI names another scope or model")
        await self._expire()
        try:
            is_new, lease_s = await _in_turns(
                self.directory.register_in_turns(
                    call.bearer.subject, holder_id, shelf, holding, lease_s=lease_s, now=_now()
                )
            )
        except Full as exc:
            raise Refused(Problem.FULL, str(exc), {"Retry-After": "10"}) from None
        self._counters.add(Counter.HOLDERS_REGISTERED, int(is_new))
        return _json(Lease(lease_s).body(), status=201 if is_new else 200)

    async def _lease(self, call: Call) -> web.StreamResponse:
        shelf, holder_id = self._may_write(call)
        body = await call.body(1024)
        wish = await _read(body, lambda: Lease.parse(body))
        await self._expire()
        lease_s = self.directory.renew(
            call.bearer.subject, holder_id, shelf, lease_s=wish.lease_s, now=_now()
        )
        if lease_s is None:
            raise Refused(Problem.NOT_FOUND)
        return _json(Lease(lease_s).body())

    def _may_write(self, call: Call) -> tuple[tuple[bytes, bytes], bytes]:
        """Return what a request is about; refuse who may not write there, known here or not."""
        _no_query(call)
        shelf = call.scope_id, call.compatibility_id
        holder_id = call.variable("holder", HOLDER_ID_OCTETS)
        if not call.bearer.may(Right.WRITE, *shelf):
            raise Refused(Problem.FORBIDDEN)
        return shelf, holder_id

    async def _expire(self) -> None:
        if gone := await _in_turns(self.directory.expire_in_turns(_now())):
            self._counters.add(Counter.HOLDERS_EXPIRED, gone)


async def _read(body: bytes, read: Callable[[], T]) -> T:
    """Read JSON, in a thread if it is long; what is none is refused."""
    try:
        return read() if len(body) <= _READ_AT_ONCE else await asyncio.to_thread(read)
    except BadRecord as exc:
        raise Refused(Problem.BAD_REQUEST, str(exc)) from None


async def _in_turns(turns: Generator[None, None, T]) -> T:
    """Do something in turns, and let others go on between them. It is never left half done."""
    try:
        while True:
            next(turns)
            await asyncio.sleep(0)
    except StopIteration as done:
        found: T = done.value
        return found
    except asyncio.CancelledError:
        for _ in turns:
            pass
        raise


async def _made(make: Callable[[], bytes], keys: int) -> bytes:
    """Return the JSON of so many keys, made in a thread if it is long."""
    return make() if keys * _KEY_OCTETS <= _READ_AT_ONCE else await asyncio.to_thread(make)


def _no_query(call: Call) -> None:
    if call.request.query_string:
        raise Refused(Problem.BAD_REQUEST, "expected no query")


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(
        body=body,
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "private, no-store"},
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
