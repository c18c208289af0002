"""What must hold while a simulation runs: values, versions, terms, bounds, deadlines, durability.

Everything is compared when it happens: parameters with the plain loop's after every commit, the ledger's leaves with
the step's, what a resume begins with with what had been reported safe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.simulator.cluster import Cluster
from tests.simulator.loop import HOST, Host
from tests.simulator.model import Expected, Shape, explain_difference

from w5xde_async.coordinator.memory_bound import most_vectors
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.plan.ledger import COORDINATOR
from w5xde_async.telemetry.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    JournalFailed,
    JournalRestored,
    RunFinished,
    RunStarted,
    StepCommitted,
    Warned,
    WorkerJoined,
    WorkerLeft,
)

__all__ = ["Checks", "WatchedTraining"]


class WatchedTraining(SyncTraining):
    """The training room; after what sessions and the clock do to it, its books must balance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        host = HOST.get()
        assert host is not None
        host.training = self  # type: ignore[attr-defined]
        self._watch = host.world.watch  # type: ignore[attr-defined]
        commit = self.aggregator.commit

        async def committed() -> Any:
            result = await commit()
            host.world.on_applied(host, self, self.version + 1)  # type: ignore[attr-defined]
            return result

        self.aggregator.commit = committed  # type: ignore[method-assign]
        leave = self.roster.left

        def left(session: Any, reason: str, *, clean: bool) -> None:
            leave(session, reason, clean=clean)
            self._watch(self, "left")

        self.roster.left = left  # type: ignore[method-assign]

    def tick(self, now: float) -> None:
        super().tick(now)
        self._watch(self, "tick")

    def done(self, session: Any, done: Any) -> None:
        super().done(session, done)
        self._watch(self, "done")

    def failed(self, session: Any, failed: Any) -> None:
        super().failed(session, failed)
        self._watch(self, "failed")

    def draining(self, session: Any, drain: Any) -> None:
        super().draining(session, drain)
        self._watch(self, "draining")


