import pytest

from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.answers import MAX_REMEMBERED, Answers, Refusal
from kvcs.producer.publication import Publication
from kvcs.profile.naming import PublicationName, new_publication_id
from kvcs.profile.signing import ProducerKey
from moqt.codepoints import RequestErrorCode
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.localtrack import LocalTrack

SCOPE = ScopeKey(bytes(32))
DESCRIPTOR = Descriptor(
    model="m", revision="1", layers=1, block_tokens=2, dtype="int8", k_shape=(1, 1), v_shape=(1, 1)
)


def publication(*, scope: ScopeKey = SCOPE, key: ProducerKey | None = None) -> Publication:
    keys = scope.block_keys(DESCRIPTOR, [1, 2])
    name = PublicationName(
        scope.scope_id, scope.compatibility_id(DESCRIPTOR), keys[-1], new_publication_id()
    )
    made = Publication(name, DESCRIPTOR, producer_key=key)
    made.open_segment(keys)
    return made


def answers_with(*publications: Publication) -> Answers:
    answers = Answers(SCOPE.scope_id)
    for made in publications:
        answers.add(made)
    return answers


@pytest.mark.parametrize("name", [b"manifest", b"k.raw.s0", b"v.raw.s0"])
def test_a_track_of_a_publication_is_served_from_it(name: bytes) -> None:
    made = publication()

    answer = answers_with(made).track(made.name.track(name))
    assert isinstance(answer, LocalTrack)
    assert answer is made.tracks[name]


@pytest.mark.parametrize(
    ("key", "missing"),
    [(None, b"manifest.cose"), (ProducerKey.generate(), b"manifest")],
    ids=["plain", "signed"],
)
def test_the_manifest_that_a_publication_does_not_have_does_not_exist(
    key: ProducerKey | None, missing: bytes
) -> None:
    made = publication(key=key)

    answer = answers_with(made).track(made.name.track(missing))
    assert isinstance(answer, Refusal)
    assert answer.code is RequestErrorCode.DOES_NOT_EXIST


@pytest.mark.parametrize("name", [b"k.raw.s1", b"kv.raw.s0", b"k.zstd.s0", b"K.raw.s0", b"", b"x"])
def test_other_tracks_of_a_publication_do_not_exist(name: bytes) -> None:
    made = publication()

    answer = answers_with(made).track(made.name.track(name))
    assert isinstance(answer, Refusal)
    assert answer.code is RequestErrorCode.DOES_NOT_EXIST


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (b"kvcs-1",),
        (b".hidden", b"x"),
        (b"kvcs-2", b"a", b"b", b"c", b"d"),
        (b"kvcs-1", bytes(32), bytes(32), bytes(32), bytes(15)),
        (b"kvcs-1", b"\x01" * 32, bytes(32), bytes(32), bytes(16)),
        (b"kvcs-1", SCOPE.scope_id, bytes(32), bytes(32), bytes(16)),
    ],
)
def test_names_of_nobody_do_not_exist(fields: tuple[bytes, ...]) -> None:
    answer = answers_with(publication()).track(FullTrackName(TrackNamespace(fields), b"manifest"))

    assert isinstance(answer, Refusal)
    assert answer.code is RequestErrorCode.DOES_NOT_EXIST


def test_a_publication_that_is_gone_does_not_exist_and_the_reason_is_told() -> None:
    made = publication()
    answers = answers_with(made)
    answers.remove(made, "expired")
    answers.remove(made, "again")

    assert answers.track(made.name.track(b"manifest")) == Refusal(
        RequestErrorCode.DOES_NOT_EXIST, "expired"
    )
    assert not answers.directory.matching(TrackNamespace())
    assert not answers.publications


def test_reasons_are_remembered_within_a_bound() -> None:
    answers = Answers(SCOPE.scope_id)
    made = [publication() for _ in range(MAX_REMEMBERED + 1)]
    for one in made:
        answers.add(one)
        answers.remove(one, "expired")

    first, last = (answers.track(made[at].name.track(b"manifest")) for at in (0, -1))
    assert isinstance(first, Refusal)
    assert first.reason == "no such publication here"
    assert isinstance(last, Refusal)
    assert last.reason == "expired"


def test_a_publication_id_is_never_used_twice() -> None:
    made = publication()
    answers = answers_with(made)
    answers.remove(made, "expired")

    with pytest.raises(ValueError, match="used before"):
        answers.add(made)


def test_a_publication_of_another_scope_is_not_taken() -> None:
    with pytest.raises(ValueError, match="another scope"):
        answers_with(publication(scope=ScopeKey(b"\x01" * 32)))


def test_publications_are_discovered_under_their_prefix_and_their_scope() -> None:
    one, other = publication(), publication()
    answers = answers_with(one, other)

    for prefix in (one.name.prefix, one.name.scope_prefix):
        directory = answers.namespaces(prefix)
        assert directory is answers.directory
        assert answers.directory.matching(prefix) == {one.name.namespace, other.name.namespace}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ((), RequestErrorCode.UNAUTHORIZED),
        ((b"kvcs-1",), RequestErrorCode.UNAUTHORIZED),
        ((b"kvcs-1", bytes(32)), RequestErrorCode.DOES_NOT_EXIST),
        ((b"other",), RequestErrorCode.DOES_NOT_EXIST),
    ],
)
def test_who_does_not_name_the_scope_discovers_nothing(
    fields: tuple[bytes, ...], code: RequestErrorCode
) -> None:
    answer = answers_with(publication()).namespaces(TrackNamespace(fields))

    assert isinstance(answer, Refusal)
    assert answer.code is code


def test_nothing_new_begins_while_the_producer_stops() -> None:
    made = publication()
    answers = answers_with(made)
    answers.draining = True

    for answer in (
        answers.track(made.name.track(b"manifest")),
        answers.namespaces(made.name.prefix),
    ):
        assert isinstance(answer, Refusal)
        assert answer.code is RequestErrorCode.GOING_AWAY


def test_a_producer_takes_no_namespaces() -> None:
    assert Answers(SCOPE.scope_id).published_namespace().code is RequestErrorCode.UNINTERESTED
