"""(seed, epoch) -> order -> leaves: which samples make which step, as a pure function.

An epoch's order is the stable argsort of 64-bit keys drawn from Philox (numpy guarantees that bit stream over
versions; it does not guarantee ``permutation``), so a run resumed years later sees the same samples. A step never
crosses an epoch: its last step may be shorter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: The order of so many samples is computed in less than a millisecond.
QUICK_SAMPLES = 10_000
_PLANS_KEPT = 32
#: Of a stream that does not say: more than any run reads.
ENDLESS_SAMPLES = 1 << 60


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed derived from its parts: the same parts, the same seed, anywhere."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of ``range(num_samples)`` for one epoch: int64, read-only."""
    keys = np.random.Philox(key=seed_for("order", seed, epoch)).random_raw(num_samples)
    order = _stable_argsort(keys)
    order.setflags(write=False)
    return order


def _stable_argsort(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    order = np.argsort(keys)  # several times as fast as a stable sort, and the same where no two keys are equal
    ranked = keys[order]
    if (ranked[1:] == ranked[:-1]).any():
        order = np.argsort(keys, kind="stable")
    return order.astype(np.int64, copy=False)


class Orders:
    """The orders of the last two epochs that were asked for, each of which takes seconds to compute where it is long.

    A thread may ask for one ahead of need: whoever loses the race to keep one computes it again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], NDArray[np.int64]] = {}

    def there(self, num_samples: int, seed: int, epoch: int) -> bool:
        """Whether ``get`` takes no time."""
        return (num_samples, seed, epoch) in self._kept

    def get(self, num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """``epoch_order``."""
        key = num_samples, seed, epoch
        order = self._kept.get(key)
        if order is None or next(reversed(self._kept)) != key:
            order = epoch_order(*key) if order is None else order
            others = [item for item in self._kept.items() if item[0] != key]
            self._kept = dict([*others[-1:], (key, order)])
        return order


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's samples: ``indices`` (int64, in leaf order) and the number of samples of each leaf."""

    step: int
    epoch: int
    indices: NDArray[np.int64]
    leaf_samples: int
    num_samples: int = field(init=False)
    num_leaves: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", len(self.indices))
        object.__setattr__(self, "num_leaves", -(-len(self.indices) // self.leaf_samples))

    def samples_in(self, start: int, stop: int) -> int:
        """Samples of the leaves from ``start`` up to ``stop``; the step's last may have fewer than ``leaf_samples``."""
        return min(stop * self.leaf_samples, len(self.indices)) - start * self.leaf_samples

    def leaf_sizes(self, start: int, stop: int) -> tuple[int, ...]:
        """Samples of each of these leaves."""
        return (*(self.leaf_samples,) * (stop - start - 1), self.samples_in(stop - 1, stop))

    def leaf_indices(self, leaf: int) -> NDArray[np.int64]:
        """Dataset indices of one leaf."""
        return self.indices[leaf * self.leaf_samples : (leaf + 1) * self.leaf_samples]


class Steps(Protocol):
    """Which samples make which step: a ``Sampler``, or the ``BatchPlan`` of a run whose batch grows."""

    @property
    def seed(self) -> int:
        """Of the epochs' orders."""

    @property
    def batch_size(self) -> int:
        """Samples of a step, the newest where it grows."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch at that size."""

    def plan(self, step: int) -> StepPlan:
        """Step ``step`` of the run, counted from 0 over all epochs."""

    def epoch_of(self, step: int) -> int:
        """The epoch that step ``step`` lies in: so many epochs are over before it."""

    def total_steps(self, epochs: int) -> int:
        """Steps until ``epochs`` (at least one) are over, as planned now."""

    def ready(self, epoch: int) -> bool:
        """Whether the steps of an epoch can be planned at once."""

    def prepare(self, epoch: int) -> None:
        """Have it so. Takes seconds where an epoch has millions of samples; may run in a thread."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Cuts epochs into steps and steps into leaves. ``batch_size`` counts samples a step.

    Of a ``stream`` the indices go on from epoch to epoch, and what shuffles is its reader. One that does not say how
    many samples it has is a single epoch of ``ENDLESS_SAMPLES``.
    """

    num_samples: int
    batch_size: int
    leaf_samples: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    stream: bool = False
    orders: Orders = field(default_factory=Orders, repr=False, compare=False)
    _plans: dict[int, StepPlan] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def plan(self, step: int) -> StepPlan:
        """Step ``step`` of the run, counted from 0 over all epochs."""
        plan = self._plans.get(step)
        if plan is None:
            epoch, begin, end = self._place(step)
            plan = StepPlan(step, epoch, self.indices(epoch, begin, end), self.leaf_samples)
            # Each is asked for several times. None is kept beyond its epoch, whose order it would keep.
            if len(self._plans) == _PLANS_KEPT or next(iter(self._plans.values()), plan).epoch != epoch:
                self._plans.clear()
            self._plans[step] = plan
        return plan

    def indices(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        """What lies at these places of an epoch: int64."""
        if self.shuffle and not self.stream:
            return self.order(epoch)[begin:end]
        before = epoch * self.num_samples if self.stream else 0
        return np.arange(before + begin, before + end, dtype=np.int64)

    def size(self, step: int) -> StepPlan:
        """Like ``plan``, for its numbers alone: every index is -1, so that no order is needed."""
        epoch, begin, end = self._place(step)
        return StepPlan(step, epoch, np.broadcast_to(np.int64(-1), (end - begin,)), self.leaf_samples)

    def _place(self, step: int) -> tuple[int, int, int]:
        epoch, at = divmod(step, self.steps_per_epoch)
        begin = at * self.batch_size
        return epoch, begin, min(begin + self.batch_size, self.num_samples)

    def epoch_of(self, step: int) -> int:
        """The epoch that step ``step`` lies in."""
        return step // self.steps_per_epoch

    def total_steps(self, epochs: int) -> int:
        """Steps until ``epochs`` epochs are over."""
        return epochs * self.steps_per_epoch

    def order(self, epoch: int) -> NDArray[np.int64]:
        """``epoch_order``, kept."""
        return self.orders.get(self.num_samples, self.seed, epoch)

    def ready(self, epoch: int) -> bool:
        """Whether the steps of an epoch can be planned at once."""
        quick = not self.shuffle or self.stream or self.num_samples <= QUICK_SAMPLES
        return quick or self.orders.there(self.num_samples, self.seed, epoch)

    def prepare(self, epoch: int) -> None:
        """Have it so."""
        if self.shuffle and not self.stream:
            self.order(epoch)
