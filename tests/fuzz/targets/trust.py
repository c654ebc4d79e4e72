"""Targets of :mod:`kvcs.trust`: tokens and their claims, files of trust, and sealed Objects."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import cbor2

from kvcs.errors import BadObject, BadToken, ConfigError
from kvcs.profile.naming import PublicationName
from kvcs.trust.cbor import BadCbor, Cbor, read_map
from kvcs.trust.claims import claims_from_cbor
from kvcs.trust.envelope import Kind, Rules, open_envelope
from kvcs.trust.grants import BadPermission, allows, permissions_from_cbor
from kvcs.trust.issuers import Revocations
from kvcs.trust.policy import PolicyFiles
from kvcs.trust.scope import Protection, Scope, Suite
from kvcs.trust.scopefile import read_scope
from kvcs.trust.sealing import PROPERTIES, Cover, SealedTrack, Sealing, sealed_octets
from kvcs.trust.tokenfile import token_from_octets, token_to_text
from kvcs.trust.tokens import read_token, read_unverified
from moqt.authority import Action
from moqt.errors import ProtocolError
from moqt.location import Location
from moqt.names import TrackNamespace
from moqt.wire.pairs import decode_pairs
from moqt.wire.reader import Reader
from tests.fuzz.choices import Octets
from tests.fuzz.target import Target
from tests.fuzz.targets.files import place
from tests.fuzz.targets.profile import KEY, NAME
from tests.unit.kvcs.trust.vectors import AUDIENCE, ISSUERS, NOW, TOKENS, token_with

ENVELOPES = Rules(
    kinds=(Kind.SIGN1, Kind.MAC0),
    header_octets=512,
    payload_octets=1024,
    tag_needed=False,
    cwt_tag=True,
)
PAYLOAD = b"what is sealed"
LONGEST = sealed_octets(64, padded=True)


@cache
def genuine() -> set[bytes]:
    """Return what was signed, of every token that was."""
    return {open_envelope(octets, ENVELOPES).to_be_signed for octets in every_genuine()}


def token(data: bytes) -> None:
    """No token is believed that nobody signed."""
    with suppress(BadToken):
        read_unverified(data)
    found = read_token(data, ISSUERS, {AUDIENCE})
    assert open_envelope(data, ENVELOPES).to_be_signed in genuine()
    with suppress(BadToken):
        found.check_time(NOW)
    for action in Action:
        allows(found.claims.permissions, action, NAME.namespace, b"k.raw.s0")


def cbor(data: bytes) -> None:
    """A document is read as another library reads it, or refused."""
    wide, octets = data[:1] == b"\x01", data[1:]
    reader = Cbor(octets, wide=wide)
    value = reader.value()
    reader.expect_end()
    if not wide:
        assert repr(cbor2.loads(octets)) == repr(value)


def envelope(data: bytes) -> None:
    found = open_envelope(data, ENVELOPES)
    assert len(found.payload) <= ENVELOPES.payload_octets
    found.to_be_signed  # noqa: B018  # which is computed


def claims(data: bytes) -> None:
    """Claims as they stand, whoever signed them."""
    with suppress(BadPermission):
        value = Cbor(data, wide=True).value()
        permissions_from_cbor(value)
    found = claims_from_cbor(read_map(data, "the claims", wide=True))
    assert claims_from_cbor(read_map(cbor2.dumps(found.to_cbor()), "them", wide=True)) == found
    for action in Action:
        allows(found.permissions, action, TrackNamespace.of("kvcs-1"), None)


def revocations(data: bytes) -> None:
    found = Revocations.parse(data)
    assert all(isinstance(one, bytes) for one in found.kids | found.token_ids)


def scope_file(data: bytes) -> None:
    read_scope(place().written("scope.toml", data))


def issuers_file(data: bytes) -> None:
    PolicyFiles(place().written("issuers.toml", data)).read()


def token_file(data: bytes) -> None:
    found = token_from_octets(data)
    assert token_from_octets(token_to_text(found).encode()) in (found, b"") or not found


@cache
def sealed_tracks() -> tuple[SealedTrack, SealedTrack]:
    made = []
    for suite in Suite:
        sealing = Sealing.of(Scope(KEY, Protection(suite)))
        assert sealing is not None
        made.append(sealing.track(name().track(b"k.raw.s0")))
    first, second = made
    return first, second


def name() -> PublicationName:
    return NAME


@cache
def sealed(suite: int, padded: bool) -> bytes:
    track = sealed_tracks()[suite]
    return track.seal(Location(1, 2), 7, PAYLOAD, padded=padded)


def opened(data: bytes) -> None:
    """What opens is what was sealed there, and nothing else does."""
    choices = Octets(data)
    suite = choices.below(2)
    place = Location(choices.below(3), choices.below(4))
    priority = choices.below(9)
    # The properties as they come with a sealed Object, or any.
    properties = PROPERTIES
    if choices.below(4) == 3:
        with suppress(ProtocolError):
            properties = decode_pairs(Reader(choices.octets(20)))
    payload = choices.rest()
    found = sealed_tracks()[suite].open(place, Cover(priority, properties), payload, LONGEST)
    assert bytes(found) == PAYLOAD
    assert (place, priority) == (Location(1, 2), 7)
    assert payload in (sealed(suite, False), sealed(suite, True))


def token_seeds() -> Iterable[bytes]:
    yield from (bytes.fromhex(case["token"]) for case in TOKENS["valid"])


def every_genuine() -> Iterable[bytes]:
    """Also of those that are refused for their time, or for what they say."""
    for octets in all_tokens():
        with suppress(BadCbor):
            open_envelope(octets, ENVELOPES)
            yield octets


def all_tokens() -> Iterable[bytes]:
    yield from token_seeds()
    yield from (bytes.fromhex(case["token"]) for case in TOKENS["refused"])


def claims_seeds() -> Iterable[bytes]:
    for octets in (*token_seeds(), token_with(at_8={3: b"x" * 32})):
        read = open_envelope(octets, ENVELOPES)
        yield read.payload


def cbor_seeds() -> Iterable[bytes]:
    for octets in claims_seeds():
        yield b"\x00" + octets
        yield b"\x01" + octets
    yield b"\x00" + cbor2.dumps({1: [b"x", "y", -5, None, True], "z": {2: []}})
    yield b"\x01" + cbor2.dumps({1: 1.5, b"k": cbor2.CBORTag(0, "2026-11-30T00:00:00Z")})


def scope_seeds() -> Iterable[bytes]:
    head = f'key = "{"5e" * 32}"\nsealing = "sealed"\nprotection = "secure-objects-01"\n'
    head += 'suite = "aes-128-gcm"\npadding = "auto"\n'
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    producer = f'[[producers]]\nname = "p"\npublic_key = "{public}"\nkid_hex = "5c84"\n'
    producer += "not_before = 2026-11-30T00:00:00Z\nnot_after = 2027-11-30T00:00:00Z\n"
    yield head.encode()
    yield (head + producer).encode()
    yield (head + issuer_table()).encode()


def issuer_table() -> str:
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    table = f'[[issuers]]\nissuer = "i"\nkid = "k"\npublic_key = "{public}"\n'
    return table + "not_after = 2027-11-30T00:00:00Z\n"


def sealed_seeds() -> Iterable[bytes]:
    for suite in range(2):
        for padded in (False, True):
            yield bytes([suite, 1, 2, 7, 0]) + sealed(suite, padded)
            yield bytes([suite, 1, 2, 7, 3, 2, 2, 0]) + sealed(suite, padded)


TARGETS = (
    Target(name="cat_token", run=token, documented=(BadToken,), seeds=all_tokens),
    Target(name="cbor", run=cbor, documented=(BadCbor,), seeds=cbor_seeds),
    Target(name="cose_envelope", run=envelope, documented=(BadCbor,), seeds=all_tokens),
    Target(name="cat_claims", run=claims, documented=(BadToken, BadCbor), seeds=claims_seeds),
    Target(
        name="revocations",
        run=revocations,
        documented=(ConfigError,),
        seeds=lambda: [b"# revoked\ncti 00ff\nkid 6b\n\n"],
    ),
    Target(name="scope_file", run=scope_file, documented=(ConfigError,), seeds=scope_seeds),
    Target(
        name="issuers_file",
        run=issuers_file,
        documented=(ConfigError,),
        seeds=lambda: [issuer_table().encode(), b""],
    ),
    Target(
        name="token_file",
        run=token_file,
        documented=(BadToken,),
        seeds=lambda: [token_to_text(one).encode() + b"\n" for one in token_seeds()],
    ),
    Target(name="sealed_object", run=opened, documented=(BadObject,), seeds=sealed_seeds),
)
