"""``auto``: measures the workers and their links in the first steps, and chooses rule, codec and round once.

The first steps are exact synchronous ones and count. Then ``plan.strategy_choice`` chooses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.coordinator.training import Training
from w5xde_async.plan.strategy_choice import PAIRS, Choice, Figures, Situation, choose, predict
from w5xde_async.updates.config import UpdateConfig

_PROBE_STEPS = 3
_PROBE_S = 5.0  # of a step: then one is enough
_LEAST_S = 1e-6


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


class StrategyChooser:
    """Watches the first commits of one run."""

    def __init__(
        self, batch_leaves: int, possible: Collection[tuple[str, str]] = PAIRS, *, kept: UpdateConfig | None = None
    ) -> None:
        """``possible``: rules and codecs that job and settings go with. ``kept``: what an earlier start chose, where
        the run goes on by that: then only the leases ahead are found anew."""
        self._batch_leaves, self._possible, self._kept = batch_leaves, possible, kept
        self._commits, self._last = 0, 0.0

    def after_commit(self, training: Training) -> Choice | None:
        """Look at the links. The choice, as soon as enough is known for one; a ``kept`` one has no reason."""
        now = training.context.clock()
        seconds, self._last = now - self._last, now
        self._commits += 1
        if self._commits < _PROBE_STEPS and seconds < _PROBE_S:
            return None
        situation = self.situation(training)
        if situation is None:
            return None
        if self._kept is None:
            return choose(situation, possible=self._possible)
        return predict(situation, self._kept.rule, self._kept.codec, self._kept.inner_steps)

    def situation(self, training: Training) -> Situation | None:
        """Figures of all workers; None where one has none yet.

        Up, the bytes of results over the time that each was on its way. Down, what the kernel could not take at once;
        a model that it takes whole shows nothing, and the line is taken to be as fast down as up.
        """
        layout = training.context.layout
        batch_leaves = self._batch_leaves if isinstance(training, SyncTraining) else 1
        figures = []
        for worker, session in training.roster.sessions.items():
            leaf_s = training.pacing.leaf_s(worker)
            if leaf_s is None or not session.result_bytes:
                return None
            outbox, link = session.outbox, session.link.figures
            up_bytes_s = session.result_bytes / max(session.receiving_s, _LEAST_S)
            figures.append(
                Figures(
                    batch_s=max(leaf_s * batch_leaves, _LEAST_S),
                    up_bytes_s=up_bytes_s,
                    down_bytes_s=outbox.paced_bytes / max(outbox.paced_s, _LEAST_S) or up_bytes_s,
                    round_trip_s=0.0 if link is None else link.rtt_s,
                )
            )
        if not figures:
            return None
        trained = [bucket for bucket in layout.result_buckets if layout.groups[bucket.group].role == "grad"]
        return Situation(
            num_values=sum(bucket.numel for bucket in trained),
            batch_bytes=training.context.loader.leaf_bytes,
            num_layers=len(trained),
            workers=tuple(figures),
        )
