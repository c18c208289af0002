"""Whether a finished block counts: finite, of a usual size, and now and then the same when another computes it.

Every finished block passes here before anything of it is added. Most pass at once, after one norm of each bucket; the
others are held (``plan.audit`` says which and why), leased to another worker, and compared. Where the two do not agree
the referee computes the block too: who is wrong is put out of the run, with the reason. A block that holds counts as
it came: nothing is scaled or left out, so an honest run has the same bits with and without this.

Where a lossy codec writes results no two of a block are alike (what was left out before is in them), so nothing is
compared: of an odd one the referee tells whether the block's gradient is finite, and how large.

With one worker there is nobody to compare with: its results count. Big blocks are weighed and compared in the
aggregator's thread, from the task that drives it (``settle``); everything else runs on the event loop's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from w5xde_async.coordinator.parameters.aggregator import Aggregator
from w5xde_async.coordinator.sync.deviation import compare, with_words
from w5xde_async.coordinator.sync.recomputation import Recomputation, ReferenceResult
from w5xde_async.hub.members.session import Session
from w5xde_async.hub.work.block_store import AuditKey, BlockStore, Supplier
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.plan.audit import Auditor, Choice, Deviation, HeldBlock, Why
from w5xde_async.plan.ledger import Grant, Ledger
from w5xde_async.telemetry.events import Audited, Bus, ResultHeld, Warned
from w5xde_async.updates.norm_gate import BlockGate, NormGateConfig
from w5xde_async.wire.messages import Done

__all__ = ["FinishedBlock", "Machine", "Verification"]


#: Blocks of at most this much are weighed and compared on the loop: that takes about as long as the way to a thread.
INLINE_WEIGH_BYTES = 4 << 20
_PATIENCE_S = 5.0  # that long an audit waits for a worker that has finished a lease
_ODD_PATIENCE_S = 10.0  # that long a block that is odd waits for workers that are here but take no work
_LOSSY_FACTOR = 10.0  # an odd result in a lossy codec may be that much larger than the gradient and than usual ones
_REMEMBERED = 4096  # where workers run or ran
_MOST_STRIKES = 3  # of those that are larger, in a row


class Machine(NamedTuple):
    """What a worker says of itself. Equal ones are expected to compute the same bits."""

    device: str
    device_name: str
    threads: int
    torch_version: str


@dataclass(eq=False, slots=True)
class FinishedBlock:
    """A finished block that does not count yet. ``suppliers`` by bucket; what is absent has none."""

    session: Session
    grant: Grant
    done: Done
    suppliers: Mapping[int, Supplier]
    held: HeldBlock | None = None
    norms: dict[int, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)  # by role, of a mean over its samples
    samples: int = 0
    other: Done | None = None  # the second computation is in
    held_at: float = 0.0

    @property
    def workers(self) -> dict[int, str]:
        """Who sent each bucket."""
        return {bucket: supplier.worker for bucket, supplier in self.suppliers.items()}


class Verification:
    """The judgement of one run's blocks. ``active`` is False where every check is switched off."""

    def __init__(
        self, *, layout: Layout, ledger: Ledger, store: BlockStore, aggregator: Aggregator, auditor: Auditor,
        gate: NormGateConfig | None, precision: str, clock: Callable[[], float], bus: Bus, wake: Callable[[], None],
        exact: bool = True,
    ) -> None:  # fmt: skip
        """``exact``: two honest results of a block are alike, as they are not in a lossy codec."""
        self.active = gate is not None or auditor.config.fraction > 0
        #: Without one, who is wrong cannot be told: the block is done again.
        self.recomputation: Recomputation | None = None
        self.machines: dict[str, Machine] = {}  #: of every member
        self._homes: dict[str, tuple[str, Hashable]] = {}  # worker -> the name that it proved, and where it runs
        self.count: Callable[[FinishedBlock], None] = lambda candidate: None
        self.discard: Callable[[FinishedBlock, str], None] = lambda candidate, reason: None
        #: A worker is proven wrong: its id, its session where that is known, the reason.
        self.quarantine: Callable[[str, Session | None, str], None] = lambda worker, session, reason: None
        self.revoke: Callable[[Grant, str], None] = lambda grant, reason: None
        #: Whether a worker has finished a lease: who never has may hang, and would hold up the step.
        self.has_delivered: Callable[[str], bool] = lambda worker: True
        self._layout, self._ledger, self._store, self._aggregator, self._auditor = (
            layout, ledger, store, aggregator, auditor
        )  # fmt: skip
        self._exact = exact
        self._strikes: dict[str, int] = {}  # worker -> results in a row that were larger than can be
        self._precision, self._clock, self._bus, self._wake = precision, clock, bus, wake
        roles = {group.role for group in layout.groups} & {"grad", "mean"}
        self._gates = {} if gate is None else {role: BlockGate(gate) for role in sorted(roles)}
        self._roles = {bucket.index: layout.groups[bucket.group].role for bucket in layout.result_buckets}
        self._floats = {number for number, role in self._roles.items() if role != "max"}
        self._held: list[FinishedBlock] = []
        self._unweighed: list[FinishedBlock] = []
        self._waiting: list[FinishedBlock] = []  # for the very first norm to be confirmed
        self._given_up: list[FinishedBlock] = []  # nobody is there who could compute it again
        self._unsettled: set[tuple[int, int]] = set()  # (step, first leaf) of what the referee could not settle
        self._warned = False

    @property
    def holding(self) -> bool:
        """True while a finished block does not count yet."""
        return bool(self._held or self._unweighed or self._waiting or self._given_up)

    @property
    def _first_is_held(self) -> bool:
        return any(c.held is not None and c.held.why is Why.FIRST for c in (*self._held, *self._given_up))

    @property
    def num_held(self) -> int:
        """Finished blocks that do not count yet: each keeps its vector."""
        return len(self._held) + len(self._unweighed) + len(self._waiting) + len(self._given_up)

    # -- a block is finished -------------------------------------------------------------------------------

    def passes(self, candidate: FinishedBlock) -> bool:
        """Whether it counts at once. Otherwise ``count`` or ``discard`` will be called."""
        if not self.active:
            return True
        if self._layout.vector_bytes > INLINE_WEIGH_BYTES:
            self._unweighed.append(candidate)
            return False
        return self._look(candidate, self._store.norms(candidate.grant.block, candidate.suppliers))

    def _look(self, candidate: FinishedBlock, norms: dict[int, float]) -> bool:
        """With its norms known: counts at once, or is held."""
        grant, step = candidate.grant, self._aggregator.step
        assert step is not None
        (start, stop), plan = grant.block, step.plan
        candidate.norms = norms
        candidate.samples = min(stop * plan.leaf_samples, plan.num_samples) - start * plan.leaf_samples
        candidate.sizes = self._sizes(norms, candidate.samples)
        others = len(self.machines) > (grant.worker in self.machines)
        why = None if (grant.step, grant.block.start) in self._unsettled else self._why(candidate)
        draws = why is None and others and self._exact
        if draws and self._auditor.draw(grant.step, grant.block, step.plan.num_leaves, grant.worker):
            why = Why.SAMPLED
        if why is None or not others:
            self._strikes.pop(grant.worker, None)
            self._learn(candidate)
            return True
        if why is Why.FIRST and self._first_is_held:
            self._waiting.append(candidate)
            return False
        candidate.held = HeldBlock(grant.step, grant.block, grant.worker, why, candidate.workers)
        candidate.held_at = self._clock()
        if self._exact:
            self._held.append(candidate)
        else:
            self._given_up.append(candidate)
            self._wake()
        if why is not Why.SAMPLED:
            self._bus.publish(
                ResultHeld(worker_id=grant.worker, name=candidate.session.name, step=grant.step, why=why.value)
            )
        return False

    def _why(self, candidate: FinishedBlock) -> Why | None:
        if not all(map(math.isfinite, (*candidate.norms.values(), *candidate.done.losses))):
            return Why.NOT_FINITE  # a loss alone too: honest gradients of such a loss are not finite either, mostly
        for role, size in candidate.sizes.items():
            gate = self._gates[role]
            if gate.cold:
                return Why.FIRST
            if size > gate.bound(candidate.samples):
                return Why.NORM
        return None

    def _sizes(self, norms: dict[int, float], samples: int) -> dict[str, float]:
        """A block's norm by role, as of a mean over its samples."""
        squares: dict[str, float] = {}
        scale = 1.0 / (samples * self._aggregator.rule.loss_scale)
        for bucket, norm in norms.items():
            role = self._roles[bucket]
            if role in self._gates:
                squares[role] = squares.get(role, 0.0) + (norm * scale) ** 2
        return {role: math.sqrt(square) for role, square in squares.items()}

    def _learn(self, candidate: FinishedBlock) -> None:
        if all(map(math.isfinite, candidate.norms.values())):
            for role, size in candidate.sizes.items():
                self._gates[role].learn(size, candidate.samples)

    # -- the second computation ----------------------------------------------------------------------------

    def leases(self, ready: Collection[str], deadline_s: Callable[[str, int], float]) -> list[Grant]:
        """Audits to lease now. ``ready``: workers that take work."""
        granted = []
        for candidate in tuple(self._held):
            held = candidate.held
            assert held is not None
            if candidate.other is not None:
                continue
            if held.lease is not None and not self._renewed(held):
                continue
            at_once = sum(c.held is not None and c.held.lease is not None for c in self._held)
            at_once += self._store.num_released
            if at_once >= self._auditor.config.most_open:
                continue
            able = [worker for worker in ready if worker == held.worker or self.has_delivered(worker)]
            if all(worker == held.worker for worker in able):
                patient = self._clock() - candidate.held_at < _PATIENCE_S
                if patient and len(ready) > 1 and self._others_may_deliver(held, ready):
                    continue
                able = list(ready)
            involved = {held.worker, *held.suppliers.values()}
            choices = [
                Choice(
                    worker, self._alike(worker, held.worker), self._ledger.num_held(worker), self._apart(worker, held)
                )
                for worker in able
                if not self._of_one(worker, involved)
            ]
            worker = self._auditor.choose(held, choices)
            if worker is None:
                # What is odd waits a while for workers that are here but take no work just now: one may hang for good.
                waits = held.why in (Why.NORM, Why.NOT_FINITE) and self._clock() - candidate.held_at < _ODD_PATIENCE_S
                there = [one for one in (self.machines if waits else able) if not self._of_one(one, involved)]
                if set(there) <= held.asked | set(held.suppliers.values()) | {held.worker}:
                    self._held.remove(candidate)
                    self._given_up.append(candidate)
                    self._wake()
                continue
            leaves = held.block.num_leaves
            grant = self._ledger.audit(
                held.step, held.block, worker, now=self._clock(), deadline_s=deadline_s(worker, leaves)
            )
            held.lease, held.second = grant.lease, worker
            granted.append(grant)
        return granted

    def _others_may_deliver(self, held: HeldBlock, ready: Collection[str]) -> bool:
        """Whether waiting can bring another worker that has delivered: one that is at this step, or has work there."""
        return bool(self._ledger.free_leaves(held.step)) or any(
            grant.step == held.step for worker in ready if worker != held.worker for grant in self._ledger.held(worker)
        )

    def _renewed(self, held: HeldBlock) -> bool:
        """Whether its audit's lease ended without a result, and its memory is free again."""
        assert held.lease is not None
        if self._ledger.get(held.lease) is not None or self._store.is_receiving(AuditKey(held.lease)):
            return False
        self._store.release(AuditKey(held.lease))
        held.asked.add(held.second)
        held.lease = None
        return True

    def _apart(self, worker: str, held: HeldBlock) -> bool:
        return self._homes.get(worker) != self._homes.get(held.worker)

    def _alike(self, worker: str, other: str) -> bool:
        mine = self.machines.get(worker)
        return mine is not None and mine == self.machines.get(other)

    def seconded(self, session: Session, done: Done) -> None:
        """An audit is done; ``settle`` compares."""
        for candidate in self._held:
            if candidate.held is not None and candidate.held.lease == done.lease:
                candidate.other = done

    def joined(self, worker: str, machine: Machine, identity: str, place: Hashable) -> None:
        """``worker`` is a member: on what machine, by what proven name ("" for the run's secret), and where."""
        self.machines[worker] = machine
        self._homes.pop(worker, None)
        self._homes[worker] = (identity, place)
        if len(self._homes) > _REMEMBERED:
            del self._homes[next(iter(self._homes))]

    def _of_one(self, worker: str, others: Iterable[str]) -> bool:
        """Whether it and one of these are workers of one proven name: nobody audits himself."""
        identity, _ = self._homes.get(worker, ("", ""))
        return bool(identity) and any(self._homes.get(other, ("", ""))[0] == identity for other in others)

    def left(self, worker: str) -> None:
        """The worker is gone; blocks that it has finished stay."""
        self.machines.pop(worker, None)
        self._strikes.pop(worker, None)
        self._auditor.forget(worker)

    # -- judgement, in the task that drives the aggregator -------------------------------------------------

    async def settle(self) -> bool:
        """Judge whatever can be judged. False when there was nothing."""
        judged = False
        while self._unweighed:
            judged, candidate = True, self._unweighed[0]
            norms = await self._aggregator.submit(partial(self._weighed, candidate))
            if candidate in self._unweighed:  # nobody was put out of the run meanwhile
                self._unweighed.remove(candidate)
                if self._look(candidate, norms):
                    self.count(candidate)
        while self._waiting and not self._first_is_held:
            judged, candidate = True, self._waiting.pop(0)
            if self._look(candidate, candidate.norms):
                self.count(candidate)
        while self._given_up:
            judged = True
            await self._give_up(self._given_up[0])
        while (seconded := next((c for c in self._held if c.other is not None), None)) is not None:
            judged = True
            await self._compare(seconded)
        return judged

    def _weighed(self, candidate: FinishedBlock) -> dict[int, float]:
        return self._store.norms(candidate.grant.block, candidate.suppliers)

    async def _give_up(self, candidate: FinishedBlock) -> None:
        """Nobody else can compute it: it counts where nobody is there, or where it was only drawn."""
        held = candidate.held
        assert held is not None
        others = set(self.machines) | held.asked
        odd = held.why in (Why.NORM, Why.NOT_FINITE) and bool(others - {held.worker})
        if not self._exact or (odd and self.recomputation is not None):
            await self._arbitrate(candidate, None)
        else:
            self._take(candidate)

    async def _compare(self, candidate: FinishedBlock) -> None:
        held, other = candidate.held, candidate.other
        assert held is not None
        assert held.lease is not None
        assert other is not None
        mine, theirs = self._store.vector(held.block), self._store.vector(AuditKey(held.lease))
        absent = frozenset(other.absent)
        deviation = await self._run(lambda: self._deviation(candidate, mine, theirs, other, absent))
        if candidate not in self._held or candidate.other is not other:
            return  # a worker that had a hand in it was put out of the run meanwhile
        alike = self._alike(held.worker, held.second)
        equal_cpus = alike and self.machines[held.worker].device.startswith("cpu")
        tolerance = self._tolerance(equal_cpus=equal_cpus)
        overflow = self._precision == "fp16" and not alike and math.isinf(deviation.relative)
        agreed = deviation.relative <= tolerance or (overflow and held.why is Why.NOT_FINITE)
        self._bus.publish(
            Audited(
                step=held.step, worker_id=held.worker, second_id=held.second, why=held.why.value, agreed=agreed,
                same_bits=deviation.same_bits, relative=deviation.relative,
            )
        )  # fmt: skip
        if not agreed:
            await self._arbitrate(candidate, deviation)
            return
        if equal_cpus and not deviation.same_bits and not self._warned:
            self._warned = True
            self._bus.publish(Warned(text=f"equal machines computed a block with other last bits ({deviation})"))
        self._auditor.agreed(held.worker, held.second)
        self._take(candidate)

    async def _arbitrate(self, candidate: FinishedBlock, between: Deviation | None) -> None:
        held, step = candidate.held, self._aggregator.step
        assert held is not None
        assert step is not None
        judgement = None if self.recomputation is None else await self.recomputation.judge(step.plan, held.block)
        if candidate not in self._held and candidate not in self._given_up:
            return
        if judgement is not None and not self._exact:
            self._estimate(candidate, judgement)
            return
        if judgement is None:
            self._unsettled.add((held.step, held.block.start))
            self._bus.publish(
                Warned(
                    text=f"a block of step {held.step} is odd ({held.why.value}) and is done again" if between is None
                    else f"two computations of a block of step {held.step} differ ({between}); it is done again"
                )
            )  # fmt: skip
            self._drop(candidate, "it is odd" if between is None else "another worker computed something else")
            return
        mine = self._store.vector(held.block)
        own = await self._run(lambda: self._against(candidate, mine, judgement))
        second = None
        if candidate.other is not None and held.lease is not None:
            theirs, words = self._store.vector(AuditKey(held.lease)), candidate.other
            present = frozenset(range(len(self._layout.result_buckets))) - set(words.absent)
            second = await self._run(lambda: self._distance(theirs, present, words, judgement))
        tolerance, seconder = self._tolerance(equal_cpus=False), held.second
        wrong = self._auditor.wrong(held, own, second, tolerance)
        if own.relative <= tolerance:
            self._take(candidate)
        else:
            self._drop(candidate, f"the coordinator computed something else ({own})")
        for worker in wrong:
            found = second if worker == seconder and second is not None else own
            session = candidate.session if worker == candidate.session.worker_id else None
            self.quarantine(worker, session, f"its result for step {held.step} is not what the block gives ({found})")

    def _estimate(self, candidate: FinishedBlock, judgement: ReferenceResult) -> None:
        """An odd result in a lossy codec, beside what the block gives without one."""
        pieces = judgement.vector.buckets
        norms = {b: float(torch.linalg.vector_norm(pieces[b])) for b in judgement.present if b in self._floats}
        odd = [bucket for bucket, norm in candidate.norms.items() if not math.isfinite(norm)]
        worker, step = candidate.grant.worker, candidate.grant.step
        session = candidate.session
        if not all(map(math.isfinite, norms.values())):  # training diverges: nobody is to blame
            self._take(candidate)
        elif odd:
            worker = candidate.workers.get(odd[0], worker)
            self._drop(candidate, "it is not finite, and the block is")
            reason = f"its result for step {step} is not finite, and the block is"
            self.quarantine(worker, session if worker == session.worker_id else None, reason)
        elif not self._too_large(candidate, self._sizes(norms, candidate.samples)):
            self._strikes.pop(worker, None)
            self._take(candidate)
        else:
            strikes = self._strikes[worker] = self._strikes.get(worker, 0) + 1
            self._drop(candidate, "it is far larger than what the block gives")
            if strikes >= _MOST_STRIKES:
                reason = f"{strikes} results in a row, the last for step {step}, were far larger than their blocks give"
                self.quarantine(worker, session, reason)

    def _too_large(self, candidate: FinishedBlock, true: Mapping[str, float]) -> bool:
        return any(
            size > _LOSSY_FACTOR * max(true.get(role, 0.0), self._gates[role].bound(candidate.samples))
            for role, size in candidate.sizes.items()
        )

    def invalidate(self, worker: str) -> None:
        """Held blocks that this worker had a hand in are done again; what it computed of others' counts for nothing."""
        for candidate in (*self._held, *self._unweighed, *self._waiting, *self._given_up):
            if worker == candidate.grant.worker or worker in candidate.workers.values():
                self._drop(candidate, "it was put out of the run")
            elif candidate.held is not None and candidate.held.second == worker:
                self._end_audit(candidate.held)
                candidate.other = None

    def _drop(self, candidate: FinishedBlock, reason: str) -> None:
        self._forget(candidate)
        self.discard(candidate, reason)

    def _take(self, candidate: FinishedBlock) -> None:
        self._forget(candidate)
        self._learn(candidate)
        self.count(candidate)

    def _forget(self, candidate: FinishedBlock) -> None:
        for known in (self._held, self._unweighed, self._waiting, self._given_up):
            if candidate in known:
                known.remove(candidate)
        if candidate.held is not None:
            self._end_audit(candidate.held)

    def _end_audit(self, held: HeldBlock) -> None:
        """Whatever comes of the second computation is not wanted any more; its memory is freed when nobody writes."""
        if held.lease is None:
            return
        if (grant := self._ledger.get(held.lease)) is not None:
            self._ledger.give_back(held.lease)
            self.revoke(grant, "the block is done anew")
        self._store.release(AuditKey(held.lease))
        held.lease, held.second = None, ""

    # -- numbers -------------------------------------------------------------------------------------------

    def _tolerance(self, *, equal_cpus: bool) -> float:
        return self._auditor.tolerance(equal_cpus=equal_cpus, reduced_precision=self._precision != "fp32")

    async def _run(self, call: Callable[[], Deviation]) -> Deviation:
        if self._layout.vector_bytes <= INLINE_WEIGH_BYTES:
            return call()
        return await self._aggregator.submit(call)

    def _deviation(
        self, candidate: FinishedBlock, mine: ResultVector, theirs: ResultVector, other: Done, absent: frozenset[int]
    ) -> Deviation:
        everything = frozenset(range(len(self._layout.result_buckets)))
        found = compare(self._layout, mine, frozenset(candidate.suppliers), theirs, everything - absent)
        return with_words(found, candidate.done.losses, candidate.done.untouched, other.losses, other.untouched)

    def _against(self, candidate: FinishedBlock, mine: ResultVector, judgement: ReferenceResult) -> Deviation:
        return self._distance(mine, frozenset(candidate.suppliers), candidate.done, judgement)

    def _distance(
        self, vector: ResultVector, present: frozenset[int], words: Done, judgement: ReferenceResult
    ) -> Deviation:
        found = compare(self._layout, vector, present, judgement.vector, judgement.present)
        return with_words(found, words.losses, words.untouched, judgement.losses, judgement.untouched)
