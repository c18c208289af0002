"""A lease computed by all ranks of an island together, each of which has a connection of its own.

Rank 0, the head, decides what is done next, and says so to the others, who wait for what they need of it and then do
the same: results, parameters and data of each travel on its own link, so they arrive when they like.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import LocalError
from w5xde_async.job import Job
from w5xde_async.parallel.engine import IslandEngine, LoneLeafError, Traced
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Params, Submit, Verdict
from w5xde_async.worker.executors.executor import (
    BucketUpdate,
    Computed,
    HeldLease,
    LeaseExecutor,
    Send,
    Version,
    check_pieces,
)
from w5xde_async.worker.executors.published import WORDS, DeltaReceiver
from w5xde_async.worker.uplink.result_encoder import BucketResult, piece_specs


class Turn(IntEnum):
    """What the ranks do next."""

    LOAD = 1  #: a version, by its number
    COMPUTE = 2  #: a lease, by its number
    END = 3  #: nothing more
    SUBMIT = 4  #: what a SUBMIT asks for, by its lease
    SETTLE = 5  #: the next verdict


class Lockstep(Protocol):
    """How the ranks of one island stay together. Called on the compute thread."""

    def announce(self, turn: int, number: int) -> None:
        """On the head: tell the others."""

    def hear(self) -> tuple[int, int]:
        """On the others: wait for what the head announces next."""

    def union(self, numbers: Sequence[int], count: int) -> list[int]:
        """On all: which of the numbers below ``count`` any rank has."""

    def bytes_of_all(self, data: bytes) -> list[bytes]:
        """On all: what each rank gives."""

    def pass_on(self, data: Tensor, source: int) -> None:
        """On all: bytes (uint8, in host memory) of rank ``source`` into everybody's."""


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


def sum_across(lockstep: Lockstep, value: float) -> float:
    """The sum of what all ranks give, added in their order: the same bits on all."""
    return sum(array("d", b"".join(lockstep.bytes_of_all(array("d", [value]).tobytes()))))


class PiecesReceiver:
    """Receives the pieces of a rank's shard where the engine reads them."""

    def __init__(self, engine: IslandEngine) -> None:
        self._engine, self._shard = engine, engine.shard

    def place(self, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        check_pieces(self._shard, message, specs)
        return self._engine.incoming(message.bucket)

    def arrived(self) -> None:
        """It lies where it belongs."""

    def take(self) -> tuple[BucketUpdate, ...]:
        return ()


class PiecesExecutor:
    """Exact synchronous training without codecs, on one rank: its pieces travel as they lie in memory."""

    exact, repeatable, newest_first = True, False, False
    flops_per_leaf, child, has_room = 0.0, 0, True

    def __init__(self, engine: IslandEngine, *, capacity_bytes: int) -> None:
        self.layout: Layout = engine.layout
        self.device, self.capacity_bytes = engine.device, capacity_bytes
        self.parameters = PiecesReceiver(engine)
        self.version = -1
        self._engine, self._loss_scale = engine, 1.0
        self._specs = piece_specs(engine.shard)

    def admit(self, message: Verdict | Submit) -> bool:
        return False

    def load(self, version: Version) -> None:
        self._engine.load(version.buckets)
        self.version, self._loss_scale = version.number, version.loss_scale

    def compute(self, held: HeldLease, send: Send) -> Computed:
        def emit(bucket: int, pieces: Sequence[Tensor]) -> None:
            send(BucketResult(bucket, [*zip(self._specs[bucket], map(bytes_of, pieces), strict=True)]))

        outcome = self._engine.compute(held.task(self._loss_scale), emit)
        return Computed(outcome, (), outcome.vectors)

    def submit(self, asked: Submit) -> Computed:
        raise LocalError("a request to submit, which was not admitted")

    def settle(self, verdict: Verdict) -> None:
        """Nothing was left out of the results."""

    def release(self, vectors: Sequence[ResultVector]) -> None:
        self._engine.release(vectors)


class IslandExecutor:
    """A :class:`LeaseExecutor` of one rank: what ``own`` does, done by all ranks in the order that the head says."""

    repeatable = False
    flops_per_leaf, child, has_room = 0.0, 0, True

    def __init__(self, own: LeaseExecutor, rank: Rank) -> None:
        """``own`` does this rank's part."""
        self.layout, self.device, self.capacity_bytes = own.layout, own.device, own.capacity_bytes
        self.exact, self.newest_first, self.parameters = own.exact, own.newest_first, own.parameters
        self._own, self._rank = own, rank
        self._broken = False  # the other ranks are in the middle of something, or gone

    @property
    def version(self) -> int:
        return self._own.version

    def admit(self, message: Verdict | Submit) -> bool:
        return self._own.admit(message)

    def load(self, version: Version) -> None:
        with self._turn(Turn.LOAD, version.number):
            buckets = self._rank.lockstep.union(version.buckets, len(self.layout.buckets))
            self._own.load(replace(version, buckets=tuple(buckets), updates=self._passed_on(version.updates)))

    def compute(self, held: HeldLease, send: Send) -> Computed:
        with self._turn(Turn.COMPUTE, held.message.lease):
            return self._own.compute(held, send)

    def submit(self, asked: Submit) -> Computed:
        with self._turn(Turn.SUBMIT, asked.lease):
            return self._own.submit(asked)

    def settle(self, verdict: Verdict) -> None:
        with self._turn(Turn.SETTLE, 0):
            self._own.settle(verdict)

    def release(self, vectors: Sequence[ResultVector]) -> None:
        self._own.release(vectors)

    def hear(self) -> tuple[int, int]:
        """On a rank that is not the head: what is done next."""
        return self._rank.lockstep.hear()

    @property
    def follows(self) -> bool:
        """Whether another rank is the head."""
        return self._rank.rank > 0

    def end(self) -> None:
        """The link has ended: nothing more comes."""
        if not self._broken and not self.follows:
            self._rank.lockstep.announce(Turn.END, 0)  # the others need not wait any more

    @contextmanager
    def _turn(self, turn: Turn, number: int) -> Iterator[None]:
        """What all ranks do next."""
        try:
            if not self.follows:
                self._rank.lockstep.announce(turn, number)
            yield
        except BaseException as error:
            # To announce the end would wait for ranks that are not there, or raise something else: others are in the
            # middle of it, or gone. Only a leaf that all have seen fail has brought them all to its end.
            self._broken = not isinstance(error, LeafError) or isinstance(error, LoneLeafError)
            raise

    def _passed_on(self, updates: Sequence[BucketUpdate]) -> tuple[BucketUpdate, ...]:
        """A version's updates with what other ranks have brought of it, cut to what this one holds.

        What a codec wrote came whole, to one rank: all have it, bucket by bucket, and keep their own part. Raises
        MalformedFrame for what does not decode.
        """
        receiver, lockstep = self.parameters, self._rank.lockstep
        if not isinstance(receiver, DeltaReceiver) or not receiver.coded:
            return tuple(updates)
        found = [update for update in updates if update.codec is None]
        coded = [update for update in updates if update.codec is not None]
        told = array("q", (number for update in coded for number in receiver.described(update))).tobytes()
        for source, theirs in enumerate(lockstep.bytes_of_all(told)):
            mine = iter(coded if source == self._rank.rank else ())
            numbers = array("q", theirs)
            for described in zip(*[iter(numbers)] * WORDS, strict=True):
                update = next(mine, None) or receiver.awaited(described)
                lockstep.pass_on(update.data, source)
                if (own := receiver.own(update)) is not None:
                    found.append(own)
        return tuple(found)
