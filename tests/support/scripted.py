"""A real ``SyncTraining`` whose clock stands until a test moves it, and workers that do what a test tells them, frame
by frame. The model's gradient is one for every parameter and sample: each step lowers every parameter by exactly one
where each leaf was applied once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from msgspec import structs
from tests.support.memory_links import memory_pair
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.spec import Prepared
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.coordinator.training import RunContext
from w5xde_async.data.loader import Loader
from w5xde_async.errors import LinkLost
from w5xde_async.hub.members.roster import Greeting
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.members.sharing import SharedResults, witness
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.shard import Run as Run_
from w5xde_async.params.shard import Shard
from w5xde_async.params.slots import SHARED_SLOTS, slot_bytes, slots_in
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.segments import Segment, unsupported
from w5xde_async.telemetry.events import Bus, Event
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import (
    Bye,
    Done,
    Heartbeat,
    Lease,
    Message,
    Params,
    Ready,
    Result,
    Revoke,
    Verdict,
    Welcome,
)
from w5xde_async.worker.connection.handshake import join

_M = TypeVar("_M", bound=Message)

LEAVES = 4
PATIENCE_S = 50.0  # for what threads do: the machine may be busy
_NONCE = b"a link's own nonce, of 32 bytes!"

#: Ways by which results come, for a fixture that sets ``Run.shares`` where it is given "memory".
WAYS = ("bytes", pytest.param("memory", marks=pytest.mark.skipif(unsupported() != "", reason=unsupported())))


def job() -> Job:
    """Two buckets, four leaves a step, plain SGD with a learning rate of one."""
    data = torch.arange(8.0).reshape(8, 1)
    return Job(
        model=lambda: nn.Linear(1, 20_000),
        dataset=TensorDataset(data, data),
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        batch_size=LEAVES,
        microbatch_size=1,
        max_steps=6,
    )


async def settle(rounds: int = 40) -> None:
    """Let everything run that can."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def said(run: Run) -> Ready:
    """What a worker says of itself."""
    return Ready(run.prepared.spec.layout.fingerprint, "cpu", "test", 1, "0")


def ready(run: Run) -> list[Any]:
    """The frame with which a worker asks for work."""
    return encode(said(run))


class _Readable(Session):
    """Its worker's id is its name, which a test can read, in the place of a hash."""

    @property
    def worker_id(self) -> str:
        return self.name

    @worker_id.setter
    def worker_id(self, value: str) -> None:
        pass


