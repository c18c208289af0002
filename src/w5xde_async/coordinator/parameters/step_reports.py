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
    """One step: ``loss`` is the mean over its samples; ``metrics`` are ``known_mean``s. ``skipped``: by its worker's
    own optimizer."""

    samples: int
    leaves: int
    loss: float
    metrics: dict[str, tuple[float, int]]
    skipped: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """Steps that were committed together. Loss and metrics are weighted by samples; those of steps whose loss is not
    finite are in them only where all are so. ``skipped``: steps of them that no worker's optimizer made."""

    samples: int
    leaves: int
    loss: float
    metrics: dict[str, float]
    skipped: int


class StepReports:
    """Bounded by the steps that are leased or carried."""

    def __init__(self) -> None:
        self._reports: dict[int, _Report] = {}

    def keep(self, plan: StepPlan, done: Done, *, skipped: bool = False) -> None:
        """A step's DONE, whose lengths have been checked. ``skipped``: by its worker's own optimizer."""
        samples = plan.leaf_sizes(0, plan.num_leaves)
        count = len(done.metric_names)

        def mean(values: Sequence[float]) -> float:
            return sum(n * value for n, value in zip(samples, values, strict=True)) / plan.num_samples

        metrics = {
            name: known_mean(zip(samples, done.metrics[index::count], strict=True))
            for index, name in enumerate(done.metric_names)
        }
        self._reports[plan.step] = _Report(plan.num_samples, plan.num_leaves, mean(done.losses), metrics, skipped)

    def forget(self, steps: Sequence[int]) -> None:
        """These steps are computed again."""
        for step in steps:
            self._reports.pop(step, None)

    def take(self, steps: Sequence[int]) -> Summary | None:
        """Of steps that are committed; None where nothing is known of any."""
        taken = [self._reports.pop(step) for step in steps if step in self._reports]
        if not taken:
            return None
        # Whose loss is not finite was skipped by its worker's optimizer: of what was applied it says nothing.
        found = [report for report in taken if math.isfinite(report.loss)] or taken
        names = dict.fromkeys(name for report in found for name in report.metrics)
        metrics = {
            name: known_mean((report.metrics[name][1], report.metrics[name][0]) for report in found
                             if name in report.metrics)[0]
            for name in names
        }  # fmt: skip
        return Summary(
            samples=sum(report.samples for report in taken), leaves=sum(report.leaves for report in taken),
            loss=sum(report.samples * report.loss for report in found) / sum(report.samples for report in found),
            metrics=metrics, skipped=sum(report.skipped for report in taken),
        )  # fmt: skip
