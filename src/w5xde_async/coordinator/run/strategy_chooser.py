"""``auto``: measures the workers and their links, chooses rule, codec and round, and watches whether that holds.

What is measured is sent anyway: the model on its way to the workers, and their first results. The first steps are exact
synchronous ones. Where three of them are done in a few seconds, they count; where the first would take longer, the
choice is made as soon as every worker has told how long a leaf takes it and has sent the first part of a result.

Then the choice is compared with what is seen, every few minutes. It is made anew where workers compute much less of the
time than it foresaw, twice in a row, and another choice promises much more. Each new choice doubles the time until the
next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.coordinator.training import Training
from w5xde_async.plan.strategy_choice import PAIRS, Choice, Figures, Situation, choose, predict
from w5xde_async.updates.config import UpdateConfig

_PROBE_STEPS = 3
_PROBE_S = 5.0  # without a commit, or for one: then what is there of a step is enough
_PROBE_BYTES = 1 << 20  # of results, of every worker whose results are larger
_PATIENCE_S = 60.0  # with workers that have computed nothing: then the choice is made without them
_LEAST_S = 1e-6
_LOOK_S = 120.0  # between two looks at what was chosen
_MOST_LOOK_S = 3600.0
_SHORT = 0.2  # a choice that misses what it foresaw by less of the time is left alone
_BETTER = 0.15  # and so is one that nothing promises to better by more


def chosen(choice: Choice, update: UpdateConfig) -> UpdateConfig:
    """``update`` with what was chosen in place of its own."""
    return replace(
        update,
        rule=choice.update,
        codec=choice.codec,
        downlink=choice.downlink,
        inner_steps=max(choice.inner_steps, 1),
        fragments=choice.fragments,
        overlap=choice.delay,
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """What one worker's session has counted so far."""

    compute_s: float = 0.0
    up_bytes: int = 0
    up_s: float = 0.0
    down_bytes: int = 0
    down_s: float = 0.0

    def since(self, before: _Counts) -> _Counts:
        return _Counts(
            self.compute_s - before.compute_s, self.up_bytes - before.up_bytes, self.up_s - before.up_s,
            self.down_bytes - before.down_bytes, self.down_s - before.down_s,
        )  # fmt: skip


def _counts(training: Training) -> dict[str, _Counts]:
    found = {}
    for worker, session in training.roster.sessions.items():
        member, links = training.roster.member(worker), session.links
        found[worker] = _Counts(
            0.0 if member is None else member.compute_s, sum(link.result_bytes for link in links),
            max(link.receiving_s for link in links), sum(link.outbox.paced_bytes for link in links),
            max(link.outbox.paced_s for link in links),
        )  # fmt: skip
    return found