class Run:
    """The coordinator's side. ``now`` is its clock."""

    #: Whether results lie in memory that the coordinator reads. A worker then writes there again as soon as it is told
    #: what became of them: what is still read of it is wrong from then on.
    shares = False

    def __init__(self, *, term: int = 1, recomputation: Any = None, **config: Any) -> None:
        self.now = 1000.0
        self.events: list[Event] = []
        bus = Bus()
        bus.subscribe(self.events.append)
        default = PacingConfig(leases_ahead=1, target_lease_s=0.0, min_lease_s=0.0, whole_step_s=0.0)
        pacing = config.pop("pacing", default)
        # Results count as they come, unless a test asks for judgement: its scripts know who gets which lease.
        config = {"norm_gate": 0.0, "audit_fraction": 0.0, **config}
        self.config = CoordinatorConfig(bucket_bytes=64 << 10, pacing=pacing, **config)
        self.prepared: Prepared = prepare(job(), self.config, None, lambda: "0" * 16)
        prepared, made = self.prepared, job()
        self.start = [view.clone() for view in prepared.spec.state.views]
        welcome = Welcome(
            prepared.spec.run_id, "scripted", term, made.seed, made.precision, made.microbatch_samples, 1,
            self.config.bucket_bytes,
            prepared.spec.layout.fingerprint, self.config.heartbeat_s, self.config.silence_s,
        )  # fmt: skip
        loader = Loader(
            made, prepared.spec.sampler, on_ready=lambda: self.training.data_came(),
            on_error=lambda error: self.training.lifecycle.fail(error),
        )  # fmt: skip
        context = RunContext(
            layout=prepared.spec.layout, state=prepared.spec.state, sampler=prepared.spec.sampler,
            loader=loader, config=self.config, checks=self.config, bus=bus, clock=lambda: self.now, total_steps=6,
        )  # fmt: skip
        greeting = Greeting(message=welcome, layout=prepared.spec.layout)
        self.training = SyncTraining(
            context, greeting, prepared.strategy.rule, recomputation=recomputation,
        )  # fmt: skip
        self._tasks: list[asyncio.Task[Any]] = []
        self._incarnation = 0
        self._sharing: list[Scripted] = []
        if self.shares:
            self.parameters = Segment("parameters", FlatState.nbytes(prepared.spec.layout), bytes(range(32)))
            verdicts = self.training.verdicts
            verdicts._post = partial(self._tell, verdicts._post)

    def _tell(self, post: Callable[[str, Verdict], None], worker: str, verdict: Verdict) -> None:
        for lease in verdict.leases:
            for one in self._sharing:
                if self.training.roster.sessions.get(worker) is one.session:  # of a link that ended it writes nothing
                    one.write_again(lease)
        post(worker, verdict)

    async def pass_time(self, seconds: float) -> None:
        """Move the clock, tick, let everything react."""
        self.now += seconds
        self.training.tick(self.now)
        await settle()

    def task(self, coroutine: Any) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(coroutine))
        return self._tasks[-1]

    async def island(self, worker_id: str, ranks: int = 2, **says: Any) -> list[Scripted]:
        """One worker of several ranks; each has every ``ranks``-th piece of 64 values of each bucket, and needs the
        data of its block of the leaves. ``says``: fields of READY."""
        layout = self.prepared.spec.layout
        dealt: list[list[Run_]] = [[] for _ in range(ranks)]
        for group in layout.groups:
            for number, begin in enumerate(range(0, group.numel, 64)):
                dealt[number % ranks].append(Run_(group.index, begin, min(begin + 64, group.numel)))
        made = []
        for rank, runs in enumerate(dealt):
            made.append(await self.worker(worker_id, ready=False, rank=rank, ranks=ranks))
            made[-1].shard, made[-1].says = Shard.of(layout, runs), says
        for one in made:
            await one.ready()
        return made

    async def worker(
        self, worker_id: str, *, ready: bool = True, limit_bytes: int = 1 << 20, rank: int = 0, ranks: int = 1
    ) -> Scripted:
        """A worker that has joined (``ready``) or has only been let in."""
        near, far = memory_pair(limit_bytes=limit_bytes)
        self._incarnation += 1
        session = _Readable(
            near,
            self.training.roster,
            self.training,
            token="",
            handshake_s=10.0,
            incarnation=self._incarnation,
            clock=lambda: self.now,
        )
        made = Scripted(self, far, session, worker_id, self.task(session.run()))
        await join(far, key=worker_id, name=worker_id, token="", terms={}, rank=rank, ranks=ranks)
        if self.shares and ranks == 1:
            self._sharing.append(made)
            await asyncio.to_thread(made.share)
        if ready:
            await made.ready()
        return made

    async def commits(self, version: int) -> None:
        """Wait for a commit, in rounds of the loop and of the aggregator's thread."""
        await self.until(lambda: self.training.version >= version)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for what a thread's work brings about."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - a thread's work has no event here
                await asyncio.sleep(0.001)

    def applied(self) -> set[float]:
        """How often each parameter was lowered by one."""
        return {
            round(value, 6)
            for view, start in zip(self.prepared.spec.state.views, self.start, strict=True)
            for value in (start - view).flatten().tolist()
        }

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.training.aclose()
        if self.shares:
            for one in self._sharing:
                one.unshare()
            self.parameters.close()


