"""Runs whose optimizer steps elsewhere than in the memory that is sent.

Here that is other memory of the CPU, so the bits are the plain loop's; on a GPU: tests/gpu/test_runs.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, settings

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run import startup, strategy
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.errors import UsageError
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.telemetry.events import Bus, Event, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Departure, Worker


async def train(job: Job, told: list[Event] | None = None, *, run_dir: Path | None = None, **config: Any) -> RunResult:
    bus = Bus()
    if told is not None:
        bus.subscribe(told.append)
    async with Coordinator(job, config=settings(**config), bus=bus, run_dir=run_dir) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    return result


@pytest.mark.parametrize(
    "name", ["odd", "cnn_adamw", pytest.param("gpt_sgd", marks=pytest.mark.slow), "fp16", "accumulated"]
)
async def test_the_bits_are_the_plain_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen, tied and unused parameters, other dtypes, buffers, a loss scale."""
    for room in (startup, strategy):
        monkeypatch.setattr(room, "update_device", lambda _: torch.device("cpu"))
    make = jobs.ALL[name]
    result = await train(make())
    assert result.digest == named_digest(reference.train(make(), result.step)[0])


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_a_run_goes_on_there_and_back(durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer keeps is in the checkpoint, wherever it lies; that the place has changed is told."""
    job, told = jobs.mlp_adamw(), list[Event]()
    steps = job.max_steps or 0
    places = [None, torch.device("cpu"), None]
    monkeypatch.setattr("w5xde_async.coordinator.run.resume.device_name", lambda _: "another device")
    for number, place in enumerate(places, 1):
        for room in (startup, strategy):
            monkeypatch.setattr(room, "update_device", lambda _, place=place: place)
        result = await train(
            job, told, run_dir=tmp_path, durability=durability, max_steps=steps * number // 3, checkpoint_every=3
        )
    assert result.step == steps
    assert result.digest == named_digest(reference.train(job)[0])
    lines = [event.text for event in told if isinstance(event, Warned) and "updates were made on" in event.text]
    assert [line.split(":")[0] for line in lines] == [
        "updates were made on cpu so far and are made on another device now",
        "updates were made on another device so far and are made on cpu now",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update": UpdateConfig(rule="local")}, "--update-device cuda is for an optimizer that steps at the coord"),
        ({"update": UpdateConfig(rule="async")}, "--update-device cuda is for an optimizer that steps at the coord"),
        ({"auto": True}, "--update-device cuda is for an optimizer that steps at the coord"),
        ({"update_device": "gpu"}, "cpu, cuda or cuda:N"),
        ({"update_device": "cuda:x"}, "cpu, cuda or cuda:N"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CoordinatorConfig(**{"port": 0, "update_device": "cuda", **changes})


async def test_a_device_that_is_not_here_is_a_usage_error() -> None:
    """A test sees no accelerator."""
    with pytest.raises(UsageError, match=r"^--update-device: device cuda:3 is not on this machine"):
        async with Coordinator(jobs.mlp_sgd(), config=settings(update_device="cuda:3")):
            pass
