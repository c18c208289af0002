"""The batch of a synchronous run, growing with the gradient noise scale: what commits show, and what follows from it.

The numbers are those of the root's two halves, which are the same whatever the workers, so the run stays the same bits
(``plan.batching``). Its state belongs into every checkpoint: which steps have how many samples, and the averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from w5xde_async.errors import UsageError
from w5xde_async.job import rate_of, shown_end
from w5xde_async.params.reducer import Halves
from w5xde_async.plan.batching import BatchPlan, halves
from w5xde_async.plan.sampler import Sampler, StepPlan
from w5xde_async.telemetry.events import BatchGrown
from w5xde_async.updates.noise_scale import GradientNoiseScale, GrowthRule, GrowthRuleConfig

#: Steps that are planned, and may be leased, beyond the current one.
AHEAD = 1
#: The book of a step is kept leaf by leaf, by the ledger, the loader and the tree of every bucket.
_MOST_LEAVES = 1 << 16


class BatchGrowth:
    """Decides at each commit; ``plan`` has the steps. Nothing of it is random or knows time or workers."""

    def __init__(
        self, sampler: Sampler, optimizer: torch.optim.Optimizer, *, target: int | Literal["auto"], patience: int,
        epochs: int | None, max_steps: int | None,
    ) -> None:  # fmt: skip
        """Samples a step begin at ``sampler.batch_size`` and end at ``target``, or the dataset where that is smaller.

        The run ends after ``epochs`` or ``max_steps``, whichever comes first. Raises UsageError.
        """
        if sampler.batch_size % sampler.leaf_samples:
            raise UsageError(
                f"a batch that grows is made of whole leaves: batch_size {sampler.batch_size} is no multiple of "
                f"{sampler.leaf_samples} samples (microbatch_size x accumulate_grad_batches); change one of them"
            )
        if sampler.batch_size == sampler.leaf_samples:
            raise UsageError(
                f"a batch grows by what the halves of a step differ, and a step of {sampler.batch_size} samples is one "
                "leaf here: give the job a smaller microbatch_size or accumulate_grad_batches, or a larger batch_size"
            )
        if target != "auto" and target < sampler.batch_size:
            raise UsageError(
                f"--target-batch {target} is too small: the job's batch_size is {sampler.batch_size}; give "
                f"{sampler.batch_size} or more, or auto"
            )
        if rate_of(optimizer) is None:
            raise UsageError(
                "--target-batch multiplies the learning rate as the batch grows, and no param_group of "
                f"{type(optimizer).__name__} has an lr: give them one that its steps use, or leave --target-batch out"
            )
        most = min(sampler.num_samples, _MOST_LEAVES * sampler.leaf_samples)
        cap = max(sampler.batch_size, most if target == "auto" else min(target, most))
        exponent = 1.0 if isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD) else 0.5
        self.plan = BatchPlan(sampler)
        self.noise = GradientNoiseScale()
        self.growth = GrowthRule(
            GrowthRuleConfig(batch_size=sampler.batch_size, cap=cap, patience=patience, exponent=exponent)
        )
        self._sampler, self._epochs, self._max_steps = sampler, epochs, max_steps

    @property
    def total_steps(self) -> int:
        """Where the run ends, as planned now."""
        ends = [] if self._max_steps is None else [self._max_steps]
        return min(ends if self._epochs is None else [*ends, self.plan.total_steps(self._epochs)])

    @property
    def most_leaves(self) -> int:
        """Leaves of the largest step that there may be."""
        return -(-max(self.growth.config.cap, self.growth.target_batch) // self._sampler.leaf_samples)

    def observe(self, step: StepPlan, squares: Halves | None) -> BatchGrown | None:
        """A step was applied, of such sums: what a person is told where the batch grows by it."""
        samples = halves(step)
        if squares is not None and samples is not None:
            left, right = samples
            of_halves = [squares.left / left**2, squares.right / right**2]
            self.noise.observe(of_halves, [left, right], squares.whole / step.num_samples**2)
        noise, before = self.noise.value, self.growth.target_batch
        factor = self.growth.update(noise)
        if noise is None or self.growth.target_batch == before:
            return None
        first = step.step + 1 + AHEAD
        ends = self.total_steps
        grown = self.plan.grow(first, self.growth.target_batch, factor)
        if first >= ends:
            return None  # only a run that is extended comes to it
        return BatchGrown(
            step=step.step + 1, after_step=first, batch_size_before=before, batch_size=grown.batch_size,
            noise_scale=noise, rate_factor=factor, total_steps=shown_end(self.total_steps),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "plan": self.plan.state_dict(), "noise": self.noise.state_dict(), "growth": self.growth.state_dict()
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Raises ValueError where it began with another batch size."""
        self.plan.load_state_dict(state["plan"])
        self.noise.load_state_dict(state["noise"])
        self.growth.load_state_dict(state["growth"])
