"""A worker that is cancelled ends, whatever else happens in that moment, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings

from w5xde_async.compute.engine import Engine
from w5xde_async.coordinator.parameters.publisher import LivePublisher
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.hub.members.session import Session
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Params
from w5xde_async.worker.connection.leases import Leases
from w5xde_async.worker.service import Worker
from w5xde_async.worker.uplink.uplink import Uplink


async def test_cancelled_while_the_coordinator_breaks_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one pass of the loop: a TaskGroup that has an error of its own says nothing of the cancellation."""

    def lies(publisher: LivePublisher, session: Session) -> None:
        session.current_version = publisher._version
        session.outbox.post(encode(Params(publisher._version, 0, 0, 1.0, shared=(10**6,))))

    takes = Leases.params

    def cancelled(self: Leases, *args: Any) -> None:
        running.cancel()
        takes(self, *args)

    monkeypatch.setattr(LivePublisher, "_queue_on", lies)
    monkeypatch.setattr(Leases, "params", cancelled)
    async with Coordinator(jobs.mlp_adamw(), config=settings()) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_adamw(), config=QUICK_WORKER).run())
        (ended,), _ = await asyncio.wait([running], timeout=10.0)
    assert ended.cancelled()


@pytest.mark.parametrize("moment", ["uplink", "engine"])
async def test_cancelled_while_it_ends(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Its model is freed and its thread ends all the same."""
    closed, close, of_uplink = list[bool](), Engine.close, Uplink.close

    def closes(self: Engine) -> None:
        closed.append(True)
        if moment == "engine":
            loop.call_soon_threadsafe(running.cancel)
        close(self)

    async def cancelled(self: Uplink, **options: bool) -> None:
        if moment == "uplink":
            running.cancel()
            await asyncio.sleep(0)
        await of_uplink(self, **options)

    monkeypatch.setattr(Engine, "close", closes)
    monkeypatch.setattr(Uplink, "close", cancelled)
    loop = asyncio.get_running_loop()
    async with Coordinator(jobs.mlp_adamw(), config=settings()) as coordinator:
        worker = Worker(coordinator.address, job=jobs.mlp_adamw(), config=QUICK_WORKER)
        running = asyncio.create_task(worker.run())
        await coordinator.wait()
        await asyncio.wait([running], timeout=10.0)
        with pytest.raises(RuntimeError, match="shutdown"):
            worker._compute.submit(print)
        await loop.run_in_executor(None, worker._compute.shutdown)  # waits for its thread
    assert closed == [True]
    assert running.cancelled() or moment == "engine"


async def test_what_fails_while_it_ends_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its model."""
    closed, close = list[bool](), Engine.close

    def closes(self: Engine) -> None:
        closed.append(True)
        close(self)

    async def fails(self: Uplink, **options: bool) -> None:
        raise RuntimeError("its residuals cannot be kept")

    monkeypatch.setattr(Engine, "close", closes)
    monkeypatch.setattr(Uplink, "close", fails)
    async with Coordinator(jobs.mlp_adamw(), config=settings()) as coordinator:
        worker = Worker(coordinator.address, job=jobs.mlp_adamw(), config=QUICK_WORKER)
        with pytest.raises(RuntimeError, match="cannot be kept"):
            await worker.run()
    assert closed