class StrategyChooser:
    """Watches one run, from its first step to its end."""

    def __init__(
        self, batch_leaves: int, possible: Collection[tuple[str, str]] = PAIRS, *, kept: UpdateConfig | None = None
    ) -> None:
        """``possible``: rules and codecs that job and settings go with. ``kept``: what an earlier start chose, where
        the run goes on by that: then only the leases ahead are found anew."""
        self._batch_leaves, self._possible, self._kept = batch_leaves, possible, kept
        self._commits = 0
        self._since: float | None = None  # the last commit, or, before the first, when work began
        self._began: float | None = None  # when work began
        self.current: Choice | None = None  #: what the run goes by, once that was chosen
        self._look_s, self._looked_at = _LOOK_S, 0.0
        self._before: dict[str, _Counts] = {}  # at the last look
        self._looks = self._misses = 0

    def after_commit(self, training: Training) -> Choice | None:
        """The first choice, as soon as enough is known for one; a ``kept`` one has no reason."""
        now = training.context.clock()
        self._began = now if self._began is None else self._began
        seconds, self._since = 0.0 if self._since is None else now - self._since, now
        self._commits += 1
        if self.current is not None or (self._commits < _PROBE_STEPS and seconds < _PROBE_S):
            return None
        return self._first(training)

    def tick(self, training: Training) -> tuple[Choice | None, str]:
        """Look at a step that takes long, or at what became of a choice. A choice to go on by, and what to say."""
        now = training.context.clock()
        if self.current is not None:
            return self._look(training, now)
        if self._commits or not training.phase.begun:
            return None, ""
        if self._since is None:
            self._since = self._began = now
        if now - self._since < _PROBE_S:
            return None, ""
        return self._first(training), ""

    def begins(self, choice: Choice, training: Training) -> None:
        """The run goes on by ``choice``."""
        self.current, self._misses, self._looks = choice, 0, 0
        self._begin_look(training, training.context.clock())

    def _first(self, training: Training) -> Choice | None:
        situation = self.situation(training)
        if situation is None:
            return None
        if self._kept is None:
            return choose(situation, possible=self._possible)
        return predict(situation, self._kept.rule, self._kept.codec, self._kept.inner_steps)

    def _begin_look(self, training: Training, now: float) -> None:
        self._before, self._looked_at = _counts(training), now

    def _look(self, training: Training, now: float) -> tuple[Choice | None, str]:
        """Compare what was foreseen with what the workers that were there all the time have done."""
        current = self.current
        assert current is not None
        counts = _counts(training)
        if counts.keys() != self._before.keys():  # somebody came or went: that is another situation
            self._misses = 0
            self._begin_look(training, now)
            return None, ""
        seconds = now - self._looked_at
        if not counts or seconds < self._look_s:
            return None, ""
        lately = {worker: count.since(self._before[worker]) for worker, count in counts.items()}
        # A worker that waits for a slower one does not wait for the network.
        seen = min(1.0, max(count.compute_s for count in lately.values()) / seconds)
        self._looks += 1
        said = f"auto: workers compute {seen:.0%} of the time ({current.utilization:.0%} foreseen)"
        said = said if self._looks == 1 else ""
        self._begin_look(training, now)
        self._misses = self._misses + 1 if seen < current.utilization - _SHORT else 0
        if self._misses < 2:
            return None, said
        self._misses = 0
        self._look_s = min(2 * self._look_s, _MOST_LOOK_S)
        situation = self.situation(training, lately)
        if situation is None:
            return None, said
        better = choose(situation, possible=self._possible)
        same = (better.update, better.codec, better.inner_steps) == (
            current.update, current.codec, current.inner_steps,
        )  # fmt: skip
        if same or better.utilization < seen + _BETTER:
            return None, said
        return better, said

    def situation(self, training: Training, counts: dict[str, _Counts] | None = None) -> Situation | None:
        """Figures of all workers; None where one has none yet.

        Up, the bytes of results over the time that each was on its way. Down, what the kernel could not take at once;
        a model that it takes whole shows nothing, and the line is taken to be as fast down as up.
        """
        layout = training.context.layout
        trained = [bucket for bucket in layout.result_buckets if layout.groups[bucket.group].role == "grad"]
        num_values = sum(bucket.numel for bucket in trained)
        batch_leaves = self._batch_leaves if isinstance(training, SyncTraining) else 1
        waited = self._began is not None and training.context.clock() - self._began >= _PATIENCE_S
        figures = []
        for worker, count in (_counts(training) if counts is None else counts).items():
            session = training.roster.sessions[worker]
            leaf_s = training.pacing.leaf_s(worker) or (0.0 if session.report is None else session.report.leaf_s)
            enough = 1 if counts is not None or self._commits else min(_PROBE_BYTES, 4 * num_values)
            if not leaf_s or count.up_bytes < enough:
                if waited:
                    continue
                return None
            link, up_bytes_s = session.link.figures, count.up_bytes / max(count.up_s, _LEAST_S)
            figures.append(
                Figures(
                    batch_s=max(leaf_s * batch_leaves, _LEAST_S),
                    up_bytes_s=up_bytes_s,
                    down_bytes_s=count.down_bytes / max(count.down_s, _LEAST_S) or up_bytes_s,
                    round_trip_s=0.0 if link is None else link.rtt_s,
                )
            )
        if not figures:
            return None
        return Situation(
            num_values=num_values,
            batch_bytes=training.context.loader.leaf_bytes,
            num_layers=len(trained),
            workers=tuple(figures),
            steps_left=max(training.total_steps - training.progress, 1),
        )
