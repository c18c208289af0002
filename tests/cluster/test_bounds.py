"""The stated bound is kept where the first block of a run waits for its judgement and its step has many more."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.support import scripted as support
from tests.support.scripted import Scripted, scripted, settle
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.memory_bound import most_held, most_vectors
from w5xde_async.coordinator.sync import verification
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
