"""A gate against results of an unusual size, learned from those that were accepted.

A norm over median + k * MAD of the last accepted norms is refused; an accepted one over the median is scaled down to
it. Results are not of one length, so like is compared with like: each known norm counts as long as it may be for the
samples of the one that is judged, and as it came where that is shorter. With n samples here and n_i there:

    mean gradients   norm_i max(1, sqrt(n_i / n))    fewer samples have more noise in their mean
    Deltas           norm_i max(1, n / n_i)          more steps go further, at most in proportion; a walk that turns
                                                     back or noise make it less, and a short one is no longer than a
                                                     long one

Neither a short last batch nor the short last piece of a worker that leaves is over the bound for its length. MAD is the
median absolute deviation (Hampel 1974). Both hold while fewer than half of the window is bad, which a mean and a
standard deviation do not. The gate bounds what one result can move (G13). It does not see a result of usual size and
wrong direction (a sign flip): for those, the averages of ``robust``, or re-execution of the block.

Two limits, on purpose. The first ``warmup`` results pass with no check of size: nothing is known yet. And training
may change its gradients' size for good, after which a gate that learns only from what it accepts would refuse for ever:
after ``reopen_after`` refusals in a row it forgets and learns anew.
State: ``window`` pairs of numbers and one counter.

``BlockGate`` is the same test for the synchronous tree, where nothing may be scaled down or left out (the bits of an
honest run are the same with and without it): it only says which blocks somebody else should compute too.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BlockGate", "NormGate", "NormGateConfig", "median_and_mad"]


def median_and_mad(values: Iterable[float]) -> tuple[float, float]:
    """Median and median absolute deviation. Raises statistics.StatisticsError where there is no value."""
    known = list(values)
    median = statistics.median(known)
    return median, statistics.median(abs(value - median) for value in known)


@dataclass(frozen=True, kw_only=True)
class NormGateConfig:
    """Knobs of the gate.

    ``deviations`` is k. ``window``: accepted norms that are remembered. ``warmup``: results before the gate works.
    ``least_spread``: the MAD is taken for at least this part of the median, so that norms which happen to be equal
    leave room for the next. ``reopen_after``: refusals in a row after which the gate learns anew; where a part p of the
    results is bad, at random, they alone make any given run of refusals so long with probability p^reopen_after.
    """

    deviations: float = 6.0
    window: int = 64
    warmup: int = 8
    least_spread: float = 0.05
    reopen_after: int = 16

    def __post_init__(self) -> None:
        if not (self.deviations > 0 and self.least_spread > 0):
            raise ValueError("deviations and least_spread are above 0")
        if not 1 <= self.warmup <= self.window or self.reopen_after < 1:
            raise ValueError("warmup lies between 1 and window, reopen_after is at least 1")


class NormGate:
    """One gate for one kind of vector: mean gradients, or (``deltas``) how far workers went."""

    def __init__(self, config: NormGateConfig | None = None, *, deltas: bool = False) -> None:
        self.config, self._deltas = config or NormGateConfig(), deltas
        self._accepted: deque[tuple[float, int]] = deque(maxlen=self.config.window)
        self._refused_in_row = 0

    def bound(self, samples: int = 1) -> float:
        """The largest norm of so many samples that is accepted now; infinite while the gate warms up."""
        return self._median_and_bound(samples)[1]

    def judge(self, norm: float, samples: int = 1) -> float:
        """The factor to scale a result of this finite norm by: 1, less where over the median, 0 where refused."""
        median, bound = self._median_and_bound(samples)
        if norm > bound:
            self._refused_in_row += 1
            if self._refused_in_row == self.config.reopen_after:
                self._accepted.clear()
                self._refused_in_row = 0
            return 0.0
        self._refused_in_row = 0
        # The norm as it came: clipped ones would pull the median down, and the median the next ones.
        self._accepted.append((norm, samples))
        return median / norm if norm > median else 1.0

    def _median_and_bound(self, samples: int) -> tuple[float, float]:
        if len(self._accepted) < self.config.warmup:
            return float("inf"), float("inf")
        median, mad = median_and_mad([norm * self._longer(samples / known) for norm, known in self._accepted])
        return median, median + self.config.deviations * max(mad, self.config.least_spread * median)

    def _longer(self, samples: float) -> float:
        """How many times longer a result of so many times the samples may be."""
        return max(1.0, samples if self._deltas else 1 / math.sqrt(samples))

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and numbers."""
        return {
            "accepted": [norm for norm, _ in self._accepted], "samples": [samples for _, samples in self._accepted],
            "refused_in_row": self._refused_in_row,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        norms = [float(norm) for norm in state["accepted"]]
        samples = state.get("samples")  # older checkpoints have none: what they know is learned anew
        self._accepted = deque(maxlen=self.config.window)
        if samples is not None:
            self._accepted.extend(zip(norms, map(int, samples), strict=True))
        self._refused_in_row = int(state["refused_in_row"])


class BlockGate:
    """Which blocks of a synchronous step are unusually large. Norms are of a block's sum, divided by its samples.

    Median and MAD are of the norms' logarithms: norms of small blocks are spread over factors, not around a value, and
    the more so the better a model fits. The spread counts as at least a factor of four in all. A block of fewer samples
    than most has more noise in its mean, so its bound is larger by the root of their ratio. While fewer than ``warmup``
    norms are known the bound is ten times their median; while none is, everything is over it.
    """

    _REFRESH = 16  # norms that are learned between two computations of median and MAD

    def __init__(self, config: NormGateConfig | None = None) -> None:
        self.config = config or NormGateConfig()
        self._known: deque[tuple[float, int]] = deque(maxlen=self.config.window)
        self._bound, self._samples = 0.0, 1.0
        self._age = 0

    @property
    def cold(self) -> bool:
        """True while no norm is known."""
        return not self._known

    def bound(self, samples: int) -> float:
        """The largest usual norm of a block of so many samples."""
        return self._bound * max(1.0, math.sqrt(self._samples / samples))

    def learn(self, norm: float, samples: int) -> None:
        """A block of this norm counted."""
        self._known.append((norm, samples))
        self._age += 1
        if self._age < self._REFRESH and len(self._known) > self.config.warmup:
            return
        self._age = 0
        median, mad = median_and_mad([math.log(max(norm, 1e-300)) for norm, _ in self._known])
        self._samples = statistics.median([samples for _, samples in self._known])
        warm = len(self._known) >= self.config.warmup
        spread = max(self.config.deviations * mad, math.log(4.0)) if warm else math.log(10.0)
        self._bound = math.exp(min(median + spread, 700.0))
