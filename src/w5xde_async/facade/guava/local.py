"""An orchestrator's own workers on this machine.

One worker computes in this process. Several are processes, which get the step as a program; where it cannot be made
one they compute in this process after all, and take turns, since the random state belongs to the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from w5xde_async.cluster.task_workers import TaskWorkers
from w5xde_async.cluster.worker_processes import LocalWorkers
from w5xde_async.compute.machine import usable_cores
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.worker.config import WorkerConfig

logger = logging.getLogger(__name__)


@asynccontextmanager
async def local_workers(coordinator: Coordinator, job: Job, token: str, count: int, island: str) -> AsyncIterator[None]:
    """``count`` workers (0: one) of a coordinator that listens, one for each GPU; on the CPU where there is none.

    ``island``: what they are together, where they are to be one. ``job`` makes a model of its own for whoever builds
    it. Where every worker here has failed for good and no other is there, the run is stopped.
    """
    count = max(count, 1)
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
    place, config = coordinator.local_join or coordinator.address, WorkerConfig(token=token)
    here = TaskWorkers(job, place, config, coordinator.workers_failed, devices=devices)

    def take_turns(reason: str) -> None:
        logger.warning("the workers compute in this process and take turns reason=%s", reason.splitlines()[0])
        here.start(count)

    cores = await asyncio.to_thread(usable_cores)
    processes = LocalWorkers(
        0,
        address=coordinator.address,
        reference="",
        threads=max(1, cores // count),
        devices=devices,
        token=token,
        join=coordinator.local_join,
        island=island,
        on_all_lost=coordinator.workers_failed if island else take_turns,
    )
    try:
        if island:
            await processes.scale(1)
        elif count == 1:
            here.start(1)
        else:
            await processes.scale(count)
        yield
    finally:
        await processes.aclose()
        await here.aclose()
