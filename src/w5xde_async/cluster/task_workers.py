"""Workers as tasks of this loop. They take turns, since the random state belongs to the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from w5xde_async.cluster.worker_processes import least_used, tell_sharing
from w5xde_async.errors import W5xdeError
from w5xde_async.job import Job, build_model
from w5xde_async.runtime import Runtime
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.connection import RunFailed
from w5xde_async.worker.service import Worker

logger = logging.getLogger(__name__)


class TaskWorkers:
    """Workers of ``job`` for the coordinator at ``address`` (or that a join string names); none until ``start``.

    ``devices``: each gets the one that the fewest others have; none: the configuration's. ``on_all_lost(reason)`` is
    called when one has failed for good and no other is left.
    """

    def __init__(
        self,
        job: Job,
        address: str,
        config: WorkerConfig,
        on_all_lost: Callable[[str], None],
        *,
        devices: Sequence[str] = (),
        runtime: Runtime | None = None,
    ) -> None:
        self._job, self._address, self._config, self._runtime = job, address, config, runtime
        self._devices = devices or (config.device,)
        self._on_all_lost = on_all_lost
        self._running: list[tuple[Worker, asyncio.Task[None]]] = []
        self._number = 0

    def start(self, count: int) -> None:
        """Have ``count`` workers at least; those that have ended are none."""
        self._running = [(worker, task) for worker, task in self._running if not task.done()]
        if len(self._running) < count:
            tell_sharing(self._devices, count)
        while len(self._running) < count:
            device = least_used(self._devices, (worker.config.device for worker, _ in self._running))
            config = replace(self._config, name=f"local-{self._number}", device=device)
            self._number += 1
            worker = Worker(self._address, job=with_own_model(self._job), config=config, runtime=self._runtime)
            task = asyncio.create_task(self._run(worker), name=f"worker {config.name}")
            self._running.append((worker, task))

    async def scale(self, count: int) -> None:
        """Start workers, or have the youngest ones leave in good order."""
        self.start(count)
        leaving, self._running = self._running[count:], self._running[:count]
        for worker, _ in leaving:
            worker.drain("the cluster has no more use for it")
        if leaving:
            tasks = [task for _, task in leaving]
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                raise

    def end_with_coordinator(self) -> None:
        """They are not to wait for it to come back."""
        for worker, _ in self._running:
            worker.end_with_coordinator()

    async def aclose(self) -> None:
        """All of them leave. May be called twice."""
        await self.scale(0)

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        except RunFailed:
            pass  # the coordinator raises it, with more to say
        except Exception as error:  # torch's, too: of a device that has no room, say
            told = isinstance(error, W5xdeError)
            why = str(error) if told else f"{type(error).__name__}: {error}"
            logger.error("worker %s has failed: %s", worker.name, why, exc_info=not told)
            if all(task.done() for other, task in self._running if other is not worker):
                self._on_all_lost(f"every local worker has failed: {why}")


def with_own_model(job: Job) -> Job:
    """A ready-made model is the coordinator's, which trains it in place; every worker needs a replica."""
    return replace(job, model=build_model(job, replica=True)) if isinstance(job.model, nn.Module) else job
