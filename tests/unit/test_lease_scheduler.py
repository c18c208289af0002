"""Who gets which block, with real books in virtual time: a step lasts as long as its leaves dealt out evenly do."""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w5xde_async.data.loader import Loader
from w5xde_async.hub.work.lease_scheduler import LeaseScheduler
from w5xde_async.plan.ledger import BlockGrant, Ledger
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.plan.tree import Block

LEAF_S = 0.5


class Data(NamedTuple):
    samples: tuple[int, ...]
    packed: bool = False
    structure: bytes = b""
    buffers: tuple[Any, ...] = ()
    too_large: bool = False


class InMemory:
    """A loader that has everything."""

    max_block_leaves = 1 << 20

    def data(self, step: int, block: Block) -> Data:
        return Data((1,) * block.num_leaves)


class Farm:
    """Workers that compute what they hold one lease after the other. ``late``: when each of them comes."""

    def __init__(self, leaves: int, late: list[float], speeds: list[float], *, leases_ahead: int = 2) -> None:
        self.leaves, self.leaf_s = leaves, {f"w{i}": LEAF_S / speed for i, speed in enumerate(speeds)}
        self.now, self.step = 0.0, 0
        self.ledger = Ledger(allowed_s=lambda grant: math.inf)
        self.scheduler = LeaseScheduler(
            self.ledger, Pacing(PacingConfig(leases_ahead=leases_ahead)), cast(Loader, InMemory())
        )
        self.coming = [(at, f"w{i}") for i, at in enumerate(late)]
        heapq.heapify(self.coming)
        self.held: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[float, int]] = {}  # of the lease that each is at
        self.seconds: list[float] = []  # of each step
        self.most_held: list[dict[str, int]] = []  # of each step: leaves by worker

    def run(self, steps: int) -> None:
        self.ledger.open(0, self.leaves, self.now)
        self.ledger.open(1, self.leaves, self.now)
        began = self.now
        self.most_held.append({})
        while len(self.seconds) < steps:
            if self.ledger.complete(self.step):
                self.seconds.append(self.now - began)
                self.ledger.close(self.step)
                self.step, began = self.step + 1, self.now
                self.ledger.open(self.step + 1, self.leaves, self.now)
                self.ledger.begin(self.step, self.now)
                self.most_held.append({})
                self.schedule(again=True)
                continue
            comes = self.coming[0][0] if self.coming else math.inf
            done = min(((at, worker) for worker, (at, _) in self.ends.items()), default=(math.inf, ""))
            looks = self.scheduler.look_again_at
            self.now = max(self.now, min(comes, done[0], looks))
            assert self.now < math.inf, "nobody has anything to do"
            if done[0] <= self.now:
                self.finish(done[1])
                self.schedule()
            elif comes <= self.now:
                self.arrive(heapq.heappop(self.coming)[1])
                self.schedule(again=True)
            else:
                self.schedule()

    def arrive(self, worker: str) -> None:
        self.held[worker] = []
        self.scheduler.takes_work(worker, True)

    def finish(self, worker: str) -> None:
        _, lease = self.ends.pop(worker)
        grant = self.ledger.get(lease)
        self.held[worker].remove(lease)
        if grant is not None:  # else another had its block done before
            self.most_held[-1][worker] = self.most_held[-1].get(worker, 0) + grant.block.num_leaves
            other = cast(BlockGrant | None, self.ledger.finish(lease))
            self.scheduler.observe(grant, grant.block.num_leaves * self.leaf_s[worker], self.now)
            if other is not None:
                self.scheduler.overtaken(other, self.now)
        self.begin(worker)

    def schedule(self, *, again: bool = False) -> None:
        steps = self.ledger.open_steps
        for worker, lease in self.scheduler.leases(steps, self.now, has_credit=lambda worker: True, again=again):
            self.held[worker].append(lease.message.lease)
        for worker in self.held:
            self.begin(worker)

    def begin(self, worker: str) -> None:
        if worker in self.ends:
            return
        for lease in self.held[worker].copy():
            grant = self.ledger.get(lease)
            if grant is None:
                self.held[worker].remove(lease)
            elif grant.step == self.step:
                self.ends[worker] = self.now + grant.block.num_leaves * self.leaf_s[worker], lease
                return


def test_a_worker_that_is_early_leaves_the_next_step_to_others_as_well() -> None:
    """A leaf each, and not the whole of every other step."""
    farm = Farm(2, [0.0, 0.0], [1.0, 1.0])
    farm.run(8)
    assert farm.seconds[2:] == pytest.approx([LEAF_S] * 6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_workers_have_equal_shares_whenever_they_came(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 6), "workers")
    each = data.draw(st.sampled_from([1, 2, 3, 9]), "leaves a worker")
    late = data.draw(st.lists(st.floats(0, 6 * LEAF_S), min_size=workers, max_size=workers), "late")
    ahead = data.draw(st.integers(1, 4), "leases ahead")
    farm = Farm(workers * each, late, [1.0] * workers, leases_ahead=ahead)
    farm.run(24)
    assert max(farm.seconds[16:]) <= (each + 1) * LEAF_S + 1e-6, farm.seconds
    if each == 1:
        assert farm.seconds[16:] == pytest.approx([LEAF_S] * 8)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_unequal_workers_are_done_at_about_the_same_time(data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=5), "speeds")
    leaves = data.draw(st.integers(1, 40), "leaves")
    farm = Farm(leaves, [0.0] * len(speeds), speeds)
    farm.run(24)
    fair_s = leaves * LEAF_S / sum(speeds)
    slowest_s = LEAF_S / min(speeds)
    assert max(farm.seconds[16:]) <= fair_s + 2 * slowest_s + 1e-6, farm.seconds
