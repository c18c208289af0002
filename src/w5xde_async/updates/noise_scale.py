"""Gradient noise scale, and a batch size that grows with it.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.1. A gradient over n
samples has E|g|^2 = |G|^2 + S / n: true gradient G, trace S of the samples' covariance. A step's m leaves of n_i
samples and its gradient over N = sum(n_i) give unbiased estimates of both, at the cost of one norm per leaf:

    small = sum(n_i |g_i|^2) / N     = |G|^2 + S / b in expectation, b = N / m
    big   = |g_step|^2               = |G|^2 + S / N
    |G|^2 ~ (N big - b small) / (N - b)        S ~ (small - big) / (1/b - 1/N)

Either one is too noisy to use alone: both are averaged (EMA), and B_noise = EMA(S) / EMA(|G|^2) (their B_simple). Far
below B_noise samples a step, twice the batch saves nearly half of the steps; far above, hardly any.
It reads only norms, holds no tensors and changes no gradient. The batch size changes what a step is: a run that grows
its batch has the same bits (G3) only where the norms do, and with them the steps at which it grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class GradientNoiseScale:
    """Running estimates of |G|^2, S and B_noise. State: two numbers and a count."""

    def __init__(self, decay: float = 0.95) -> None:
        """``decay`` of both averages per step. Raises ValueError where it is not in [0, 1)."""
        if not 0 <= decay < 1:
            raise ValueError("decay lies in [0, 1)")
        self.decay = decay
        self._square, self._trace = 0.0, 0.0  # biased towards 0 alike: the bias falls out of their ratio
        self.steps = 0

    def observe(self, leaf_squares: Sequence[float], leaf_samples: Sequence[int], step_square: float) -> bool:
        """Take in one step: |g_i|^2 of its leaves' mean gradients, their samples, |g|^2 of the step's mean gradient.

        False, and nothing is changed, for a step that says nothing: one leaf, or a number that is not finite. Raises
        ValueError where there are not as many norms as sample counts.
        """
        if len(leaf_squares) != len(leaf_samples):
            raise ValueError("as many norms as sample counts are needed")
        if len(leaf_squares) < 2 or not all(map(math.isfinite, (*leaf_squares, step_square))):
            return False
        large = sum(leaf_samples)
        small = large / len(leaf_samples)
        mean = sum(n * square for n, square in zip(leaf_samples, leaf_squares, strict=True)) / large
        square = (large * step_square - small * mean) / (large - small)
        trace = (mean - step_square) / (1 / small - 1 / large)
        self._square = self.decay * self._square + (1 - self.decay) * square
        self._trace = self.decay * self._trace + (1 - self.decay) * trace
        self.steps += 1
        return True

    @property
    def value(self) -> float | None:
        """B_noise in samples; infinite where noise hides the gradient altogether; None before the first step."""
        if not self.steps:
            return None
        if self._square <= 0:
            return math.inf
        return max(self._trace, 0.0) / self._square

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"square": self._square, "trace": self._trace, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._square, self._trace = float(state["square"]), float(state["trace"])
        self.steps = int(state["steps"])


def learning_rate_factor(old: float, new: float, noise: float, exponent: float) -> float:
    """What to multiply the learning rate by when the batch goes from ``old`` to ``new`` samples.

    ((1 + B_noise / old) / (1 + B_noise / new))^exponent: the paper's optimal step eps_max / (1 + B_noise / B), section
    2.2, at both sizes. ``exponent`` 1 for SGD, 1/2 for Adam and its kin. Far below B_noise that is the linear and the
    square-root rule, (new / old)^exponent; far above it the learning rate stays.
    """
    if math.isinf(noise):
        return float((new / old) ** exponent)
    return float(((1 + noise / old) / (1 + noise / new)) ** exponent)


@dataclass(frozen=True, kw_only=True)
class GrowthRuleConfig:
    """``batch_size`` to begin with and ``cap``, in samples.

    ``patience``: steps before each change, so that the averages have seen enough of the present size. ``exponent`` of
    the learning-rate rule: 1 for SGD, 1/2 for Adam.
    """

    batch_size: int
    cap: int
    patience: int = 100
    exponent: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.cap or self.patience < 1:
            raise ValueError("batch_size lies between 1 and cap, patience is at least 1")


class GrowthRule:
    """Doubles the batch while the noise scale asks for at least twice as much, never over the cap, never down.

    Doubling keeps a step's tree regular, and a factor of two of B_noise is all that the estimate is good for.
    """

    def __init__(self, config: GrowthRuleConfig) -> None:
        self.config = config
        self.target_batch = config.batch_size
        self._since_change = 0

    def update(self, noise: float | None) -> float:
        """One step was committed; ``noise`` is B_noise now. Gives what to multiply the learning rate by, 1 if nothing
        changed; ``target_batch`` is the size of the steps that are planned from now on."""
        self._since_change += 1
        doubled = 2 * self.target_batch
        if noise is None or self._since_change < self.config.patience or doubled > min(noise, self.config.cap):
            return 1.0
        factor = learning_rate_factor(self.target_batch, doubled, noise, self.config.exponent)
        self.target_batch = doubled
        self._since_change = 0
        return factor

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"target_batch": self.target_batch, "since_change": self._since_change}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.target_batch, self._since_change = int(state["target_batch"]), int(state["since_change"])
