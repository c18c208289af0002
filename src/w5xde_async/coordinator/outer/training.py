"""Training under the rules that take results as they come: ``async``, ``local``, ``streaming``, ``async-local``.

Work is handed out in whole steps of the sampler, each to one worker. Under ``async`` every step's gradient is a result
of its own; under rules of local steps a worker makes an optimizer step of each and is asked, every so many, how far it
has gone. One task (``run``) has every result judged, closes rounds and sends new versions; the rest runs on the event
loop between its awaits.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from w5xde_async.compute.inner import Schedule
from w5xde_async.coordinator.outer.step_scheduler import StepScheduler
from w5xde_async.coordinator.parameters.delta_publisher import CatchUp, DeltaPublisher
from w5xde_async.coordinator.parameters.outer_aggregator import OuterAggregator, Submission
from w5xde_async.coordinator.parameters.receive_buffers import ReceiveBuffers
from w5xde_async.coordinator.parameters.step_reports import StepReports
from w5xde_async.coordinator.training import (
    Commit,
    Phase,
    RunContext,
    lease_terms,
    named_samples,
    reason_of_network,
    reason_of_standing,
)
from w5xde_async.errors import MalformedFrame, RemoteError, UpdateFailed, shortened
from w5xde_async.hub.members.roster import Greeting
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import Destination
from w5xde_async.hub.work.claims import Claims, seen
from w5xde_async.job import rate_of, shown_progress
from w5xde_async.plan.leases import FailedWork, Grant
from w5xde_async.plan.membership import Member, Standing
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.stream import DoneSteps, StreamLedger
from w5xde_async.store.failpoints import failpoint
from w5xde_async.telemetry.events import StepCommitted
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.norm_gate import NormGateConfig
from w5xde_async.updates.outer import OuterRule
from w5xde_async.updates.sync import Applied
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import ByeCode, Done, Drain, Failed, Result, Unread, VerdictCode


class OuterTraining:
    """One run, from where ``rule`` stands to ``total_steps`` of the sampler."""

    def __init__(self, context: RunContext, greeting: Greeting, rule: OuterRule, schedule: Schedule | None) -> None:
        """``schedule`` is what inner optimizers are set to, under rules of local steps alone."""
        config, layout, clock, update = context.config, context.layout, context.clock, context.config.update
        self.context, self.total_steps, self.rule, self.version = context, context.total_steps, rule, rule.version
        self.pacing = Pacing(config.pacing)
        self.ledger = StreamLedger(
            lease_terms(context, greeting, lambda: self.roster.present),
            total_steps=self.total_steps, done=DoneSteps.of_state(rule.done.state_dict()),
            waits=lambda grant: self.scheduler.waits(grant), allowed_s=lambda grant: self.scheduler.allowed_s(grant),
        )  # fmt: skip
        self.phase = Phase(context, greeting, self, version=rule.version)
        self.roster, self.lifecycle, self.verdicts = self.phase.roster, self.phase.lifecycle, self.phase.verdicts
        self.intake = ReceiveBuffers(layout, update.uplink_codec)
        self.publisher = DeltaPublisher(
            layout, context.state, update.downlink_codec, version=rule.version, wake=self.lifecycle.wake.set
        )
        self.aggregator = OuterAggregator(context, rule, self.intake, self.publisher)
        self._catching_up = CatchUp(self.publisher, self.aggregator, self.lifecycle)
        self.scheduler = StepScheduler(context, self.phase, self.ledger, self.pacing, self.publisher, schedule)
        self._sampler, self._inner_schedule = context.sampler, schedule
        self.local_steps, self._fragments = self.scheduler.local_steps, self.scheduler.fragments
        self._local, self._streams = update.local, update.rule == "streaming"
        self._with_quorum = update.rule in ("local", "streaming")
        self._on_demand = update.rule in ("async", "async-local") and not self.publisher.deltas
        self._inbox: deque[Submission] = deque()  # bounded by the leases that are open
        self._reports = StepReports()
        self._claims = Claims(layout)
        self._skipped: dict[str, int] = {}  # worker -> steps in a row that its own optimizer has skipped
        self._accepted: list[int] = []  # steps in the open round
        self._senders: set[str] = set()  # workers here of which results have come
        self._gone: list[str] = []  # and those that have left since the last result: the next one's judge is told
        self._contributors: set[str] = set()
        self._stalenesses: list[int] = []  # of what was judged since the last commit, in versions
        self._warned_of_unusual = False
        self._unadded = 0  # commits since the bytes of all links were added up
        self._last_commit = clock()
        self._committed = self._followed = len(self.ledger.done)

    @property
    def progress(self) -> int:
        return self._committed

    @property
    def accepts(self) -> bool:
        return not self.lifecycle.ends

    def downlink_bytes(self) -> tuple[int, int]:
        raw, encoded = self.context.history.downlink_bytes
        return raw + self.publisher.raw_bytes, encoded + self.publisher.encoded_bytes

    def reason_to_wait(self, session: Session, member: Member) -> str:
        if (reason := reason_of_standing(member)) is not None:
            return reason
        if self.ledger.num_held(member.worker_id):
            return reason_of_network(session) or ""
        if self.ledger.complete:
            return "the end of the run"
        return "the next version" if self.local_steps.of(member.worker_id).blocked else "a lease"

    # -- the run -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        self._last_commit = self.context.clock()
        # A checkpoint may hold open rounds. Workers begin at the parameters, which must have those rounds in them.
        await self._commit_pending()
        self.schedule()
        while self.lifecycle.failure is None and not self._ended():
            self.lifecycle.wake.clear()
            if due := self.publisher.due:
                await self._catch_up(due)
            elif self._inbox:
                given = self._inbox[0]
                # A round is an average over workers: the next turn of one of them is not for the same round.
                if self._with_quorum and self.local_steps.closes_before(
                    given.worker, given.fragment, self.context.clock()
                ):
                    await self._commit(given.fragment)
                else:
                    await self._judge(self._inbox.popleft())
            else:
                fragment, look = self.local_steps.closing(self.context.clock()) if self._with_quorum else (None, None)
                if fragment is not None:
                    await self._commit(fragment)
                else:
                    await self._sleep(look)
        await self._close_rounds()
        if self.lifecycle.failure is not None:
            raise self.lifecycle.failure

    async def _close_rounds(self) -> None:
        """Commit what came after the last round that closed: at the end of the data, and at a stop or a failure too.

        An open round is a whole one of fewer results. So whatever counts as done is in a version, in a checkpoint and
        in a line of the metrics, and nobody computes it again.
        """
        if self.aggregator.torn:
            return
        with self.lifecycle.failure_set_aside():
            try:
                await self._commit_pending()
                if self._accepted:  # steps of which no fragment was left to commit
                    await self._commit(0)
                self._follow(last=True)
            except UpdateFailed as error:
                self.lifecycle.fail(error)

    async def _commit_pending(self) -> None:
        for fragment in range(len(self._fragments)):
            if self.rule.pending(fragment):
                await self._commit(fragment)

    def _ended(self) -> bool:
        if self._inbox:
            return False
        if self.lifecycle.stopping:
            busy = any(self.ledger.num_held(worker) for worker in self.roster.sessions)
            return not busy or self.context.clock() >= self.lifecycle.stop_at
        return self.ledger.complete and not self.ledger.num_open

    async def _sleep(self, look: float | None) -> None:
        """Wait until something happens, or until ``look`` (on the clock)."""
        until = [at for at in (look, self.lifecycle.stop_at if self.lifecycle.stopping else None) if at is not None]
        try:
            async with asyncio.timeout(max(0.0, min(until) - self.context.clock()) if until else None):
                await self.lifecycle.wake.wait()
        except TimeoutError:
            pass

    def stop(self, grace_s: float | None = None) -> None:
        self.phase.stop(grace_s)
        for worker in self.roster.sessions:
            self._give_back_unbegun(worker)
        self.schedule()

    def finish(self) -> None:
        self.stop()

    def tick(self, now: float) -> None:
        self.roster.tick(now, shown_progress(self.progress, self.total_steps))
        self.phase.note_reading()
        self.schedule()

    def data_came(self) -> None:
        self.scheduler.data_came()

    async def aclose(self) -> None:
        """Wait for the loader and the thread that owns the parameters."""
        await self.context.loader.aclose()
        await self.aggregator.aclose()

    async def _catch_up(self, due: Sequence[Session]) -> None:
        """Send the parameters to those that have none, or could not follow; a commit cannot come between."""
        here, new = await self._catching_up.send(due)
        for session in new:
            self.local_steps.of(session.worker_id).blocked = False
        if new:
            self.schedule()  # who is new may back others up
        else:
            self.scheduler.schedule_after(session.worker_id for session in here)

    async def _judge(self, given: Submission) -> None:
        counted = sum(self.scheduler.plan(step).num_samples for step in given.steps)
        session = self.roster.sessions.get(given.worker)
        code, reason = VerdictCode.REJECTED, "it does not decode"
        outcome: Outcome | None = None
        try:
            vouched = self.ledger.vouched(given.lease, given.worker, len(self.roster.sessions))
            outcome = await self.aggregator.offer(given, counted, vouched)
            code, reason = outcome.verdict, outcome.reason
        except MalformedFrame as error:
            if session is not None:
                session.abort(f"broke the protocol: {error}")
        accepted = code is VerdictCode.APPLIED
        self._stalenesses.append(max(0, self.version - given.version))
        counts = accepted or self._streams  # other fragments have it: doing it again would count it twice in those
        given_up: dict[int, int] = {}
        if outcome is not None and code is VerdictCode.REJECTED and not self._streams:
            most = self.context.checks.max_leaf_failures
            again = max(most, NormGateConfig().reopen_after + 1)  # the gate learns anew in time; then they may count
            given_up = self.ledger.refuse(given.lease, given.worker, outcome.norm, most=most, most_finite=again)
        else:
            self.ledger.settle(given.lease, accepted=counts)
        # Where fragments stream its worker keeps what was refused for the next one, unless nothing can come of it.
        finite = outcome is not None and (code is VerdictCode.STALE or math.isfinite(outcome.norm))
        kept = given.samples if self._streams and not accepted and finite else 0
        self.local_steps.answered(given.worker, given.lease, self.context.clock(), kept=kept, path=given.path)
        leaves = sum(self.scheduler.plan(step).num_leaves for step in given.steps)
        if not counts and not given_up:
            self._reports.forget(given.steps)
        if counts:
            self._accepted.extend(given.steps)
            self._use(given.worker, given.steps)
            for step in given.steps:
                self.scheduler.computed(step)
        if accepted:
            self._contributors.add(given.worker)
            self.ledger.places.delivered(given.worker)
        else:
            # What gave a step up was its last try: its samples are used up, as those of a skipped step are.
            self.phase.refuse(code, leaves - sum(self.scheduler.plan(step).num_leaves for step in given_up))
            if outcome is not None and outcome.unusual:
                self._warn_of_unusual(given, reason)
            if self._on_demand and session is not None:
                self.publisher.catch_up(session)  # what it has is too old: nobody else would tell it
        self.verdicts.decided(given.lease, code, reason)
        if given_up and outcome is not None:
            await self._give_up(given.worker, given_up, outcome)
        if self.rule.due:
            await self._commit(0)
        elif not accepted and self._local and not self._with_quorum:
            self.scheduler.unblock(given.worker)
        self.scheduler.judged(given.worker)  # not before: what is leased meanwhile would be of an old version
        self._let_go(given.worker)
        self.scheduler.schedule_after((given.worker,))

    def _warn_of_unusual(self, given: Submission, reason: str) -> None:
        """Say once that the norm gate refuses results."""
        if not self._warned_of_unusual:
            self._warned_of_unusual = True
            session = self.roster.sessions.get(given.worker)
            self.phase.warn(
                f"a result of {given.worker if session is None else session.name} does not count: {reason}. "
                "leaves_in_vain counts more of them; if workers are honest, raise --norm-gate, or give 0"
            )

    def _use(self, worker: str, steps: Sequence[int]) -> None:
        """These steps are done, with what ``worker`` made of them: the run and that worker have their samples."""
        plans = [self.scheduler.plan(step) for step in steps]
        leaves, samples = sum(plan.num_leaves for plan in plans), sum(plan.num_samples for plan in plans)
        self.phase.used(leaves=leaves, samples=samples)
        self.phase.credit(worker, leaves, samples)

    async def _give_up(self, worker: str, tries: Mapping[int, int], outcome: Outcome) -> None:
        """No result of these steps can count: the run goes on without them, and they use up their samples."""
        steps = tuple(tries)
        used_up = sum(self.scheduler.plan(step).num_samples for step in steps)
        await self.aggregator.submit(partial(self.rule.skip, steps, used_up))
        self._use(worker, steps)
        for step in steps:
            samples = named_samples(self.scheduler.whole_plan(step))
            self.scheduler.computed(step)
            why = f"{outcome.reason}, the last of {tries[step]} tries"
            self.phase.warn(f"step {step + 1} is left out: {why}; {samples}")
        if not math.isfinite(outcome.norm):
            self.phase.note_gradient(self.progress, finite=False)
        rate = rate_of(self.rule.optimizer)
        self._note(Applied(skipped=True, gradient_norm=outcome.norm, learning_rate=rate, changed=()), 0.0, steps)
        self._follow()

    def _count_own_steps(self, worker: str, *, skipped: bool) -> None:
        """A worker's own optimizer skipped a step, or not. Training diverges where every worker says so: one alone may
        be at fault, or lie."""
        self._skipped[worker] = self._skipped.get(worker, 0) + 1 if skipped else 0
        if not skipped:
            return  # with nearly every step; nobody else need be looked at
        counts = [self._skipped.get(one, 0) for one in {*self.roster.present, worker}]
        if all(counts) and sum(counts) >= self.context.checks.max_nonfinite_steps:
            self.lifecycle.fail(self.phase.nonfinite(self.progress, sum(counts)))

    async def _commit(self, fragment: int) -> None:
        waited = self.context.clock() - self._last_commit
        applied, pieces = await self.aggregator.commit(fragment, self.progress)
        failpoint("publish.before")
        self.version += 1
        self.verdicts.published(self.version)
        now = self.context.clock()
        if self._with_quorum:
            at_work = [w for w in self.roster.sessions if self.ledger.num_held(w) or self.ledger.carried(w)]
            self.local_steps.closed(fragment, now, at_work)
        contributors = sorted(worker for worker in self._contributors if worker in self.roster.sessions)
        told = (
            [self.roster.sessions[worker] for worker in contributors]
            if self._on_demand
            else list(self.roster.sessions.values())
        )
        self.publisher.send(told, self.version, pieces)
        for worker in contributors:
            self.scheduler.unblock(worker)
        self._contributors.clear()
        failpoint("publish.after")
        if self._accepted or not self._streams:
            skipped = applied is not None and applied.skipped
            if skipped:
                self.phase.warn(f"version {self.version} was skipped: its gradient is not finite")
            if not self._local:  # else the steps themselves are counted
                self.phase.note_gradient(self.progress, finite=not skipped)
            steps, self._accepted = self._accepted, []
            self._note(applied, waited, steps)
            self._follow()
        if self._on_demand:
            self.scheduler.schedule_after(contributors)
        else:
            self.schedule()

    def _note(self, applied: Applied | None, waited: float, steps: Sequence[int]) -> None:
        now = self.context.clock()
        stalenesses, self._stalenesses = self._stalenesses, []
        summary = self._reports.take(steps)
        self._committed += len(steps)
        seconds, self._last_commit = now - self._last_commit, now
        if summary is None:
            return
        # Counted here and not as they are computed: a step that its worker takes with it is computed again.
        skipped = len(steps) if applied is not None and applied.skipped else summary.skipped
        self.roster.contributions.skip(skipped)
        self.phase.committed(summary.loss)
        decode_s, apply_s = self.aggregator.take_times()
        phases = {"wait": waited, "reduce": decode_s, "apply": apply_s}
        if self.context.bus.active:
            sent, received = self._recent_traffic()
            event = StepCommitted(
                step=self.progress, epoch=max(0, self.progress - 1) // self._sampler.steps_per_epoch,
                loss=summary.loss, metrics=summary.metrics, samples=summary.samples, leaves=summary.leaves,
                learning_rate=self._learning_rate(applied, steps), loss_scale=1.0,
                skipped=skipped, seconds=seconds,
                gradient_norm=None if applied is None else applied.gradient_norm, num_workers=len(self.roster.sessions),
                bytes_sent=sent, bytes_received=received, phases_s=phases,
                staleness=sum(stalenesses) / len(stalenesses) if stalenesses else None,
            )  # fmt: skip
            self.context.bus.publish(event)
        failpoint("commit.after")

    def _recent_traffic(self) -> tuple[int, int]:
        """Bytes sent and received since they were last added up, which takes a look at every link: where every result
        is a commit that is done once in as many commits as there are members, and at the end."""
        self._unadded += 1
        if self._on_demand and self._unadded < len(self.roster.sessions) and not self.ledger.complete:
            return 0, 0
        self._unadded = 0
        return self.roster.traffic_since()

    def _follow(self, *, last: bool = False) -> None:
        """Have checkpoints and evaluations made that are due: where all that counts as done is committed and told.

        After the first fragment of the last rounds all steps count as done, but the others are still to come.
        """
        if self._streams and self.ledger.complete and not last:
            return
        if not self._accepted and self.progress > self._followed:
            before, self._followed = self._followed, self.progress
            self.context.hooks.on_commit(Commit(step=self.progress, before=before))

    def _learning_rate(self, applied: Applied | None, steps: Sequence[int]) -> float | None:
        """Of the workers' optimizers where they have some, else of our own."""
        if self._inner_schedule is not None:
            return self._inner_schedule.rows(max(steps), 1)[0][0]
        return 0.0 if applied is None else applied.learning_rate

    # -- WorkSource and Scheduling --------------------------------------------------------------------------

    def schedule(self, only: str | None = None) -> None:
        self.scheduler.schedule(only)

    def takes_work(self, worker: str, does: bool) -> None:
        self.pacing.takes_work(worker, does)

    def introduce(self, session: Session, awaited: Sequence[int]) -> None:
        self.phase.introduce(session)
        self.scheduler.joined(session.worker_id)
        said = session.ready
        assert said is not None
        # Until the first commit of this phase these are the parameters with which the synchronous one before it ended.
        begins = self.publisher.sent == 0
        self.publisher.join(session, held=begins and self.context.history.step in said.held)
        self.verdicts.returned(session.worker_id, awaited)

    def release(self, session: Session) -> None:
        self.intake.left(session)
        self.publisher.forget(session)

    def divert(self, session: Session) -> bool:
        return False

    def take_back(self, session: Session) -> int:
        self.context.loader.forget(session.worker_id)
        worker = session.worker_id
        for grant in self.ledger.held(worker):
            self.intake.drop(grant.lease)
        carried = self.ledger.carried(worker)
        self._reports.forget(carried)
        self.phase.lose(sum(self.scheduler.plan(step).num_leaves for step in carried))
        returned, failed_work = self.ledger.lose(worker, died=session.vanished)
        self.scheduler.left(worker)
        self._skipped.pop(worker, None)
        if worker in self._senders:
            self._senders.discard(worker)
            self._gone.append(worker)
        if failed_work is not None and self.lifecycle.failure is None:
            self._blame(failed_work, f"{failed_work.attempts} workers vanished while they computed this step")
        return returned

    def departed(self, worker: str) -> None:
        if self.phase.departed(worker, over=self.progress >= self.total_steps):
            self.schedule()

    def revoke(self, grant: Grant, reason: str) -> None:
        self.intake.drop(grant.lease)  # what came of it already
        if self.scheduler.was_sent(grant):
            self.roster.revoke(grant, reason)

    def place(self, session: Session, result: Result, spec: BufferSpec) -> Destination:
        self.intake.check(result, spec)  # first: what is dropped takes scratch of its size
        authorized = self._authorized(session, result)
        return Destination(None, authorized is not None) if not authorized else self.intake.place(session, result, spec)

    def place_pieces(
        self, session: Session, result: Result, specs: Sequence[BufferSpec]
    ) -> tuple[list[memoryview] | None, bool]:
        self.intake.check_pieces(session, result, specs)
        authorized = self._authorized(session, result)
        return (None, authorized is not None) if not authorized else self.intake.place_pieces(session, result, specs)

    def _authorized(self, session: Session, result: Result) -> bool | None:
        """Whether an open lease has this result; None where none ever had. Raises RemoteError."""
        grant = self.ledger.held_by(session.worker_id, result.lease)
        member = self.roster.sessions.get(session.worker_id)
        if grant is None or member is None or session not in member.links:
            return False if self.ledger.past(session.worker_id, result.lease) is not None else None
        if result.bucket not in self._wanted(grant):
            raise RemoteError(f"it sent bucket {result.bucket} of lease {result.lease}, which was not asked for")
        return True

    def _wanted(self, grant: Grant) -> Sequence[int]:
        """Buckets that a lease's result may have."""
        if not self._local:
            return self._fragments[0]
        return () if grant.step >= 0 else self._fragments[self.local_steps.of(grant.worker).asked[grant.lease]]

    def unpack(self, session: Session, result: Result) -> None:
        """It is decoded with the rest of its lease, in the aggregator's thread."""

    def arrived(self, session: Session, result: Result) -> None:
        self.intake.arrived(session)
        if self.ledger.get(result.lease) is None:  # it ended meanwhile
            self.intake.drop(result.lease)

    def lay(self, session: Session, result: Result, piece: Tensor) -> bool:
        return False  # under these rules no memory is shared

    def done(self, session: Session, done: Done) -> None:
        worker, now = session.worker_id, self.context.clock()
        member = self.roster.member(worker)
        owed = member is not None and done.lease in member.owes
        grant = self.ledger.held_by(session.worker_id, done.lease)
        if grant is None:
            self.roster.answered(session, done.lease)
            self._stale(session, done, owed=owed)
            self.schedule(worker)
            return
        member_s = 0.0 if member is None else now - member.joined_at
        elapsed_s = now - self.ledger.began_at(grant)
        if grant.step >= 0:
            leaves = self.scheduler.plan(grant.step).num_leaves
            done = self._claims.check(session.principal, done, leaves, elapsed_s=elapsed_s, member_s=member_s)
        else:
            self._claims.check_lists(done)
            done = seen(done, elapsed_s, member_s, self.context.layout.vector_bytes)
        self.roster.answered(session, done.lease)
        if member is not None:
            self.roster.note_coding(session, member, done)
        if grant.step >= 0:
            self.phase.note_splits(session, done)
            self.phase.note_untouched(grant.step + 1, done.untouched)
            # Whose own optimizer skipped the step has no result of it.
            skipped = self._local and (bool(done.absent) or not all(map(math.isfinite, done.losses)))
            self._reports.keep(self.scheduler.plan(grant.step), done, skipped=skipped)
            self.pacing.observe(worker, leaves, done.compute_s, taken_s=elapsed_s)
            self.scheduler.took(worker, elapsed_s)
            self.phase.computed(worker, leaves, done)
            if session.ready is not None:
                self.context.numerics.note(session.ready.numerics)
        if grant.step >= 0 and self._local:
            self.ledger.carry(done.lease, now)
            if skipped:
                what = "gradient" if all(map(math.isfinite, done.losses)) else "loss"
                samples = named_samples(self.scheduler.whole_plan(grant.step), done.losses)
                self.phase.warn(f"{session.name} skipped step {grant.step + 1}: its {what} is not finite; {samples}")
            self._count_own_steps(worker, skipped=skipped)
            self.scheduler.computed(grant.step)
            rate = 1.0 if self._inner_schedule is None else self._inner_schedule.rate(grant.step)
            self.local_steps.carried(worker, self.scheduler.plan(grant.step).num_samples, rate)
        else:
            self._submitted(session, grant, done, now)
        self._let_go(worker)
        self.schedule(worker)

    def _submitted(self, session: Session, grant: Grant, done: Done, now: float) -> None:
        if done.version > self.version:
            raise RemoteError(f"it sent a result for version {done.version} before that version was published")
        self.verdicts.confirmed(grant.worker, done.version)
        wanted = set(self._wanted(grant)) - set(done.absent)
        missing = wanted - self.intake.has(done.lease, session.island)
        if missing:
            raise RemoteError(f"it reported lease {done.lease} done without bucket {min(missing)}")
        fragment = self.local_steps.of(grant.worker).asked.get(done.lease, 0)
        parts = self.intake.take(done.lease)
        if grant.step < 0:
            taken_s = now - self.ledger.began_at(grant)
            self.scheduler.observe_submission(grant.worker, taken_s)
        steps, other = self.ledger.submitted(done.lease, now)
        if other is not None:
            leaves = self.scheduler.plan(other.step).num_leaves
            self.pacing.overtaken(other.worker, leaves, now - self.ledger.began_at(other))
            self.revoke(other, "another worker was faster")
            self.roster.await_answer(other.worker)
        if self._local:
            samples, path = self.local_steps.take(grant.worker, fragment)
        else:
            samples, path = self.scheduler.plan(steps[0]).num_samples, 0.0
        if not samples:  # it carried nothing
            self.intake.release(parts)
            self.ledger.settle(done.lease, accepted=False)
            self.local_steps.answered(grant.worker, done.lease, now)
            self.scheduler.unblock(grant.worker)
            self.verdicts.answered(done.lease, grant.worker, VerdictCode.STALE, "there was nothing in it")
            return
        submission = Submission(
            lease=done.lease, worker=grant.worker, steps=steps, samples=samples, path=path, parts=parts,
            version=done.version, fragment=fragment, untouched=done.untouched, workers=len(self.roster.sessions),
            gone=tuple(self._gone),
        )  # fmt: skip
        self.verdicts.finished(done.lease, grant.worker)
        self._gone.clear()
        self._senders.add(grant.worker)
        self._inbox.append(submission)
        self.scheduler.submitted(grant.worker, done.lease, done.version)

    def _stale(self, session: Session, done: Done, *, owed: bool) -> None:
        past = self.ledger.past(session.worker_id, done.lease)
        if not done.losses:
            return  # a lease that was revoked before it was begun
        duplicate = self.ledger.is_duplicate(done.lease)
        code = VerdictCode.DUPLICATE if duplicate else VerdictCode.STALE
        if past is not None and past.step >= 0:  # else nobody knows that anything was to be computed
            self.phase.refuse(code, min(len(done.losses), self.scheduler.plan(past.step).num_leaves))
        reason = "its step had been computed" if duplicate else "the lease had ended"
        self.verdicts.answered(done.lease, session.worker_id, code, reason)
        if past is not None and past.step >= 0:
            taken_s = self.context.clock() - past.granted_at
            if owed:
                leaves = self.scheduler.plan(past.step).num_leaves
                self.pacing.observe_late(session.worker_id, leaves, min(done.compute_s, taken_s), taken_s)
            if self._local:
                # Its parameters have a step in them that another has been given: it begins anew.
                session.dismiss("it computed a step that had been given to another; it begins anew")

    def failed(self, session: Session, failed: Failed) -> None:
        self.roster.answered(session, failed.lease)
        grant = self.ledger.held_by(session.worker_id, failed.lease)
        if grant is None or grant.step < 0:
            self.verdicts.answered(failed.lease, session.worker_id, VerdictCode.STALE, "the lease had ended")
            return
        self.intake.drop(failed.lease)
        failed_work = self.ledger.fail(failed.lease)
        self.verdicts.answered(failed.lease, session.worker_id, VerdictCode.STALE, "it failed")
        if failed_work is None:
            self.phase.note_failure(f"{session.name} failed on step {grant.step}", failed)
        else:
            self._blame(failed_work, shortened(failed.traceback), max(failed.leaf, 0))
        self.scheduler.schedule_after((session.worker_id,))

    def _blame(self, failed_work: FailedWork, traceback: str, leaf: int = 0) -> None:
        plan = self._sampler.plan(failed_work.step)
        self.phase.blame(failed_work, plan, min(leaf, plan.num_leaves - 1), traceback)

    def unread(self, session: Session, unread: Unread) -> None:
        grant = self.ledger.held_by(session.worker_id, unread.lease)
        if grant is None or grant.step < 0:
            return  # it was revoked, which is on its way
        self.phase.note_unread(session, unread)
        self.scheduler.send_data(grant)

    def draining(self, session: Session, drain: Drain) -> None:
        member = self.roster.member(session.worker_id)
        if member is not None:
            member.standing = Standing.DRAINING
            self._give_back_unbegun(session.worker_id)
        self.schedule()
        self._let_go(session.worker_id)

    def _give_back_unbegun(self, worker: str) -> None:
        for grant in self.scheduler.give_back_unbegun(worker):
            self.revoke(grant, "no more steps are wanted")

    def _let_go(self, worker: str) -> None:
        """Say goodbye to one that wants to leave and owes nothing more."""
        if (leaving := self.phase.leaving(worker)) is None:
            return
        owes = self._streams and any(
            self.local_steps.owes(worker, fragment) for fragment in range(len(self._fragments))
        )
        if self.ledger.carried(worker) or owes or self.scheduler.has_unjudged(worker):
            return  # a verdict is owed to it as well: it tells what its codec has left out
        leaving[1].say_goodbye(ByeCode.LEAVING, "drained")
