"""Targets of :mod:`kvcs.kvsp.http`: what is asked over HTTP, and what is answered."""

from collections.abc import Callable, Iterable
from hashlib import sha256

import orjson

from kvcs.errors import BadName, ConfigError
from kvcs.kvsp.http.conditions import matches, parse_range, select
from kvcs.kvsp.http.digests import digest_field, entity_tag, parse_digest
from kvcs.kvsp.http.frames import BadFrame, Frame, FrameKind, FrameReader, absent, end, frame_header
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.questions import BatchQuestion, Found, Lease, Longest, LookupQuestion
from kvcs.kvsp.http.records import BadRecord, Candidate, Holding, Runs, read_registration
from kvcs.kvsp.http.tokens import bearer_token, parse_lines
from kvcs.kvsp.http.uris import parse_holder
from tests.fuzz.choices import Octets
from tests.fuzz.target import Target

HEX = "ab" * 32
MOQT = f"moqt://relay.example:4443/path?x=1#kvcs-1:{HEX}/{HEX}/{HEX}/{'cd' * 16}"
HTTPS = "https://[2001:db8::1]:8443/blocks"
ETAG = entity_tag(bytes(32))
OCTETS, KEYS = 8_192, 16
#: Layers and blocks that frames are read of.
ORDER = [(0, 0), (0, 1), (1, 0), (1, 1)]


def text_of(data: bytes) -> str:
    """Return a header field, as a server has it: any octet may be in it."""
    return data.decode("latin-1")


def conditions(data: bytes) -> None:
    """Preconditions and ranges: what is chosen is within what there is."""
    choices = Octets(data)
    length = choices.pick((0, 1, 10, 1 << 40))
    names = ("if_match", "if_none_match", "if_range", "range_")
    fields = {name: text_of(choices.octets(80)) if choices.below(2) else None for name in names}
    found = select(etag=ETAG, length=length, is_get=bool(choices.below(2)), **fields)
    assert found.status in (200, 206, 304, 412, 416)
    assert 0 <= found.span.start <= found.span.stop <= length
    assert (found.status == 206) == (found.span.octets > 0 and found.status != 200)


def range_field(data: bytes) -> None:
    span = parse_range(text_of(data), 1_000)
    assert span is None or 0 <= span.start < span.stop <= 1_000


def entity_tags(data: bytes) -> None:
    field = text_of(data)
    assert matches(field, ETAG, strong=False) or not matches(field, ETAG, strong=True)


def digest(data: bytes) -> None:
    found = parse_digest(text_of(data))
    if found is not None:
        assert parse_digest(digest_field(found)) == found


def frames(data: bytes) -> None:
    """Frames are the same however they are cut, and nothing is given out that has no digest."""
    outcomes = []
    for step in (1 << 20, 1, 13):
        reader, found = FrameReader(iter(ORDER), 8), list[Frame]()
        refused = False
        try:
            for at in range(0, len(data), step):
                found += reader.feed(data[at : at + step])
        except BadFrame:
            refused = True
        outcomes.append((found, refused, reader.ended))
        assert all(
            sha256(one.data).digest() == one.digest
            for one in found
            if one.kind is FrameKind.SECTIONS
        )
    assert outcomes[0][1:] == outcomes[1][1:] == outcomes[2][1:]
    if outcomes[0][1]:
        raise BadFrame("as above")
    assert outcomes[0] == outcomes[1] == outcomes[2]


def registration(data: bytes) -> None:
    holding, lease_s = read_registration(data, octets=OCTETS, max_keys=KEYS)
    body = orjson.dumps(holding.json(lease_s))
    assert read_registration(body, octets=OCTETS * 2, max_keys=KEYS) == (holding, lease_s)


def questions(data: bytes) -> None:
    """What is asked of a block service and of an index; written and read, it is the same."""
    choices = Octets(data)
    kind, text = choices.below(3), choices.rest()
    match kind:
        case 0:
            batch = BatchQuestion.parse(text, octets=OCTETS, max_keys=KEYS)
            assert BatchQuestion.parse(batch.body(), octets=OCTETS * 2, max_keys=KEYS) == batch
            assert batch.sections == len(batch.keys) * len(batch.layers)
        case 1:
            lookup = LookupQuestion.parse(text, octets=OCTETS, max_keys=KEYS)
            assert LookupQuestion.parse(lookup.body(), octets=OCTETS * 2, max_keys=KEYS) == lookup
        case _:
            lease = Lease.parse(text)
            assert Lease.parse(lease.body()) == lease


def answers(data: bytes) -> None:
    """What an index answers. It may lie, but only in the form that was agreed on."""
    choices = Octets(data)
    kind, text = choices.below(2), choices.rest()
    if kind:
        found = Found.parse(text, octets=OCTETS, keys=2)
        for index in range(2):
            found.of(index)
        found.body()
    else:
        Longest.parse(text, octets=OCTETS, keys=KEYS).body()


def uri(data: bytes) -> None:
    found = parse_holder(data.decode(errors="replace"))
    assert parse_holder(str(found)) == found


