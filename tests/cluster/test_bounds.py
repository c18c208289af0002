"""The stated bound is kept where the first block of a run waits for its judgement and its step has many more. It is of
the largest step, wherever a run goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import jobs
from tests.support import scripted as support
from tests.support.cluster import train
from tests.support.scripted import Scripted, scripted, settle
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.memory_bound import most_held, most_vectors
from w5xde_async.coordinator.sync import verification
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Event, RunStarted
from w5xde_async.wire.messages import Lease

LEAVES = 64


async def test_a_slow_first_audit_keeps_no_more_vectors_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = support.job()
    many = replace(
        made, dataset=TensorDataset(*(column.repeat(16, 1) for column in made.dataset.tensors)), batch_size=LEAVES
    )
    monkeypatch.setattr(support, "job", lambda: many)
    monkeypatch.setattr(verification, "_PATIENCE_S", 0.0)  # the clock stands: no first result is waited for
    async with scripted(norm_gate=6.0, min_workers=2, max_workers=2, prefetch_leaves=LEAVES) as run:
        store = run.training.store
        quick, slow = await run.worker("quick"), await run.worker("slow")
        await slow.lease()
        most, done = 0, 0

        async def work(worker: Scripted) -> int:
            nonlocal most
            open_ = [lease for lease in worker.all(Lease) if lease.step == 0 and run.training.ledger.get(lease.lease)]
            for lease in open_:
                await worker.compute(lease)
                most = max(most, store.num_vectors)
            return len(open_)

        idle = 0
        while idle < 50:  # until nothing more is leased to it: the other one has the audit
            idle = 0 if (count := await work(quick)) else idle + 1
            done += count
            await asyncio.sleep(0.001)  # the loader's thread has no event here
        assert run.training.verification.num_held == most_held(run.config) == 2
        assert done < LEAVES // 2
        async with asyncio.timeout(10):
            while run.training.version == 0:
                await work(slow)
                await work(quick)
                await asyncio.sleep(0.001)
        await settle()
        assert most <= most_vectors(LEAVES, run.config) < LEAVES


async def test_a_run_that_goes_on_with_an_epochs_short_last_step_states_the_bound_of_a_whole_one(
    tmp_path: Path,
) -> None:
    def job() -> Job:
        made = jobs.mlp_sgd()
        few = TensorDataset(*(column[:17] for column in made.dataset.tensors))
        return replace(made, dataset=few, batch_size=8, microbatch_size=2)

    events: list[Event] = []
    for steps in (2, 5):
        await train(job, run_dir=tmp_path / "run", events=events, max_steps=steps)
    first, second = (event for event in events if isinstance(event, RunStarted))
    assert (first.resumed_step, second.resumed_step) == (0, 2)
    assert (first.leaves_per_step, second.leaves_per_step) == (4, 4)
    assert (second.memory_bound_bytes, second.expected_bytes) == (first.memory_bound_bytes, first.expected_bytes)
