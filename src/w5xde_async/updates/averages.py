"""Ways to make one vector of several results: the weighted mean, the radial-directional average, the median.

An average is filled with ``add`` and emptied with ``take``; between the two it is the only place where accepted results
lie, so its state_dict belongs into every checkpoint (G1 holds over a restart only then). Float sums depend on the order
of arrival: the bits of a run are not reproducible (no G3), unless the caller adds in a fixed order. The rules have
checked every vector for NaN and infinity before it comes here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from w5xde_async.updates.admission import restore_

# Elements of each row: in cache, and too few for torch to use other threads, whose barriers stall on a busy machine.
_CHUNK = 1 << 12
_LARGEST = torch.finfo(torch.float32).max
_NOISE = 1e-6  # of the weight: sums of float32 that should be zero are about so far from it


class Average(Protocol):
    """What the rules need. ``name`` stands in checkpoints."""

    name: str

    @property
    def count(self) -> int:
        """Results since the last ``take``."""

    @property
    def full(self) -> bool:
        """Whether there is room for no more of them: ``take`` is to follow."""

    def add(self, vector: Tensor, *, samples: int, weight: float) -> None:
        """Count one result: a mean over ``samples``, with a staleness ``weight``. ``vector`` is read, not kept."""

    def take(self) -> Tensor:
        """The average, the caller's until the next ``add``, and begin anew. Needs at least one result."""

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, numbers and tensors (which share memory with this)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Raises ValueError where it belongs to another average."""


def _check_name(name: str, state: Mapping[str, Any]) -> None:
    if state["average"] != name:
        raise ValueError(f"the checkpoint has the average {state['average']!r}, not {name!r}")


class WeightedMean:
    """sum(w_i n_i x_i) / sum(n_i): staleness weights w shrink the whole, they do not only shift it.

    So FedBuff's (arXiv:2106.06639, algorithm 1), which divides by K, not by the sum of the weights. The mean of one
    fresh result has that result's bits, and of results of equal n the bits of adding and dividing by their number:
    weights are relative to the first result's n. Memory: one vector (4 n bytes for n parameters), whatever the count.
    """

    name = "mean"

    def __init__(self, numel: int) -> None:
        self._sum = torch.zeros(numel)
        self._unit = self._samples = self.count = 0

    full = False

    def add(self, vector: Tensor, *, samples: int, weight: float) -> None:
        if not self.count:
            self._unit, self._samples = samples, 0
            torch.mul(vector, weight, out=self._sum)
        else:
            self._sum.add_(vector, alpha=weight * samples / self._unit)
        self._samples += samples
        self.count += 1

    def take(self) -> Tensor:
        self.count = 0
        return self._sum.div_(self._samples / self._unit)

    def state_dict(self) -> dict[str, Any]:
        return {
            "average": self.name, "sum": self._sum, "unit": self._unit, "samples": self._samples, "count": self.count,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another average."""
        _check_name(self.name, state)
        restore_(self._sum, state["sum"], "the sum")
        self._unit, self._samples, self.count = int(state["unit"]), int(state["samples"]), int(state["count"])


