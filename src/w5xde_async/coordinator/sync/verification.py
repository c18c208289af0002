"""Whether a finished block counts: measures it, has others compute it again, and says what is decided.

Every finished block passes here before anything of it is added. ``plan.verification`` decides, from numbers; here they
are measured, and held blocks wait for the second computation. What is decided of a block comes out as a ``Ruling``,
which the training performs.

Big blocks are weighed and compared in the aggregator's thread, from the task that drives it (``next_ruling``);
everything else runs on the event loop's thread.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde_async.compute.engine import device_name
from w5xde_async.coordinator.sync.context import SyncContext
from w5xde_async.coordinator.sync.deviation import LOSS, compare, name_of_metric, numbers_apart, weighed, with_words
from w5xde_async.coordinator.sync.recomputation import ReferenceResult
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import AuditKey, Supplier
from w5xde_async.plan.audit import Auditor, Choice, Deviation, HeldBlock, Why
from w5xde_async.plan.ledger import BlockGrant
from w5xde_async.plan.membership import Departed, Standing
from w5xde_async.plan.numerics import EXACT
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.tree import Block
from w5xde_async.plan.verification import (
    LEFT_OUT,
    Audit,
    Count,
    Decision,
    Discard,
    Measured,
    Origin,
    Recompute,
    Size,
    is_far_larger,
    is_next_to_nothing,
    when_compared,
    when_disputed,
    when_finished,
    when_impossible,
    when_nobody_else_can,
    when_not_recomputed,
    when_only_sizes_compare,
    when_recomputed,
)
from w5xde_async.telemetry.events import Audited, ResultHeld
from w5xde_async.updates.norm_gate import BlockGate
from w5xde_async.wire.messages import Done, VerdictCode

#: Blocks of at most this much are weighed and compared on the loop: that takes about as long as the way to a thread.
INLINE_WEIGH_BYTES = 4 << 20
_PATIENCE_S = 5.0  # that long an audit waits for a worker that has finished a lease
_CARRIED = 0.98  # of what a codec has left out, from one result that is looked at to the next
_ODD_PATIENCE_S = 10.0  # that long a block that is odd waits for workers that may soon take work
_MOST_TOLD = 16  # workers of which is said how they differ
_MANY_UNUSUAL, _UNUSUAL_SHARE = 16, 0.1  # results that are told of; of all
_REMEMBERED = 4096  # workers that have left: where they ran
_UNKNOWN = Origin("", -1, drew=True)  # like nothing


class Machine(NamedTuple):
    """What a worker says of itself. Equal ones are expected to compute the same bits. ``device``: its type."""

    device: str
    device_name: str
    threads: int
    torch_version: str
    numerics: str = EXACT

    @property
    def kind(self) -> str:
        """Devices of one kind draw the same random numbers from a seed; CPUs of one architecture do."""
        model = " ".join(self.device_name.split()[:2]) if self.device == "cpu" else self.device_name
        return f"{model}, torch {self.torch_version.partition('+')[0]}"


class Numerics(NamedTuple):
    """How results are computed and written. ``exact``: two honest results of a block are alike, in no lossy codec.
    ``microbatch``: the job's samples of one, which a worker that lacks memory halves."""

    precision: str
    exact: bool
    microbatch: int


@dataclass(eq=False, slots=True)
class FinishedBlock:
    """A finished block that does not count yet.

    ``suppliers`` by bucket; what is absent has none. ``overtaken``: the other lease on the block, which ended with it.
    """

    session: Session
    grant: BlockGrant
    done: Done
    suppliers: Mapping[int, Supplier]
    overtaken: BlockGrant | None = None
    held: HeldBlock | None = None
    norms: dict[int, float] = field(default_factory=dict)  # by bucket; of buffers, of what is finite in it
    not_finite: dict[int, bool] = field(default_factory=dict)  # buckets that are so, and whether that is unusual
    samples: int = 0
    other: Done | None = None  # the second computation is in
    held_at: float = 0.0
    origin: Origin = _UNKNOWN  # of one that is held

    @property
    def workers(self) -> dict[int, str]:
        """Who sent each bucket."""
        return {bucket: supplier.worker for bucket, supplier in self.suppliers.items()}

    @property
    def hands(self) -> set[str]:
        """All who had a hand in it."""
        return {self.grant.worker, *self.workers.values()}

    def is_vouched_for(self, what: Deviation) -> bool:
        """Whether it is known how what differs most was computed: said, or sent, under the lease that is done."""
        return bool(what.words) or self.is_said(what.bucket)

    def is_said(self, bucket: int) -> bool:
        """Whether who is done with the lease has sent this bucket, or says that there is none."""
        supplier = self.suppliers.get(bucket)
        return supplier is None or supplier.lease == self.grant.lease


@dataclass(slots=True)
class _Seen:
    """A worker: the name that it proved, where it runs, its machine. And what does not end with its link: by role how
    large a gradient was, of late, of which its codec may have left much for later results; its results in a row that
    were larger than can be, and those that were next to nothing, of those looked at."""

    identity: str
    place: Hashable
    machine: Machine
    carries: dict[str, float] = field(default_factory=dict)
    strikes: int = 0
    vanished: int = 0


class Ruling(NamedTuple):
    """What is decided of a finished block, to be done in this order. One that is held is ruled on again later.

    ``void``: the open lease of its audit, which has ended, and whose worker has not been told.
    """

    block: FinishedBlock
    decisions: tuple[Decision, ...]
    void: BlockGrant | None = None


