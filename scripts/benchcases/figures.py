"""Results, targets, and the little arithmetic between them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Point = tuple[float, float]


class Untold(Exception):
    """What a case is measured with, or held against, cannot be had here. The message says why."""


@dataclass(frozen=True)
class Target:
    """A bound on one of a case's ratios, or on one of its figures."""

    name: str
    at_least: float | None = None
    at_most: float | None = None

    def to_json(self) -> dict[str, float]:
        bounds = {"at_least": self.at_least, "at_most": self.at_most}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def is_met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def __str__(self) -> str:
        bounds = (f"{name.replace('_', ' ')} {bound:g}" for name, bound in self.to_json().items())
        return f"{self.name} {' and '.join(bounds)}"


@dataclass
class Result:
    """What one case found."""

    case: str
    figures: dict[str, Any]
    ratios: dict[str, float | None] = field(default_factory=dict)
    targets: Sequence[Target] = ()
    reason: str | None = None
    """Why a ratio could not be had."""

    @property
    def met(self) -> bool | None:
        """Whether all targets are met; None if that cannot be told."""
        found = self.figures | self.ratios
        values = [found.get(target.name) for target in self.targets]
        verdicts = [
            target.is_met(value)
            for target, value in zip(self.targets, values, strict=True)
            if value is not None
        ]
        if not all(verdicts):
            return False
        return True if verdicts and len(verdicts) == len(values) else None

    def to_json(self) -> str:
        line: dict[str, Any] = {
            "case": self.case,
            "figures": self.figures,
            "ratios": self.ratios,
            "target": {target.name: target.to_json() for target in self.targets},
            "met": self.met,
        }
        if self.reason is not None:
            line["reason"] = self.reason
        return json.dumps(line)


def megabytes(octets: float) -> float:
    """10**6 octets, as goodput is counted in."""
    return round(octets / 1e6, 1)


def mebibytes(octets: float) -> float:
    """2**20 octets, as memory is counted in."""
    return round(octets / (1 << 20), 2)


def slope(points: Sequence[Point]) -> float:
    """The rise of the line of least squares through points of an abscissa and an ordinate."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def settled(points: Sequence[Point], warm_up: float = 0.2) -> Sequence[Point]:
    """Leave out the first part of a run, in which caches and allocators fill."""
    return points[max(1, int(len(points) * warm_up)) :] if len(points) > 2 else points


def rise(points: Sequence[Point]) -> list[float]:
    """The first ordinate and the last."""
    return [round(points[0][1], 2), round(points[-1][1], 2)]


def first_layer_s(run: Mapping[str, Any]) -> float:
    """Seconds from connecting to the first layer ready, of what a consumer found."""
    return float(run["ready_at"][0] - run["began"])


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def quotients(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], name: str
) -> list[float]:
    """Divide each run by the one that was measured beside it."""
    pairs = zip(column(ours, name), column(theirs, name), strict=True)
    return [one / other for one, other in pairs]


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """The least and the largest: how far runs lie apart."""
    return [round(min(values), digits), round(max(values), digits)]


def quarters(marks: Sequence[Point]) -> list[float]:
    """How much came in a second, in each quarter of what came.

    Args:
        marks: How much had come, and when, in seconds; the first mark is that of the beginning.
    """
    (first, _), (last, _) = marks[0], marks[-1]
    ends = [
        next(mark for mark in marks if mark[0] >= first + (last - first) * quarter / 4)
        for quarter in range(5)
    ]
    return [(after[0] - before[0]) / (after[1] - before[1]) for before, after in pairwise(ends)]
