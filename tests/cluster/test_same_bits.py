"""A run equals the plain loop to the last bit, for every kind of model and any number of workers."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import pytest
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings, train

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.params.flat import named_digest
from w5xde_async.telemetry.events import Event, StepCommitted
from w5xde_async.worker.service import Worker


@cache
def expected(name: str) -> tuple[str, list[float]]:
    job = jobs.ALL[name]()
    steps = job.max_steps or (job.epochs or 0) * -(-len(job.dataset) // job.batch_size)
    model, losses = reference.train(job, steps)
    return named_digest(model), losses


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 3) for name in jobs.ALL), *((name, 1) for name in ("mlp_sgd", "cnn_adamw", "words"))]
)
async def test_digest_and_losses_equal_the_plain_loop(name: str, workers: int) -> None:
    events: list[Event] = []
    result = await train(jobs.ALL[name], workers=workers, events=events)
    digest, losses = expected(name)
    steps = [event for event in events if isinstance(event, StepCommitted)]
    assert [event.loss for event in steps] == pytest.approx(losses, rel=1e-6)
    assert result.digest == digest


@pytest.mark.slow
@pytest.mark.both_loops
async def test_stop_in_the_middle_of_an_epoch_and_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for stop_after in (5, 6, None):
        commits = Commits()
        async with Coordinator(
            jobs.cnn_adamw(), run_dir=run, config=settings(checkpoint_every=4), bus=commits.bus
        ) as coordinator:
            worker = Worker(coordinator.address, job=jobs.cnn_adamw(), config=QUICK_WORKER)
            task = asyncio.create_task(worker.run())
            first = coordinator.step
            if stop_after is not None:
                await commits.reach(first + stop_after)
                coordinator.request_stop("test")
            result = await coordinator.wait()
            worker.drain()
            await task
        assert result.step >= first + (stop_after or 1)
    assert result.outcome == "finished"
    assert result.digest == expected("cnn_adamw")[0]


async def test_workers_that_come_and_go(tmp_path: Path) -> None:
    commits = Commits()
    async with Coordinator(jobs.gpt_adamw(), config=settings(), bus=commits.bus) as coordinator:
        tasks: list[asyncio.Task[object]] = []

        def start() -> None:
            worker = Worker(coordinator.address, job=jobs.gpt_adamw(), config=QUICK_WORKER)
            tasks.append(asyncio.create_task(worker.run()))

        start()
        start()
        await commits.reach(4)
        tasks[0].cancel()  # vanishes without a word
        await asyncio.gather(tasks[0], return_exceptions=True)
        await commits.reach(8)
        start()
        result = await coordinator.wait()
        for task in tasks[1:]:
            task.cancel()  # one may come when all is done, and would look for a while
        await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert result.digest == expected("gpt_adamw")[0]
