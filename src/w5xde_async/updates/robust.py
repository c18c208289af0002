"""Averages of a buffer of results that a few of them cannot move far: median, trimmed mean, centred clipping.

For ``AsynchronousRule`` (K = ``rows``) or ``LocalStepsRule`` (rounds of up to ``rows`` Deltas), which have checked
every result for NaN and infinity: without that check none of these is robust. All of them ignore samples and staleness:
every result has one voice, or the bad ones would choose theirs. So with blocks of unequal size they are not the mean of
the samples even where all are honest. They help while fewer than half of the results are bad; honest
results that differ much from each other (local steps on unlike data) cost accuracy.

Holds: each sample is in one accepted result (G1), though a median's value comes of some of them. Same bits (G3): as
long as the same results are in the buffer, in whatever order, for median and trimmed mean; not for the others.
Memory: rows x 4 n bytes for n parameters, and 4 n more for what ``take`` gives.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from w5xde_async.updates.admission import restore_

__all__ = ["CenteredClipping", "CoordinateMedian", "TrimmedMean"]

# Elements of each row: in cache, and too few for torch to use other threads, whose barriers stall on a busy machine.
_CHUNK = 1 << 12


class _Buffered:
    """Keeps results as they come; subclasses make one vector of them."""

    name: str

    def __init__(self, numel: int, rows: int) -> None:
        if rows < 1:
            raise ValueError("a buffer has room for at least one result")
        self._rows = torch.zeros(rows, numel)
        self._result = torch.zeros(numel)
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        return self._count == len(self._rows)

    def add(self, vector: Tensor, *, samples: int, weight: float) -> None:
        if self._count == len(self._rows):
            raise ValueError(f"more than {self._count} results in one buffer")
        self._rows[self._count].copy_(vector)
        self._count += 1

    def take(self) -> Tensor:
        self._combine(self._rows[: self._count], self._result)
        self._count = 0
        return self._result

    def _combine(self, rows: Tensor, out: Tensor) -> None:
        """Fill ``out``; ``rows`` may be overwritten."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.name, "rows": self._rows[: self._count], "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["average"] != self.name:
            raise ValueError(f"the checkpoint has the average {state['average']!r}, not {self.name!r}")
        count = int(state["count"])
        restore_(self._rows[:count], state["rows"][:count], "the buffer")  # older checkpoints have the empty rows too
        self._count = count


class TrimmedMean(_Buffered):
    """Per coordinate, the mean without the b largest and b smallest values, b = floor(trim K).

    Yin et al. 2018, arXiv:1803.01498, definition 2. ``trim`` in [0, 1/2) is the part of bad results that it stands.
    """

    name = "trimmed_mean"

    def __init__(self, numel: int, rows: int, *, trim: float) -> None:
        if not 0 <= trim < 0.5:
            raise ValueError("trim lies in [0, 1/2)")
        super().__init__(numel, rows)
        self.trim = trim

    def _trimmed(self, count: int) -> int:
        return int(self.trim * count)

    def _combine(self, rows: Tensor, out: Tensor) -> None:
        cut = self._trimmed(len(rows))
        kept = slice(cut, len(rows) - cut)
        for piece, target in _chunks(rows, out):
            _sort_rows_(piece)
            torch.mean(piece[kept], dim=0, out=target)


class CoordinateMedian(TrimmedMean):
    """Per coordinate, the median; of an even number of results, the mean of the middle two.

    Yin et al. 2018, arXiv:1803.01498, definition 1. It is the trimmed mean that leaves one value, or two.
    """

    name = "median"

    def __init__(self, numel: int, rows: int) -> None:
        super().__init__(numel, rows, trim=0.0)

    def _trimmed(self, count: int) -> int:
        return (count - 1) // 2


class CenteredClipping(_Buffered):
    """v <- v + 1/K sum((x_i - v) min(1, radius / |x_i - v|)), ``iterations`` times, from the last average.

    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", arXiv:2012.10333. From v = 0 at
    first. ``radius`` None takes the median of the |x_i - v| each time, so that no number must be guessed. The last
    average is state: 4 n bytes more.
    """

    name = "centered_clipping"

    def __init__(self, numel: int, rows: int, *, radius: float | None = None, iterations: int = 3) -> None:
        if iterations < 1 or (radius is not None and not radius > 0):
            raise ValueError("iterations is at least 1 and radius above 0")
        super().__init__(numel, rows)
        self.radius, self.iterations = radius, iterations
        self._center = torch.zeros(numel)

    def _combine(self, rows: Tensor, out: Tensor) -> None:
        center = self._center
        for _ in range(self.iterations):
            distances = [float(torch.linalg.vector_norm(torch.sub(row, center, out=out))) for row in rows]
            radius = statistics.median(distances) if self.radius is None else self.radius
            factors = [min(1.0, radius / distance) if distance > 0 else 1.0 for distance in distances]
            # sum f_i (x_i - v) = sum f_i x_i - v sum f_i, so one pass a row is enough.
            center.mul_(1.0 - sum(factors) / len(rows))
            for row, factor in zip(rows, factors, strict=True):
                center.add_(row, alpha=factor / len(rows))
        out.copy_(center)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "center": self._center}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        restore_(self._center, state["center"], "the last average")


def _chunks(rows: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, out.numel(), _CHUNK):
        yield rows[:, start : start + _CHUNK], out[start : start + _CHUNK]


def _sort_rows_(rows: Tensor) -> None:
    """Sort every column in place by odd-even transposition of whole rows.

    For the few rows of a buffer that beats ``torch.sort`` along the first dimension, which sorts column by column.
    """
    lower = torch.empty_like(rows[0])
    for turn in range(len(rows)):
        for index in range(turn & 1, len(rows) - 1, 2):
            first, second = rows[index], rows[index + 1]
            torch.minimum(first, second, out=lower)
            torch.maximum(first, second, out=second)
            first.copy_(lower)
