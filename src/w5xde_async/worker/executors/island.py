"""A lease computed by all ranks of an island together, each of which has a connection of its own.

Rank 0, the head, decides what is done next, and says so to the others, who wait for what they need of it and then do
the same: results, parameters and data of each travel on its own link, so they arrive when they like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from w5xde_async.compute.block import LeafSpec
from w5xde_async.errors import LocalError, MalformedFrame
from w5xde_async.job import Job
from w5xde_async.parallel.engine import IslandEngine, LoneLeafError, Traced
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Params, Submit, Verdict
from w5xde_async.worker.executors.executor import BucketUpdate, Computed, HeldLease, Send, Version
from w5xde_async.worker.uplink.result_encoder import BucketResult


class Turn(IntEnum):
    """What the ranks do next."""

    LOAD = 1  #: a version, by its number
    COMPUTE = 2  #: a lease, by its number
    END = 3  #: nothing more


class Lockstep(Protocol):
    """How the ranks of one island stay together. Called on the compute thread."""

    def announce(self, turn: int, number: int, detail: int) -> None:
        """On the head: tell the others."""

    def hear(self) -> tuple[int, int, int]:
        """On the others: wait for what the head announces next."""

    def union(self, numbers: Sequence[int], count: int) -> list[int]:
        """On all: which of the numbers below ``count`` any rank has."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of an island, to its worker.

    ``key``: a secret that all ranks have and nobody else. ``shape``: what the island is, for people. ``traced``:
    whether it computes the coordinator's program even where it has the job. ``build`` makes the engine of a job or a
    program, its spec and ``bucket_bytes``.
    """

    rank: int
    ranks: int
    key: str
    shape: str
    lockstep: Lockstep
    traced: bool
    build: Callable[[Job | Traced, LeafSpec, int], IslandEngine]


class PiecesReceiver:
    """Receives the pieces of a rank's shard where the engine reads them."""

    def __init__(self, engine: IslandEngine) -> None:
        self._engine, self._layout, self._shard = engine, engine.layout, engine.shard

    def place(self, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        number = message.bucket
        if number >= len(self._layout.buckets) or message.num_buckets > len(self._layout.buckets):
            raise MalformedFrame(f"PARAMS for bucket {number} of {len(self._layout.buckets)}")
        bucket = self._layout.buckets[number]
        dtype = str(self._layout.groups[bucket.group].dtype).removeprefix("torch.")
        wanted = [(dtype, (run.end - run.begin,), "raw") for run in self._shard.pieces(bucket)]
        if [(spec.dtype, spec.shape, spec.codec) for spec in specs] != wanted or message.delta:
            raise MalformedFrame(f"PARAMS bucket {number} is not what this rank's shard has of it")
        return self._engine.incoming(number)

    def arrived(self) -> None:
        """It lies where it belongs."""

    def take(self) -> tuple[BucketUpdate, ...]:
        return ()


class IslandExecutor:
    """A :class:`LeaseExecutor` over one rank's engine."""

    exact = True
    repeatable = newest_first = False
    child = 0

    def __init__(self, engine: IslandEngine, rank: Rank, *, capacity_bytes: int) -> None:
        self.layout: Layout = engine.layout
        self.device, self.capacity_bytes = engine.device, capacity_bytes
        self.parameters = PiecesReceiver(engine)
        self.version, self.flops_per_leaf = -1, 0.0
        self._engine, self._rank, self._loss_scale = engine, rank, 1.0
        self._specs = [_specs(engine, number) for number in range(len(engine.layout.result_buckets))]

    def admit(self, message: Verdict | Submit) -> bool:
        return False

    def load(self, version: Version) -> None:
        self._turn(Turn.LOAD, version.number)
        self._engine.load(self._rank.lockstep.union(version.buckets, len(self.layout.buckets)))
        self.version, self._loss_scale = version.number, version.loss_scale

    def compute(self, held: HeldLease, send: Send) -> Computed:
        self._turn(Turn.COMPUTE, held.message.lease)

        def emit(bucket: int, pieces: Sequence[Tensor]) -> None:
            send(BucketResult(bucket, [*zip(self._specs[bucket], map(bytes_of, pieces), strict=True)]))

        try:
            outcome = self._engine.compute(held.task(self._loss_scale), emit)
        except LoneLeafError as error:  # the others wait for this rank, which cannot go on
            error.device_lost = True
            raise
        return Computed(outcome, (), outcome.vectors)

    def submit(self, asked: Submit) -> Computed:
        raise LocalError("a request to submit, which was not admitted")

    def settle(self, verdict: Verdict) -> None:
        """Nothing was left out of the results."""

    def release(self, vectors: Sequence[ResultVector]) -> None:
        self._engine.release(vectors)

    def hear(self) -> tuple[int, int, int]:
        """On a rank that is not the head: what is done next."""
        return self._rank.lockstep.hear()

    @property
    def follows(self) -> bool:
        """Whether another rank is the head."""
        return self._rank.rank > 0

    def end(self) -> None:
        """The link has ended: nothing more comes."""
        self._turn(Turn.END, 0)  # the others need not wait any more

    def _turn(self, turn: Turn, number: int) -> None:
        if not self._rank.rank:
            self._rank.lockstep.announce(turn, number, 0)


def _specs(engine: IslandEngine, number: int) -> list[BufferSpec]:
    bucket = engine.layout.buckets[number]
    dtype = engine.layout.groups[bucket.group].result_dtype
    name = str(dtype).removeprefix("torch.")
    sizes = [run.end - run.begin for run in engine.shard.pieces(bucket)]
    return [BufferSpec("", name, (size,), "raw", size * dtype.itemsize) for size in sizes]
