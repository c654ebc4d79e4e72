"""KVSP and the Object payload against values that an independent program computed."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey, anchor_key, block_keys_sha256
from kvcs.kvsp.layout import Component, layer_digest
from kvcs.profile.payload import Block

ALL: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "vectors" / "kvsp.json").read_text(encoding="utf-8")
)

#: What the file holds, and the members each of its cases has. A vector that says more than is
#: checked below must fail here, not pass unread.
SECTIONS: dict[str, set[str]] = {
    "identifiers": {
        "name",
        "scope_key",
        "descriptor",
        "canonical",
        "tokens",
        "extra",
        "scope_id",
        "compatibility_id",
        "block_keys",
        "block_keys_sha256",
        "anchor_key",
    },
    "objects": {
        "component",
        "layer",
        "block",
        "token_start",
        "token_count",
        "codec",
        "data",
        "payload",
    },
    "layer_digest": {"k", "v", "digest"},
}


def test_the_file_holds_what_is_checked_here_and_nothing_else() -> None:
    assert set(ALL) == {"source", *SECTIONS}
    assert len(ALL["identifiers"]) >= 5
    assert len(ALL["objects"]) >= 4
    for section, members in SECTIONS.items():
        cases = ALL[section] if isinstance(ALL[section], list) else [ALL[section]]
        for case in cases:
            assert set(case) == members, section


@pytest.mark.parametrize("case", ALL["identifiers"], ids=lambda case: case["name"])
def test_identifiers_are_those_of_the_vector(case: dict[str, Any]) -> None:
    key = ScopeKey(bytes.fromhex(case["scope_key"]))
    descriptor = Descriptor.from_json(case["descriptor"])
    extra = [bytes.fromhex(material) for material in case["extra"]]

    keys = key.block_keys(descriptor, case["tokens"], extra)

    assert descriptor.canonical() == case["canonical"].encode()
    assert key.scope_id.hex() == case["scope_id"]
    assert key.compatibility_id(descriptor).hex() == case["compatibility_id"]
    assert [k.hex() for k in keys] == case["block_keys"]
    assert block_keys_sha256(keys).hex() == case["block_keys_sha256"]
    anchor = anchor_key(keys)
    assert (anchor.hex() if anchor else None) == case["anchor_key"]


@pytest.mark.parametrize("case", ALL["identifiers"], ids=lambda case: case["name"])
def test_a_descriptor_read_from_text_is_the_same(case: dict[str, Any]) -> None:
    text = json.dumps(case["descriptor"])

    assert Descriptor.from_json(text).canonical() == case["canonical"].encode()
    assert (
        Descriptor.from_json(case["canonical"].encode()).canonical().decode() == (case["canonical"])
    )


@pytest.mark.parametrize("case", ALL["objects"])
def test_objects_are_those_of_the_vector_both_ways(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["payload"])
    block = Block(
        component=Component(case["component"]),
        layer=case["layer"],
        block_index=case["block"],
        token_start=case["token_start"],
        token_count=case["token_count"],
        codec=case["codec"],
        data=bytes.fromhex(case["data"]),
    )

    assert block.encode() == payload
    assert Block.decode(payload, group_id=case["layer"], object_id=case["block"]) == block


def test_the_layer_digest_is_that_of_the_vector() -> None:
    case = ALL["layer_digest"]

    digest = layer_digest(bytes.fromhex(case["k"]), bytes.fromhex(case["v"]))

    assert digest.hex() == case["digest"]
