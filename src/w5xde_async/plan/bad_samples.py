"""Samples that cannot be read: which they are, and which others stand in for them.

The next sample of its step that can be read, in the step's order and round its end, takes the place of one that cannot.
So leaves keep their sizes, and what a leaf has is a function of the step and the set of bad samples alone: of neither
who reads it, nor when, nor in which order the bad ones were found. The set is part of the run's state.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from w5xde_async.plan.sampler import StepPlan


class BadSamples:
    """The dataset's indices that are left out. ``most``: how many may be found; what a resume knew already stays."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._known: dict[int, None] = {}
        self._unrecorded: list[int] = []

    def __len__(self) -> int:
        return len(self._known)

    def found(self, sample: int) -> bool:
        """A sample cannot be read. False where no more may be left out."""
        if sample not in self._known:
            if len(self._known) >= self.most:
                return False
            self._known[sample] = None
            self._unrecorded.append(sample)
        return True

    def restore(self, samples: Iterable[int]) -> None:
        """These are known from a record of the run."""
        self._known.update(dict.fromkeys(samples))

    def all(self) -> list[int]:
        """For a checkpoint, ascending."""
        return sorted(self._known.copy())

    def unrecorded(self) -> tuple[int, ...]:
        """Those that were found since the last call: for the journal."""
        found, self._unrecorded = tuple(self._unrecorded), []
        return found

    def chosen(self, plan: StepPlan, begin: int, end: int) -> NDArray[np.int64]:
        """What is read for places ``begin`` to ``end`` of a step: int64 indices of the dataset.

        Raises ValueError where no sample of the step is left.
        """
        planned = plan.indices[begin:end]
        if not self._known:
            return planned
        bad = np.isin(planned, list(self._known))
        if not bad.any():
            return planned
        good = np.flatnonzero(~np.isin(plan.indices, list(self._known)))
        if not len(good):
            raise ValueError(f"none of the {plan.num_samples} samples of step {plan.step} can be read")
        next_good = good[np.searchsorted(good, np.flatnonzero(bad) + begin) % len(good)]
        chosen = planned.copy()
        chosen[bad] = plan.indices[next_good]
        return chosen
