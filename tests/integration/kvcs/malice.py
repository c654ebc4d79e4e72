"""A relay that lies: what it may do to publications that it was trusted to pass on.

It knows the profile, and every publication that there is; what it lacks is the producer's key. So
it can make Objects and manifests whose every length and digest is right, and sign them as somebody
else. Each lie is a function that changes what is to be passed on, by chance.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256

from kvcs.producer.publication import Publication
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, DataTrack, PublicationName
from kvcs.profile.payload import HEADER_OCTETS
from kvcs.profile.signing import ProducerKey, read_unverified, sign_manifest
from kvcs.trust.sealing import PROPERTIES
from moqt.aio import MoqtConnection
from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.errors import UsageError
from moqt.session.events import FetchReceived
from moqt.session.localobjects import LocalObject, LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.pairs import Pairs
from tests.integration.kvcs.faults import Copy, StandIn

Done = tuple[PublishDoneCode, str]


@dataclass(frozen=True)
class Item:
    """One Object, as it is passed on."""

    group: int
    object: int
    payload: bytes
    status: ObjectStatus = ObjectStatus.NORMAL
    priority: int = 0
    properties: Pairs = ()

    @property
    def is_data(self) -> bool:
        return self.status is ObjectStatus.NORMAL


@dataclass
class Goods:
    """A publication on its way."""

    name: PublicationName
    tracks: dict[bytes, list[Item]]
    ends: dict[bytes, Done | None]
    """How each track ends; None: it never does."""

    @classmethod
    def of(cls, one: Publication) -> "Goods":
        """Take over a finished publication."""
        tracks = {
            name: [
                Item(
                    group,
                    obj.object_id,
                    b"".join(bytes(part) for part in obj.parts),
                    obj.status,
                    subgroup.priority,
                    obj.properties,
                )
                for group, subgroups in track._groups.items()
                for subgroup in subgroups
                for obj in subgroup.objects
            ]
            for name, track in one.tracks.items()
        }
        return cls(one.name, tracks, dict.fromkeys(tracks, (PublishDoneCode.TRACK_ENDED, "")))

    def copy(self) -> "Goods":
        tracks = {name: list(items) for name, items in self.tracks.items()}
        return Goods(self.name, tracks, dict(self.ends))

    @property
    def data_tracks(self) -> list[bytes]:
        return [name for name in self.tracks if name not in (MANIFEST, MANIFEST_COSE)]

    def passed_on(self) -> "Wares":
        """Return what is served. What a session cannot be made to say is left out."""
        live = {name: self._track(name, items) for name, items in self.tracks.items()}
        once = {
            name: self._track(name, list({(i.group, i.object): i for i in items}.values()))
            for name, items in self.tracks.items()
        }
        return Wares(self.name, live, once)

    def _track(self, name: bytes, items: list[Item]) -> LocalTrack:
        track = LocalTrack(self.name.track(name))
        subgroup: LocalSubgroup | None = None
        before = Item(-1, -1, b"")
        for item in items:
            try:
                # What is out of order, or twice there, goes out on a stream of its own.
                if subgroup is None or not _follows(item, before):
                    if subgroup is not None:
                        subgroup.close()
                    used = [s.subgroup_id for s in track._groups.get(item.group, ())]
                    subgroup = track.open_subgroup(
                        item.group,
                        max(used, default=-1) + 1,
                        priority=item.priority,
                        has_properties=True,
                    )
                payload = (item.payload,) if item.is_data else ()
                properties = item.properties if item.is_data else ()
                subgroup.publish(item.object, *payload, status=item.status, properties=properties)
                before = item
            except UsageError:
                continue
        if subgroup is not None:
            subgroup.close()
        if (done := self.ends[name]) is not None:
            track.end(*done)
        return track


@dataclass
class Wares(Copy):
    """What a liar serves."""

    fetched: dict[bytes, LocalTrack]
    """The same for who asks with FETCH, which cannot say an Object twice."""


class Liar(StandIn):
    """Serves wares."""

    def __init__(self, *held: Wares) -> None:
        super().__init__(*held)
        self._wares = held
        self._fetched = {
            (one.name.namespace, name): t for one in held for name, t in one.fetched.items()
        }

    def go_on(self, rng: random.Random, loot: "Loot", payload: bytes | None = None) -> None:
        """Publish what passes for a later version of each manifest, where there may be one.

        Args:
            rng: Chooses what it is.
            loot: What it is chosen from.
            payload: What it is, if it is not chosen.
        """
        for wares in self._wares:
            track = wares.tracks.get(MANIFEST_COSE)
            if track is None or track.ended is not None or track.largest is None:
                continue
            last = _last(track)
            was = b"".join(bytes(part) for part in last.parts)
            known = [i.payload for o in loot.others for i in o.tracks[MANIFEST_COSE] if i.is_data]
            chosen = rng.choice([rng.randbytes(40), known[-1], was, was[:-1] + b"?", b""])
            properties = rng.choice([last.properties, last.properties, (), PROPERTIES])
            if payload is not None:
                chosen, properties = payload, last.properties
            with suppress(UsageError):
                subgroup = track.open_subgroup(
                    track.largest.group + 1, priority=0, has_properties=True
                )
                subgroup.publish(0, chosen, properties=properties)
                subgroup.close()

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        track = self._fetched.get((request.track.namespace, request.track.name))
        if track is None or request.track.name in self.silent:
            super().fetch_received(connection, request)
        else:
            connection.session.accept_fetch(request.request_id, track)


@dataclass(frozen=True)
class Loot:
    """What the relay knows besides."""

    others: tuple[Goods, ...]
    """Other publications of the same prompt, by the same producer."""

    stranger: ProducerKey
    """A key that nobody trusts."""


Lie = Callable[[Goods, random.Random, Loot], None]


def _follows(item: Item, before: Item) -> bool:
    """Whether one Object may come behind another on one stream."""
    return (
        item.group == before.group
        and item.object > before.object
        and item.priority == before.priority
    )


def _some(goods: Goods, rng: random.Random) -> tuple[list[Item], int]:
    """Return a track, and a place in it where an Object with a payload is."""
    names = [name for name, items in goods.tracks.items() if any(map(_is_data, items))]
    items = goods.tracks[rng.choice(names)]
    return items, rng.choice([at for at, item in enumerate(items) if item.is_data])


def _is_data(item: Item) -> bool:
    return item.is_data


def flips(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """Bits of an Object or a manifest."""
    for _ in range(rng.randint(1, 3)):
        items, at = _some(goods, rng)
        payload = bytearray(items[at].payload)
        if payload:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        items[at] = replace(items[at], payload=bytes(payload))


def cuts(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """Octets of a payload are missing, or there are more."""
    items, at = _some(goods, rng)
    payload = items[at].payload
    if rng.random() < 0.3:
        payload += rng.randbytes(rng.randint(1, 99))
    else:
        payload = payload[: rng.randrange(len(payload) + 1)]
    items[at] = replace(items[at], payload=payload)


def drops(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """An Object, a layer, or a track."""
    match rng.randrange(4):
        case 0 | 1:
            items, at = _some(goods, rng)
            del items[at]
        case 2:
            items, at = _some(goods, rng)
            group = items[at].group
            items[:] = [item for item in items if item.group != group]
        case _:
            name = rng.choice(list(goods.tracks))
            if rng.random() < 0.5:
                goods.tracks[name].clear()
            else:
                del goods.tracks[name]


def repeats(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """An Object comes twice: the same, or another one in its place."""
    items, at = _some(goods, rng)
    again = items[at]
    if rng.random() < 0.5:
        again = replace(again, payload=forged(again.payload, rng))
    items.insert(rng.randint(0, len(items)), again)


def reorders(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """Objects come in any order; layers too."""
    items, _ = _some(goods, rng)
    if rng.random() < 0.5:
        rng.shuffle(items)
    else:
        items.sort(key=lambda item: (-item.group, item.object))


def replays(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """What another publication had there: an Object, a track, or the manifest."""
    other = rng.choice(loot.others)
    shared = sorted(goods.tracks.keys() & other.tracks.keys())
    match rng.randrange(3):
        case 0:
            name = rng.choice([n for n in shared if n != MANIFEST_COSE])
            there = {(i.group, i.object): i for i in other.tracks[name] if i.is_data}
            for at, item in enumerate(goods.tracks[name]):
                if (found := there.get((item.group, item.object))) and rng.random() < 0.5:
                    goods.tracks[name][at] = found
        case 1:
            name = rng.choice(shared)
            goods.tracks[name] = list(other.tracks[name])
        case _:
            goods.tracks[MANIFEST_COSE] = list(other.tracks[MANIFEST_COSE])


def swaps(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """Two Objects, or two layers, change places; their headers say so, or not."""
    items = goods.tracks[rng.choice(goods.data_tracks or [MANIFEST_COSE])]
    data = [at for at, item in enumerate(items) if item.is_data]
    if len(data) < 2:
        return
    if rng.random() < 0.5:
        one, two = rng.sample(data, 2)
        pairs = [(one, two)]
    else:
        groups = sorted({items[at].group for at in data})
        first, second = rng.choice(groups), rng.choice(groups)
        place = {(items[at].group, items[at].object): at for at in data}
        pairs = [
            (at, place[second, number])
            for (group, number), at in place.items()
            if group == first and (second, number) in place
        ]
    honest = rng.random() < 0.5
    for one, two in pairs:
        a, b = items[one], items[two]
        items[one] = replace(a, payload=_moved(b.payload, a) if honest else b.payload)
        items[two] = replace(b, payload=_moved(a.payload, b) if honest else a.payload)


def forges(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """Other tensors, with digests that are right for them."""
    for name in goods.data_tracks:
        for at, item in enumerate(goods.tracks[name]):
            if item.is_data and rng.random() < 0.3:
                payload = forged(item.payload, rng)
                goods.tracks[name][at] = replace(item, payload=payload)


def serves_an_old_manifest(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """The last versions never come; or an earlier one is passed off as a later one."""
    items = goods.tracks.get(MANIFEST_COSE, [])
    versions = sorted({item.group for item in items if item.is_data})
    if not versions:
        return
    last = rng.choice(versions)
    kept = [item for item in items if item.group <= last]
    if rng.random() < 0.5 and kept:
        kept.append(replace(kept[-1], group=versions[-1] + rng.randint(1, 3), object=0))
    goods.tracks[MANIFEST_COSE] = kept
    if rng.random() < 0.5:
        goods.ends[MANIFEST_COSE] = None


def takes_the_signature_away(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """A plain manifest in place of a signed one, with digests of what is served instead."""
    text = _doctored(goods, rng)
    if text is None:
        return
    version = max(item.group for item in goods.tracks[MANIFEST_COSE])
    where = MANIFEST if rng.random() < 0.6 else MANIFEST_COSE
    if rng.random() < 0.6:
        del goods.tracks[MANIFEST_COSE]
    goods.tracks[where] = [Item(version, 0, text)]
    goods.ends[where] = (PublishDoneCode.TRACK_ENDED, "")


def signs_as_somebody_else(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """A manifest of a stranger, whose digests are those of what is served instead."""
    text = _doctored(goods, rng)
    if text is None:
        return
    items = goods.tracks[MANIFEST_COSE]
    key = loot.stranger
    if rng.random() < 0.5:  # under the name of the producer's key
        claimed = read_unverified(items[-1].payload).kid
        key = ProducerKey(key.private_key, claimed or b"kid")
    signed = sign_manifest(text, key)
    at = rng.randrange(len(items))
    goods.tracks[MANIFEST_COSE] = [
        replace(item, payload=signed) if number >= at and item.is_data else item
        for number, item in enumerate(items)
    ]


def invents_ends(goods: Goods, rng: random.Random, loot: Loot) -> None:
    """Layers, tracks and publications end where they do not, or never."""
    name = rng.choice(list(goods.tracks))
    items = goods.tracks[name]
    if not items:
        return
    at = rng.randrange(len(items))
    match rng.randrange(4):
        case 0:
            del items[at:]
        case 1:
            status = rng.choice([ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK])
            items[at] = replace(items[at], payload=b"", status=status)
        case 2:
            group = items[at].group
            items.insert(at + 1, Item(group, items[at].object + 1, b"", ObjectStatus.END_OF_TRACK))
        case _:
            items[:] = [item for item in items if item.is_data]
    goods.ends[name] = rng.choice(
        [
            None,
            (PublishDoneCode.TRACK_ENDED, ""),
            (PublishDoneCode.INTERNAL_ERROR, "lost"),
            (PublishDoneCode.INTERNAL_ERROR, "abandoned: so they say"),
            (PublishDoneCode.EXPIRED, ""),
            (PublishDoneCode.GOING_AWAY, ""),
            (PublishDoneCode.MALFORMED_TRACK, ""),
        ]
    )


LIES: tuple[Lie, ...] = (
    flips,
    cuts,
    drops,
    repeats,
    reorders,
    replays,
    swaps,
    forges,
    serves_an_old_manifest,
    takes_the_signature_away,
    signs_as_somebody_else,
    invents_ends,
)


def lied_about(goods: Goods, rng: random.Random, loot: Loot) -> tuple[Goods, list[str]]:
    """Return what a relay makes of a publication, and what it did to it."""
    changed = goods.copy()
    lies = rng.choices(LIES, k=rng.choice([1, 1, 2, 3]))
    for lie in lies:
        if any(any(map(_is_data, items)) for items in changed.tracks.values()):
            lie(changed, rng, loot)
    return changed, [lie.__name__ for lie in lies]


def _last(track: LocalTrack) -> LocalObject:
    """Return the last Group's first Object: a manifest track has no other."""
    assert track.largest is not None
    first: LocalObject = track._groups[track.largest.group][0].objects[0]
    return first


