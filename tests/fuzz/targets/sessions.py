"""Targets of :mod:`moqt.session`: conversations that go wrong, see :mod:`tests.fuzz.twisted`."""

import random
from collections.abc import Iterable

from tests.fuzz.target import Target
from tests.fuzz.twisted import play


def seeds() -> Iterable[bytes]:
    yield b""
    for seed in range(12):
        yield random.Random(seed).randbytes(120)


TARGETS = (Target(name="conversation", run=play, seeds=seeds, max_octets=400),)
