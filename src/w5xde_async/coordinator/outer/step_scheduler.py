"""Which worker gets the next step of the sampler, at which version it may begin, and when it submits its results.

Work is handed out in whole steps. Under rules of local steps a worker is asked for its pseudo-gradient every so many
steps (``local_step_schedule``). What comes back is for ``training``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from w5xde_async.compute.inner import Schedule
from w5xde_async.coordinator.outer.local_step_schedule import LocalStepSchedule
from w5xde_async.coordinator.parameters.delta_publisher import DeltaPublisher
from w5xde_async.coordinator.training import WITHOUT_CODE, Phase, RunContext
from w5xde_async.data.epoch_prefetch import EpochPrefetch
from w5xde_async.errors import JobError
from w5xde_async.plan.leases import Grant
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.plan.stream import StreamLedger
from w5xde_async.plan.tree import Block
from w5xde_async.updates.outer import bucket_fragments
from w5xde_async.updates.quorum import QuorumConfig
from w5xde_async.wire.messages import Lease, Submit

_LONGER = 2.0  # times the longest lease of a worker so far, for which it is not sent away


class StepScheduler:
    """Grants leases of steps and sends them, with their data, to the members of ``roster``."""

    def __init__(
        self,
        context: RunContext,
        phase: Phase,
        ledger: StreamLedger,
        pacing: Pacing,
        publisher: DeltaPublisher,
        inner_schedule: Schedule | None,
    ) -> None:
        """``inner_schedule`` is what inner optimizers are set to, under rules of local steps alone."""
        update = context.config.update
        self._context, self._phase, self._roster, self._lifecycle = context, phase, phase.roster, phase.lifecycle
        self._ledger, self._pacing, self._publisher = ledger, pacing, publisher
        self._sampler, self._inner_schedule = context.sampler, inner_schedule
        self._prefetch = EpochPrefetch(context.sampler, phase.lifecycle.guarded(self.schedule), phase.lifecycle.fail)
        self._local, self._streams = update.local, update.rule == "streaming"
        self._with_quorum = update.rule in ("local", "streaming")
        self.fragments = bucket_fragments(context.layout, update.fragments if self._streams else 1)  #: their buckets
        self.local_steps = LocalStepSchedule(
            num_fragments=len(self.fragments), inner_steps=update.inner_steps, pacing=pacing,
            quorum=QuorumConfig(part=update.quorum),
        )  # fmt: skip
        self._plans: dict[int, StepPlan] = {}
        # Granted and not sent yet, with the oldest version that will do: their data is being read.
        self._waiting: dict[str, deque[tuple[Grant, int]]] = {}
        self._known: set[int] = set()  # of those, leases that their workers have been told of
        self._reading: dict[int, dict[str, None]] = {}  # step whose data is being read -> who waits for it
        self._opened = self._ledger.cursor  # steps below have been opened
        self._over = False  # nothing was left to lease the last time
        self._unjudged: Counter[str] = Counter()  # results of each worker that wait to be judged
        self._oldest: dict[int, int] = {}  # open lease -> the oldest version that will do
        self._idle: dict[str, None] = {}  # workers for which nothing was left to lease
        self._longest_s: dict[str, float] = {}  # that a lease has taken each worker
        self._submitting = Pacing(context.config.pacing)  # how long submissions under rules of local steps take

    def data_came(self) -> None:
        """The loader has read something: leases that waited for it are sent."""
        for step, _ in self._context.loader.came():
            for worker in self._reading.pop(step, ()):
                self._send_waiting(worker)

    def plan(self, step: int) -> StepPlan:
        """The step without its indices, which a step that is done no longer has."""
        plan = self._plans.get(step)
        return self._sampler.size(step) if plan is None else plan

    def whole_plan(self, step: int) -> StepPlan:
        """With its indices; of a step that counts as done only where it is known still."""
        return self._plans.get(step) or self._sampler.plan(step)

    def computed(self, step: int) -> None:
        """A step is computed: its data is not needed any more. It is read again where another worker has to do it."""
        self._plans.pop(step, None)
        self._context.loader.close_step(step)

    def submitted(self, worker: str, lease: int, version: int) -> None:
        """A result of ``worker``, computed at ``version``, waits to be judged."""
        self.needs(lease, version)
        self._unjudged[worker] += 1

    def judged(self, worker: str) -> None:
        """One of those results was judged."""
        self._unjudged[worker] -= 1
        if not self._unjudged[worker]:
            del self._unjudged[worker]

    def has_unjudged(self, worker: str) -> bool:
        """Whether a result of ``worker`` waits to be judged."""
        return self._unjudged[worker] > 0

    def observe_submission(self, worker: str, taken_s: float) -> None:
        """``worker`` has submitted a pseudo-gradient, ``taken_s`` after it could begin to."""
        self._submitting.observe(worker, 1, taken_s)

    def took(self, worker: str, taken_s: float) -> None:
        """``worker`` has done a lease, ``taken_s`` after it could begin to."""
        self._longest_s[worker] = max(taken_s, self._longest_s.get(worker, 0.0))

    def joined(self, worker: str) -> None:
        """A worker has come. It is blocked until it is being sent the parameters."""
        self.local_steps.join(worker, self._phase.verdicts.version)
        self.local_steps.of(worker).blocked = True

    def unblock(self, worker: str) -> None:
        """A worker's submission was judged, or it is being sent the parameters: it may have more."""
        if worker in self._roster.sessions:
            pace = self.local_steps.of(worker)
            pace.blocked = False
            # Where rounds close, what it is leased after it was asked needs a later version anyway (``_ask``).
            if not self._with_quorum:
                pace.min_version = self._phase.verdicts.version

    def left(self, worker: str) -> None:
        """A worker has gone, and its leases were taken back."""
        self._waiting.pop(worker, None)
        self.local_steps.leave(worker)
        self._pacing.left(worker)
        self._submitting.left(worker)
        self._longest_s.pop(worker, None)

    def schedule(self, only: str | None = None) -> None:
        """Give work to whoever has room for it (``only``: check this worker alone)."""
        self._assign(None if only is None else (only,))

    def schedule_after(self, workers: Iterable[str]) -> None:
        """Look at these workers alone: the cost does not grow with the number of workers.

        All workers are looked at where work came back while a worker has none, and at each tick.
        """
        self._assign(None if self._idle and not self._ledger.exhausted else tuple(workers))

    def _assign(self, only: Sequence[str] | None) -> None:
        if not self._phase.may_lease():
            return
        planned = self._open_ahead(self._roster.membership.num_ready)
        now = self._context.clock()
        self._forget_leases()
        if only is None:
            workers = tuple(self._roster.membership.ready_ids)
            self._idle.clear()
        else:
            workers = tuple(worker for worker in only if self._roster.membership.is_ready(worker))
        for room in range(self._pacing.config.leases_ahead if planned else 0):
            for worker in workers:
                self._grant(worker, room, now)
        if only is None and not self._local and not self._lifecycle.stopping and self._ledger.exhausted:
            self._back_up(workers, now)
        for worker in tuple(self._waiting) if only is None else only:
            self._send_waiting(worker)
        if self._local:
            self._ask_the_rest(only)
        self._lifecycle.wake.set()

    def _open_ahead(self, num_workers: int) -> bool:
        """Have the data of the next steps read. False where their order is still being computed."""
        if self._lifecycle.stopping:
            return True
        count = num_workers * self._pacing.config.leases_ahead + 1
        # Each step once on the way up; those that have come back are few, and read when they are leased if not before.
        while self._opened < min(self._ledger.cursor + count, self._ledger.total_steps):
            if self._opened not in self._ledger.done and not self._open(self._opened):
                return False
            self._opened += 1
        upcoming = self._ledger.upcoming
        return upcoming is None or self._open(upcoming)

    def _open(self, step: int) -> bool:
        """Have a step's data read. False where its order is still being computed."""
        if step not in self._plans:
            if not self._prefetch.ready(step, self._context.total_steps):
                return False
            plan = self._plans[step] = self._sampler.plan(step)
            self._context.loader.open(plan)
        return True

    def _grant(self, worker: str, room: int, now: float) -> None:
        pace = self.local_steps.of(worker)
        if self._lifecycle.stopping or pace.blocked or not self._roster.has_credit(worker):
            return
        if self._ledger.num_steps_held(worker) + (0 if self._local else self._unjudged[worker]) > room:
            return  # what waits to be judged is not newer parameters yet: more of it would only be staler
        upcoming = self._ledger.upcoming
        leaves = 1 if upcoming is None else self.plan(upcoming).num_leaves
        deadline_s = self._pacing.deadline_s(worker, leaves)
        grant = self._ledger.grant(worker, now=now, deadline_s=deadline_s, others=self._roster.membership.ready_ids)
        if grant is None:
            self._idle[worker] = None
            return
        self._idle.pop(worker, None)
        if grant.step not in self._plans:
            plan = self._plans[grant.step] = self._sampler.plan(grant.step)
            self._context.loader.open(plan)
        waiting = self._waiting.setdefault(worker, deque())
        waiting.append((grant, pace.min_version))
        if self._local:
            self.needs(grant.lease, pace.min_version)
            for fragment in self.local_steps.granted(worker, now):
                # A round is an average over workers: its turn comes again when this one has closed.
                if not (self._streams and self.local_steps.had_its_turn(worker, fragment)):
                    self._ask(worker, fragment, now)

    def _back_up(self, ready: Sequence[str], now: float) -> None:
        """Where nothing is left to lease, a worker without work computes what another is late with.

        This is not done under rules of local steps, where a step is part of what its worker carries. Each tick checks
        for it, so it happens within a second.
        """
        late = []
        for grant, place in self._ledger.unbacked():
            late_s = self._pacing.late_s(grant.worker, self.plan(grant.step).num_leaves)
            if late_s is not None and self._ledger.began_at(grant) + late_s * (place + 1) <= now:
                late.append(grant)
        for worker in ready if late else ():
            if self._ledger.num_held(worker) or self._unjudged[worker] or not self._roster.has_credit(worker):
                continue
            first = next((grant for grant in late if self._ledger.may_back_up(worker, grant)), None)
            if first is None or self.local_steps.of(worker).blocked:
                continue
            late.remove(first)
            deadline_s = self._pacing.deadline_s(worker, self.plan(first.step).num_leaves)
            second = self._ledger.back_up(first.lease, worker, now=now, deadline_s=deadline_s)
            self._waiting.setdefault(worker, deque()).append((second, self.local_steps.of(worker).min_version))

    def _ask(self, worker: str, fragment: int, now: float) -> None:
        """Have ``worker`` submit a fragment after what was leased to it so far."""
        if fragment in self.local_steps.fragments_asked(worker):
            return  # it has not answered the last time yet
        grant = self._ledger.ask(worker, now=now, deadline_s=self._submitting.deadline_s(worker, 1))
        self.local_steps.asked(worker, grant.lease, fragment)
        pace = self.local_steps.of(worker)
        if not self._streams:  # it goes on from the version that its pseudo-gradient becomes part of
            pace.blocked = not self._with_quorum
            # What was leased since it was asked the last time begins at a version that may be still to come, too.
            pace.min_version = max(pace.min_version, self._phase.verdicts.version) + 1
        self._waiting.setdefault(worker, deque()).append((grant, 0))

    def _ask_the_rest(self, only: Sequence[str] | None = None) -> None:
        """Where no more steps come, workers submit what they have (``only``: ask this worker alone)."""
        members, over = self._roster.membership.members, self._lifecycle.stopping or self._ledger.exhausted
        before, self._over = self._over, over
        now = self._context.clock()
        for worker in tuple(self._roster.sessions) if only is None or over != before else only:
            if worker not in self._roster.sessions:
                continue
            if not over and members[worker].standing is not Standing.DRAINING:
                continue
            asked, held = self.local_steps.fragments_asked(worker), self._ledger.num_steps_held(worker)
            for fragment in range(len(self.fragments)):
                if fragment in asked or (asked and (held or not self._streams)):
                    continue  # when it has answered
                if held or self.local_steps.owes(worker, fragment):
                    self._ask(worker, fragment, now)
                elif self._with_quorum:
                    self.local_steps.idle(worker, fragment)
            self._send_waiting(worker)

    def give_back_unbegun(self, worker: str) -> list[Grant]:
        """End all leases of a worker but the one that it is at. Returns them: they are to be revoked.

        None under rules of local steps: a step that the worker has made by the time that it hears of this is part of
        its parameters, and would take with it all that the worker carries.
        """
        if self._local:
            return []
        session = self._roster.sessions[worker]
        steps = [grant for grant in self._ledger.held(worker) if grant.step >= 0]
        return [self._ledger.give_back(grant.lease) for grant in steps[1:] if not session.is_receiving(grant.lease)]

    def was_sent(self, grant: Grant) -> bool:
        """Whether a lease was given to its worker's session; else it waits for its data."""
        if grant.lease in self._known:
            return True
        return all(waiting.lease != grant.lease for waiting, _ in self._waiting.get(grant.worker, ()))

    def waits(self, grant: Grant) -> bool:
        """Whether a worker does not have yet what a lease needs: its time begins when it has.

        That is the lease, and a version that will do; both have left, and its machine has acknowledged them. Newer
        versions that the worker is not sent change nothing. A submission needs to be asked for.
        """
        session = self._roster.sessions.get(grant.worker)
        if session is None:
            return False
        if grant.step < 0:  # while its bytes come it is at it, however long the line takes
            return session.is_receiving(grant.lease) or not session.has_taken(grant.lease)
        if session.lease_bytes > 0 or not self.was_sent(grant):
            return True
        if not self._publisher.has_left(session, self._oldest.get(grant.lease, 0)):
            return True
        return not session.has_taken(grant.lease)

    def allowed_s(self, grant: Grant) -> float:
        """How long a lease may take, by what is known of its worker now."""
        if grant.step < 0:
            allowed_s = self._submitting.allowed_s(grant.worker, 1, grant.deadline_s)
        else:
            allowed_s = self._pacing.allowed_s(grant.worker, self.plan(grant.step).num_leaves, grant.deadline_s)
        # The longest are those that wait for parameters, where nobody knows when these have come: one in many. So may a
        # request to submit wait. And who is sent away takes with it all that it carries.
        longer_s = min(_LONGER * self._longest_s.get(grant.worker, 0.0), self._pacing.config.max_deadline_s)
        return max(allowed_s, longer_s) if self._local else allowed_s

    def needs(self, lease: int, version: int) -> None:
        """A lease's worker computes at ``version`` or a later one."""
        self._oldest[lease] = version

    def _forget_leases(self) -> None:
        """Leases that have ended need no version."""
        if len(self._oldest) > 2 * self._ledger.num_open + 64:
            self._oldest = {lease: at for lease, at in self._oldest.items() if self._ledger.is_open(lease)}

    def send_data(self, grant: Grant) -> None:
        """A lease that named samples, once more with them."""
        plan = self._plans.get(grant.step)
        if plan is None:  # whoever else had the step has computed it
            plan = self._plans[grant.step] = self._sampler.plan(grant.step)
            self._context.loader.open(plan)
        self._context.loader.unread(grant.worker, grant.step, Block(0, plan.num_leaves))
        self._known.add(grant.lease)
        self._waiting.setdefault(grant.worker, deque()).appendleft((grant, self._oldest.get(grant.lease, 0)))
        self._send_waiting(grant.worker)

    def _send_waiting(self, worker: str) -> None:
        """Send, in order, what has its data."""
        waiting, session = self._waiting.get(worker), self._roster.sessions.get(worker)
        while waiting and session is not None:
            grant, version = waiting[0]
            if self._ledger.get(grant.lease) is not grant:
                waiting.popleft()
                self._known.discard(grant.lease)
                continue
            if grant.step < 0:
                waiting.popleft()
                fragment = self.local_steps.of(worker).asked.get(grant.lease, 0)
                session.post_submit(Submit(grant.lease, self.fragments[fragment]))
                continue
            plan = self._plans[grant.step]
            data = self._context.loader.data(grant.step, Block(0, plan.num_leaves), worker)
            if data is None:
                self._reading.setdefault(grant.step, {})[worker] = None
                return
            if (beyond := self._phase.beyond(worker, data)) and not self._phase.has_code:
                reason = WITHOUT_CODE.format(sizes=beyond[0][1][:200])
                hint = "start workers with --job, have collate pad every batch to the same sizes, or use --update sync"
                self._lifecycle.fail(JobError("dataset", reason, hint))
                return
            waiting.popleft()
            if grant.lease in self._known:
                self._known.discard(grant.lease)
            elif not self._local:
                version = session.current_version
                self.needs(grant.lease, version)
            rates = () if self._inner_schedule is None else tuple(self._inner_schedule.rows(grant.step, 1)[0])
            message = Lease(
                grant.lease, max(version, 0), grant.step, 0, data.samples, grant.deadline_s, data.packed,
                data.structure, rates, local=data.local, step_samples=0 if self._local else data.step_samples,
            )  # fmt: skip
            session.post_lease(message, data.buffers)
