"""Which layers of very many segments are asked for first. Pure.

Tracks of a bounded number of segments are asked for at a time, since peers grant some hundred
requests at once. Within them earlier layers come first; behind them a layer would wait for all
layers of the segments before. So of more segments than that an eighth of the layers is fetched of
every one, then what is left of a half, then the rest: three requests for each track where it was
one. What is still being published is subscribed to, layer after layer, and is in no wave.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvcs.consumer.events import Gap

#: Of the wanted layers each wave asks for the first eighth, half, whole.
_PARTS = (8, 2, 1)
#: The wave that asks for everything.
LAST = len(_PARTS) - 1


def first_wave(segments: int, at_once: int) -> int:
    """Return the wave to begin with: the last one where all segments are asked for at a time.

    Args:
        segments: Segments of which something is to be fetched.
        at_once: Segments that are asked for at a time.
    """
    return 0 if segments > at_once else LAST


def stop_of(layers: range, wave: int) -> int:
    """Return the layer before which a wave ends.

    Args:
        layers: Those that are wanted.
        wave: From 0 to :data:`LAST`.
    """
    return layers.start + -(-len(layers) // _PARTS[wave])


def clipped(gaps: Iterable[Gap], stop: int) -> Iterator[Gap]:
    """Yield what of the gaps lies before a layer."""
    for gap in gaps:
        if gap.first_layer < stop:
            yield gap if gap.last_layer < stop else replace(gap, last_layer=stop - 1)
