"""A batch that grows with the gradient noise scale: the plain loop's bits, whoever computes and however it stops."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.errors import CheckpointMismatch, UsageError
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.plan.batching import BatchPlan
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.plan.sampler import Sampler
from w5xde_async.telemetry.events import BatchGrown, Bus, Evaluated, Event, RunStarted, StepCommitted
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Worker

T = TypeVar("T", bound=Event)
SAMPLES, EPOCHS = 203, 4
GROWS: dict[str, Any] = {"target_batch": 64, "batch_patience": 4}


def job(**changes: Any) -> Job:
    """Steps of four leaves to begin with; the last leaf of an epoch is short."""
    whole = jobs.mlp_adamw()
    x, y = whole.dataset.tensors
    made = replace(
        whole, dataset=TensorDataset(x[:SAMPLES], y[:SAMPLES]), model=_model, batch_size=8, microbatch_size=2,
        max_steps=None, epochs=EPOCHS, evaluate=lambda model: {"one": 1.0},
    )  # fmt: skip
    return replace(made, **changes)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10))


def planned(events: list[Event]) -> BatchPlan:
    """The steps of a run, from what it said of its growth."""
    made = job()
    plan = BatchPlan(
        Sampler(num_samples=SAMPLES, batch_size=made.batch_size, leaf_samples=made.leaf_samples, seed=made.seed)
    )
    for event in of(events, BatchGrown):
        plan.grow(event.after_step, event.batch_size, event.rate_factor)
    return plan


def of(events: list[Event], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("workers", [1, 3])
async def test_it_grows_and_equals_the_plain_loop(workers: int) -> None:
    events: list[Event] = []
    result = await train(job, workers=workers, events=events, **GROWS)
    steps, grown = of(events, StepCommitted), of(events, BatchGrown)
    assert [event.batch_size for event in grown] == [16, 32, 64]
    assert all(event.noise_scale >= event.batch_size and 1 < event.rate_factor <= 2**0.5 for event in grown)

    plan = planned(events)
    model, losses = reference.train(job(), result.step, plan)
    assert result.digest == named_digest(model)
    assert [event.loss for event in steps] == pytest.approx(losses, rel=1e-6)
    # Every epoch has each sample once, the run ends with the last of them, and evaluates after each.
    assert sum(event.samples for event in steps) == EPOCHS * SAMPLES
    assert [event.step for event in steps][-1] == result.step == grown[-1].total_steps
    first = [after.step - 1 for before, after in pairwise(steps) if after.epoch > before.epoch]
    assert [event.step for event in of(events, Evaluated)][-1] == result.step
    assert of(events, Evaluated)[0].step == first[0]  # later ones are left out where one is still under way
    assert {event.step for event in of(events, Evaluated)} <= {*first, result.step}
    # What is shown as learning rate is what the step was made with.
    base = job()
    optimizer = base.optimizer(base.model())
    scheduler = base.scheduler(optimizer)
    for number, event in enumerate(steps):
        assert event.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"] * plan.rate_factor(number))
        optimizer.step()
        scheduler.step()


async def test_it_grows_alike_whoever_computes() -> None:
    """One worker that would take whole steps, and three that take leaf by leaf."""
    grown = []
    for workers, least_lease_s in ((1, 60.0), (3, 0.0)):
        events: list[Event] = []
        pacing = PacingConfig(target_lease_s=least_lease_s, min_lease_s=least_lease_s)
        await train(job, workers=workers, events=events, pacing=pacing, max_steps=10, **GROWS)
        grown.append(of(events, BatchGrown))
    assert [event.batch_size for event in grown[0]] == [16, 32]
    assert grown[0] == grown[1]


@pytest.mark.slow
async def test_stopped_where_it_grows_and_taken_up_again(tmp_path: Path) -> None:
    whole: list[Event] = []
    expected = await train(job, events=whole, **GROWS)
    events: list[Event] = []
    for _ in range(4):  # stopped at each growth
        result = await one_start(tmp_path / "run", events)
    assert result.outcome == "finished"
    assert result.digest == expected.digest
    assert of(events, BatchGrown) == of(whole, BatchGrown)
    assert [event.resumed_step for event in of(events, RunStarted)] == [0, *(e.step for e in of(events, BatchGrown))]
    assert [event.batch_size for event in of(events, RunStarted)] == [8, 16, 32, 64]
    assert [event.leaves_per_step for event in of(events, RunStarted)] == [4, 8, 16, 32]


async def one_start(run: Path, events: list[Event], **changes: Any) -> RunResult:
    bus = Bus()
    bus.subscribe(events.append)
    async with Coordinator(job(), run_dir=run, config=settings(**GROWS, **changes), bus=bus) as coordinator:
        bus.subscribe(lambda event: coordinator.request_stop("test") if isinstance(event, BatchGrown) else None)
        worker = Worker(coordinator.address, job=job(), config=QUICK_WORKER)
        running = asyncio.create_task(worker.run())
        result = await coordinator.wait()
        worker.drain()
        await running
    return result


async def test_what_has_grown_is_not_taken_up_without(tmp_path: Path) -> None:
    await one_start(tmp_path / "run", [])
    with pytest.raises(CheckpointMismatch, match="grown to 16 samples; give --target-batch"):
        await train(job, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_batch": 0}, "give auto or a whole number"),
        ({"target_batch": "all"}, "give auto or a whole number"),
        ({"update": UpdateConfig(rule="local")}, "--update sync alone"),
        ({"update": UpdateConfig(codec="int8")}, "codec int8 is lossy"),
        ({"auto": True}, "--update sync alone"),
        ({"durability": "journal"}, "--durability checkpoint"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings(**{"target_batch": "auto", **changes})


@pytest.mark.parametrize(
    ("changes", "target", "words"),
    [
        ({"microbatch_size": 3}, 64, "no multiple of 3"),
        ({}, 7, "batch_size is 8"),
        ({"microbatch_size": 8}, 64, "a step of 8 samples is one leaf here: give the job a smaller microbatch_size"),
        ({"microbatch_size": 2, "accumulate_grad_batches": 4}, 64, "is one leaf here"),
    ],
)
async def test_a_job_that_cannot_grow_so_is_refused(changes: dict[str, Any], target: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        await train(lambda: job(**changes), target_batch=target)


async def test_a_job_that_leaves_its_leaves_open_has_halves_to_grow_by(tmp_path: Path) -> None:
    """As small as it is, it would be one leaf; and so it stays, taken up again without the flag before it has grown."""

    def undecided() -> Job:
        return job(microbatch_size=None)

    events: list[Event] = []
    await train(undecided, events=events, **GROWS)
    assert [event.batch_size for event in of(events, BatchGrown)] == [16, 32, 64]
    (told,) = of(events, RunStarted)
    assert told.leaves_per_step == 2
    assert told.leaves_by.endswith("a batch grows by its halves")
    await train(undecided, run_dir=tmp_path / "run", max_steps=2, target_batch=64)
    assert (await train(undecided, run_dir=tmp_path / "run", max_steps=4)).step == 4


async def test_what_would_grow_after_the_runs_end_is_not_told_of() -> None:
    """Grown by a step's commit two steps later: a run of as many steps ends before."""
    events: list[Event] = []
    await train(job, events=events, **GROWS)
    first = of(events, BatchGrown)[0]
    for steps, told in ((first.after_step, 0), (first.after_step + 1, 1)):
        events = []
        await train(lambda steps=steps: job(max_steps=steps, epochs=None), events=events, **GROWS)
        assert len(of(events, BatchGrown)) == told
