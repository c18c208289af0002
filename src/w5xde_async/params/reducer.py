"""The reducer: block sums in, the step's root out, in the order that the tree gives.

It holds one ``BlockSum`` for each block that is not yet merged: a vector from a pool, and what of the sum lies where
somebody else has written it. Which two to add comes from outside (``plan.tree.Frontier``); here they are added. A
bucket that no worker changed arrives as *nothing* and contributes nothing. Memory: at most (open blocks + 1) x
log2(leaves) vectors, plus the pool's spare ones.

The last addition of a gradient, that of the root's halves, is left to whoever takes the root: the sum is divided next,
and a bucket that has just been added is still in the cache.

Asked to (``begin``), it measures both halves of the root, for the gradient noise scale, and then adds them itself: each
piece costs three more passes over it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout

#: Squares are added up in float32 within so many elements, in float64 beyond: below torch's grain for threads, so the
#: bits do not depend on their number, and in the cache.
_PIECE = 1 << 14


#: One or two tensors: the sum of a bucket, or what it is the sum of, from the first leaf on.
Addends = tuple[Tensor, ...]


class Halves(NamedTuple):
    """Squared L2 norms of a step's gradient sum: of its left half, of its right half, of the whole."""

    left: float
    right: float
    whole: float


class Root(NamedTuple):
    """The sum of all leaves of a step: in ``vector``, but for gradients, of which ``addends`` has the sum.

    ``present``: per result bucket, whether anything is in it. ``addends``: what is to be added for it (``add_into``),
    to be read. ``halves``: squared norms of both halves, where they were to be measured.
    """

    vector: ResultVector
    present: list[bool]
    addends: list[Addends]
    halves: Halves | None


def add_into(into: Tensor, addends: Addends) -> Tensor:
    """The sum of ``addends``, which lies in ``into`` then: that may be one of them. Of none, nothing is done."""
    if len(addends) == 2:
        return torch.add(*addends, out=into)
    if addends and addends[0] is not into:
        into.copy_(addends[0])
    return into


class VectorPool:
    """Result vectors for reuse: a fresh one costs page faults. Keeps at most ``spare`` unused ones.

    ``take`` and ``give`` may be called from different threads.
    """

    def __init__(
        self, layout: Layout, *, spare: int = 4, make: Callable[[Layout], ResultVector] = ResultVector
    ) -> None:
        self.layout, self.spare, self._make = layout, spare, make
        self._free: list[ResultVector] = []
        self._lent: Sequence[ResultVector] = ()
        self._free_lent: list[ResultVector] = []
        self.num_out = 0

    def lend(self, vectors: Sequence[ResultVector]) -> None:
        """Take these before any other, until the next call. Each has its place here as its ``slot``.

        What was lent before and is still out is forgotten when it is given. While nobody takes.
        """
        self._lent, self._free_lent = vectors, list(reversed(vectors))

    def take(self) -> ResultVector:
        try:
            vector = self._free_lent.pop() if self._free_lent else self._free.pop()
        except IndexError:
            vector = self._make(self.layout)
        self.num_out += 1
        return vector

    def give(self, vector: ResultVector) -> None:
        self.num_out -= 1
        if vector.slot < 0:
            if len(self._free) < self.spare:
                self._free.append(vector)
        elif vector.slot < len(self._lent) and self._lent[vector.slot] is vector:
            self._free_lent.append(vector)


class BlockSum:
    """One block's sum, bucket by bucket: in ``vector``, or **borrowed**, in memory that is another's and is only read.

    What is borrowed stays mapped as long as it is here; that it stays as it is, its owner has to see to.
    """

    __slots__ = ("_borrowed", "vector")

    def __init__(self, vector: ResultVector) -> None:
        self.vector = vector
        self._borrowed: dict[int, Tensor] = {}

    def borrow(self, bucket: int, piece: Tensor) -> None:
        """The bucket lies in ``piece``, of the shape and dtype that it has in ``vector``."""
        self._borrowed[bucket] = piece

    def forget(self, bucket: int) -> Tensor | None:
        """The bucket lies in ``vector`` from now on, or is nothing. Where it was borrowed, that piece."""
        return self._borrowed.pop(bucket, None)

    def piece(self, bucket: int) -> Tensor:
        """Where the bucket lies. To be read."""
        borrowed = self._borrowed.get(bucket)
        return self.vector.buckets[bucket] if borrowed is None else borrowed