class Verification:
    """Of one run's blocks. ``active`` is False where every check is switched off."""

    def __init__(self, context: SyncContext, *, auditor: Auditor, numerics: Numerics, pacing: Pacing) -> None:
        """Without a recomputation in ``context``, who is wrong cannot be told: the block is done again."""
        gate = context.run.checks.gate
        self.active = gate is not None or auditor.config.fraction > 0
        self._layout, self._ledger, self._store = context.run.layout, context.ledger, context.store
        self._context, self._auditor, self._recomputation = context, auditor, context.recomputation
        self._precision, self._exact, self._microbatch = numerics
        self._pacing = pacing
        self._machines: dict[str, Machine] = {}  # of every member
        self._seen: dict[str, _Seen] = {}  # also of workers that have left: what they sent may be judged later
        self._departed = Departed(_REMEMBERED)  # of these, who have left
        host = torch.device("cpu")
        self._own_kind = Machine("cpu", device_name(host), 0, torch.__version__).kind
        self._draws = False  # random numbers are in this run's blocks, by more than one word
        self._disputes: dict[str, set[str]] = {}  # member -> members of its kind that computed something else
        # Worker -> results larger than usual that counted, and all that did since the first of them.
        self._unusual: dict[str, list[int]] = {}
        roles = {group.role for group in self._layout.groups} & {"grad", "mean"}
        self._gates = {} if gate is None else {role: BlockGate(gate) for role in sorted(roles)}
        self._roles = {bucket.index: self._layout.groups[bucket.group].role for bucket in self._layout.result_buckets}
        self._floats = {number for number, role in self._roles.items() if role != "max"}
        self._unweighed: list[FinishedBlock] = []
        # Bucket -> elements of buffers that were not finite in blocks which were looked at for it, and counted.
        self._not_finite: dict[int, Tensor] = {}
        self._early: dict[Block, dict[int, float]] = {}  # norms of what fills slots of the step under way
        self._early_step = -1
        self._waiting: list[FinishedBlock] = []  # for the very first norm to be confirmed
        self._held: list[FinishedBlock] = []  # for the second computation
        self._given_up: list[FinishedBlock] = []  # nobody is there who could compute it again
        self._done_again: set[tuple[int, int]] = set()  # (step, first leaf) of which nobody could say what was wrong
        self._left_out = -1  # the step of a gradient that is not finite, and counts
        self._warned = False
        self._differing: set[str] = set()  # workers of which it was told; "": of two, either
        self._misreporting: set[str] = set()  # workers of which it was told that they report other numbers
        self._lacking: set[str] = set()  # workers that do not report all that the coordinator would
        self._incomparable: set[str] = set()  # numbers that the coordinator has otherwise than two workers

    @property
    def holding(self) -> bool:
        """True while a finished block does not count yet."""
        return bool(self._held or self._unweighed or self._waiting or self._given_up)

    @property
    def num_held(self) -> int:
        """Finished blocks that do not count yet: each keeps its vector."""
        return len(self._held) + len(self._unweighed) + len(self._waiting) + len(self._given_up)

    @property
    def _first_is_held(self) -> bool:
        return any(c.held is not None and c.held.why is Why.FIRST for c in (*self._held, *self._given_up))

    # -- a block is finished -------------------------------------------------------------------------------

    def filled(self, step: int, block: Block, bucket: int, *, laid: bool) -> None:
        """A slot of a block is filled, perhaps again. Of a large one it is weighed while the others are on their way.

        In the parameters' thread, which does one thing after the other: whoever weighs the block finds it done.
        ``laid``: where a worker has written it, and nobody but that one could write there.
        """
        if not self.active or bucket not in self._floats or self._layout.vector_bytes <= INLINE_WEIGH_BYTES:
            return
        if step != self._early_step:
            self._early, self._early_step = {}, step
        norms, piece = self._early.setdefault(block, {}), self._store.piece(block, bucket)
        self._context.aggregator.weigh(norms, bucket, piece, is_sum=laid and block == self._store.leaves)

    def finished(self, block: FinishedBlock) -> Ruling | None:
        """A block is finished. None where it is too large to be looked at here: ``next_ruling`` does."""
        if not self.active:
            return Ruling(block, (Count("nothing is checked"),))
        if self._layout.vector_bytes > INLINE_WEIGH_BYTES:
            self._unweighed.append(block)
            return None
        self._look_at(block, self._store.norms(block.grant.block, block.suppliers))
        return self._weighed(block)

    def _look_at(self, block: FinishedBlock, norms: dict[int, float]) -> None:
        """Its ``norms`` are known, as those of any numbers. One that is not finite is looked into; of a gradient it is
        unusual whatever is found there now, since a quotient may have been made of what was there."""
        block.norms, block.not_finite = norms, {}
        for bucket, norm in norms.items():
            if math.isfinite(norm):
                continue
            role = self._roles[bucket]
            norms[bucket], odd = weighed(self._store.piece(block.grant.block, bucket), role)
            if role == "grad":
                block.not_finite[bucket] = True
            elif odd is not None:
                usual = self._not_finite.get(bucket)
                block.not_finite[bucket] = usual is None or bool((odd & ~usual).any())

    def _weighed(self, block: FinishedBlock) -> Ruling:
        """Its norms are known: it counts at once, or is held."""
        grant, step = block.grant, self._context.aggregator.step
        assert step is not None
        (start, stop), plan = grant.block, step.plan
        block.samples = plan.samples_in(start, stop)
        finite = all(map(math.isfinite, block.done.losses)) and not any(block.not_finite.values())
        measured = Measured(finite, self._sizes(block))
        done_again = (grant.step, start) in self._done_again
        sampled = not done_again and self._auditor.draw(grant.step, grant.block, plan.num_leaves, *block.hands)
        left_out = grant.step == self._left_out and self._overflows(block)
        decision = when_finished(
            measured, exact=self._exact, done_again=done_again, others=self._has_others(block), sampled=sampled,
            comparable=sampled and self._can_be_compared(block), left_out=left_out,
        )  # fmt: skip
        if isinstance(decision, Count):
            for worker in block.hands & self._seen.keys():
                self._seen[worker].strikes = 0
            if (unusual := self._unusual.get(grant.worker)) is not None:
                unusual[1] += 1
            return self._rule(block, decision)
        # It is judged by what is read of it from here on, and so it is applied.
        self._context.aggregator.begin_anew()
        why = decision.why
        ruling = Ruling(block, (decision,))
        block.origin = self._origin(block)
        if why is Why.FIRST and self._first_is_held:
            self._waiting.append(block)
            return ruling
        block.held = HeldBlock(grant.step, grant.block, grant.worker, why, block.workers)
        block.held_at = self._context.run.clock()
        if isinstance(decision, Audit):
            self._held.append(block)
        else:
            self._give_up(block)
        if why is not Why.SAMPLED:
            self._context.run.bus.publish(
                ResultHeld(worker_id=grant.worker, name=block.session.name, step=grant.step, why=why.value)
            )
        return ruling

    def _has_others(self, block: FinishedBlock) -> bool:
        """Whether others than who has finished it are here, or had a hand in it. Those may be gone."""
        return bool({*self._machines, *block.hands} - {block.grant.worker})

    def _can_be_compared(self, block: FinishedBlock) -> bool:
        """Whether anybody could compute it, so that honest results are alike."""
        if not self._of_like_numerics(block):
            return False
        if not (self._draws and block.done.drew):
            return True
        kind = self._origin(block).kind
        others = {self._machines[other].kind for other in self._of_like_numerics(block)}
        return kind in others or (kind == self._own_kind and self._recomputation is not None)

    def _of_like_numerics(self, block: FinishedBlock) -> set[str]:
        """Other members that make their sums as the block's were made."""
        numerics = self._origin(block).numerics
        return {
            other for other, machine in self._machines.items()
            if other != block.grant.worker and machine.numerics == numerics
        }  # fmt: skip

    def _expected(self, block: FinishedBlock) -> set[str]:
        """Other members that make their sums as the block's were made, and may soon take work. Where the coordinator
        can judge by itself, no worker that owes an answer for a lease that was taken from it is waited for: one that
        hangs would hold up every odd block."""
        others, members = self._of_like_numerics(block), self._context.phase.roster.membership.members
        if self._recomputation is None:
            return others
        return {other for other in others if other in members and members[other].standing is not Standing.LATE}

    def _origin(self, block: FinishedBlock) -> Origin:
        """How a block was computed, by all who had a hand in it, and by the words of who has finished it. Of another's
        part it is not known how often it was halved: it is judged as if that were as often (``_may_be_honest``), since
        what its worker said of earlier blocks is to hide nothing of this one."""
        kinds, numerics = ({of(worker) for worker in block.hands} for of in (self._kind, self._numerics))
        return Origin(
            kinds.pop() if len(kinds) == 1 else "", block.done.splits, block.done.drew,
            numerics.pop() if len(numerics) == 1 else "",
        )  # fmt: skip

    def numerics_of(self, block: FinishedBlock) -> set[str]:
        """How the sums of all who had a hand in it are made, as far as they are remembered."""
        return {self._numerics(worker) for worker in block.hands} - {""}

    def _numerics(self, worker: str) -> str:
        seen = self._seen.get(worker)
        return "" if seen is None else seen.machine.numerics

    def _kind(self, worker: str) -> str:
        seen = self._seen.get(worker)
        return "" if seen is None else seen.machine.kind

    def of_name(self, worker: str) -> tuple[str, list[str]]:
        """The name that a worker has proved, if any, and all workers of that name, those among them that have left not
        long ago."""
        name = self._identity(worker)
        others = [one for one, seen in self._seen.items() if one != worker and name and seen.identity == name]
        return name, [worker, *others]

    def _identity(self, worker: str) -> str:
        """The name that it has proved, if any."""
        seen = self._seen.get(worker)
        return "" if seen is None else seen.identity

    def _sizes(self, block: FinishedBlock) -> dict[str, Size]:
        """A block's norm by role, as of a mean over its samples, beside what is usual now."""
        norms = self._mean_norms(block.norms, block.samples)
        gates = self._gates
        return {
            role: Size(norm, None if gates[role].cold else gates[role].bound(block.samples))
            for role, norm in norms.items()
        }

    def _mean_norms(self, norms: Mapping[int, float], samples: int) -> dict[str, float]:
        squares: dict[str, float] = {}
        scale = 1.0 / (samples * self._context.aggregator.rule.loss_scale)
        for bucket, norm in norms.items():
            role = self._roles[bucket]
            if role in self._gates:
                squares[role] = squares.get(role, 0.0) + (norm * scale) ** 2
        return {role: math.sqrt(square) for role, square in squares.items()}

    def _give_up(self, block: FinishedBlock) -> None:
        """No other worker computes it."""
        self._given_up.append(block)
        self._context.wake()

    # -- the second computation ----------------------------------------------------------------------------

    def leases(self, ready: Collection[str]) -> list[BlockGrant]:
        """Audits to lease now. ``ready``: workers that take work."""
        granted = []
        now, most = self._context.run.clock(), self._auditor.config.most_open
        waiting = [block for block in self._held if block.other is None and self._may_lease(block)]
        at_once = sum(block.held is not None and block.held.lease is not None for block in self._held)
        for block in waiting:
            if at_once + self._store.num_released >= most:
                break
            held = block.held
            assert held is not None
            like = [worker for worker in ready if self._numerics(worker) == block.origin.numerics]
            able = [worker for worker in like if worker == held.worker or self._has_delivered(worker)]
            if all(worker == held.worker for worker in able):
                patient = now - block.held_at < self._patience_s(held)
                if patient and len(like) > 1 and self._others_may_deliver(held, like):
                    continue
                if held.why is Why.SAMPLED and len(like) > 1:  # nothing is odd about it: no step waits for a stranger
                    self._held.remove(block)
                    self._give_up(block)
                    continue
                able = like
            involved = block.hands
            choices = [
                Choice(
                    worker,
                    self._alike(worker, held.worker),
                    self._ledger.num_held(worker),
                    self._apart(worker, held),
                    same_numbers=not (self._draws and block.done.drew) or self._kind(worker) == block.origin.kind,
                )
                for worker in able
                if not self._of_one(worker, involved)
            ]
            worker = self._auditor.choose(held, choices)
            if worker is None:
                # What is odd waits a while for workers that are here but take no work just now: one may hang for good.
                waits = held.why in (Why.NORM, Why.NOT_FINITE) and now - block.held_at < _ODD_PATIENCE_S
                here = self._expected(block) if waits else able
                there = [one for one in here if not self._of_one(one, involved)]
                if set(there) <= held.asked | involved:
                    self._held.remove(block)
                    self._give_up(block)
                continue
            # The step waits for it, and nobody backs it up: it has as long as another lease until it is backed up.
            deadline_s = self._pacing.deadline_s(worker, held.block.num_leaves)
            late_s = self._pacing.late_s(worker, held.block.num_leaves)
            if late_s is not None:
                deadline_s = min(deadline_s, max(late_s, self._pacing.config.min_deadline_s))
            grant = self._ledger.audit(held.step, held.block, worker, now=now, deadline_s=deadline_s)
            held.lease, held.second = grant.lease, worker
            at_once += 1
            granted.append(grant)
        return granted

    def _has_delivered(self, worker: str) -> bool:
        """Whether a worker has finished a lease: one that never has may hang, and would hold up the step."""
        return self._pacing.leaf_s(worker) is not None

    def _patience_s(self, held: HeldBlock) -> float:
        """How long an audit waits for a worker that has finished a lease. One that was drawn by chance, as long as it
        takes until leases are late: what hangs, and has never delivered, is not to hold up the run again and again."""
        late_s = self._pacing.late_s(held.worker, held.block.num_leaves) if held.why is Why.SAMPLED else None
        return _PATIENCE_S if late_s is None else min(late_s, _PATIENCE_S)

    def _others_may_deliver(self, held: HeldBlock, ready: Collection[str]) -> bool:
        """Whether waiting can bring another worker that has delivered: one that is at this step, or has work there."""
        return bool(self._ledger.free_leaves(held.step)) or any(
            grant.step == held.step for worker in ready if worker != held.worker for grant in self._ledger.held(worker)
        )

    def _may_lease(self, block: FinishedBlock) -> bool:
        """Whether it has no audit: none yet, or its lease ended without a result and its memory is free again."""
        held = block.held
        assert held is not None
        if held.lease is None:
            return True
        audit = AuditKey(held.lease)
        if self._ledger.get(held.lease) is not None or self._store.is_receiving(audit):
            return False
        self._store.release(audit)
        held.asked.add(held.second)
        held.lease = None
        return True

    def _apart(self, worker: str, held: HeldBlock) -> bool:
        one, other = self._seen.get(worker), self._seen.get(held.worker)
        return one is None or other is None or (one.identity, one.place) != (other.identity, other.place)

    def _alike(self, worker: str, other: str) -> bool:
        mine, theirs = self._seen.get(worker), self._seen.get(other)
        return mine is not None and theirs is not None and mine.machine == theirs.machine

    def seconded(self, done: Done) -> None:
        """An audit is done; ``next_ruling`` compares."""
        for block in self._held:
            if block.held is not None and block.held.lease == done.lease:
                block.other = done

    def joined(self, worker: str, machine: Machine, identity: str, place: Hashable) -> None:
        """``worker`` is a member: on what machine, by what proven name ("" for the run's secret), and where."""
        self._machines[worker] = machine
        self._departed.returned(worker)
        before = self._seen.get(worker)
        kept = {} if before is None else {name: getattr(before, name) for name in ("carries", "strikes", "vanished")}
        self._seen[worker] = _Seen(identity, place, machine, **kept)

    def _of_one(self, worker: str, others: Iterable[str]) -> bool:
        """Whether it and one of these are workers of one proven name: nobody audits himself."""
        identities = [seen.identity for one in others if (seen := self._seen.get(one)) is not None]
        return (mine := self._seen.get(worker)) is not None and bool(mine.identity) and mine.identity in identities

    def left(self, worker: str) -> None:
        """The worker is gone; blocks that it has finished stay."""
        self._machines.pop(worker, None)
        self._forget(worker)
        self._disputes.pop(worker, None)
        for others in self._disputes.values():
            others.discard(worker)
        if worker in self._seen and (forgotten := self._departed.left(worker)) is not None:
            del self._seen[forgotten]
            self._forget(forgotten)

    def _forget(self, worker: str) -> None:
        """What was found of the results of a worker, those among them that were judged after it had left."""
        self._lacking.discard(worker)
        self._unusual.pop(worker, None)
        self._auditor.forget(worker)

    def invalidate(self, worker: str) -> list[Ruling]:
        """Held blocks that this worker had a hand in are done again; what it computed of others' counts for nothing."""
        rulings = []
        for block in (*self._held, *self._unweighed, *self._waiting, *self._given_up):
            if worker in block.hands:
                rulings.append(self._rule(block, Discard("it was quarantined")))
            elif block.held is not None and block.held.second == worker:
                rulings.append(Ruling(block, (), self._end_audit(block)))
                block.other = None
        return rulings

    # -- rulings, in the task that drives the aggregator ---------------------------------------------------

    async def next_ruling(self) -> Ruling | None:
        """Settle the next held block that can be settled. None when there is none."""
        ruling: Ruling | None = None
        while ruling is None:
            if self._unweighed:
                ruling = await self._weigh(self._unweighed[0])
            elif self._waiting and not self._first_is_held:
                block = self._waiting.pop(0)
                ruling = self._weighed(block)
            elif (left_out := self._held_in_vain()) is not None:
                ruling = self._rule(left_out, Count(LEFT_OUT))
            elif self._given_up:
                ruling = await self._without_another(self._given_up[0])
            elif (seconded := next((c for c in self._held if c.other is not None), None)) is not None:
                ruling = await self._compare(seconded)
            else:
                return None
        return ruling

    def counted(self, block: FinishedBlock) -> None:
        """A finished block counts."""
        if self._overflows(block):
            self._left_out = block.grant.step

    def _overflows(self, block: FinishedBlock) -> bool:
        """Whether a gradient of it is not finite, so that nothing of a step is applied in which it counts."""
        return any(self._roles[bucket] == "grad" for bucket in block.not_finite)

    def _held_in_vain(self) -> FinishedBlock | None:
        """A held block that need not be looked at, since its step is left out."""
        for block in (*self._held, *self._given_up):
            if block.grant.step == self._left_out and self._overflows(block):
                return block
        return None

    async def _weigh(self, block: FinishedBlock) -> Ruling | None:
        early = self._early.pop(block.grant.block, {})

        def weigh() -> None:
            missing = [bucket for bucket in block.suppliers if bucket not in early]
            pieces = {bucket: self._store.piece(block.grant.block, bucket) for bucket in missing}
            norms = {**early, **self._context.aggregator.expected_norms(pieces)}
            norms |= self._store.norms(block.grant.block, [bucket for bucket in missing if bucket not in norms])
            self._look_at(block, {bucket: norms[bucket] for bucket in block.suppliers if bucket in norms})

        await self._context.aggregator.submit(weigh)
        if block not in self._unweighed:
            return None  # a worker that had a hand in it was quarantined meanwhile
        self._unweighed.remove(block)
        return self._weighed(block)

    def _is_held(self, block: FinishedBlock, other: Done | None) -> bool:
        """To be asked after each wait: whether a block is still to be ruled on, beside this second computation. If not,
        a worker that had a hand in one of them was quarantined meanwhile, or broke the protocol; what was read of their
        memory may be anything, since it may have been given to others."""
        return (block in self._held or block in self._given_up) and block.other is other

    async def _without_another(self, block: FinishedBlock) -> Ruling | None:
        held = block.held
        assert held is not None
        decision: Count | Recompute = Recompute(held.why, held.why.value)
        if self._exact:
            others = self._has_others(block) or bool(held.asked - {held.worker})
            decision = when_nobody_else_can(held.why, others=others, can_recompute=self._recomputation is not None)
        if isinstance(decision, Count):
            return self._rule(block, decision)
        return await self._recompute(block, None)

    async def _compare(self, block: FinishedBlock) -> Ruling | None:
        held, other = block.held, block.other
        assert held is not None
        assert held.lease is not None
        assert other is not None
        mine, theirs = self._store.pieces(held.block), self._store.pieces(AuditKey(held.lease))
        equal = all(self._alike(worker, held.second) for worker in block.hands)
        may_overflow = self._precision == "fp16" and not equal and held.why is Why.NOT_FINITE
        between = await self._run(lambda: self._deviation(block, mine, theirs, other, may_overflow=may_overflow))
        if not self._is_held(block, other):
            return None
        first, second = block.origin, self._of_second(held, other, drew=other.drew)
        both_drew = first.drew and second.drew
        self._draws |= both_drew and self._apart(held.second, held)
        like_pieces = first.splits == second.splits and all(map(block.is_said, block.suppliers))
        equal_cpus = equal and self._seen[held.second].machine.device == "cpu" and like_pieces
        tolerance = self._tolerance(equal_cpus=equal_cpus)
        agreed = between.relative <= tolerance
        alike = first.is_like(second)
        like_own = self._own(first.splits, drew=both_drew).is_like(first)
        can_judge = like_own and self._recomputation is not None
        vanishes = self._recomputation is not None and all(size.vanishes for size in self._sizes(block).values())
        decision = when_compared(
            held.why, between, agreed=agreed, alike=alike, can_judge=can_judge, vanishes=vanishes
        )  # fmt: skip
        if agreed or alike:
            self._context.run.bus.publish(
                Audited(
                    step=held.step, worker_id=held.worker, second_id=held.second, why=held.why.value, agreed=agreed,
                    same_bits=between.same_bits, relative=between.relative,
                )
            )  # fmt: skip
        elif isinstance(decision, Count):
            return self._rule(block, decision)
        if alike and not (agreed or like_own):
            return self._dispute(block, between)
        if isinstance(decision, Recompute):
            return await self._recompute(block, between)
        comparable = agreed and alike and can_judge and not may_overflow
        if comparable and not await self._compare_reports(block, other):
            return None
        if equal_cpus and not between.same_bits and not self._warned:
            self._warned = True
            self._context.phase.warn(f"equal machines computed a block with other last bits ({between})")
        self._agreed(held.worker, held.second)
        return self._rule(block, decision)

    def _agreed(self, *workers: str) -> None:
        """What these have said was compared. Of those who have left meanwhile nothing is kept."""
        self._auditor.agreed(*(worker for worker in workers if worker in self._machines))

    async def _compare_reports(self, block: FinishedBlock, other: Done) -> bool:
        """Two have the same sums. Where losses or metrics differ, the coordinator computes the block too, and who alone
        reports something else is told of. False: the block is held no longer.

        Nothing is trained on these numbers, and honest ones may differ: a time, or the memory of a device, by whoever
        computes; a share of right answers, by one answer. So nobody is put out for them. Each number that the
        coordinator, too, has otherwise is compared no more, and nor is a worker that was told of.
        """
        held, step = block.held, self._context.aggregator.step
        assert held is not None
        assert step is not None
        pair = held.worker, held.second
        if self._recomputation is None or self._misreporting & {*pair} or len(self._misreporting) >= _MOST_TOLD:
            return True
        found = numbers_apart(block.done, other, self._tolerance(equal_cpus=False))
        reports = [{LOSS, *map(name_of_metric, said.metric_names)} for said in (block.done, other)]
        lacking = [worker in self._lacking for worker in pair]
        apart = [
            name for name in found
            if name not in self._incomparable
            and not any(lacks and name not in names for lacks, names in zip(lacking, reports, strict=True))
        ]  # fmt: skip
        if not apart:
            return True
        reference = await self._recomputation.recompute(step.plan, held.block, max(block.origin.splits, 0))
        if not self._is_held(block, other):
            return False
        if reference is None or reference.splits != block.origin.splits:
            self._incomparable.update(apart)
            return True
        near = self._tolerance(equal_cpus=True)
        odd = [numbers_apart(said, reference, near) for said in (block.done, other)]
        for name in apart:
            if (name in odd[0]) == (name in odd[1]):
                self._incomparable.add(name)
                continue
            at = 0 if name in odd[0] else 1
            if name not in reports[at]:  # it had too many others before, or leaves it out: nothing false is shown
                self._lacking |= {pair[at]} & self._machines.keys()
            elif pair[at] not in self._misreporting:
                self._misreporting.add(pair[at])
                liar, honest = [self._named(pair[place]) for place in (at, 1 - at)]
                says, is_ = [_told(found[name][place]) for place in (at, 1 - at)]
                self._context.phase.warn(
                    f"worker {liar} reports another {name} than {honest} and the coordinator, for a block of step "
                    f"{held.step} ({says}, not {is_}): nothing is trained on it, so its results count, but "
                    "what the run shows of it may be wrong. Where it goes by the machine (a time, its memory, a share "
                    "of answers, of which another kind of device finds one the other way) nothing is amiss; else do "
                    "not trust that worker: to put it out, write its name, or id, into the run directory's file revoked"
                )
        return True

    def _dispute(self, block: FinishedBlock, between: Deviation) -> Ruling:
        """Two of one kind differ, and here other random numbers would be drawn."""
        held, present = block.held, self._machines
        assert held is not None
        if not block.is_vouched_for(between):  # it may have been halved otherwise: it is done again, whole
            return self._rule(block, *when_disputed(held, between, {}))
        one, other = held.said_by(between), held.second
        if one in present and other in present:
            self._disputes.setdefault(one, set()).add(other)
            self._disputes.setdefault(other, set()).add(one)
        self._do_again(held)
        of_kind = {worker for worker, machine in present.items() if machine.kind == block.origin.kind}
        votes = {}
        for worker in (one, other):
            against = self._disputes.get(worker, set()) & of_kind
            if self._identity(worker):  # who has not proved a name may have many: he has no say about who has
                names, all_names = ({*map(self._identity, those)} - {""} for those in (against, of_kind))
                votes[worker] = len(names), len(all_names)
            else:
                votes[worker] = len(against), len(of_kind)
        return self._rule(block, *when_disputed(held, between, votes))

    async def _recompute(self, block: FinishedBlock, between: Deviation | None) -> Ruling | None:
        """Compute it here. ``between``: it and what another worker computed."""
        held, step, words = block.held, self._context.aggregator.step, block.other
        assert held is not None
        assert step is not None
        splits, reference, impossible = max(block.origin.splits, 0), None, ""
        if (own_computation := self._recomputation) is not None:
            reference = await own_computation.recompute(step.plan, held.block, splits)
            if reference is None and splits and (refused := own_computation.refused):
                larger = await own_computation.recompute(step.plan, held.block)
                impossible = refused if larger is not None and larger.splits < splits else ""
        if not self._is_held(block, words):
            return None
        if impossible:
            return self._rule(block, *when_impossible(held, splits, impossible))
        if reference is None:
            self._do_again(held)
            self._context.phase.warn(
                f"a block of step {held.step} is odd ({held.why.value}) and is done again" if between is None
                else f"two computations of a block of step {held.step} differ ({between}); it is done again"
            )  # fmt: skip
            return self._rule(block, when_not_recomputed(between))
        self._draws |= reference.drew
        truth = self._own(reference.splits, drew=reference.drew)
        alike = truth.is_like(block.origin._replace(drew=True))  # whether it drew, the coordinator has seen itself
        if not self._exact or not alike:
            return await self._beside_an_unlike_one(block, reference, alike=alike)
        mine = self._store.pieces(held.block)
        own = await self._run(lambda: self._distance(mine, frozenset(block.suppliers), block.done, reference))
        second = None
        if not self._is_held(block, words):
            return None
        if words is not None and truth.is_like(self._of_second(held, words, drew=True)):
            assert held.lease is not None
            second = await self._second_distance(self._store.pieces(AuditKey(held.lease)), words, reference)
            if not self._is_held(block, words):
                return None
        proven = own.relative <= self._tolerance(equal_cpus=False) or not await self._may_be_honest(block, own, splits)
        if not self._is_held(block, words):
            return None
        decisions = when_recomputed(held, own, second, self._tolerance(equal_cpus=False), proven=proven)
        if between is not None and [*map(type, decisions)] == [Count]:
            self._tell_of_differences(held, between, own, second)
        if isinstance(decisions[0], Count):
            self._agreed(held.worker)
        return self._rule(block, *decisions)

    def _do_again(self, held: HeldBlock) -> None:
        """Nobody can say what is wrong with it: what comes next of these leaves counts."""
        self._done_again = {one for one in self._done_again if one[0] == held.step} | {(held.step, held.block.start)}

    async def _may_be_honest(self, block: FinishedBlock, own: Deviation, splits: int) -> bool:
        """Whether who sent what differs most of it may have computed that. Its lease has not been done, so that it has
        not said how often it had halved its microbatches: that was not ``splits`` times."""
        if block.is_vouched_for(own):
            return False
        held = block.held
        assert held is not None
        lease = block.suppliers[own.bucket].lease
        part = [bucket for bucket, supplier in block.suppliers.items() if supplier.lease == lease]
        async for reference in self._in_other_pieces(block, splits):
            if reference is None:
                return True  # nobody knows
            pieces, sent = [*reference.vector.buckets], self._store.pieces(held.block)
            for bucket in part:
                pieces[bucket] = sent[bucket]
            present = reference.present.union(part)
            found = await self._run(
                partial(compare, self._layout, pieces, present, reference.vector.buckets, reference.present)
            )
            if found.relative <= self._tolerance(equal_cpus=False):
                return True
        return False

    async def _in_other_pieces(self, block: FinishedBlock, splits: int) -> AsyncIterator[ReferenceResult | None]:
        """What the block gives where microbatches are halved otherwise than ``splits`` times. None, as the last: that
        cannot be computed here, or the block is held no longer."""
        held, step, words, recomputation = block.held, self._context.aggregator.step, block.other, self._recomputation
        assert held is not None
        assert step is not None
        assert recomputation is not None
        # The job's microbatch is halved, also for a leaf that has fewer samples: a step's last.
        for halvings in range((self._microbatch - 1).bit_length() + 1):
            if halvings == splits:
                continue
            reference = await recomputation.recompute(step.plan, held.block, halvings)
            if reference is None and recomputation.refused and self._is_held(block, words):
                continue  # by the job: nobody has computed it so
            if reference is None or reference.splits != halvings or not self._is_held(block, words):
                yield None
                return
            yield reference

    def _tell_of_differences(
        self, held: HeldBlock, between: Deviation, own: Deviation, second: Deviation | None
    ) -> None:
        """Two workers that should compute the same do not, and neither is so far off that it is proven wrong."""
        same, allowed = self._tolerance(equal_cpus=True), self._tolerance(equal_cpus=False)
        pair = held.said_by(between), held.second
        odd = [worker for worker, far in zip(pair, (own, second), strict=True) if far and far.relative > same]
        key = odd[0] if len(odd) == 1 and second is not None else ""
        if key in self._differing or len(self._differing) >= _MOST_TOLD:
            return
        self._differing.add(key)
        one, other = map(self._named, pair)
        who = f"workers {one} and {other} differ"
        if key:
            odd_one, honest = (one, other) if key == pair[0] else (other, one)
            who = f"worker {odd_one} computes something else than {honest} and the coordinator"
        self._context.phase.warn(
            f"{who}, in a block of step {held.step} ({between}): its results count all the same, since they are within "
            f"--audit-tolerance ({allowed:g}), and the run has other bits than without them"
        )

    def _named(self, worker: str) -> str:
        sessions = self._context.phase.roster.sessions
        known = self._context.phase.roster.contributions.name_of
        return repr(sessions[worker].name if worker in sessions else known(worker) or worker)

    async def _second_distance(self, theirs: Sequence[Tensor], words: Done, reference: ReferenceResult) -> Deviation:
        present = frozenset(range(len(self._layout.result_buckets))) - set(words.absent)
        return await self._run(lambda: self._distance(theirs, present, words, reference))

    def _of_second(self, held: HeldBlock, said: Done, *, drew: bool) -> Origin:
        """Of what the auditor computed."""
        return Origin(self._kind(held.second), said.splits, drew, self._numerics(held.second))

    def _own(self, splits: int, *, drew: bool) -> Origin:
        """Of what the coordinator computes."""
        return Origin(self._own_kind, splits, drew)

    async def _beside_an_unlike_one(
        self, block: FinishedBlock, reference: ReferenceResult, *, alike: bool
    ) -> Ruling | None:
        """An odd result in a lossy codec or, where not ``alike``, with other random numbers in it, beside what the
        block gives without the codec and with the coordinator's numbers. None: the block is held no longer."""
        held, words, pieces = block.held, block.other, reference.vector.buckets
        assert held is not None
        found = {b: weighed(pieces[b], self._roles[b]) for b in reference.present if b in self._floats}
        norms = {bucket: norm for bucket, (norm, _) in found.items()}
        finite = all(map(math.isfinite, norms.values()))

        def is_odd(bucket: int) -> bool:
            if self._roles[bucket] == "grad":
                return not math.isfinite(block.norms[bucket])
            return bucket not in found or found[bucket][1] is None

        # First what was sent under the lease that is done: how that was computed is known.
        odd = sorted(filter(is_odd, block.not_finite), key=lambda bucket: not block.is_said(bucket))
        if odd and finite and alike and not block.is_said(odd[0]):
            async for other in self._in_other_pieces(block, reference.splits):
                norms_there = (
                    [] if other is None else [weighed(other.vector.buckets[b], self._roles[b])[0] for b in odd]
                )
                if not all(map(math.isfinite, norms_there or [math.nan])):
                    if not self._is_held(block, words):
                        return None
                    return self._rule(block, Discard("in smaller pieces, perhaps its sender's, it is not finite"))
        may_overflow = self._precision == "fp16" and block.origin.kind != self._own_kind
        strikes, size, worker, in_a_row = 0, "", held.worker, True
        if finite and not (odd and (alike or may_overflow)):
            sizes, true = self._sizes(block), self._mean_norms(norms, block.samples)
            honest_loss = may_overflow or not all(map(math.isfinite, reference.losses))
            if self._exact and not odd and is_next_to_nothing(sizes, true):
                size, in_a_row = "next to nothing beside", False
                worker = held.said_by(max(norms, key=norms.__getitem__))
            elif odd or not (honest_loss or all(map(math.isfinite, block.done.losses))):
                size = "not finite, unlike"
                worker = held.said_by(odd[0]) if odd else held.worker
            elif larger := self._who_sent_more(block, sizes, norms):
                size, worker = "far larger than", larger
            if size:
                strikes = self._strike(worker, in_a_row=in_a_row)
            else:
                for one in block.hands & self._seen.keys():
                    self._seen[one].strikes = self._seen[one].vanished = 0
                # Of several it is not known who sent more than usual.
                if held.why is Why.NORM and block.hands <= {held.worker} & self._machines.keys():
                    self._tell_of_unusual_ones(block)
        return self._rule(
            block,
            *when_only_sizes_compare(
                held, odd, worker, true_is_finite=finite, strikes=strikes, alike=alike, may_overflow=may_overflow,
                size=size, in_a_row=in_a_row,
            ),
        )  # fmt: skip

    def _who_sent_more(self, block: FinishedBlock, sizes: Mapping[str, Size], true: Mapping[int, float]) -> str:
        """Who sent the most beyond what the block gives, whose buckets have the ``true`` norms, where one of the
        ``sizes`` is larger than that worker's may be; "" where none is."""
        assert block.held is not None
        by_role = self._mean_norms(true, block.samples)
        may_be = {worker: self._with_carried(worker, by_role) for worker in block.hands}
        for role, size in sizes.items():
            beyond: dict[str, float] = {}
            for bucket, norm in block.norms.items():
                if self._roles[bucket] == role:
                    sender = block.held.said_by(bucket)
                    beyond[sender] = beyond.get(sender, 0.0) + norm**2 - true.get(bucket, 0.0) ** 2
            worker = max(beyond, key=beyond.__getitem__)
            if is_far_larger({role: size}, may_be[worker]):
                return worker
        return ""

    def _strike(self, worker: str, *, in_a_row: bool) -> int:
        """A part of a block was not of the size that the block gives. The how manieth of its sender's that is."""
        if (seen := self._seen.get(worker)) is None:
            return 1
        if in_a_row:
            seen.strikes += 1
            return seen.strikes
        seen.vanished += 1
        return seen.vanished

    def _tell_of_unusual_ones(self, block: FinishedBlock) -> None:
        """One more that is larger than usual, and counts: nobody can tell it from what a codec has left out before."""
        counts = self._unusual.setdefault(block.grant.worker, [0, 0])
        counts[:] = unusual, among = counts[0] + 1, counts[1] + 1
        if unusual == _MANY_UNUSUAL and unusual < _UNUSUAL_SHARE * among:
            del self._unusual[block.grant.worker]  # they are counted anew: it may begin to lie now
        elif unusual == _MANY_UNUSUAL:
            self._context.phase.warn(
                f"{unusual} of {among} results of worker {block.session.name!r} "
                f"were larger than usual, the last for step {block.grant.step}: they count, since they are not ten "
                "times what their blocks give, and what a lossy codec wrote, or has other random numbers in it, cannot "
                "be compared more closely; if that worker cannot be trusted, write its name, or id, into the run "
                "directory's file revoked"
            )

    def _with_carried(self, worker: str, true: Mapping[str, float]) -> Mapping[str, float]:
        """By role, the size of the gradient of which a result of this worker may be: of its block, whose ``true`` sizes
        are known, or of an earlier one. A codec with error feedback leaves out much of a gradient that is a hundred
        times the usual one, and sends it with the next results, for as many as it takes."""
        if self._exact or (seen := self._seen.get(worker)) is None:
            return true
        known = {role: size * _CARRIED for role, size in seen.carries.items()}
        seen.carries = {role: max(size, known.get(role, 0.0)) for role, size in true.items()}
        return seen.carries

    def _rule(self, block: FinishedBlock, *decisions: Decision) -> Ruling:
        """The block is held no longer; where it counts, what is usual is learned from it."""
        for known in (self._held, self._unweighed, self._waiting, self._given_up):
            if block in known:
                known.remove(block)
        void = self._end_audit(block)
        if any(isinstance(one, Count) for one in decisions) and all(map(math.isfinite, block.norms.values())):
            for bucket, unusual in block.not_finite.items():
                looked_at = block.held is not None and block.grant.step != self._left_out
                if unusual and looked_at and self._roles[bucket] == "mean":
                    odd = ~torch.isfinite(self._store.piece(block.grant.block, bucket))
                    self._not_finite[bucket] = odd | self._not_finite.get(bucket, odd)
            for role, size in self._sizes(block).items():
                if not size.vanishes:  # a worker that gives nothing but zeros must not make zeros the usual
                    self._gates[role].learn(size.norm, block.samples)
        return Ruling(block, decisions, void)

    def _end_audit(self, block: FinishedBlock) -> BlockGrant | None:
        """Whatever comes of the second computation is not wanted any more. Its lease, where that was open."""
        held = block.held
        if held is None or held.lease is None:
            return None
        grant = self._ledger.get(held.lease)
        if grant is not None:
            self._ledger.give_back(held.lease)
        self._store.release(AuditKey(held.lease))
        if block.other is not None:  # else its worker hears it when it answers for the lease
            told = "it was computed to compare"
            self._context.phase.verdicts.answered(held.lease, held.second, VerdictCode.DUPLICATE, told)
        held.lease, held.second = None, ""
        return grant

    # -- numbers -------------------------------------------------------------------------------------------

    def _tolerance(self, *, equal_cpus: bool) -> float:
        return self._auditor.tolerance(equal_cpus=equal_cpus, reduced_precision=self._precision != "fp32")

    async def _run(self, call: Callable[[], Deviation]) -> Deviation:
        if self._layout.vector_bytes <= INLINE_WEIGH_BYTES:
            return call()
        return await self._context.aggregator.submit(call)

    def _deviation(
        self, block: FinishedBlock, mine: Sequence[Tensor], theirs: Sequence[Tensor], other: Done, *,
        may_overflow: bool,
    ) -> Deviation:  # fmt: skip
        present = frozenset(range(len(self._layout.result_buckets))) - set(other.absent)
        found = compare(self._layout, mine, frozenset(block.suppliers), theirs, present, may_overflow=may_overflow)
        said, others = block.done, other
        return with_words(
            found, said.losses, said.untouched, others.losses, others.untouched, may_overflow=may_overflow
        )

    def _distance(
        self, pieces: Sequence[Tensor], present: frozenset[int], words: Done, reference: ReferenceResult
    ) -> Deviation:
        found = compare(self._layout, pieces, present, reference.vector.buckets, reference.present)
        return with_words(found, words.losses, words.untouched, reference.losses, reference.untouched)


def _told(value: float) -> str:
    """A number that is reported; NaN counts as none."""
    return "none" if math.isnan(value) else f"{value:.4g}"
