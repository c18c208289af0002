"""Results on their way in: where each lands, what it completes, what becomes of its lease.

A result is received straight into the memory of its slot (``hub.work.block_store``), by one session at a time. A second
one that comes meanwhile, and what a codec wrote, is received into memory of its own. What lies in memory that a worker
shares is read from there. The first that is complete fills the slot; what another is still receiving there is diverted
into the session's scratch and dropped, as is what no open lease authorizes and what is there already.

Nothing of a block is added before the whole of it has been verified, unless every check is switched off: then buckets
are added as they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.compute.block import ComputedBlock
from w5xde_async.coordinator.parameters.aggregator import StepState
from w5xde_async.coordinator.parameters.receive_buffers import ReceiveBuffers
from w5xde_async.coordinator.sync.context import SyncContext
from w5xde_async.coordinator.sync.recomputation import ReferenceResult
from w5xde_async.coordinator.sync.verification import FinishedBlock, Verification
from w5xde_async.errors import RemoteError, shortened
from w5xde_async.hub.members.island import Island
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import AuditKey, Destination, SlotKey, Supplier
from w5xde_async.hub.work.claims import Claims
from w5xde_async.hub.work.lease_scheduler import LeaseScheduler
from w5xde_async.plan.leases import FailedWork
from w5xde_async.plan.ledger import COORDINATOR, BlockGrant
from w5xde_async.plan.numerics import EXACT
from w5xde_async.plan.tree import Block
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Done, Failed, Result, VerdictCode

#: Buckets of at most this much are unpacked on the loop: that takes about as long as the way to a thread. A codec takes
#: several times as long as a copy.
INLINE_BYTES, INLINE_CODED_BYTES = 4 << 20, 1 << 20


class _Doubt(NamedTuple):
    """A leaf on which too many workers failed, or that none can compute (``error`` is empty), leased to the coordinator
    itself."""

    failed_work: FailedWork
    error: str
    traceback: str
    grant: BlockGrant


class _Pieces:
    """One bucket of an island's result, on its way in from several ranks."""

    def __init__(self, island: Island, lease: int, key: SlotKey) -> None:
        self.island, self.lease, self.key = island, lease, key
        self.missing = island.holders(key.bucket)  # ranks whose piece has not come whole
        self.writing: set[Session] = set()  # whose piece is being received into the slot
        self.held = False  # the slot is its own; else what comes is dropped


