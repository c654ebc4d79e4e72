"""What ``kvcs show`` says of codecs, and what ``kvcs demo`` compares where one of them rounds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcs.cli.demo import same_tensors
from kvcs.cli.main import main
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.standard import STANDARD, standard_codecs
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.naming import PublicationName, new_publication_id
from kvcs.profile.payload import HEADER_OCTETS, Block
from kvcs.store.source import SafetensorsSource
from tests.unit.kvcs.cli.samples import Folder

KEY = ScopeKey(bytes(32))
COMPAT = Descriptor(
    model="m", revision="r", layers=2, block_tokens=4, dtype="bfloat16", k_shape=(2, 8),
    v_shape=(2, 8),
)  # fmt: skip
TOKENS = list(range(8))
Out = pytest.CaptureFixture[str]


def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    return {
        f"{name}.{layer}": rng.normal(size=(8, 2, 8)).astype(ml_dtypes.bfloat16)
        for layer in range(2)
        for name in "kv"
    }


@dataclass
class Published:
    """A manifest, and an Object that it lists."""

    manifest: bytes
    payload: bytes


def published(codec: str) -> Published:
    keys = KEY.block_keys(COMPAT, TOKENS)
    name = PublicationName(
        KEY.scope_id, KEY.compatibility_id(COMPAT), keys[-1], new_publication_id()
    )
    made = Publication(name, COMPAT, encodings=(Encoding(codec),))
    segment, arrays = made.open_segment(keys), tensors()
    for layer in range(2):
        made.add_layer(segment, layer, arrays[f"k.{layer}"], arrays[f"v.{layer}"])
    [subgroup] = made.tracks[f"k.{codec}.s0".encode()]._groups[1]
    return Published(
        made.draft_manifest().encode(), b"".join(bytes(p) for p in subgroup.objects[1].parts)
    )


@pytest.mark.parametrize("name", STANDARD)
def test_an_object_and_a_manifest_say_their_codec_and_whether_it_is_lossless(
    folder: Folder, capsys: Out, name: str
) -> None:
    codec, it = standard_codecs()[name], published(name)
    kept = "lossless" if codec.lossless else "lossy"
    manifest = folder.write("m.json", it.manifest)
    argv = [folder.write("o", it.payload), "--manifest", manifest, "--track", f"k.{name}.s0"]

    assert main(["show", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("  Codec")] == [
        f"{codec.value:#06x}, {name}, {kept}"
    ]
    assert lines[-1].endswith("payload, digest, manifest, decoding")
    assert main(["show", manifest]) == 0
    assert f"codec {name}" in (out := capsys.readouterr().out)
    assert f"{codec.value:#06x}, {kept}" in out
    assert main(["show", manifest, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["codecs"] == {
        name: {"value": codec.value, "lossless": codec.lossless}
    }


def test_an_object_that_cannot_be_decoded_is_a_bad_one(folder: Folder, capsys: Out) -> None:
    it = published("int8")
    block = Block.decode(it.payload, group_id=1, object_id=1)
    payload = Block(
        block.component, 1, 1, block.token_start, block.token_count, block.codec, block.data[:-1]
    ).encode()
    assert len(payload) == HEADER_OCTETS + len(block.data) - 1

    argv = ["--manifest", folder.write("m.json", it.manifest), "--track", "k.int8.s0"]
    assert main(["show", folder.write("o", payload), *argv]) == 5
    assert "int8 data of 79 octets, expected 80" in capsys.readouterr().err


def test_a_received_cache_is_held_against_what_its_codec_makes_of_the_published_one(
    tmp_path: Path,
) -> None:
    def written(name: str, arrays: dict[str, Any]) -> Path:
        side = {"descriptor": COMPAT.members(), "tokens": TOKENS}
        (tmp_path / f"{name}.json").write_text(json.dumps(side))
        save_file(arrays, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    int8, zstd = standard_codecs()["int8"], standard_codecs()["shuffle-zstd"]
    rounded = {
        name: int8.decode(int8.encode(array), array.shape, array.dtype)
        for name, array in tensors().items()
    }
    source = SafetensorsSource(written("published", tensors()))
    as_it_was, as_rounded = written("same", tensors()), written("rounded", rounded)

    assert same_tensors(source, as_it_was)
    assert same_tensors(source, as_it_was, zstd)
    assert same_tensors(source, as_rounded, int8)
    assert not same_tensors(source, as_rounded, zstd)
    assert not same_tensors(source, as_it_was, int8)
    assert not same_tensors(source, tmp_path / "missing.safetensors", int8)


@pytest.mark.parametrize(
    ("codec", "says"),
    [("fp8", "fp8, lossy"), ("raw", "raw, lossless"), ("gzip", "gzip, not known here")],
)
def test_a_track_name_says_what_its_codec_is(capsys: Out, codec: str, says: str) -> None:
    assert main(["show", f"kvcs-1/{'01' * 32}--k.{codec}.s0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert says in {line.strip().partition(" ")[2].strip() for line in lines}
