"""Targets of :mod:`kvcs.kvsp`: what codecs make of Data that came from the network."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from kvcs.errors import BadObject
from kvcs.kvsp.codecs import Codec
from kvcs.kvsp.descriptor import ELEMENT_OCTETS
from kvcs.kvsp.layout import numpy_dtype
from kvcs.kvsp.standard import standard_codecs
from tests.fuzz.choices import Octets
from tests.fuzz.target import Target

DTYPES = tuple(ELEMENT_OCTETS)
SHAPES = ((4, 2, 8), (1, 1, 1), (0, 2, 8), (4, 0, 0), (3, 1, 7), (2, 1, 8), (2, 2, 33))
VECTORS = Path(__file__).parents[2] / "vectors" / "codecs.json"


def decoding(codec: Codec) -> Callable[[bytes], None]:
    """Return the target of a codec: what is decoded is a tensor as was asked for, or refused."""

    def run(data: bytes) -> None:
        choices = Octets(data)
        shape, dtype = choices.pick(SHAPES), numpy_dtype(choices.pick(DTYPES))
        octets = choices.rest()
        tensor = codec.decode(octets, shape, dtype)
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.nbytes == int(np.prod(shape)) * dtype.itemsize
        if codec.lossless:
            again = codec.decode(codec.encode(tensor), shape, dtype)
            assert again.tobytes() == tensor.tobytes()

    return run


def seeds_of(codec: Codec) -> Callable[[], Iterable[bytes]]:
    def seeds() -> Iterable[bytes]:
        noise = np.random.default_rng(1)
        for way, shape in enumerate(SHAPES):
            for kind, name in enumerate(DTYPES):
                dtype = numpy_dtype(name)
                octets = int(np.prod(shape)) * dtype.itemsize
                tensor = noise.integers(0, 9, octets, np.uint8).view(dtype).reshape(shape)
                if codec.lossless or name in ("float16", "bfloat16", "float32"):
                    encoded = codec.encode(tensor)
                    yield bytes([way, kind]) + encoded
        for case in json.loads(VECTORS.read_text())["cases"]:
            shape = tuple(case["shape"])
            if case["codec"] == codec.name and shape in SHAPES and case["dtype"] in DTYPES:
                ways = bytes([SHAPES.index(shape), DTYPES.index(case["dtype"])])
                yield ways + bytes.fromhex(case["data"])

    return seeds


TARGETS = tuple(
    Target(
        name=f"codec_{codec.name.replace('-', '_')}",
        run=decoding(codec),
        documented=(BadObject,),
        seeds=seeds_of(codec),
    )
    for codec in standard_codecs()
)
