"""Steps of a run whose batch grows: which samples make which step, still a pure function of what is recorded.

The record is a list of ``Stretch``: from its ``first_step`` on, steps have ``batch_size`` samples, beginning at a place
in an epoch, and the learning rate is multiplied by ``rate_factor``. A run that does not grow is one stretch, and then
every step is the ``Sampler``'s own. Growth appends a stretch; nothing before it changes, so a run that is resumed from
the record plans the same steps, and each epoch's order stays the same permutation, each sample once, wherever it grows.

Who grows it (``updates.noise_scale`` decides: ``GrowthRule``) and how that keeps equal bits (G3): the noise scale has
to see the same numbers whatever the workers, so it takes the two halves of the root, never blocks as they came:

    observe([|l|^2 / n_l^2, |r|^2 / n_r^2], [n_l, n_r], |l + r|^2 / n^2)      for sums l, r over n_l + n_r = n samples

with the squares added bucket by bucket in bucket order. A lease then is at most half of a step. The growth that the
commit of step s decides begins with step s + 1 + ``ahead``, a constant, for steps that are planned ahead.

The learning-rate rule is ``learning_rate_factor``'s: linear for SGD, the square root for Adam and its kin, both less
the nearer the batch comes to the noise scale. It multiplies the group's rate around ``optimizer.step()`` alone; what a
scheduler sets, and multiplies further, is untouched by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from w5xde_async.plan.sampler import Sampler, StepPlan
from w5xde_async.plan.tree import right_half


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps from ``first_step`` on; the first begins ``offset`` samples into ``epoch``."""

    first_step: int
    epoch: int
    offset: int
    batch_size: int
    rate_factor: float = 1.0


def halves(plan: StepPlan) -> tuple[int, int] | None:
    """Samples under the root's left and right half; None for a step of one leaf, which says nothing of noise."""
    samples = right_half(plan.num_leaves) * plan.leaf_samples
    return (samples, plan.num_samples - samples) if samples else None


class BatchPlan:
    """The sampler of a run whose batch may grow. ``sampler.batch_size`` is what it begins with."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._stretches = [Stretch(first_step=0, epoch=0, offset=0, batch_size=sampler.batch_size)]

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        return tuple(self._stretches)

    @property
    def seed(self) -> int:
        """The sampler's."""
        return self._sampler.seed

    @property
    def batch_size(self) -> int:
        """Of the newest stretch, in samples."""
        return self._stretches[-1].batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch of the newest stretch."""
        return self._per_epoch(self._stretches[-1])

    def rate_factor(self, step: int) -> float:
        """What the learning rate of a step is multiplied by."""
        return self._stretch(step).rate_factor

    def plan(self, step: int) -> StepPlan:
        """Step ``step`` of the run, counted from 0 over all epochs and stretches."""
        stretch = self._stretch(step)
        epoch, begin = self._place(stretch, step)
        size = self._sampler.num_samples
        end = min(begin + stretch.batch_size, size)
        return StepPlan(step, epoch, self._sampler.indices(epoch, begin, end), self._sampler.leaf_samples)

    def grow(self, first_step: int, batch_size: int, rate_factor: float) -> Stretch:
        """From ``first_step`` on, which nobody may have planned yet. ``rate_factor`` is that of the change.

        Raises ValueError where the newest stretch begins there or later, or the batch does not grow.
        """
        last = self._stretches[-1]
        if first_step <= last.first_step or batch_size <= last.batch_size or batch_size > self._sampler.num_samples:
            raise ValueError(f"{batch_size} samples from step {first_step} after {last}")
        epoch, offset = self._place(last, first_step)
        grown = Stretch(
            first_step=first_step, epoch=epoch, offset=offset, batch_size=batch_size,
            rate_factor=last.rate_factor * rate_factor,
        )  # fmt: skip
        self._stretches.append(grown)
        return grown

    def epoch_of(self, step: int) -> int:
        """The epoch that step ``step`` lies in: so many epochs are over before it."""
        return self._place(self._stretch(step), step)[0]

    def total_steps(self, epochs: int) -> int:
        """Steps until ``epochs`` (at least one) are over, as planned now; fewer after each growth."""
        last = next(stretch for stretch in reversed(self._stretches) if stretch.epoch < epochs)
        return last.first_step + self._rest(last) + (epochs - last.epoch - 1) * self._per_epoch(last)

    def ready(self, epoch: int) -> bool:
        """Whether the steps of an epoch can be planned at once."""
        return self._sampler.ready(epoch)

    def prepare(self, epoch: int) -> None:
        """Have it so."""
        self._sampler.prepare(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"stretches": [asdict(stretch) for stretch in self._stretches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Raises ValueError where it began with another batch size."""
        found = [Stretch(**stretch) for stretch in state["stretches"]]
        if found[:1] != self._stretches[:1]:
            raise ValueError(f"the checkpoint began with {found[:1]}, not with {self._stretches[0]}")
        self._stretches = found

    def _stretch(self, step: int) -> Stretch:
        return self._stretches[bisect_right(self._stretches, step, key=lambda stretch: stretch.first_step) - 1]

    def _per_epoch(self, stretch: Stretch) -> int:
        return replace(self._sampler, batch_size=stretch.batch_size).steps_per_epoch

    def _rest(self, stretch: Stretch) -> int:
        """Steps of the epoch that the stretch begins in."""
        whole, rest = divmod(self._sampler.num_samples - stretch.offset, stretch.batch_size)
        return whole if self._sampler.drop_last or not rest else whole + 1

    def _place(self, stretch: Stretch, step: int) -> tuple[int, int]:
        """Epoch of a step, and where in it the step begins."""
        number, rest = step - stretch.first_step, self._rest(stretch)
        if number < rest:
            return stretch.epoch, stretch.offset + number * stretch.batch_size
        epochs, at = divmod(number - rest, self._per_epoch(stretch))
        return stretch.epoch + 1 + epochs, at * stretch.batch_size
