"""A member that lies ends its own session and nothing else: the others' run has the bits that it has without it."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import cache
from typing import Any

import pytest
import torch
from tests.support import lying, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Event, Warned, WorkerLeft
from w5xde_async.wire.messages import Message
from w5xde_async.worker.service import Departure, Worker


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("w5xde_async.coordinator.ending.draw_loss", lambda *_: False)


def job(**changes: Any) -> Job:
    """Six leaves of four samples a step."""
    x = torch.randn(48, 10, generator=torch.Generator().manual_seed(0))
    named: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
        "dataset": TensorDataset(x, x[:, :4].argmax(1)),
        "optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        "loss": nn.functional.cross_entropy, "batch_size": 24, "microbatch_size": 4, "max_steps": 100_000, "seed": 1,
    }  # fmt: skip
    return Job(**{**named, **changes})


def slow_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same, on a machine on which time passes: the run is short, however long the lies take."""
    time.sleep(0.002)
    return nn.functional.cross_entropy(outputs, targets)


@cache
def expected(steps: int) -> str:
    return reference.digest(job(), steps)


@pytest.mark.parametrize("kind", lying.SAID, ids=lambda kind: kind.__name__)
async def test_whatever_a_member_says_the_others_run_is_the_same(
    kind: type[Message], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    """Every field of every message that a worker may send, at every extreme, beside an honest worker."""
    monkeypatch.setattr("w5xde_async.worker.service._pause_s", lambda in_vain: 0.0)
    told = list(lying.lies(kind, everything=pytestconfig.getoption("--every-lie")))
    commits, events = Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    config = settings(heartbeat_s=0.05, max_time_s=110.0, code_free=False)
    async with Coordinator(job(), config=config, bus=commits.bus) as coordinator:
        slow = job(loss=slow_loss)
        honest = asyncio.create_task(Worker(coordinator.address, job=slow, config=QUICK_WORKER).run())
        said = await asyncio.create_task(lying.tell(told, coordinator.address, slow, QUICK_WORKER))
        await commits.reach(commits.step + 2)  # the run goes on
        coordinator.request_stop()
        result = await coordinator.wait()
        honest.cancel()
        left = await asyncio.gather(honest, return_exceptions=True)
    assert said == told
    assert (result.outcome, result.digest) == ("stopped", expected(result.step))
    assert isinstance(left[0], asyncio.CancelledError) or left[0] is Departure.FINISHED
    faults = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [text for text in faults if not text.startswith("leaf failed")] == []
    for event in events:  # nothing of it drives a terminal
        if isinstance(event, Warned | WorkerLeft):
            assert "\x1b" not in str(event)
            assert len(str(event)) < 5000
