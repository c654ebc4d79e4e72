"""The codecs that come with kvcs, in the order in which a consumer likes them.

Their values are of the private range: the registry of KVSP has assigned none of them.
"""

from collections.abc import Callable, Mapping

from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import Codec, CodecRegistry
from kvcs.kvsp.quantized import Fp8, Int8
from kvcs.kvsp.shuffled import ShuffleLz4, ShuffleZstd

#: Beside ``raw``. By name, since one that lacks its library cannot be made.
STANDARD: Mapping[str, Callable[[], Codec]] = {
    "shuffle-zstd": ShuffleZstd,
    "shuffle-lz4": ShuffleLz4,
    "int8": Int8,
    "fp8": Fp8,
}


def standard_codecs(*others: Codec) -> CodecRegistry:
    """Return a new registry with ``raw``, the codecs that come with kvcs, and others.

    One whose library is not installed is left out; who asks for it is told which one that is.

    Raises:
        ConfigError: If another codec cannot be registered; see :meth:`CodecRegistry.register`.
    """
    registry = CodecRegistry()
    for name, make in STANDARD.items():
        try:
            registry.register(make())
        except ConfigError as exc:
            registry.note_unavailable(name, str(exc))
    for codec in others:
        registry.register(codec)
    return registry
