"""Workers that come while a coordinator is still opening its files are let in once the run has begun."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.support import jobs

from w5xde_async import Coordinator, CoordinatorConfig, Worker
from w5xde_async.coordinator.monitoring.outputs import Outputs
from w5xde_async.telemetry.events import Event, RunStarted, WorkerJoined


async def test_nobody_joins_before_the_run_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    came, joined, said = asyncio.Event(), asyncio.Event(), list[type[Event]]()
    working: list[asyncio.Task[Any]] = []

    class Watched(Coordinator):
        async def _on_link(self, link: Any) -> None:
            came.set()
            await super()._on_link(link)

    async def opened(*_: Any) -> None:
        working.append(asyncio.create_task(Worker(coordinator.address, job=job).run()))
        await came.wait()
        joining = asyncio.create_task(joined.wait())
        await asyncio.wait([joining], timeout=0.3)
        joining.cancel()

    def hear(event: Event) -> None:
        if isinstance(event, RunStarted | WorkerJoined):
            said.append(type(event))
        if isinstance(event, WorkerJoined):
            joined.set()

    monkeypatch.setattr(Outputs, "open", opened)
    job = replace(jobs.mlp_adamw(), max_steps=1)
    coordinator = Watched(job, config=CoordinatorConfig(host="127.0.0.1", port=0))
    coordinator.bus.subscribe(hear)
    async with coordinator:
        await coordinator.wait()
        await asyncio.gather(*working)
    assert said == [RunStarted, WorkerJoined]