class Reducer:
    """Accumulators of one step. ``block(start)`` is where a block's buckets are received into, or borrowed."""

    def __init__(self, layout: Layout, pool: VectorPool, buckets: Collection[int] | None = None) -> None:
        """``buckets``: those that are added here (default: all result buckets)."""
        self.layout, self.pool = layout, pool
        self._num_buckets = len(layout.result_buckets) if buckets is None else len(buckets)
        self._sums: dict[int, BlockSum] = {}
        self._pieces: dict[int, int] = {}  # block -> buckets of its sum that are not merged
        self._present: set[tuple[int, int]] = set()  # (bucket, block) that hold something
        self._half, self._measures = 0, False  # first leaf of the root's right half; whether halves are to be measured
        self._squares: dict[int, Halves] = {}  # by bucket
        gradients = {group.index for group in layout.groups if group.role == "grad"}
        self._gradients = {bucket.index for bucket in layout.result_buckets if bucket.group in gradients}

    def begin(self, half: int, *, measure: bool = False) -> None:
        """The next step. ``half``: first leaf of the root's right half, 0 where it has none. ``measure``: both."""
        self._half, self._measures = half, measure

    def block(self, start: int) -> BlockSum:
        """The sum of the block that begins at ``start``; its vector is taken from the pool at first need."""
        known = self._sums.get(start)
        if known is None:
            known = self._sums[start] = BlockSum(self.pool.take())
            self._pieces[start] = self._num_buckets
        return known

    def put(self, bucket: int, start: int, *, present: bool) -> None:
        """Bucket ``bucket`` of the block at ``start`` is there (or is nothing, when not ``present``)."""
        self.block(start)
        if present:
            self._present.add((bucket, start))

    def leaves(self, bucket: int, right: int) -> bool:
        """Whether to add block ``right`` is left to whoever takes the root."""
        return not self._measures and self._is_last(bucket, right)

    def _is_last(self, bucket: int, right: int) -> bool:
        return right == self._half and bucket in self._gradients

    def merge(self, bucket: int, left: int, right: int) -> None:
        """Add block ``right`` to block ``left`` for one bucket; the right one's piece is then free."""
        if self.leaves(bucket, right):
            return
        measured = self._is_last(bucket, right)
        halves = (self._square(bucket, left), self._square(bucket, right)) if measured else None
        if (bucket, right) in self._present:
            self._present.discard((bucket, right))
            mine, theirs = self._sums[left], self._sums[right]
            own = mine.vector.buckets[bucket]
            if (bucket, left) in self._present:
                add = torch.maximum if own.dtype == torch.int64 else torch.add
                add(mine.piece(bucket), theirs.piece(bucket), out=own)
                mine.forget(bucket)
                theirs.forget(bucket)
            else:
                self._present.add((bucket, left))
                if (borrowed := theirs.forget(bucket)) is None:
                    own.copy_(theirs.vector.buckets[bucket])
                else:
                    mine.borrow(bucket, borrowed)
        if halves is not None:
            self._squares[bucket] = Halves(*halves, self._square(bucket, left))
        self._pieces[right] -= 1
        if not self._pieces[right]:
            del self._pieces[right]
            self.pool.give(self._sums.pop(right).vector)

    def root(self) -> Root:
        """The step's sum. Valid until ``clear``; its vector may be written."""
        root, halves, buckets = self._sums[0], {0, self._half}, range(len(self.layout.result_buckets))
        for bucket in buckets:
            if bucket not in self._gradients and (borrowed := root.forget(bucket)) is not None:
                root.vector.buckets[bucket].copy_(borrowed)
        addends = [
            tuple(self._sums[start].piece(bucket) for start in sorted(halves) if (bucket, start) in self._present)
            for bucket in buckets
        ]
        present = [bool(those) for those in addends]
        return Root(root.vector, present, addends, self._halves())

    def _halves(self) -> Halves | None:
        """What was measured of a complete step, added in bucket order; None where nothing was."""
        if not self._squares:
            return None
        rows = [self._squares[bucket] for bucket in sorted(self._squares)]
        return Halves(*(sum(column) for column in zip(*rows, strict=True)))

    def _square(self, bucket: int, start: int) -> float:
        if (bucket, start) not in self._present:
            return 0.0
        return _square(self._sums[start].piece(bucket))

    def clear(self) -> None:
        """Give every vector back; the next step begins."""
        for known in self._sums.values():
            self.pool.give(known.vector)
        self._sums.clear()
        self._pieces.clear()
        self._present.clear()
        self._squares.clear()


def _square(values: Tensor) -> float:
    pieces = [values[begin : begin + _PIECE] for begin in range(0, values.numel(), _PIECE)]
    norms: list[float] = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]).tolist()
    return sum(norm * norm for norm in norms)
