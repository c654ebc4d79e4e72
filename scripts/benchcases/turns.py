"""Measuring in turn, so that what the machine does beside it falls on all that is compared."""

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def say(text: str) -> None:
    """Tell whoever waits how far it is; results alone are printed on stdout."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def in_turn(what: str, times: int, *runs: Callable[[int], T]) -> list[list[T]]:
    """Do several runs one after the other, so many times, each second time in reverse order.

    Args:
        what: For whoever waits.
        times: How often.
        runs: Called with the number of the round, from 0.

    Returns:
        For each run what it found, by rounds: equal places were measured beside each other.
    """
    found: list[list[T]] = [[] for _ in runs]
    for index in range(times):
        say(f"{what}: {index + 1} of {times}")
        order = list(zip(runs, found, strict=True))
        for run, results in reversed(order) if index % 2 else order:
            results.append(run(index))
    return found
