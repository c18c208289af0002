"""Under a rule of local steps: how many steps each worker takes on its own, and when it submits its pseudo-gradient.

Pure bookkeeping of counts; knows no sessions and sends nothing. A **fragment** is what is asked for at once: the whole
model (``local``, ``async-local``), or one part of it after the other (``streaming``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from w5xde_async.plan.pacing import Pacing
from w5xde_async.updates.delayed import inner_steps
from w5xde_async.updates.quorum import Quorum, QuorumConfig


@dataclass(slots=True)
class Pace:
    """One worker. ``taken``: inner steps leased to it since it joined; ``due``: at which count each fragment is."""

    min_version: int
    due: list[int]
    samples: list[int]  # computed since each fragment was submitted
    paths: list[float]  # as ``updates.outer.Contribution`` has them, of these samples
    taken: int = 0
    asked: dict[int, int] = field(default_factory=dict)  # lease of a submission -> fragment
    kept: set[int] = field(default_factory=set)  # fragments whose last submission was refused and stays with it
    blocked: bool = False  # it gets nothing before its submission is judged


class LocalStepSchedule:
    """Counts by worker, and a quorum by fragment."""

    def __init__(self, *, num_fragments: int, inner_steps: int, pacing: Pacing, quorum: QuorumConfig) -> None:
        self.num_fragments, self.inner_steps = num_fragments, inner_steps
        self.quorums = [Quorum(quorum) for _ in range(num_fragments)]
        self._pacing = pacing
        self._paces: dict[str, Pace] = {}

    def join(self, worker: str, version: int) -> None:
        """A worker has come; it begins at ``version`` or later."""
        period = self.inner_steps
        due = [max(1, index * period // self.num_fragments) if index else period for index in range(self.num_fragments)]
        self._paces[worker] = Pace(version, due, [0] * self.num_fragments, [0.0] * self.num_fragments)

    def leave(self, worker: str) -> None:
        """A worker has gone."""
        self._paces.pop(worker, None)
        for quorum in self.quorums:
            quorum.left(worker)

    def of(self, worker: str) -> Pace:
        """Raises KeyError for one that has not joined."""
        return self._paces[worker]

    def period(self, worker: str) -> int:
        """H of this worker: fewer steps than the fastest takes, by its speed."""
        own, fastest = self._pacing.leaf_s(worker), self._pacing.fastest_leaf_s
        if own is None or fastest is None:
            return self.inner_steps
        return inner_steps(1 / own, max(1 / fastest, 1 / own), self.inner_steps)

    def granted(self, worker: str, now: float) -> list[int]:
        """A step was leased to ``worker``: the fragments that it is to submit after it."""
        pace = self._paces[worker]
        pace.taken += 1
        for quorum in self.quorums:
            if not quorum.knows(worker):
                quorum.joined(worker, now)
        period = self.period(worker)
        ends = [
            index for index, at in enumerate(pace.due)
            if pace.taken >= at - (self.inner_steps - period if self.num_fragments == 1 else 0)
        ]  # fmt: skip
        return ends

    def asked(self, worker: str, lease: int, fragment: int) -> None:
        """``worker`` was asked for a fragment."""
        pace = self._paces[worker]
        pace.asked[lease] = fragment
        period = self.inner_steps if self.num_fragments == 1 else self.period(worker)
        pace.due[fragment] = pace.taken + period

    def carried(self, worker: str, samples: int, rate: float) -> None:
        """An inner step is computed, at this learning rate."""
        pace = self._paces[worker]
        pace.samples = [known + samples for known in pace.samples]
        pace.paths = [known + samples * rate for known in pace.paths]

    def take(self, worker: str, fragment: int) -> tuple[int, float]:
        """Samples in a fragment's submission, and the length of their path."""
        pace = self._paces[worker]
        samples, pace.samples[fragment] = pace.samples[fragment], 0
        path, pace.paths[fragment] = pace.paths[fragment], 0.0
        return samples, path

    def owes(self, worker: str, fragment: int) -> bool:
        """Whether something was computed that it has not submitted of the fragment."""
        return self._paces[worker].samples[fragment] > 0

    def had_its_turn(self, worker: str, fragment: int) -> bool:
        """Whether the fragment's open round has an answer of this worker, and waits for none of it."""
        return self.quorums[fragment].has(worker)

    def answered(self, worker: str, lease: int, now: float, *, kept: int = 0, path: float = 0.0) -> None:
        """A submission was judged. ``kept``: samples in it that are in its worker's next one, unless twice in a row;
        ``path``: the length of theirs."""
        pace = self._paces.get(worker)
        fragment = None if pace is None else pace.asked.pop(lease, None)
        if pace is None or fragment is None:
            return
        if not self.quorums[fragment].arrived(worker, now):
            # It is in the open round for all that. What the worker is leased next may need the version that the round
            # makes: to wait for it would be to wait for ever.
            self.quorums[fragment].counted(worker)
        if kept and fragment not in pace.kept:
            pace.kept.add(fragment)
            pace.samples[fragment] += kept
            pace.paths[fragment] += path
        else:
            pace.kept.discard(fragment)

    def closes_before(self, worker: str, fragment: int, now: float) -> bool:
        """Whether the open round has an answer of this worker already, and need not stay open for others."""
        return self.had_its_turn(worker, fragment) and self.quorums[fragment].decide(now).close

    def fragments_asked(self, worker: str) -> frozenset[int]:
        """Fragments whose submission is awaited."""
        return frozenset(self._paces[worker].asked.values())

    def idle(self, worker: str, fragment: int) -> None:
        """There is nothing for a worker to do: a fragment's round does not wait for it."""
        self.quorums[fragment].left(worker)

    def closing(self, now: float) -> tuple[int | None, float | None]:
        """A fragment whose round closes now; else when to look again, if time alone may change that."""
        look: float | None = None
        for fragment, quorum in enumerate(self.quorums):
            decision = quorum.decide(now)
            if decision.close:
                return fragment, None
            if decision.look_again is not None:
                look = decision.look_again if look is None else min(look, decision.look_again)
        return None, look

    def closed(self, fragment: int, now: float, workers: Sequence[str]) -> None:
        """A round has closed; the next begins with those that are at work."""
        self.quorums[fragment].open(now, workers)
