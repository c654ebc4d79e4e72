"""Layers becoming ready, side by side, as they do: a live table on a terminal, lines elsewhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

#: Digits that a column of layers is wrapped at.
_ROW = 40
_MARKS = {"verified": "▒", "attested": "█"}


@dataclass
class Column:
    """What one consumer has."""

    name: str
    layers: dict[int, str] = field(default_factory=dict)
    """Trust of each layer that is ready."""

    started_at: float | None = None
    first_s: float | None = None
    last_s: float | None = None


class Board:
    """Shows columns until the block ends; prints a line per layer where nobody watches.

    Args:
        title: Above the table.
        layers: How many each column will have.
        columns: Whose they are.
        live: False shows nothing at all.
    """

    def __init__(self, *, title: str, layers: int, columns: Sequence[Column], live: bool) -> None:
        self.columns = tuple(columns)
        self._title = title
        self._layers = layers
        self._console = Console(stderr=True)
        self._shown = live
        self._live = (
            Live(self._table(), console=self._console, refresh_per_second=12)
            if live and self._console.is_terminal
            else None
        )

    def __enter__(self) -> "Board":
        if self._live is not None:
            self._live.start()
        elif self._shown:
            self._console.print(self._title, highlight=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def started(self, index: int) -> None:
        """A consumer begins."""
        self.columns[index].started_at = time.monotonic()
        self._changed(f"{self.columns[index].name}: begins")

    def ready(self, index: int, layer: int, trust: str) -> None:
        """A layer of a consumer is ready."""
        column = self.columns[index]
        column.layers[layer] = trust
        seconds = time.monotonic() - (column.started_at or time.monotonic())
        column.first_s = seconds if column.first_s is None else column.first_s
        column.last_s = seconds
        self._changed(
            f"{column.name}: layer {layer} {trust} after {seconds:.2f} s "
            f"({len(column.layers)} of {self._layers})"
        )

    def _changed(self, line: str) -> None:
        if self._live is not None:
            self._live.update(self._table())
        elif self._shown:
            self._console.print(line, highlight=False)

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left", expand=False)
        table.add_column("consumer")
        table.add_column("layers ready", min_width=min(self._layers, _ROW))
        table.add_column("of", justify="right")
        table.add_column("first", justify="right")
        table.add_column("last", justify="right")
        for column in self.columns:
            table.add_row(
                column.name,
                self._bar(column),
                f"{len(column.layers)}/{self._layers}",
                _seconds(column.first_s),
                _seconds(column.last_s),
            )
        return table

    def _bar(self, column: Column) -> str:
        marks = [_MARKS.get(column.layers.get(n, ""), "·") for n in range(self._layers)]
        rows = ["".join(marks[at : at + _ROW]) for at in range(0, self._layers, _ROW)]
        return "\n".join(rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