class Scripted:
    """The worker's side."""

    def __init__(self, run: Run, link: Any, session: Session, worker_id: str, serving: asyncio.Task[None]) -> None:
        self.run, self.link, self.session, self.worker_id = run, link, session, worker_id
        self.serving = serving  # the coordinator's task for it
        self.seen: list[Message] = []
        self.shard: Shard | None = None  # of an island's rank
        self.says: dict[str, Any] = {}  # and what else it says of itself
        self.shared: list[ResultVector] = []  # where its results lie
        self.sends_bytes = False  # from now on, whatever memory it shares
        # What it makes of a sample, and what it says of a block that is done.
        self.value, self.loss, self.splits, self.untouched = 1.0, 1.0, 0, tuple[int, ...]()
        self._segment: Segment | None = None
        self._lent: dict[int, int] = {}  # lease -> which of them the coordinator may be reading

    def share(self) -> None:
        """Have memory for its results together with the coordinator, on this link."""
        layout = self.run.prepared.spec.layout
        made = Segment("results", SHARED_SLOTS * slot_bytes(layout), witness(self.run.parameters.secret, _NONCE))
        self._segment, self.shared = made, slots_in(layout, made.payload, SHARED_SLOTS)
        self.session.shared = SharedResults(self.run.parameters, made.told, _NONCE, layout)

    def unshare(self) -> None:
        """As when its process has ended: that memory is the coordinator's alone, if anybody's."""
        if self._segment is not None:
            self._segment.close()
        self._segment, self.shared = None, []

    def slot(self, lease: Lease) -> int:
        """Which of ``shared`` holds a lease's results; one that is free where none does."""
        free = next(slot for slot in range(SHARED_SLOTS) if slot not in self._lent.values())
        return self._lent.setdefault(lease.lease, free)

    def write_again(self, lease: int) -> None:
        """It has been told what became of a lease."""
        slot = self._lent.pop(lease, None)
        if slot is not None and self.shared:
            self.shared[slot].memory.fill_(0xFF)  # not a number

    async def ready(self) -> None:
        if self.shard is None:
            await self.link.send(ready(self.run))
        else:
            fingerprint, shard = self.run.prepared.spec.layout.fingerprint, self.shard.packed
            told = Ready(fingerprint, "cpu", "test", 1, "0", shape="test=2", shard=shard)
            await self.link.send(encode(structs.replace(told, **self.says)))
        self.run.task(self._read())
        await settle()

    async def _read(self) -> None:
        def accept(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
            return [memoryview(bytearray(spec.nbytes)) for spec in specs]

        while True:
            try:
                self.seen.append((await self.link.recv(accept)).message)
            except LinkLost:
                return

    def all(self, kind: type[_M]) -> list[_M]:
        return [message for message in self.seen if isinstance(message, kind)]

    async def lease(self, number: int = 0) -> Lease:
        """Its ``number``-th lease."""
        await self.run.until(lambda: len(self.all(Lease)) > number)
        return self.all(Lease)[number]

    async def version(self, version: int) -> None:
        await self.run.until(lambda: any(params.version >= version for params in self.all(Params)))

    def result(self, lease: Lease, bucket: int, value: float = 1.0, *, as_bytes: bool = False) -> list[Any]:
        """The frame of a bucket: ``value`` everywhere, for each sample. ``as_bytes``: as ``sends_bytes``, this one."""
        layout = self.run.prepared.spec.layout
        if self.shared and not (as_bytes or self.sends_bytes):
            slot = self.slot(lease)
            self.shared[slot].buckets[bucket].fill_(value * sum(lease.samples))
            return encode(Result(lease.lease, bucket, slot + 1))
        numel = layout.result_buckets[bucket].numel
        if self.shard is not None:
            pieces = []
            for run in self.shard.pieces(layout.result_buckets[bucket]):
                piece = torch.full((run.end - run.begin,), float(sum(lease.samples))).numpy().tobytes()
                pieces.append((BufferSpec("", "float32", (run.end - run.begin,), "raw", len(piece)), piece))
            return encode(Result(lease.lease, bucket), pieces)
        data = torch.full((numel,), value * sum(lease.samples)).numpy().tobytes()
        return encode(Result(lease.lease, bucket), [(BufferSpec("", "float32", (numel,), "raw", len(data)), data)])

    async def send(self, lease: Lease, *buckets: int, value: float = 1.0, as_bytes: bool = False) -> None:
        for bucket in buckets:
            await self.link.send(self.result(lease, bucket, value, as_bytes=as_bytes))
        await settle()

    async def done(self, lease: Lease, absent: tuple[int, ...] = (), *, compute_s: float = 0.01) -> None:
        losses = tuple(self.loss for _ in lease.samples)
        said = Done(lease.lease, losses, (), (), self.untouched, absent, self.splits, compute_s, 0.0)
        await self.link.send(encode(said))
        await settle()

    async def compute(self, lease: Lease, *, compute_s: float = 0.01) -> None:
        """The whole of a lease."""
        await self.send(lease, *range(len(self.run.prepared.spec.layout.result_buckets)), value=self.value)
        await self.done(lease, compute_s=compute_s)

    async def beat(self) -> None:
        await self.link.send(encode(Heartbeat("here")))
        await settle()

    def ended(self) -> bool:
        return self.session.ended.is_set()

    def revoked(self) -> list[int]:
        return [message.lease for message in self.all(Revoke)]

    def said_goodbye(self) -> bool:
        return bool(self.all(Bye))


@asynccontextmanager
async def scripted(**config: Any) -> AsyncIterator[Run]:
    run = Run(**config)
    training = run.task(run.training.run())
    await settle()
    try:
        yield run
    finally:
        training.cancel()
        await run.aclose()
