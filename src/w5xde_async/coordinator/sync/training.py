"""The training itself: leases out, results in, one commit after the other.

One task (``run``) drives the aggregator: it adds what sessions have received, commits a complete step and publishes the
new version. Everything else on this object runs on the event loop's thread between its awaits and never blocks.

The parameters that are being sent are the live ones, not a copy. An optimizer step may overwrite them while a slow
worker is still being sent the version before; what that worker makes of it can only be results of a step that is
already complete, which are stale by the ledger (docs/decisions/0004-live-parameters.md).
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from w5xde_async.codecs.registry import codec as make_codec
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.memory_bound import most_held
from w5xde_async.coordinator.parameters.aggregator import Aggregator, StepState
from w5xde_async.coordinator.parameters.delta_publisher import Downlink, Piece
from w5xde_async.coordinator.parameters.publisher import Publisher
from w5xde_async.coordinator.parameters.receive_buffers import Intake
from w5xde_async.coordinator.sync.batch_growth import AHEAD, BatchGrowth
from w5xde_async.coordinator.sync.results import Results
from w5xde_async.coordinator.sync.verification import Machine, Verification
from w5xde_async.data.epoch_prefetch import EpochPrefetch
from w5xde_async.data.loader import Loader
from w5xde_async.errors import UpdateFailed
from w5xde_async.hub.members.liveness import Held
from w5xde_async.hub.members.roster import Commit, Counts, Hosting, NonFinite
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import BlockStore, Destination
from w5xde_async.hub.work.lease_scheduler import LeaseScheduler
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.plan.audit import Auditor
from w5xde_async.plan.ledger import Grant, Ledger
from w5xde_async.plan.membership import Standing
from w5xde_async.plan.sampler import Steps
from w5xde_async.store.failpoints import failpoint
from w5xde_async.telemetry.events import Bus, StepCommitted, Waiting
from w5xde_async.updates.sync import Applied, SyncRule
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import ByeCode, Done, Drain, Failed, Result, VerdictCode, Welcome

__all__ = ["Training"]


class Training(Hosting):
    """One run from ``first_step`` to ``total_steps``."""

    def __init__(
        self,
        *,
        sampler: Steps,
        loader: Loader,
        layout: Layout,
        state: FlatState,
        rule: SyncRule,
        welcome: Welcome,
        config: CoordinatorConfig,
        bus: Bus,
        first_step: int,
        total_steps: int,
        growing: BatchGrowth | None = None,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """``clock`` gives seconds; ``executor`` runs updates and additions, one at a time (default: a thread).

        ``growing``: of a batch that grows; its plan takes the place of ``sampler``.
        """
        self.ledger = Ledger(
            num_buckets=len(layout.result_buckets),
            max_failures=config.max_leaf_failures,
            first_lease=(welcome.term << 32) + 1,  # no lease of another term has the same number
        )
        super().__init__(
            ledger=self.ledger, layout=layout, loader=loader, welcome=welcome, config=config, bus=bus,
            total_steps=total_steps, clock=clock,
        )  # fmt: skip
        self.ledger.places.present = self._present
        self.growing, self.rule = growing, rule
        self.sampler: Steps = sampler if growing is None else growing.plan
        self._ordering = EpochPrefetch(self.sampler)
        self._ordering.on_ready, self._ordering.on_error = self._order_came, self.fail
        self.version = self.verdicts.version = first_step
        self.ledger.allowed_s = lambda grant: self.pacing.allowed_s(
            grant.worker, grant.block.num_leaves, grant.deadline_s
        )
        self.scheduler = LeaseScheduler(self.ledger, self.pacing, loader)
        self.scheduler.at_most_half = growing is not None
        self.publisher = Publisher(layout, state)
        self.publisher.begin(first_step, rule.loss_scale)
        update = config.update
        down = update.downlink_codec
        self.downlink = None if down.name == "raw" else Downlink(layout, state, down)
        if self.downlink is not None:
            self.downlink.wake = self._send_lacking
        self._copying = self._closing = False
        self.store = BlockStore(layout)
        self.aggregator = Aggregator(layout, state, rule, self.store, clock=clock, executor=executor)
        self.verification = Verification(
            layout=layout, ledger=self.ledger, store=self.store, aggregator=self.aggregator, gate=config.gate,
            auditor=Auditor(config.audit, random_bytes(32)), precision=welcome.precision, clock=clock, bus=bus,
            wake=self._wake.set, exact=update.uplink_codec.exact,
        )  # fmt: skip
        self.results = Results(
            layout=layout, ledger=self.ledger, store=self.store, aggregator=self.aggregator,
            scheduler=self.scheduler, loader=loader, sampler=self.sampler,
            judging=self.verification, clock=clock, wake=self._wake.set, warn=self._warn,
            fail=self.fail, verdicts=self.verdicts,
        )  # fmt: skip
        if update.codec != "raw":
            self.results.intake = Intake(layout, update.uplink_codec)
        self.results.on_counted = self._counted
        self.verification.count, self.verification.discard = self.results.count, self.results.discard
        self.verification.revoke = self._revoke
        self.verification.has_delivered = lambda worker: self.pacing.leaf_s(worker) is not None
        self.verification.quarantine = self._quarantine
        self._look_again: asyncio.TimerHandle | None = None
        self.begun = False  #: the first lease was given
        self._nonfinite = 0
        self._last_commit = clock()

    @property
    def progress(self) -> int:
        return self.version

    def counts(self) -> Counts:
        results = self.results
        return Counts(
            results.leaves, results.leaves_wasted, results.refused[VerdictCode.STALE],
            results.refused[VerdictCode.DUPLICATE], results.refused[VerdictCode.REJECTED], self.scheduler.num_backups,
        )  # fmt: skip

    # -- the run -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit steps until the end, a stop or a failure (which is raised)."""
        self._last_commit = self.clock()
        while self.version < self.total_steps and not self._stopping:
            if self.version not in self.ledger.open_steps:
                # Nothing of this step is leased yet, so nothing can come of it while its order is being computed.
                await self._ordering.wait(self.version, self.total_steps)
            self._open_steps()
            self._receive()
            self._schedule()
            if not await self._collect():
                break
            await self._commit()
        if self._failure is not None:
            raise self._failure

    def retune(self, codec: str, downlink: str, inner_steps: int) -> None:
        super().retune(codec, downlink, inner_steps)
        if self.results.intake is not None:
            self.results.intake.allow(make_codec(codec))
        if self.downlink is not None:
            self.aggregator.submit(partial(self.downlink.change, make_codec(downlink)))

    async def aclose(self) -> None:
        """Wait for the loader and the aggregator's thread."""
        if self._look_again is not None:
            self._look_again.cancel()
        self._closing = True
        await self.loader.aclose()
        await self.aggregator.aclose()

    def _open_steps(self) -> None:
        """Open the current step and the next, so that a worker's next lease is there before the version is.

        A step whose order is still being computed is opened when that is there (``_order_came``).
        """
        now = self.clock()
        for step in range(self.version, min(self.version + 1 + AHEAD, self.total_steps)):
            if not self._ordering.ready(step, self.total_steps):
                return
            if step not in self.ledger.open_steps:
                plan = self.sampler.plan(step)
                self.ledger.open(step, plan.num_leaves, now)
                self.loader.open(plan)

    def _order_came(self) -> None:
        if not self._closing and self._failure is None and not self._stopping:
            self._open_steps()
            self._schedule()

    def _receive(self) -> None:
        """Have a place for results of the current step, if it is open: before any worker is told of its version."""
        if self.aggregator.step is None and self.version in self.ledger.open_steps:
            plan, growing = self.sampler.plan(self.version), self.growing
            rate_factor = 1.0 if growing is None else growing.plan.rate_factor(self.version)
            self.aggregator.begin(plan, rate_factor=rate_factor, measure=growing is not None)
            self.ledger.begin(self.version, self.clock())

    async def _collect(self) -> bool:
        """Reduce what arrives until the step is complete. False where the run ends before that."""
        while self._failure is None:
            if self.ledger.complete(self.version) and not self.verification.holding:
                return True
            if await self.aggregator.reduce():
                continue
            if await self.results.settle() or await self.verification.settle():
                self._schedule()
                continue
            self._wake.clear()
            if not self._stopping:
                await self._wake.wait()
                continue
            if not any(grant.step == self.version for held in self.sessions for grant in self.ledger.held(held)):
                return False  # nobody works on this step: what is left of it is done after the resume
            try:
                async with asyncio.timeout(max(0.0, self._stop_at - self.clock())):
                    await self._wake.wait()
            except TimeoutError:
                return False
        return False

    async def _commit(self) -> None:
        began = self.clock()
        if self.journaling is not None:
            await self.journaling.room()
        waited = self.clock() - began
        step, applied, phases_s = await self.aggregator.commit()
        if self.journaling is not None:
            phases_s["journal"] = waited + step.copy_s
        began = self.clock()
        pieces = None
        if self.downlink is not None:
            pieces = await self._advance(self.downlink, applied.changed)
        failpoint("publish.before")
        self.version += 1
        self.ledger.close(step.plan.step)
        self.loader.close_step(step.plan.step)
        self._receive()
        self._publish(applied.changed, pieces)
        failpoint("publish.after")
        self._note(step, applied, phases_s | {"publish": self.clock() - began})

    async def _advance(self, downlink: Downlink, changed: Sequence[int]) -> Sequence[Piece]:
        """What tells workers of the update that was applied just now. Raises UpdateFailed: then the parameters are of
        no version that anybody has counted, and none of them is saved."""
        try:
            return await self.aggregator.submit(partial(downlink.advance, changed))
        except BaseException as error:
            self.aggregator.torn = True
            if not isinstance(error, Exception):
                raise
            lines = await self.aggregator.submit(partial(traceback.format_exception, error))  # reads source files
            raise UpdateFailed(self.version, error, "".join(lines)[-8000:]) from error

    def _publish(self, changed: Sequence[int], pieces: Sequence[Piece] | None) -> None:
        """Tell every worker what became of its results and of the new version; ``pieces`` is what deltas tell of it."""
        self.publisher.begin(self.version, self.rule.loss_scale)
        self.verdicts.committed(self.version)
        if pieces is not None and self.downlink is not None:
            self.downlink.send(self.sessions.values(), self.version, pieces)
        else:
            for session in self.sessions.values():
                self.publisher.send(session, changed)
        if self._keeps_residuals:
            for member in tuple(self.membership.members.values()):
                if member.standing is Standing.DRAINING:
                    self._let_go(member.worker_id)  # it has the verdicts that it waited for

    def _send_lacking(self) -> None:
        """Have the parameters copied for those that have none to add a delta to, between two commits."""
        if self.downlink is None or self._copying or self._closing:
            return
        if due := self.downlink.due:
            self._copying = True
            copying = self.aggregator.submit(partial(self.downlink.copy, self.downlink.lacks(due)))
            copying.add_done_callback(partial(self._copied, due))

    def _copied(self, due: Sequence[Session], copying: asyncio.Future[tuple[int, list[Piece]]]) -> None:
        self._copying = False
        if copying.cancelled() or copying.exception() is not None or self.downlink is None:
            return  # the thread has ended
        number, pieces = copying.result()
        if number == self.downlink.sent:  # else a commit came between
            here = [session for session in due if self.sessions.get(session.worker_id) is session]
            self.downlink.send_lacking(here, self.version, pieces)
        self._send_lacking()

    def _note(self, step: StepState, applied: Applied, phases_s: dict[str, float]) -> None:
        plan, now = step.plan, self.clock()
        loss = self.last_loss = step.mean(step.losses)
        self.samples_applied += plan.num_samples
        seconds, self._last_commit = now - self._last_commit, now
        self._nonfinite = self._nonfinite + 1 if applied.skipped else 0
        self.contributions.steps_skipped += applied.skipped
        if applied.skipped and self.rule.scale is None:
            self._warn(f"step {self.version} was skipped: its gradient is not finite")
        if self._nonfinite >= self.config.max_nonfinite_steps:
            self.fail(NonFinite(self.version, self._nonfinite))
        if self.bus.active or self.journaling is not None:
            sent, received = self._traffic()
            event = StepCommitted(
                step=self.version,
                epoch=plan.epoch,
                loss=loss,
                metrics=step.mean_metrics(),
                samples=plan.num_samples,
                leaves=plan.num_leaves,
                learning_rate=applied.learning_rate,
                gradient_norm=applied.gradient_norm,
                loss_scale=self.rule.loss_scale,
                skipped=applied.skipped,
                seconds=seconds,
                num_workers=len(self.sessions),
                bytes_sent=sent,
                bytes_received=received,
                phases_s=phases_s,
            )
            if self.journaling is not None:  # it publishes the event when the step is durable
                self.journaling.append(self.version, step, event, self.samples_applied)
            else:
                self.bus.publish(event)
                failpoint("commit.after")
        if self.growing is not None and not applied.skipped:
            grown = self.growing.observe(plan, step.halves)
            if grown is not None:
                self.total_steps = grown.total_steps
                self.bus.publish(grown)
        self.on_commit(Commit(step=self.version, before=self.version - 1))

    # -- leases --------------------------------------------------------------------------------------------

    def _takes_work(self, worker: str, does: bool) -> None:
        self.scheduler.takes_work(worker, does)

    def _schedule(self, only: str | None = None) -> None:
        """Give work to whoever has room for it (``only``: the one worker of whom that may be new)."""
        if self._failure is not None:
            return
        if not self.begun:
            ready = self.membership.num_ready
            if ready < self.config.min_workers:
                self.bus.publish(Waiting(reason=f"{ready} of {self.config.min_workers} workers"))
                return
            self.begun = True
        if only is not None and not self.membership.is_ready(only):
            return
        steps = self.ledger.open_steps
        if self._stopping:
            steps = steps[:1]
        now = self.clock()
        for grant in self.verification.leases(self.membership.ready_ids, self.pacing.deadline_s):
            self.scheduler.send(grant)
        self.scheduler.holds_back = self.verification.num_held >= most_held(self.config)
        for worker, lease in self.scheduler.leases(steps, now, has_credit=self._has_credit, again=only is None):
            self.sessions[worker].post_lease(lease.message, lease.buffers)
        self._look_again_at(self.scheduler.look_again_at, now)
        self._lease_anew()

    def _look_again_at(self, at: float, now: float) -> None:
        """Schedule again at that time, and at no other that was said before."""
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        if math.isfinite(at):
            self._look_again = asyncio.get_running_loop().call_later(max(at - now, 0.001), self._schedule)

    def _data_came(self) -> None:
        if self._failure is None:
            for worker, lease in self.scheduler.read():
                self.sessions[worker].post_lease(lease.message, lease.buffers)
            self._lease_anew()

    def _lease_anew(self) -> None:
        if self.scheduler.gave_back:
            self.scheduler.gave_back = False
            asyncio.get_running_loop().call_soon(self._schedule)

    # -- session.Host --------------------------------------------------------------------------------------

    def place(self, session: Session, result: Result, spec: BufferSpec) -> Destination:
        return self.results.place(session, result, spec, member=self.sessions.get(session.worker_id) is session)

    def arrived(self, session: Session, result: Result) -> None:
        self.results.arrived(session, result)

    def done(self, session: Session, done: Done) -> None:
        known = self.membership.members.get(session.worker_id)
        owed = known is not None and done.lease in known.owes
        member_s = 0.0 if known is None else self.clock() - known.joined_at
        other = self.results.done(session, done, owed=owed, member_s=member_s)
        member = self._answered(session, done.lease)
        if member is not None:
            self._note_coding(session, member, done)
        if other is not None:
            self.scheduler.overtaken(other, self.clock())
            self._revoke(other, "another worker was faster")
            self._liveness.await_answer(other.worker)
        self._let_go(session.worker_id)
        self._schedule(None if self.verification.holding else session.worker_id)

    def _counted(self, session: Session, grant: Grant, done: Done) -> None:
        """A block counts: credit to whoever did it."""
        self.ledger.places.delivered(session.worker_id)
        member, step = self.membership.members.get(session.worker_id), self.aggregator.step
        if member is not None and step is not None:
            member.leaves += grant.block.num_leaves
            member.samples += sum(step.plan.samples_in(leaf) for leaf in range(*grant.block))
            member.compute_s += done.compute_s
            member.wait_s += done.wait_s

    def _quarantine(self, worker: str, session: Session | None, reason: str) -> None:
        """A worker was proven wrong: nothing of its that does not count yet will."""
        if self._put_out(worker, session, reason):
            self.results.invalidate(worker)
            self.verification.invalidate(worker)

    def failed(self, session: Session, failed: Failed) -> None:
        self._answered(session, failed.lease)
        self.results.failed(session, failed)
        self._let_go(session.worker_id)
        self._schedule()

    def draining(self, session: Session, drain: Drain) -> None:
        member = self.membership.members.get(session.worker_id)
        if member is not None:
            member.standing = Standing.DRAINING
        for number, grant in enumerate(self.ledger.held(session.worker_id)):
            # The oldest is being computed; the others have not been begun and are better given to somebody else.
            known = self.pacing.leaf_s(grant.worker) is not None
            late_s = self.pacing.late_s(grant.worker, grant.block.num_leaves) if known else None
            in_time = drain.grace_s == 0 or late_s is None or late_s <= drain.grace_s
            if session.receiving != grant.lease and (number or not in_time):
                self.ledger.give_back(grant.lease)
                self._revoke(grant, "draining")
        self._let_go(session.worker_id)
        self._schedule()

    def _revoke(self, grant: Held, reason: str) -> None:
        super()._revoke(grant, reason)
        self._let_go(grant.worker)  # that may have been the last it held

    def _let_go(self, worker: str) -> None:
        """Say goodbye to one that wants to leave and holds no lease any more."""
        member, session = self.membership.members.get(worker), self.sessions.get(worker)
        if member is None or session is None or member.standing is not Standing.DRAINING:
            return
        if self.ledger.num_held(worker):
            return
        if self._keeps_residuals and (member.owes or self.verdicts.owed(worker)):
            # What its codec has left out depends on verdicts that are still to come, while somebody is there to finish
            # the step. Else it would wait for whoever comes next.
            if self.membership.num_ready or self._stopping:
                return
            self.verdicts.presume(worker)
        session.say_goodbye(ByeCode.LEAVING, "drained")

    def tick(self, now: float) -> None:
        super().tick(now)
        if self._stopping and now >= self._stop_at and self.verification.recomputation is not None:
            self.verification.recomputation.give_up()
        if self._keeps_residuals:
            for member in tuple(self.membership.members.values()):
                self._let_go(member.worker_id)  # whoever could have finished the step may be gone

    def _introduce(self, session: Session) -> None:
        self.ledger.returned(session.worker_id)
        self.ledger.places.joined(session.worker_id, session.place)
        said = session.ready
        assert said is not None
        machine = Machine(said.device, said.device_name, said.threads, said.torch_version)
        self.verification.joined(session.worker_id, machine, session.identity, session.place[0])
        if self.downlink is None:
            self.publisher.welcome(session)
        else:
            self.downlink.join(session)

    def _was_sent(self, grant: Held) -> bool:
        return grant.lease not in self.scheduler.unread

    def _forget(self, session: Session) -> None:
        self.results.left(session)
        if self.downlink is not None:
            self.downlink.forget(session)

    def _take_back(self, session: Session) -> int:
        grants, failed_work = self.ledger.lose(session.worker_id, died=session.vanished)
        self.scheduler.forget(session.worker_id)
        self.verification.left(session.worker_id)
        if failed_work is not None and self._failure is None:
            self.results.blame(failed_work, f"{failed_work.attempts} workers vanished while they computed this leaf")
        return len(grants)
