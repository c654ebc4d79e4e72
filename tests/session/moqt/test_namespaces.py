"""Who has what: PUBLISH_NAMESPACE and SUBSCRIBE_NAMESPACE."""

import pytest

from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode, StreamErrorCode
from moqt.errors import UsageError
from moqt.names import TrackNamespace
from moqt.session import discovery
from moqt.session.commands import SendStreamData
from moqt.session.config import Role
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    NamespaceAppeared,
    NamespaceGone,
    NamespacePublished,
    NamespaceRevoked,
    NamespacesEnded,
    NamespacesSubscribed,
    PeerRequestEnded,
    PublishNamespaceReceived,
    RequestRefused,
    SubscribeNamespaceReceived,
)
from moqt.wire.framing import encode_message
from moqt.wire.messages.namespace import Namespace, NamespaceDone, SubscribeNamespace
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.parameters import Parameters
from tests.session.lone import Lone
from tests.session.pair import Pair

of = TrackNamespace.of
KV = of("kvcs-1")


def appeared(pair: Pair) -> list[TrackNamespace]:
    return [e.namespace for e in pair.client.take(NamespaceAppeared)]


def gone(pair: Pair) -> list[TrackNamespace]:
    return [e.namespace for e in pair.client.take(NamespaceGone)]


def watching(*namespaces: TrackNamespace, prefix: TrackNamespace = KV, chunk: int = 1) -> Pair:
    pair = Pair(chunk=chunk)
    for namespace in namespaces:
        pair.server.directory.add(namespace)
    pair.client.session.subscribe_namespace(prefix)
    pair.settle()
    return pair


# -- SUBSCRIBE_NAMESPACE ---------------------------------------------------------------------------


def test_the_answer_comes_first_and_then_every_match_there_is() -> None:
    pair = watching(of("kvcs-1", "a"), of("kvcs-1", "b", "c"), of("other"))

    kinds = [type(e) for e in pair.client.seen]
    assert kinds == [NamespacesSubscribed, NamespaceAppeared, NamespaceAppeared]
    assert appeared(pair) == [of("kvcs-1", "a"), of("kvcs-1", "b", "c")]


def test_later_ones_are_told_as_they_come_and_go_in_order() -> None:
    pair = watching()
    for _ in range(100):
        pair.server.directory.add(of("kvcs-1", "x"))
        pair.settle()
        pair.server.directory.remove(of("kvcs-1", "x"))
        pair.settle()

    kinds = [type(e) for e in pair.client.seen[1:]]
    assert kinds == [NamespaceAppeared, NamespaceGone] * 100


@pytest.mark.parametrize(
    ("namespace", "matches"),
    [
        (of("kvcs-1"), True),
        (of("kvcs-1", ""[:0] or "scope"), True),
        (of("kvcs-11"), False),
        (of("kvcs-"), False),
        (of("Kvcs-1", "scope"), False),
        (TrackNamespace(), False),
    ],
)
def test_a_prefix_matches_whole_fields(namespace: TrackNamespace, matches: bool) -> None:
    pair = watching(namespace)

    assert appeared(pair) == ([namespace] if matches else [])


def test_fields_are_octets_and_not_text() -> None:
    namespace = TrackNamespace((b"\x00/.\xff", b"/", b"\xc3"))
    pair = watching(namespace, prefix=TrackNamespace((b"\x00/.\xff",)))

    assert appeared(pair) == [namespace]
    assert appeared(watching(namespace, prefix=TrackNamespace((b"\x00",)))) == []


def test_only_the_suffix_travels_and_an_exact_match_has_an_empty_one() -> None:
    pair = watching(KV, of("kvcs-1", "a"))

    sent = [
        bytes(c.data) for end, c in pair.log if end is pair.server and isinstance(c, SendStreamData)
    ]
    assert sent == [
        encode_message(RequestOk()),
        encode_message(Namespace(TrackNamespace())),
        encode_message(Namespace(of("a"))),
    ]


def test_the_empty_prefix_asks_for_everything() -> None:
    pair = watching(of("a"), of("b", "c"), TrackNamespace(), prefix=TrackNamespace())

    assert appeared(pair) == [TrackNamespace(), of("a"), of("b", "c")]


