"""A publication served by one session and read by another, with no network in between."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Layout
from kvcs.producer.answers import Answers, Refusal
from kvcs.producer.publication import Publication
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import PublicationName
from kvcs.profile.payload import Block
from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import Command, ResetStream, SendStreamData, StopSending
from moqt.session.config import Role
from moqt.session.core import Session
from moqt.session.events import (
    Event,
    ObjectReceived,
    SubscribeReceived,
    SubscriptionEnded,
)
from moqt.wire.filters import LocationFilter

SCOPE = ScopeKey(bytes(32))
LAYERS, BLOCKS = 5, 3
DESCRIPTOR = Descriptor(
    model="m",
    revision="1",
    layers=LAYERS,
    block_tokens=2,
    dtype="float16",
    k_shape=(1, 3),
    v_shape=(1, 2),
)


def publication() -> Publication:
    keys = SCOPE.block_keys(DESCRIPTOR, range(2 * BLOCKS))
    name = PublicationName(SCOPE.scope_id, SCOPE.compatibility_id(DESCRIPTOR), keys[-1], bytes(16))
    made = Publication(name, DESCRIPTOR, manifest_every=2)
    made.open_segment(keys)
    return made


def add_layer(made: Publication, layer: int) -> None:
    layout = Layout.of(DESCRIPTOR)
    k, v = (
        np.full((2 * BLOCKS, *shape[1:]), layer, layout.dtype)
        for shape in (layout.k_shape, layout.v_shape)
    )
    made.add_layer(made.segments[0], layer, k, v)


class Served:
    """A producer's session and a consumer's, and the wire between them."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._consumer, self._producer = Session(Role.CLIENT), Session(Role.SERVER)
        self._consumer.start()
        self._producer.start()
        self.settle()

    def subscribe(self, track: FullTrackName, fill: LocationFilter) -> int:
        return self._consumer.subscribe(track, fill=fill)

    def settle(self) -> list[Event]:
        """Carry everything both ways until nobody has more to say."""
        seen: list[Event] = []
        moved = True
        while moved:
            moved = False
            for source, sink in (
                (self._consumer, self._producer),
                (self._producer, self._consumer),
            ):
                for command in source.data_to_send():
                    moved = True
                    _carry(command, sink)
            for event in self._consumer.events():
                seen.append(event)
                if isinstance(event, ObjectReceived):
                    self._consumer.consumed(event)
            for event in self._producer.events():
                if isinstance(event, SubscribeReceived):
                    self._answer(event)
                    moved = True
        return seen

    def _answer(self, request: SubscribeReceived) -> None:
        answer = self._answers.track(request.track)
        if isinstance(answer, Refusal):
            self._producer.reject(request.request_id, answer.code, answer.reason)
        else:
            self._producer.accept_subscribe(request.request_id, answer)


def _carry(command: Command, sink: Session) -> None:
    match command:
        case SendStreamData(stream_id, data, fin):
            sink.receive_stream_data(stream_id, bytes(data), fin=fin)
        case ResetStream(stream_id, code):
            sink.receive_reset(stream_id, code)
        case StopSending(stream_id, code):
            sink.receive_stop_sending(stream_id, code)


def objects(events: list[Event], request_id: int) -> Iterator[ObjectReceived]:
    for event in events:
        if isinstance(event, ObjectReceived) and event.request_id == request_id:
            yield event


@settings(max_examples=60)
@given(joins=st.lists(st.integers(0, LAYERS), min_size=1, max_size=6), finishes=st.booleans())
def test_whoever_joins_whenever_gets_each_object_once(joins: list[int], finishes: bool) -> None:
    made = publication()
    answers = Answers(SCOPE.scope_id)
    answers.add(made)
    served = Served(answers)
    tracks = [made.name.track(name) for name in (b"k.raw.s0", b"v.raw.s0")]
    seen: list[Event] = []
    requests: list[int] = []
    for layer in range(LAYERS + 1):
        if layer == LAYERS and finishes:
            made.finish()
        for _ in range(joins.count(layer)):
            requests += [served.subscribe(t, LocationFilter.absolute_start(0, 0)) for t in tracks]
            seen += served.settle()
        if layer < LAYERS:
            add_layer(made, layer)
            seen += served.settle()

    everything = [Location(g, o) for g in range(LAYERS) for o in range(BLOCKS)]
    for request_id in requests:
        found = [
            event for event in objects(seen, request_id) if event.status is ObjectStatus.NORMAL
        ]
        assert sorted(event.location for event in found) == everything
        for event in found:
            where = {"group_id": event.location.group, "object_id": event.location.object}
            Block.decode(event.payload, **where)
    ends = {e.request_id: e.code for e in seen if isinstance(e, SubscriptionEnded)}
    assert ends == dict.fromkeys(requests, PublishDoneCode.TRACK_ENDED)


@given(join=st.integers(0, LAYERS))
def test_whoever_joins_gets_the_current_manifest_and_every_later_one(join: int) -> None:
    made = publication()
    answers = Answers(SCOPE.scope_id)
    answers.add(made)
    served = Served(answers)
    seen: list[Event] = []
    request_id = -1
    current = -1
    for layer in range(LAYERS + 1):
        if layer == join:
            current = made.versions - 1
            request_id = served.subscribe(made.name.track(b"manifest"), LocationFilter.relative(1))
            seen += served.settle()
        if layer < LAYERS:
            add_layer(made, layer)
            seen += served.settle()
    made.finish()
    seen += served.settle()

    found = list(objects(seen, request_id))
    assert [event.location for event in found] == [
        Location(version, 0) for version in range(current, made.versions)
    ]
    last: Any = None
    for event in found:
        manifest = Manifest.from_json(event.payload)
        manifest.check_identity(made.name, event.location.group)
        if last is not None:
            manifest.check_follows(last)
        last = manifest
    assert last.complete
