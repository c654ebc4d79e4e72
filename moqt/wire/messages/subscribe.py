"""SUBSCRIBE, its answer, its notices and its end; TRACK_STATUS, which asks without subscribing."""

from dataclasses import dataclass
from typing import ClassVar, Self

from moqt.codepoints import MessageType, PublishDoneCode, known
from moqt.names import FullTrackName
from moqt.wire.messages.base import Message
from moqt.wire.pairs import Properties, decode_track_properties, encode_pairs
from moqt.wire.parameters import (
    NO_PARAMETERS,
    Parameters,
    Scope,
    decode_parameters,
    encode_parameters,
)
from moqt.wire.reader import Reader
from moqt.wire.writer import Writer


@dataclass(frozen=True, slots=True)
class Subscribe(Message):
    """SUBSCRIBE: ask for Objects of a Track as they are published (MOQT, "SUBSCRIBE")."""

    type: ClassVar = MessageType.SUBSCRIBE

    request_id: int

    track: FullTrackName

    parameters: Parameters = NO_PARAMETERS

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.request_id)
        w.full_track_name(self.track)
        encode_parameters(w, self.parameters, Scope.SUBSCRIBE)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.vi64(), r.full_track_name(), decode_parameters(r, Scope.SUBSCRIBE))


@dataclass(frozen=True, slots=True)
class SubscribeOk(Message):
    """SUBSCRIBE_OK: the subscription is established (MOQT, "SUBSCRIBE_OK")."""

    type: ClassVar = MessageType.SUBSCRIBE_OK

    track_alias: int
    """What data streams call the Track, in this session and direction."""

    parameters: Parameters = NO_PARAMETERS

    track_properties: Properties = ()

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.track_alias)
        encode_parameters(w, self.parameters, Scope.SUBSCRIBE_OK)
        w.octets(encode_pairs(self.track_properties))

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.vi64(), decode_parameters(r, Scope.SUBSCRIBE_OK), decode_track_properties(r))


@dataclass(frozen=True, slots=True)
class PublishStateNotify(Message):
    """PUBLISH_STATE_NOTIFY: the publisher's side changed (MOQT, "PUBLISH_STATE_NOTIFY").

    Is not answered. A parameter that is absent keeps its value.
    """

    type: ClassVar = MessageType.PUBLISH_STATE_NOTIFY

    parameters: Parameters = NO_PARAMETERS

    def encode_body(self, w: Writer) -> None:
        encode_parameters(w, self.parameters, Scope.PUBLISH_STATE_NOTIFY)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(decode_parameters(r, Scope.PUBLISH_STATE_NOTIFY))


@dataclass(frozen=True, slots=True)
class PublishDone(Message):
    """PUBLISH_DONE: no more Objects will be published for this subscription.

    Last message of the publisher on the request stream (MOQT, "PUBLISH_DONE").
    """

    type: ClassVar = MessageType.PUBLISH_DONE

    status_code: PublishDoneCode | int
    """Why it ended. An unregistered code is kept as it came."""

    stream_count: int
    """Data streams opened for the subscription; 2**64 - 1 when the publisher cannot tell."""

    reason: str = ""
    """For people. At most 1024 octets of UTF-8."""

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.status_code)
        w.vi64(self.stream_count)
        w.reason_phrase(self.reason)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(known(PublishDoneCode, r.vi64()), r.vi64(), r.reason_phrase())


@dataclass(frozen=True, slots=True)
class TrackStatus(Message):
    """TRACK_STATUS: ask what a SUBSCRIBE would be told, and no more (MOQT, "TRACK_STATUS")."""

    type: ClassVar = MessageType.TRACK_STATUS

    request_id: int

    track: FullTrackName

    parameters: Parameters = NO_PARAMETERS

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.request_id)
        w.full_track_name(self.track)
        encode_parameters(w, self.parameters, Scope.TRACK_STATUS)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.vi64(), r.full_track_name(), decode_parameters(r, Scope.TRACK_STATUS))
