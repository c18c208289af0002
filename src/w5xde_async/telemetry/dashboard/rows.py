"""A table of measurements that never grows beyond its capacity, whatever the length of the run.

When it is full, neighbours are merged two by two and from then on twice as many rows make one: the whole run stays
visible, evenly, and the newest rows are there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Literal

Row = tuple[float | None, ...]
Merge = Literal["last", "mean", "low", "high"]


_MERGES: dict[Merge, Callable[[Sequence[float]], float]] = {
    "last": itemgetter(-1),
    "mean": fmean,
    "low": min,
    "high": max,
}


class Rows:
    """``columns`` says how each column is merged; None in a cell is no value."""

    def __init__(self, columns: Sequence[Merge], *, capacity: int) -> None:
        """Raises ValueError where ``capacity`` is odd or less than 2."""
        if capacity < 2 or capacity % 2:
            raise ValueError("capacity is even and at least 2")
        self._columns, self._capacity = tuple(columns), capacity
        self._full: list[Row] = []
        self._open: list[Row] = []  # fewer than ``stride``: the beginning of the next row
        self.stride = 1  #: so many appended rows make one

    def append(self, row: Row) -> None:
        """Add a row at the end. Raises ValueError where it has another number of cells."""
        if len(row) != len(self._columns):
            raise ValueError(f"a row has {len(self._columns)} cells, not {len(row)}")
        self._open.append(row)
        if len(self._open) < self.stride:
            return
        self._full.append(self._merged(self._open))
        self._open = []
        if len(self._full) == self._capacity:
            self._full = [self._merged(self._full[at : at + 2]) for at in range(0, self._capacity, 2)]
            self.stride *= 2

    def rows(self) -> list[Row]:
        """At most ``capacity`` rows, the oldest first, the unfinished one last."""
        return [*self._full, self._merged(self._open)] if self._open else list(self._full)

    def _merged(self, rows: Sequence[Row]) -> Row:
        if len(rows) == 1:
            return rows[0]
        merged: list[float | None] = []
        for merge, column in zip(self._columns, zip(*rows, strict=True), strict=True):
            values = [value for value in column if value is not None]
            merged.append(_MERGES[merge](values) if values else None)
        return tuple(merged)
