"""Local workers that have failed for good before the first step, which waits for so many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.telemetry.events import Bus, Event, Waiting, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Worker

WHY = "was ended by SIGKILL again, 3 restarts within a minute"


class Heard:
    """What a run warns of because of a worker, and a moment in which it waits for the other of two."""

    def __init__(self) -> None:
        self.bus, self.warnings, self.waits = Bus(), list[str](), asyncio.Event()
        self.bus.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Warned) and event.text.startswith("worker local-"):
            self.warnings.append(event.text)
        if isinstance(event, Waiting) and event.reason == "1 of 2 workers":
            self.waits.set()


@asynccontextmanager
async def waiting(heard: Heard, **config: Any) -> AsyncIterator[Coordinator]:
    """A run that one worker has come to, and that waits for a second one."""
    given = settings(min_workers=2, heartbeat_s=0.1, **config)
    async with Coordinator(jobs.mlp_sgd(), config=given, bus=heard.bus) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        try:
            await heard.waits.wait()
            yield coordinator
        finally:
            await coordinator.aclose()
            working.cancel()  # where the run was not finished it would come back
            await asyncio.wait([working])


@pytest.mark.parametrize("rule", ["sync", "async", "local"])
async def test_a_run_begins_with_those_that_are_left_and_says_why(rule: str) -> None:
    heard = Heard()
    async with waiting(heard, max_steps=3, update=UpdateConfig(rule=rule)) as coordinator:
        coordinator.worker_failed("local-1", WHY, 1, asked=False)
        result = await coordinator.wait()
        coordinator.worker_failed("local-0", WHY, 0, asked=False)  # it is begun, and needs no other: nothing to tell
    assert result.outcome == "finished"
    assert heard.warnings == [f"worker local-1 {WHY}: the run does not wait for it, and begins with 1 worker"]


async def test_where_somebody_has_asked_for_the_number_it_is_waited_for_and_told_how_it_can_be_met() -> None:
    heard = Heard()
    async with waiting(heard) as coordinator:
        coordinator.worker_failed("local-1", WHY, 1, asked=True)
        told = (
            f"worker local-1 {WHY}: --min-workers 2 can be met by workers from elsewhere only: start 1 there, or begin "
            "anew with --min-workers 1"
        )
        assert heard.warnings == [told]
        heard.waits.clear()
        second = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        assert (await coordinator.wait()).outcome == "finished"
        await second
    assert heard.warnings == [told]


async def test_another_rule_that_a_run_goes_on_by_waits_for_those_that_are_left_too() -> None:
    heard = Heard()
    async with waiting(heard) as coordinator:
        coordinator.worker_failed("local-1", WHY, 1, asked=False)
        run = coordinator._run
        assert run is not None
        assert (run.config.min_workers, run.training.phase.min_workers) == (1, 1)


async def test_a_run_that_ends_for_lack_of_workers_waits_for_none() -> None:
    heard = Heard()
    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=2), bus=heard.bus) as coordinator:
        coordinator.workers_failed("every local worker has failed")
        coordinator.worker_failed("local-1", WHY, 0, asked=False)
    assert not heard.warnings
