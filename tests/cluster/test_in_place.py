"""Runs whose steps are too short to be sent: the coordinator computes them, and the bits are those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings
from torch import Tensor, nn

from w5xde_async.coordinator.run import run
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.coordinator.sync import in_place
from w5xde_async.coordinator.sync.in_place import InPlace
from w5xde_async.errors import LeafFailed
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.telemetry.events import WorkerShare
from w5xde_async.worker.service import Departure, Worker

STEPS = 60
SHORT = PacingConfig(short_steps="here", whole_step_s=5.0)  # on whatever machine


class _NoLimit(nullcontext[None]):
    """In place of ``time_limit``, whose signal the tests' own time limits have."""

    def __init__(self, seconds: float) -> None:
        super().__init__()

    @staticmethod
    def is_free() -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def the_signal_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "time_limit", _NoLimit)
    monkeypatch.setattr(in_place, "time_limit", _NoLimit)


@pytest.fixture(autouse=True)
def it_is_always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, whatever else the machine does."""
    took = InPlace.took
    monkeypatch.setattr(InPlace, "took", lambda self, seconds: took(self, 0.0 if self._computed else 1.0))


async def trained(
    made: Job, *, workers: int = 1, pacing: PacingConfig = SHORT, run_dir: Path | None = None, **config: Any
) -> RunResult:
    given = settings(min_workers=workers, pacing=pacing, **config)
    async with Coordinator(made, run_dir=run_dir, config=given) as coordinator:
        running = [
            asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
            for _ in range(workers)
        ]
        try:
            return await coordinator.wait()
        finally:
            await asyncio.gather(*running, return_exceptions=True)


def own_share(result: RunResult) -> WorkerShare | None:
    return next((share for share in result.shares if share.name == "coordinator"), None)


def short(make: Callable[[], Job], **changes: Any) -> Job:
    return replace(make(), max_steps=STEPS, epochs=None, **changes)


@pytest.mark.parametrize(
    "make", [jobs.mlp_adamw, jobs.cnn_sgd, jobs.odd, jobs.accumulated, jobs.fp16, jobs.words, jobs.metrics]
)
async def test_the_bits_are_those_of_one_process(make: Callable[[], Job]) -> None:
    """Frozen and unused parameters, buffers, other dtypes, a loss scale, batches that are collated, metrics."""
    result = await trained(short(make))
    share = own_share(result)
    assert share is not None
    assert share.leaves > sum(one.leaves for one in result.shares) / 3
    assert result.step == STEPS
    assert result.digest == named_digest(reference.train(short(make), STEPS)[0])


async def test_with_two_workers_that_take_turns() -> None:
    result = await trained(short(jobs.mlp_sgd), workers=2)
    assert own_share(result) is not None
    assert result.digest == named_digest(reference.train(short(jobs.mlp_sgd), STEPS)[0])


@pytest.mark.parametrize("norm_gate", [0.0, 6.0])
async def test_whatever_is_verified(norm_gate: float) -> None:
    result = await trained(short(jobs.mlp_sgd), norm_gate=norm_gate)
    assert own_share(result) is not None
    assert result.digest == named_digest(reference.train(short(jobs.mlp_sgd), STEPS)[0])


@pytest.mark.parametrize(
    ("pacing", "config"),
    [
        (replace(SHORT, short_steps="workers"), {}),
        (replace(SHORT, whole_step_s=0.0), {}),  # no step is short
        (SHORT, {"target_batch": 512}),  # no lease spans both halves of a step
    ],
)
async def test_workers_compute_where_that_is_asked_for(pacing: PacingConfig, config: dict[str, Any]) -> None:
    assert own_share(await trained(short(jobs.mlp_sgd, batch_size=192), pacing=pacing, **config)) is None


async def test_the_steps_of_a_resumed_run_and_of_a_journal(tmp_path: Path) -> None:
    whole = await trained(short(jobs.mlp_adamw), run_dir=tmp_path / "whole")
    first = await trained(replace(short(jobs.mlp_adamw), max_steps=40), run_dir=tmp_path / "parts")
    second = await trained(short(jobs.mlp_adamw), run_dir=tmp_path / "parts")
    journal = await trained(short(jobs.mlp_adamw), run_dir=tmp_path / "journal", durability="journal")
    assert all(own_share(one) for one in (whole, first, journal))
    assert second.digest == whole.digest == journal.digest


async def test_workers_that_go_and_come_back() -> None:
    """While none is there the run waits, as it does under any other pace."""
    made, seen = short(jobs.mlp_sgd, step=None), Commits()
    async with Coordinator(made, config=settings(pacing=SHORT), bus=seen.bus) as coordinator:
        first = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        await seen.reach(30)
        second = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        result = await coordinator.wait()
        assert await second is Departure.FINISHED
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


class Fails(nn.Linear):
    """From one call on, in whichever process."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Fails.calls += self.training
        if Fails.calls > 80:
            raise RuntimeError("it broke here")
        return super().forward(x)


async def test_a_step_that_fails_is_told_of_as_a_worker_tells_it() -> None:
    Fails.calls = 0
    made = short(jobs.mlp_sgd, model=lambda: nn.Sequential(nn.Flatten(), Fails(64, 10)), microbatch_size=None)
    with pytest.raises(LeafFailed, match="it broke here"):
        await trained(replace(made, max_steps=500))


async def test_other_bits_here_than_a_workers_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = InPlace.prove

    def other(self: InPlace, plan: StepPlan, pieces: list[Tensor]) -> None:
        prove(self, plan, [piece + 1 for piece in pieces])

    monkeypatch.setattr(InPlace, "prove", other)
    result = await trained(short(jobs.mlp_sgd))
    assert own_share(result) is None
    assert result.digest == named_digest(reference.train(short(jobs.mlp_sgd), STEPS)[0])
