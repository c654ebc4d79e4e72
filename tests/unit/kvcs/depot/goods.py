"""Publications to be kept, made up."""

from kvcs.depot.archive import Archive, Batch, Wanted
from kvcs.depot.records import Entry, Item, TrackNote
from kvcs.kvsp.layout import Component
from kvcs.profile.naming import MANIFEST, PublicationName
from kvcs.profile.payload import Block
from moqt.location import Location

K = b"k.raw.s0"


def name(number: int) -> PublicationName:
    return PublicationName(b"s" * 32, b"c" * 32, b"a" * 32, number.to_bytes(16, "big"))


def payload_of(layer: int, block: int, octets: int = 40) -> bytes:
    return Block(
        component=Component.K,
        layer=layer,
        block_index=block,
        token_start=block * 16,
        token_count=16,
        codec=0,
        data=bytes([layer, block]) * (octets // 2),
    ).encode()


def item(layer: int, block: int, octets: int = 40, track: bytes = K) -> Item:
    payload = payload_of(layer, block, octets)
    return Item(track, Location(layer, block), 7, (), payload, payload[36:68])


def manifest_item(version: int, text: bytes = b'{"kvcs": 1}') -> Item:
    return Item(MANIFEST, Location(version, 0), 0, ((2, 5),), text, b"d" * 32)


def noted(groups: int = 4, blocks: int = 2) -> dict[bytes, TrackNote]:
    return {K: TrackNote(groups, blocks), MANIFEST: TrackNote()}


def keep(archive: Archive, number: int, *items: Item, now: float = 1.0) -> None:
    archive.write([Batch(number, items, noted())], now)


def wanted(track: bytes, entry: Entry) -> Wanted:
    return Wanted(
        track,
        entry.location,
        entry.priority,
        entry.properties,
        entry.offset,
        entry.length,
        entry.seal,
    )


def contents(archive: Archive, number: int) -> dict[tuple[bytes, Location], bytes | None]:
    """Return all that an archive holds of a publication; None stands for what is damaged."""
    found: dict[tuple[bytes, Location], bytes | None] = {}
    for track in archive.notes(number):
        entries = archive.entries(number, track)
        payloads = archive.read(number, [wanted(track, entry) for entry in entries])
        for entry, payload in zip(entries, payloads, strict=True):
            found[track, entry.location] = payload
    return found


def expected(*items: Item) -> dict[tuple[bytes, Location], bytes]:
    return {(one.track, one.location): one.payload for one in items}
