"""What the job's own code never finishes does not hold the end of a run for ever."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import settings
from torch import nn

from w5xde_async import Coordinator, CoordinatorConfig, Worker
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import Task
from w5xde_async.coordinator.run import shutdown
from w5xde_async.coordinator.sync import recomputation
from w5xde_async.coordinator.sync.recomputation import Recomputation
from w5xde_async.errors import DiskHangs
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.plan.tree import Block
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Event, RunFinished, Warned


async def test_a_stop_ends_a_last_evaluation_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "LEAST_S", 0.01)
    monkeypatch.setattr("w5xde_async.coordinator.service.deadline_s", lambda *_: 0.05)
    hangs, let_go, said = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def evaluate(model: nn.Module) -> dict[str, float]:
        loop.call_soon_threadsafe(hangs.set)
        let_go.wait(60)
        return {}

    job = replace(jobs.mlp_adamw(), evaluate=evaluate, evaluate_every=1 << 30, max_steps=1)
    try:
        async with Coordinator(job, config=CoordinatorConfig(host="127.0.0.1", port=0)) as coordinator:
            coordinator.bus.subscribe(lambda event: said.append(event) if isinstance(event, Warned) else None)
            working = asyncio.create_task(Worker(coordinator.address, job=job).run())
            await hangs.wait()
            coordinator.request_stop("Ctrl-C")
            with pytest.raises(DiskHangs, match="evaluation"):
                await coordinator.wait()
            await working
    finally:
        let_go.set()
    assert any("the last evaluation" in event.text for event in said)


@pytest.mark.parametrize("hanging", ["step", "state_dict"])
async def test_a_stop_ends_an_optimizer_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    """Its thread is left to itself, and it is named, not the disk. Nothing that it may have half done is saved."""
    monkeypatch.setattr(shutdown, "LEAST_S", 0.01)
    monkeypatch.setattr("w5xde_async.coordinator.service.LEAST_S", 0.01)
    monkeypatch.setattr("w5xde_async.coordinator.service.deadline_s", lambda *_: 0.05)
    hangs, let_go, events = asyncio.Event(), threading.Event(), list[Event]()
    loop = asyncio.get_running_loop()

    class Hanging(torch.optim.SGD):
        begun = False

        def hang(self) -> None:
            loop.call_soon_threadsafe(hangs.set)
            let_go.wait(60)

        def step(self, closure: Any = None) -> None:
            Hanging.begun = True
            if hanging == "step":
                self.hang()
            super().step(closure)

        def state_dict(self) -> Any:
            if Hanging.begun:
                self.hang()
            return super().state_dict()

    job = replace(jobs.mlp_adamw(), optimizer=lambda model: Hanging(model.parameters(), 0.1), max_steps=1000)
    config = settings(checkpoint_every=1, grace_s=0.05, heartbeat_s=0.05)
    try:
        async with Coordinator(job, run_dir=tmp_path / "run", config=config, callbacks=[events.append]) as coordinator:
            working = asyncio.create_task(Worker(coordinator.address, job=job).run())
            await hangs.wait()
            coordinator.request_stop("Ctrl-C")
            with pytest.raises(DiskHangs, match=r"^the job: its optimizer or scheduler \(step or state_dict\) did not"):
                await asyncio.wait_for(coordinator.wait(), 30)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    finally:
        let_go.set()
    (end,) = [event for event in events if isinstance(event, RunFinished)]
    assert (end.outcome, end.model_path) == ("stopped", "")
    assert not await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").steps)


class _Loader:
    async def wait(self, *_: Any) -> Any:
        class Data:
            samples, structure, packed, buffers = (1,), b"", False, ()

        return Data


@pytest.mark.parametrize("how", ["it takes too long", "the run ends", "cancelled"])
async def test_a_recomputation_that_hangs_is_left_to_itself(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    begun, let_go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Hangs(Recomputation):
        def _compute(self, task: Any, splits: int) -> Any:
            loop.call_soon_threadsafe(begun.set)
            let_go.wait(60)
            raise ValueError("nobody hears this")

    class Rule:
        loss_scale = 1.0

    class Plan:
        step = 0

    monkeypatch.setattr(recomputation, "_LONGEST_S", 0.01 if how == "it takes too long" else 30.0)
    anything: Any = None
    loader: Any = _Loader()
    rule: Any = Rule()
    plan: Any = Plan()
    judge = Hangs(anything, loader, anything, rule)
    judging = asyncio.create_task(judge.recompute(plan, Block(0, 1)))
    has_begun = asyncio.ensure_future(begun.wait())
    await asyncio.wait([has_begun, judging], timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert has_begun.done() or judging.result() is None
    if how == "the run ends":
        judge.give_up()
    elif how == "cancelled":
        judging.cancel()
    done, _ = await asyncio.wait([judging], timeout=10)
    let_go.set()
    assert done
    assert judging.cancelled() if how == "cancelled" else judging.result() is None


async def test_a_recomputation_whose_data_does_not_come_is_given_up_with_the_run() -> None:
    asked = asyncio.Event()

    class Hangs:
        async def wait(self, *_: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    anything: Any = None
    loader: Any = Hangs()
    plan: Any = SimpleNamespace(step=0)
    judge = Recomputation(anything, loader, anything, anything)
    judging = asyncio.create_task(judge.recompute(plan, Block(0, 1)))
    await asked.wait()
    assert not judge.given_up
    judge.give_up()
    assert await asyncio.wait_for(judging, 10.0) is None
    assert judge.given_up


async def test_a_recomputation_has_the_threads_that_it_is_told() -> None:
    seen: list[int] = []
    job = jobs.mlp_sgd()
    loss = job.loss
    assert loss is not None

    def step(model: nn.Module, batch: Any) -> Any:
        seen.append(torch.get_num_threads())
        return loss(model(batch[0]), batch[1])

    layout = Layout.of(job.model())
    state, rule, x, y = FlatState(layout), cast(Any, SimpleNamespace(layout=layout)), *job.dataset[:4]
    judge = Recomputation(replace(job, loss=None, step=step), cast(Any, None), state, rule)
    structure, tensors = flatten([x, y])
    task = Task(
        step=0, start=0, samples=(4,), loss_scale=1.0, structure=structure, packed=False, tensors=tensors
    )  # fmt: skip

    def computed(threads: int) -> int:
        judge.threads = threads
        judge._compute(task, 0)
        return torch.get_num_threads()

    before = await asyncio.to_thread(torch.get_num_threads)
    for threads in (0, before + 1):
        assert await asyncio.to_thread(computed, threads) == before
    assert seen == [before, before + 1]
