"""Arithmetic of sections and containers, for the shapes of real caches."""

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.kvsp.descriptor import ELEMENT_OCTETS, Descriptor
from kvcs.kvsp.layout import Component, Layout, layer_digest, numpy_dtype

K, V, KV = Component.K, Component.V, Component.KV


def descriptor(**changes: Any) -> Descriptor:
    fields: dict[str, Any] = {
        "model": "m",
        "revision": "r",
        "layers": 3,
        "block_tokens": 16,
        "dtype": "bfloat16",
        "k_shape": (8, 128),
        "v_shape": (8, 128),
    }
    return Descriptor(**fields | changes)


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "dtype", "k_octets", "v_octets"),
    [
        pytest.param((8, 128), (8, 128), "bfloat16", 32_768, 32_768, id="GQA"),
        pytest.param((1, 64), (1, 64), "bfloat16", 2_048, 2_048, id="MQA"),
        pytest.param((32, 128), (32, 128), "float16", 131_072, 131_072, id="MHA"),
        pytest.param((1, 512), (1, 64), "bfloat16", 16_384, 2_048, id="MLA"),
        pytest.param((1, 576), (0, 0), "bfloat16", 18_432, 0, id="V empty"),
        pytest.param((0, 0), (4, 8), "float32", 0, 2_048, id="K empty"),
        pytest.param((3, 64), (3, 64), "bfloat16", 6_144, 6_144, id="3 heads"),
        pytest.param((10, 128), (10, 128), "bfloat16", 40_960, 40_960, id="10 heads"),
        pytest.param((8, 80), (8, 96), "float8_e4m3fn", 10_240, 12_288, id="dim 80 and 96"),
        pytest.param((8, 64), (8, 64), "int8", 8_192, 8_192, id="int8"),
    ],
)
@pytest.mark.parametrize("layers", [1, 2, 61, 80])
def test_lengths_follow_from_the_descriptor(
    k_shape: tuple[int, int],
    v_shape: tuple[int, int],
    dtype: str,
    k_octets: int,
    v_octets: int,
    layers: int,
) -> None:
    layout = Layout.of(descriptor(k_shape=k_shape, v_shape=v_shape, dtype=dtype, layers=layers))

    assert layout.section_octets(K) == layout.k_octets == k_octets
    assert layout.section_octets(V) == layout.v_octets == v_octets
    assert layout.section_octets(KV) == layout.layer_octets == k_octets + v_octets
    assert layout.container_octets == layers * (k_octets + v_octets)
    assert layout.shape(K) == (16, *k_shape)
    assert layout.shape(V) == (16, *v_shape)
    for component in Component:
        elements = int(np.prod(layout.shape(component)))
        assert elements * layout.dtype.itemsize == layout.section_octets(component)


@pytest.mark.parametrize(("name", "octets"), ELEMENT_OCTETS.items())
def test_every_element_type_has_its_numpy_type(name: str, octets: int) -> None:
    dtype = numpy_dtype(name)

    assert dtype.itemsize == octets
    assert dtype.byteorder in "<=|"
    assert dtype.name == name


def test_an_element_type_no_descriptor_can_name_has_none() -> None:
    with pytest.raises(KeyError):
        numpy_dtype("float64")


@pytest.mark.parametrize("block_tokens", [1, 16, 31, 64, 256])
@pytest.mark.parametrize("v_shape", [(2, 4), (1, 3), (0, 0)])
def test_sections_of_a_container_are_where_the_spans_say(
    block_tokens: int, v_shape: tuple[int, int]
) -> None:
    layout = Layout.of(
        descriptor(k_shape=(2, 4), v_shape=v_shape, block_tokens=block_tokens, dtype="int8")
    )
    container = bytes(i % 251 for i in range(layout.container_octets))

    pieces = list(layout.sections(container))

    assert len(pieces) == 3
    assert b"".join(bytes(k) + bytes(v) for k, v in pieces) == container
    for layer, (k, v) in enumerate(pieces):
        assert container[layout.span(layer, K)] == k
        assert container[layout.span(layer, V)] == v
        assert container[layout.span(layer, KV)] == bytes(k) + bytes(v)


def test_the_digest_of_a_layer_is_that_of_both_sections_together() -> None:
    k, v = b"key" * 50, b"value" * 20

    assert layer_digest(k, v) == sha256(k + v).digest()
    assert layer_digest(memoryview(k), bytearray(v)) == sha256(k + v).digest()
    assert layer_digest(k, b"") == sha256(k).digest()


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_the_model_does_not_have_has_no_span(layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer {layer} of 3"):
        Layout.of(descriptor()).span(layer, K)


def test_octets_of_another_length_are_not_taken_apart() -> None:
    layout = Layout.of(descriptor())

    with pytest.raises(ValueError, match="layer of 1 octets, expected 65536"):
        layout.split(b"x")
    with pytest.raises(ValueError, match="container of 1 octets, expected 196608"):
        layout.sections(b"x")


def test_equal_descriptors_share_a_layout() -> None:
    assert Layout.of(descriptor()) is Layout.of(descriptor())


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 9), st.integers(1, 80))
def test_spans_of_all_layers_cover_the_container_once(
    tokens: int, heads: int, dim: int, layers: int
) -> None:
    layout = Layout.of(
        descriptor(block_tokens=tokens, k_shape=(heads, dim), v_shape=(dim, heads), layers=layers)
    )
    at = 0

    for layer in range(layers):
        for component in (K, V):
            span = layout.span(layer, component)
            assert span.start == at
            at = span.stop
    assert at == layout.container_octets
