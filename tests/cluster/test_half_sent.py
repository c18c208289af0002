"""Results that were half sent when a link broke: what has come stays, and only the rest is sent on the next link."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.memory_links import memory_pair
from tests.support.scripted import LEAVES, Scripted, scripted, settle
from torch import nn

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync.results import Results
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.runtime import Runtime
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Lease, Ready, Result
from w5xde_async.worker.executors.executor import HeldLease
from w5xde_async.worker.executors.in_place import InPlaceExecutor
from w5xde_async.worker.hooks import WorkerHooks
from w5xde_async.worker.service import Departure, Worker


def job() -> Job:
    """Five buckets."""
    model = lambda: nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 10))  # noqa: E731
    return replace(jobs.mlp_adamw(), model=model, batch_size=16, microbatch_size=4, max_steps=24, drop_last=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("seed", "sandbox"), [(0, "off"), (1, "off"), (2, "off"), (2, "on")])
async def test_after_a_break_only_what_has_not_come_is_sent_and_nothing_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, seed: int, sandbox: str
) -> None:
    """One worker, whose line carries 16 KiB at a time, and which loses its link in the middle of every other result."""
    chance, made = random.Random(seed), job()
    came: Counter[tuple[int, int, int]] = Counter()  # (step, first leaf, bucket), whole
    headers: Counter[tuple[int, int, int]] = Counter()
    computed: Counter[tuple[int, int]] = Counter()
    answered = set[tuple[int, int]]()
    breaks = 0
    arrived, place, compute = Results.arrived, Results.place, InPlaceExecutor.compute

    def slot(results: Results, session: Session, result: Result) -> tuple[int, int, int] | None:
        grant = results._ledger.held_by(session.worker_id, result.lease)
        return None if grant is None else (grant.step, grant.block.start, result.bucket)

    def arriving(results: Results, session: Session, result: Result) -> None:
        nonlocal breaks
        known = slot(results, session, result)
        arrived(results, session, result)
        assert known is not None
        came[known] += 1
        if chance.random() < 0.15:
            breaks += 1
            session.link.abort()

    def placing(results: Results, session: Session, result: Result, *rest: Any, **named: Any) -> Any:
        known = slot(results, session, result)
        if known is not None:
            headers[known] += 1
        return place(results, session, result, *rest, **named)

    def computing(executor: InPlaceExecutor, held: HeldLease, send: Any) -> Any:
        computed[held.message.step, held.message.start] += 1
        return compute(executor, held, send)

    monkeypatch.setattr(Results, "arrived", arriving)
    monkeypatch.setattr(Results, "place", placing)
    monkeypatch.setattr(InPlaceExecutor, "compute", computing)
    serving = []
    async with Coordinator(made, config=settings(code_free=True, heartbeat_s=0.02)) as coordinator:

        async def connect(*_: Any, **__: Any) -> Any:
            near, far = memory_pair(limit_bytes=16 << 10)
            serving.append(asyncio.create_task(coordinator.handle(far._reader, far._writer)))
            return near

        config = replace(QUICK_WORKER, sandbox=sandbox)
        hooks = WorkerHooks(on_answered=lambda lease: answered.add((lease.step, lease.start)))
        worker = Worker("127.0.0.1:1", job=None if sandbox == "on" else made, config=config,
                        runtime=Runtime(connect=connect), hooks=hooks)  # fmt: skip
        running = asyncio.create_task(worker.run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
        await asyncio.gather(*serving)
    assert result.digest == named_digest(reference.train(job())[0])
    assert breaks > 10
    assert answered <= set(computed)
    assert len(answered) > 0.8 * len(computed), "what left on the next link was not told of"  # it may be cut otherwise
    assert worker.leases_done <= sum(computed.values()), "an answer that was sent again is no other lease"
    assert set(came.values()) == {1}, "a bucket was sent whole twice"
    assert sum(headers.values()) <= len(came) + breaks, "more than what was on its way was sent again"
    assert sum(computed.values()) - len(computed) <= breaks // 2, computed  # what had not been computed when it broke


def back(run: Any, *unsent: int) -> list[Any]:
    """READY of one that comes back with the results of these leases."""
    fingerprint = run.prepared.spec.layout.fingerprint
    return encode(Ready(fingerprint, "cpu", "test", 1, "0", (), (), unsent))


async def returned(run: Any, name: str, unsent: Sequence[int]) -> Scripted:
    worker: Scripted = await run.worker(name, ready=False)
    await worker.link.send(back(run, *unsent))
    run.task(worker._read())
    await settle()
    return worker


async def test_who_comes_back_has_its_block_again_and_is_told_what_has_come() -> None:
    async with scripted() as run:
        first = await run.worker("a")
        lease = await first.lease()
        await first.send(lease, 0, 2)
        first.link.abort()
        await settle()
        again = await returned(run, "a", [lease.lease])
        leases = again.all(Lease)
        assert [(one.start, one.samples, one.there) for one in leases[:1]] == [(lease.start, lease.samples, (0, 2))]
        await again.send(leases[0], 1, 3)
        await again.done(leases[0])
        while run.training.version == 0:
            for one in again.all(Lease):
                if one.step == 0 and run.training.ledger.get(one.lease) is not None:
                    await again.compute(one)
            await settle()
        assert run.applied() == {1.0}


@pytest.mark.parametrize("make", [lambda lease: lease, lambda lease: lease + 1000], ids=["given away", "never had"])
async def test_a_block_that_others_have_is_not_given_again(make: Callable[[int], int]) -> None:
    async with scripted() as run:
        first = await run.worker("a")
        lease = await first.lease()
        await first.send(lease, 0, 2)
        other = await run.worker("b")
        first.link.abort()
        await settle()
        for _ in range(LEAVES):  # it takes what is there, the begun block first
            mine = [one for one in other.all(Lease) if run.training.ledger.get(one.lease)]
            if any(one.start == lease.start for one in mine):
                break
            await other.compute(mine[0])
        assert any(one.start == lease.start and one.there == (0, 2) for one in mine)
        again = await returned(run, "a", [make(lease.lease)])
        assert all(one.step > 0 or one.start != lease.start for one in again.all(Lease))
        run.training.ledger.validate()