def _moved(payload: bytes, to: Item) -> bytes:
    """Return a payload whose header says that it belongs elsewhere."""
    if len(payload) < HEADER_OCTETS:
        return payload
    place = to.group.to_bytes(2, "big") + to.object.to_bytes(4, "big")
    tokens = to.payload[14:22] if len(to.payload) >= HEADER_OCTETS else payload[14:22]
    return payload[:8] + place + tokens + payload[22:]


def forged(payload: bytes, rng: random.Random) -> bytes:
    """Return a payload of the same length and other tensors, in which every digest is right."""
    if len(payload) <= HEADER_OCTETS or not payload.startswith(b"KVO1"):
        return rng.randbytes(len(payload))
    data = rng.randbytes(len(payload) - HEADER_OCTETS)
    return payload[:36] + sha256(data).digest() + data


def _doctored(goods: Goods, rng: random.Random) -> bytes | None:
    """Forge some Objects, and return the last manifest with the digests of what is served."""
    items = [item for item in goods.tracks.get(MANIFEST_COSE, ()) if item.is_data]
    if not items or not goods.data_tracks:
        return None
    forges(goods, rng, Loot((), ProducerKey.generate()))
    try:
        manifest = Manifest.from_json(read_unverified(items[-1].payload).text)
    except Exception:  # it was lied about before, or is sealed
        return None
    return replace(
        manifest, segments=tuple(_attested(entry, goods) for entry in manifest.segments)
    ).to_json()


def _attested(entry: SegmentEntry, goods: Goods) -> SegmentEntry:
    """Return the entry of a segment with the digests of what is served."""

    def served(track: DataTrack, listed: tuple[bytes, ...]) -> tuple[bytes, ...]:
        there = {(i.group, i.object): i.payload for i in goods.tracks.get(track.name, ())}
        return tuple(
            b"".join(
                sha256(there.get((layer, block), b"")[HEADER_OCTETS:]).digest()
                for block in range(entry.blocks)
            )
            for layer in range(len(listed))
        )

    digests = {track: served(track, listed) for track, listed in entry.object_digests.items()}
    return replace(entry, object_digests=digests)
