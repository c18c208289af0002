"""Islands within one process: ranks on threads, and an engine whose head computes for all of them.

What an island's engine promises is kept (each rank gets its pieces of the parameters and of its leaves' data, and gives
out its pieces of the sum), so whatever goes wrong is the coordinator's or the workers' doing.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from w5xde_async.compute.block import ComputedBlock, LeafSpec, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.job import Job
from w5xde_async.parallel.building import whole_engine
from w5xde_async.parallel.engine import EmitPieces, LoneLeafError, Traced
from w5xde_async.params.flat import FlatState, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.plan.numerics import EXACT
from w5xde_async.plan.shares import Share, leaves_of
from w5xde_async.plan.tree import Block
from w5xde_async.worker.executors.island import Rank

_PATIENCE_S = 30.0


class Gone(RuntimeError):
    """Another rank is."""


class Circle:
    """What the ranks of one island share. ``deal`` gives out the layout's elements at random, by ``seed``.

    ``numerics``: what they say that they compute like.
    """

    def __init__(self, ranks: int, share: Share, *, seed: int = 0, together: int = 1, numerics: str = EXACT) -> None:
        self.ranks, self.share, self.seed, self.together, self.numerics = ranks, share, seed, together, numerics
        self.heard: list[queue.Queue[tuple[int, int] | None]] = [queue.Queue() for _ in range(ranks)]
        self.barrier = threading.Barrier(ranks)
        self.board: dict[int, Any] = {}

    def meet(self, rank: int, given: Any) -> list[Any]:
        """What all ranks have given."""
        try:
            self.board[rank] = given
            self.barrier.wait(_PATIENCE_S)
            together = [self.board[rank] for rank in range(self.ranks)]
            self.barrier.wait(_PATIENCE_S)
        except threading.BrokenBarrierError:
            raise Gone from None
        return together

    def end(self) -> None:
        """A rank is gone: nobody waits for it."""
        self.barrier.abort()
        for heard in self.heard:
            heard.put(None)

    def engine(self, job: Job | Traced, spec: LeafSpec, bucket_bytes: int) -> Any:
        """What the head computes with."""
        return whole_engine(job, spec, torch.device("cpu"), bucket_bytes=bucket_bytes)

    def deal(self, layout: Layout) -> list[Shard]:
        source, runs = random.Random(self.seed), [list[tuple[int, int, int]]() for _ in range(self.ranks)]
        for group in layout.groups:
            cuts = sorted({0, group.numel, *(source.randrange(group.numel + 1) for _ in range(2 * self.ranks))})
            for begin, end in pairwise(cuts):
                runs[source.randrange(self.ranks)].append((group.index, begin, end))
        return [Shard.of(layout, one) for one in runs]

    def rank(self, number: int, *, fails: Callable[[Task, int], bool] = lambda task, rank: False) -> Rank:
        """One of them, for a worker. ``fails``: whether it raises in a block instead of computing."""
        return Rank(
            rank=number, ranks=self.ranks, key=f"island {self.seed}", shape=f"test={self.ranks}",
            lockstep=_Lockstep(self, number), traced=False,
            build=lambda job, spec, bucket_bytes: HeadComputes(self, number, job, spec, bucket_bytes, fails),
        )  # fmt: skip


class _Lockstep:
    def __init__(self, circle: Circle, rank: int) -> None:
        self._circle, self._rank = circle, rank

    def announce(self, turn: int, number: int) -> None:
        for heard in self._circle.heard[1:]:
            heard.put((turn, number))

    def hear(self) -> tuple[int, int]:
        told = self._circle.heard[self._rank].get(timeout=_PATIENCE_S)
        if told is None:
            raise Gone
        return told

    def union(self, numbers: Sequence[int], count: int) -> list[int]:
        return sorted(set().union(*self._circle.meet(self._rank, numbers)))

    def bytes_of_all(self, data: bytes) -> list[bytes]:
        return self._circle.meet(self._rank, data)

    def pass_on(self, data: torch.Tensor, source: int) -> None:
        given = self._circle.meet(self._rank, data.clone())
        data.copy_(given[source])


class HeadComputes:
    """Rank 0 has the engine; the others bring their data and their pieces of the parameters, and take their results."""

    def __init__(
        self, circle: Circle, rank: int, job: Job | Traced, spec: LeafSpec, bucket_bytes: int,
        fails: Callable[[Task, int], bool],
    ) -> None:  # fmt: skip
        self._circle, self._rank, self._fails = circle, rank, fails
        self._engine = circle.engine(job, spec, bucket_bytes)
        self.layout, self.device, self.share = self._engine.layout, self._engine.device, circle.share
        self.together, self.numerics = circle.together, circle.numerics
        self.shard = circle.deal(self.layout)[rank]
        self._state = FlatState(self.layout)
        self.blocks: list[int] = []  # how many leaves this rank had data of

    def _mine(self, state: FlatState, bucket: int) -> list[torch.Tensor]:
        pieces = self.shard.pieces(self.layout.buckets[bucket])
        return [state.groups[run.group][run.begin : run.end] for run in pieces]

    def incoming(self, bucket: int) -> list[memoryview]:
        return [bytes_of(piece) for piece in self._mine(self._state, bucket)]

    def load(self, buckets: Iterable[int]) -> None:
        buckets = list(buckets)
        pieces = self._circle.meet(self._rank, {bucket: self._mine(self._state, bucket) for bucket in buckets})
        if self._rank == 0:
            shards = self._circle.deal(self.layout)
            for shard, theirs in zip(shards, pieces, strict=True):
                for bucket in buckets:
                    runs = shard.pieces(self.layout.buckets[bucket])
                    for run, piece in zip(runs, theirs[bucket], strict=True):
                        self._engine.incoming.groups[run.group][run.begin : run.end].copy_(piece)
            self._engine.load(buckets)
        self._circle.meet(self._rank, None)

    def compute(self, task: Task, emit: EmitPieces) -> ComputedBlock:
        circle, block = self._circle, Block(task.start, task.start + len(task.samples))
        leaves = leaves_of(block, circle.share, circle.ranks, circle.together)
        self.blocks.append(len(leaves[self._rank]))
        each = len(task.tensors) // max(len(leaves[self._rank]), 1)
        own = {
            leaf: task.tensors[number * each : (number + 1) * each] for number, leaf in enumerate(leaves[self._rank])
        }
        brought = circle.meet(self._rank, (own, self._fails(task, self._rank)))
        result: Any = None
        if self._rank == 0:
            data: dict[int, Sequence[torch.Tensor]] = {}
            for theirs, _ in brought:
                for leaf, tensors in theirs.items():
                    assert all(map(torch.equal, tensors, data.get(leaf, tensors)))
                    data[leaf] = tensors
            assert sorted(data) == list(range(*block))
            result = self._compute(task, [one for leaf in range(*block) for one in data[leaf]], brought)
        vector, outcome, error = circle.meet(self._rank, result)[0]
        if error is not None:
            raise (LeafError if circle.share is Share.BLOCK else LoneLeafError)(task.start, ValueError(error))
        for bucket in self.layout.result_buckets:
            if bucket.index not in outcome.absent and bucket.index in self.shard.buckets:
                pieces = self.shard.pieces(bucket)
                emit(bucket.index, [vector.group(run.group)[run.begin : run.end].clone() for run in pieces])
        circle.meet(self._rank, None)
        if self._rank == 0:
            self._engine.release(vector)
            return ComputedBlock(**{**_fields(outcome), "vectors": ()})
        return ComputedBlock(**{**_fields(outcome), "vectors": (), "losses": (), "metric_names": (), "metrics": ()})

    def _compute(self, task: Task, tensors: list[torch.Tensor], brought: Sequence[Any]) -> Any:
        if any(failed for _, failed in brought):
            return None, None, "a rank failed"
        whole = Task(
            step=task.step, start=task.start, samples=task.samples, loss_scale=task.loss_scale,
            structure=task.structure, packed=False, tensors=tensors,
        )  # fmt: skip
        try:
            outcome = self._engine.compute(whole, lambda bucket, vector: None)
        except LeafError as error:
            return None, None, error.error
        return outcome.vectors[-1], outcome, None

    def release(self, vectors: Sequence[Any]) -> None:
        """Copies are given out."""

    def close(self) -> None:
        self._engine.close()


def _fields(outcome: ComputedBlock) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in ComputedBlock.__dataclass_fields__}
