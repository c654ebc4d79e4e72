"""IndexClient: one Index Service, asked and told. Shell.

What an index says are candidates. Whoever follows one verifies what it gets there.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import orjson

from kvcs.errors import NotFound
from kvcs.kvsp.http.client import ClientOptions, HttpClient, bad_answer
from kvcs.kvsp.http.questions import (
    USUALLY_TOLD,
    Chain,
    Found,
    Lease,
    Longest,
    LookupQuestion,
)
from kvcs.kvsp.http.records import BadRecord, Holding
from kvcs.kvsp.http.routes import chain_path, model_path
from kvcs.kvsp.http.uris import ServiceUri
from moqt.aio import ClientTls

#: What an answer may take: so much by itself, and for each key that was asked about.
_ANSWER_OCTETS = 4 << 20
_ANSWER_OCTETS_OF_KEY = 512
_FOLLOWING_OCTETS = 8 << 20
#: Blocks of one publication, and the octets that their keys take.
_CHAIN_KEYS, _CHAIN_OCTETS = 65_536, 8 << 20


class IndexClient:
    """Asks one Index Service about one scope. An asynchronous context manager.

    Args:
        uri: Where it is.
        token: What it knows us by.
        scope_id: The scope that it is asked about.
        tls: Whom to believe.
        options: Deadlines and limits.

    Raises:
        ConfigError: If a file of ``tls`` cannot be used.
        BadName: If ``uri`` is none of a service.

    Every method raises :exc:`~kvcs.errors.ServiceFailed` if the index does not do it, and
    :exc:`~kvcs.errors.Expired` if it takes too long; every one takes ``timeout_s`` instead of the
    client's deadline.
    """

    def __init__(
        self,
        uri: ServiceUri | str,
        token: str | None,
        scope_id: bytes,
        *,
        tls: ClientTls | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        self._http = HttpClient(uri, token, tls=tls, options=options)
        self._scope_id = scope_id

    @property
    def uri(self) -> ServiceUri:
        """Where the index is."""
        return self._http.uri

    @property
    def scope_id(self) -> bytes:
        """The scope that it is asked about."""
        return self._scope_id

    # -- asking ----------------------------------------------------------------------------------

    async def look_up(
        self,
        compatibility_id: bytes,
        keys: Sequence[bytes],
        *,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Found:
        """Ask who holds each of some blocks.

        Args:
            compatibility_id: The model.
            keys: Block Keys, in any order.
            limit: Holders of each at most.
            timeout_s: See the class.
        """
        body = await self._ask("look-up", compatibility_id, keys, limit, False, timeout_s)
        try:
            return Found.parse(body, octets=len(body), keys=len(keys))
        except BadRecord as exc:
            raise bad_answer(f"{self.uri}: {exc}") from None

    async def longest(
        self,
        compatibility_id: bytes,
        chain: Sequence[bytes],
        *,
        limit: int | None = None,
        following: bool = False,
        timeout_s: float | None = None,
    ) -> Longest:
        """Ask who covers the longest beginning of a chain of Block Keys, in one question.

        Publications that are longer than the chain are among them.

        Args:
            compatibility_id: The model.
            chain: The Block Keys of a prompt, from its first block on.
            limit: Candidates at most.
            following: Whether to ask for the Block Keys that each has behind those of the chain.
            timeout_s: See the class.
        """
        body = await self._ask("longest", compatibility_id, chain, limit, following, timeout_s)
        try:
            return Longest.parse(body, octets=len(body), keys=len(chain))
        except BadRecord as exc:
            raise bad_answer(f"{self.uri}: {exc}") from None

    async def chain(
        self, compatibility_id: bytes, publication_id: bytes, *, timeout_s: float | None = None
    ) -> Chain | None:
        """Ask which blocks a publication has; ``None`` if nobody has said so, or we may not ask.

        The keys are one holder's word: hold them against the digest that a manifest states.

        Args:
            compatibility_id: The model.
            publication_id: The publication.
            timeout_s: See the class.
        """
        path = chain_path(self._scope_id, compatibility_id, publication_id)
        try:
            answer = await self._http.ask("GET", path, limit=_CHAIN_OCTETS, timeout_s=timeout_s)
        except NotFound:
            return None
        try:
            return Chain.parse(answer.body, octets=_CHAIN_OCTETS, max_keys=_CHAIN_KEYS)
        except BadRecord as exc:
            raise bad_answer(f"{self.uri}: {exc}") from None

    # -- telling ---------------------------------------------------------------------------------

    async def register(
        self,
        compatibility_id: bytes,
        holder_id: bytes,
        holding: Holding,
        *,
        lease_s: float,
        timeout_s: float | None = None,
    ) -> float:
        """Register a holder, or say anew what it holds; return the seconds for which it is listed.

        Args:
            compatibility_id: The model.
            holder_id: 16 octets of the caller's choice, the same for the same holder.
            holding: Where it is, and what it has.
            lease_s: Seconds that are wished for.
            timeout_s: See the class.
        """
        return await self._lease(
            self._path(compatibility_id, holder_id), orjson.dumps(holding.json(lease_s)), timeout_s
        )

    async def renew(
        self,
        compatibility_id: bytes,
        holder_id: bytes,
        *,
        lease_s: float,
        timeout_s: float | None = None,
    ) -> float | None:
        """Have a holder listed for longer; return the seconds, ``None`` if it is not listed."""
        try:
            return await self._lease(
                self._path(compatibility_id, holder_id) + "/lease",
                Lease(lease_s).body(),
                timeout_s,
            )
        except NotFound:
            return None

    async def withdraw(
        self, compatibility_id: bytes, holder_id: bytes, *, timeout_s: float | None = None
    ) -> None:
        """Have a holder listed no more, whether it was or not."""
        await self._http.ask(
            "DELETE", self._path(compatibility_id, holder_id), limit=0, timeout_s=timeout_s
        )

    # -- parts -----------------------------------------------------------------------------------

    async def _ask(
        self,
        what: str,
        compatibility_id: bytes,
        keys: Sequence[bytes],
        limit: int | None,
        following: bool,
        timeout_s: float | None,
    ) -> bytes:
        asked = LookupQuestion(
            tuple(keys), USUALLY_TOLD if limit is None else limit, following=following
        )
        answer = await self._http.ask(
            "POST",
            f"{model_path(self._scope_id, compatibility_id)}/{what}",
            body=asked.body(),
            limit=_ANSWER_OCTETS
            + _ANSWER_OCTETS_OF_KEY * len(keys)
            + (_FOLLOWING_OCTETS if following else 0),
            timeout_s=timeout_s,
        )
        return answer.body

    async def _lease(self, path: str, body: bytes, timeout_s: float | None) -> float:
        answer = await self._http.ask("PUT", path, body=body, limit=1024, timeout_s=timeout_s)
        try:
            return Lease.parse(answer.body).lease_s
        except BadRecord as exc:
            raise bad_answer(f"{self.uri}: {exc}") from None

    def _path(self, compatibility_id: bytes, holder_id: bytes) -> str:
        return f"{model_path(self._scope_id, compatibility_id)}/holders/{holder_id.hex()}"

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, exc, traceback)
