"""Data parallel islands: the whole model on every rank, each with leaves of its own.

Each rank's engine sums a block of the tree (``Share.BLOCK``). Then every rank gets its shard of each rank's sum and
adds them in the tree's order, so the result has the bits of one process, and leaves the island in shards: each value is
exchanged once and sent once. Parameters come in shards too, and an all-gather makes them whole in place.

On the CPU a thread exchanges buckets while backward goes on, in an order that all ranks know; who has nothing of a
bucket says so before, and nothing is sent for it. Beside the engine's memory it takes one bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.compute.program.sandbox import Computing
from w5xde_async.parallel.engine import EmitPieces
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.report import Report, exchange, outcome_of, raise_failure
from w5xde_async.parallel.shard_memory import ShardMemory, ShardPool
from w5xde_async.params.flat import ResultVector, add, bytes_of
from w5xde_async.params.layout import Bucket, Layout
from w5xde_async.params.shard import Shard
from w5xde_async.plan.numerics import EXACT
from w5xde_async.plan.shares import Share, leaves_of
from w5xde_async.plan.tree import Block, Frontier

_ELEMENTS = 64  # shards are cut at multiples of so many: of 64 bytes at least, in every dtype
_NOTHING, _SUM, _FAILED = range(3)  # what a rank has of a bucket


class DataParallelEngine:
    """One rank's :class:`IslandEngine` around an engine, which is its to close."""

    share, together, numerics = Share.BLOCK, 1, EXACT

    def __init__(self, engine: Computing, group: Group) -> None:
        self.layout, self.device = engine.layout, engine.device
        self._engine, self._group = engine, group
        self._shards = [shard_of(self.layout, rank, group.size) for rank in range(group.size)]
        self.shard = self._shards[group.rank]
        on_host = self.device.type == "cpu"
        self._incoming: list[list[memoryview]] = [
            [bytes_of(engine.incoming.groups[run.group][run.begin : run.end]) for run in self.shard.pieces(bucket)]
            for bucket in self.layout.buckets
        ]
        self._pool = ShardPool(self.shard, pinned=self.device.type == "cuda")
        self.release = self._pool.release
        results = self.layout.result_buckets
        most = max((self.shard.numel(bucket) * self.layout.groups[bucket.group].result_dtype.itemsize
                    for bucket in results), default=0)  # fmt: skip
        self._received = torch.empty(group.size * most, dtype=torch.uint8, device=self.device)
        # Backward finishes the parameters from the last to the first.
        gradients = [bucket for bucket in results if self.layout.groups[bucket.group].role == "grad"]
        self._order = [*reversed(gradients), *results[len(gradients) :]]
        self._thread: ThreadPoolExecutor | None = None
        if on_host:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="w5xde-exchange")
        else:
            engine.keep_results()  # they are exchanged where they were summed, when the block is over

    def incoming(self, bucket: int) -> list[memoryview]:
        """Where this rank's pieces of a bucket are received: in the engine's own memory."""
        return self._incoming[bucket]

    @torch.no_grad()
    def load(self, buckets: Iterable[int]) -> None:
        """Make the pieces that all ranks have received whole on each."""
        engine, group = self._engine, self._group
        wanted = [self.layout.buckets[number] for number in sorted(buckets)]
        live = engine.live
        if live is not engine.incoming:
            for bucket in wanted:
                for index, begin, end in self.shard.pieces(bucket):
                    live.groups[index][begin:end].copy_(engine.incoming.groups[index][begin:end])
        tails: list[Tensor] = []
        for bucket in wanted:
            flat, each = live.bucket(bucket), _each(bucket, group.size)
            if each:
                begin = group.rank * each
                group.all_gather(flat[: group.size * each], flat[begin : begin + each])
            tails.append(flat[group.size * each :].view(torch.uint8))
        together = torch.cat(tails) if tails else torch.empty(0, dtype=torch.uint8)
        if together.numel():  # less than a shard's grain of each bucket: the last rank's
            group.broadcast(together, group.size - 1)
            torch._foreach_copy_(tails, torch.split(together, [tail.numel() for tail in tails]))
        engine.refresh(bucket.index for bucket in wanted)

    def compute(self, task: Task, emit: EmitPieces) -> ComputedBlock:
        """Compute one block together. Raises LeafError, on every rank."""
        engine, group = self._engine, self._group
        began = engine.clock()
        block = Block(task.start, task.start + len(task.samples))
        parts = leaves_of(block, Share.BLOCK, group.size)
        mine = parts[group.rank]
        current = _Exchange(self._pool.take(), block, parts, emit)
        exchanged = None if self._thread is None else self._thread.submit(self._exchange, current)
        outcome: ComputedBlock | None = None
        failure: LeafError | None = None
        spent: Sequence[ResultVector] = ()
        try:
            if mine:
                samples = task.samples[mine[0] - block.start :][: len(mine)]
                outcome = engine.compute(replace(task, start=mine[0], samples=samples), current.put)
                spent = outcome.vectors
        except LeafError as error:
            failure, spent = error, error.vectors
        except BaseException:
            current.end(failed=True)  # this rank leaves its island
            raise
        current.end(failed=failure is not None)
        if exchanged is None:
            self._exchange(current)
        else:
            exchanged.result()
        for vector in spent:
            engine.release(vector)
        if failure is not None:
            report = Report.of_failure(failure)
        else:
            report = Report() if outcome is None else Report.of(mine, outcome)
        reports = exchange(group, report)
        raise_failure(reports, failure, (current.memory,))
        return outcome_of(reports, rank=group.rank, compute_s=engine.clock() - began, vectors=(current.memory,))

    def close(self) -> None:
        """Close the engine, too."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._engine.close()

    # -- on the exchanging thread

    def _exchange(self, current: _Exchange) -> None:
        for bucket in self._order:
            vector, failed = current.wait_for(bucket.index)
            state = _FAILED if failed else _NOTHING if vector is None else _SUM
            states = [row[0] for row in self._group.numbers([state])]
            if _FAILED in states:
                return
            if _SUM in states:
                self._sum(bucket, None if vector is None else vector.buckets[bucket.index], states, current)

    @torch.no_grad()
    def _sum(self, bucket: Bucket, given: Tensor | None, states: Sequence[int], current: _Exchange) -> None:
        numel = self.shard.numel(bucket)
        dtype = self.layout.groups[bucket.group].result_dtype
        received = [numel if state == _SUM else 0 for state in states]
        sent = [0] * self._group.size
        if given is None:
            given = torch.empty(0, dtype=dtype, device=self.device)
        else:
            sent = [shard.numel(bucket) for shard in self._shards]
        output = self._received[: sum(received) * dtype.itemsize].view(dtype)
        self._group.all_to_all(output, given, received, sent)
        if not numel:
            return
        pieces = iter(torch.split(output, [count for count in received if count]))
        total = current.sum(next(pieces) if state == _SUM else None for state in states)
        held = current.memory.pieces[bucket.index]
        held[0].copy_(total)
        current.emit(bucket.index, held)


class _Exchange:
    """One block: what the engine has finished of it, and what has become of it."""

    def __init__(self, memory: ShardMemory, block: Block, parts: Sequence[Sequence[int]], emit: EmitPieces) -> None:
        self.memory, self.emit = memory, emit
        self._block, self._parts = block, parts
        self._news = threading.Condition()
        self._sums: dict[int, ResultVector] = {}
        self._over = self._failed = False

    def put(self, bucket: int, vector: ResultVector) -> None:
        """A bucket is summed on this rank. Any thread."""
        with self._news:
            self._sums[bucket] = vector
            self._news.notify()

    def end(self, *, failed: bool) -> None:
        """Nothing more will be put."""
        with self._news:
            self._over, self._failed = True, failed
            self._news.notify()

    def wait_for(self, bucket: int) -> tuple[ResultVector | None, bool]:
        """This rank's sum of a bucket, None where it has none, and whether it has failed."""
        with self._news:
            while bucket not in self._sums and not self._over:
                self._news.wait()
            return self._sums.get(bucket), self._failed

    def sum(self, pieces: Iterator[Tensor | None]) -> Tensor:
        """The ranks' pieces of a bucket, added."""
        return summed(self._block, self._parts, pieces)