class Results:
    """The way of the current step's results from sessions to slots."""

    def __init__(
        self, context: SyncContext, scheduler: LeaseScheduler, verification: Verification, receive: ReceiveBuffers
    ) -> None:
        """``receive``: checks results, and has the bytes of those that a codec wrote."""
        self.leaves_audited = 0  #: leaves that were computed a second time, to compare
        self._context, self._phase, self._verdicts = context, context.phase, context.phase.verdicts
        self._layout, self._ledger, self._store = context.run.layout, context.ledger, context.store
        self._aggregator, self._loader = context.aggregator, context.run.loader
        self._scheduler, self._verification, self._receive_buffers = scheduler, verification, receive
        self._doubts: list[_Doubt] = []  # bounded by the leaves of open steps: each holds a lease of its own
        self._claims = Claims(context.run.layout)
        self._beside: dict[Session, SlotKey] = {}  # for which slot a session receives into memory of its own
        self._pieces: dict[tuple[int, int], _Pieces] = {}  # (lease, bucket)
        self._result_bytes = 0  # of the largest result of a lease that has come

    def place(self, session: Session, result: Result, spec: BufferSpec, *, member: bool) -> Destination:
        """Raises RemoteError where the result has not the layout's size, or is of a version not yet published."""
        codec = self._receive_buffers.check(result, spec)  # in any case: what is dropped takes scratch of its size
        grant = self._ledger.held_by(session.worker_id, result.lease)
        if grant is None or not member:
            return Destination(None, self._ledger.past(session.worker_id, result.lease) is not None)
        self._current(grant)
        key = SlotKey(self._slots_of(grant), result.bucket)
        if self._store.is_filled(key):
            self._turn_away(grant)
            return Destination(None, True)
        if codec is None and (memory := self._store.reserve(key, session)) is not None:
            return Destination(memory, True)
        self._beside[session] = key
        if codec is None:
            return Destination(session.scratch(spec.nbytes), True)
        return self._receive_buffers.place(session, result, spec)

    def place_pieces(
        self, session: Session, result: Result, specs: Sequence[BufferSpec]
    ) -> tuple[list[memoryview] | None, bool]:
        """Where the pieces of a rank's shard go that lie in a bucket. Raises as ``place`` does."""
        pieces, codec = self._receive_buffers.check_pieces(session, result, specs)
        island, grant = session.island, self._ledger.held_by(session.worker_id, result.lease)
        if grant is None or island is None:
            return None, self._ledger.past(session.worker_id, result.lease) is not None
        self._current(grant)
        key = SlotKey(self._slots_of(grant), result.bucket)
        gathered = self._pieces.get((result.lease, result.bucket))
        if gathered is None:
            gathered = _Pieces(island, result.lease, key)
            self._drop_stale(key.of)
            gathered.held = self._store.reserve(key, gathered) is not None
            self._pieces[result.lease, result.bucket] = gathered
        if session.rank not in gathered.missing:
            raise RemoteError(f"it sent bucket {result.bucket} of lease {result.lease} twice")
        if not gathered.held:
            gathered.missing.discard(session.rank)
            if not gathered.missing:
                self._turn_away(grant)
            return None, True
        gathered.writing.add(session)
        if codec is not None:
            return self._receive_buffers.place_pieces(session, result, specs)
        memory, at = self._store.vector(key.of).bucket_bytes[result.bucket], self._layout.buckets[result.bucket].offset
        size = len(memory) // max(self._layout.buckets[result.bucket].numel, 1)
        return [memory[(run.begin - at) * size : (run.end - at) * size] for run in pieces], True

    def _piece_arrived(self, session: Session, result: Result, grant: BlockGrant | None) -> None:
        gathered = self._pieces[result.lease, result.bucket]
        if grant is None:
            self._receive_buffers.left(session)
        elif self._receive_buffers.receives(session):
            self._receive_buffers.read(session, self._store.vector(gathered.key.of))()
        gathered.writing.discard(session)
        gathered.missing.discard(session.rank)
        if grant is None:
            self._drop_stale(gathered.key.of)
        elif gathered.held and not gathered.missing:
            self._received(grant, *self._store.fill(gathered, Supplier(session.worker_id, grant.lease)))
            gathered.held = False

    def _drop_stale(self, of: Block | AuditKey) -> None:
        """What islands have begun to send of a block under leases that have ended, and are not just sending, is nothing
        any more: its slots are empty again."""
        for gathered in [one for one in self._pieces.values() if one.key.of == of]:
            if self._ledger.get(gathered.lease) is None:
                self._drop_pieces(gathered)

    def _drop_lease(self, session: Session, lease: int) -> bool:
        """What an island's ranks have begun to send under a lease is nothing. False where somebody's bytes are on their
        way into memory and that cannot be changed."""
        gathered = [one for one in self._pieces.values() if one.lease == lease]
        for link in session.links:
            if link.receiving == lease:
                if not link.divert():
                    return False
                self._receive_buffers.left(link)
                for one in gathered:
                    one.writing.discard(link)
        for one in gathered:
            self._drop_pieces(one)
        return True

    def _drop_pieces(self, gathered: _Pieces) -> None:
        if not gathered.writing:
            if gathered.held:
                self._store.abandon(gathered)
            self._pieces.pop((gathered.lease, gathered.key.bucket), None)

    def _turn_away(self, grant: BlockGrant) -> None:
        """A result of an open lease is not needed."""
        if not self._ledger.is_audit(grant.lease):
            self._verdicts.turned_away(grant.lease, grant.worker)

    def _slots_of(self, grant: BlockGrant) -> Block | AuditKey:
        """Where the results of an open lease belong."""
        return AuditKey(grant.lease) if self._ledger.is_audit(grant.lease) else grant.block

    def unpack(self, session: Session, result: Result) -> Callable[[], None] | None:
        """A placed result has come whole: what is to be done in a thread before it has ``arrived``, None where nothing
        is that takes long. What it returns writes into the slot, and raises MalformedFrame.

        Small buckets are decoded on the loop: about as fast as they were received, and still in the cache.
        """
        grant = self._ledger.held_by(session.worker_id, result.lease)
        most = INLINE_CODED_BYTES if self._receive_buffers.receives(session) else INLINE_BYTES
        if grant is None or self._layout.result_nbytes(self._layout.result_buckets[result.bucket]) <= most:
            return None
        if session.shard is not None:
            if not self._receive_buffers.receives(session):
                return None
            gathered = self._pieces[result.lease, result.bucket]
            return self._receive_buffers.read(session, self._store.vector(gathered.key.of))
        key = self._beside.get(session)
        if key is None or self._store.is_filled(key) or not self._clear(key):
            return None
        del self._beside[session]
        self._store.reserve(key, session)
        return self._reading(session, key)

    def _reading(self, session: Session, key: SlotKey) -> Callable[[], None]:
        """What a session has received beside a slot's memory, into that."""
        vector = self._store.vector(key.of)
        if self._receive_buffers.receives(session):
            return self._receive_buffers.read(session, vector)
        target = vector.buckets[key.bucket]
        if not target.numel():  # of which no tensor can be made
            return lambda: None
        received = torch.frombuffer(session.scratch(target.nbytes), dtype=target.dtype)
        return partial(_copy, target, received)

    def arrived(self, session: Session, result: Result) -> None:
        """A placed result is complete. Raises MalformedFrame where a codec cannot read it."""
        grant = self._ledger.held_by(session.worker_id, result.lease)
        if session.shard is not None:
            self._piece_arrived(session, result, grant)
            return
        key = self._beside.pop(session, None)
        if grant is None:
            self._receive_buffers.left(session)
            self._store.abandon(session)
            return
        supplier = Supplier(session.worker_id, grant.lease)
        if key is None:
            of, bucket = self._store.fill(session, supplier)
        elif self._store.is_filled(key) or not self._clear(key):
            self._receive_buffers.left(session)
            self._turn_away(grant)
            return
        else:
            of, bucket = key
            self._reading(session, key)()
            self._store.put(key, supplier)
        self._received(grant, of, bucket)

    def lay(self, session: Session, result: Result, piece: Tensor, *, member: bool) -> bool:
        """A result is complete in memory that its worker shares, in ``piece``. Whether a lease accounts for it.

        Raises RemoteError where it is of a version not yet published.
        """
        grant = self._ledger.held_by(session.worker_id, result.lease)
        if grant is None or not member:
            return self._ledger.past(session.worker_id, result.lease) is not None
        self._current(grant)
        key = SlotKey(self._slots_of(grant), result.bucket)
        if self._store.is_filled(key) or not self._clear(key):
            self._turn_away(grant)
        else:
            self._received(grant, *self._store.lay(key, piece, Supplier(session.worker_id, grant.lease)), laid=True)
        return True

    def _received(self, grant: BlockGrant, of: Block | AuditKey, bucket: int, *, laid: bool = False) -> None:
        """A slot is filled under a lease."""
        if isinstance(of, Block):
            self._verdicts.received(grant.lease, grant.worker, bucket)
            self._verification.filled(grant.step, of, bucket, laid=laid)
            self._counts_at_once(of, bucket, present=True)

    def _clear(self, key: SlotKey) -> bool:
        """Have nobody receive into a slot any more: somebody else's result is complete. False where that cannot be."""
        writer = self._store.writer(key)
        if writer is None:
            return True
        if isinstance(writer, _Pieces):
            self._drop_stale(key.of)
            return self._store.writer(key) is None
        assert isinstance(writer, Session)
        if not self.divert(writer):
            return False  # a thread takes what has come of it: the line is fast
        for grant in self._ledger.held(writer.worker_id):
            if self._slots_of(grant) == key.of:
                self._turn_away(grant)
        return True

    def divert(self, session: Session) -> bool:
        """Drop what this session is receiving: nothing is written for it any more. False where that cannot be now."""
        if session.island is not None:
            leases = {link.receiving for link in session.links}
            return all([lease is None or self._drop_lease(session, lease) for lease in leases])
        diverted = session.divert()
        if diverted:
            self.left(session)
        return diverted

    def left(self, session: Session) -> None:
        """The session has ended: nothing writes for it any more."""
        self._beside.pop(session, None)
        self._receive_buffers.left(session)
        self._store.abandon(session)
        if session.island is not None:
            for gathered in [one for one in self._pieces.values() if one.island is session.island]:
                gathered.writing.discard(session)
                self._drop_pieces(gathered)

    def _counts_at_once(self, block: Block, bucket: int, *, present: bool) -> None:
        """A slot of a block is filled: it counts, unless the whole block is looked at first."""
        if not self._verification.active and self._store.count(block, bucket, present=present):
            self._context.wake()

    def done(self, session: Session, done: Done, *, owed: bool, member_s: float) -> FinishedBlock | None:
        """A lease is done. The block that it has finished.

        ``owed``: the lease was taken from the worker, and this is the first that it says of it. ``member_s``: since it
        joined. Raises RemoteError where the worker says done without having sent a bucket.
        """
        grant = self._ledger.held_by(session.worker_id, done.lease)
        result_s = self._line_s(session)
        if grant is None:
            past = self._ledger.past(session.worker_id, done.lease)
            if owed and past is not None and len(done.losses) == past.block.num_leaves:
                now = self._context.run.clock()
                self._scheduler.observe_late(past, min(done.compute_s, now - past.granted_at), now, result_s=result_s)
            if self._ledger.is_duplicate(done.lease):
                self._refuse(session, done, VerdictCode.DUPLICATE, "its block had been finished")
            else:
                self._refuse(session, done, VerdictCode.STALE, "the lease had ended")
            return None
        self._current(grant)
        self._verdicts.confirmed(session.worker_id, grant.step)
        block = grant.block
        elapsed_s = self._context.run.clock() - self._ledger.began_at(grant)
        done = self._claims.check(session.principal, done, block.num_leaves, elapsed_s=elapsed_s, member_s=member_s)
        of = self._slots_of(grant)
        self._drop_stale(of)
        if session.island is not None:  # all ranks have said that they are done
            self._drop_lease(session, grant.lease)
        lacking = set(self._store.missing(of)) - set(done.absent)
        writing = self._store.is_receiving(of)  # not for this session: it says DONE
        if lacking or writing:
            if not (writing or self._ledger.contested(done.lease)):
                raise RemoteError(f"it reported lease {done.lease} done without bucket {min(lacking)}")
            # Another was sending that bucket when this one's came. Should it not get through, the block is done again.
            self._ledger.give_back(done.lease)
            self._refuse(session, done, VerdictCode.DUPLICATE, "another worker is sending the same")
            return None
        for bucket in self._store.fill_with_nothing(of):
            if isinstance(of, Block):
                self._counts_at_once(of, bucket, present=False)
        self._scheduler.observe(grant, done.compute_s, self._context.run.clock(), result_s=result_s)
        if self._ledger.is_audit(done.lease):
            self._ledger.finish(done.lease)
            self.leaves_audited += block.num_leaves
            self._verification.seconded(done)
            self._context.wake()
            return None
        overtaken = self._ledger.finish(done.lease)
        self._verdicts.finished(done.lease, session.worker_id)
        self._phase.note_splits(session, done)
        self._context.wake()
        return FinishedBlock(session, grant, done, self._store.close(block), overtaken)

    def _line_s(self, session: Session) -> float | None:
        """Seconds that a whole result is on this worker's line, by what has come of its last one; None where that was
        less than half."""
        nbytes, seconds = session.results_since()
        self._result_bytes = max(self._result_bytes, min(nbytes, self._layout.vector_bytes))
        return seconds * self._result_bytes / nbytes if 0 < self._result_bytes <= 2 * nbytes else None

    def count(self, finished: FinishedBlock) -> None:
        """A finished block counts from now on."""
        grant, step, block = finished.grant, self._aggregator.step, finished.grant.block
        assert step is not None
        if self._verification.active:
            for bucket in range(len(self._layout.result_buckets)):
                self._store.count(block, bucket, present=bucket in finished.suppliers)
        self._loader.finished(grant.step, block)
        step.note(block, finished.done)
        self._phase.used(leaves=block.num_leaves)

    def discard(self, finished: FinishedBlock, reason: str) -> None:
        """A finished block did not hold: it is leased again."""
        self._store.discard(finished.grant.block)  # before its workers hear of it, and write again where it lies
        self._ledger.reopen(finished.grant.step, finished.grant.block, finished.grant.worker)
        self._phase.refuse(VerdictCode.REJECTED, len(finished.done.losses))
        for bucket, (_, lease) in finished.suppliers.items():
            self._verdicts.dropped(lease, bucket)
        self._verdicts.decided(finished.done.lease, VerdictCode.REJECTED, reason)

    def invalidate(self, worker: str) -> None:
        """What this worker has sent of blocks that are not finished is computed by others, unless it counts already: it
        may have been added to others' results."""
        step = self._aggregator.step
        if step is None:
            return
        for block, theirs in self._store.supplied_by(worker).items():
            self._empty(step.plan.step, block, theirs)

    def _empty(self, step: int, block: Block, buckets: Sequence[int]) -> None:
        """What has been sent of a block that is not finished is computed again."""
        suppliers = self._store.suppliers(block)
        self._store.empty(block, buckets)
        self._ledger.emptied(step, block.start)
        for bucket in buckets:
            self._verdicts.dropped(suppliers[bucket].lease, bucket)

    def _refuse(self, session: Session, done: Done, code: VerdictCode, reason: str) -> None:
        if not done.losses:
            return  # a lease that was revoked before it was begun: nothing was computed, nothing is to be said of it
        past = self._ledger.past(session.worker_id, done.lease)
        if past is not None:  # else nobody knows that there was such a lease
            self._phase.refuse(code, min(len(done.losses), past.block.num_leaves))
        self._verdicts.answered(done.lease, session.worker_id, code, reason)

    def _current(self, grant: BlockGrant) -> StepState:
        """The step of an open lease, which a worker can compute only when its version was published.

        Results have a place from before a version is published until its step is closed, and no lease outlives its
        step: so one that is open and has no place is of a version that the worker was not told of. Raises RemoteError.
        """
        step = self._aggregator.step
        if step is None or grant.step != step.plan.step:
            raise RemoteError(f"it answered for version {grant.step} before that version was published")
        return step

    def failed(self, session: Session, failed: Failed) -> None:
        """The job raised on a leaf of a lease."""
        grant = self._ledger.held_by(session.worker_id, failed.lease)
        if grant is None:
            self._verdicts.answered(failed.lease, session.worker_id, VerdictCode.STALE, "the lease had ended")
            return
        self._current(grant)
        self._verdicts.confirmed(session.worker_id, grant.step)
        if session.island is not None and not self._drop_lease(session, failed.lease):
            session.abort("a rank failed on a leaf in the middle of another's result")
        leaf = min(max(failed.leaf, grant.block.start), grant.block.stop - 1)
        sent = [b for b, by in self._store.suppliers(grant.block).items() if by.lease == failed.lease]
        failed_work = self._ledger.fail(failed.lease, leaf)
        self._verdicts.answered(failed.lease, session.worker_id, VerdictCode.STALE, "it failed")
        if sent and self._verification.active:  # they may be wrong, or not what the leaf gives the next time
            self._empty(grant.step, grant.block, sent)
        if failed_work is None:
            self._phase.note_failure(f"{session.name} failed on step {grant.step}, leaf {leaf}", failed)
            return
        traceback = shortened(failed.traceback)
        if self._context.recomputation is None:
            self.blame(failed_work, traceback)
            return
        taken = self._ledger.take_over(failed_work.step, failed_work.leaf, now=self._context.run.clock())
        if taken is not None:
            self._doubts.append(_Doubt(failed_work, failed.error, traceback, taken))
            self._context.wake()

    def take_over(self, step: int, leaf: int) -> None:
        """No worker can compute a leaf of an open step, which is computed here once its version is there."""
        taken = self._ledger.take_over(step, leaf, now=self._context.run.clock())
        if taken is not None:
            work = FailedWork(step, leaf, 1, died=False)
            self._doubts.append(_Doubt(work, "", "no worker could be given it, and nor could it be done here", taken))
            self._context.wake()

    async def settle(self) -> bool:
        """Compute here what too many workers have failed on (whose word is that?), and what none can compute. False
        when there was nothing.

        What the coordinator can compute counts, and the run goes on; what it fails on as well ends the run.
        """
        step, recomputation, clock = self._aggregator.step, self._context.recomputation, self._context.run.clock
        if step is None or recomputation is None:
            return False
        doubt = next((one for one in self._doubts if one.grant.step == step.plan.step), None)
        if doubt is None:
            return False
        self._doubts.remove(doubt)
        failed_work, error, traceback, grant = doubt
        began = clock()
        reference = await recomputation.recompute(step.plan, grant.block)
        if reference is None and recomputation.given_up:  # which says nothing of the leaf
            self._ledger.give_back(grant.lease)
            return True
        if reference is None:  # what was raised here says more: a device tells late, and not what was wrong
            self.blame(failed_work, recomputation.raised or traceback)
            return True
        if error:
            failed = f"leaf {failed_work.leaf} failed {failed_work.attempts} time(s) on workers and not here"
            self._phase.warn(
                f"step {grant.step}, {failed}: what the coordinator computed counts; the last of them said: "
                f"{''.join(error.splitlines()[:1])[:300]}"
            )
        if mixed := self._context.run.numerics.note(EXACT, decides=False):
            self._phase.warn(mixed)
        await self._count_own(step, grant, reference)
        samples = step.plan.samples_in(*grant.block)
        self._context.run.history.contributions.add_own(grant.block.num_leaves, samples, clock() - began)
        return True

    async def _count_own(self, step: StepState, grant: BlockGrant, reference: ReferenceResult) -> None:
        """What the coordinator computed itself counts."""
        block, store = grant.block, self._store
        vector, everything = store.vector(block), range(len(self._layout.result_buckets))
        # Where blocks are verified nothing of this one has been added yet: what workers have sent of it is not needed.
        missing = everything if self._verification.active else store.missing(block)

        def copy() -> None:
            for bucket in missing:
                vector.buckets[bucket].copy_(reference.vector.buckets[bucket])

        await self._aggregator.submit(copy)
        suppliers = store.close(block)
        if missing is everything:
            store.discard(block)
        for bucket, (_, lease) in suppliers.items():
            if bucket in missing:  # what is here in its place counts
                self._verdicts.dropped(lease, bucket)
        for bucket in missing:
            store.count(block, bucket, present=bucket in reference.present)
        names, metrics = reference.metric_names, reference.metrics
        self._finish_own(
            step, grant, Done(grant.lease, reference.losses, names, metrics, reference.untouched, (), 0, 0.0, 0.0)
        )

    def count_whole(self, computed: ComputedBlock, seconds: float) -> None:
        """The coordinator has computed the whole current step, which nobody has begun, in so many seconds. It is read
        where it lies until the step is committed."""
        state, run = self._aggregator.step, self._context.run
        assert state is not None
        leaves = state.plan.num_leaves
        block = Block(0, leaves)
        most = 1 << (leaves - 1).bit_length()
        grant = self._ledger.grant(COORDINATOR, state.plan.step, most, now=run.clock(), deadline_s=math.inf)
        assert grant is not None
        assert grant.block == block
        result, supplier = computed.vectors[-1], Supplier(COORDINATOR, grant.lease)
        for bucket in range(len(self._layout.result_buckets)):
            if present := bucket not in computed.absent:
                self._store.lay(SlotKey(block, bucket), result.buckets[bucket], supplier)
            self._store.count(block, bucket, present=present)
        self._store.close(block)
        self._finish_own(state, grant, computed)
        run.history.contributions.short_steps += 1
        run.history.contributions.add_own(leaves, state.plan.num_samples, seconds)

    def cleared(self, block: Block, absent: Sequence[int]) -> list[int] | None:
        """Buckets of a block, other than ``absent`` ones, whose slots are empty, and nobody receives into them
        any more. None where somebody's bytes are on their way into one and that cannot be changed."""
        self._drop_stale(block)
        buckets = [bucket for bucket in range(len(self._layout.result_buckets)) if bucket not in absent]
        keys = [key for key in (SlotKey(block, bucket) for bucket in buckets) if not self._store.is_filled(key)]
        return [key.bucket for key in keys] if all([self._clear(key) for key in keys]) else None

    def count_leased(
        self, session: Session, grant: BlockGrant, computed: ComputedBlock, buckets: Sequence[int], seconds: float, *,
        copy: bool,
    ) -> BlockGrant | None:  # fmt: skip
        """The coordinator has computed a lease of the current step in its worker's place, in so many seconds.

        ``buckets``: what ``cleared`` said of it; the others have come from a backup, with the same bits. ``copy``: else
        they are read where they lie until the step is committed. Returns the other lease on the block, which is stale
        from now on, where there was one.
        """
        state, block, store = self._aggregator.step, grant.block, self._store
        assert state is not None
        vector, supplier = computed.vectors[-1], Supplier(session.worker_id, grant.lease)
        for bucket in buckets:
            if copy:
                store.vector(block).buckets[bucket].copy_(vector.buckets[bucket])
                store.put(SlotKey(block, bucket), supplier)
            else:
                store.lay(SlotKey(block, bucket), vector.buckets[bucket], supplier)
        absent = store.fill_with_nothing(block)
        own = range(len(self._layout.result_buckets)) if self._verification.active else [*buckets, *absent]
        present = store.close(block)
        for bucket in own:
            store.count(block, bucket, present=bucket in present)
        self._scheduler.observe(grant, computed.compute_s, self._context.run.clock())
        overtaken = self._finish_own(state, grant, computed)
        samples = state.plan.samples_in(*block)
        self._context.run.history.contributions.add_own(block.num_leaves, samples, seconds)
        return overtaken

    def _finish_own(self, step: StepState, grant: BlockGrant, done: Done | ComputedBlock) -> BlockGrant | None:
        overtaken = self._ledger.finish(grant.lease)
        self._loader.finished(grant.step, grant.block)
        step.note(grant.block, done)
        self._phase.used(leaves=grant.block.num_leaves)
        return overtaken

    def blame(self, failed_work: FailedWork, traceback: str) -> None:
        """End the run over a leaf."""
        plan = self._context.steps.plan(failed_work.step)
        self._phase.blame(failed_work, plan, failed_work.leaf, traceback)


@torch.no_grad()
def _copy(target: Tensor, received: Tensor) -> None:
    target.copy_(received)
