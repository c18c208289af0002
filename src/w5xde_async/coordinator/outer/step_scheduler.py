"""Whole steps of the sampler handed out to workers, and requests for what they made of them.

The part of ``rounds`` that gives: which worker gets the next step, at which version it may begin, and when it is asked
for its Delta. What comes back is for ``Rounds``.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from w5xde_async.compute.inner import Schedule
from w5xde_async.coordinator.outer.local_step_schedule import Turns
from w5xde_async.coordinator.parameters.delta_publisher import Downlink
from w5xde_async.coordinator.training import Lifecycle, RunContext
from w5xde_async.data.epoch_prefetch import EpochPrefetch
from w5xde_async.hub.members.liveness import Held
from w5xde_async.hub.members.roster import Greeting, Roster
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.sampler import Sampler, StepPlan
from w5xde_async.plan.stream import DoneSteps, StreamGrant, StreamLedger
from w5xde_async.plan.tree import Block
from w5xde_async.telemetry.events import Waiting, Warned
from w5xde_async.updates.outer import bucket_fragments
from w5xde_async.updates.quorum import QuorumConfig
from w5xde_async.wire.messages import Lease, Submit

__all__ = ["Assigning"]


class Assigning(ABC):
    """Ledger, pace and turns of one run."""

    roster: Roster
    downlink: Downlink

    def __init__(
        self, context: RunContext, greeting: Greeting, *, sampler: Sampler, done: DoneSteps, version: int,
        schedule: Schedule | None,
    ) -> None:  # fmt: skip
        config, update = context.config, context.config.update
        self.context, self.total_steps = context, context.total_steps
        self.lifecycle = Lifecycle(context.clock, config.grace_s)
        self.pacing = Pacing(config.pacing)
        self.ledger = StreamLedger(
            total_steps=self.total_steps, done=DoneSteps.of_state(done.state_dict()),
            max_failures=context.checks.max_leaf_failures, first_lease=(greeting.message.term << 32) + 1,
            present=lambda: self.roster.present, waits=self._waits, allowed_s=self._allowed_s,
        )  # fmt: skip
        self.sampler, self.inner_schedule, self.version = sampler, schedule, version
        self._ordering = EpochPrefetch(sampler)
        self._ordering.on_ready, self._ordering.on_error = self.schedule, self.fail
        self._local, self._streams = update.local, update.rule == "streaming"
        self._with_quorum = update.rule in ("local", "streaming")
        self._buckets = bucket_fragments(context.layout, update.fragments if self._streams else 1)
        self.turns = Turns(
            num_fragments=len(self._buckets), inner_steps=update.inner_steps, pacing=self.pacing,
            quorum=QuorumConfig(part=update.quorum),
        )  # fmt: skip
        self._plans: dict[int, StepPlan] = {}
        # Granted and not sent yet, with the oldest version that will do: their data is being read.
        self._waiting: dict[str, deque[tuple[StreamGrant, int]]] = {}
        self._reading: dict[int, dict[str, None]] = {}  # step whose data is being read -> who waits for it
        self._opened = self.ledger.cursor  # steps below have been opened
        self._over = False  # nothing was left to lease the last time
        self._unjudged: Counter[str] = Counter()  # results of each worker that wait to be judged
        self._oldest: dict[int, int] = {}  # open lease -> the oldest version that will do
        self._by_version: list[tuple[int, int]] = []  # heap of (that version, lease), some that have ended among them
        self._idle: dict[str, None] = {}  # workers for which nothing was left to lease
        self._submitting = Pacing(context.config.pacing)  # what submissions under rules of local steps take
        self.num_backups = 0
        self._begun = False

    @abstractmethod
    def revoke(self, grant: Held, reason: str) -> None: ...

    @abstractmethod
    def fail(self, error: BaseException) -> None: ...

    def _warn(self, text: str) -> None:
        self.context.bus.publish(Warned(text=text))

    def _data_came(self) -> None:
        for step, _ in self.context.loader.came():
            for worker in self._reading.pop(step, ()):
                self._send_waiting(worker)

    def _plan(self, step: int) -> StepPlan:
        """For its numbers alone: a step that is done has no indices any more."""
        plan = self._plans.get(step)
        return self.sampler.size(step) if plan is None else plan

    def schedule(self, only: str | None = None) -> None:
        self._assign(None if only is None else (only,))

    def _schedule_after(self, workers: Iterable[str]) -> None:
        """Look at these workers alone, which costs the same among many as among few.

        At all of them where work came back while somebody has none. Each tick looks at all of them too.
        """
        self._assign(None if self._idle and not self.ledger.exhausted else tuple(workers))

    def _assign(self, only: Sequence[str] | None) -> None:
        if self.lifecycle.failure is not None:
            return
        if not self._begun:
            ready = self.roster.membership.num_ready
            if ready < self.context.config.min_workers:
                self.context.bus.publish(Waiting(reason=f"{ready} of {self.context.config.min_workers} workers"))
                return
            self._begun = True
        planned = self._open_ahead(self.roster.membership.num_ready)
        now = self.context.clock()
        self._forget_leases()
        if only is None:
            workers = tuple(self.roster.membership.ready_ids)
            self._idle.clear()
        else:
            workers = tuple(worker for worker in only if self.roster.membership.is_ready(worker))
        for room in range(self.pacing.config.leases_ahead if planned else 0):
            for worker in workers:
                self._grant(worker, room, now)
        if only is None and not self._local and not self.lifecycle.stopping and self.ledger.exhausted:
            self._back_up(workers, now)
        for worker in tuple(self._waiting) if only is None else only:
            self._send_waiting(worker)
        if self._local:
            self._ask_the_rest(only)
        self.lifecycle.wake.set()

    def _open_ahead(self, num_workers: int) -> bool:
        """Have the data of the next steps read. False where their order is still being computed."""
        if self.lifecycle.stopping:
            return True
        count = num_workers * self.pacing.config.leases_ahead + 1
        # Each step once on the way up; those that have come back are few, and read when they are leased if not before.
        while self._opened < min(self.ledger.cursor + count, self.ledger.total_steps):
            if self._opened not in self.ledger.done and not self._open(self._opened):
                return False
            self._opened += 1
        return all(self._open(step) for step in self.ledger.upcoming(1))

    def _open(self, step: int) -> bool:
        """Have a step's data read. False where its order is still being computed."""
        if step not in self._plans:
            if not self._ordering.ready(step, self.total_steps):
                return False
            plan = self._plans[step] = self.sampler.plan(step)
            self.context.loader.open(plan)
        return True

    def _grant(self, worker: str, room: int, now: float) -> None:
        pace = self.turns.of(worker)
        if self.lifecycle.stopping or pace.blocked or not self.roster.has_credit(worker):
            return
        if self.ledger.num_steps_held(worker) + (0 if self._local else self._unjudged[worker]) > room:
            return  # what waits to be judged is not newer parameters yet: more of it would only be staler
        deadline_s = self.pacing.deadline_s(worker, 1)
        grant = self.ledger.grant(worker, now=now, deadline_s=deadline_s, others=self.roster.membership.ready_ids)
        if grant is None:
            self._idle[worker] = None
            return
        self._idle.pop(worker, None)
        if grant.step not in self._plans:
            plan = self._plans[grant.step] = self.sampler.plan(grant.step)
            self.context.loader.open(plan)
        waiting = self._waiting.setdefault(worker, deque())
        waiting.append((grant, pace.min_version))
        if self._local:
            self._needs(grant.lease, pace.min_version)
            for fragment in self.turns.granted(worker, now):
                # A round is an average over workers: its turn comes again when this one has closed.
                if not (self._streams and self.turns.had_its_turn(worker, fragment)):
                    self._ask(worker, fragment, now)

    def _back_up(self, ready: Sequence[str], now: float) -> None:
        """Where nothing is left to lease, a worker without work computes what another is late with.

        Not under rules of local steps: a step there is part of what its worker carries. Looked at with every tick, so
        within a second.
        """
        late = []
        for grant, place in self.ledger.unbacked():
            late_s = self.pacing.late_s(grant.worker, 1)
            if late_s is not None and self.ledger.began_at(grant) + late_s * (place + 1) <= now:
                late.append(grant)
        for worker in ready if late else ():
            if self.ledger.num_held(worker) or self._unjudged[worker] or not self.roster.has_credit(worker):
                continue
            first = next((grant for grant in late if self.ledger.may_back_up(worker, grant)), None)
            if first is None or self.turns.of(worker).blocked:
                continue
            late.remove(first)
            deadline_s = self.pacing.deadline_s(worker, 1)
            second = self.ledger.back_up(first.lease, worker, now=now, deadline_s=deadline_s)
            self._waiting.setdefault(worker, deque()).append((second, self.turns.of(worker).min_version))
            self.num_backups += 1

    def _ask(self, worker: str, fragment: int, now: float) -> None:
        """Have ``worker`` submit a fragment after what was leased to it so far."""
        if fragment in self.turns.fragments_asked(worker):
            return  # it has not answered the last time yet
        grant = self.ledger.ask(worker, now=now, deadline_s=self._submitting.deadline_s(worker, 1))
        self.turns.asked(worker, grant.lease, fragment)
        pace = self.turns.of(worker)
        if not self._streams:  # it goes on from the version that its Delta becomes part of
            pace.blocked = not self._with_quorum
            # What was leased since it was asked the last time begins at a version that may be still to come, too.
            pace.min_version = max(pace.min_version, self.version) + 1
        self._waiting.setdefault(worker, deque()).append((grant, 0))

    def _ask_the_rest(self, only: Sequence[str] | None = None) -> None:
        """Where no more steps come, workers submit what they have (``only``: of whom alone that may be new)."""
        members, over = self.roster.membership.members, self.lifecycle.stopping or self.ledger.exhausted
        before, self._over = self._over, over
        now = self.context.clock()
        for worker in tuple(self.roster.sessions) if only is None or over != before else only:
            if worker not in self.roster.sessions:
                continue
            if not over and members[worker].standing is not Standing.DRAINING:
                continue
            asked, held = self.turns.fragments_asked(worker), self.ledger.num_steps_held(worker)
            for fragment in range(len(self._buckets)):
                if fragment in asked or (asked and (held or not self._streams)):
                    continue  # when it has answered
                if held or self.turns.owes(worker, fragment):
                    self._ask(worker, fragment, now)
                elif self._with_quorum:
                    self.turns.idle(worker, fragment)
            self._send_waiting(worker)

    def _give_back_unbegun(self, worker: str) -> None:
        """All but the lease that a worker is at. Not under rules of local steps: a step that it has made by the time
        that it hears of this is part of its parameters, and would take with it all that it carries."""
        if self._local:
            return
        session = self.roster.sessions[worker]
        steps = [grant for grant in self.ledger.held(worker) if grant.step >= 0]
        for grant in steps[1:]:
            if session.receiving != grant.lease:
                self.ledger.give_back(grant.lease)
                self.revoke(grant, "no more steps are wanted")

    def _was_sent(self, grant: Held) -> bool:
        return all(waiting.lease != grant.lease for waiting, _ in self._waiting.get(grant.worker, ()))

    def _waits(self, grant: StreamGrant) -> bool:
        """Whether a worker has not been sent yet what a lease needs: its time begins when it has.

        That is the lease, and a version that will do. Newer versions that the worker is not sent change nothing.
        """
        session = self.roster.sessions.get(grant.worker)
        if session is None:
            return False
        if grant.step < 0:
            return session.receiving == grant.lease  # while its bytes come it is at it, however long the line takes
        if session.outbox.lease_bytes > 0 or not self._was_sent(grant):
            return True
        return self.downlink is not None and not self.downlink.has_left(session, self._oldest.get(grant.lease, 0))

    def _allowed_s(self, grant: StreamGrant) -> float:
        pacing = self.pacing if grant.step >= 0 else self._submitting
        return pacing.allowed_s(grant.worker, 1, grant.deadline_s)

    def _needs(self, lease: int, version: int) -> None:
        """A lease's worker computes at ``version`` or a later one."""
        self._oldest[lease] = version
        if self.context.config.update.compensation:
            heapq.heappush(self._by_version, (version, lease))

    def _oldest_needed(self) -> int:
        """The oldest version that a result may still be of, of what is leased and what waits to be judged."""
        heap = self._by_version
        while heap:
            version, lease = heap[0]
            if self._oldest.get(lease) == version and self.ledger.is_open(lease):
                return min(version, self.version)
            heapq.heappop(heap)
        return self.version

    def _forget_leases(self) -> None:
        """Leases that have ended need no version."""
        if len(self._oldest) > 2 * self.ledger.num_open + 64:
            self._oldest = {lease: at for lease, at in self._oldest.items() if self.ledger.is_open(lease)}
        if len(self._by_version) > 2 * len(self._oldest) + 64:
            self._by_version = [(at, lease) for lease, at in self._oldest.items()]
            heapq.heapify(self._by_version)

    def _send_waiting(self, worker: str) -> None:
        """Send, in order, what has its data."""
        waiting, session = self._waiting.get(worker), self.roster.sessions.get(worker)
        while waiting and session is not None:
            grant, version = waiting[0]
            if self.ledger.get(grant.lease) is not grant:
                waiting.popleft()
                continue
            if grant.step < 0:
                waiting.popleft()
                fragment = self.turns.of(worker).asked.get(grant.lease, 0)
                session.post(Submit(grant.lease, self._buckets[fragment]))
                continue
            plan = self._plans[grant.step]
            data = self.context.loader.data(grant.step, Block(0, plan.num_leaves))
            if data is None:
                self._reading.setdefault(grant.step, {})[worker] = None
                return
            waiting.popleft()
            if not self._local:
                version = session.current_version
                self._needs(grant.lease, version)
            rates = () if self.inner_schedule is None else tuple(self.inner_schedule.rows(grant.step, 1)[0])
            message = Lease(
                grant.lease, max(version, 0), grant.step, 0, data.samples, grant.deadline_s, data.packed,
                data.structure, rates,
            )  # fmt: skip
            session.post_lease(message, data.buffers)
