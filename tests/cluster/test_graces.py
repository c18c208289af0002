"""A worker that was told to leave has parted once its grace is over, whatever it waits for then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster import Commits, settings
from tests.support.jobs import mlp_sgd

from w5xde_async.compute.engine import Engine
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.hub.members.program_server import ProgramServer
from w5xde_async.job import Job
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.engine_source import EngineSource
from w5xde_async.worker.service import Departure, Worker
from w5xde_async.worker.uplink import uplink

WORKER = WorkerConfig(device="cpu", grace_s=0.05)


class Hanging:
    """Calls that return when the test is through."""

    def __init__(self, gives: Any = None) -> None:
        self.begun, self.go_on, self._gives = threading.Event(), threading.Event(), gives

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.begun.set()
        self.go_on.wait(60.0)
        return self._gives

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 60.0)


@asynccontextmanager
async def leaving(worker: Worker, hanging: Hanging) -> AsyncIterator[None]:
    """The worker has parted at the end, and its ``run`` has not."""
    running = asyncio.create_task(worker.run())
    try:
        yield
        async with asyncio.timeout(30.0):
            await worker.parted.wait()
        assert not running.done()
        assert worker.error is None
    finally:
        hanging.go_on.set()
        assert await running is Departure.DRAINED


async def test_while_it_builds_the_model_no_grace_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    builds, plain = Hanging(), EngineSource._build

    def build(self: EngineSource, *args: Any) -> Any:
        builds()
        return plain(self, *args)

    monkeypatch.setattr(EngineSource, "_build", build)
    async with Coordinator(long(), config=settings()) as coordinator:
        worker = Worker(coordinator.address, job=mlp_sgd(), config=replace(WORKER, grace_s=3600.0))
        async with leaving(worker, builds):
            await builds.wait()
            worker.drain("SIGTERM")


async def test_while_it_waits_for_the_program_no_grace_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramServer, "_answer", lambda *_: None)  # as one that is being made
    asked, asks = asyncio.Event(), ProgramServer.ask
    monkeypatch.setattr(ProgramServer, "ask", lambda self, *given: (asks(self, *given), asked.set()))
    async with Coordinator(long(), config=settings()) as coordinator:
        worker = Worker(coordinator.address, config=replace(WORKER, grace_s=3600.0))
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30.0):
            await asked.wait()
            worker.drain("SIGTERM")
            assert await running is Departure.DRAINED


def long() -> Job:
    return replace(mlp_sgd(), max_steps=10**6)


async def test_before_it_has_opened_its_own_data() -> None:
    opens = Hanging(mlp_sgd().dataset)
    job = replace(mlp_sgd(), local_data=opens)
    worker = Worker("127.0.0.1:1", job=job, config=replace(WORKER, local_data="/dead"))
    async with leaving(worker, opens):
        await opens.wait()
        worker.drain("SIGTERM")


async def test_while_it_keeps_what_its_codec_has_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps, commits = Hanging(), Commits()
    monkeypatch.setattr(uplink, "keep", keeps)
    config = settings(update=UpdateConfig(codec="topk:0.1"))
    async with Coordinator(long(), config=config, bus=commits.bus) as coordinator:
        worker = Worker(coordinator.address, job=mlp_sgd(), config=replace(WORKER, grace_s=0.5, data_dir=tmp_path))
        async with leaving(worker, keeps):
            await commits.reach(2)
            worker.drain("SIGTERM")


@pytest.mark.parametrize("first", ["told", "lost"])
async def test_with_a_leaf_under_way_when_its_link_is_lost(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    hangs = Hanging()
    plain = Engine.counted

    def counted(self: Engine, *args: Any) -> Any:
        hangs()
        return plain(self, *args)

    monkeypatch.setattr(Engine, "counted", counted)
    async with Coordinator(long(), config=settings()) as coordinator:
        worker = Worker(coordinator.address, job=mlp_sgd(), config=replace(WORKER, inline_block_s=0.0))
        async with leaving(worker, hangs):
            await hangs.wait()
            assert worker._connection is not None
            if first == "told":
                worker.drain("SIGTERM")
            worker._connection.link.abort()
            if first == "lost":
                worker.drain("SIGTERM")
