"""What one rank of an island holds of a model, to executors that were made for a whole one.

Parameters, results and residuals are those of the rank's shard, as a layout by itself (``Shard.own``): an optimizer
that works on each value by itself makes of them what it makes of the whole. All ranks call everything but ``release``
in the same order. Memory for a shard of n parameters in float32: 4 n for what it computes with, 4 n for each result
under way, beside the island's own engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from w5xde_async.compute.block import ComputedBlock, Emit, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.parallel.engine import IslandEngine
from w5xde_async.params.flat import FlatState, ResultVector

_MOST_SPARE = 4


class ShardEngine:
    """The part of ``compute.engine.Engine`` that coded executors use, over one rank's engine of an island."""

    child = 0

    def __init__(
        self, engine: IslandEngine, across: Callable[[float], float], *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """``across``: the sum of what all ranks give, equal on all."""
        self.shard, self.layout, self.device = engine.shard, engine.shard.own, engine.device
        self.across, self.clock = across, clock
        self.live = FlatState(self.layout, self.device)  #: what the rank computes with, on its device
        self._engine, self._keeps = engine, False
        self._spare: list[ResultVector] = []
        self.tensors: list[Tensor] = []
        """By entry, flat, views of ``live``; trainable ones are parameters."""
        for entry, view in zip(self.layout.entries, self.live.views, strict=True):
            self.tensors.append(nn.Parameter(view) if entry.role == "grad" else view)

    @property
    def incoming(self) -> FlatState:
        """Where new values are put before ``load``: a rank's part is small enough to be copied once more."""
        return self.live

    def load(self, buckets: Iterable[int]) -> None:
        """``incoming`` has new values in these buckets."""
        self.refresh(buckets)

    @torch.no_grad()
    def refresh(self, buckets: Iterable[int]) -> None:
        """``live`` has new values in these buckets, on some rank at least: have all ranks compute with them."""
        buckets = list(buckets)
        for number in buckets:
            values = self.live.bucket(self.layout.buckets[number])
            places = self._engine.incoming(number)
            for place, piece in zip(places, self._pieces(number, values), strict=True):
                torch.frombuffer(place, dtype=values.dtype).copy_(piece)
        self._engine.load(buckets)

    def keep_results(self) -> None:
        """From now on ``emit`` gets results on the device."""
        self._keeps = True

    def unbind(self) -> None:
        """The island's own parameters have gradients of their own."""

    def compute(self, task: Task, emit: Emit) -> ComputedBlock:
        """Compute one block together. ``emit`` is called for every bucket that has changed, on all ranks, also on those
        that hold nothing of it. Raises LeafError.
        """
        vector, given = self._take(), set[int]()

        def put(bucket: int, pieces: Sequence[Tensor]) -> None:
            for mine, piece in zip(self._pieces(bucket, vector.buckets[bucket]), pieces, strict=True):
                mine.copy_(piece)
            given.add(bucket)
            emit(bucket, vector)

        try:
            outcome = self._engine.compute(task, put)
        except LeafError as error:
            self._engine.release(error.vectors)
            error.vectors = (vector,)
            raise
        self._engine.release(outcome.vectors)
        for bucket in self.layout.result_buckets:
            if bucket.index not in given and bucket.index not in outcome.absent:
                emit(bucket.index, vector)
        return replace(outcome, vectors=(vector,))

    def release(self, vector: ResultVector) -> None:
        """A result has been sent, or used. Any thread."""
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(vector)

    def _take(self) -> ResultVector:
        try:
            return self._spare.pop()
        except IndexError:
            return ResultVector(self.layout, self.device if self._keeps else "cpu")

    def _pieces(self, bucket: int, values: Tensor) -> Sequence[Tensor]:
        """A bucket's values on this rank, in the island's pieces of it."""
        runs = self.shard.pieces(self.shard.layout.buckets[bucket])
        return torch.split(values, [run.end - run.begin for run in runs]) if runs else ()
