"""What becomes of a model's buffers: changes that are finite, counters that have grown as far as they can have.

Means of floating buffers and maxima of integer ones come from workers as gradients do, but pass no gate: one NaN in a
running mean would stay for good, and so would one counter of 2^62. Every rule asks here. Values that are plausible are
written as they came, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from w5xde_async.params.flat import FlatState, ResultVector, isfinite, of_ordered, ordered
from w5xde_async.params.layout import Bucket, Layout

_UNCHANGED = torch.iinfo(torch.int64).min  # the maximum's neutral element
_COUNTER = "num_batches_tracked"
_CALLS = 1024  # of one layer, at most, for one sample


class BufferState:
    """The buffers of ``state``."""

    def __init__(self, layout: Layout, state: FlatState) -> None:
        self._state = state
        self.roles = {b.index: layout.groups[b.group].role for b in layout.result_buckets}
        self.buckets: list[Bucket] = [b for b in layout.result_buckets if self.roles[b.index] != "grad"]
        self._counters: dict[int, Tensor] = {}
        for bucket in self.buckets:
            entries = [layout.entries[index] for index in bucket.entries]
            at = [e.offset - bucket.offset for e in entries if e.name.rpartition(".")[2] == _COUNTER and e.numel == 1]
            if at and self.roles[bucket.index] == "max":
                self._counters[bucket.index] = torch.tensor(at)

    def implausible(self, vector: ResultVector, present: Sequence[bool], samples: int) -> str:
        """What is wrong with a result's buffers, "" where nothing is.

        Elements whose own value is not finite may hold anything: not every leaf has a finite value for them either.
        """
        for bucket in self.buckets:
            if not present[bucket.index]:
                continue
            piece = vector.buckets[bucket.index]
            if self.roles[bucket.index] == "max":
                if self._overgrown(bucket, piece, samples) is not None:
                    return "a counter of batches has grown by more than its samples allow"
            elif not bool((known := torch.isfinite(piece)).all()):
                if bool((isfinite(self._state.bucket(bucket)) & ~known).any()):
                    return "its buffers are not finite"
        return ""

    def write(self, bucket: Bucket, result: Tensor, samples: int) -> None:
        """Put a sum of changes, or a maximum, of so many samples into the state. ``result`` is used up."""
        mine = self._state.bucket(bucket)
        if self.roles[bucket.index] == "mean":
            mine.copy_(_moved(mine, result, samples))
            return
        over = self._overgrown(bucket, result, samples)
        if over is not None:
            result[over] = _UNCHANGED
        # Entries that no leaf changed hold the maximum's neutral element.
        mine.copy_(of_ordered(torch.where(result == _UNCHANGED, ordered(mine), result), mine.dtype))

    def differs(self, bucket: Bucket, value: Tensor) -> Tensor:
        """Where float32 values are not those of the state."""
        mine = self._state.bucket(bucket).float()
        return (value != mine) & ~(value.isnan() & mine.isnan())

    def means(self, known: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copies of the floating buckets, but for those that are ``known``."""
        floating = [bucket for bucket in self.buckets if self.roles[bucket.index] == "mean"]
        return {b.index: known[b.index] if b.index in known else self._state.bucket(b).clone() for b in floating}

    def changed(
        self, bucket: Bucket, result: Tensor, samples: int, begun: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values after a sum of changes of ``begun`` (None: of the state), and where there were any.

        Elsewhere they are the state's. float64 where the buffer is, else float32.
        """
        mine = self._state.bucket(bucket)
        value, moved = _after(mine if begun is None else begun, result, samples)
        return (value if begun is None else torch.where(moved, value, mine.to(value.dtype))), moved

    def approach(self, bucket: Bucket, value: Tensor, where: Tensor, part: float) -> None:
        """Go ``part`` of the way to ``value``, ``where`` that is set; other elements keep their bits."""
        mine = self._state.bucket(bucket)
        known = mine.to(value.dtype)
        value = torch.where(torch.isfinite(known), known.lerp(value, part), value) if part < 1.0 else value
        mine.copy_(torch.where(where & torch.isfinite(value), value.to(mine.dtype), mine))

    def _overgrown(self, bucket: Bucket, result: Tensor, samples: int) -> Tensor | None:
        """Where counters of batches have grown too far; None where none has."""
        at = self._counters.get(bucket.index)
        if at is None:
            return None
        over = result[at] > ordered(self._state.bucket(bucket)[at]) + _CALLS * max(samples, 1)
        return at[over] if bool(over.any()) else None


def mean_of(mean: Tensor, value: Tensor, part: float) -> Tensor:
    """A mean after one more value, which weighs ``part`` of it. Elements that are not finite do not count."""
    both = torch.where(torch.isfinite(value), mean.lerp(value, part), mean)
    return torch.where(torch.isfinite(mean), both, value)


def _moved(mine: Tensor, result: Tensor, samples: int) -> Tensor:
    """Values after a sum of changes. An element that nobody changed, or that would not be finite, keeps its bits."""
    value, moved = _after(mine, result, samples)
    value = value.to(mine.dtype)
    return torch.where(isfinite(value) & moved, value, mine)


def _after(begun: Tensor, result: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Values after a sum of changes, and where there are any: in float64, or float32 for smaller types.

    What a value that is not finite becomes is the mean of the leaves' own: see ``compute.buffers.change``.
    """
    wide = torch.float64 if begun.dtype == torch.float64 else torch.float32
    before, still = begun.to(wide), result == 0
    known = torch.isfinite(before)
    if not bool(known.all()):
        before = before.masked_fill(~known, 0.0)
        still = still & (known | result.signbit())  # a mean of 0.0 is a change, -0.0 is the sum of none
    value = before + result.to(wide).div_(samples)
    return torch.where(still, begun.to(wide), value), ~still
