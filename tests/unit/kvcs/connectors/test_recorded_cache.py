"""The recorded cache in tests/data is what its JSON file says it is."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from kvcs.connectors import transformers as adapter
from kvcs.kvsp.descriptor import Descriptor

DATA = Path(__file__).parents[3] / "data"
TENSORS = DATA / "smollm2-128.safetensors"
FACTS: dict[str, Any] = json.loads((DATA / "smollm2-128.json").read_text())
LAYERS = 30


@pytest.fixture(scope="module")
def tensors() -> dict[str, NDArray[Any]]:
    return load_file(TENSORS)


def test_the_file_has_the_size_and_digest_that_the_json_names() -> None:
    data = TENSORS.read_bytes()

    assert len(data) == FACTS["file"]["octets"] < 4_000_000
    assert hashlib.sha256(data).hexdigest() == FACTS["file"]["sha256"]
    assert FACTS["file"]["name"] == TENSORS.name


def test_every_layer_has_k_and_v_of_128_tokens(tensors: dict[str, NDArray[Any]]) -> None:
    assert set(tensors) == {f"{part}.{layer}" for part in "kv" for layer in range(LAYERS)}
    for name, tensor in tensors.items():
        assert tensor.shape == (128, 3, 64), name
        assert tensor.dtype == "bfloat16", name


def test_every_element_is_finite_and_no_two_tensors_are_alike(
    tensors: dict[str, NDArray[Any]],
) -> None:
    for name, tensor in tensors.items():
        assert np.isfinite(tensor.astype(np.float32)).all(), name
    assert len({tensor.tobytes() for tensor in tensors.values()}) == 2 * LAYERS


def test_no_token_is_without_v_in_any_layer(tensors: dict[str, NDArray[Any]]) -> None:
    for layer in range(LAYERS):
        v = tensors[f"v.{layer}"].astype(np.float32)
        assert (np.abs(v).sum(axis=(1, 2)) > 0).all(), layer


def test_equal_tokens_have_equal_v_in_layer_0_only(tensors: dict[str, NDArray[Any]]) -> None:
    """Layer 0 sees the token alone, later layers what came before it: misplaced rows show."""
    tokens = FACTS["tokens"]
    twice = max(tokens, key=tokens.count)
    first, *others = [at for at, token in enumerate(tokens) if token == twice]
    unlike = next(at for at, token in enumerate(tokens) if token != twice)

    first_layer, last_layer = tensors["v.0"], tensors[f"v.{LAYERS - 1}"]

    assert others
    for other in others:
        assert np.array_equal(first_layer[first], first_layer[other])
        assert not np.array_equal(last_layer[first], last_layer[other])
    assert not np.array_equal(first_layer[first], first_layer[unlike])


def test_the_tokens_are_those_of_the_cache_and_of_the_vocabulary() -> None:
    assert len(FACTS["tokens"]) == 128
    assert len(FACTS["tail"]) > 0
    assert len(FACTS["continuation"]["tokens"]) == 32
    for token in FACTS["tokens"] + FACTS["tail"] + FACTS["continuation"]["tokens"]:
        assert type(token) is int
        assert 0 <= token < 49_152


def test_the_descriptor_is_accepted_and_describes_these_tensors(
    tensors: dict[str, NDArray[Any]],
) -> None:
    descriptor = Descriptor.from_json(FACTS["descriptor"])

    assert descriptor.layers == LAYERS
    assert descriptor.block_tokens == 16
    assert descriptor.k_shape == tensors["k.0"].shape[1:]
    assert descriptor.v_shape == tensors["v.0"].shape[1:]
    assert descriptor.dtype == str(tensors["k.0"].dtype)
    assert descriptor.revision == f"sha256:{adapter.MODEL_SHA256}"


def test_the_origin_names_the_weights_that_the_adapter_fetches() -> None:
    origin = FACTS["origin"]

    assert (origin["package"], origin["version"]) == (adapter.MODEL_PACKAGE, adapter.MODEL_VERSION)
    assert origin["weights_file"] == adapter.MODEL_FILE
    assert origin["weights_sha256"] == adapter.MODEL_SHA256
    assert origin["license"] == "Apache-2.0"
    assert adapter.MODEL_SHA256 in (DATA / "README.md").read_text()


def test_the_pacing_has_a_wait_for_each_layer() -> None:
    waits = FACTS["pacing"]["ms_before_layer"]

    assert len(waits) == LAYERS
    assert all(0 < wait < 1000 for wait in waits)
