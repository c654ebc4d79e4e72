"""Services over HTTP, as a retrieval asks them: an index, and block services. Shell.

Neither has authority: what an index says is where to look, and what a block service sends is
believed as far as a manifest answers for it (:mod:`kvcs.consumer.sections`).
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from kvcs.consumer.prefixes import Replica
from kvcs.consumer.sections import Section, SectionKey
from kvcs.errors import ConfigError, NotFound
from kvcs.kvsp.http.blockclient import BlockClient, SealedSections
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.records import Candidate
from kvcs.kvsp.http.uris import PublicationUri
from kvcs.kvsp.layout import Layout
from kvcs.profile.naming import PublicationName

#: Candidates that are asked for: a publication at several relays counts as often.
_CANDIDATES = 16


class HttpIndex:
    """What :class:`~kvcs.consumer.prefixes.Index` asks for.

    Args:
        client: Opened and closed by the caller.
    """

    def __init__(self, client: IndexClient) -> None:
        self._client = client

    async def lookup(
        self, scope_id: bytes, compatibility_id: bytes, block_keys: Sequence[bytes]
    ) -> Sequence[Replica]:
        """Return what holds the first of these blocks, in one question; the longest first.

        Raises:
            ServiceFailed: If the index does not answer.
            Expired: If it takes too long.
            ConfigError: If the client is one for another scope.
        """
        if scope_id != self._client.scope_id:
            raise ConfigError("an index for another scope")
        longest = await self._client.longest(
            compatibility_id, block_keys, limit=_CANDIDATES, following=True
        )
        return replicas_of(longest.candidates)


def replicas_of(candidates: Iterable[Candidate]) -> list[Replica]:
    """Return the publications among candidates, each once, with every place where it is.

    Args:
        candidates: As the index told them, those that cover most first. Of a publication that is
            told in two ways the first counts: the other one is older.
    """
    found: dict[PublicationName, Candidate] = {}
    places: dict[PublicationName, list[str]] = {}
    for one in candidates:
        # One that lacks the first blocks cannot be used for the beginning of a prompt.
        if isinstance(one.uri, PublicationUri) and one.covers and not one.first_block:
            found.setdefault(one.uri.name, one)
            places.setdefault(one.uri.name, []).append(one.uri.session)
    return [
        Replica(
            publication=name,
            blocks=one.covers or 0,
            following=one.following or (),
            uris=tuple(places[name]),
        )
        for name, one in found.items()
    ]


class HttpSections:
    """What :class:`~kvcs.consumer.sections.SectionSource` asks for: a block service.

    Args:
        client: Opened and closed by the caller.
        deterministic: Whether the service serves nothing but publications that are bit-identical
            wherever they were computed. Nobody but the caller can know.
    """

    def __init__(self, client: BlockClient, *, deterministic: bool = False) -> None:
        self._client = client
        self._deterministic = deterministic

    @property
    def name(self) -> str:
        """The URI of the service."""
        return str(self._client.uri)

    @property
    def deterministic(self) -> bool:
        """As the caller said."""
        return self._deterministic

    async def sections(
        self,
        scope_id: bytes,
        compatibility_id: bytes,
        wanted: Sequence[SectionKey],
        layout: Layout,
        publication_id: bytes,
    ) -> AsyncGenerator[Section, None]:
        """Yield what it has of what is wanted, the lowest layers first, in few requests.

        It is asked for the publication, and then for what it lacks of that in any other.

        Raises:
            NotFound: At the end, if there was nothing of it.
            ServiceFailed: If the service does not answer as it should.
            Expired: If it takes too long.
        """
        left = dict.fromkeys(wanted)
        for publication in (publication_id, None):
            answer = self._client.wanted(
                scope_id, compatibility_id, tuple(left), layout, publication=publication
            )
            try:
                async with aclosing(answer) as found:
                    async for one in found:
                        key = SectionKey(one.block_key, one.layer)
                        left.pop(key, None)
                        if isinstance(one, SealedSections):
                            yield Section(key=key, sealed=one.sealed)
                        else:
                            yield Section(key=key, k=one.k, v=one.v, layer_digest=one.digest)
            except NotFound:
                if publication is None and len(left) == len(wanted):
                    raise
            if not left:
                return
