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
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from w5xde_async.coordinator.memory_bound import most_held
from w5xde_async.coordinator.parameters.aggregator import Aggregator, Broken, StepState
from w5xde_async.coordinator.parameters.delta_publisher import CatchUp, DeltaPublisher
from w5xde_async.coordinator.parameters.publisher import LivePublisher, Piece, Publisher
from w5xde_async.coordinator.parameters.receive_buffers import ReceiveBuffers
from w5xde_async.coordinator.sync.batch_growth import AHEAD, BatchGrowth
from w5xde_async.coordinator.sync.context import SyncContext
from w5xde_async.coordinator.sync.in_place import InPlace
from w5xde_async.coordinator.sync.recomputation import Recomputation
from w5xde_async.coordinator.sync.results import Results
from w5xde_async.coordinator.sync.verification import FinishedBlock, Machine, Numerics, Ruling, Verification
from w5xde_async.coordinator.sync.waiting import reason_to_wait
from w5xde_async.coordinator.training import WITHOUT_CODE, Commit, Phase, RunContext, lease_terms, named_samples
from w5xde_async.data.epoch_prefetch import EpochPrefetch
from w5xde_async.data.loader import BlockData
from w5xde_async.hub.members.roster import Greeting
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import BlockStore, Destination
from w5xde_async.hub.work.lease_scheduler import LeaseScheduler, Sendable
from w5xde_async.job import shown_progress
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.reducer import VectorPool
from w5xde_async.plan.audit import Auditor
from w5xde_async.plan.leases import Grant
from w5xde_async.plan.ledger import BlockGrant, Ledger
from w5xde_async.plan.membership import Member, Standing
from w5xde_async.plan.numerics import ANY, fits
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.sampler import StepPlan, Steps
from w5xde_async.plan.tree import Block
from w5xde_async.plan.verification import Audit, Count, Discard, Quarantine, Recompute
from w5xde_async.store.failpoints import failpoint
from w5xde_async.telemetry.events import StepCommitted
from w5xde_async.updates.sync import Applied, SyncRule
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import ByeCode, Done, Drain, Failed, Result, Unread

_WATCHED_STEPS = range(2, 22)  #: of a phase; the first one waits for workers, and the optimizer makes its state
_SLOW_UPDATE = 0.25  #: of a step's time, from which on a faster form of the optimizer is named
_MOST_A_TURN, _TURN_S = 8, 0.004  # steps that are computed here before anything else has a turn
_HERE = 2.0  # times ``whole_step_s``: what a leaf may take that is computed here beside other workers
_MOST_SHARED_S = 0.03  # of work a step: leases of one that has more are worth their way to a worker
_MOMENT_S = 2.0  # of computing, for which a worker that leaves keeps what it may have begun
_MOST_UNSENT = 16  # leases of an earlier link that a worker may ask for again


class StepJournal(Protocol):
    """Where each step is written before it is told. It is told, by the journal, once it is durable."""

    @property
    def pool(self) -> VectorPool:
        """Memory for the copies of steps' sums."""

    async def room(self) -> None:
        """Wait until the step path may go one step further."""

    def append(
        self, version: int, step: StepState, event: StepCommitted, samples_applied: int,
        news: Mapping[str, Sequence[int | str | list[int]]],
    ) -> None:  # fmt: skip
        """A step is applied. ``step.root`` belongs to the journal from now on. ``news``: what its record has beside."""


