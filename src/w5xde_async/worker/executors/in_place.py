"""Exact synchronous training without codecs: parameters and results travel as they lie in memory.

Buckets are received into the memory that the engine loads from, and results are sent from the memory in which they were
summed. The bits are those of one process that computes every leaf.
"""

from __future__ import annotations

from collections.abc import Sequence

from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.sandbox import Computing
from w5xde_async.errors import LocalError
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Params, Submit, Verdict, Welcome
from w5xde_async.worker.executors.executor import BucketUpdate, Computed, HeldLease, Send, Version, bucket_of, check_raw
from w5xde_async.worker.uplink.result_encoder import BucketResult, raw_specs

_TOGETHER_BYTES = 64 << 10  # a block's result of at most this leaves with its DONE


def is_plain(welcome: Welcome) -> bool:
    """Whether results go out and parameters come in as they lie in memory, at every version."""
    return welcome.update == "sync" and welcome.codec == welcome.downlink == "raw"


class InPlaceReceiver:
    """Receives buckets into ``incoming``, from which the engine loads a version once it is whole."""

    def __init__(self, layout: Layout, incoming: FlatState) -> None:
        self._layout, self._incoming = layout, incoming

    def place(self, message: Params, specs: Sequence[BufferSpec]) -> list[memoryview]:
        bucket = bucket_of(self._layout, message, specs)
        check_raw(self._layout, bucket, specs[0])
        return [self._incoming.bucket_bytes[message.bucket]]

    def arrived(self) -> None:
        """It lies where it belongs."""

    def take(self) -> tuple[BucketUpdate, ...]:
        return ()


class InPlaceExecutor:
    """A :class:`LeaseExecutor` over one engine. Results of a big model leave while backward goes on."""

    exact = repeatable = True
    newest_first = False

    def __init__(self, engine: Computing, *, capacity_bytes: int, shares: bool = False) -> None:
        """``shares``: the engine sees the coordinator's parameters, and sums where that reads."""
        if isinstance(engine, Engine):  # which may have served a run with a codec
            engine.leave_on_device(())
        self.shares = shares
        self.layout, self.device, self.capacity_bytes = engine.layout, engine.device, capacity_bytes
        self.parameters = InPlaceReceiver(engine.layout, engine.incoming)
        self.version = -1
        self.flops_per_leaf = 0.0
        self._engine, self._loss_scale = engine, 1.0
        self._counted = False
        self._specs = raw_specs(engine.layout)
        self._together = engine.layout.vector_bytes <= _TOGETHER_BYTES

    @property
    def child(self) -> int:
        return self._engine.child

    @property
    def has_room(self) -> bool:
        return self._engine.has_room

    def unshare(self) -> None:
        """Parameters do not come in shared memory: from now on nothing is shared. Before anything is loaded."""
        self._engine.share(None)
        self.shares = False

    def admit(self, message: Verdict | Submit) -> bool:
        return False

    def load(self, version: Version) -> None:
        self._engine.load(version.buckets)
        self.version, self._loss_scale = version.number, version.loss_scale

    def compute(self, held: HeldLease, send: Send) -> Computed:
        task = held.task(self._loss_scale)
        together: list[BucketResult] = []
        # What lies in memory that the coordinator has too is not on its way, and nothing is done with it before DONE:
        # told of one by one, it would only wake processes that the cores are needed for. A device computes by itself.
        give = together.append if self._together or (self.shares and self.device.type == "cpu") else send

        def emit(bucket: int, vector: ResultVector) -> None:
            buffers = ((self._specs[bucket], vector.bucket_bytes[bucket]),)
            give(BucketResult(bucket, buffers, slot=vector.slot))

        if self._counted:
            outcome = self._engine.compute(task, emit)
        else:
            outcome, flops = self._engine.counted(task, emit)
            self.flops_per_leaf, self._counted = flops / len(task.samples), True
        return Computed(outcome, together, outcome.vectors)

    def submit(self, asked: Submit) -> Computed:
        raise LocalError("a request to submit, which was not admitted")

    def settle(self, verdict: Verdict) -> None:
        """Nothing was left out of the results."""

    def release(self, vectors: Sequence[ResultVector]) -> None:
        for vector in vectors:
            self._engine.release(vector)