class RadialDirectionalAverage:
    """Per tensor, the mean length times the mean direction: (sum w|x| / sum w) * phi(sum w phi(x) / sum w).

    phi(x) = x / |x|. The plain mean of M near-orthogonal pseudo-gradients is about M^-1/2 as long as each of them; this
    keeps their length. w = n times the staleness weight, which here only shifts weight between results. A tensor whose
    directions cancel gives zero. ``tensors`` are [start, stop) element ranges of the flat vector, one per tensor; what
    lies between them (padding) stays zero. Memory: one vector (4 n bytes) and two numbers per tensor.
    """

    name = "radial"

    def __init__(self, numel: int, tensors: Sequence[tuple[int, int]]) -> None:
        """Raises ValueError where a tensor's range lies outside the vector."""
        self._tensors = tuple(tensors)
        if not all(0 <= start < stop <= numel for start, stop in self._tensors):
            raise ValueError("a tensor's range lies outside the vector")
        self._directions = torch.zeros(numel)
        self._lengths = torch.zeros(len(self._tensors), dtype=torch.float64)
        self._weight = 0.0
        self.count = 0

    full = False

    def add(self, vector: Tensor, *, samples: int, weight: float) -> None:
        if not self.count:
            self._directions.zero_()
            self._lengths.zero_()
            self._weight = 0.0
        weight *= samples
        self._weight += weight
        self.count += 1
        for index, (start, stop) in enumerate(self._tensors):
            piece = vector[start:stop]
            length = float(torch.linalg.vector_norm(piece))
            # Of what is nearly nothing (a closed gate's gradient) float32 has no direction, as it has none of zeros.
            if weight < length * _LARGEST:
                self._directions[start:stop].add_(piece, alpha=weight / length)
                self._lengths[index] += weight * length

    def take(self) -> Tensor:
        self.count = 0
        for index, (start, stop) in enumerate(self._tensors):
            piece = self._directions[start:stop]
            length = float(torch.linalg.vector_norm(piece))
            # What is left of directions that cancel is the noise of rounding, and no direction.
            if length > _NOISE * self._weight:
                piece.mul_(float(self._lengths[index]) / self._weight / length)
            else:
                piece.zero_()
        return self._directions

    def state_dict(self) -> dict[str, Any]:
        return {
            "average": self.name, "directions": self._directions, "lengths": self._lengths, "weight": self._weight,
            "count": self.count,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another average."""
        _check_name(self.name, state)
        restore_(self._directions, state["directions"], "the sum of directions")
        restore_(self._lengths, state["lengths"], "the sum of lengths")
        self._weight, self.count = float(state["weight"]), int(state["count"])


class CoordinateMedian:
    """Per coordinate, the median; of an even number of results, the mean of the middle two.

    Yin et al. 2018, arXiv:1803.01498, definition 1. It helps while fewer than half of the results are bad, if every
    result was checked for NaN and infinity. Samples and staleness are ignored: every result has one voice, or the bad
    ones would choose theirs. So with blocks of unequal size it is not the mean of the samples even where all are
    honest, and honest results that differ much from each other (local steps on unlike data) cost accuracy. The same
    results in whatever order give the same bits. Memory: rows x 4 n bytes for n parameters, and 4 n more for ``take``.
    """

    name = "median"

    def __init__(self, numel: int, rows: int) -> None:
        """``rows``: most results that it has room for, at least 1. Raises ValueError for less."""
        if rows < 1:
            raise ValueError("a buffer has room for at least one result")
        self._room, self._rows = rows, torch.zeros(rows, numel)
        self._result = torch.zeros(numel)
        self.count = 0

    @property
    def full(self) -> bool:
        return self.count >= self._room

    def add(self, vector: Tensor, *, samples: int, weight: float) -> None:
        """Raises ValueError where there is no room for another result."""
        if self.full:
            raise ValueError(f"more than {self.count} results in one buffer")
        self._rows[self.count].copy_(vector)
        self.count += 1

    def take(self) -> Tensor:
        rows, self.count = self._rows[: self.count], 0
        middle = slice((len(rows) - 1) // 2, len(rows) // 2 + 1)
        for start in range(0, len(self._result), _CHUNK):
            piece = rows[:, start : start + _CHUNK]
            _sort_rows_(piece)
            torch.mean(piece[middle], dim=0, out=self._result[start : start + _CHUNK])
        return self._result

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.name, "rows": self._rows[: self.count], "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another average."""
        _check_name(self.name, state)
        count = len(state["rows"])
        if count > len(self._rows):  # there was room for more
            self._rows = torch.zeros(count, len(self._result))
        restore_(self._rows[:count], state["rows"], "the buffer")
        self.count = count


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
