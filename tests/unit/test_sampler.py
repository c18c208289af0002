"""Which samples make which step: a pure function, frozen for ever."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.plan.sampler import Sampler, _stable_argsort, epoch_order, seed_for


def sampler(**changes: int | bool) -> Sampler:
    settings = {"num_samples": 103, "batch_size": 20, "leaf_samples": 6, "seed": 3}
    return Sampler(**{**settings, **changes})  # type: ignore[arg-type]


@given(st.integers(1, 500), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, seed, epoch)
    assert order.dtype == np.int64
    assert not order.flags.writeable
    assert sorted(order.tolist()) == list(range(num_samples))


def test_the_order_is_frozen() -> None:
    """Another order would resume old runs with other samples: these numbers never change."""
    assert epoch_order(10, 0, 0).tolist() == FROZEN[0, 0]
    assert epoch_order(10, 0, 1).tolist() == FROZEN[0, 1]
    assert epoch_order(10, 7, 0).tolist() == FROZEN[7, 0]
    digest = hashlib.blake2b(epoch_order(100_000, 42, 3).astype("<i8").tobytes(), digest_size=16).hexdigest()
    assert digest == FROZEN_DIGEST


def test_equal_keys_keep_their_order() -> None:
    """Sorted fast, and stably where that makes a difference."""
    keys = np.random.Philox(key=1).random_raw(5000) % np.uint64(1000)
    order = _stable_argsort(keys)
    assert order.tolist() == np.argsort(keys, kind="stable").tolist()
    assert order.dtype == np.int64


def test_seeds_are_frozen() -> None:
    assert seed_for(0, 0, 0) == FROZEN_SEEDS[0]
    assert seed_for("data", 1, 2, 3) == FROZEN_SEEDS[1]
    assert seed_for(1, 23) != seed_for(12, 3)
    assert len({seed_for(1, step, leaf) for step in range(50) for leaf in range(50)}) == 2500
    assert all(0 <= seed_for(n) < 1 << 63 for n in range(1000))


@given(st.data())
def test_every_sample_comes_once_an_epoch(data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(1, 300))
    batch = data.draw(st.integers(1, 300))
    plans = sampler(
        num_samples=num_samples, batch_size=batch, leaf_samples=data.draw(st.integers(1, batch)),
        shuffle=data.draw(st.booleans()),
    )  # fmt: skip
    epoch = data.draw(st.integers(0, 3))
    seen: list[int] = []
    for at in range(plans.steps_per_epoch):
        plan = plans.plan(epoch * plans.steps_per_epoch + at)
        leaves = [plan.leaf_indices(leaf).tolist() for leaf in range(plan.num_leaves)]
        assert [len(leaf) for leaf in leaves] == list(plan.leaf_sizes(0, plan.num_leaves))
        assert all(leaf for leaf in leaves)
        assert sum(map(len, leaves)) == plan.num_samples
        assert plan.epoch == epoch
        seen.extend(index for leaf in leaves for index in leaf)
    assert sorted(seen) == list(range(num_samples))


def test_the_last_step_and_the_last_leaf_may_be_shorter() -> None:
    plan = sampler().plan(5)
    assert (sampler().steps_per_epoch, plan.num_samples, plan.num_leaves, plan.samples_in(0, 1)) == (6, 3, 1, 3)
    plan = sampler().plan(0)
    assert plan.leaf_sizes(0, plan.num_leaves) == (6, 6, 6, 2)
    assert plan.leaf_sizes(1, 3) == (6, 6)
    assert (plan.samples_in(1, 3), plan.samples_in(2, 4), plan.samples_in(0, 4)) == (12, 8, 20)


def test_drop_last_leaves_the_rest_of_the_epoch_out() -> None:
    plans = sampler(drop_last=True)
    assert plans.steps_per_epoch == 5
    assert {plans.plan(step).num_samples for step in range(20)} == {20}
    assert plans.plan(5).epoch == 1


def test_unshuffled_is_in_order_every_epoch() -> None:
    plans = sampler(shuffle=False)
    for epoch in range(2):
        indices = [index for at in range(6) for index in plans.plan(epoch * 6 + at).indices.tolist()]
        assert indices == list(range(103))


def test_orders_differ_by_epoch_and_seed() -> None:
    orders = [epoch_order(50, seed, epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


@pytest.mark.parametrize("step", [0, 1, 5, 6, 17])
def test_a_plan_depends_on_its_step_alone(step: int) -> None:
    first = sampler().plan(step).indices.tolist()
    for other in (3, 40, 2):
        sampler().plan(other)
    assert sampler().plan(step).indices.tolist() == first


FROZEN = {
    (0, 0): [1, 6, 8, 5, 0, 4, 7, 2, 3, 9],
    (0, 1): [7, 9, 4, 3, 8, 5, 1, 2, 6, 0],
    (7, 0): [3, 4, 1, 8, 6, 2, 0, 5, 7, 9],
}
FROZEN_DIGEST = "0a49768d15e027b7a08394fb097ca699"
FROZEN_SEEDS = (759540517790923586, 4893661857960700317)


def test_few_plans_are_kept_and_those_of_one_epoch() -> None:
    kept = Sampler(num_samples=1000, batch_size=10, leaf_samples=5, seed=3)
    for step in (*range(250), 3, 249, 3):
        plan = kept.plan(step)
        assert plan is kept.plan(step)
        fresh = Sampler(num_samples=1000, batch_size=10, leaf_samples=5, seed=3, orders=kept.orders).plan(step)
        assert (plan.step, plan.epoch, plan.indices.tolist()) == (step, fresh.epoch, fresh.indices.tolist())
        assert len(kept._plans) <= 32
        assert {known.epoch for known in kept._plans.values()} == {plan.epoch}
    assert replace(kept, batch_size=20).plan(3).num_samples == 20
