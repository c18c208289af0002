"""``--update auto`` over links that it really measures: what it chooses, and that who joins gets in."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.cluster.test_autotuning import hooked
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.proxy import FaultProxy
from torch import Tensor, nn

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Bus, Event, StepCommitted, Warned, WorkerLeft
from w5xde_async.worker.service import Departure, Worker

OVER_THE_LINE = replace(QUICK_WORKER, link="tcp")  # shared memory is not slowed down
_LEAF_S = 0.02
_SLOW_BYTES_S = 2e6


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(_LEAF_S)  # on the compute thread: work beside which a fast link takes next to nothing
    return nn.functional.cross_entropy(output, target)


def job(**changes: Any) -> Job:
    """Steps of two leaves; 60,000 values. Its optimizer is one that only sync can run."""
    made = replace(hooked(), model=lambda: nn.Sequential(nn.Linear(64, 800), nn.ReLU(), nn.Linear(800, 10)))
    made = replace(made, loss=slow_loss, batch_size=48, microbatch_size=24, max_steps=100_000, **changes)
    return replace(made, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.999))


@pytest.mark.slow
async def test_a_codec_is_chosen_and_everybody_gets_in() -> None:
    torch.set_num_threads(1)
    bus, said, steps, left = Bus(), list[str](), list[StepCommitted](), list[WorkerLeft]()
    changed = asyncio.Event()

    def see(event: Event) -> None:
        if isinstance(event, Warned):
            said.append(event.text)
            changed.set()
        elif isinstance(event, StepCommitted):
            steps.append(event)
            changed.set()
        elif isinstance(event, WorkerLeft):
            left.append(event)

    bus.subscribe(see)

    async def until(holds: Any) -> None:
        async with asyncio.timeout(40):
            while not holds():
                changed.clear()
                await changed.wait()

    config = settings(auto=True, min_workers=2, max_time_s=100.0)
    async with Coordinator(job(), config=config, bus=bus) as coordinator:
        proxy = FaultProxy((coordinator.host, coordinator.port))
        await proxy.start()
        proxy.up.bytes_per_s = proxy.down.bytes_per_s = _SLOW_BYTES_S
        address = f"127.0.0.1:{proxy.port}"
        tasks: list[asyncio.Task[Departure]] = []

        async def join() -> None:
            """One worker more, and a few commits with it."""
            tasks.append(asyncio.create_task(Worker(address, job=job(), config=OVER_THE_LINE).run()))
            wanted = len(tasks)
            await until(lambda: steps and steps[-1].num_workers == wanted)
            step = steps[-1].step
            await until(lambda: steps[-1].step > step + 3)
            assert steps[-1].num_workers == wanted

        def codec() -> str:
            assert coordinator._run is not None
            return coordinator._run.config.update.codec

        tasks.append(asyncio.create_task(Worker(address, job=job(), config=OVER_THE_LINE).run()))
        await join()
        await until(lambda: codec() != "raw")
        await join()
        proxy.heal()
        await join()
        assert codec() != "raw"  # it is chosen once
        coordinator.request_stop("test")
        result = await coordinator.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await proxy.aclose()
    assert [step.step for step in steps] == list(range(1, result.step + 1))
    assert not [event.reason for event in left if "protocol" in event.reason]
    # One schedule over all of it: a change of how results travel begins no optimizer afresh.
    rates = [step.learning_rate for step in steps]
    assert rates == pytest.approx([0.05 * 0.999**at for at in range(len(rates))])
