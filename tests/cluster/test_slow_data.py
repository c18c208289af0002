"""A dataset that hangs or is slow where the coordinator reads it: nobody else is to blame, and a person is told."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.cluster import QUICK_WORKER, settings
from torch import Tensor, nn
from torch.utils.data import Dataset

from w5xde_async.coordinator import training
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.events import Bus, Event, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Departure, Worker


class Hanging(Dataset[tuple[Tensor, Tensor]]):
    """Reads of one sample wait until ``goes_on``."""

    def __init__(self) -> None:
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 250:
            self.hangs.set()
            self.goes_on.wait(30.0)
        return torch.ones(4) * index / 400, torch.ones(1)


def job(dataset: Any) -> Job:
    return Job(
        model=lambda: nn.Linear(4, 1), dataset=dataset, loss=nn.functional.mse_loss, batch_size=16, microbatch_size=4,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.01), epochs=1, shuffle=False,
    )  # fmt: skip


@pytest.mark.parametrize("update", [{}, {"rule": "async"}, {"rule": "local", "inner_steps": 2}])
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_dataset_that_hangs_is_named_and_no_worker_blamed(
    update: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_SILENT_READ_S", 0.3)
    dataset, events, bus = Hanging(), list[Event](), Bus()
    told = asyncio.Event()

    def note(event: Event) -> None:
        events.append(event)
        if isinstance(event, Warned):
            told.set()

    bus.subscribe(note)
    given = settings(
        min_workers=workers, heartbeat_s=0.05, update=UpdateConfig(**update),
        pacing=PacingConfig(min_deadline_s=0.1, first_deadline_s=0.1, min_backup_s=0.02),
    )  # fmt: skip
    async with Coordinator(job(dataset), config=given, bus=bus) as coordinator:
        running = [
            asyncio.create_task(Worker(coordinator.address, job=job(Hanging()), config=QUICK_WORKER).run())
            for _ in range(workers)
        ]
        try:
            await asyncio.wait_for(told.wait(), 20.0)
            dataset.goes_on.set()
            result = await coordinator.wait()
            assert set(await asyncio.gather(*running)) == {Departure.FINISHED}
        finally:
            dataset.goes_on.set()
            await asyncio.gather(*running, return_exceptions=True)
    assert result.step == 25
    said = [event.text for event in events if isinstance(event, Warned)]
    assert [text for text in said if text.startswith("no sample has been read for ")] == said[:1]
    assert not [text for text in said if "overdue" in text]


def test_a_coordinator_that_stood_still_does_not_blame_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGSTOP, a laptop's lid: nothing was read for as long as it did nothing at all."""
    now, said = 100.0, list[str]()
    phase = object.__new__(training.Phase)
    silent_since = now
    context = SimpleNamespace(clock=lambda: now, loader=SimpleNamespace(silent_s=0.0))
    monkeypatch.setattr(phase, "_context", context, raising=False)
    monkeypatch.setattr(phase, "warn", said.append)
    phase._reading_hangs, phase._silent_s, phase._looked_at = False, 0.0, now
    for seconds in (1.0, 1.0, 600.0, 1.0):
        now += seconds
        context.loader.silent_s = now - silent_since
        phase.note_reading()
    assert not said
    for _ in range(60):
        now += 1.0
        context.loader.silent_s = now - silent_since
        phase.note_reading()
    assert len(said) == 1
