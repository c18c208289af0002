"""Data parallel over islands: several copies of a divided model, each with leaves of its own.

A copy is a row of ranks with an engine of any kind whose ranks all work on the same leaves (a pipeline, tensor
parallel). Each row sums a block of the tree (``Share.BLOCK``). Then ranks with the same place in their rows exchange
what they have of the sums, and each adds its part in the tree's order: the bits are those of one row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.parallel.data_parallel import summed
from w5xde_async.parallel.engine import EmitPieces, IslandEngine, LoneLeafError
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.report import Report, exchange, outcome_of, raise_failure
from w5xde_async.parallel.shard_memory import ShardMemory, ShardPool
from w5xde_async.params.layout import Bucket
from w5xde_async.params.shard import Run, Shard
from w5xde_async.plan.shares import Share, leaves_of
from w5xde_async.plan.tree import Block

_GRAIN = 64  # elements: parts are cut at multiples of so many


class ReplicatedEngine:
    """One rank's :class:`IslandEngine` around its row's, which is its to close."""

    share = Share.BLOCK

    def __init__(self, inner: IslandEngine, group: Group, across: Group) -> None:
        """``group``: all ranks. ``across``: those with this rank's place in their rows."""
        self.layout, self.device, self.numerics = inner.layout, inner.device, inner.numerics
        self.together = group.size // across.size
        self._inner, self._group, self._across = inner, group, across
        self.shard = Shard.of(
            self.layout, [part for bucket in self.layout.buckets for part in self._parts_of(bucket)[across.rank]]
        )
        self._pool = ShardPool(self.shard, pinned=self.device.type == "cuda")
        self.release = self._pool.release

    def incoming(self, bucket: int) -> list[memoryview]:
        """Memory for this rank's pieces of a bucket, within the row's engine."""
        told = self.layout.buckets[bucket]
        width = self.layout.groups[told.group].dtype.itemsize
        whole = self._inner.shard.pieces(told)
        own = self._parts_of(told)[self._across.rank]
        return [
            memory[(part.begin - run.begin) * width : (part.end - run.begin) * width]
            for memory, run, part in zip(self._inner.incoming(bucket), whole, own, strict=True)
            if part.begin < part.end
        ]

    def load(self, buckets: Iterable[int]) -> None:
        """Make the row's pieces whole of what its neighbours in other rows have received."""
        buckets = sorted(buckets)
        for number in buckets:
            bucket = self.layout.buckets[number]
            width = self.layout.groups[bucket.group].dtype.itemsize
            parts = self._parts_of(bucket)
            for place, memory in enumerate(self._inner.incoming(number)):
                flat = torch.frombuffer(memory, dtype=torch.uint8)
                sizes = [width * (of_rank[place].end - of_rank[place].begin) for of_rank in parts]
                at = sum(sizes[: self._across.rank])
                mine = flat[at : at + sizes[self._across.rank]].to(self.device)
                gathered = torch.empty(flat.numel(), dtype=torch.uint8, device=self.device)
                size = self._across.size
                self._across.all_to_all(gathered, mine.repeat(size), sizes, [mine.numel()] * size)
                flat.copy_(gathered)
        self._inner.load(buckets)

    def compute(self, task: Task, emit: EmitPieces) -> ComputedBlock:
        """Compute one block together. Raises LeafError, on every rank."""
        began = time.perf_counter()
        block = Block(task.start, task.start + len(task.samples))
        parts = leaves_of(block, Share.BLOCK, self._across.size)
        mine = parts[self._across.rank]
        sums: dict[int, Sequence[Tensor]] = {}
        outcome: ComputedBlock | None = None
        failure: LeafError | None = None
        spent: Sequence[Any] = ()
        try:
            if mine:
                samples = task.samples[mine[0] - block.start :][: len(mine)]
                outcome = self._inner.compute(replace(task, start=mine[0], samples=samples), sums.__setitem__)
                spent = outcome.vectors
        except LoneLeafError:
            raise
        except LeafError as error:
            failure, spent = error, error.vectors
        memory = self._pool.take()
        bits = [int(bucket.index in sums) for bucket in self.layout.result_buckets]
        told = self._across.numbers([int(failure is not None), *bits])
        if not any(row[0] for row in told):
            for number, bucket in enumerate(self.layout.result_buckets):
                states = [bool(row[1 + number]) for row in told]
                if any(states):
                    self._sum(bucket, sums.get(bucket.index), states, block, parts, memory)
                    if memory.pieces[bucket.index]:
                        emit(bucket.index, memory.pieces[bucket.index])
        self._inner.release(spent)
        report = Report() if outcome is None else Report.of(mine if outcome.losses else (), outcome)
        if failure is not None:
            report = Report.of_failure(failure)
        reports = exchange(self._group, report)
        raise_failure(reports, failure, (memory,))
        return outcome_of(reports, rank=self._group.rank, compute_s=time.perf_counter() - began, vectors=(memory,))

    def close(self) -> None:
        """Close the row's engine, too."""
        self._inner.close()

    @torch.no_grad()
    def _sum(
        self, bucket: Bucket, given: Sequence[Tensor] | None, states: Sequence[bool], block: Block,
        parts: Sequence[Sequence[int]], memory: ShardMemory,
    ) -> None:  # fmt: skip
        """One bucket's sums of the rows, of which ``states`` says who has any."""
        pieces, of_ranks = self._inner.shard.pieces(bucket), self._parts_of(bucket)
        dtype = self.layout.groups[bucket.group].result_dtype
        own = sum(part.end - part.begin for part in of_ranks[self._across.rank])
        sent, flat = [0] * self._across.size, list[Tensor]()
        if given is not None:
            sent = [sum(part.end - part.begin for part in of_rank) for of_rank in of_ranks]
            flat = [
                tensor[part.begin - run.begin : part.end - run.begin]
                for of_rank in of_ranks
                for tensor, run, part in zip(given, pieces, of_rank, strict=True)
            ]
        received = [own if state else 0 for state in states]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
        output = torch.empty(sum(received), dtype=dtype, device=self.device)
        self._across.all_to_all(output, packed.to(self.device), received, sent)
        if not own:
            return
        of_rows = iter(torch.split(output, own))
        total = summed(block, parts, (next(of_rows) if state else None for state in states))
        at = 0
        for held in memory.pieces[bucket.index]:
            held.copy_(total[at : at + held.numel()])
            at += held.numel()

    def _parts_of(self, bucket: Bucket) -> list[list[Run]]:
        """For each row, what of each of this place's pieces of a bucket is its rank's; all of them, empty ones too."""
        size = self._across.size
        found: list[list[Run]] = [[] for _ in range(size)]
        for group, begin, end in self._inner.shard.pieces(bucket):
            each = (end - begin) // (_GRAIN * size) * _GRAIN
            for rank in range(size):
                stop = end if rank == size - 1 else begin + (rank + 1) * each
                found[rank].append(Run(group, begin + rank * each, stop))
        return found
