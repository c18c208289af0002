"""A gate against results of an unusual size, learned from those that were accepted.

A norm over median + k * MAD of the last accepted norms is refused; an accepted one over the median is scaled down to
it. Results are not of one length, so like is compared with like: each known norm is first scaled up to
the judged result's length, and never down. With length n of the judged result and n_i of the known one:

    mean gradients   norm_i max(1, sqrt(n_i / n))    n: samples; fewer have more noise in their mean
    pseudo-gradients norm_i max(1, n / n_i)          n: samples times their steps' learning rate; such a path leads
                                                     further, at most in proportion; one that turns back or noise make
                                                     it less, and a short one is no longer than a long one

Neither a short last batch nor the short last piece of a worker that leaves is over the bound for its length, nor what a
rate that rises makes larger. Zeros, as a rate that begins at zero makes them, are accepted and have no vote. MAD is the
median absolute deviation (Hampel 1974). Both hold while fewer than half of the window is bad, which a mean and a
standard deviation do not. The gate bounds what one result can move (G13). It does not see a result of usual size and
wrong direction (a sign flip): for those, the median of ``averages``, or re-execution of the block.

Every sender has one vote: the norms that are known of it weigh as much, all together, as those of any other, however
fast it is. Those that have left have one vote together. Where the votes are divided equally the larger norms have it.

If more than half of the workers that are present exceed the bound on the same step, it counts, scaled down
(``vouched``): then the work is unusual, not the worker. A worker that is alone has only itself to agree with: the
second such result of one step counts, and the gate learns anew from it.

The gate has three limits, on purpose. First, the first result of all is compared with nothing, and those up to
``warmup`` with ten times the (lower) median of the ones before. Second, training may change its gradients' size for
good, and a gate that learns only from what it accepts would then refuse for ever. So the gate learns anew once more
than half of the workers that are present have been refused together at least ``reopen_after`` times, each an equal part
of that; it learns from the last norm of each of them. Third, where half of those present lie, it protects nobody.
State: at most ``window`` pairs of numbers for each sender, and one more for each that is refused.

``BlockGate`` gives the bound for blocks of the synchronous tree. It compares logarithms, allows at least a factor of
four, and has no votes. It refuses nothing and scales nothing down, so the bits of an honest run are the same with and
without it: it only says which blocks somebody else should compute too (``plan.verification``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

_Known = tuple[float, float]  # a norm, and of what length
_FIRST = 10.0  # times the median that the first results may have


def median_and_mad(values: Iterable[float]) -> tuple[float, float]:
    """Median and median absolute deviation. Raises statistics.StatisticsError where there is no value."""
    known = list(values)
    median = statistics.median(known)
    return median, statistics.median(abs(value - median) for value in known)


@dataclass(frozen=True, kw_only=True)
class NormGateConfig:
    """Knobs of the gate.

    ``deviations`` is k. ``window``: accepted norms that are remembered of a sender, and that are looked at in all.
    ``warmup``: results until there is a median to go by. ``least_spread``: the MAD is taken for at least this part of
    the median, so that norms which happen to be equal leave room for the next. ``reopen_after``: see above.
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
    """One gate for one kind of vector: mean gradients, or (``pseudo_gradients``) how far workers went."""

    def __init__(self, config: NormGateConfig | None = None, *, pseudo_gradients: bool = False) -> None:
        self.config, self._pseudo_gradients = config or NormGateConfig(), pseudo_gradients
        self._accepted: dict[str, deque[_Known]] = {}  # by sender, who sent last at the end; "": of those that left
        self._refused: dict[str, tuple[int, _Known]] = {}  # whose last were refused: how many in a row, and the last

    def bound(self, length: float = 1) -> float:
        """The largest norm of a result of this length that is accepted now; infinite while nothing is known."""
        return self._median_and_bound(length)[1]

    def judge(
        self, norm: float, length: float = 1, *, sender: str = "one", present: int = 1, vouched: float = 0.0
    ) -> float:  # fmt: skip
        """The factor to scale a result of this finite norm by: 1, less where over the median, 0 where refused.

        ``sender``: who sent it; ``present``: how many there are that may send. Up to ``vouched`` it counts even
        where it is over the bound, which learns nothing from it unless the sender is alone.
        """
        median, bound = self._median_and_bound(length)
        if norm > bound:
            self._refused[sender] = (self._refused.get(sender, (0,))[0] + 1, (norm, length))
            share = -(-self.config.reopen_after // (present // 2 + 1))
            agreed = {who: last for who, (count, last) in self._refused.items() if count >= share}
            if present == 1 and norm <= vouched:
                agreed[sender] = (norm, length)
            if 2 * len(agreed) > present:
                self._accepted = {who: self._remembered([last]) for who, last in agreed.items()}
                self._refused.clear()
            return min(1.0, median / norm) if norm <= vouched else 0.0
        self._refused.pop(sender, None)
        # The norm as it came: clipped ones would pull the median down, and the median the next ones.
        if sender not in self._accepted:
            self._accepted[sender] = self._remembered()
        known = self._accepted[sender] = self._accepted.pop(sender)  # to the end
        if norm > 0:
            known.append((norm, length))
        return median / norm if norm > median else 1.0

    def left(self, sender: str) -> None:
        """The sender is not present any more: what it sent is a part of one common memory."""
        self._refused.pop(sender, None)
        known = self._accepted.pop(sender, None)
        if known is not None and sender:
            self._accepted = {"": self._accepted.get("", self._remembered()), **self._accepted}
            self._accepted[""].extend(known)

    def _remembered(self, known: Iterable[_Known] = ()) -> deque[_Known]:
        return deque(known, maxlen=self.config.window)

    def _heard(self) -> dict[str, list[_Known]]:
        """The last norms of each sender, ``window`` in all, and as many of each as there may be."""
        window = self.config.window
        senders = list(islice(reversed(self._accepted.items()), window))
        each = max(1, window // max(1, len(senders)))
        return {who: list(known)[-each:] for who, known in reversed(senders)}

    def _median_and_bound(self, length: float) -> tuple[float, float]:
        votes = [
            (norm * self._longer(length, known), 1 / len(heard))
            for heard in self._heard().values()
            for norm, known in heard
        ]
        if len(votes) < self.config.warmup:
            return math.inf, _FIRST * statistics.median_low([norm for norm, _ in votes]) if votes else math.inf
        median = _voted(votes)
        mad = _voted([(abs(norm - median), vote) for norm, vote in votes])
        return median, median + self.config.deviations * max(mad, self.config.least_spread * median)

    def _longer(self, length: float, known: float) -> float:
        """How many times longer a result of this length may be than a known one of that."""
        if self._pseudo_gradients:
            return max(1.0, length / known) if known > 0 else 1.0
        return max(1.0, math.sqrt(known / length))

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and numbers."""
        return {
            "heard": {who: [list(known) for known in heard] for who, heard in self._accepted.items()},
            "refused": {who: [count, *last] for who, (count, last) in self._refused.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._accepted = {
            who: self._remembered((float(norm), float(length)) for norm, length in known if norm > 0)
            for who, known in state["heard"].items()
        }
        self._refused = {
            who: (int(count), (float(norm), float(length))) for who, (count, norm, length) in state["refused"].items()
        }


def _voted(votes: Iterable[tuple[float, float]]) -> float:
    """The upper weighted median of pairs of a value and its weight."""
    in_order = sorted(votes)
    half, below = sum(weight for _, weight in in_order) / 2, 0.0
    for value, weight in in_order:
        below += weight
        if below > half * (1 + 1e-9):
            return value
    return in_order[-1][0]


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
