"""What lossy codecs leave out under the synchronous rule is neither lost nor counted twice, whatever becomes of leases.

The coordinator is real. Workers encode with the real encoder, with gradients that the test knows, and do at random what
workers do: send a bucket, say DONE or FAILED, answer REVOKE, lose their link in the middle and come back, drain. Once
every step is committed,

    what was applied, decoded + the residuals of all workers = the exact gradients of all leaves
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from tests.support.scripted import LEAVES, Run, Scripted, scripted, settle
from torch import Tensor

from w5xde_async.codecs.registry import codec
from w5xde_async.params.flat import ResultVector
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import (
    Bye,
    Done,
    Drain,
    Failed,
    Lease,
    Params,
    Ready,
    Result,
    Revoke,
    Verdict,
    VerdictCode,
)
from w5xde_async.worker.uplink.result_encoder import ResultEncoder

STEPS = 6
CODEC = "int4"  # leaves much out, and its residuals do not decay


@cache
def gradient(step: int, leaf: int, bucket: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + leaf * 10 + bucket)
    return torch.randn(numel, generator=generator)


class Lossy:
    """A worker that is honest and unlucky. ``said`` counts what happened to it."""

    def __init__(self, run: Run, name: str, said: dict[str, int]) -> None:
        self.run, self.name, self.said = run, name, said
        layout = run.prepared.spec.layout
        self._layout = layout
        self.encoder = ResultEncoder(layout, codec(CODEC), feedback=True)
        self._sizes = [bucket.numel for bucket in layout.result_buckets]
        self.worker: Scripted | None = None

    async def join(self) -> None:
        """Come for the first time, or again."""
        run = self.run
        self.worker = worker = await run.worker(self.name, ready=False)
        self._seen, self._version, self._leases = 0, -1, dict[int, Lease]()
        self._at: Lease | None = None  # under way
        self._sent = 0
        self._void = False
        fingerprint = run.prepared.spec.layout.fingerprint
        await worker.link.send(encode(Ready(fingerprint, "cpu", "test", 1, "0", self.encoder.awaited)))
        run.task(worker._read())
        await settle()

    async def listen(self) -> None:
        """Take in what has come."""
        worker = self.worker
        while worker is not None and self._seen < len(worker.seen):
            message = worker.seen[self._seen]
            self._seen += 1
            if isinstance(message, Lease):
                self._leases[message.lease] = message
            elif isinstance(message, Params):
                self._version = message.version
                self._leases = {n: lease for n, lease in self._leases.items() if lease.version >= message.version}
            elif isinstance(message, Verdict):
                self.encoder.settle(message.leases, message.code, message.buckets)
                self.said["partly"] += bool(message.buckets)
                self.said[VerdictCode(message.code).name] += 1
            elif isinstance(message, Revoke):
                self.said["revoked"] += 1
                if self._leases.pop(message.lease, None) is not None:
                    await worker.link.send(encode(Done(message.lease, (), (), (), (), (), 0, 0.0, 0.0)))
                elif self._at is not None and self._at.lease == message.lease:
                    self._void = True
            elif isinstance(message, Bye):
                assert not self.encoder.awaited, "it was sent away before it knew what to keep"
                self.said["drained"] += 1
                await self._gone()
                return

    async def _gone(self) -> None:
        worker, self.worker = self.worker, None
        assert worker is not None
        worker.link.abort()
        await settle()

    async def act(self, kind: str) -> None:
        """One thing that may happen to a worker."""
        if self.worker is None:
            await self.join()
            return
        await self.listen()
        worker = self.worker
        if worker is None:
            return
        if worker.ended() or kind == "cut":
            self.said["cut"] += 1
            while self._seen < len(worker.seen):  # what it has read counts, the rest is lost
                message = worker.seen[self._seen]
                self._seen += 1
                if isinstance(message, Verdict) and random.Random(self._seen).random() < 0.5:
                    self.encoder.settle(message.leases, message.code, message.buckets)
            await self._gone()
        elif kind == "drain":
            member = self.run.training.roster.membership.members[self.name]
            if member.standing is not Standing.DRAINING:
                await worker.link.send(encode(Drain("", 0.0)))
                await settle()
        elif self._at is None:
            ready = [lease for lease in self._leases.values() if lease.version == self._version]
            if ready:
                self._at, self._sent, self._void = self._leases.pop(ready[0].lease), 0, False
                self.encoder.begin()
        elif kind == "fail":
            self.said["failed"] += bool(self._sent)
            lease, self._at = self._at, None
            await worker.link.send(encode(Failed(lease.lease, lease.start, "it broke", "")))
            await settle()
        else:
            await self.go_on(self._at, worker)

    async def go_on(self, lease: Lease, worker: Scripted) -> None:
        """The next bucket of the lease under way, or its end."""
        if self._sent == len(self._sizes):
            self._at = None
            losses = tuple(1.0 for _ in lease.samples)
            await worker.link.send(encode(Done(lease.lease, losses, (), (), (), (), 0, 0.01, 0.0)))
            await settle()
            return
        bucket = self._sent
        leaves = range(lease.start, lease.start + len(lease.samples))
        values = sum((gradient(lease.step, leaf, bucket, self._sizes[bucket]) for leaf in leaves), torch.zeros(()))
        vector = ResultVector(self._layout)
        vector.buckets[bucket].copy_(values)
        coded = self.encoder.encode(lease.lease, bucket, vector)
        self._sent += 1
        if not self._void:
            await worker.link.send(encode(Result(lease.lease, bucket), coded.buffers))
            await settle()

    def left_out(self, number: int) -> Tensor:
        """The residual of a bucket."""
        assert self.encoder.feedback is not None
        residual = self.encoder.feedback.residual(number)
        return torch.zeros(self._sizes[number]) if residual is None else residual


class LossyIsland(Lossy):
    """Two ranks, each with residuals of its own part, which outlive its links as on a disk. It is never cut off: what
    it had left out would be lost with it."""

    def __init__(self, run: Run, name: str, said: dict[str, int]) -> None:
        super().__init__(run, name, said)
        self._ranks: list[Scripted] = []
        self._encoders: list[ResultEncoder] = []

    async def join(self) -> None:
        self._ranks = await self.run.island(self.name)
        self.worker = self._ranks[0]
        self._seen, self._version, self._leases = 0, -1, {}
        self._at, self._sent, self._void = None, 0, False
        self._heard = [0] * len(self._ranks)
        if not self._encoders:
            for rank in self._ranks:
                assert rank.shard is not None
                self._encoders.append(ResultEncoder(self._layout, codec(CODEC), feedback=True, shard=rank.shard))
            self.encoder = self._encoders[0]

    async def act(self, kind: str) -> None:
        await super().act("go" if kind == "cut" else kind)

    async def listen(self) -> None:
        for number, rank in enumerate(self._ranks[1:], 1):
            for message in rank.seen[self._heard[number] :]:
                if isinstance(message, Verdict):
                    self._encoders[number].settle(message.leases, message.code, message.buckets)
            self._heard[number] = len(rank.seen)
        await super().listen()

    async def _gone(self) -> None:
        assert not any(encoder.awaited for encoder in self._encoders)
        for rank in self._ranks[1:]:
            rank.link.abort()
        await super()._gone()

    async def go_on(self, lease: Lease, worker: Scripted) -> None:
        if self._sent == len(self._sizes):
            for rank in self._ranks[1:]:
                await rank.link.send(encode(Done(lease.lease, (), (), (), (), (), 0, 0.01, 0.0)))
            await super().go_on(lease, worker)
            return
        bucket = self._layout.result_buckets[self._sent]
        leaves = range(lease.start, lease.start + len(lease.samples))
        values = sum((gradient(lease.step, leaf, self._sent, bucket.numel) for leaf in leaves), torch.zeros(()))
        for rank, encoder in zip(self._ranks, self._encoders, strict=True):
            assert rank.shard is not None
            vector = ResultVector(rank.shard.own)
            pieces = [
                values[begin - bucket.offset : end - bucket.offset] for _, begin, end in rank.shard.pieces(bucket)
            ]
            vector.buckets[self._sent].copy_(torch.cat(pieces))
            coded = encoder.encode(lease.lease, self._sent, vector)
            if not self._void:
                await rank.link.send(encode(Result(lease.lease, self._sent), coded.buffers))
                await settle()
        self._sent += 1

    def left_out(self, number: int) -> Tensor:
        bucket = self._layout.result_buckets[number]
        found = torch.zeros(bucket.numel)
        for rank, encoder in zip(self._ranks, self._encoders, strict=True):
            assert rank.shard is not None
            assert encoder.feedback is not None
            residual = encoder.feedback.residual(number)
            if residual is not None:
                runs = rank.shard.pieces(bucket)
                for (_, begin, end), piece in zip(runs, residual.split([e - b for _, b, e in runs]), strict=True):
                    found[begin - bucket.offset : end - bucket.offset] = piece
        return found


async def run_to_the_end(run: Run, chance: random.Random, said: dict[str, int]) -> list[Lossy]:
    workers = [*(Lossy(run, name, said) for name in ("one", "two", "three")), LossyIsland(run, "island", said)]
    kinds = ["go"] * 30 + ["time", "time", "fail", "cut", "drain"]
    for worker in workers:
        await worker.join()
    while run.training.version < STEPS:
        kind = chance.choice(kinds)
        if kind == "time":
            await run.pass_time(chance.choice([0.1, 1.0, 8.0]))
        else:
            await chance.choice(workers).act(kind)
        run.training.ledger.validate()
    for worker in workers:
        if worker.worker is None or worker.worker.ended():
            await worker.join()
        while worker.worker is not None and worker._at is not None:  # part of it may have counted: it is told what
            await worker.go_on(worker._at, worker.worker)
        await settle()
        await worker.listen()
        assert not worker.encoder.awaited
    return workers


@pytest.mark.parametrize(("seed", "judged"), [(0, False), (1, True)], ids=["as they come", "judged"])
async def test_nothing_is_lost_and_nothing_counts_twice(seed: int, judged: bool) -> None:
    said: dict[str, int] = dict.fromkeys(["partly", "revoked", "cut", "failed", "drained", *VerdictCode.__members__], 0)
    gate = {"norm_gate": 6.0} if judged else {}
    async with scripted(
        update=UpdateConfig(codec=CODEC), max_leaf_failures=10_000, silence_s=1e6,
        pacing=PacingConfig(leases_ahead=2, target_lease_s=0.0, min_lease_s=0.0, min_deadline_s=5.0), **gate,
    ) as run:  # fmt: skip
        workers = await run_to_the_end(run, random.Random(seed), said)
        layout, state = run.prepared.spec.layout, run.prepared.spec.state
        before = dict(zip((entry.name for entry in layout.entries), run.start, strict=True))
        start = type(state)(layout)
        for entry, view in zip(layout.entries, start.views, strict=True):
            view.copy_(before[entry.name])
        for number, bucket in enumerate(layout.result_buckets):
            applied = (start.bucket(bucket) - state.bucket(bucket)) * LEAVES
            left_out = sum((worker.left_out(number) for worker in workers), torch.zeros_like(applied))
            exact = sum(gradient(s, leaf, number, bucket.numel) for s in range(STEPS) for leaf in range(LEAVES))
            torch.testing.assert_close(applied + left_out, exact, rtol=1e-4, atol=1e-3)
    assert said["APPLIED"]
    assert said["partly"] + said["STALE"] + said["DUPLICATE"]  # leases that others had a hand in
    assert said["cut"] + said["revoked"]
