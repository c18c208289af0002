"""What an island computes with: one model, or a part of it, on each of a group's ranks.

The ranks of an island call the same methods in the same order (whoever drives them sees to that), and a call may
exchange tensors among them. Each holds one ``Shard`` of the layout: its parameters come to it alone, and of a block's
sum it gives out only that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.compute.program.form import Program
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.plan.shares import Share

EmitPieces = Callable[[int, Sequence[Tensor]], None]
"""Called with a bucket's number and, for each of ``shard.pieces`` of it, its final sum: one-dimensional contiguous
tensors in host memory, float32 (int64 for role ``max``). Any thread."""


class Traced(NamedTuple):
    """A checked program, in place of a job. Its results may take ``memory_bytes`` of a rank."""

    program: Program
    layout: Layout
    memory_bytes: int


class LoneLeafError(LeafError):
    """A leaf failed on this rank before it could know what the others do next: the island cannot go on."""

    @classmethod
    def alone(cls, failure: LeafError) -> LeafError:
        """Of a failure that the other ranks do not share."""
        return cls.told(failure.leaf, failure.error, failure.traceback, ())


class IslandEngine(Protocol):
    """One rank of an island. All methods but ``release`` run on one compute thread.

    The sum of a block has the bits of every engine of the same ``numerics``: where they are EXACT, of one process that
    computes every leaf.
    """

    layout: Layout
    """Of the whole model."""
    shard: Shard
    device: torch.device
    share: Share
    together: int
    """Which leaves of a block it needs the data of (``plan.shares.leaves_of``)."""
    numerics: str
    """How its sums are made (``plan.numerics``); at most 256 characters."""

    def incoming(self, bucket: int) -> list[memoryview]:
        """Host memory for ``shard.pieces`` of a bucket of parameters, in order; it is read by the next ``load``."""

    def load(self, buckets: Iterable[int]) -> None:
        """All pieces of these buckets have come, on every rank: compute with them from now on."""

    def compute(self, task: Task, emit: EmitPieces) -> ComputedBlock:
        """Compute one block together.

        ``task`` has the whole block's ``start`` and ``samples``; its tensors are those of the leaves that ``share``
        gives this rank, in order. ``emit`` is called once for each result bucket that has changed and of which this
        rank holds anything. On rank 0 the outcome has the losses and metrics of all leaves in order, and what no leaf
        of the block touched; on the others ``losses`` and ``metrics`` are empty. ``absent`` and ``untouched`` are equal
        on all ranks. What ``emit`` was given stays unchanged until ``release`` of the outcome's ``vectors``.

        Raises LeafError. After one, no rank of the island can go on, unless it was raised on all of them.
        """

    def release(self, vectors: Sequence[Any]) -> None:
        """A block's pieces have been sent. Any thread."""

    def close(self) -> None:
        """Free threads, hooks and memory. The group is its owner's."""
