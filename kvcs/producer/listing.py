"""Listing: what an index is told of a producer's publications. Shell: called as they change.

Each publication is listed at every URI under which it can be had: over MOQT from its first segment
on, so that a consumer finds it while it is produced; over HTTP from its first layer on. With every
version of its manifest is said anew what it has: blocks, layers, and whether that is all.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

from kvcs.kvsp.http.names import HOLDER_ID_OCTETS
from kvcs.kvsp.http.records import Holding, Runs
from kvcs.kvsp.http.registrar import Registrar
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.producer.answers import Answers
from kvcs.producer.publication import Publication


class Listing:
    """Keeps the publications of a producer listed, from :meth:`start` to :meth:`stop`.

    Args:
        answers: The publications.
        registrar: Who tells the index.
        sessions: MOQT URIs under which they can be had.
        services: URIs of block services that serve them.

    Raises:
        BadName: If a URI is none.
    """

    def __init__(
        self,
        answers: Answers,
        registrar: Registrar,
        *,
        sessions: Sequence[str] = (),
        services: Sequence[str] = (),
    ) -> None:
        self._answers = answers
        self._registrar = registrar
        self._sessions = tuple(sessions)
        self._services = tuple(map(ServiceUri.parse, services))
        self._watched: dict[Publication, Callable[[], None]] = {}

    def start(self) -> None:
        """List what there is, and what comes."""
        self._answers.directory.watch(self._look)
        self._look()

    def stop(self) -> None:
        """List nothing more. What is listed stays the registrar's."""
        self._answers.directory.unwatch(self._look)
        for publication, watcher in self._watched.items():
            publication.tracks[publication.manifest_name].unwatch(watcher)
        self._watched.clear()

    # -- parts -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """See which publications have come and which are gone."""
        there = self._answers.publications
        for publication in there:
            if publication not in self._watched:
                self._come(publication)
        for publication in set(self._watched).difference(there):
            self._go(publication)

    def _come(self, publication: Publication) -> None:
        def tell() -> None:
            self._tell(publication)

        self._watched[publication] = tell
        publication.tracks[publication.manifest_name].watch(tell)
        tell()

    def _go(self, publication: Publication) -> None:
        publication.tracks[publication.manifest_name].unwatch(self._watched.pop(publication))
        compatibility_id = publication.name.compatibility_id
        for uri in (*self._sessions, *map(str, self._services)):
            self._registrar.release(compatibility_id, holder_id(publication, uri))

    def _tell(self, publication: Publication) -> None:
        if publication.abandoned is not None:
            return  # it is gone in a moment
        for uri, holding in holdings(publication, self._sessions, self._services):
            self._registrar.hold(
                publication.name.compatibility_id, holder_id(publication, uri), holding
            )


def holder_id(publication: Publication, uri: str) -> bytes:
    """Return what a publication under one URI is called at an index: the same every time."""
    name = publication.name.publication_id + uri.encode()
    return sha256(name).digest()[:HOLDER_ID_OCTETS]


def holdings(
    publication: Publication, sessions: Sequence[str], services: Sequence[ServiceUri]
) -> list[tuple[str, Holding]]:
    """Return what is to be said of a publication now, with the URI that it is said for.

    Args:
        publication: One that has not been abandoned.
        sessions: MOQT URIs under which it can be had.
        services: Block services that serve it.
    """
    segments = publication.segments
    if not segments:
        return []
    keys = tuple(key for segment in segments for key in segment.keys)
    layers = Runs.of(range(min(segment.next_layer for segment in segments)))
    told: list[tuple[str, Holding]] = [
        (
            uri,
            Holding(
                PublicationUri(uri, publication.name),
                keys,
                layers,
                first_block=segments[0].first_block,
                encodings=tuple(map(str, publication.encodings)),
                complete=publication.ended,
            ),
        )
        for uri in sessions
    ]
    is_raw = any(encoding.codec == "raw" for encoding in publication.encodings)
    if is_raw and layers:
        told += [
            (
                str(service),
                Holding(
                    service,
                    keys,
                    layers,
                    first_block=segments[0].first_block,
                    complete=publication.ended,
                    publication=publication.name.publication_id,
                ),
            )
            for service in services
        ]
    return told
