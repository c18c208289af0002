"""``auto``: measures the workers and their links in the first steps, chooses rule and codec, and goes on looking.

The first steps are exact synchronous ones and count. Then ``plan.tuning`` chooses; where that is another rule, the
service begins the next phase of the run with it. Under every rule codec and H are looked at again at each round's end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.memory_bound import memory_bound_bytes
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.coordinator.training import Training
from w5xde_async.hub.members.session import Session
from w5xde_async.plan.tuning import PAIRS, Choice, Figures, Situation, Tuner, choose
from w5xde_async.updates.config import UpdateConfig

__all__ = ["StrategyTuner", "chosen"]

_PROBE_STEPS = 3
_PROBE_S = 5.0  # of a step: then one is enough
_LEAST_S = 1e-6
_ENOUGH_BYTES = 64 << 10  # to measure a rate anew


def chosen(choice: Choice, update: UpdateConfig) -> UpdateConfig:
    """``update`` with what was chosen in place of its own."""
    return replace(
        update, rule=choice.update, codec=choice.codec, downlink=choice.downlink,
        inner_steps=max(choice.inner_steps, 1), fragments=choice.fragments, overlap=max(choice.delay, 0),
    )  # fmt: skip


@dataclass(slots=True)
class _Rate:
    """Bytes per second of one way, from counters of bytes and of seconds that begin anew with each link."""

    session: Session | None = None
    counted: tuple[int, float] = (0, 0.0)
    bytes_s: float | None = None

    def look(self, session: Session, nbytes: int, seconds: float) -> None:
        """Measure anew where enough has passed since the last time; else what was known stays."""
        if session is not self.session:
            self.session, self.counted = session, (0, 0.0)
        passed = nbytes - self.counted[0]
        if passed >= (1 if self.bytes_s is None else _ENOUGH_BYTES):
            self.bytes_s = passed / max(seconds - self.counted[1], _LEAST_S)
            self.counted = nbytes, seconds


class StrategyTuner:
    """Watches the commits of one run. ``tell`` gets a sentence for people."""

    def __init__(
        self,
        batch_leaves: int,
        tell: Callable[[str], None],
        config: CoordinatorConfig,
        possible: Collection[tuple[str, str]] = PAIRS,
    ) -> None:
        """``possible``: rules and codecs that job and settings go with."""
        self._batch_leaves, self._tell, self._config, self._possible = batch_leaves, tell, config, set(possible)
        self._commits, self._last = 0, 0.0
        self._rates: dict[str, tuple[_Rate, _Rate]] = {}  # worker -> up and down
        self._tuner: Tuner | None = None
        self._said: tuple[str, bool, int] | None = None  # what the bound on memory goes by
        self.choice: Choice | None = None  #: what the first steps have shown; None while they go on

    def resume(self, update: UpdateConfig, step: int) -> None:
        """The run goes on from ``step`` by what was chosen before."""
        if step and update.rule != "sync":
            self._keep(update)

    def stay(self, update: UpdateConfig) -> None:
        """What was chosen cannot be: it is not chosen again, and the run goes on by ``update`` as before."""
        if self.choice is not None:
            self._possible.discard((self.choice.update, self.choice.codec))
        self._keep(update)

    def _keep(self, update: UpdateConfig) -> None:
        choice = Choice(
            update=update.rule, codec=update.codec, downlink=update.downlink_codec.name,
            inner_steps=update.inner_steps if update.local else 0, fragments=update.fragments, delay=update.overlap,
            leases_ahead=2, utilization=0.0, reason="as before",
        )  # fmt: skip
        self.choice, self._tuner = choice, Tuner(choice, possible=self._possible)
        self._said = choice.update, choice.codec != "raw", choice.leases_ahead  # at this start

    def lead(self, training: Training) -> None:
        """Have as many leases sent ahead as the choice asks for, and no fewer than the settings do; and say what may be
        held then, where it is not what was said before."""
        if self.choice is None:
            return
        pacing, layout = training.pacing, training.context.layout
        ahead = max(self.choice.leases_ahead, training.context.config.pacing.leases_ahead)
        pacing.config = replace(pacing.config, leases_ahead=ahead)
        at_first = "sync", False, training.context.config.pacing.leases_ahead
        said = self.choice.update, self.choice.codec != "raw", ahead
        if said != (self._said or at_first):
            self._said = said
            config = replace(self._config, update=training.context.config.update, pacing=pacing.config)
            bound = memory_bound_bytes(layout.vector_bytes, layout.state_bytes, self._batch_leaves, config)
            self._tell(
                f"auto: workers have {ahead} leases at once; for them the coordinator holds at most "
                f"{bound / 2**30:,.1f} GiB from now on"
            )

    def after_commit(self, training: Training) -> bool:
        """Look at the links. True where the run is to go on by another rule or form of results: ``choice``."""
        now = training.context.clock()
        seconds, self._last = now - self._last, now
        if self.choice is not None:
            return self._look_again(training)
        self._commits += 1
        if self._commits < _PROBE_STEPS and seconds < _PROBE_S:
            return False
        situation = self.situation(training)
        if situation is None:
            return False
        self.choice = choose(situation, possible=self._possible)
        self._tuner = Tuner(self.choice, possible=self._possible)
        self._tell(f"auto: {self.choice.reason}")
        if self.changes(training):
            return True
        self.lead(training)
        return False

    def changes(self, training: Training) -> bool:
        """Whether the choice needs another kind of training than this one."""
        choice, update = self.choice, training.context.config.update
        if choice is None:
            return False
        # Exact sync has another form of results and parameters than sync with a codec, there and back.
        formed = choice.update == "sync" and (choice.codec == "raw") != (update.codec == "raw")
        return choice.update != update.rule or formed

    def _look_again(self, training: Training) -> bool:
        situation = self.situation(training)
        if self._tuner is None or situation is None:
            return False
        found = self._tuner.look(situation)
        self.choice = self._tuner.choice
        if found is None:
            self.lead(training)
            return False
        self._tell(f"auto: {found.reason}")
        if self.changes(training):
            return True
        training.retune(found.codec, found.downlink, found.inner_steps)
        self.lead(training)
        return False

    def situation(self, training: Training) -> Situation | None:
        """Figures of all workers, as new as there are; None where one has none yet.

        Up, the bytes of results over the time that each was on its way. Down, what the kernel could not take at once;
        a model that it takes whole shows nothing, and the line is taken to be as fast down as up.
        """
        layout = training.context.layout
        figures = []
        for worker, session in training.roster.sessions.items():
            leaf_s = training.pacing.leaf_s(worker)
            up, down = self._rates.setdefault(worker, (_Rate(), _Rate()))
            up.look(session, session.result_bytes, session.receiving_s)
            down.look(session, session.outbox.paced_bytes, session.outbox.paced_s)
            if leaf_s is None or up.bytes_s is None:
                return None
            link = session.link.figures
            figures.append(
                Figures(
                    batch_s=max(leaf_s * (self._batch_leaves if isinstance(training, SyncTraining) else 1), _LEAST_S),
                    up_bytes_s=up.bytes_s,
                    down_bytes_s=down.bytes_s or up.bytes_s,
                    round_trip_s=0.0 if link is None else link.rtt_s,
                )
            )
        if not figures:
            return None
        if len(self._rates) > 2 * len(figures) + 64:
            self._rates = {worker: self._rates[worker] for worker in training.roster.sessions}
        trained = [bucket for bucket in layout.result_buckets if layout.groups[bucket.group].role == "grad"]
        return Situation(
            num_values=sum(bucket.numel for bucket in trained), batch_bytes=training.context.loader.leaf_bytes,
            num_layers=len(trained), workers=tuple(figures),
        )  # fmt: skip
