"""LocalCluster: a coordinator and its workers on this machine, inside the caller's event loop.

A guest: no signal handler, no loop policy. A job given by reference gets worker processes; a Job object, which other
processes cannot see, gets workers as tasks of this loop. Those take turns, since the random state belongs to the
process: they are for tests and notebooks, not for speed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from torch import nn

from w5xde_async.cluster.task_workers import TaskWorkers, with_own_model
from w5xde_async.cluster.worker_processes import LocalWorkers, cuda_devices, may_be_islands
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import UsageError, need
from w5xde_async.job import Job, load_job, require_job
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Best, Bus, Event, WorkerJoined, WorkerLeft
from w5xde_async.telemetry.notebook import html_table
from w5xde_async.worker.config import WorkerConfig


class LocalCluster:
    """Trains ``job`` with ``n_workers`` workers of ``threads`` threads each; the first step waits for all of them,
    but those processes that have failed for good.

    >>> async with LocalCluster(job, n_workers=2) as cluster:
    ...     result = await cluster.wait()
    """

    def __init__(
        self,
        job: Job | str,
        n_workers: int = 2,
        *,
        threads: int = 1,
        run_dir: Path | str | None = None,
        dashboard: str = "",
        config: CoordinatorConfig | None = None,
        bus: Bus | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """``job`` is a Job or a reference such as ``train.py:job``. ``dashboard`` is ``host:port`` to watch the run at;
        port 0 picks a free one. ``config`` replaces the defaults as a whole, ``dashboard`` among them. ``runtime`` is
        for the coordinator and for workers that are tasks of this loop.

        Raises UsageError for workers that could not join. Entering raises what ``start`` raises.
        """
        if not isinstance(job, str):
            require_job(job, "LocalCluster")
        self._given, self._n_workers, self._threads = job, _count(n_workers), threads
        self._replica = None if isinstance(job, str) else with_own_model(job)  # before it is trained in place
        self._run_dir, self._bus, self._runtime = run_dir, bus or Bus(log_warnings=True), runtime
        self._asked = config is not None  # for how many workers the first step waits
        config = config or CoordinatorConfig(port=0, min_workers=max(n_workers, 1), dashboard=dashboard)
        own = n_workers and not (isinstance(job, str) and may_be_islands())
        self._config = config.with_own_workers() if own else config
        self._require_certificates(n_workers)
        self._coordinator: Coordinator | None = None
        self._workers: LocalWorkers | TaskWorkers | None = None
        self._changed = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def start(self) -> Self:
        """Begin, for who cannot use ``async with`` (the cells of a notebook); ``aclose`` is then theirs to call.

        Raises JobError for a reference that cannot be loaded, and what ``Coordinator.start`` raises. Raises UsageError
        where it was started or closed before.
        """
        job, reference = self._given, ""
        if isinstance(job, str):  # importing the user's file may take its time
            reference = job
            job = await asyncio.get_running_loop().run_in_executor(None, load_job, reference)
        if self._coordinator is not None or self._closing is not None:
            was = "started" if self._closing is None else "closed"
            raise UsageError(f"this cluster was {was} before; make a new LocalCluster for another run")
        self._coordinator = Coordinator(
            job, run_dir=self._run_dir, config=self._config, bus=self._bus, job_reference=reference,
            runtime=self._runtime,
        )  # fmt: skip
        self._unsubscribe = self._bus.subscribe(self._on_event, prompt=False)
        try:
            await self._coordinator.start()
            self._workers = self._make_workers()
            await self._workers.scale(self._n_workers)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, once the cluster was entered. Raises UsageError before."""
        if self._coordinator is None:
            raise UsageError("the cluster has not been started; use async with, or await start() first")
        return self._coordinator

    @property
    def address(self) -> str:
        """``host:port`` for more workers."""
        return self.coordinator.address

    @property
    def dashboard_link(self) -> str:
        """Where to watch the run, with the token that it may need; empty without a dashboard."""
        return self.coordinator.dashboard_link

    @property
    def model(self) -> nn.Module:
        """The trained model, once the run has ended, also after the cluster was left. Raises UsageError before."""
        return self.coordinator.model

    @property
    def best(self) -> Best | None:
        """What the job's ``keep_best`` has kept, as ``Coordinator.best``."""
        return self.coordinator.best

    @property
    def num_workers(self) -> int:
        """Workers that have joined, from wherever."""
        return self.coordinator.num_workers

    async def scale(self, n: int) -> None:
        """Have ``n`` workers of our own: new ones are started, the youngest leave in good order.

        Raises UsageError where the cluster is not running.
        """
        if self._workers is None:
            raise UsageError("the cluster is not running; use async with, or await start() first")
        if self._closing is not None:
            raise UsageError("the cluster is closed; make a new LocalCluster for another run")
        self._require_certificates(_count(n))
        await self._workers.scale(n)

    async def wait_for_workers(self, n: int, timeout_s: float = 60.0) -> None:
        """Return when ``n`` workers have joined. Raises TimeoutError, and what ended the run if that comes first.

        Raises UsageError where the run has ended without an error of its own.
        """
        ended = asyncio.ensure_future(self.wait())
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_workers < n:
                    self._changed.clear()
                    change = asyncio.ensure_future(self._changed.wait())
                    try:
                        await asyncio.wait({change, ended}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        change.cancel()
                    if ended.done():
                        result = ended.result()
                        raise UsageError(
                            f"the run is {result.outcome}, with {self.num_workers} of {n} workers: none will join"
                        )
        finally:
            ended.cancel()
            await asyncio.wait({ended})

    async def wait(self) -> RunResult:
        """The run's end. Raises what ended it where it failed, W5xdeError where every worker failed for good."""
        return await self.coordinator.wait()

    def _repr_html_(self) -> str:
        if self._coordinator is None:
            return html_table("LocalCluster", {"state": "not started"})
        running = self._closing is None and self._coordinator.running
        rows = {
            "state": "running" if running else "not running",
            "step": self._coordinator.step,
            "workers": self.num_workers,
            "address": self.address,
            "dashboard": self.dashboard_link.partition("?")[0],  # without its token: notebooks are passed on
        }
        return html_table("LocalCluster", rows)

    async def aclose(self) -> None:
        """Stop in good order and free everything. May be called twice; cancelled, closing goes on by itself."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close cluster")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if isinstance(self._workers, TaskWorkers):
            self._workers.end_with_coordinator()
        try:
            if self._coordinator is not None:
                await self._coordinator.aclose()
        finally:
            if self._workers is not None:
                await self._workers.aclose()
            if self._unsubscribe is not None:
                self._unsubscribe()

    def _require_certificates(self, num_workers: int) -> None:
        """Raises UsageError where the coordinator would not let workers of ours in."""
        theirs = self._replica is None and os.environ.get("W5XDE_TLS_CERT")
        need(
            not num_workers or self._config.tls.ca is None or bool(theirs),
            "the authorities in tls (ca) ask every worker for a certificate, and those of this cluster have none: have "
            "it start none, and start each with a certificate of its own, or leave the authorities out",
        )

    def _make_workers(self) -> LocalWorkers | TaskWorkers:
        config = self._config
        if self._replica is not None:
            settings = WorkerConfig(token=config.token, insecure=config.insecure, threads=self._threads)
            place = self.coordinator.local_join or self.address
            return TaskWorkers(
                self._replica, place, settings, self.coordinator.workers_failed, devices=cuda_devices(),
                runtime=self._runtime,
            )  # fmt: skip
        assert isinstance(self._given, str)
        return LocalWorkers(
            0,
            address=self.address,
            reference=self._given,
            threads=self._threads,
            token=config.token,
            join=self.coordinator.local_join,
            insecure=config.insecure,
            grace_s=config.grace_s + 2.0,
            on_all_lost=self.coordinator.workers_failed,
            on_given_up=partial(self.coordinator.worker_failed, asked=self._asked),
        )

    def _on_event(self, event: Event) -> None:
        if isinstance(self._workers, LocalWorkers):
            self._workers.heard(event)
        if isinstance(event, WorkerJoined | WorkerLeft):
            self._changed.set()


def _count(n: object) -> int:
    """A number of workers. Raises UsageError."""
    if type(n) is not int or n < 0:
        raise UsageError(f"the number of workers is {n!r}; give a whole number that is not negative")
    return n
