"""The reducer: block sums in, the step's root out, in the order that the tree gives.

It holds one ``ResultVector`` for each block that is not yet merged, taken from a pool. Which two to add comes from
outside (``plan.tree.Frontier``); here they are added. A bucket that no worker changed arrives as *nothing* and
contributes nothing. Memory: at most (open blocks + 1) x log2(leaves) vectors, plus the pool's spare ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout

__all__ = ["Reducer", "VectorPool"]


class VectorPool:
    """Result vectors for reuse: a fresh one costs page faults. Keeps at most ``spare`` unused ones.

    ``take`` and ``give`` may be called from different threads.
    """

    def __init__(
        self, layout: Layout, *, spare: int = 4, make: Callable[[Layout], ResultVector] = ResultVector
    ) -> None:
        self.layout, self.spare, self._make = layout, spare, make
        self._free: list[ResultVector] = []
        self.num_out = 0

    def take(self) -> ResultVector:
        self.num_out += 1
        try:
            return self._free.pop()
        except IndexError:
            return self._make(self.layout)

    def give(self, vector: ResultVector) -> None:
        self.num_out -= 1
        if len(self._free) < self.spare:
            self._free.append(vector)


class Reducer:
    """Accumulators of one step. ``vector(start)`` lends the memory that a block's buckets are received into."""

    def __init__(self, layout: Layout, pool: VectorPool) -> None:
        self.layout, self.pool = layout, pool
        self._vectors: dict[int, ResultVector] = {}
        self._pieces: dict[int, int] = {}  # block -> buckets that still lie in its vector
        self._present: set[tuple[int, int]] = set()  # (bucket, block) that hold something

    def vector(self, start: int) -> ResultVector:
        """The vector of the block that begins at ``start``, taken from the pool at first need."""
        vector = self._vectors.get(start)
        if vector is None:
            vector = self._vectors[start] = self.pool.take()
            self._pieces[start] = len(self.layout.result_buckets)
        return vector

    def put(self, bucket: int, start: int, *, present: bool) -> None:
        """Bucket ``bucket`` of the block at ``start`` lies in its vector (or is nothing, when not ``present``)."""
        self.vector(start)
        if present:
            self._present.add((bucket, start))

    def merge(self, bucket: int, left: int, right: int) -> None:
        """Add block ``right`` to block ``left`` for one bucket; the right one's piece is then free."""
        if (bucket, right) in self._present:
            self._present.discard((bucket, right))
            theirs = self._vectors[right].buckets[bucket]
            mine = self._vectors[left].buckets[bucket]
            if (bucket, left) not in self._present:
                mine.copy_(theirs)
                self._present.add((bucket, left))
            elif mine.dtype == torch.int64:
                torch.maximum(mine, theirs, out=mine)
            else:
                mine.add_(theirs)
        self._pieces[right] -= 1
        if not self._pieces[right]:
            del self._pieces[right]
            self.pool.give(self._vectors.pop(right))

    def root(self) -> tuple[ResultVector, list[bool]]:
        """The step's sum and, per result bucket, whether anything is in it. Valid until ``clear``."""
        return self._vectors[0], [(bucket.index, 0) in self._present for bucket in self.layout.result_buckets]

    def clear(self) -> None:
        """Give every vector back; the next step begins."""
        for vector in self._vectors.values():
            self.pool.give(vector)
        self._vectors.clear()
        self._pieces.clear()
        self._present.clear()
