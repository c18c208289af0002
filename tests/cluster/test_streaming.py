"""Streaming with one worker far behind: rounds stay open, and what the other one made counts once in each fragment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from w5xde_async.compute.block import ComputedBlock
from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.training import NonFinite
from w5xde_async.job import Job
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.delayed import DelayedNesterovRule
from w5xde_async.updates.outer import Contribution, OuterRule
from w5xde_async.worker.executors.replicas import SteppingReplica
from w5xde_async.worker.service import Departure, Worker

STEPS, BATCH, RATE = 24, 4, 0.5
# No momentum, and nothing of the local values is kept: a Delta is as long as its steps.
STREAMING = UpdateConfig(
    rule="streaming", fragments=2, inner_steps=4, quorum=1.0, mixing=0.0, outer_lr=1.0, outer_momentum=0.0
)  # fmt: skip


class Constant(nn.Module):
    """Its gradient is 1, whatever the data; two fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(20_000))
        self.second = nn.Parameter(torch.zeros(20_000))

    def forward(self, x: Tensor) -> Tensor:
        return self.first.sum() + self.second.sum()


class Slow(Constant):
    """The same, of a worker that hangs."""


def job(model: type[nn.Module] = Constant, factor: float = 1.0) -> Job:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output * factor

    return Job(
        model=model, dataset=TensorDataset(torch.zeros(STEPS * BATCH, 1), torch.zeros(STEPS * BATCH)), loss=loss,
        batch_size=BATCH, microbatch_size=BATCH, max_steps=STEPS,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
    )  # fmt: skip


class Scene:
    """A coordinator, a worker that goes on and one that hangs in its first step until ``release``."""

    def __init__(self, coordinator: Coordinator, told: list[tuple[int, float, int]], release: threading.Event) -> None:
        self.coordinator, self.told, self.release = coordinator, told, release
        self.fast = Worker(coordinator.address, job=job(), config=QUICK_WORKER)
        slow = Worker(coordinator.address, job=job(Slow), config=QUICK_WORKER)
        self.running = [asyncio.create_task(worker.run()) for worker in (self.fast, slow)]
        training = coordinator._training
        assert isinstance(training, OuterTraining)
        self.training = training

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110 - a count has no event, and threads want to run
            await asyncio.sleep(0.001)

    def idle(self) -> bool:
        """The worker that goes on has no more to do, and all that it sent is judged."""
        worker, ledger, turns = self.fast.worker_id, self.training.ledger, self.training.local_steps
        owing = any(turns.owes(worker, fragment) for fragment in (0, 1)) or turns.fragments_asked(worker)
        return ledger.exhausted and not ledger.num_held(worker) and not owing

    def steps(self, fragment: int) -> list[float]:
        """How many steps each Delta of a fragment was long."""
        return [steps for at, steps, _ in self.told if at == fragment]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float, int]]:
    """Fragment, length in steps and samples of each contribution."""
    seen: list[tuple[int, float, int]] = []
    offer = OuterRule.offer

    def listen(rule: OuterRule, given: Contribution) -> Any:
        values = {float(x) for b, here in enumerate(given.present) if here for x in given.vector.buckets[b]}
        seen.append((given.fragment, max(values) / RATE, given.samples))
        return offer(rule, given)

    monkeypatch.setattr(OuterRule, "offer", listen)
    return seen


@asynccontextmanager
async def scene(told: list[tuple[int, float, int]]) -> AsyncIterator[Scene]:
    torch.set_num_threads(1)
    release, compute = threading.Event(), SteppingReplica.compute

    def hang(replica: SteppingReplica, *arguments: Any) -> ComputedBlock:
        if isinstance(replica._engine.model, Slow):
            release.wait(60)
        return compute(replica, *arguments)

    config = settings(update=STREAMING, min_workers=2, norm_gate=0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SteppingReplica, "compute", hang)
        async with Coordinator(job(), config=config) as coordinator:
            made = Scene(coordinator, told, release)
            try:
                yield made
            finally:
                release.set()
                for task in made.running:
                    task.cancel()
                await asyncio.gather(*made.running, return_exceptions=True)


async def test_the_data_ends_in_an_open_round(told: list[tuple[int, float, int]]) -> None:
    async with scene(told) as made:
        await made.until(lambda: len(told) >= 2 and made.idle())
        own = len(made.training.rule.done)
        assert own > 16  # the other one holds the rest
        for fragment in (0, 1):
            assert sum(made.steps(fragment)) == own  # nothing twice, nothing lost
            assert len(made.steps(fragment)) == 2  # once in its turn, and at the end
        made.release.set()
        result = await made.coordinator.wait()
        assert (result.outcome, made.training.phase.samples_applied) == ("finished", STEPS * BATCH)
        made.training.ledger.validate()
        assert await made.running[0] is Departure.FINISHED
    assert all(steps <= samples / BATCH for _, steps, samples in told)


