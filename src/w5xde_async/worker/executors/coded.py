"""Every rule and codec but the plain synchronous one.

Versions come encoded, as deltas, or while an older one is computed with, so the compute thread applies them to a copy
of what is published. Results leave through a codec, and what it left out is settled by the verdicts. What is done to
the model in between is the replica's matter: under rules of local steps, leases are inner steps and results are sent
when the coordinator asks for them.

Exact where the rule is ``sync`` and the codecs are lossless; otherwise the bits depend on who computed what.
"""

from __future__ import annotations

from collections.abc import Sequence

from w5xde_async.codecs.codec import Codec
from w5xde_async.codecs.registry import codec
from w5xde_async.compute.block import ComputedBlock
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.sandbox import Computing
from w5xde_async.errors import MalformedFrame, UsageError
from w5xde_async.params.flat import ResultVector
from w5xde_async.wire.messages import Submit, Verdict, Welcome
from w5xde_async.worker.executors.executor import Computed, HeldLease, Send, Version
from w5xde_async.worker.executors.published import DeltaReceiver, Published
from w5xde_async.worker.executors.replicas import FollowingReplica, Replica, SteppingReplica
from w5xde_async.worker.executors.shard_engine import ShardEngine
from w5xde_async.worker.uplink.result_encoder import ResultEncoder

_NOTHING = ComputedBlock(
    losses=(), metric_names=(), metrics=(), untouched=(), absent=(), splits=0, compute_s=0.0, vectors=()
)  # fmt: skip


class CodedExecutor:
    """A :class:`LeaseExecutor` over one engine, through codecs. ``encoder`` outlives it: it is the worker's."""

    flops_per_leaf, has_room = 0.0, True
    repeatable = False  # what a codec leaves out of one result goes into the next

    def __init__(
        self, engine: Computing | ShardEngine, welcome: Welcome, inner: bytes, encoder: ResultEncoder, *,
        capacity_bytes: int, held: bool = False,
    ) -> None:  # fmt: skip
        """``inner``: what WELCOME said of the optimizer under rules of local steps. ``held``: what the engine has in
        ``incoming`` may be what is published first. Raises MalformedFrame.
        """
        self.layout, self.device, self.capacity_bytes = engine.layout, engine.device, capacity_bytes
        self.exact, self.newest_first = welcome.update == "sync", welcome.update == "async"
        shard = engine.shard if isinstance(engine, ShardEngine) else None
        whole = engine.layout if shard is None else shard.layout
        self.parameters = DeltaReceiver(whole, _codec_of(welcome.downlink), shard)
        self._engine, self._encoder = engine, encoder
        self._published = published = Published(engine.layout)
        if held:
            published.state.copy_groups(engine.incoming)
        self._replica: Replica
        if welcome.update in ("sync", "async"):
            self._replica = FollowingReplica(engine, published)
            if isinstance(engine, Engine):
                engine.leave_on_device(encoder.device_buckets)
        else:
            self._replica = SteppingReplica(engine, published, inner, on_device=bool(encoder.device_buckets))

    @property
    def version(self) -> int:
        return self._published.version

    @property
    def child(self) -> int:
        return self._engine.child

    def admit(self, message: Verdict | Submit) -> bool:
        """Raises MalformedFrame where nothing is to be submitted, or a bucket does not exist."""
        if type(message) is Submit:
            if not self._replica.submits:
                raise MalformedFrame("SUBMIT under a rule that has every lease submitted")
            if any(bucket >= len(self.layout.result_buckets) for bucket in message.buckets):
                raise MalformedFrame(f"SUBMIT for buckets {message.buckets[:8]} of {len(self.layout.result_buckets)}")
        return True

    def load(self, version: Version) -> None:
        self._published.apply(version)

    def compute(self, held: HeldLease, send: Send) -> Computed:
        lease, encoder = held.message, self._encoder
        weight = float(max(lease.step_samples, 1))
        encoder.begin()

        def emit(bucket: int, vector: ResultVector) -> None:
            if encoder.has(bucket):
                send(encoder.encode(lease.lease, bucket, vector, weight))

        outcome = self._replica.compute(held.task(self._published.loss_scale), lease.rates, emit)
        vectors = outcome.vectors
        if self._replica.submits:  # nothing of it is sent
            self.release(vectors)
            vectors = ()
        return Computed(outcome, (), vectors, self._replica.version, encoder.encode_s, encoder.raw_bytes)

    def submit(self, asked: Submit) -> Computed:
        encoder, replica = self._encoder, self._replica
        assert isinstance(replica, SteppingReplica)
        encoder.begin()
        vector, version = replica.submission(asked.lease, asked.buckets)
        results = [
            encoder.encode(asked.lease, bucket, vector) for bucket in sorted(asked.buckets) if encoder.has(bucket)
        ]
        return Computed(_NOTHING, results, (), version, encoder.encode_s, encoder.raw_bytes)

    def settle(self, verdict: Verdict) -> None:
        self._encoder.settle(verdict.leases, verdict.code, verdict.buckets)
        self._replica.settle(verdict.leases, verdict.code)

    def release(self, vectors: Sequence[ResultVector]) -> None:
        for vector in vectors:
            self._engine.release(vector)


def _codec_of(name: str) -> Codec:
    """Raises MalformedFrame for a name that is none."""
    try:
        return codec(name)
    except UsageError as error:
        raise MalformedFrame(str(error)[:200]) from None
