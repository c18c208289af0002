"""Orders of epochs are computed in a thread, ahead of need, and kept no longer than they are asked for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.scripted import scripted

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.data.epoch_prefetch import EpochPrefetch
from w5xde_async.job import Job
from w5xde_async.plan import sampler as sampling
from w5xde_async.plan.batching import BatchPlan
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.sampler import Sampler, epoch_order
from w5xde_async.telemetry.events import Event, StepCommitted
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import Lease
from w5xde_async.worker.service import Departure, Worker


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Epochs whose order was computed, and whether on the test's own thread; no epoch is a quick one."""
    found: list[tuple[int, bool]] = []
    here = threading.get_ident()

    def compute(num_samples: int, seed: int, epoch: int) -> Any:
        found.append((epoch, threading.get_ident() == here))
        return epoch_order(num_samples, seed, epoch)

    monkeypatch.setattr(sampling, "epoch_order", compute)
    monkeypatch.setattr(sampling, "QUICK_SAMPLES", 0)
    return found


def make(**kwargs: Any) -> Sampler:
    return Sampler(**{"num_samples": 40, "batch_size": 4, "leaf_samples": 2, "seed": 5, **kwargs})


def test_the_last_two_orders_are_kept(computed: list[tuple[int, bool]]) -> None:
    sampler = make()
    for step in (0, 9, 10, 3, 19, 9):
        assert sampler.plan(step).indices.tolist() == epoch_order(40, 5, step // 10)[step % 10 * 4 :][:4].tolist()
    assert [epoch for epoch, _ in computed] == [0, 1]
    sampler.plan(20)
    assert (sampler.ready(0), sampler.ready(1), sampler.ready(2)) == (True, False, True)


def test_two_samplers_do_not_take_each_others_place(computed: list[tuple[int, bool]]) -> None:
    one, other = make(), make(seed=6)
    for step in (0, 10):
        one.prepare(step // 10)
        other.prepare(step // 10)
    assert one.ready(0)
    assert one.ready(1)
    assert one.plan(0).indices.tolist() != other.plan(0).indices.tolist()
    assert len(computed) == 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_steps_numbers_need_no_order(computed: list[tuple[int, bool]], drop_last: bool) -> None:
    sampler = make(num_samples=42, drop_last=drop_last)
    found = [sampler.size(step) for step in range(25)]
    assert computed == []
    for size in found:
        plan = sampler.plan(size.step)
        numbers = [(one.epoch, one.num_samples, one.num_leaves, one.leaf_sizes(1, 2)) for one in (size, plan)]
        assert numbers[0] == numbers[1]


def test_what_is_not_shuffled_is_always_ready(computed: list[tuple[int, bool]]) -> None:
    sampler = make(shuffle=False)
    assert sampler.ready(7)
    sampler.prepare(7)
    sampler.plan(70)
    assert computed == []


@pytest.mark.parametrize("kind", [lambda sampler: sampler, BatchPlan])
async def test_half_an_epoch_ahead_and_not_sooner(computed: list[tuple[int, bool]], kind: Any) -> None:
    steps = kind(make())
    asked = asyncio.Event()
    ordering = EpochPrefetch(steps, asked.set)
    assert not ordering.ready(0, 25)
    await asked.wait()
    for step in range(5):
        assert ordering.ready(step, 25)
    assert not steps.ready(1)
    asked.clear()
    assert ordering.ready(5, 25)
    await asked.wait()
    assert steps.ready(0)
    assert steps.ready(1)
    await ordering.wait(24, 25)
    for step in (20, 24):
        assert ordering.ready(step, 25)
    assert computed == [(0, False), (1, False), (2, False)], "none of a fourth epoch, which the run does not reach"


async def test_what_computing_raises_is_raised_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(sampling, "epoch_order", raising)
    monkeypatch.setattr(sampling, "QUICK_SAMPLES", 0)
    errors: list[BaseException] = []
    ordering = EpochPrefetch(make(), on_error=errors.append)
    with pytest.raises(MemoryError):
        await ordering.wait(0, 10)
    assert [type(error) for error in errors] == [MemoryError]


@pytest.mark.parametrize("rule", ["sync", "async", "local", "streaming"])
async def test_a_run_never_computes_one_on_the_loops_thread(computed: list[tuple[int, bool]], rule: str) -> None:
    torch.set_num_threads(1)
    update = UpdateConfig(rule=rule, inner_steps=2)  # type: ignore[arg-type]
    result = await train(jobs.mlp_sgd, update=update)
    assert result.outcome == "finished"
    assert [epoch for epoch, _ in computed] == [0, 1, 2, 3]
    assert not any(on_loop for _, on_loop in computed)
    if rule == "sync":
        assert result.digest == reference.digest(jobs.mlp_sgd())


class SlowOrders:
    """Orders of epochs that are computed only when a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._released = 0
        self._changed = threading.Condition()
        self.gave_up = False
        monkeypatch.setattr(sampling, "epoch_order", self._compute)
        monkeypatch.setattr(sampling, "QUICK_SAMPLES", 0)

    def release(self, epoch: int) -> None:
        """Orders up to that of ``epoch`` may be computed."""
        with self._changed:
            self._released = max(self._released, epoch)
            self._changed.notify_all()

    def _compute(self, num_samples: int, seed: int, epoch: int) -> Any:
        with self._changed:
            self.gave_up |= not self._changed.wait_for(lambda: epoch <= self._released, timeout=8.0)
        return epoch_order(num_samples, seed, epoch)


def one_step_an_epoch() -> Job:
    data = torch.arange(16.0).reshape(16, 1)
    return Job(
        model=lambda: torch.nn.Linear(1, 1), dataset=torch.utils.data.TensorDataset(data, data),
        loss=torch.nn.functional.mse_loss, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        batch_size=16, microbatch_size=4, max_steps=6,
    )  # fmt: skip


@pytest.mark.parametrize("behind", [0, 1])
async def test_results_that_come_while_an_order_is_computed_count(monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    """An epoch's order comes ``behind`` steps after the step before the epoch is leased; the run waits for none."""
    orders = SlowOrders(monkeypatch)
    orders.release(1)
    commits = Commits()

    def see(event: Event) -> None:
        if isinstance(event, StepCommitted):
            orders.release(event.step + 1 - behind)

    commits.bus.subscribe(see)
    config = settings(max_time_s=50.0)
    async with Coordinator(one_step_an_epoch(), config=config, bus=commits.bus) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=one_step_an_epoch(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        departure = await working
    assert (result.outcome, result.step, departure) == ("finished", 6, Departure.FINISHED)
    assert not orders.gave_up
    assert result.digest == reference.digest(one_step_an_epoch())


async def test_nobody_stays_late_for_a_lease_that_was_done_while_an_order_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps an epoch, and the order of the second epoch does not come: the second step is computed meanwhile, and
    each of its leases ends with its DONE."""
    orders = SlowOrders(monkeypatch)
    async with scripted() as run:
        first, second = await run.worker("first"), await run.worker("second")
        for worker in (first, second):  # each a lease of step 0
            await worker.compute(await worker.lease(0))
        while run.training.version < 1:
            for worker in (first, second):
                for lease in worker.all(Lease):
                    if lease.step == 0 and run.training.ledger.get(lease.lease):
                        await worker.compute(lease)
            await asyncio.sleep(0.001)
        lease = next(lease for lease in first.all(Lease) if lease.step == 1)
        await first.version(1)
        await first.compute(lease)
        assert run.training.ledger.get(lease.lease) is None
        await run.pass_time(1e4)
        assert lease.lease not in first.revoked()
        assert run.training.roster.membership.members["first"].standing is Standing.READY
        orders.release(3)
        assert not orders.gave_up
