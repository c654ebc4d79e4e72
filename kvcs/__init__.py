"""KV caches of language models, streamed layer by layer over MOQT.

The profile itself is in :mod:`kvcs.kvsp` and :mod:`kvcs.profile`, as values; :mod:`kvcs.producer`
and :mod:`kvcs.consumer` put it on the wire. Nothing is imported here, so that a program loads
only what it uses.
"""

from moqt import __version__

__all__ = ["__version__"]
