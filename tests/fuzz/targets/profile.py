"""Targets of :mod:`kvcs.profile`: manifests, their signatures, names, and payloads of Objects."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256

import cbor2
import orjson

from kvcs.errors import BadDescriptor, BadManifest, BadName, BadObject
from kvcs.kvsp import strictjson
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Component
from kvcs.kvsp.standard import standard_codecs
from kvcs.profile.manifest import CodecEntry, Manifest, ManifestLimits, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName
from kvcs.profile.payload import HEADER_OCTETS, Block, Header
from kvcs.profile.signing import (
    ProducerKey,
    SigningAlgorithm,
    read_unverified,
    sign_manifest,
    verify_manifest,
)
from moqt.errors import UsageError
from moqt.names import TrackNamespace
from tests.fuzz.choices import Octets
from tests.fuzz.target import Target

LIMITS = ManifestLimits(octets=16_384, depth=8, values=2_000, layers=16, blocks=256)
COMPAT = Descriptor(
    model="m",
    revision="r",
    layers=2,
    block_tokens=4,
    dtype="float16",
    k_shape=(1, 4),
    v_shape=(1, 4),
    extra={"rope": {"theta": "10000.0"}},
)
KEY = ScopeKey(bytes(32))
BLOCK_KEYS = KEY.block_keys(COMPAT, range(16))
NAME = PublicationName(KEY.scope_id, KEY.compatibility_id(COMPAT), BLOCK_KEYS[1], b"p" * 16)
K, V = DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")
CODECS = standard_codecs()
DATA = bytes(range(32))


@cache
def entry() -> SegmentEntry:
    digests = sha256(DATA).digest() * 2
    return SegmentEntry(
        segment=0,
        first_block=0,
        blocks=2,
        block_keys_sha256=sha256(b"".join(BLOCK_KEYS[:2])).digest(),
        tracks=(K, V),
        complete=True,
        object_digests={K: (digests, digests), V: (digests, digests)},
    )


@cache
def manifest() -> Manifest:
    return Manifest(
        compat=COMPAT,
        segments=(entry(),),
        publication=NAME.publication_id,
        anchor=NAME.anchor_key,
        version=3,
        codecs={"raw": CodecEntry(value=0, lossless=True)},
    )


@cache
def keys() -> tuple[ProducerKey, ProducerKey]:
    return ProducerKey.generate(kid=b"ed"), ProducerKey.generate(SigningAlgorithm.ES256, kid=b"es")


def read_json(data: bytes) -> None:
    strictjson.loads(data, octets=4096, depth=6, values=200)


def read_descriptor(data: bytes) -> None:
    found = Descriptor.from_json(data)
    assert Descriptor.from_json(found.to_json()) == found
    found.differences(COMPAT)


def read_manifest(data: bytes) -> None:
    """A manifest that is read is written and read again as the same, and can be judged."""
    found = Manifest.from_json(data, LIMITS)
    assert Manifest.from_json(found.to_json()) == found
    for judge in (
        lambda: found.check_identity(NAME, 3),
        lambda: found.check_compatibility(KEY, NAME.compatibility_id),
        lambda: found.check_tokens(BLOCK_KEYS),
        lambda: found.check_follows(manifest()),
        lambda: manifest().check_follows(found),
        lambda: found.with_digests_of(manifest()),
    ):
        with suppress(BadManifest):
            judge()
    for one in found.segments:
        for track in one.tracks:
            one.digest(track, 0, 0)


def read_cose(data: bytes) -> None:
    """What is signed by nobody is never believed; what is read unverified is only shown."""
    read_unverified(data, LIMITS)
    trusted = {key.kid: key.public_key for key in keys()}
    text = verify_manifest(data, trusted, LIMITS)
    assert text == manifest().to_json(), "believed, and signed by nobody"


def read_payload(data: bytes) -> None:
    """Payloads, as they come and with their digest mended, against the manifest."""
    choices = Octets(data)
    mends, track = choices.below(2), choices.pick((K, V))
    payload = bytearray(choices.rest())
    if mends and len(payload) >= HEADER_OCTETS:
        payload[32:36] = (len(payload) - HEADER_OCTETS).to_bytes(4, "big")
        payload[36:68] = sha256(payload[HEADER_OCTETS:]).digest()
    header = Header.read(payload)
    block = Block.decode(
        payload, group_id=header.layer, object_id=header.block_index, max_data=4096
    )
    assert len(block.data) == len(payload) - HEADER_OCTETS
    block.check_against(entry(), COMPAT, track, CODECS)


def read_name(data: bytes) -> None:
    choices = Octets(data)
    if choices.below(2):
        found = DataTrack.parse(choices.rest())
        assert DataTrack.parse(found.name) == found
    else:
        fields = []
        while not choices.is_exhausted:
            fields.append(choices.octets(40))
        name = PublicationName.from_namespace(TrackNamespace(tuple(fields)))
        assert PublicationName.from_namespace(name.namespace) == name


def json_seeds() -> Iterable[bytes]:
    yield from (b'{"a":[1,-2.5e3,true,null,"\\u00e9\\n"]}', b"[[[[[[1]]]]]]", b'{"a":1,"a":2}')
    yield from (b"NaN", b'"\xff"', b"1" * 200, b'"\\ud800"', b"[" * 7)
    yield COMPAT.to_json()


def manifest_seeds() -> Iterable[bytes]:
    yield manifest().to_json()
    found = orjson.loads(manifest().to_json())
    found["segments"][0] |= {"digests_in": 2, "object_digests": {}}
    found["x"] = [1]
    yield orjson.dumps(found)
    found["segments"] = []
    yield orjson.dumps(found)


def cose_seeds() -> Iterable[bytes]:
    text = manifest().to_json()
    for key in keys():
        signed = sign_manifest(text, key)
        yield signed
        yield signed[1:]  # without its tag
        tagged = cbor2.loads(signed)
        protected, _, payload, signature = tagged.value
        yield cbor2.dumps([protected, {4: key.kid, 2: [1], 9: {1: [b"", "t", None]}}, b"", b"s"])
        yield cbor2.dumps([b"", {"a": -1}, payload[:20], signature])


def payload_seeds() -> Iterable[bytes]:
    for component, way in ((Component.K, b"\x01\x00"), (Component.V, b"\x00\x01")):
        yield way + Block(component, 1, 1, 4, 4, 0, DATA).encode()
        yield way + Block(component, 0, 0, 0, 4, 0xC001, DATA[:5]).encode()
    yield b"\x01\x00" + bytes(HEADER_OCTETS)


def name_seeds() -> Iterable[bytes]:
    yield from (b"\x01k.raw.s0", b"\x01kv.shuffle-zstd.s4294967295", b"\x01manifest.cose")
    yield b"\x00" + b"".join(bytes([len(field)]) + field for field in NAME.namespace.fields)


TARGETS = (
    Target(name="json", run=read_json, documented=(strictjson.StrictJsonError,), seeds=json_seeds),
    Target(
        name="descriptor",
        run=read_descriptor,
        documented=(BadDescriptor,),
        seeds=lambda: [COMPAT.to_json()],
    ),
    Target(
        name="manifest",
        run=read_manifest,
        documented=(BadManifest,),
        seeds=manifest_seeds,
        max_octets=4_096,
    ),
    Target(
        name="manifest_cose",
        run=read_cose,
        documented=(BadManifest,),
        seeds=cose_seeds,
        max_octets=4_096,
    ),
    Target(name="payload", run=read_payload, documented=(BadObject,), seeds=payload_seeds),
    Target(name="kvcs_name", run=read_name, documented=(BadName, UsageError), seeds=name_seeds),
)
