"""A coordinator and its workers in one loop, over real loopback sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.job import Job
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.events import Bus, Event, RunFinished, StepCommitted
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Departure, Worker

QUICK_WORKER = WorkerConfig(device="cpu", connect_timeout_s=60.0)


class Commits:
    """Waits for steps: ``await commits.reach(5)``; fails where the run ends before. Give ``bus`` to the coordinator."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.step = 0
        self.ended = ""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.bus.subscribe(self._see)

    async def reach(self, step: int) -> None:
        if self.step < step:
            assert not self.ended, self.ended
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((step, future))
            await future

    def _see(self, event: Event) -> None:
        if isinstance(event, StepCommitted):
            self.step = event.step
            for step, future in self._waiting:
                if step <= event.step and not future.done():
                    future.set_result(None)
        elif isinstance(event, RunFinished):
            self.ended = f"the run has ended ({event.outcome}: {event.reason}) at step {event.step}"
            for _, future in self._waiting:
                if not future.done():
                    future.set_exception(AssertionError(self.ended))


def settings(**kwargs: Any) -> CoordinatorConfig:
    everybody = PacingConfig(whole_step_s=0.0)  # has a part of each step, however short that is
    given = {"port": 0, "bucket_bytes": 64 << 10, "max_time_s": 50.0, "pacing": everybody, **kwargs}
    return CoordinatorConfig(**given)


async def train(
    make_job: Callable[[], Job], *, workers: int = 1, run_dir: Path | None = None, events: list[Event] | None = None,
    **kwargs: Any,
) -> RunResult:  # fmt: skip
    """Run a job to its end; every worker must have left because the run was finished.

    But for those that come to a run in which nothing was left to compute: an evaluation may end it before.
    """
    bus = Bus()
    if events is not None:
        bus.subscribe(events.append)
    kwargs.setdefault("min_workers", workers)
    async with Coordinator(make_job(), run_dir=run_dir, config=settings(**kwargs), bus=bus) as coordinator:
        made = [Worker(coordinator.address, job=make_job(), config=QUICK_WORKER) for _ in range(workers)]
        running = [asyncio.create_task(worker.run()) for worker in made]
        try:
            result = await coordinator.wait()
            there = [task for worker, task in zip(made, running, strict=True) if worker._has_joined or result.shares]
            for task in set(running) - set(there):  # it would look for the run for a minute
                task.cancel()
            departures = await asyncio.gather(*there)
        finally:  # where it failed, they go in their own time
            await asyncio.gather(*running, return_exceptions=True)
    assert result.outcome != "finished" or departures == [Departure.FINISHED] * len(there)
    return result


async def all_gone(workers: Sequence[Worker], running: Sequence[asyncio.Task[Departure]]) -> None:
    """Once the run is over: at least one has heard that it is finished, and the others were on their way back, where
    the coordinator waited for them a while in vain."""
    while not all(task.done() for task in running):
        for worker, task in zip(workers, running, strict=True):
            if worker._joining is not None:
                task.cancel()
        await asyncio.sleep(0)
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert Departure.FINISHED in ended
    assert all(each is Departure.FINISHED or isinstance(each, asyncio.CancelledError) for each in ended)
