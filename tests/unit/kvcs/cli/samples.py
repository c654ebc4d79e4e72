"""What the subcommands are given: a descriptor, a prompt, a scope key, an object, a manifest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey, anchor_key, block_keys_sha256
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack
from kvcs.profile.payload import Block, Component
from kvcs.profile.signing import ProducerKey, sign_manifest

DESCRIPTOR = Descriptor(
    model="m",
    revision="r1",
    layers=2,
    block_tokens=4,
    dtype="float16",
    k_shape=(1, 2),
    v_shape=(1, 2),
    extra={"rope": {"theta": "10000.0"}},
)
TOKENS = list(range(10))
SECRET = bytes(range(32))
BLOCK = Block(Component.K, 1, 1, 4, 4, 0, bytes(range(16)))
TRACK = DataTrack(Component.K, "raw", 0)


def make_manifest() -> Manifest:
    """Return a manifest of two blocks, with the digest of ``BLOCK`` in its place."""
    key = ScopeKey(SECRET)
    block_keys = key.block_keys(DESCRIPTOR, TOKENS)
    digests = (b"\x11" * 64, b"\x22" * 32 + BLOCK.digest)
    entry = SegmentEntry(
        segment=0,
        first_block=0,
        blocks=2,
        block_keys_sha256=block_keys_sha256(block_keys),
        tracks=(TRACK, replace(TRACK, component=Component.V)),
        complete=False,
        object_digests={TRACK: digests},
    )
    return Manifest(
        compat=DESCRIPTOR,
        segments=(entry,),
        publication=b"\x05" * 16,
        anchor=anchor_key(block_keys),
        version=3,
    )


class Folder:
    """Files as people have them; each property writes one and returns its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: bytes | str) -> str:
        """Write a file."""
        target = self.path / name
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(target)

    def json(self, name: str, value: Any) -> str:
        """Write a JSON file."""
        return self.write(name, json.dumps(value))

    @property
    def key(self) -> str:
        """A scope key file."""
        return self.write("scope.key", SECRET.hex())

    @property
    def descriptor(self) -> str:
        """A file with the descriptor alone."""
        return self.write("descriptor.json", DESCRIPTOR.to_json())

    @property
    def side(self) -> str:
        """The file beside a cache: descriptor, tokens, and whatever else."""
        members = {"descriptor": DESCRIPTOR.members(), "tokens": TOKENS, "prompt": "hello"}
        return self.json("cache.json", members)

    @property
    def object(self) -> str:
        """The payload of an Object."""
        return self.write("object.bin", BLOCK.encode())

    @property
    def manifest(self) -> str:
        """A plain manifest."""
        return self.write("manifest.json", make_manifest().to_json())

    def signed(self, key: ProducerKey) -> str:
        """A signed manifest."""
        return self.write("manifest.cose", sign_manifest(make_manifest().to_json(), key))
