"""What stands in for samples that cannot be read: the same, in whichever order they are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.plan.bad_samples import BadSamples
from w5xde_async.plan.sampler import Sampler, StepPlan

SAMPLES = 40
SAMPLER = Sampler(num_samples=SAMPLES, batch_size=16, leaf_samples=3, seed=5)


def read(plan: StepPlan, bad: BadSamples, unreadable: set[int], leaf: int) -> list[int]:
    """As a loader does: what is found to be bad is left out, and the leaf is read anew."""
    while True:
        chosen = bad.chosen(plan, leaf * plan.leaf_samples, (leaf + 1) * plan.leaf_samples).tolist()
        wrong = next((sample for sample in chosen if sample in unreadable), None)
        if wrong is None:
            return chosen
        assert bad.found(wrong)


@given(st.sets(st.integers(0, SAMPLES - 1), max_size=SAMPLES - 17), st.randoms(use_true_random=False))
def test_leaves_are_the_same_in_whichever_order_they_are_read(
    unreadable: set[int], random: np.random.Generator
) -> None:
    known = BadSamples()
    known.restore(unreadable)
    lazy = BadSamples(len(unreadable))
    for plan in map(SAMPLER.plan, range(4)):
        if set(plan.indices.tolist()) <= unreadable:
            continue
        leaves = list(range(plan.num_leaves))
        random.shuffle(leaves)
        for leaf in leaves:
            found = read(plan, lazy, unreadable, leaf)
            assert found == read(plan, known, unreadable, leaf)
            planned = plan.leaf_indices(leaf).tolist()
            assert len(found) == len(planned)
            assert all(one == other for one, other in zip(found, planned, strict=True) if other not in unreadable)
            assert set(found) <= set(plan.indices.tolist()) - unreadable
    assert set(lazy.all()) <= unreadable


def test_the_next_of_the_step_stands_in() -> None:
    plan, bad = SAMPLER.plan(0), BadSamples(3)
    order = plan.indices.tolist()
    for place in (1, 2, 15):
        assert bad.found(order[place])
    assert bad.chosen(plan, 0, 3).tolist() == [order[0], order[3], order[3]]
    assert bad.chosen(plan, 15, 16).tolist() == [order[0]]


def test_more_than_the_bound_are_refused_and_known_ones_are_not_new() -> None:
    bad = BadSamples(2)
    bad.restore([7])
    assert bad.found(7)
    assert bad.found(8)
    assert not bad.found(9)
    assert bad.found(8)
    assert (bad.all(), len(bad)) == ([7, 8], 2)
    assert (bad.unrecorded(), bad.unrecorded()) == ((8,), ())


def test_a_step_of_which_nothing_is_left() -> None:
    plan, bad = SAMPLER.plan(2), BadSamples()
    bad.restore(plan.indices.tolist())
    with pytest.raises(ValueError, match="none of the 8 samples of step 2 can be read"):
        bad.chosen(plan, 0, 3)