def block_name(data: bytes) -> None:
    scope, compatibility, key = [*data.decode(errors="replace").split("/"), "", "", ""][:3]
    found = BlockName.parse(scope, compatibility, key)
    assert len(found.block_key) == 32


def tokens_file(data: bytes) -> None:
    for grant in parse_lines(data):
        assert grant.rights


def authorization(data: bytes) -> None:
    found = bearer_token(text_of(data))
    assert found is None or found.isascii()


def frame_seeds() -> Iterable[bytes]:
    def sections(layer: int, block: int) -> bytes:
        data = bytes([layer, block]) * 4
        header = frame_header(FrameKind.SECTIONS, block, layer, 8, sha256(data).digest())
        return header + data

    whole = [sections(layer, block) for layer, block in ORDER]
    yield b"".join([*whole, end(4)])
    yield b"".join([absent(0, 0), *whole[1:], end(4)])
    yield whole[0][:60]


def candidate(**changes: object) -> dict[str, object]:
    made = Candidate(
        uri=parse_holder(MOQT),
        first_block=0,
        blocks=4,
        layers=Runs(((0, 1), (3, 3))),
        encodings=("raw", "kv.raw"),
        complete=True,
        publication=None,
        expires_s=12.5,
        covers=2,
        following=(bytes(32),),
    )
    return made.json() | changes


def registration_seeds() -> Iterable[bytes]:
    for address in (MOQT, HTTPS):
        held = Holding(
            uri=parse_holder(address),
            keys=(bytes(32), b"k" * 32),
            layers=Runs(((0, 2),)),
            publication=None if address is MOQT else bytes(16),
        )
        yield orjson.dumps(held.json(60.0))


def question_seeds() -> Iterable[bytes]:
    yield b"\x00" + BatchQuestion((bytes(32),), Runs(((0, 3), (5, 5))), bytes(16)).body()
    yield b"\x01" + LookupQuestion((bytes(32), b"k" * 32), 3, following=True).body()
    yield b"\x02" + Lease(30.0).body()


def answer_seeds() -> Iterable[bytes]:
    longest = {"blocks": 2, "candidates": [candidate(), candidate(uri=HTTPS, covers=1)]}
    yield b"\x00" + orjson.dumps(longest)
    found = {"holders": [candidate(), candidate(uri=HTTPS)], "by_key": [[0, 1], []]}
    yield b"\x01" + orjson.dumps(found)


def condition_seeds() -> Iterable[bytes]:
    def said(*fields: str | None, length: int = 2, get: int = 1) -> bytes:
        parts = [
            b"\x00" if field is None else bytes([1, len(field)]) + field.encode()
            for field in fields
        ]
        return bytes([length]) + b"".join(parts) + bytes([get])

    yield said(None, None, None, "bytes=0-4")
    yield said(ETAG[:80], f"W/{ETAG}"[:80], None, None)
    yield said("*", None, ETAG, "bytes=-5")
    yield said(None, None, None, "bytes=5-", length=3)


def texts(*given: str) -> Callable[[], Iterable[bytes]]:
    return lambda: [text.encode() for text in given]


TARGETS = (
    Target(name="http_conditions", run=conditions, seeds=condition_seeds, max_octets=512),
    Target(
        name="http_range",
        run=range_field,
        documented=(ValueError,),
        seeds=texts("bytes=0-99", "bytes=-5", "bytes=10-", "items=1", "bytes=, 1-2 ,"),
        max_octets=256,
    ),
    Target(
        name="http_entity_tags",
        run=entity_tags,
        seeds=texts(ETAG, f"W/{ETAG}", "*", f'"a,b", {ETAG},,W/"x"'),
        max_octets=1024,
    ),
    Target(
        name="http_digest",
        run=digest,
        documented=(ValueError,),
        seeds=texts(
            digest_field(bytes(32)),
            'a=1;b="x\\"y", sha-256=:AA==:, c;d=?1;e=tok/en, f=-1.25',
            f"{digest_field(bytes(32))} ,\t sha-512=:AAAA:",
        ),
    ),
    Target(name="http_frames", run=frames, documented=(BadFrame,), seeds=frame_seeds),
    Target(
        name="http_registration",
        run=registration,
        documented=(BadRecord,),
        seeds=registration_seeds,
    ),
    Target(name="http_questions", run=questions, documented=(BadRecord,), seeds=question_seeds),
    Target(name="http_answers", run=answers, documented=(BadRecord,), seeds=answer_seeds),
    Target(name="http_uri", run=uri, documented=(BadName,), seeds=texts(MOQT, HTTPS, HTTPS + "//")),
    Target(
        name="http_block_name",
        run=block_name,
        documented=(BadName,),
        seeds=texts(f"{HEX}/{HEX}/{HEX}"),
        max_octets=512,
    ),
    Target(
        name="http_tokens_file",
        run=tokens_file,
        documented=(ConfigError,),
        seeds=texts(f"# who\n{HEX} read,write {'t' * 40}\n\n{HEX} read {'u' * 40} # him\n"),
    ),
    Target(
        name="http_authorization",
        run=authorization,
        seeds=texts(f"Bearer {'t' * 40}", f"bearer  {'t' * 40}", "Basic abc="),
        max_octets=1024,
    ),
)
