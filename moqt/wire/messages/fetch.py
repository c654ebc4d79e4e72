"""FETCH and its answer."""

from dataclasses import dataclass
from typing import ClassVar, Self

from moqt.codepoints import MessageType
from moqt.errors import ProtocolError
from moqt.location import Location
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
class Fetch(Message):
    """FETCH: ask for a range of Objects that exist already (MOQT, "FETCH")."""

    type: ClassVar = MessageType.FETCH

    request_id: int

    track: FullTrackName

    parameters: Parameters = NO_PARAMETERS
    """Without a LOCATION_FILTER: everything up to the Largest Object."""

    def encode_body(self, w: Writer) -> None:
        w.vi64(self.request_id)
        w.full_track_name(self.track)
        encode_parameters(w, self.parameters, Scope.FETCH)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(r.vi64(), r.full_track_name(), decode_parameters(r, Scope.FETCH))


@dataclass(frozen=True, slots=True)
class FetchOk(Message):
    """FETCH_OK: the fetch is served, and where it ends (MOQT, "FETCH_OK")."""

    type: ClassVar = MessageType.FETCH_OK

    end_of_track: bool
    """Whether ``end_location`` is the final Object of the Track."""

    end_location: Location
    """The last Location of the range, included."""

    parameters: Parameters = NO_PARAMETERS

    track_properties: Properties = ()

    def encode_body(self, w: Writer) -> None:
        w.uint8(self.end_of_track)
        w.location(self.end_location)
        encode_parameters(w, self.parameters, Scope.FETCH_OK)
        w.octets(encode_pairs(self.track_properties))

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        if (end_of_track := r.uint8()) > 1:
            raise ProtocolError(f"End Of Track is {end_of_track}, not 0 or 1")
        return cls(
            bool(end_of_track),
            r.location(),
            decode_parameters(r, Scope.FETCH_OK),
            decode_track_properties(r),
        )
