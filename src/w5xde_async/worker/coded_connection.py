"""One link after joining, under every rule and codec but the plain synchronous one.

As ``serving``, with these differences: versions come in pieces that the compute thread applies; results leave through
the uplink's codec; verdicts go back to the compute thread, which settles what was left out; and where the rule is one
of local steps, leases are inner steps and results are sent when the coordinator asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from w5xde_async.codecs.codec import Codec
from w5xde_async.codecs.registry import codec
from w5xde_async.compute.block import Computing, Outcome, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import MalformedFrame, UsageError
from w5xde_async.params.flat import ResultVector
from w5xde_async.wire.frame import Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Done, Lease, Result, Retune, Submit, Verdict
from w5xde_async.worker.connection import Serving
from w5xde_async.worker.delta_inbox import PieceInbox, PieceVersion, Published
from w5xde_async.worker.inbox import HeldLease, Version
from w5xde_async.worker.replicas import FollowingReplica, Replica, SteppingReplica
from w5xde_async.worker.result_encoder import Uplink

__all__ = ["CodedServing"]

_Ready = tuple[int, BufferSpec, Buffer, Callable[[], None] | None]


class CodedServing(Serving):
    """``uplink`` and ``inner`` (what WELCOME says of the optimizer) are set before ``run``."""

    uplink: Uplink
    inner: bytes = b""

    def _take_up(self, engine: Computing) -> None:
        welcome = self.welcome
        downlink = _codec_of(welcome.downlink)
        self._inbox: PieceInbox = PieceInbox(
            engine.layout, downlink, engine.incoming, self._limit, exact=welcome.update == "sync"
        )
        published = Published(engine.layout)
        self._ahead: set[int] = set()  # versions in the queue that have been taken up before their turn, by id
        self._replica: Replica
        if welcome.update in ("sync", "async"):
            self._replica = FollowingReplica(engine, published)
        else:
            self._replica = SteppingReplica(engine, published, self.inner)

    def _feed_from_inbox(self) -> None:
        self._queue.extend(self._inbox.take_items())

    def _other(self, message: Any) -> None:
        if type(message) is Submit:
            if not self._replica.submits:
                raise MalformedFrame("SUBMIT under a rule that has every lease submitted")
            self._inbox.submit(message)
            self._feed()
        elif type(message) is Verdict:
            self._queue.append(message)
            self._feed()
        elif type(message) is Retune:
            self._inbox.allow(_codec_of(message.downlink))
            _codec_of(message.codec)
            self._queue.append(message)
            self._feed()

    def _expected_s(self) -> float:
        return 0.0  # what is queued takes longer than its leases do: it runs in the compute thread

    # -- on the compute thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        published = self._replica.published
        while not self._stopping:
            try:
                item: Any = self._queue.popleft()
            except IndexError:
                return
            if isinstance(item, PieceVersion):
                if id(item) in self._ahead:
                    self._ahead.discard(id(item))
                else:
                    published.apply(item)
            elif isinstance(item, Verdict):
                self._settle(item)
            elif isinstance(item, Submit):
                self._submit(item)
            elif isinstance(item, Retune):
                self.uplink.change(_codec_of(item.codec))
            elif isinstance(item, HeldLease):
                lease = item.message
                if self.welcome.update == "async":
                    self._catch_up(published)
                if lease.lease in self._revoked:
                    self._soon(self._send_nothing, lease.lease)
                elif published.version < lease.version:
                    raise MalformedFrame(f"lease {lease.lease} needs version {lease.version}")
                elif self.welcome.update != "sync" or published.version == lease.version:
                    self._block(item, published.loss_scale)
                else:
                    self._soon(self._inbox.end, lease.lease)
            else:
                assert not isinstance(item, Version)

    def _catch_up(self, published: Published) -> None:
        """Take up the versions that came after a lease: what is computed at an older one than need be is staler."""
        for item in self._queue.copy():  # the queue itself is also read on the event loop
            if isinstance(item, PieceVersion) and id(item) not in self._ahead:
                published.apply(item)
                self._ahead.add(id(item))

    def _settle(self, verdict: Verdict) -> None:
        self.uplink.settle(verdict.leases, verdict.code, verdict.buckets)
        self._replica.settle(verdict.leases, verdict.code)

    def _settle_rest(self) -> None:
        """Verdicts that were read and not looked at when the link ended: nobody says them again without being asked."""
        for item in self._queue:
            if isinstance(item, Verdict):
                self.uplink.settle(item.leases, item.code, item.buckets)

    async def _stop(self) -> None:
        await super()._stop()
        if any(isinstance(item, Verdict) for item in self._queue):
            await self._loop.run_in_executor(self._compute, self._settle_rest)

    def _compute_task(self, lease: Lease, task: Task, emit: Callable[[int, ResultVector], None]) -> Outcome:
        self.uplink.begin()
        return self._replica.compute(task, lease.rates, emit)

    def _block(self, item: HeldLease, loss_scale: float) -> None:
        lease = item.message
        self._computing = lease.lease
        began = self._clock()
        self._activity = f"step {lease.step}, leaves {lease.start} to {lease.start + len(lease.samples) - 1}"
        task = Task(
            step=lease.step, start=lease.start, samples=lease.samples, loss_scale=loss_scale,
            structure=lease.structure, packed=lease.packed, tensors=item.tensors,
        )  # fmt: skip

        def emit(bucket: int, vector: ResultVector) -> None:
            self._soon(self._send_bucket, lease.lease, self._coded(lease.lease, bucket, vector))

        try:
            outcome = self._compute_task(lease, task, emit)
        except LeafError as error:
            self._soon(self._send_failed, lease.lease, error)
        else:
            self._soon(self._send_coded_done, lease.lease, outcome, began - self._idle_since, self._replica.version,
                       self.uplink.encode_s, self.uplink.raw_bytes)  # fmt: skip
        self._ended(began, len(lease.samples))

    def _coded(self, lease: int, bucket: int, vector: ResultVector) -> _Ready:
        coded = self.uplink.encode(lease, bucket, vector.buckets[bucket])
        if coded is not None:
            return bucket, coded.spec, coded.data, coded.sent
        spec, data = self._specs[bucket], vector.bucket_bytes[bucket]
        self.uplink.raw_bytes += spec.nbytes
        return bucket, spec, data, None

    def _submit(self, asked: Submit) -> None:
        self._activity = "submitting"
        self.uplink.begin()
        vector, version = self._replica.submission(asked.lease, asked.buckets)
        ready = [self._coded(asked.lease, bucket, vector) for bucket in sorted(asked.buckets)]
        self._soon(self._send_submission, asked.lease, ready, vector, version, self.uplink.encode_s,
                   self.uplink.raw_bytes)  # fmt: skip
        self._idle_since = self._clock()
        self._activity = "waiting for work"

    # -- out -----------------------------------------------------------------------------------------------

    def _send_bucket(self, lease: int, ready: _Ready) -> None:
        bucket, spec, data, sent = ready
        if lease not in self._revoked:
            self.outbox.post(encode(Result(lease, bucket), [(spec, data)]), sent=sent)
        elif sent is not None:
            sent()

    def _send_submission(
        self, lease: int, ready: list[_Ready], vector: ResultVector, version: int, encode_s: float, raw_bytes: int
    ) -> None:
        for one in ready:
            self._send_bucket(lease, one)
        done = Done(lease, (), (), (), (), (), 0, 0.0, 0.0, version, encode_s, raw_bytes)
        self.outbox.post(encode(done), sent=partial(_let_go, vector))

    def _send_coded_done(
        self, lease: int, outcome: Outcome, wait_s: float, version: int, encode_s: float, raw_bytes: int
    ) -> None:
        engine = self._engine
        self._inbox.end(lease)

        def release() -> None:
            for vector in outcome.vectors:
                engine.release(vector)

        self._revoked.discard(lease)
        done = Done(
            lease, outcome.losses, outcome.metric_names, outcome.metrics, outcome.untouched, outcome.absent,
            outcome.splits, outcome.compute_s, max(wait_s, 0.0), version, encode_s, raw_bytes,
        )  # fmt: skip
        if self._replica.submits:
            release()  # nothing of it is sent
            release = _nothing
        self.outbox.post(encode(done), sent=release)
        self.leases_done += 1


def _codec_of(name: str) -> Codec:
    """Raises MalformedFrame for a name that is none."""
    try:
        return codec(name)
    except UsageError as error:
        raise MalformedFrame(str(error)[:200]) from None


def _let_go(vector: ResultVector) -> None:
    """Keeps ``vector`` alive until its bytes have left."""


def _nothing() -> None:
    return
