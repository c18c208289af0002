"""A real training with as many members as a test likes, and no network: each is a session whose frames are kept as
messages, and which computes when it is told to. The clock stands until a test moves it; threads are called in place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any

import torch
from tests.support.counting import Name
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.run import make_training
from w5xde_async.coordinator.run.spec import Prepared
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.training import RunContext
from w5xde_async.data.loader import Loader
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Bus
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Done, Lease, Message, Ready, Result, Submit

__all__ = ["Fleet", "Member", "fleet"]


class InPlace(Executor):
    """Calls at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class _Outbox:
    """Everything leaves at once."""

    idle, lease_bytes, num_messages, sending_s, paced_bytes, paced_s = True, 0, 0, 0.0, 0, 0.0

    def post(self, chunks: Any, *, sent: Callable[[], None] | None = None, version: int = -1, lease: int = 0) -> None:
        if sent is not None:
            sent()

    def flush(self) -> None: ...

    def supersede(self, version: int) -> None: ...

    def withdraw(self, lease: int) -> bool:
        return False


class _Link:
    bytes_sent = bytes_received = 0
    figures = acked_bytes = sent_through = None
    certificate = b""
    encrypted = same_host = False

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def abort(self) -> None: ...

    def heard(self, beat_s: float, silence_s: float) -> bool:
        return False

    def send_now(self, chunks: list[Any]) -> None: ...


class Member(Session):
    """One worker. ``work`` is what it has been sent and has not answered."""

    def __init__(self, fleet: Fleet, number: int, compute_s: float) -> None:
        link: Any = _Link(f"10.0.{number >> 8}.{number & 255}:1")
        training = fleet.training
        super().__init__(link, training.roster, training, token="", handshake_s=10.0, incarnation=number + 1)
        self.outbox: Any = _Outbox()
        self.worker_id = self.name = Name(f"w{number:04}")
        self.fleet, self.compute_s = fleet, compute_s
        self.work: deque[Lease | Submit] = deque()

    def post(self, message: Message, buffers: Sequence[Any] = ()) -> None:
        if isinstance(message, Submit):
            self.work.append(message)

    def post_lease(self, lease: Lease, buffers: Sequence[Any]) -> None:
        self.work.append(lease)

    def due(self) -> Lease | Submit | None:
        """The first thing that it can compute now."""
        version = self.fleet.training.version
        return next((item for item in self.work if isinstance(item, Submit) or item.version <= version), None)

    def compute(self) -> None:
        """Answer the first thing that can be answered."""
        training, item = self.fleet.training, self.due()
        assert item is not None
        self.work.remove(item)
        layout, whole = training.context.layout, isinstance(item, Submit)
        samples = () if isinstance(item, Submit) else item.samples
        if whole or self.fleet.gradients:
            for number, bucket in enumerate(layout.result_buckets):
                nbytes = 4 * bucket.numel
                spec, result = BufferSpec("", "float32", (bucket.numel,), "raw", nbytes), Result(item.lease, number)
                view, authorized = training.place(self, result, spec)
                assert authorized
                if view is not None:
                    torch.frombuffer(view, dtype=torch.float32).fill_(1e-3 * len(samples))
                    self.receiving = item.lease
                    training.arrived(self, result)
                    self.receiving = None
        losses = tuple(1.0 for _ in samples)
        took = self.compute_s * len(samples)
        training.done(self, Done(item.lease, losses, (), (), (), (), 0, took, 0.0, version=training.version))


class Fleet:
    """The training and its members. ``now`` is its clock."""

    def __init__(self, leaves: int, config: CoordinatorConfig, samples: int, steps: int) -> None:
        self.now = 1000.0
        self.gradients = config.update.rule in ("sync", "async")
        data = torch.zeros(samples, 1)
        job = Job(
            model=lambda: nn.Linear(1, 2), dataset=TensorDataset(data, data), loss=nn.functional.mse_loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3), batch_size=leaves,
            microbatch_size=1, max_steps=steps, shuffle=False,
        )  # fmt: skip
        self.prepared: Prepared = prepare(job, config, None, lambda: "0" * 16)
        runtime = Runtime(clock=lambda: self.now, executor=lambda threads, name: InPlace())
        spec, strategy, _ = self.prepared
        loader = Loader(
            job, spec.steps, make_pool=runtime.executor, on_ready=lambda: self.training.data_came(),
            on_error=lambda error: self.training.lifecycle.fail(error),
        )  # fmt: skip
        context = RunContext(
            layout=spec.layout, state=spec.state, sampler=spec.sampler, loader=loader, config=config, checks=config,
            bus=Bus(), clock=runtime.clock, total_steps=spec.total_steps, executor=InPlace(),
        )  # fmt: skip
        self.training: Any = make_training(spec, strategy, context, "fleet")
        self.members: list[Member] = []
        self.running: asyncio.Task[None]

    def join(self, compute_s: float = 1.0, kind: type[Member] = Member) -> Member:
        """One more."""
        member = kind(self, len(self.members), compute_s)
        layout = self.prepared.spec.layout
        assert self.training.roster.admit(member) is None
        member.ready = Ready(layout.fingerprint, "cpu", "test", 1, "0")
        assert self.training.roster.joined(member, member.ready) is None
        self.members.append(member)
        return member

    def leave(self, member: Member) -> None:
        """Its link has ended."""
        self.members.remove(member)
        self.training.roster.left(member, "gone", clean=False)

    async def settle(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)

    async def step(self) -> None:
        """Everybody computes whatever it has until a version has come of it."""
        version = self.training.version
        for _ in range(10_000):
            if self.training.version != version:
                return
            if self.running.done():
                await self.running
            self.now += 1.0
            for member in self.members:
                if member.due() and self.training.version == version:
                    member.compute()
            await self.settle()
        raise AssertionError("the step does not end")


@asynccontextmanager
async def fleet(
    num: int, *, leaves: int, samples: int = 0, steps: int = 1 << 20, rule: str = "sync", kind: type[Member] = Member,
    **config: Any,
) -> AsyncIterator[Fleet]:  # fmt: skip
    """``num`` members and steps of ``leaves`` leaves of one sample. ``config``: of the coordinator."""
    chosen = {"max_workers": num, "norm_gate": 0.0, "audit_fraction": 0.0, "update": UpdateConfig(rule=rule), **config}
    made = Fleet(leaves, CoordinatorConfig(**chosen), samples or 4 * leaves, steps)
    made.running = running = asyncio.create_task(made.training.run())
    await made.settle()
    try:
        for number in range(num):
            made.join(1.0 + number % 3, kind)
        await made.settle()
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.training.aclose()
