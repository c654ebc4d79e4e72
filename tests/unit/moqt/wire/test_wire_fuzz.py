"""Octets of any kind: only the documented exceptions may leave, and memory stays bounded.

Two sources: pure noise, and the vectors with octets changed, dropped and doubled, which gets
deeper into the formats.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import GroupOrder, MessageType
from moqt.errors import ObjectTooLarge, ProtocolError
from moqt.wire.datagram import decode_datagram
from moqt.wire.fetchstream import FetchHeader, FetchReader
from moqt.wire.filters import filter_defect, passes, range_filters
from moqt.wire.framing import REQUESTS, MessageBuffer
from moqt.wire.messages.subscribe import Subscribe
from moqt.wire.pairs import decode_pairs
from moqt.wire.reader import Reader
from moqt.wire.subgroup import SubgroupReader
from moqt.wire.token import AuthorizationToken

LIMIT = 4096
CONTEXTS = [None, *sorted(REQUESTS)]
VECTORS = [
    (case["kind"], bytes.fromhex(case["hex"]))
    for case in json.loads((Path(__file__).parents[3] / "vectors" / "draft22.json").read_text())
    if len(case["hex"]) < 1000
]


def control(data: bytes, step: int) -> None:
    for context in CONTEXTS:
        buffer = MessageBuffer()
        for at in range(0, len(data), step):
            buffer.feed(data[at : at + step])
            for message in buffer.messages(context):
                if isinstance(message, Subscribe):
                    # What was decoded can be judged, sound or not.
                    filter_defect(message.parameters, 16)
                    filters = range_filters(message.parameters)
                    passes(filters, subgroup_id=0, object_id=0, priority=0)
        buffer.finish()


def subgroup(data: bytes, step: int) -> None:
    reader = SubgroupReader(LIMIT)
    for at in range(0, len(data), step):
        reader.feed(data[at : at + step])
        assert reader.buffered <= LIMIT + 64
    reader.finish()


def fetch(data: bytes, step: int) -> None:
    read = FetchHeader.decode(data)
    for order in GroupOrder:
        reader = FetchReader(order, LIMIT)
        for at in range(read[1] if read is not None else 0, len(data), step):
            reader.feed(data[at : at + step])
            assert reader.buffered <= LIMIT + 64
        reader.finish()


def datagram(data: bytes, step: int) -> None:
    decode_datagram(data)


def pairs(data: bytes, step: int) -> None:
    decode_pairs(Reader(data))


def token(data: bytes, step: int) -> None:
    AuthorizationToken.decode(data)


TARGETS: dict[str, Callable[[bytes, int], None]] = {
    "control": control,
    "subgroup_stream": subgroup,
    "fetch_stream": fetch,
    "datagram": datagram,
    "key_value_pairs": pairs,
    "auth_token": token,
}


def outcome(target: Callable[[bytes, int], None], data: bytes, step: int) -> type[Exception] | None:
    """Run the target; return what left it, unless it is none of the documented exceptions."""
    try:
        target(data, step)
    except (ProtocolError, ObjectTooLarge) as exc:
        return type(exc)
    return None


@pytest.mark.parametrize("kind", TARGETS)
@given(data=st.binary(max_size=200), step=st.sampled_from([1, 3, 1000]))
def test_noise_is_refused_or_read(kind: str, data: bytes, step: int) -> None:
    outcome(TARGETS[kind], data, step)


@pytest.mark.parametrize("kind", TARGETS)
def test_spoilt_vectors_are_refused_or_read_the_same_whole_and_octet_by_octet(kind: str) -> None:
    rng = random.Random(22)
    seeds = [data for of, data in VECTORS if of == kind]
    assert seeds
    refused = 0
    for _ in range(400):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del data[at : at + rng.randint(1, 3)]
                case 2:
                    data[at:at] = rng.choice([b"\x00", b"\xff", b"\x80", b"\xff" * 9])
                case _:
                    data[at:at] = data[: rng.randint(1, 8)]
        whole = outcome(TARGETS[kind], bytes(data), 1 << 20)
        single = outcome(TARGETS[kind], bytes(data), 1)

        assert whole is single, data.hex()
        refused += whole is not None

    # Neither all nor none: the spoiling reaches past the first check, and does spoil.
    assert 0 < refused < 400


def test_every_context_is_tried() -> None:
    assert len(CONTEXTS) == 8
    assert MessageType.SUBSCRIBE in CONTEXTS