def test_a_namespace_is_gone_only_with_its_last_holder() -> None:
    pair = watching(of("kvcs-1", "a"), of("kvcs-1", "a"))
    assert appeared(pair) == [of("kvcs-1", "a")]

    pair.server.directory.remove(of("kvcs-1", "a"))
    pair.settle()
    assert gone(pair) == []
    pair.server.directory.remove(of("kvcs-1", "a"))
    pair.settle()

    assert gone(pair) == [of("kvcs-1", "a")]
    with pytest.raises(UsageError):
        pair.server.directory.remove(of("kvcs-1", "a"))


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        (of("a"), of("a"), True),
        (of("a"), of("a", "b"), True),
        (of("a", "b"), of("a"), True),
        (of("a", "b"), of("a", "c"), False),
        (of("a"), of("ab"), False),
        (TrackNamespace(), of("a"), True),
    ],
)
def test_prefixes_of_one_session_must_not_overlap(
    first: TrackNamespace, second: TrackNamespace, overlap: bool
) -> None:
    pair = watching(prefix=first)
    pair.client.session.subscribe_namespace(second)
    pair.settle()

    codes = [e.code for e in pair.client.take(RequestRefused)]
    assert codes == [RequestErrorCode.PREFIX_OVERLAP] * overlap


def test_a_prefix_is_free_again_when_its_subscription_is_over() -> None:
    pair = Pair()
    for _ in range(3):
        request_id = pair.client.session.subscribe_namespace(KV)
        pair.settle()
        pair.client.session.cancel(request_id)
        pair.settle()

    assert pair.client.take(RequestRefused) == []
    assert pair.leave_behind() == []


def test_a_long_overlapping_prefix_is_refused_with_a_reason_that_fits() -> None:
    prefix = TrackNamespace((b"\xff" * 4000,))
    pair = watching(prefix=prefix)
    pair.client.session.subscribe_namespace(prefix)

    pair.settle()

    assert pair.client.one(RequestRefused).code == RequestErrorCode.PREFIX_OVERLAP


def test_two_sessions_share_one_directory() -> None:
    pairs = [Pair() for _ in range(3)]
    directory = NamespaceDirectory()
    for pair in pairs:
        pair.server.directory = directory
        pair.client.session.subscribe_namespace(KV)
        pair.settle()
    directory.add(of("kvcs-1", "a"))
    assert all(pair.server.woken for pair in pairs)
    pairs[0].client.session.close()
    for pair in pairs:
        pair.settle()
    directory.remove(of("kvcs-1", "a"))
    for pair in pairs:
        pair.settle()

    assert [appeared(pair) for pair in pairs] == [[], [of("kvcs-1", "a")], [of("kvcs-1", "a")]]
    assert [gone(pair) for pair in pairs[1:]] == [[of("kvcs-1", "a")]] * 2


def test_too_many_matches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_MATCHES", 2)
    pair = watching(of("kvcs-1", "a"), of("kvcs-1", "b"), of("kvcs-1", "c"))

    assert pair.client.one(RequestRefused).code == RequestErrorCode.NAMESPACE_TOO_LARGE
    assert pair.leave_behind() == []


def test_a_publisher_that_tells_of_too_many_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = watching(of("kvcs-1", "a"), of("kvcs-1", "b"))
    monkeypatch.setattr(discovery, "MAX_MATCHES", 2)
    pair.server.directory.add(of("kvcs-1", "c"))

    pair.settle()

    ended = pair.client.one(NamespacesEnded)
    assert (ended.code, ended.by_peer) == (StreamErrorCode.EXCESSIVE_LOAD, False)
    assert pair.leave_behind() == []


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_the_end_of_the_stream_ends_the_subscription(how: str) -> None:
    peer = Lone(Role.CLIENT)
    peer.session.subscribe_namespace(KV)
    peer.drain()
    stream_id = peer.last_stream()
    peer.say(stream_id, RequestOk(), Namespace(of("a")))
    if how == "fin":
        peer.data(stream_id, b"", fin=True)
    else:
        peer.reset(stream_id, 9)

    [ended] = peer.seen(NamespacesEnded)
    assert ended.by_peer
    assert peer.session.open_requests == 0
    peer.assert_alive()


def test_a_namespace_told_twice_appears_once() -> None:
    peer = Lone(Role.CLIENT)
    peer.session.subscribe_namespace(KV)
    peer.drain()
    peer.say(peer.last_stream(), RequestOk(), Namespace(of("a")), Namespace(of("a")))
    peer.say(peer.last_stream(), NamespaceDone(of("a")))

    assert len(peer.seen(NamespaceAppeared)) == len(peer.seen(NamespaceGone)) == 1


def test_a_namespace_told_gone_twice_goes_once_and_may_come_back() -> None:
    peer = Lone(Role.CLIENT)
    peer.session.subscribe_namespace(KV)
    peer.drain()
    stream_id = peer.last_stream()
    peer.say(stream_id, RequestOk(), Namespace(of("a")))
    peer.say(stream_id, NamespaceDone(of("a")), NamespaceDone(of("a")))

    assert len(peer.seen(NamespaceAppeared)) == len(peer.seen(NamespaceGone)) == 1
    peer.say(stream_id, Namespace(of("a")), NamespaceDone(of("a")))
    assert len(peer.seen(NamespaceAppeared)) == len(peer.seen(NamespaceGone)) == 2
    peer.assert_alive()


# -- a prefix that moves ---------------------------------------------------------------------------


