"""Targets of :mod:`moqt.wire`: what a MOQT peer writes on streams and into datagrams."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from moqt.codepoints import GroupOrder, MessageType
from moqt.errors import ObjectTooLarge, ProtocolError, UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.datagram import ObjectDatagram, decode_datagram, encode_datagram
from moqt.wire.fetchstream import FetchHeader, FetchReader
from moqt.wire.filters import (
    LocationFilter,
    filter_defect,
    for_track,
    passes,
    range_filters,
    track_passes,
)
from moqt.wire.framing import MESSAGES, REQUESTS, MessageBuffer, encode_message
from moqt.wire.messages.base import Message
from moqt.wire.messages.setup import Setup
from moqt.wire.objects import ObjectReader
from moqt.wire.pairs import (
    decode_object_properties,
    decode_pairs,
    decode_track_properties,
    encode_pairs,
    mandatory_property,
)
from moqt.wire.parameters import ALLOWED, REGISTRY, decode_parameters
from moqt.wire.reader import Reader
from moqt.wire.streamtype import classify_uni
from moqt.wire.subgroup import SubgroupReader
from moqt.wire.token import AuthorizationToken
from moqt.wire.varint import decode_vi64, encode_vi64
from tests.fuzz.target import Target

#: Octets of an Object here. Readers hold no more than that, whatever lengths say.
LIMIT = 100
#: On which request's stream messages come; None: on a control stream, or first on a stream.
CONTEXTS: tuple[MessageType | None, ...] = (None, *sorted(REQUESTS))
SCOPES = tuple(sorted(ALLOWED, key=lambda scope: scope.name))
TYPES = tuple(sorted(REGISTRY))
VECTORS = Path(__file__).parents[2] / "vectors" / "draft22.json"


@cache
def vectors() -> list[tuple[str, bytes]]:
    """Return the vectors of the draft that are not long, by their kind."""
    return [
        (case["kind"], bytes.fromhex(case["hex"]))
        for case in json.loads(VECTORS.read_text())
        if len(case["hex"]) < 2_000
    ]


def of(*kinds: str) -> Callable[[], Iterable[bytes]]:
    """Return where the vectors of some kinds come from."""
    return lambda: [data for kind, data in vectors() if kind in kinds]


def chosen(count: int, seeds: Callable[[], Iterable[bytes]]) -> Callable[[], Iterable[bytes]]:
    """Put an octet in front of each seed that chooses one of ``count`` ways to read it."""
    return lambda: [bytes([way]) + data for data in seeds() for way in range(count)]


def split(data: bytes) -> tuple[int, bytes]:
    """Return the octet that chooses, and the rest."""
    return (data[0] if data else 0), data[1:]


def read_messages(data: bytes, context: MessageType | None, step: int) -> list[Message]:
    buffer = MessageBuffer()
    found: list[Message] = []
    for at in range(0, len(data), step):
        buffer.feed(data[at : at + step])
        found += buffer.messages(context)
        if context is None and found and found[0].type in REQUESTS:
            context = found[0].type  # as a session does
        assert buffer.pending <= 0xFFFF + 12
    buffer.finish()
    return found


def refusal(read: Callable[[], object]) -> type[Exception] | None:
    try:
        read()
    except (ProtocolError, ObjectTooLarge) as exc:
        return type(exc)
    return None


def control(data: bytes) -> None:
    """Messages of a stream; they are the same octet by octet, and read again what is written."""
    way, data = split(data)
    context = CONTEXTS[way % len(CONTEXTS)]
    assert refusal(lambda: read_messages(data, context, 1)) is refusal(
        lambda: read_messages(data, context, 1 << 20)
    )
    messages = read_messages(data, context, 1 << 20)
    assert messages == read_messages(data, context, 1)
    for message in messages:
        repr(message)
        judge(getattr(message, "parameters", None) or {})
        if context is None and message.type in REQUESTS:
            context = message.type
        try:
            written = encode_message(message, context)
        except UsageError:
            continue  # what one may not say, although one has to understand it
        [again] = read_messages(written, context if message.type not in REQUESTS else None, 1 << 20)
        assert again == message


def judge(parameters: Any) -> None:
    """Do with parameters what a publisher does: say whether they are sound, and apply them."""
    filter_defect(parameters, 16)
    filters = range_filters(parameters)
    passes(filters, subgroup_id=0, object_id=0, priority=0)
    track_passes(filters, ())
    for_track(filters, ())
    for value in parameters.values():
        if isinstance(value, LocationFilter):
            for largest in (None, Location(3, 7)):
                value.resolve(largest)
                value.resolve_fetch(largest)


def parameters(data: bytes) -> None:
    way, data = split(data)
    reader = Reader(data)
    judge(decode_parameters(reader, SCOPES[way % len(SCOPES)]))
    reader.expect_end()


def parameter(data: bytes) -> None:
    """One value, by each kind's own reader."""
    way, data = split(data)
    REGISTRY[TYPES[way % len(TYPES)]].coding.read(Reader(data))


def setup(data: bytes) -> None:
    """Setup Options, and what a session asks of them."""
    reader = Reader(data)
    found = Setup.decode_body(reader)
    reader.expect_end()
    repr(found)
    for name in dir(found):
        if not name.startswith("_"):
            getattr(found, name)


