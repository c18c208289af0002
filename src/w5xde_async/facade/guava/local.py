"""An orchestrator's own workers on this machine.

One worker computes in this process. Several are processes, which get the step as a program; where it cannot be made
one they compute in this process after all, and take turns, since the random state belongs to the process.
"""

from __future__ import annotations

import logging
import os
from typing import Self

import torch

from w5xde_async.cluster.task_workers import TaskWorkers
from w5xde_async.cluster.worker_processes import LocalWorkers
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Event, WorkerLeft
from w5xde_async.worker.config import WorkerConfig

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
        self._devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
        self._groups: list[LocalWorkers | TaskWorkers] = []
        self._unsubscribe = coordinator.bus.subscribe(self._on_event)
        self._failed = ""
        self.lost = ""

    async def __aenter__(self) -> Self:
        if self._count == 1:
            self._start_here()
            return self
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = LocalWorkers(
            self._count,
            address=self._coordinator.address,
            reference="",
            threads=max(1, cores // self._count),
            devices=self._devices,
            token=self._token,
            join=self._coordinator.local_join,
            on_all_lost=self._on_processes_lost,
        )
        self._groups.append(processes)
        await processes.scale(self._count)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unsubscribe()
        for group in self._groups:
            await group.aclose()

    def _on_processes_lost(self, reason: str) -> None:
        logger.warning("the workers compute in this process and take turns reason=%s", reason.splitlines()[0])
        self._start_here()

    def _start_here(self) -> None:
        address = self._coordinator.local_join or self._coordinator.address
        config = WorkerConfig(token=self._token)
        here = TaskWorkers(self._job, address, config, self._on_all_lost, devices=self._devices)
        self._groups.append(here)
        here.start(self._count)

    def _on_all_lost(self, reason: str) -> None:
        self._failed = reason
        self._end()

    def _on_event(self, event: Event) -> None:
        if self._failed and isinstance(event, WorkerLeft):
            self._end()

    def _end(self) -> None:
        if not self._coordinator.num_workers:
            self.lost = self._failed
            self._coordinator.request_stop(self._failed)
