"""PUBLISH: a subscription that the publisher begins."""

from dataclasses import dataclass
from typing import ClassVar, Self

from moqt.codepoints import MessageType
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
class Publish(Message):
    """PUBLISH: offer the Objects of a Track to a subscriber (MOQT, "PUBLISH").

    Accepted with REQUEST_OK. Unless FORWARD is 0, Objects may come before that.
    """

    type: ClassVar = MessageType.PUBLISH

    request_id: int

    track: FullTrackName

    track_alias: int
    """What data streams call the Track, in this session and direction."""

    parameters: Parameters = NO_PARAMETERS

    track_properties: Properties = ()

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.request_id)
        w.full_track_name(self.track)
        w.vi64(self.track_alias)
        encode_parameters(w, self.parameters, Scope.PUBLISH)
        w.octets(encode_pairs(self.track_properties))

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(
            r.vi64(),
            r.full_track_name(),
            r.vi64(),
            decode_parameters(r, Scope.PUBLISH),
            decode_track_properties(r),
        )