def objects(make: Callable[[], ObjectReader[Any]], data: bytes) -> None:
    """Objects of a stream, whole, octet by octet, and in pieces: they are the same."""
    outcomes = []
    for step in (1 << 20, 1, 7):
        reader, found = make(), []
        refused: type[Exception] | None = None
        try:
            for at in range(0, len(data), step):
                found += reader.feed(data[at : at + step])
                assert reader.buffered <= LIMIT + 64, "more is held than an Object may have"
            reader.finish()
        except ObjectTooLarge as exc:
            found += exc.completed
            refused = ObjectTooLarge
        except ProtocolError as exc:
            found.clear()  # the session closes: who reads all at once has nothing of it
            refused = type(exc)
        outcomes.append((found, refused))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    reader = make()
    octets = 0
    for at in range(0, len(data), 11):
        for piece in reader.feed_in_pieces(data[at : at + 11]):
            octets += len(getattr(piece, "data", b""))
    reader.finish()
    assert octets <= len(data)


def subgroup(data: bytes) -> None:
    objects(lambda: SubgroupReader(LIMIT), data)


def fetch(data: bytes) -> None:
    way, data = split(data)
    read = FetchHeader.decode(data)
    if read is None:
        return
    order = (GroupOrder.ASCENDING, GroupOrder.DESCENDING)[way % 2]
    objects(lambda: FetchReader(order, LIMIT), data[read[1] :])


def datagram(data: bytes) -> None:
    found = decode_datagram(data)
    if isinstance(found, ObjectDatagram):
        assert decode_datagram(encode_datagram(found)) == found


def pairs(data: bytes) -> None:
    found = decode_pairs(Reader(data))
    assert decode_pairs(Reader(encode_pairs(found))) == found


def properties(data: bytes) -> None:
    way, data = split(data)
    found = decode_track_properties(Reader(data)) if way % 2 else decode_object_properties(data)
    mandatory_property(found)


def token(data: bytes) -> None:
    found = AuthorizationToken.decode(data)
    assert AuthorizationToken.decode(found.encode()) == found
    assert repr(found.value) not in repr(found) or not found.value


def location_filter(data: bytes) -> None:
    found = LocationFilter.decode(Reader(data))
    for largest in (None, Location(3, 7)):
        found.resolve(largest)
        found.resolve_fetch(largest)


def name(data: bytes) -> None:
    """Names as octets, and as text."""
    way, data = split(data)
    match way % 3:
        case 0:
            found = Reader(data).full_track_name()
            assert FullTrackName.parse(str(found)) == found
        case 1:
            namespace = Reader(data).track_namespace()
            assert TrackNamespace.parse(str(namespace)) == namespace
        case _:
            text = data.decode(errors="replace")
            assert str(FullTrackName.parse(text)) == text


def integer(data: bytes) -> None:
    got = decode_vi64(data)
    if got is not None:
        value, end = got
        assert 0 < end <= len(data)
        assert decode_vi64(encode_vi64(value)) == (value, len(encode_vi64(value)))
        classify_uni(value)


def control_seeds() -> Iterable[bytes]:
    seeds = of("control", "invalid")()
    # Every type is among them, also those of which a vector is too long.
    bare = [encode_vi64(kind) + b"\x00\x00" for kind in MESSAGES]
    return chosen(len(CONTEXTS), lambda: [*seeds, *bare])()


def setup_seeds() -> Iterable[bytes]:
    begin = encode_vi64(MessageType.SETUP)
    return [d[len(begin) + 2 :] for d in of("control", "invalid")() if d.startswith(begin)]


def parameter_seeds() -> Iterable[bytes]:
    return chosen(len(SCOPES), lambda: [b"\x01" + d for d in of("param")()])()


def value_seeds() -> Iterable[bytes]:
    for data in of("param")():
        number, at = decode_vi64(data) or (0, 0)
        if number in TYPES:
            yield bytes([TYPES.index(number)]) + data[at:]


def name_seeds() -> Iterable[bytes]:
    yield from chosen(2, lambda: [d + b"\x03abc" for d in of("track_namespace")()])()
    yield from (b"\x02kvcs.2d1-scope--k.2eraw.2es0", b"\x02--", b"\x02a-b-c--.00.ff")


TARGETS = (
    Target(name="control", run=control, documented=(ProtocolError,), seeds=control_seeds),
    Target(name="setup", run=setup, documented=(ProtocolError,), seeds=setup_seeds),
    Target(name="parameters", run=parameters, documented=(ProtocolError,), seeds=parameter_seeds),
    Target(name="parameter", run=parameter, documented=(ProtocolError,), seeds=value_seeds),
    Target(
        name="subgroup_stream",
        run=subgroup,
        documented=(ProtocolError, ObjectTooLarge),
        seeds=of("subgroup_stream", "subgroup_header"),
        max_octets=256,
    ),
    Target(
        name="fetch_stream",
        run=fetch,
        documented=(ProtocolError, ObjectTooLarge),
        seeds=chosen(2, of("fetch_stream", "fetch_header")),
        max_octets=256,
    ),
    Target(
        name="datagram",
        run=datagram,
        documented=(ProtocolError,),
        seeds=of("datagram", "padding_datagram"),
    ),
    Target(name="pairs", run=pairs, documented=(ProtocolError,), seeds=of("key_value_pairs")),
    Target(
        name="properties",
        run=properties,
        documented=(ProtocolError,),
        seeds=chosen(2, of("object_properties", "key_value_pairs")),
    ),
    Target(name="token", run=token, documented=(ProtocolError,), seeds=of("auth_token")),
    Target(
        name="location_filter",
        run=location_filter,
        documented=(ProtocolError,),
        seeds=lambda: [bytes([kind]) + b"\x01\x02\x03\x04" for kind in range(6)],
    ),
    Target(name="track_name", run=name, documented=(ProtocolError, UsageError), seeds=name_seeds),
    Target(
        name="integer", run=integer, documented=(ProtocolError,), seeds=of("vi64", "padding_stream")
    ),
)