class SyncTraining:
    """The ``Training`` under the synchronous rule. One run from ``first_step`` to ``total_steps``."""

    def __init__(
        self, context: RunContext, greeting: Greeting, rule: SyncRule, *, growing: BatchGrowth | None = None,
        recomputation: Recomputation | None = None, journal: StepJournal | None = None, in_place: InPlace | None = None,
    ) -> None:  # fmt: skip
        """``growing``: of a batch that grows; its plan takes the place of the context's sampler. ``recomputation``: who
        computes what workers do not agree about, or fail on; ``in_place``: who computes steps too short to be sent.
        """
        config, clock, layout, state = context.config, context.clock, context.layout, context.state
        update, first_step = config.update, context.history.step
        self.context, self.total_steps, self.journal = context, context.total_steps, journal
        self.pacing = Pacing(config.pacing)
        self.ledger = Ledger(
            lease_terms(context, greeting, lambda: self.roster.present),
            allowed_s=self._allowed_s, has_come=self._has_come,
            waits=self._waits_for_data,
        )  # fmt: skip
        self.scheduler = LeaseScheduler(
            self.ledger,
            self.pacing,
            context.loader,
            at_most_half=growing is not None,
            granted=self._granted,
            there=self._there,
            beyond=self._beyond,
            revoke=lambda grant: self.revoke(grant, "its data is too large for one lease"),
        )
        self.phase = Phase(context, greeting, self, version=first_step)
        self.roster, self.lifecycle, self.verdicts = self.phase.roster, self.phase.lifecycle, self.phase.verdicts
        self.growing, self.rule = growing, rule
        self.sampler: Steps = context.sampler if growing is None else growing.plan
        self._ordering = EpochPrefetch(self.sampler, self.lifecycle.guarded(self._order_came), self.lifecycle.fail)
        self.version = first_step
        make = ResultVector if rule.on_device is None else rule.on_device.make_vector
        self.store, self._closing = BlockStore(layout, make=make), False
        down, deltas = update.downlink_codec, None
        if down.name != "raw":
            deltas = DeltaPublisher(layout, state, down, version=first_step, wake=lambda: catch_up.begin())
            if recomputation is not None:  # an honest worker is not to be judged by what it was never told
                recomputation.state = deltas.published
        self._encodes = deltas is not None  # each version, from the one before
        self.publisher: Publisher = deltas or LivePublisher(layout, state, rule, first_step)
        keep = None if journal is None else journal.pool
        beside = in_place is not None and in_place.possible
        self.aggregator = Aggregator(context, rule, self.store, self.publisher, keep=keep, beside=beside)
        if deltas is not None:
            catch_up = CatchUp(deltas, self.aggregator, self.lifecycle)
        self._recomputation, self._in_place = recomputation, in_place
        self._sent_out = first_step  # which step workers compute although such steps are computed here
        self._data_s = self._compute_s = 0.0  # of the step under way: it waited for data, it was computed here
        self._turn_steps, self._turn_began = 0, 0.0  # of steps that are computed here in one turn of the event loop
        self._stood_for: Session | None = None  # whose leases the coordinator computes, beside other workers
        self._finished = False  # no further step is committed
        self._kept_to = ""  # how members make their sums, once a result has decided
        self._for_us: list[int] = []  # these leases
        shared = SyncContext(
            context, self.phase, self.ledger, self.store, self.aggregator, self.sampler, recomputation
        )  # fmt: skip
        self.verification = Verification(
            shared, auditor=Auditor(context.checks.audit, context.random_bytes(32)), pacing=self.pacing,
            numerics=Numerics(
                greeting.message.precision, update.uplink_codec.exact, greeting.message.microbatch_size
            ),
        )  # fmt: skip
        receive = ReceiveBuffers(layout, update.uplink_codec)
        self.results = Results(shared, self.scheduler, self.verification, receive)
        self._look_again: asyncio.TimerHandle | None = None
        self._warned_of_idle = self._told_of_sizes = False
        self._last_commit = clock()
        self._commits = 0
        self._update_shares: list[float] = []  # what the optimizer took of each of the steps in ``_WATCHED_STEPS``

    @property
    def progress(self) -> int:
        return self.version

    @property
    def accepts(self) -> bool:
        return not self.lifecycle.ends

    def downlink_bytes(self) -> tuple[int, int]:
        raw, encoded = self.context.history.downlink_bytes
        return raw + self.publisher.raw_bytes, encoded + self.publisher.encoded_bytes

    def reason_to_wait(self, session: Session, member: Member) -> str:
        return reason_to_wait(self, session, member)

    # -- the run -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit steps until the end, a stop or a failure (which is raised)."""
        self._last_commit = self.context.clock()
        while self.version < self.total_steps and not self.lifecycle.stopping:
            here = self._goes_on_here
            if here is not None and await self._make_several(here):
                await asyncio.sleep(0)  # whatever else there is to do
                continue
            if self.version not in self.ledger.open_steps:
                # Nothing of this step is leased yet, so nothing can come of it while its order is being computed.
                await self._ordering.wait(self.version, self.total_steps)
            self._open_steps()
            self._receive()
            here = self._for_here
            self.context.loader.take_turns(self.total_steps if here is not None and here.takes_turns else 0)
            if here is not None and not here.has_data(self._plan_under_way):
                if self.lifecycle.failure is None and not self.lifecycle.stopping:
                    began = self.context.clock()
                    self.lifecycle.wake.clear()
                    await self.lifecycle.wake.wait()
                    self._data_s += self.context.clock() - began
                continue
            if here is not None and await self._make_several(here):
                await asyncio.sleep(0)  # whatever else there is to do
                continue
            if here is not None and self._compute_here(here):
                self._turn_steps += 1
                if self._turn_steps >= _MOST_A_TURN or self.context.clock() - self._turn_began >= _TURN_S:
                    await asyncio.sleep(0)  # whatever else there is to do
                    self._turn_steps, self._turn_began = 0, self.context.clock()
            else:
                self._send_out()
                if not await self._collect():
                    break
            if not await self._may_commit():
                break
            self._prove()
            await self._commit()
        if self.lifecycle.failure is not None:
            raise self.lifecycle.failure

    def stop(self, grace_s: float | None = None) -> None:
        self.phase.stop(grace_s)

    def finish(self) -> None:
        self._finished = True
        self.stop(0.0)

    async def aclose(self) -> None:
        """Wait for the loader and the aggregator's thread."""
        if self._look_again is not None:
            self._look_again.cancel()
        self._closing = True
        await self.context.loader.aclose()
        await self.aggregator.aclose()
        if self._in_place is not None:
            self._in_place.close()

    def _open_steps(self) -> None:
        """Open the current step and the next, so that a worker's next lease is there before the version is.

        A step whose order is still being computed is opened when that is there (``_order_came``).
        """
        now = self.context.clock()
        for step in range(self.version, min(self.version + 1 + AHEAD, self.total_steps)):
            if step in self.ledger.open_steps:
                continue
            if not self._ordering.ready(step, self.total_steps):
                return
            plan = self.sampler.plan(step)
            self.ledger.open(step, plan.num_leaves, now)
            self.context.loader.open(plan)

    def _order_came(self) -> None:
        if not self._closing and self.lifecycle.failure is None and not self.lifecycle.stopping:
            self._open_steps()
            self.schedule()

    def _receive(self) -> None:
        """Have a place for results of the current step, if it is open: before any worker is told of its version."""
        if self.aggregator.step is None and self.version in self.ledger.open_steps:
            plan, growing = self.sampler.plan(self.version), self.growing
            rate_factor = 1.0 if growing is None else growing.plan.rate_factor(self.version)
            self.aggregator.begin(plan, rate_factor=rate_factor, measure=growing is not None)
            self.ledger.begin(self.version, self.context.clock())

    async def _collect(self) -> bool:
        """Reduce what arrives until the step is complete. False where the run ends before that."""
        while self.lifecycle.failure is None and not self._finished:
            self.lifecycle.wake.clear()  # before anything is asked: what comes while one thing is done is seen after it
            if self.ledger.complete(self.version) and not self.verification.holding:
                return True
            if self._has_lease_here():
                await asyncio.sleep(0)  # what others were told leaves first, and what they have said is heard
                self._compute_lease()
                continue
            if await self.aggregator.reduce():
                continue
            if await self.results.settle() or await self._settle():
                self.schedule()
                continue
            if not self.lifecycle.stopping:
                await self.lifecycle.wake.wait()
                continue
            if not any(grant.step == self.version for held in self.roster.sessions for grant in self.ledger.held(held)):
                return False  # nobody works on this step: what is left of it is done after the resume
            try:
                async with asyncio.timeout(max(0.0, self.lifecycle.stop_at - self.context.clock())):
                    await self.lifecycle.wake.wait()
            except TimeoutError:
                return False
        return False

    def _stands_for(self) -> Session | None:
        """In which worker's place something is computed here: whole steps, or its leases."""
        in_place, sessions = self._in_place, self.roster.sessions
        if in_place is None or not self.phase.may_lease():
            return None
        membership = self.roster.membership
        return in_place.stands_in(
            lambda session: sessions.get(session.worker_id) is session and membership.is_ready(session.worker_id),
            lambda: [sessions[worker] for worker in membership.ready_ids],
        )

    @property
    def computes_here(self) -> bool:
        """Whether steps are computed here, in place of a worker."""
        return self._in_place is not None and self._stands_for() is not None and self._in_place.whole

    def takes_place_of(self, session: Session) -> bool:
        """Whether this worker's leases are computed here, beside those of others."""
        return self._stood_for is session

    def _stand(self) -> None:
        """See whose leases are to be computed here from now on."""
        session = None
        if self._in_place is not None and not self._in_place.whole and not self.pacing.slow_lines:
            session = self._stands_for()
        if session is self._stood_for:
            return
        before, self._stood_for = self._stood_for, session
        if before is not None:
            self.pacing.at_most(before.worker_id, math.inf)
        if session is not None:
            self.pacing.at_most(session.worker_id, _HERE * self.pacing.config.whole_step_s)
        leases, self._for_us = self._for_us, []
        for lease in leases:
            if self.ledger.get(lease) is not None:
                self.ledger.give_back(lease)
        if before is not None:
            self._let_go(before.worker_id)  # it may wait for that alone

    @property
    def _plan_under_way(self) -> StepPlan:
        assert self.aggregator.step is not None
        return self.aggregator.step.plan

    @property
    def _for_here(self) -> InPlace | None:
        """What computes the current step, where such steps are computed here and nobody has begun it."""
        step, leaves = self.version, 0
        if step in self.ledger.open_steps:
            leaves = self.ledger.num_leaves(step)
        if not 0 < leaves <= self.context.loader.max_block_leaves or self.ledger.free_leaves(step) < leaves:
            return None
        return self._in_place if self.computes_here and not self.verification.holding else None

    @property
    def _goes_on_here(self) -> InPlace | None:
        """The engine that made the last step, where it is to make the current one too: no worker may lease that yet."""
        if self.version in self.ledger.open_steps or self.verification.holding or not self.computes_here:
            return None
        return self._in_place

    def _compute_here(self, in_place: InPlace) -> bool:
        """Compute the current step here. False where that has failed."""
        began = self.context.clock()
        computed = in_place.compute(self._plan_under_way)
        seconds = self.context.clock() - began
        self._compute_s += seconds
        if computed is None:
            return False
        self.results.count_whole(computed, seconds)
        in_place.lend(computed)
        return True

    async def _make_several(self, here: InPlace) -> bool:
        """Make steps here, one after the other, for as long as a turn of the event loop may last, where nothing of them
        has to be waited for. Nobody is told of what lies between them, nothing is kept of it for workers, and what
        follows is opened where workers are to have it. False where not even one was made: the step under way is made
        as others are.
        """
        if self._encodes or self.growing is not None:  # every step is sent, or looked at
            return False
        first, changed, context = self.version, set[int](), self.context
        now = context.clock()
        ends, plan = now + _TURN_S, self._next_here(here)
        if plan is None:
            return False
        try:
            with here.row(holds=not context.bus.prompt):  # who is told of each step may draw
                while plan is not None and (applied := self._make_here(here, plan)) is not None:
                    changed.update(applied.changed)
                    began, now = now, context.clock()
                    if now + (now - began) > ends:  # the next one would end later
                        break
                    plan = self._next_here(here)
        except Broken as broken:
            raise await self.aggregator.broke(broken.step, broken.error) from broken.error
        finally:
            context.bus.deliver()
            for step in range(first, self.version):
                if step in self.ledger.open_steps:
                    self.ledger.close(step)
                    context.loader.close_step(step)
        if self.version == first:
            return False
        failpoint("publish.before")
        self._publish(self.publisher.advance(sorted(changed)))
        failpoint("publish.after")
        return True

    def _next_here(self, here: InPlace) -> StepPlan | None:
        """The current step, whose data has been gathered. None where it is not one that ``_make_several`` makes."""
        awaited = self.context.hooks.awaited()
        if not self.aggregator.is_quick or self.rule.may_draw or here.stands_for is None:
            return None
        if self.lifecycle.ends or self.version >= self.total_steps or not (awaited is None or awaited.done()):
            return None
        if self.version in self.ledger.open_steps:
            if self._for_here is None:
                return None
        elif not self._ordering.ready(self.version, self.total_steps):
            return None
        began, plan = self.context.clock(), self.sampler.plan(self.version)
        if not here.gathers(plan):
            return None
        self._data_s += self.context.clock() - began
        return plan

    def _make_here(self, here: InPlace, plan: StepPlan) -> Applied | None:
        """Make the current step. None where workers are to make it."""
        clock = self.context.clock
        began = clock()
        computed = here.compute(plan)
        if computed is None:
            return None
        done = clock()
        step = StepState(plan, [0.0] * plan.num_leaves, began)
        step.note(Block(0, plan.num_leaves), computed)
        applied = self.aggregator.commit_own(step, computed)
        here.release(computed)
        self.version += 1
        self.phase.used(leaves=plan.num_leaves)
        contributions = self.context.history.contributions
        contributions.short_steps += 1
        contributions.add_own(plan.num_leaves, plan.num_samples, done - began)
        data_s, self._data_s = self._data_s, 0.0
        phases_s = {"wait": 0.0, "reduce": 0.0, "apply": clock() - done, "publish": 0.0}
        self._note(step, applied, phases_s | {"data": data_s, "compute": done - began})
        return applied

    def _has_lease_here(self) -> bool:
        """Whether a lease of the current step is to be computed here."""
        return bool(self._for_us) and any(
            grant is None or grant.step == self.version for grant in map(self.ledger.get, self._for_us)
        )

    def _compute_lease(self) -> None:
        """Compute the next lease that is the coordinator's, where there still is one."""
        self._stand()
        if not self._for_us:
            self.schedule()
        for lease in tuple(self._for_us):
            grant = self.ledger.get(lease)
            if grant is None:
                self._for_us.remove(lease)  # it was taken back, or its block is finished
            elif grant.step == self.version:
                self._for_us.remove(lease)
                self._compute_grant(grant)
                return

    def _compute_grant(self, grant: BlockGrant) -> None:
        session, in_place, clock = self._stood_for, self._in_place, self.context.clock
        assert session is not None
        assert in_place is not None
        began, block = clock(), grant.block
        computed = in_place.compute_part(self._plan_under_way, block)
        self._compute_s += clock() - began
        buckets = None if computed is None else self.results.cleared(block, computed.absent)
        if computed is None or buckets is None:  # workers compute it, or a backup's result of it is on its way
            self.ledger.give_back(grant.lease)
            if computed is not None:
                in_place.release(computed)
            self.schedule()
            return
        stays, seconds = in_place.can_lend, clock() - began
        other = self.results.count_leased(session, grant, computed, buckets, seconds, copy=not stays)
        if stays:
            in_place.lend(computed)
        else:
            in_place.release(computed)
        if other is not None:
            self._overtake(other)
        self._let_go(session.worker_id)
        if self.ledger.free_leaves(self.version):
            self.schedule(None if self.verification.holding else session.worker_id)

    def _send_out(self) -> None:
        """Have workers compute the current step."""
        self._sent_out = self.version
        self.schedule()

    def _prove(self) -> None:
        """Compare the complete step with what is computed of it here, where that is to be known."""
        step = self.aggregator.step
        if self._in_place is not None and step is not None and self._in_place.wants_proof:
            self._in_place.prove(step.plan, self.store.pieces(Block(0, step.plan.num_leaves)))

    async def _settle(self) -> bool:
        """Do what is decided of held blocks, one after the other. False when there was nothing."""
        settled = False
        while (ruling := await self.verification.next_ruling()) is not None:
            self._perform(ruling)
            settled = True
        return settled

    def _perform(self, ruling: Ruling) -> None:
        """Do what was decided of a finished block."""
        block = ruling.block
        if ruling.void is not None:
            self.revoke(ruling.void, "the block is done anew")
        for decision in ruling.decisions:
            match decision:
                case Count() if not self._is_of_the_runs_kind(block):
                    self.results.discard(block, "the run's sums are made in another way")
                case Count():
                    self._consider(block)
                    self.results.count(block)
                    self.verification.counted(block)
                    self._credit(block)
                case Discard(reason):
                    self.results.discard(block, reason)
                case Quarantine(worker, reason):
                    self._quarantine(worker, block.session if worker == block.session.worker_id else None, reason)
                case Audit() | Recompute():
                    pass  # the block is held: its audit is leased with the next leases, or it is recomputed

    async def _may_commit(self) -> bool:
        """Wait for what decides whether the run goes on. False where it has decided that it does not, or where the run
        has failed meanwhile. Somebody who stops the run does not wait: it goes on from here when that is decided."""
        awaited = self.context.hooks.awaited()
        if awaited is not None:
            while not awaited.done() and not self.lifecycle.ends:
                self.lifecycle.wake.clear()
                waking = asyncio.ensure_future(self.lifecycle.wake.wait())
                await asyncio.wait((awaited, waking), return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
            if not awaited.done() or self.lifecycle.failure is not None:
                return False
        return not self._finished

    async def _commit(self) -> None:
        began = self.context.clock()
        if self.journal is not None:
            await self.journal.room()
        waited = self.context.clock() - began
        step, applied, pieces, phases_s = await self.aggregator.commit()
        if self._in_place is not None:
            self._in_place.committed()
        if self._compute_s:  # neither this nor waiting for data is waiting for results
            phases_s["wait"] = max(0.0, phases_s["wait"] - self._data_s - self._compute_s)
            phases_s |= {"data": self._data_s, "compute": self._compute_s}
        self._data_s = self._compute_s = 0.0
        if self.journal is not None:
            phases_s["journal"] = waited + step.copy_s
        began = self.context.clock()
        failpoint("publish.before")
        self.version += 1
        self.ledger.close(step.plan.step)
        self._receive()
        self._publish(pieces)
        self.context.loader.close_step(step.plan.step)  # it reads ahead: workers need not wait for that
        failpoint("publish.after")
        phases_s["publish"] += self.context.clock() - began
        self._note(step, applied, phases_s)
        self.context.bus.deliver()

    def _publish(self, pieces: Sequence[Piece]) -> None:
        """Tell every worker what became of its results and of the new version."""
        self.verdicts.committed(self.version)
        sessions = self.roster.sessions
        idle = {session for worker, session in sessions.items() if not self._has_work(worker)}
        self.publisher.send(sessions.values(), self.version, pieces, idle=idle)
        if self._stood_for is not None:  # what follows here is long; else what workers wait for would leave with this
            for session in sessions.values():
                session.outbox.flush()
        if self.roster.keeps_residuals:
            for member in tuple(self.roster.membership.members.values()):
                if member.standing is Standing.DRAINING:
                    self._let_go(member.worker_id)  # it has the verdicts that it waited for

    def _note(self, step: StepState, applied: Applied, phases_s: dict[str, float]) -> None:
        plan, now = step.plan, self.context.clock()
        loss = step.mean(step.losses)
        self.phase.committed(loss)
        self.phase.used(samples=plan.num_samples)
        seconds, self._last_commit = now - self._last_commit, now
        self._watch_update(seconds, phases_s["apply"])
        if self._in_place is not None:
            self._in_place.took(seconds, plan.num_leaves, self.pacing.config.whole_step_s)
            self.pacing.shares_short = self._in_place.shares
        self.roster.contributions.skip(applied.skipped)
        if applied.skipped and self.rule.scale is None:
            samples = named_samples(plan, step.losses)
            self.phase.warn(f"step {self.version} was skipped: its gradient is not finite; {samples}")
        self.phase.note_gradient(self.version, finite=not applied.skipped)
        self.phase.note_untouched(self.version, step.untouched or ())
        if self.context.bus.active or self.journal is not None:
            sent, received = self.roster.traffic_since()
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
                skipped=int(applied.skipped),
                seconds=seconds,
                num_workers=len(self.roster.sessions),
                bytes_sent=sent,
                bytes_received=received,
                phases_s=phases_s,
            )
            if self.journal is not None:  # it publishes the event when the step is durable
                news: dict[str, Sequence[int | str | list[int]]] = {
                    "bad_samples": self.context.loader.bad.unrecorded(), **self.context.numerics.unrecorded(),
                    "counted": self.context.counted.records(self.version, self.version),
                }  # fmt: skip
                self.journal.append(self.version, step, event, self.phase.samples_applied, news)
            else:
                self.context.bus.publish_later(event)
                failpoint("commit.after")
        if self.growing is not None and not applied.skipped:
            grown = self.growing.observe(plan, step.halves)
            if grown is not None:
                self.total_steps = grown.total_steps
                self.context.bus.publish(grown)
        self.context.hooks.on_commit(Commit(step=self.version, before=self.version - 1))

    def _watch_update(self, seconds: float, update_s: float) -> None:
        """Say once what would make steps faster, where the optimizer takes much of them and torch has a faster one."""
        self._commits += 1
        if self._commits in _WATCHED_STEPS and seconds > 0.0:
            self._update_shares.append(update_s / seconds)
        if self._commits == _WATCHED_STEPS[-1]:
            self.phase.note_beside(self.rule.kept_beside())
        # The middle one: the first flat step is tried, and any may wait for the machine.
        usual = statistics.median(self._update_shares or [0.0])
        if self._commits == _WATCHED_STEPS[-1] and usual > _SLOW_UPDATE and (form := self.rule.fused_form):
            self.phase.warn(
                f"the optimizer takes {usual:.0%} of a step: {form} makes the same update in one pass, and has other "
                "last bits"
            )

    # -- leases --------------------------------------------------------------------------------------------

    def takes_work(self, worker: str, does: bool) -> None:
        self.scheduler.takes_work(worker, does)
        in_place, version = self._in_place, self.version
        if not does or in_place is None or in_place.stands_for is None or version >= self.total_steps:
            return
        if self._ordering.ready(version, self.total_steps):
            leaves = self.sampler.plan(version).num_leaves
            in_place.comes_beside(leaves, self.pacing.whole_step_s(in_place.stands_for.worker_id, leaves))

    def schedule(self, only: str | None = None) -> None:
        """Give work to whoever has room for it (``only``: check this worker alone)."""
        if not self.phase.may_lease():
            return
        if only is not None and not self.roster.membership.is_ready(only):
            return
        self._stand()
        steps = self.ledger.open_steps
        if self.lifecycle.stopping:
            steps = steps[:1]
        if self._in_place is not None and self.computes_here:
            steps = steps[:1] if self._sent_out == self.version else []
        now = self.context.clock()
        for grant in self.verification.leases(self.roster.membership.ready_ids):
            self.scheduler.send(grant)
        for worker, lease in self.scheduler.leases(
            steps, now, has_credit=self.roster.has_credit, again=only is None,
            hold_back=self.verification.num_held >= most_held(self.context.config),
        ):  # fmt: skip
            self._post(worker, lease)
        self._look_again_at(self.scheduler.look_again_at, now)
        self._lease_anew()

    def _post(self, worker: str, lease: Sendable) -> None:
        """Send a lease to its worker, or keep it where it is computed in its place."""
        session, number = self.roster.sessions[worker], lease.message.lease
        if session is self._stood_for and not (lease.message.local or self.ledger.is_audit(number)):
            self._for_us.append(number)
            self.lifecycle.wake.set()
        else:
            session.post_lease(lease.message, lease.buffers)

    def _beyond(self, grant: BlockGrant, data: BlockData) -> bool:
        """Whether a lease has leaves that its worker, which has not the job's code, has no graph for.

        It goes back. Such leaves are for workers with the code; where there is none, the coordinator computes them.
        """
        refused = self.phase.beyond(grant.worker, data)
        if not refused:
            return False  # of every worker is asked below: that is not for each lease
        with_code = self.phase.has_code
        if not (with_code or self._recomputation is not None):
            return False  # without either, the worker says why it cannot
        without = [worker for worker, other in self.roster.sessions.items() if other.code_free]
        leaves = [grant.block.start + number for number, _ in refused]
        self.ledger.pass_over(grant.lease, leaves, without)
        if not with_code:
            for leaf in leaves:
                self.results.take_over(grant.step, leaf)
        if not self._told_of_sizes:
            self._told_of_sizes = True
            self.phase.warn(
                f"{WITHOUT_CODE.format(sizes=refused[0][1][:200])}; such leaves are computed by workers with --job, or "
                "else one by one by the coordinator: start workers with --job, or have collate pad every batch to the "
                "same sizes"
            )
        return True

    def _granted(self, grant: BlockGrant) -> None:
        """A lease was given: of the current version, perhaps to one that had no work and was not sent it."""
        session = self.roster.sessions.get(grant.worker)
        kept = session is self._stood_for and not self.ledger.is_audit(grant.lease)
        if grant.step == self.version and session is not None and not kept:
            self.publisher.bring(session)

    def _there(self, grant: BlockGrant) -> tuple[int, ...]:
        """Result buckets that need not be sent under a lease: they have come, of a block of the current step."""
        if self.ledger.is_audit(grant.lease) or not self._has_come(grant.step, grant.block):
            return ()
        return tuple(sorted(self.store.suppliers(grant.block)))

    def _has_work(self, worker: str) -> bool:
        """Whether it holds a lease of the current step, which it is to compute itself."""
        return any(grant.step == self.version and grant.lease not in self._for_us for grant in self.ledger.held(worker))

    def _too_many(self) -> bool:
        """Whether there are more workers than leaves, in this step and the next."""
        ready, steps = self.roster.membership.num_ready, self.ledger.open_steps
        return bool(steps) and all(ready > self.ledger.num_leaves(step) for step in steps)

    def _warn_of_idle(self) -> None:
        """Say once that there is not work for all."""
        if self._warned_of_idle or not self.phase.begun or not self._too_many():
            return
        ready, leaves = self.roster.membership.num_ready, self.ledger.num_leaves(self.ledger.open_steps[0])
        leaf_s = self.pacing.fastest_leaf_s
        if leaf_s is None or leaves * leaf_s < self.pacing.config.whole_step_s:
            return  # it is not known yet how long a step is; or it would not be shared out with more leaves either
        self._warned_of_idle = True
        self.phase.warn(
            f"{ready} workers share steps of {leaves} {'leaf' if leaves == 1 else 'leaves'}: {ready - leaves} without "
            "work; start fewer workers, or have more leaves a step: a larger batch_size, or a smaller microbatch_size "
            "(w5xde tune says whether that pays)"
        )

    def _allowed_s(self, grant: BlockGrant) -> float:
        """How long a lease may take, by what is known of its worker now."""
        return self.pacing.allowed_s(grant.worker, grant.block.num_leaves, grant.deadline_s)

    def _waits_for_data(self, grant: BlockGrant) -> bool:
        """Whether a lease has not been sent since its data is being read here."""
        return grant.lease in self.scheduler.unread and self.context.loader.awaits(grant.step, grant.block)

    def _has_come(self, step: int, block: Block) -> bool:
        """Whether anything is there of a block: of the current step alone."""
        under_way = self.aggregator.step
        return under_way is not None and under_way.plan.step == step and self.store.has(block)

    def _look_again_at(self, at: float, now: float) -> None:
        """Schedule again at that time, and at no other that was said before."""
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        if math.isfinite(at):
            self._look_again = asyncio.get_running_loop().call_later(
                max(at - now, 0.001), self.lifecycle.guarded(self.schedule)
            )

    def data_came(self) -> None:
        self.lifecycle.wake.set()  # a step that is computed here may wait for it
        if self.lifecycle.failure is None:
            for worker, lease in self.scheduler.read(self.context.clock()):
                self._post(worker, lease)
            self._lease_anew()

    def _lease_anew(self) -> None:
        if self.scheduler.gave_back():
            asyncio.get_running_loop().call_soon(self.lifecycle.guarded(self.schedule))

    # -- WorkSource and Scheduling --------------------------------------------------------------------------

    def place(self, session: Session, result: Result, spec: BufferSpec) -> Destination:
        return self.results.place(session, result, spec, member=self.roster.sessions.get(session.worker_id) is session)

    def place_pieces(
        self, session: Session, result: Result, specs: Sequence[BufferSpec]
    ) -> tuple[Sequence[memoryview] | None, bool]:
        return self.results.place_pieces(session, result, specs)

    def unpack(self, session: Session, result: Result) -> Callable[[], None] | None:
        return self.results.unpack(session, result)

    def arrived(self, session: Session, result: Result) -> None:
        self.results.arrived(session, result)

    def lay(self, session: Session, result: Result, piece: Tensor) -> bool:
        member = self.roster.sessions.get(session.worker_id) is session
        return self.results.lay(session, result, piece, member=member)

    def done(self, session: Session, done: Done) -> None:
        known = self.roster.member(session.worker_id)
        owed = known is not None and done.lease in known.owes
        member_s = 0.0 if known is None else self.context.clock() - known.joined_at
        finished = self.results.done(session, done, owed=owed, member_s=member_s)
        if finished is not None and (ruling := self.verification.finished(finished)) is not None:
            self._perform(ruling)
        member = self.roster.answered(session, done.lease)
        if member is not None:
            self.roster.note_coding(session, member, done)
        if finished is not None and finished.overtaken is not None:
            self._overtake(finished.overtaken)
        self._let_go(session.worker_id)
        if not (self.aggregator.is_quick and self.ledger.complete(self.version) and not self.verification.holding):
            self.schedule(None if self.verification.holding else session.worker_id)  # else it follows the commit

    def _overtake(self, other: BlockGrant) -> None:
        """The block of this lease was finished under another."""
        if other.lease in self._for_us:
            self._for_us.remove(other.lease)
            return
        self.scheduler.overtaken(other, self.context.clock())
        self.revoke(other, "another worker was faster")
        self.roster.await_answer(other.worker)

    def _credit(self, finished: FinishedBlock) -> None:
        """A block counts: its worker's figures tell of it."""
        session, grant, done = finished.session, finished.grant, finished.done
        self.ledger.places.delivered(session.worker_id)
        step = self.aggregator.step
        assert step is not None
        samples = step.plan.samples_in(*grant.block)
        self.phase.computed(session.worker_id, grant.block.num_leaves, done)
        self.phase.credit(session.worker_id, grant.block.num_leaves, samples)

    def _consider(self, finished: FinishedBlock) -> None:
        """A block is about to count: whether it could as well be computed here."""
        in_place, step = self._in_place, self.aggregator.step
        if in_place is None or step is None:
            return
        grant, done, short_s = finished.grant, finished.done, _HERE * self.pacing.config.whole_step_s
        work_s = done.compute_s / grant.block.num_leaves * step.plan.num_leaves
        whole_s = self.pacing.whole_step_s(grant.worker, step.plan.num_leaves)
        if grant.block.num_leaves == step.plan.num_leaves and done.compute_s < whole_s:
            in_place.watch(finished.session, done, step.plan)
        elif (
            in_place.watches
            and done.compute_s < short_s * grant.block.num_leaves
            and not (self.pacing.slow_lines or work_s > _MOST_SHARED_S)
        ):
            in_place.watch_part(finished.session, done, step.plan, grant.block, self.store.pieces(grant.block))

    def _quarantine(self, worker: str, session: Session | None, reason: str) -> None:
        """A worker was proven wrong: nothing of its that does not count yet will, nor of others of its name."""
        name, workers = self.verification.of_name(worker)
        if self.roster.quarantine(worker, session, reason, identity=name):
            for one in workers:
                self._invalidate(one)

    def _is_of_the_runs_kind(self, block: FinishedBlock) -> bool:
        """Whether a block that is to count has its sums made as the run's are; the first one decides how that is."""
        roster, numerics = self.roster, self.context.numerics
        made = self.verification.numerics_of(block)
        if self.verification.active and roster.asked and not all(fits(one, roster.asked) for one in made):
            return False  # of one who was let in before that was decided
        if self.verification.active and len(made) > 1 and self.context.config.numerics != ANY:
            return False
        for one in sorted(made):
            if mixed := numerics.note(one):
                self.phase.warn(mixed)
        if self.context.config.numerics != ANY and roster.asked != self._kept_to:
            self._kept_to = roster.asked
            for worker in roster.keep_to(self._kept_to):
                self._invalidate(worker)
        return True

    def _invalidate(self, worker: str) -> None:
        """Nothing of what it has sent counts that does not yet."""
        self.results.invalidate(worker)
        for ruling in self.verification.invalidate(worker):
            self._perform(ruling)

    def failed(self, session: Session, failed: Failed) -> None:
        self.roster.answered(session, failed.lease)
        self.results.failed(session, failed)
        self._let_go(session.worker_id)
        self.schedule()

    def unread(self, session: Session, unread: Unread) -> None:
        grant = self.ledger.held_by(session.worker_id, unread.lease)
        if grant is None:
            return  # it was revoked, which is on its way
        self.phase.note_unread(session, unread)
        for _, lease in self.scheduler.send_data(grant, self.context.clock()):
            session.post_lease(lease.message, lease.buffers)
        self._lease_anew()

    def draining(self, session: Session, drain: Drain) -> None:
        member = self.roster.member(session.worker_id)
        if member is not None:
            member.standing = Standing.DRAINING
        leaves, grace_s, first = 0, drain.grace_s or math.inf, True
        for grant in self.ledger.held(session.worker_id):
            sent = self._was_sent(grant)
            leaves += grant.block.num_leaves if sent else 0
            known = self.pacing.leaf_s(grant.worker) is not None
            late_s = self.pacing.late_s(grant.worker, leaves) if known else None
            if grant.step != self.version:  # not begun, and the step before may have nobody left to finish it
                in_time = False
            elif first:  # it is being computed
                in_time = late_s is None or late_s <= grace_s
            else:  # it may have been begun by the time that the worker hears of this, unless it takes long
                in_time = late_s is not None and late_s <= min(grace_s, _MOMENT_S)
            if not (session.is_receiving(grant.lease) or (sent and in_time)):
                self.ledger.give_back(grant.lease)
                self.revoke(grant, "draining")
            first = first and not sent
        self._let_go(session.worker_id)
        self.schedule()

    def _was_sent(self, grant: Grant) -> bool:
        """Whether a lease was given to its worker's session; else it waits for its data, or is computed here."""
        if grant.lease in self._for_us:
            return False
        return grant.lease not in self.scheduler.unread or grant.lease in self.scheduler.known

    def revoke(self, grant: Grant, reason: str) -> None:
        if grant.lease in self._for_us:
            self._for_us.remove(grant.lease)
        elif self._was_sent(grant):
            self.roster.revoke(grant, reason)
        self._let_go(grant.worker)  # that may have been the last it held

    def _let_go(self, worker: str) -> None:
        """Say goodbye to one that wants to leave and holds no lease any more."""
        if (leaving := self.phase.leaving(worker)) is None:
            return
        member, session = leaving
        if self.roster.keeps_residuals and (member.owes or self.verdicts.owed(worker)):
            # What its codec has left out depends on verdicts that are still to come, while somebody is there to finish
            # the step. Else it would wait for whoever comes next.
            if self.roster.membership.num_ready or self.lifecycle.stopping:
                return
            self.verdicts.presume(worker)
        session.say_goodbye(ByeCode.LEAVING, "drained")

    def tick(self, now: float) -> None:
        self.roster.tick(now, shown_progress(self.progress, self.total_steps))
        self.phase.note_reading()
        self.schedule()
        self._warn_of_idle()
        if self._recomputation is not None and self.lifecycle.is_over(now):
            self._recomputation.give_up()
        if self.roster.keeps_residuals:
            for member in tuple(self.roster.membership.members.values()):
                self._let_go(member.worker_id)  # whoever could have finished the step may be gone

    def introduce(self, session: Session, awaited: Sequence[int]) -> None:
        self.phase.introduce(session)
        said = session.ready
        assert said is not None
        machine = Machine(
            said.device.partition(":")[0], said.device_name, said.threads, said.torch_version, said.numerics
        )
        self.verification.joined(session.worker_id, machine, session.identity, session.place[0])
        if self._recomputation is not None and machine.device == "cpu" and said.threads <= (os.cpu_count() or 1):
            self._recomputation.threads = said.threads
        if session.shared is not None or (session.link.same_host and self.context.layout.is_small):
            self.pacing.near(session.worker_id)
        if session.island is not None:
            self.pacing.at_least(session.worker_id, session.island.least_leaves)
        # A number under this rule is a step's: no other version of the term has it.
        self.publisher.join(session, held=self.version in said.held, idle=self.phase.begun and self._too_many())
        self.verdicts.returned(session.worker_id, awaited)
        if self.phase.may_lease():
            for lease in said.unsent[:_MOST_UNSENT]:
                self.scheduler.grant_again(session.worker_id, lease, self.context.clock())

    def release(self, session: Session) -> None:
        self.results.left(session)
        self.publisher.forget(session)

    def divert(self, session: Session) -> bool:
        return self.results.divert(session)

    def take_back(self, session: Session) -> int:
        self.context.loader.forget(session.worker_id)
        grants, failed_work = self.ledger.lose(session.worker_id, died=session.vanished)
        self.scheduler.left(session.worker_id)
        self.verification.left(session.worker_id)
        if any(link.broke_protocol for link in session.links):
            self._invalidate(session.worker_id)
        if failed_work is not None and self.lifecycle.failure is None:
            self.results.blame(failed_work, f"{failed_work.attempts} workers vanished while they computed this leaf")
        return len(grants)

    def departed(self, worker: str) -> None:
        if self.phase.departed(worker, over=self.progress >= self.total_steps):
            self.schedule()