def asked_for(peer: Lone, prefix: TrackNamespace, directory: NamespaceDirectory) -> int:
    stream_id = peer.bidi()
    peer.say(stream_id, SubscribeNamespace(peer.request_id(), prefix))
    peer.session.accept_namespaces(peer.seen(SubscribeNamespaceReceived)[-1].request_id, directory)
    peer.drain()
    peer.commands.clear()
    return stream_id


def moved(peer: Lone, prefix: TrackNamespace) -> RequestUpdate:
    return RequestUpdate(peer.request_id(), Parameters({P.TRACK_NAMESPACE_PREFIX: prefix}))


def test_a_moved_prefix_tells_all_afresh_relative_to_the_new_one() -> None:
    peer = Lone(Role.SERVER)
    directory = NamespaceDirectory()
    for namespace in (of("a", "1"), of("b", "2"), of("b", "3")):
        directory.add(namespace)
    stream_id = asked_for(peer, of("a"), directory)

    peer.say(stream_id, moved(peer, of("b")))
    directory.remove(of("a", "1"))
    directory.remove(of("b", "3"))
    peer.drain()

    assert peer.sent(stream_id) == b"".join(
        map(
            encode_message,
            (RequestOk(), Namespace(of("2")), Namespace(of("3")), NamespaceDone(of("3"))),
        )
    )


def test_a_prefix_moved_onto_another_ends_the_request() -> None:
    peer = Lone(Role.SERVER)
    directory = NamespaceDirectory()
    asked_for(peer, of("a"), directory)
    stream_id = asked_for(peer, of("b"), directory)

    peer.say(stream_id, moved(peer, of("a", "x")))

    refusal = encode_message(
        RequestError(RequestErrorCode.PREFIX_OVERLAP, 0, "a-x overlaps another")
    )
    assert peer.sent(stream_id) == refusal
    assert [e.cancelled for e in peer.seen(PeerRequestEnded)] == [False]
    directory.add(of("b", "late"))
    peer.drain()
    peer.assert_alive()


def test_an_update_ahead_of_the_answer_is_applied_behind_it() -> None:
    peer = Lone(Role.SERVER)
    directory = NamespaceDirectory()
    directory.add(of("b", "2"))
    stream_id = peer.bidi()
    peer.say(stream_id, SubscribeNamespace(peer.request_id(), of("a")), moved(peer, of("b")))
    [asked] = peer.seen(SubscribeNamespaceReceived)

    peer.session.accept_namespaces(asked.request_id, directory)
    peer.drain()

    sent = [RequestOk(), RequestOk(), Namespace(of("2"))]
    assert peer.sent(stream_id) == b"".join(map(encode_message, sent))


# -- PUBLISH_NAMESPACE -----------------------------------------------------------------------------


def test_an_announcement_stands_until_it_is_withdrawn() -> None:
    pair = Pair(chunk=1)
    request_id = pair.client.session.publish_namespace(KV)
    pair.settle()
    assert pair.client.one(NamespacePublished).request_id == request_id
    assert pair.server.one(PublishNamespaceReceived).prefix == KV
    pair.advance(1000.0)

    pair.client.session.cancel(request_id)
    pair.settle()

    assert pair.server.one(PeerRequestEnded).cancelled
    assert pair.leave_behind() == []


def test_a_revoked_announcement_is_told() -> None:
    pair = Pair()
    request_id = pair.client.session.publish_namespace(KV)
    pair.settle()
    [asked] = pair.server.take(PublishNamespaceReceived)

    pair.server.session.cancel(asked.request_id)
    pair.settle()

    assert pair.client.one(NamespaceRevoked).request_id == request_id
    assert pair.leave_behind() == []


def test_a_receiver_that_has_finished_revokes_by_stop_sending() -> None:
    peer = Lone(Role.CLIENT)
    peer.session.publish_namespace(KV)
    peer.drain()
    stream_id = peer.last_stream()
    peer.say(stream_id, RequestOk(), fin=True)
    assert peer.seen(NamespaceRevoked) == []

    peer.stop(stream_id, 1)

    assert [e.code for e in peer.seen(NamespaceRevoked)] == [1]
    assert peer.session.open_requests == 0


def test_an_announcement_can_be_updated_and_its_fin_is_no_withdrawal() -> None:
    pair = Pair()
    pair.client.session.publish_namespace(KV)
    pair.settle()
    request = next(iter(pair.client.session._requests.by_id.values()))
    request.finish()
    pair.settle()

    assert pair.server.take(PeerRequestEnded) == []
    assert pair.server.session.open_requests == 1


def test_announcements_end_with_the_session() -> None:
    pair = Pair()
    pair.client.session.publish_namespace(KV)
    pair.settle()
    pair.client.session.close()
    pair.settle()

    assert pair.server.session.terminated is not None
