"""When a round closes: at K of M results, and a grace for the others that is learned, not guessed.

From the K-th result on, a round stays open while a worker that has not answered is younger at its work than

    median + deviations * MAD        of the workers' last results' ages, late ones included

(age: seconds from when the worker's work began to its result; MAD: median absolute deviation). A round does
not wait at all for a worker whose own ages are mostly over that (G16). Late ages count, and every worker has as many
ages in the statistic. Otherwise slow workers would vanish from it, or fast ones, which answer more often, would outvote
them, and the grace would shrink to nothing. Before anything is learned, only the open round's own results are known.
What becomes of late work is the rule's: ``LocalStepsRule`` with ``max_staleness`` 0 gives its leaves back, with more
the pseudo-gradient joins the next round. Nothing is lost either way (G1).
Pure: time is an argument (seconds of one clock), a decision comes with its reason. State: ``window`` numbers a worker.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, islice

from w5xde_async.updates.norm_gate import median_and_mad

#: The grace goes through all ages that are known: where a round has more workers than this, not with every result.
_NEWS = 16


@dataclass(frozen=True, kw_only=True)
class QuorumConfig:
    """``part`` of the round's workers that is a quorum, in (0, 1]; ``deviations`` is k; ``window``: ages per worker."""

    part: float = 0.5
    deviations: float = 4.0
    window: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether to close now. If not, ``look_again`` is when time alone may change that; None: only an event can."""

    close: bool
    reason: str
    look_again: float | None = None


class Quorum:
    """Watches one round at a time, and the late results of the earlier ones."""

    def __init__(self, config: QuorumConfig | None = None) -> None:
        self.config = config or QuorumConfig()
        self._part = Fraction(str(self.config.part))  # as it was written: 0.28 of 25 are 7
        self._ages: dict[str, deque[float]] = {}
        self._began: dict[str, float] = {}  # workers at work -> since when, rounds ago for late ones
        self._expected: set[str] = set()
        self._arrived: set[str] = set()
        self._look_again: float | None = None  # what ``decide`` said last, and how much has changed since
        self._news = 0

    def open(self, now: float, workers: Collection[str]) -> None:
        """A round begins with these workers. One that is still at its last work is late there and not expected here."""
        for worker in self._ages.keys() - set(workers) - self._began.keys():
            del self._ages[worker]
        self._look_again = None
        self._expected = {worker for worker in workers if worker not in self._began}
        self._arrived = set()
        self._began.update(dict.fromkeys(self._expected, now))

    def joined(self, worker: str, now: float) -> None:
        """A worker takes part in the open round from now on."""
        self._look_again = None
        self._expected.add(worker)
        self._began[worker] = now

    def knows(self, worker: str) -> bool:
        """Whether the worker takes part in the open round, or is late with an earlier one."""
        return worker in self._expected or worker in self._began

    def has(self, worker: str) -> bool:
        """Whether a result of this worker is in the open round."""
        return worker in self._arrived

    def left(self, worker: str) -> None:
        """A worker is gone: nobody waits for it, and the quorum is one of those that stay."""
        self._look_again = None
        self._began.pop(worker, None)
        self._ages.pop(worker, None)
        if worker not in self._arrived:
            self._expected.discard(worker)

    def arrived(self, worker: str, now: float) -> bool:
        """A worker's result is here. True in the open round; False where it is late, or was not asked for."""
        began = self._began.pop(worker, None)
        if began is None:
            return False
        self._ages.setdefault(worker, deque(maxlen=self.config.window)).append(now - began)
        self._news += 1
        if worker in self._expected:
            self._arrived.add(worker)
            return True
        return False

    def counted(self, worker: str) -> None:
        """A late result counts in the open round; its worker's next one counts in the following round. Nobody waits."""
        self._look_again = None
        self._expected.add(worker)
        self._arrived.add(worker)

    @property
    def needed(self) -> int:
        """K for the workers of the open round."""
        return math.ceil(self._part * len(self._expected))

    @property
    def grace_s(self) -> float:
        """The age up to which a round with a quorum waits for a worker, seconds; 0 while no result is known."""
        # As many values of every worker: those of a newcomer are repeated until its window is full.
        known = [age for ages in self._ages.values() for age in islice(cycle(ages), self.config.window)]
        if not known:
            return 0.0
        median, mad = median_and_mad(known)
        return median + self.config.deviations * mad

    def decide(self, now: float) -> Decision:
        """Whether the open round closes at ``now``."""
        here, expected = len(self._arrived), len(self._expected)
        counted = f"{here} of {expected} results"
        if not expected:
            return Decision(close=False, reason="no worker is in the round")
        if here == expected:
            return Decision(close=True, reason=f"all {expected} results are in")
        if here < self.needed:
            return Decision(close=False, reason=f"{counted}, {self.needed} are a quorum")
        if self._look_again is not None and now < self._look_again and self._news < expected / _NEWS:
            return Decision(close=False, reason=f"{counted}, and grace", look_again=self._look_again)
        self._news, self._look_again = 0, None
        grace_s = self.grace_s
        waited = [self._began[worker] for worker in self._expected - self._arrived if self._usual_s(worker) <= grace_s]
        ends = max(waited, default=now) + grace_s
        if waited and now < ends:
            self._look_again = ends
            return Decision(close=False, reason=f"{counted}, grace for {len(waited)} more", look_again=ends)
        return Decision(close=True, reason=f"{counted}, and nobody else is within the grace of {grace_s:.3g} s")

    def _usual_s(self, worker: str) -> float:
        """The median of a worker's own ages; 0 where none is known, so that it gets its chance."""
        return statistics.median(self._ages.get(worker, (0.0,)))