class Checks(Cluster):
    """The part of a world that sees."""

    shape: Shape
    expected: Expected

    def __init__(self, seed: str, root: Path, *, verbose: bool) -> None:
        super().__init__(seed, root, verbose=verbose)
        self.vanished: set[str] = set()  # workers whose link ended without a goodbye, and who did not come back
        self.history: list[int] = []  # the term in which each version was made, of the history that survives
        self.durable_step = 0
        self.highest_term = 0
        self.recomputed = 0

    # -- checks ------------------------------------------------------------------------------------------------

    def watch(self, training: SyncTraining, what: str) -> None:
        try:
            training.ledger.validate()
        except (AssertionError, KeyError) as error:
            self.violate("ledger", f"after {what}: {error!r}")
        sessions, ahead = len(training.roster.sessions), self.config.pacing.leases_ahead
        # A drained or replaced worker's leases go with it; two steps are open; audits have a bound of their own.
        if training.ledger.num_open > 2 * ahead * max(sessions, 1) + ahead + self.config.audit.most_open:
            self.violate("memory", f"{training.ledger.num_open} leases open for {sessions} workers")
        here = (*training.roster.sessions, COORDINATOR)
        if training.ledger.num_open != sum(training.ledger.num_held(worker) for worker in here):
            self.violate("ledger", f"after {what}: a lease is open whose worker is not here")
        leaves = self.shape.sampler.plan(0).num_leaves
        bound = most_vectors(leaves, self.config)
        vectors = training.store.num_vectors
        if vectors > bound:
            self.violate("memory", f"{vectors} result vectors are out, the bound is {bound}")
        if what == "tick":
            self._overdue(training)
        for session in training.roster.sessions.values():
            queued = len(session.outbox._items)
            # Every DONE is answered, also one that is played again, until its sender is dropped for taking nothing.
            if queued > 160 + 4 * self.faults["frames replayed"]:
                self.violate("memory", f"{queued} frames queued for one worker")

    def _overdue(self, training: SyncTraining) -> None:
        """After a tick nobody holds a lease beyond its deadline while another could have it. Those of a coordinator
        that has been superseded count no longer: it has stood still until it was, and hears of its workers first."""
        now, ready = training.context.clock(), [member.worker_id for member in training.roster.membership.ready()]
        for worker, session in training.roster.sessions.items():
            for grant in training.ledger.held(worker):
                late_s = now - training.ledger.began_at(grant) - grant.deadline_s * training.ledger._patience(grant)
                others = any(other != worker for other in ready)
                counts = grant.lease >> 32 >= self.highest_term
                if counts and grant.step == training.version and late_s > 0.1 and others:
                    if all(link.receiving != grant.lease for link in session.links) and not session.ended.is_set():
                        self.violate("deadline", f"lease {grant.lease} of {session.name} is {late_s:.1f} s overdue")

    def on_event(self, host: Host, event: Event) -> None:
        if host.state != Host.RUNNING:
            return
        if isinstance(event, StepCommitted):
            self._on_commit(host, event)
        elif isinstance(event, RunStarted):
            self._on_start(host, event)
        elif isinstance(event, CheckpointSaved):
            self.note("saved", f"{host.name} step {event.step}")
            if host.term >= self.highest_term:  # else it counts no longer
                self.durable_step = max(self.durable_step, event.step)
        elif isinstance(event, CheckpointFailed | JournalFailed | JournalRestored):
            self.note("disk", f"{host.name} {type(event).__name__} step {event.step}")
        elif isinstance(event, WorkerJoined):
            self.vanished.discard(event.worker_id)
            self._on_join(host, event.name)
        elif isinstance(event, WorkerLeft):
            self.note("left", f"{event.name} {event.reason}")
            if not event.clean:
                self.vanished.add(event.worker_id)
            if "broke the protocol" in event.reason and not self.hostile:
                self.violate("unexpected", f"{event.name}: {event.reason}")
            if not event.clean and not event.name.startswith("r") and not self.num_losses and not self.num_stalls:
                self.violate("unexpected", f"{event.name} was lost without a fault: {event.reason}")
        elif isinstance(event, Warned):
            self.note("warned", f"{host.name} {event.text[:160]}")
        elif isinstance(event, RunFinished):
            self.note("ended", f"{host.name} {event.outcome} step {event.step}")

    def _on_join(self, host: Host, name: str) -> None:
        for worker in self.hosts:
            if worker.name == name:
                late = worker.ended.done()  # what it said before, to one that was stopped since
                if worker.terms_served and host.term < max(worker.terms_served) and not late:
                    self.violate("term", f"{name} joins term {host.term} after {max(worker.terms_served)}")
                worker.terms_served.add(host.term)

    def _on_start(self, host: Host, event: RunStarted) -> None:
        self.note("start", f"{host.name} term {event.term} from step {event.resumed_step}")
        host.term = event.term
        if event.term <= self.highest_term:
            self.violate("term", f"term {event.term} after {self.highest_term}")
        self.highest_term = max(self.highest_term, event.term)
        if event.resumed_step < self.durable_step:
            self.violate("durability", f"resumed at step {event.resumed_step}, {self.durable_step} was durable")
        if event.resumed_step > len(self.history):
            self.violate("versions", f"resumed at step {event.resumed_step} of {len(self.history)} ever made")
        self.recomputed += max(0, len(self.history) - event.resumed_step)
        del self.history[event.resumed_step :]
        training = host.training  # type: ignore[attr-defined]
        self._compare(training, event.resumed_step, "resumed")
        self._count(training)

    def _count(self, training: SyncTraining) -> None:
        """See which leaves the ledger counts as applied when a step is closed."""
        real = training.ledger.close

        def close(step: int) -> None:
            opened = training.ledger._steps[step]
            done = sorted((s.block.start, s.block.stop) for s in opened.slots.values() if s.finished)
            leaves = [leaf for start, stop in done for leaf in range(start, stop)]
            if leaves != list(range(self.shape.sampler.plan(step).num_leaves)):
                self.violate("lost", f"step {step} was committed with leaves {leaves} by the ledger")
            real(step)

        training.ledger.close = close  # type: ignore[method-assign]

    def on_applied(self, host: Host, training: SyncTraining, version: int) -> None:
        """A version has been made, in the memory of one coordinator."""
        self.note("applied", f"{host.name} {version}")
        if host.term < self.highest_term:
            # From bytes that it had received before: nobody follows it, nothing of it may survive.
            self.hit("superseded coordinator committed in vain")
            return
        if version != len(self.history) + 1:
            self.violate("versions", f"commit of version {version} where {len(self.history) + 1} is the next")
        self.history.append(host.term)
        self._compare(training, version, "committed")

    def _on_commit(self, host: Host, event: StepCommitted) -> None:
        """Whoever follows the run is told of a commit."""
        self.note("commit", f"{host.name} {event.step} loss {event.loss:.6g} skipped {event.skipped}")
        if host.term < self.highest_term or event.step >= len(self.expected.losses):
            return
        if event.step > len(self.history):
            self.violate("versions", f"told of version {event.step} of {len(self.history)}")
        journaling = host.training.journal  # type: ignore[attr-defined]
        if journaling is not None and journaling.sound:
            self.durable_step = max(self.durable_step, event.step)
        plan = self.shape.sampler.plan(event.step - 1)
        if (event.epoch, event.samples) != (plan.epoch, plan.num_samples):
            self.violate("bits", f"step {event.step} counts {event.samples} samples of epoch {event.epoch}")
        if event.loss != self.expected.losses[event.step]:
            self.violate("bits", f"loss of step {event.step} is {event.loss}, not {self.expected.losses[event.step]}")
        rows = event.metrics.get("rows")
        want = sum(size**2 for size in plan.leaf_sizes(0, plan.num_leaves)) / plan.num_samples
        if rows != want:
            self.violate("bits", f"metric of step {event.step} is {rows}, {want} expected")

    def _compare(self, training: SyncTraining, version: int, what: str) -> None:
        if version >= len(self.expected.digests):
            self.violate("versions", f"{what} version {version} of {len(self.expected.digests) - 1}")
            return
        state = training.aggregator.state
        if state.digest() != self.expected.digests[version]:
            text = explain_difference(self.shape, state.views, state.layout, self.expected.tensors[version])
            self.violate(text.partition(":")[0], f"{what} version {version}: {text}")
        # At a commit the step itself is counted a little later.
        steps = version if what == "resumed" else version - 1
        total = sum(self.shape.sampler.plan(step).num_samples for step in range(steps))
        if (samples := training.phase.samples_applied) != total:
            self.violate("twice", f"{what} version {version}: {samples} samples counted, not {total}")

    @property
    def num_losses(self) -> int:
        """How often a link or a worker has been lost so far."""
        kinds = (
            "link",
            "cut",
            "partition",
            "worker killed",
            "worker without",
            "worker stopped",
            "half",
            "worker reads",
        )
        return sum(n for kind, n in self.faults.items() if any(word in kind for word in kinds))

    @property
    def num_stalls(self) -> int:
        """What may make a worker that is well look as if it were not."""
        kinds = ("delay spike", "coordinator", "replayed", "leaf failed", "disk", "drained", "joiner")
        return sum(n for kind, n in self.faults.items() if any(word in kind for word in kinds))
