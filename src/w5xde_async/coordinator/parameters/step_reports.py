"""What workers said of the steps they computed, until those steps are committed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from w5xde_async.plan.sampler import StepPlan
from w5xde_async.wire.messages import Done


def known_mean(values: Iterable[tuple[int, float]]) -> tuple[float, int]:
    """The mean of a metric over the samples that have it, and their number. ``values``: samples and value.

    A step may return a metric for some batches alone: where it has none the value is NaN, and does not count. The mean
    is NaN where nobody has it.
    """
    total, samples = 0.0, 0
    for count, value in values:
        if not math.isnan(value):
            total, samples = total + count * value, samples + count
    return (total / samples if samples else math.nan), samples


@dataclass(frozen=True, slots=True)
class _Report:
    """One step: ``loss`` is the mean over its samples; ``metrics`` are ``known_mean``s."""

    samples: int
    leaves: int
    loss: float
    metrics: dict[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Summary:
    """Steps that were committed together, weighted by samples; those whose loss is not finite only where all are so."""

    samples: int
    leaves: int
    loss: float
    metrics: dict[str, float]


class StepReports:
    """Bounded by the steps that are leased or carried."""

    def __init__(self) -> None:
        self._reports: dict[int, _Report] = {}

    def keep(self, plan: StepPlan, done: Done) -> None:
        """A step's DONE, whose lengths have been checked."""
        samples = plan.leaf_sizes(0, plan.num_leaves)
        count = len(done.metric_names)

        def mean(values: Sequence[float]) -> float:
            return sum(n * value for n, value in zip(samples, values, strict=True)) / plan.num_samples

        metrics = {
            name: known_mean(zip(samples, done.metrics[index::count], strict=True))
            for index, name in enumerate(done.metric_names)
        }
        self._reports[plan.step] = _Report(plan.num_samples, plan.num_leaves, mean(done.losses), metrics)

    def forget(self, steps: Sequence[int]) -> None:
        """These steps are computed again."""
        for step in steps:
            self._reports.pop(step, None)

    def take(self, steps: Sequence[int]) -> Summary | None:
        """Of steps that are committed; None where nothing is known of any."""
        found = [self._reports.pop(step) for step in steps if step in self._reports]
        # Whose loss is not finite was skipped by its worker's optimizer: of what was applied it says nothing.
        found = [report for report in found if math.isfinite(report.loss)] or found
        samples = sum(report.samples for report in found)
        if not samples:
            return None
        names = dict.fromkeys(name for report in found for name in report.metrics)
        metrics = {
            name: known_mean((report.metrics[name][1], report.metrics[name][0]) for report in found
                             if name in report.metrics)[0]
            for name in names
        }  # fmt: skip
        loss = sum(report.samples * report.loss for report in found) / samples
        return Summary(samples, sum(report.leaves for report in found), loss, metrics)