async def test_a_worker_drains_in_an_open_round(told: list[tuple[int, float, int]]) -> None:
    async with scene(told) as made:
        await made.until(lambda: len(told) >= 2)
        made.fast.drain("test")
        assert await made.running[0] is Departure.DRAINED  # it waits for nobody
        own = sum(made.steps(0))
        assert own == sum(made.steps(1)) == len(made.training.rule.done) > 0
        made.release.set()
        result = await made.coordinator.wait()
        assert (result.outcome, made.training.phase.samples_applied) == ("finished", STEPS * BATCH)
        made.training.ledger.validate()
    assert all(steps <= samples / BATCH for _, steps, samples in told)


async def test_who_is_waited_for_vanishes_in_an_open_round(told: list[tuple[int, float, int]]) -> None:
    async with scene(told) as made:
        await made.until(lambda: len(told) >= 2 and made.idle())
        made.running[1].cancel()
        made.release.set()
        result = await made.coordinator.wait()
        assert (result.outcome, made.training.phase.samples_applied) == ("finished", STEPS * BATCH)
        made.training.ledger.validate()
    assert all(steps <= samples / BATCH for _, steps, samples in told)


async def test_a_delta_counts_as_one_of_the_workers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--update async-local`` without any number: with N 1 each of them would count whole."""
    torch.set_num_threads(1)
    seen, offer = [], DelayedNesterovRule.offer

    def listen(rule: DelayedNesterovRule, delta: Tensor, **of: Any) -> Any:
        before = float(rule.parameters[0])
        length, outcome = float(delta[0]), offer(rule, delta, **of)
        seen.append((of["workers"], (before - float(rule.parameters[0])) / length))
        return outcome

    monkeypatch.setattr(DelayedNesterovRule, "offer", listen)
    update = UpdateConfig(rule="async-local", inner_steps=2, outer_lr=1.0, outer_momentum=0.0)
    async with Coordinator(job(), config=settings(update=update, norm_gate=0.0)) as coordinator:
        assert coordinator._training is not None
        workers = [Worker(coordinator.address, job=job(), config=QUICK_WORKER) for _ in range(2)]
        held = asyncio.Event()  # the first step waits for both, which nobody has asked for
        schedule = coordinator._training.schedule

        def wait(only: str | None = None) -> None:
            assert coordinator._training is not None
            if len(coordinator._training.roster.sessions) == 2 or held.is_set():
                held.set()
                schedule(only)

        monkeypatch.setattr(coordinator._training, "schedule", wait)
        running = [asyncio.create_task(worker.run()) for worker in workers]
        assert (await coordinator.wait()).outcome == "finished"
        await asyncio.gather(*running)
    assert seen[0] == (2, pytest.approx(0.5))


@pytest.mark.parametrize("rule", ["local", "streaming", "async-local"])
async def test_steps_that_are_not_finite_end_the_run(rule: str) -> None:
    torch.set_num_threads(1)
    config = settings(update=UpdateConfig(rule=rule, inner_steps=2, fragments=2), max_nonfinite_steps=5)
    async with Coordinator(job(factor=float("nan")), config=config) as coordinator:
        working = asyncio.create_task(
            Worker(coordinator.address, job=job(factor=float("nan")), config=QUICK_WORKER).run()
        )
        try:
            with pytest.raises(NonFinite, match="5 steps in a row"):
                await coordinator.wait()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


@pytest.mark.parametrize("inner_steps", [4, 300])
async def test_the_last_evaluation_is_of_the_finished_model(tmp_path: Path, inner_steps: int) -> None:
    """All fragments are committed once more at the end of the data, one after the other."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {f"sum {name}": float(tensor.detach().double().sum()) for name, tensor in model.named_parameters()}

    made = replace(job(), evaluate=evaluate)
    result = await train(
        lambda: made, run_dir=tmp_path / "run", update=replace(STREAMING, inner_steps=inner_steps), evaluate=True
    )
    assert result.model_path is not None
    weights = safetensors.torch.load_file(result.model_path)
    assert result.metrics == {f"sum {name}": float(tensor.double().sum()) for name, tensor in weights.items()}


async def test_a_finished_run_whose_scheduler_knows_no_further_step_is_complete(tmp_path: Path) -> None:
    rates = [0.1] * STEPS
    made = replace(job(), scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: rates[step]))
    update = UpdateConfig(rule="local", inner_steps=4)
    for _ in range(2):
        result = await train(lambda: made, run_dir=tmp_path / "run", update=update)
        assert (result.outcome, result.step) == ("finished", STEPS)
