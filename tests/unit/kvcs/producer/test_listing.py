"""What an index is told of a producer's publications."""

from typing import Any, cast

from kvcs.kvsp.http.records import Holding, Runs
from kvcs.kvsp.http.registrar import Registrar
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.producer.answers import Answers
from kvcs.producer.listing import Listing, holder_id
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from tests.unit.kvcs.producer.test_blocks import COMPAT, KEYS, expected, opened, produce
from tests.unit.kvcs.producer.test_publication import LAYERS, SCOPE

SESSION, SERVICE = "moqt://relay:4443/", "https://host:8443"


class Told:
    """A registrar that only remembers."""

    def __init__(self) -> None:
        self.held: dict[bytes, Holding] = {}

    def hold(self, compatibility_id: bytes, holder_id: bytes, holding: Holding) -> None:
        assert compatibility_id == COMPAT
        self.held[holder_id] = holding

    def release(self, compatibility_id: bytes, holder_id: bytes) -> None:
        self.held.pop(holder_id, None)


def listing(answers: Answers, told: Told) -> Listing:
    made = Listing(
        answers, cast(Registrar, told), sessions=[SESSION], services=[SERVICE + "/"]
    )  # fmt: skip
    made.start()
    return made


def of(told: Told, publication: Publication, uri: str) -> Holding | None:
    return told.held.get(holder_id(publication, uri))


def test_a_publication_is_listed_as_it_grows_and_until_it_goes() -> None:
    answers, told = Answers(SCOPE.scope_id), Told()
    listing(answers, told)
    made = opened(answers)
    assert told.held == {}  # nothing is promised yet

    segment = made.open_segment(KEYS[:3])
    made.publish_manifest()
    early = of(told, made, SESSION)
    assert early == Holding(PublicationUri(SESSION, made.name), tuple(KEYS[:3]), Runs(()))
    assert of(told, made, SERVICE) is None  # there is no layer to be had

    for layer in range(LAYERS):
        made.add_layer(segment, layer, *expected(layer, 0, 3))
    service = of(told, made, SERVICE)
    assert service == Holding(
        ServiceUri(SERVICE), tuple(KEYS[:3]), Runs(((0, LAYERS - 1),)),
        publication=made.name.publication_id,
    )  # fmt: skip
    assert service is not None
    assert not service.complete

    made.finish()
    for uri in (SESSION, SERVICE):
        ended = of(told, made, uri)
        assert ended is not None
        assert ended.complete

    answers.remove(made, "expired")
    assert told.held == {}


def test_only_layers_that_every_segment_has_are_listed() -> None:
    answers, told = Answers(SCOPE.scope_id), Told()
    made = opened(answers)
    produce(made, [3])
    segment = made.open_segment(KEYS[3:])
    for layer in range(2):
        made.add_layer(segment, layer, *expected(layer, 3, 2))
    listing(answers, told)  # it finds what was there before

    found = of(told, made, SESSION)
    assert found is not None
    assert (found.keys, found.layers) == (tuple(KEYS), Runs(((0, 1),)))


def test_what_is_offered_in_no_raw_form_is_not_listed_over_http() -> None:
    answers, told = Answers(SCOPE.scope_id), Told()
    listing(answers, told)
    encodings: Any = (Encoding("shuffle-zstd"), Encoding("shuffle-zstd", joint=True))
    made = opened(answers, encodings=encodings)
    produce(made, [5])

    found = of(told, made, SESSION)
    assert found is not None
    assert found.encodings == ("shuffle-zstd", "kv.shuffle-zstd")
    assert of(told, made, SERVICE) is None


def test_what_was_given_up_is_listed_no_more() -> None:
    answers, told = Answers(SCOPE.scope_id), Told()
    listing(answers, told)
    made = opened(answers, manifest_every=1)
    produce(made, [5], layers=3)
    before = dict(told.held)
    assert len(before) == 2
    made.abandon("an error")
    assert told.held == before  # it has ended, but nobody may take it for complete
    answers.remove(made, "abandoned")

    assert told.held == {}


def test_who_has_stopped_hears_nothing_more() -> None:
    answers, told = Answers(SCOPE.scope_id), Told()
    stopped = listing(answers, told)
    made = opened(answers)
    produce(made, [3])
    before = dict(told.held)
    stopped.stop()
    made.open_segment(KEYS[3:])
    made.publish_manifest()
    answers.remove(made, "expired")

    assert told.held == before
