"""A worker that hangs in its first lease holds up the run's end for no more than a few times what the others take.

The coordinator is real, its clock is moved by the test. One worker answers at once; the other says that it lives and
never answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tests.support.scripted import LEAVES, Run, Scripted, job, settle

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.training import RunContext
from w5xde_async.data.loader import Loader
from w5xde_async.hub.members.roster import Greeting
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.events import Bus
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import (
    Done,
    Failed,
    Lease,
    Params,
    Result,
    Revoke,
    Submit,
    Verdict,
    VerdictCode,
    Welcome,
)

RULES = {
    "async": UpdateConfig(rule="async", downlink="int8"),
    "async-local": UpdateConfig(rule="async-local", inner_steps=3, downlink="int8"),
    "local": UpdateConfig(rule="local", inner_steps=3),
    "streaming": UpdateConfig(rule="streaming", inner_steps=4, fragments=2),
}
TAKES_S = 0.5  # a step, on the worker that does not hang
STEPS = 12


class RoundsRun(Run):
    """The coordinator's side under any rule but sync."""

    def __init__(self, update: UpdateConfig, *, steps: int = STEPS, **config: Any) -> None:
        self.now, self.events = 1000.0, []
        bus = Bus()
        bus.subscribe(self.events.append)
        self.config = CoordinatorConfig(
            bucket_bytes=64 << 10, pacing=config.pop("pacing", PacingConfig()), update=update,
            **{"norm_gate": 0.0, "audit_fraction": 0.0, "silence_s": 1e6, "join_s": 1e6, **config},
        )  # fmt: skip
        self.prepared = prepared = prepare(job(), self.config, None, lambda: "0" * 16)
        made, update = job(), prepared.strategy.update
        self.start = [view.clone() for view in prepared.spec.state.views]
        welcome = Welcome(
            prepared.spec.run_id, "scripted", 1, made.seed, made.precision, 1, 1, self.config.bucket_bytes,
            prepared.spec.layout.fingerprint, self.config.heartbeat_s, self.config.silence_s, update.rule, update.codec,
            update.downlink_codec.name, update.feedback,
        )  # fmt: skip
        assert isinstance(prepared.strategy.rule, OuterRule)
        inner = prepared.strategy.inner
        buffers = [(BufferSpec("inner", "uint8", (len(inner),), "raw", len(inner)), inner)] if inner else []
        loader = Loader(
            made, prepared.spec.sampler, on_ready=lambda: self.training.data_came(),
            on_error=lambda error: self.training.lifecycle.fail(error),
        )  # fmt: skip
        context = RunContext(
            layout=prepared.spec.layout, state=prepared.spec.state, sampler=prepared.spec.sampler,
            loader=loader, config=self.config, checks=self.config, bus=bus, clock=lambda: self.now, total_steps=steps,
        )  # fmt: skip
        greeting = Greeting(message=welcome, layout=prepared.spec.layout, buffers=buffers)
        self.training: Any = OuterTraining(
            context, greeting, prepared.strategy.rule, prepared.strategy.schedule,
        )  # fmt: skip
        self._tasks, self._incarnation = [], 0
        self.running = self.task(self.training.run())


@asynccontextmanager
async def rounds(update: UpdateConfig, **config: Any) -> AsyncIterator[RoundsRun]:
    run = RoundsRun(update, **config)
    await settle()
    try:
        yield run
    finally:
        await run.aclose()


class Quick:
    """Answers what a scripted worker is asked, in order, each lease after ``TAKES_S`` of the run's clock."""

    def __init__(self, worker: Scripted) -> None:
        self.worker, self._next, self._free_at = worker, 0, worker.run.now
        self.submits = True

    async def work(self) -> bool:
        """Answer the next message if there is one and its time has come."""
        worker = self.worker
        local = worker.run.config.update.local
        while self._next < len(worker.seen):
            message = worker.seen[self._next]
            if isinstance(message, Lease):
                if worker.ended() or worker.run.now < self._free_at + TAKES_S:
                    return False
                self._free_at = worker.run.now
                buckets = () if local else range(len(worker.run.prepared.spec.layout.result_buckets))
                await self._answer(message.lease, buckets, tuple(1.0 for _ in message.samples))
            elif isinstance(message, Submit) and not self.submits:
                return False
            elif isinstance(message, Submit):
                await self._answer(message.lease, message.buckets, ())
            elif isinstance(message, Revoke):
                raise AssertionError(f"the worker that works was told {message}")
            self._next += 1
        self._free_at = max(self._free_at, worker.run.now - TAKES_S)
        return True

    async def _answer(self, lease: int, buckets: Any, losses: tuple[float, ...]) -> None:
        worker, layout = self.worker, self.worker.run.prepared.spec.layout
        for number in buckets:
            data = torch.full((layout.result_buckets[number].numel,), 1e-3).numpy().tobytes()
            spec = BufferSpec("", "float32", (layout.result_buckets[number].numel,), "raw", len(data))
            await worker.link.send(encode(Result(lease, number), [(spec, data)]))
        version = max((params.version for params in worker.all(Params)), default=0)
        await worker.link.send(encode(Done(lease, losses, (), (), (), (), 0, TAKES_S, 0.0, version)))


