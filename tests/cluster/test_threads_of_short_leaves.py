"""Microbatches that several threads would only slow down: workers that nobody told otherwise compute them with one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings

from w5xde_async.coordinator.parameters import aggregator
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.updates.sync import SyncRule
from w5xde_async.worker.service import Worker

SHORT = replace(jobs.mlp_sgd(), microbatch_size=None)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


async def train(monkeypatch: pytest.MonkeyPatch, job: Job, **config: int) -> list[int]:
    """How many threads the worker says that it computes with, at each link."""
    threads = list[int]()
    async with Coordinator(job, config=settings()) as coordinator:
        introduce = coordinator._training.introduce  # type: ignore[union-attr]

        def introduced(session: Session, awaited: Sequence[int]) -> None:
            assert session.ready is not None
            threads.append(session.ready.threads)
            introduce(session, awaited)

        monkeypatch.setattr(coordinator._training, "introduce", introduced)
        worker = Worker(coordinator.address, job=job, config=replace(QUICK_WORKER, **config))  # type: ignore[arg-type]
        running = asyncio.create_task(worker.run())
        await coordinator.wait()
        await running
    return threads


@pytest.mark.slow
async def test_one_for_short_ones_and_all_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await train(monkeypatch, SHORT) == [1]
    assert torch.get_num_threads() == 2  # a guest changes nothing but its own
    assert await train(monkeypatch, jobs.mlp_sgd()) == [2]  # whose microbatch was chosen by somebody


@pytest.mark.slow
async def test_as_many_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await train(monkeypatch, SHORT, threads=2) == [2]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert await train(monkeypatch, SHORT) == [2]


async def test_a_guest_with_one_goes_on_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    assert await train(monkeypatch, SHORT) == [1]


@pytest.mark.parametrize("inline_s", [10.0, 0.0], ids=["on the loop", "in a thread"])
@pytest.mark.parametrize(
    ("optimizer", "most", "threads"),
    [
        (torch.optim.AdamW, 1 << 20, 1),
        (torch.optim.SGD, 1 << 20, 1),
        (torch.optim.AdamW, 1000, 2),
        (torch.optim.Adafactor, 1 << 20, 2),
    ],
)
async def test_a_small_update_has_one_thread_where_that_changes_no_bit(
    optimizer: type[torch.optim.Optimizer], most: int, threads: int, inline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix's products, and means over its rows, are added in another order by another number of threads."""
    seen, step = set[int](), SyncRule._step
    monkeypatch.setattr(aggregator, "_INLINE_UPDATE_S", inline_s)
    monkeypatch.setattr(aggregator, "_ONE_THREAD_BYTES", most)
    monkeypatch.setattr(
        SyncRule, "_step", lambda self, *given: (seen.add(torch.get_num_threads()), step(self, *given))[1]
    )
    made = replace(SHORT, optimizer=lambda model: optimizer(model.parameters(), lr=0.01), max_steps=4, epochs=None)
    await train(monkeypatch, made)
    assert seen == {threads}
    assert torch.get_num_threads() == 2
