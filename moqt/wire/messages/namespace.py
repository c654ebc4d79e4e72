"""Telling and asking which namespaces, and which Tracks in them, there are."""

from dataclasses import dataclass
from typing import ClassVar, Self

from moqt.codepoints import MessageType
from moqt.errors import ProtocolError, UsageError
from moqt.names import MAX_NAME_OCTETS, TrackNamespace
from moqt.wire.messages.base import Message
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
class PublishNamespace(Message):
    """PUBLISH_NAMESPACE: there are Tracks under a prefix (MOQT, "PUBLISH_NAMESPACE")."""

    type: ClassVar = MessageType.PUBLISH_NAMESPACE

    request_id: int

    prefix: TrackNamespace

    parameters: Parameters = NO_PARAMETERS

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.request_id)
        w.track_namespace(self.prefix)
        encode_parameters(w, self.parameters, Scope.PUBLISH_NAMESPACE)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.vi64(), r.track_namespace(), decode_parameters(r, Scope.PUBLISH_NAMESPACE))


@dataclass(frozen=True, slots=True)
class SubscribeNamespace(Message):
    """SUBSCRIBE_NAMESPACE: ask which namespaces begin with a prefix, now and from now on.

    An empty prefix asks for all (MOQT, "SUBSCRIBE_NAMESPACE").
    """

    type: ClassVar = MessageType.SUBSCRIBE_NAMESPACE

    request_id: int

    prefix: TrackNamespace

    parameters: Parameters = NO_PARAMETERS

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.request_id)
        w.track_namespace(self.prefix)
        encode_parameters(w, self.parameters, Scope.SUBSCRIBE_NAMESPACE)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.vi64(), r.track_namespace(), decode_parameters(r, Scope.SUBSCRIBE_NAMESPACE))


@dataclass(frozen=True, slots=True)
class Namespace(Message):
    """NAMESPACE: a namespace under the prefix appeared (MOQT, "NAMESPACE")."""

    type: ClassVar = MessageType.NAMESPACE

    suffix: TrackNamespace
    """What follows the prefix that was asked about; empty if it is that very namespace."""

    def encode_body(self, w: Writer) -> None:
        w.track_namespace(self.suffix)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.track_namespace())


@dataclass(frozen=True, slots=True)
class NamespaceDone(Message):
    """NAMESPACE_DONE: a namespace that was told of is gone (MOQT, "NAMESPACE_DONE")."""

    type: ClassVar = MessageType.NAMESPACE_DONE

    suffix: TrackNamespace
    """What follows the prefix that was asked about."""

    def encode_body(self, w: Writer) -> None:
        w.track_namespace(self.suffix)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.track_namespace())


@dataclass(frozen=True, slots=True)
class SubscribeTracks(Message):
    """SUBSCRIBE_TRACKS: ask for a PUBLISH of every Track under a prefix, now and from now on.

    The parameters become those of the subscriptions (MOQT, "SUBSCRIBE_TRACKS").
    """

    type: ClassVar = MessageType.SUBSCRIBE_TRACKS

    request_id: int

    prefix: TrackNamespace

    parameters: Parameters = NO_PARAMETERS

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.request_id)
        w.track_namespace(self.prefix)
        encode_parameters(w, self.parameters, Scope.SUBSCRIBE_TRACKS)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.vi64(), r.track_namespace(), decode_parameters(r, Scope.SUBSCRIBE_TRACKS))


@dataclass(frozen=True, slots=True)
class PublishSkipped(Message):
    """PUBLISH_SKIPPED: a matching Track that will not be published (MOQT, "PUBLISH_SKIPPED").

    The subscriber may ask for it with a SUBSCRIBE of its own.
    """

    type: ClassVar = MessageType.PUBLISH_SKIPPED

    suffix: TrackNamespace
    """What follows the prefix that was asked about."""

    name: bytes
    """Its Track Name."""

    def encode_body(self, w: Writer) -> None:
        if (octets := self.suffix.octets + len(self.name)) > MAX_NAME_OCTETS:
            raise UsageError(f"full track name of {octets} octets, limit {MAX_NAME_OCTETS}")
        w.track_namespace(self.suffix)
        w.prefixed(self.name)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        suffix, name = r.track_namespace(), r.prefixed()
        if (octets := suffix.octets + len(name)) > MAX_NAME_OCTETS:
            raise ProtocolError(f"full track name of {octets} octets, limit {MAX_NAME_OCTETS}")
        return cls(suffix, name)