async def finish(run: RoundsRun, *workers: Quick, most_s: float) -> float:
    """Let ``workers`` work to the run's end, or so long; how long it took on the run's clock."""
    began = run.now
    while not run.running.done() and run.now < began + most_s:
        await asyncio.gather(*(worker.work() for worker in workers))
        for _ in range(20):  # the loader's and the aggregator's threads have no event here
            await asyncio.sleep(0.0005)
        await run.pass_time(0.5)
    return run.now - began


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
async def test_a_worker_that_hangs_in_its_first_lease(update: UpdateConfig) -> None:
    async with rounds(update) as run:
        hung, quick = await run.worker("hung"), await run.worker("quick")
        await hung.lease()
        took_s = await finish(run, Quick(quick), most_s=200.0)
        assert run.running.done()
        await run.running
        assert run.training.progress == STEPS
        # Alone the other takes 6 s. A hung lease costs 8 times the pipeline of two leases, at most, and is done again.
        assert took_s <= STEPS * TAKES_S + 16 * TAKES_S + 5.0
        run.training.ledger.validate()
        assert hung.all(Revoke) or hung.ended()
        assert not quick.ended()
        assert quick.all(Verdict)


async def test_what_is_backed_up_counts_once() -> None:
    """A worker that is late with the last step is not cut off: its result is a duplicate, and it goes on."""
    async with rounds(UpdateConfig(rule="async", downlink="int8"), steps=1) as run:
        late, quick = await run.worker("late"), await run.worker("quick")
        lease = await late.lease()
        await settle()  # its time begins when the coordinator knows that it has left
        run.training.pacing.observe("quick", LEAVES, TAKES_S)
        await run.pass_time(TAKES_S)
        assert not quick.all(Lease)
        await run.pass_time(TAKES_S)
        backup = await quick.lease()
        assert (backup.step, run.training.phase.counts().backed_up) == (lease.step, 1)
        run.training.ledger.validate()
        await quick.compute(backup)
        await asyncio.wait_for(run.running, 5)
        assert late.revoked() == [lease.lease]
        assert run.training.roster.membership.members["late"].standing is Standing.LATE
        await late.compute(lease)
        assert [verdict.code for verdict in late.all(Verdict)] == [VerdictCode.DUPLICATE]
        assert run.training.roster.membership.members["late"].standing is Standing.READY
        assert run.applied() == {1.0}
        assert run.training.phase.counts().duplicate == 1


async def test_both_on_a_step_may_fail_or_go() -> None:
    """The step is leased to whoever is left, and done once."""
    async with rounds(UpdateConfig(rule="async", downlink="int8"), steps=1) as run:
        late, quick = await run.worker("late"), await run.worker("quick")
        await late.lease()
        run.training.pacing.observe("quick", LEAVES, TAKES_S)
        await run.pass_time(2 * TAKES_S)
        backup = await quick.lease()
        late.link.abort()
        await settle()
        assert run.training.ledger.num_open == 1
        await quick.link.send(encode(Failed(backup.lease, 0, "it broke", "")))
        await settle()
        again = await quick.lease(1)
        run.training.ledger.validate()
        await quick.compute(again)
        await asyncio.wait_for(run.running, 5)
        assert run.applied() == {1.0}


@pytest.mark.parametrize("rule", ["local", "streaming", "async-local"])
async def test_a_worker_that_hangs_in_its_submission(rule: str) -> None:
    """It has computed its steps and says that it lives, and what it was asked for never comes."""
    async with rounds(RULES[rule]) as run:
        hung, quick = await run.worker("hung"), await run.worker("quick")
        answering = Quick(hung)
        answering.submits = False
        await finish(run, Quick(quick), answering, most_s=200.0)
        await asyncio.wait_for(run.running, 1)
        assert hung.ended()
        assert run.training.progress == STEPS
        run.training.ledger.validate()
