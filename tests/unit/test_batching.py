"""Steps of a growing batch: each sample once an epoch, the same from the record as from having lived it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.plan.batching import BatchPlan, halves
from w5xde_async.plan.sampler import Sampler


def sampler(num_samples: int = 100, batch_size: int = 8, *, leaf_samples: int = 4, drop_last: bool = False) -> Sampler:
    return Sampler(
        num_samples=num_samples, batch_size=batch_size, leaf_samples=leaf_samples, seed=3, drop_last=drop_last
    )  # fmt: skip


def drawn(plan: BatchPlan, steps: int) -> list[tuple[int, list[int]]]:
    return [(plan.plan(step).epoch, plan.plan(step).indices.tolist()) for step in range(steps)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_without_growth_the_steps_are_the_samplers(drop_last: bool) -> None:
    plain = sampler(drop_last=drop_last)
    plan = BatchPlan(plain)
    expected = [(plain.plan(step).epoch, plain.plan(step).indices.tolist()) for step in range(40)]
    assert drawn(plan, 40) == expected
    assert plan.total_steps(3) == 3 * plain.steps_per_epoch


@given(
    num_samples=st.integers(20, 90),
    drop_last=st.booleans(),
    growth=st.lists(st.tuples(st.integers(1, 12), st.sampled_from([2, 3])), max_size=3),
)
def test_each_sample_once_an_epoch_wherever_it_grows(
    num_samples: int, drop_last: bool, growth: list[tuple[int, int]]
) -> None:
    plan = BatchPlan(sampler(num_samples, 4, leaf_samples=2, drop_last=drop_last))
    at = 0
    for steps, times in growth:
        at += steps
        if plan.batch_size * times <= num_samples:
            before = drawn(plan, at)
            plan.grow(at, plan.batch_size * times, 1.5)
            assert drawn(plan, at) == before  # history stays
    total = plan.total_steps(at + 2)
    steps = drawn(plan, total)
    assert plan.plan(total).epoch == at + 2
    for epoch in range(at + 2):
        counts = Counter(index for of, indices in steps if of == epoch for index in indices)
        assert set(counts.values()) <= {1}
        missing = num_samples - len(counts)
        assert missing < plan.batch_size if drop_last else missing == 0
    stream = BatchPlan(replace(sampler(num_samples, 4, leaf_samples=2, drop_last=drop_last), stream=True))
    stream.load_state_dict(plan.state_dict())
    places = [index for _, indices in drawn(stream, total) for index in indices]
    assert places == sorted(set(places))
    assert len(places) == sum(len(indices) for _, indices in steps)
    assert places[-1] < (at + 2) * num_samples
    restored = BatchPlan(sampler(num_samples, 4, leaf_samples=2, drop_last=drop_last))
    restored.load_state_dict(plan.state_dict())
    assert drawn(restored, total) == steps
    assert restored.rate_factor(total) == plan.rate_factor(total) == 1.5 ** (len(plan.stretches) - 1)


def test_growth_begins_where_it_says_and_the_rate_with_it() -> None:
    plan = BatchPlan(sampler())
    plan.grow(3, 16, 2**0.5)
    sizes = [plan.plan(step).num_samples for step in range(9)]
    assert sizes == [8, 8, 8, 16, 16, 16, 16, 12, 16]
    assert [plan.rate_factor(step) for step in (0, 2, 3, 8)] == [1.0, 1.0, 2**0.5, 2**0.5]
    assert plan.plan(3).num_leaves == 4


def test_the_end_stays_where_it_was_when_the_batch_grows_beyond_it() -> None:
    """A run that ends before it may grow, and is then given more epochs, is one that was given them at once."""
    plan = BatchPlan(sampler())
    assert [plan.epoch_of(step) for step in (0, 12, 13)] == [0, 0, 1]
    plan.grow(14, 16, 1.0)  # eight samples into epoch 1
    assert [plan.total_steps(epochs) for epochs in (1, 2, 3)] == [13, 20, 27]
    assert [plan.epoch_of(step) for step in (12, 13, 19, 20, 27)] == [0, 1, 1, 2, 3]


def test_what_is_planned_already_does_not_change() -> None:
    plan = BatchPlan(sampler())
    plan.grow(3, 16, 1.0)
    for first_step, batch_size in ((3, 32), (2, 32), (5, 16), (5, 101)):
        with pytest.raises(ValueError, match="samples from step"):
            plan.grow(first_step, batch_size, 1.0)


def test_a_record_of_another_job_is_refused() -> None:
    grown = BatchPlan(sampler())
    grown.grow(3, 16, 1.0)
    with pytest.raises(ValueError, match="began with"):
        BatchPlan(sampler(batch_size=12)).load_state_dict(grown.state_dict())
    with pytest.raises(ValueError, match="began with"):
        BatchPlan(sampler()).load_state_dict({"stretches": []})


def test_halves_are_those_of_the_tree() -> None:
    """The left half of the root is the largest aligned block under it; the last leaf may be short."""
    plan = BatchPlan(sampler(num_samples=1000, batch_size=40))
    assert halves(plan.plan(0)) == (32, 8)  # 10 leaves: 8 and 2
    assert halves(BatchPlan(sampler(batch_size=8)).plan(0)) == (4, 4)
    assert halves(BatchPlan(sampler(batch_size=7)).plan(0)) == (4, 3)
    assert halves(BatchPlan(sampler(batch_size=4)).plan(0)) is None
