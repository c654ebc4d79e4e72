"""Stock: a publication is complete when all is held that its manifest promises."""

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.depot.stock import Stock
from kvcs.errors import BadManifest
from kvcs.kvsp.descriptor import Descriptor
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack
from moqt.location import Location

LAYERS, BLOCKS = 3, 2
COMPAT = Descriptor(
    model="m", revision="r", layers=LAYERS, block_tokens=4, dtype="float16",
    k_shape=(1, 2), v_shape=(1, 2),
)  # fmt: skip
K, V = DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")
PLACES = [Location(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]


def digest(track: DataTrack, at: Location) -> bytes:
    return sha256(f"{track} {at}".encode()).digest()


def manifest(layers: int = 0, *, version: int = 0, complete: bool = False, **more: Any) -> Manifest:
    """Return a manifest that lists the digests of so many layers."""
    digests = {
        track: tuple(
            b"".join(digest(track, Location(layer, block)) for block in range(BLOCKS))
            for layer in range(layers)
        )
        for track in (K, V)
    }
    entry = SegmentEntry(
        segment=0, first_block=0, blocks=BLOCKS, block_keys_sha256=b"k" * 32, tracks=(K, V),
        complete=complete, object_digests=digests,
    )  # fmt: skip
    given: dict[str, Any] = {"compat": COMPAT, "segments": (entry,), "version": version}
    return Manifest(**(given | more))


def hold(stock: Stock, track: DataTrack, *places: Location) -> None:
    stock.hold(track, [(at, digest(track, at)) for at in places])


def test_nothing_is_wanted_before_there_is_a_manifest() -> None:
    stock = Stock()

    assert not stock.wants(K, Location(0, 0))
    assert stock.first_missing(K) is None
    assert not stock.is_complete


def test_only_what_is_promised_is_wanted() -> None:
    stock = Stock()
    stock.accept(manifest(), 0)

    assert stock.wants(K, Location(2, 1))
    for place in (Location(3, 0), Location(0, 2)):
        assert not stock.wants(K, place)
    assert not stock.wants(DataTrack.parse("k.raw.s1"), Location(0, 0))
    assert stock.promised_objects == 2 * LAYERS * BLOCKS


@given(st.permutations([(track, at) for track in (K, V) for at in PLACES]), st.data())
def test_it_is_complete_with_the_last_object_and_not_before(
    order: list[tuple[DataTrack, Location]], data: st.DataObject
) -> None:
    """Manifests come at any moment between the Objects, each version once."""
    stock, versions = Stock(), [manifest(n, version=n) for n in range(LAYERS)]
    versions.append(manifest(LAYERS, version=LAYERS, complete=True))
    stock.accept(versions[0], 0)
    at = sorted(data.draw(st.integers(0, len(order))) for _ in versions[1:])

    for index, (track, place) in enumerate(order):
        for version in [n + 1 for n, when in enumerate(at) if when == index]:
            stock.accept(versions[version], version)
        assert not stock.is_complete
        missing = [p for t, p in order[index:] if t == track]
        assert stock.first_missing(track) == min(missing)
        assert stock.last_missing_layer(track) == max(missing).group
        hold(stock, track, place)
        assert not stock.wants(track, place)
    for version in [n + 1 for n, when in enumerate(at) if when == len(order)]:
        stock.accept(versions[version], version)

    assert stock.is_complete
    assert stock.first_missing(K) is None
    assert stock.last_missing_layer(K) is None


def test_all_that_is_listed_may_be_held_and_more_come() -> None:
    stock = Stock()
    stock.accept(manifest(LAYERS), 0)
    hold(stock, K, *PLACES)
    hold(stock, V, *PLACES)

    assert not stock.is_complete  # the segment is not said to be complete
    stock.accept(manifest(LAYERS, version=1, complete=True), 1)
    assert stock.is_complete


def test_an_older_version_changes_nothing() -> None:
    stock = Stock()
    assert stock.accept(manifest(2, version=5), 5)

    assert not stock.accept(manifest(0, version=3), 3)
    assert stock.version == 5


@pytest.mark.parametrize("place", PLACES[:2])
def test_a_manifest_that_lists_another_digest_than_what_is_held_is_refused(
    place: Location,
) -> None:
    stock = Stock()
    stock.accept(manifest(), 0)
    stock.hold(K, [(place, b"x" * 32)])

    with pytest.raises(BadManifest, match=f"k.raw.s0 layer 0 block {place.object} is held with"):
        stock.accept(manifest(1, version=1), 1)
    assert stock.version == 0


def test_an_object_with_another_digest_than_what_is_listed_is_refused() -> None:
    stock = Stock()
    stock.accept(manifest(1), 0)

    with pytest.raises(BadManifest, match="the manifest lists"):
        stock.hold(K, [(Location(0, 0), b"x" * 32)])


def test_a_manifest_that_takes_something_back_is_refused() -> None:
    stock = Stock()
    stock.accept(manifest(2), 0)

    with pytest.raises(BadManifest, match="contradicts or omits"):
        stock.accept(manifest(1, version=1), 1)
    with pytest.raises(BadManifest, match="another compat"):
        stock.accept(manifest(2, version=1, compat=replace(COMPAT, model="other")), 1)