def summed(block: Block, parts: Sequence[Sequence[int]], pieces: Iterator[Tensor | None]) -> Tensor:
    """Pieces of the sums of ``parts`` (leaves of ``block``) added as the tree adds, in place. One is there at least."""
    start, tree = block.start, Frontier(block.num_leaves)
    held: dict[int, Tensor | None] = {}
    for leaves, piece in zip(parts, pieces, strict=True):
        if not leaves:
            continue
        held[leaves[0] - start] = piece
        for left, right in tree.fill(Block(leaves[0] - start, leaves[-1] + 1 - start)):
            mine, theirs = held[left], held.pop(right)
            held[left] = theirs if mine is None else mine
            if mine is not None and theirs is not None:
                add(mine, theirs)
    total = held[0]
    assert total is not None
    return total


def shard_of(layout: Layout, rank: int, size: int) -> Shard:
    """A rank's equal part of every bucket, and the last rank's rest."""
    runs = []
    for bucket in layout.buckets:
        each = _each(bucket, size)
        end = bucket.numel if rank == size - 1 else (rank + 1) * each
        runs.append((bucket.group, bucket.offset + rank * each, bucket.offset + end))
    return Shard.of(layout, runs)


def _each(bucket: Bucket, size: int) -> int:
    return bucket.numel // (_ELEMENTS * size) * _ELEMENTS
