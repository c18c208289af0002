"""An orchestrator's own workers on this machine.

One worker computes in this process. Several are processes, which get the step as a program; where it cannot be made
one they compute in this process after all, and take turns, since the random state belongs to the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Self

import torch

from w5xde_async.cluster.worker_processes import LocalWorkers
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import W5xdeError
from w5xde_async.job import Job
from w5xde_async.net.endpoint import format_address
from w5xde_async.telemetry.events import Event, WorkerLeft
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import RunFailed, Worker

__all__ = ["LocalGroup"]

logger = logging.getLogger(__name__)


class LocalGroup:
    """``count`` workers (0: one) of a coordinator that listens, one for each GPU; on the CPU where there is none.

    ``job`` makes a model of its own for whoever builds it. ``lost`` says why the run was stopped, where every worker
    here had failed for good and no other was there.
    """

    def __init__(self, coordinator: Coordinator, job: Job, token: str, count: int) -> None:
        self._coordinator, self._job, self._token = coordinator, job, token
        self._count = max(count, 1)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(coordinator.host, coordinator.host)
        self._address = format_address(host, coordinator.port)
        gpus = torch.cuda.device_count()
        self._devices = [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
        self._processes: LocalWorkers | None = None
        self._tasks: list[tuple[Worker, asyncio.Task[None]]] = []
        self._unsubscribe = coordinator.bus.subscribe(self._on_event)
        self._failed = ""
        self.lost = ""

    async def __aenter__(self) -> Self:
        if self._count == 1:
            self._start_here()
            return self
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._processes = LocalWorkers(
            self._count, address=self._address, reference="", threads=max(1, cores // self._count),
            devices=self._devices, token=self._token, join=self._coordinator.local_join,
            on_all_lost=self._on_processes_lost,
        )  # fmt: skip
        await self._processes.scale(self._count)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unsubscribe()
        for worker, _task in self._tasks:
            worker.drain("the run has ended")
        if self._processes is not None:
            await self._processes.aclose()
        if self._tasks:
            await asyncio.wait([task for _, task in self._tasks])

    def _on_processes_lost(self, reason: str) -> None:
        logger.warning("the workers compute in this process and take turns reason=%s", reason.splitlines()[0])
        self._start_here()

    def _start_here(self) -> None:
        for number in range(self._count):
            config = WorkerConfig(
                name=f"local-{number}", token=self._token, device=self._devices[number % len(self._devices)]
            )
            worker = Worker(self._coordinator.local_join or self._address, job=self._job, config=config)
            self._tasks.append((worker, asyncio.create_task(self._work(worker), name=f"worker {number}")))

    async def _work(self, worker: Worker) -> None:
        try:
            await worker.run()
        except RunFailed:
            pass  # the coordinator raises it, with more to say
        except W5xdeError as error:
            logger.error("worker %s has failed: %s", worker.name, error)
            if all(task.done() for other, task in self._tasks if other is not worker):
                self._failed = f"every local worker has failed: {error}"
                self._end()

    def _on_event(self, event: Event) -> None:
        if self._failed and isinstance(event, WorkerLeft):
            self._end()

    def _end(self) -> None:
        if not self._coordinator.num_workers:
            self.lost = self._failed
            self._coordinator.request_stop(self._failed)
