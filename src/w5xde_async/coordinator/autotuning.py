"""``auto``: measures the workers and their links in the first steps, chooses rule and codec, and goes on looking.

The first steps are exact synchronous ones and count. Then ``plan.tuning`` chooses; where that is another rule, the
service begins the next phase of the run with it. Under every rule codec and H are looked at again at each round's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from w5xde_async.coordinator.rounds import Rounds
from w5xde_async.coordinator.training import Training
from w5xde_async.plan.tuning import Choice, Figures, Situation, Tuner, choose
from w5xde_async.updates.config import UpdateConfig

__all__ = ["Autotuning", "chosen"]

_PROBE_STEPS = 3
_PROBE_S = 5.0  # of a step: then one is enough
_LEAST_S = 1e-6
_SHORT_ROUND = 100  # own steps


def chosen(choice: Choice, update: UpdateConfig) -> UpdateConfig:
    """``update`` with what was chosen in place of its own."""
    momentum = update.outer_momentum
    if momentum == UpdateConfig().outer_momentum and choice.inner_steps < _SHORT_ROUND:
        momentum = 0.5  # Deltas of short rounds are alike, and 0.9 makes steps of ten times their length of them
    return replace(
        update, outer_momentum=momentum, rule=choice.update, codec=choice.codec, downlink=choice.downlink,
        inner_steps=max(choice.inner_steps, 1), fragments=choice.fragments, overlap=max(choice.delay, 0),
    )  # fmt: skip


class Autotuning:
    """Watches the commits of one run. ``tell`` gets a sentence for people."""

    def __init__(self, batch_leaves: int, tell: Callable[[str], None]) -> None:
        self._batch_leaves, self._tell = batch_leaves, tell
        self._commits, self._last = 0, 0.0
        self._seen: dict[str, tuple[int, float, int, float]] = {}  # worker -> bytes and seconds up, and down
        self._tuner: Tuner | None = None
        self.choice: Choice | None = None  #: what the first steps have shown; None while they go on

    def resume(self, update: UpdateConfig, step: int) -> None:
        """The run goes on from ``step`` by what was chosen before."""
        if step and update.rule != "sync":
            choice = Choice(
                update=update.rule, codec=update.codec, downlink=update.downlink_codec.name,
                inner_steps=update.inner_steps, fragments=update.fragments, delay=update.overlap, leases_ahead=2,
                utilization=0.0, reason="as before",
            )  # fmt: skip
            self.choice, self._tuner = choice, Tuner(choice)

    def after_commit(self, training: Training | Rounds) -> bool:
        """Look at the links. True where the run is to go on by another rule or form of results: ``choice``."""
        now = training.clock()
        seconds, self._last = now - self._last, now
        if self.choice is not None:
            return self._look_again(training)
        self._commits += 1
        if self._commits < _PROBE_STEPS and seconds < _PROBE_S:
            return False
        situation = self.situation(training)
        if situation is None:
            return False
        self.choice = choose(situation)
        self._tuner = Tuner(self.choice)
        self._tell(f"auto: {self.choice.reason}")
        return self.changes(training)

    def changes(self, training: Training | Rounds) -> bool:
        """Whether the choice needs another kind of training than this one."""
        choice, update = self.choice, training.config.update
        if choice is None:
            return False
        return choice.update != update.rule or (update.plain and choice.codec != "raw")

    def _look_again(self, training: Training | Rounds) -> bool:
        situation = self.situation(training)
        if self._tuner is None or situation is None:
            return False
        found = self._tuner.look(situation)
        if found is None:
            return False
        self.choice = found
        self._tell(f"auto: {found.reason}")
        if self.changes(training):
            return True
        training.retune(found.codec, found.downlink, found.inner_steps)
        return False

    def situation(self, training: Training | Rounds) -> Situation | None:
        """Figures of all workers since the last time; None where one has none."""
        layout = training.layout
        figures = []
        for worker, session in training.sessions.items():
            leaf_s = training.pacing.leaf_s(worker)
            known = self._seen.get(worker, (0, 0.0, 0, 0.0))
            now = (
                session.link.bytes_received, session.receiving_s, session.link.bytes_sent, session.outbox.sending_s,
            )  # fmt: skip
            if any(new < old for new, old in zip(now, known, strict=True)):
                known = (0, 0.0, 0, 0.0)  # it has connected anew
            if leaf_s is None or now[0] == known[0] or now[2] == known[2]:
                return None
            self._seen[worker] = now
            link = session.link.figures
            figures.append(
                Figures(
                    batch_s=max(leaf_s * (self._batch_leaves if isinstance(training, Training) else 1), _LEAST_S),
                    up_bytes_s=(now[0] - known[0]) / max(now[1] - known[1], _LEAST_S),
                    down_bytes_s=(now[2] - known[2]) / max(now[3] - known[3], _LEAST_S),
                    round_trip_s=0.0 if link is None else link.rtt_s,
                )
            )
        if not figures:
            return None
        trained = [bucket for bucket in layout.result_buckets if layout.groups[bucket.group].role == "grad"]
        return Situation(
            num_values=sum(bucket.numel for bucket in trained), batch_bytes=training.loader.leaf_bytes,
            num_layers=len(trained), workers=tuple(figures),
        )  # fmt: skip
