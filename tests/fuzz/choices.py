"""Choices made by octets: how a fuzzer drives what takes more than a string of octets."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """Somebody who decides."""

    def below(self, count: int) -> int:
        """Return an integer of 0 to ``count - 1``."""

    def pick(self, options: Sequence[T]) -> T:
        """Return one of some options."""

    def octets(self, limit: int) -> bytes:
        """Return at most so many octets."""

    @property
    def is_exhausted(self) -> bool:
        """Whether there is nothing left to decide with."""


class Octets:
    """Decides by octets, from the front; behind their end everything is 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_exhausted(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        """Take one octet."""
        taken = self._data[self._at : self._at + 1]
        self._at += 1
        return taken[0] if taken else 0

    def below(self, count: int) -> int:
        if count <= 256:
            return self.byte() % count
        return int.from_bytes(self.take(8), "big") % count

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def take(self, count: int) -> bytes:
        """Take ``count`` octets, or what is left of them."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def octets(self, limit: int) -> bytes:
        return self.take(self.below(limit + 1))

    def rest(self) -> bytes:
        """Take all that is left."""
        return self.take(max(0, len(self._data) - self._at))
