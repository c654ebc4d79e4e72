"""What a retrieval makes of what an index told."""

from typing import Any

from kvcs.consumer.prefixes import Replica
from kvcs.consumer.services import replicas_of
from kvcs.kvsp.http.records import Candidate, Runs
from kvcs.kvsp.http.uris import HolderUri, PublicationUri, ServiceUri
from kvcs.profile.naming import PublicationName

LONG, SHORT = (
    PublicationName(b"s" * 32, b"c" * 32, anchor * 32, anchor * 16) for anchor in (b"a", b"b")
)
KEYS = (b"k" * 32, b"l" * 32)


def candidate(uri: HolderUri, covers: int | None = 3, **others: Any) -> Candidate:
    known: dict[str, Any] = {
        "first_block": 0,
        "blocks": 5,
        "layers": Runs(((0, 1),)),
        "encodings": ("raw",),
        "complete": True,
        "publication": None,
        "expires_s": 1.0,
    }
    return Candidate(uri, covers=covers, **(known | others))


def at(host: str, name: PublicationName) -> PublicationUri:
    return PublicationUri(f"moqt://{host}:4443/", name)


def test_a_publication_is_told_once_with_every_place_where_it_is() -> None:
    found = replicas_of(
        [
            candidate(at("one", LONG), 5, following=KEYS),
            candidate(at("two", LONG), 4),
            candidate(at("one", SHORT), 2),
        ]
    )

    assert found == [
        Replica(
            publication=LONG,
            blocks=5,
            following=KEYS,
            uris=("moqt://one:4443/", "moqt://two:4443/"),
        ),
        Replica(publication=SHORT, blocks=2, uris=("moqt://one:4443/",)),
    ]


def test_what_a_retrieval_has_no_use_for_is_passed_over() -> None:
    found = replicas_of(
        [
            candidate(ServiceUri("https://host")),
            candidate(at("window", LONG), first_block=2),
            candidate(at("nothing", LONG), covers=None),
        ]
    )

    assert found == []
