"""Which samples a warning of a skipped step names."""

from __future__ import annotations

import math

import numpy as np
import pytest

from w5xde_async.coordinator.training import named_samples
from w5xde_async.plan.sampler import StepPlan

NAN = math.nan


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ((), "its samples are 9, 8, 7, 6, 5"),
        ((1.0, 1.0, 1.0), "its samples are 9, 8, 7, 6, 5"),  # the sum alone is not finite
        ((NAN, NAN, math.inf), "its samples are 9, 8, 7, 6, 5"),
        ((1.0, NAN, 1.0), "the samples of its leaves without a finite loss are 7, 6"),
        ((NAN, 1.0, math.inf), "the samples of its leaves without a finite loss are 9, 8, 5"),
    ],
)
def test_samples_are_those_of_the_leaves_at_fault(losses: tuple[float, ...], told: str) -> None:
    plan = StepPlan(0, 0, np.arange(9, 4, -1, dtype=np.int64), 2)
    assert named_samples(plan, losses) == told


@pytest.mark.parametrize(("count", "ends"), [(32, "30, 31"), (33, "30, 31, ..."), (100_000, "30, 31, ...")])
def test_a_warning_names_some_of_many(count: int, ends: str) -> None:
    told = named_samples(StepPlan(0, 0, np.arange(count, dtype=np.int64), 1000))
    assert told.startswith("its samples are 0, 1, 2")
    assert told.endswith(f" {ends}")
