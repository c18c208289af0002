"""Who computes which block of a step, until when, and that each leaf counts once.

Invariants, checked by ``validate`` in tests:
  - every leaf of an open step is in exactly one place: free, in one unfinished block, or in one finished block;
  - a lease that was returned, revoked or outlived by its step is stale, for ever;
  - a block has at most two open leases: its own and a backup, which another worker holds;
  - an audit is a lease on a finished block beside these, and finishes nothing.

Nothing that is asked for each lease goes through a step's leaves or all workers' leases: what is free, half done or
held of a step is counted as it changes.

A block of which something has come is leased whole again. What has come of which block, and who has sent it, is in the
block store (``hub.work.block_store``), which is asked.

Time is an argument. What this module does not do: hold tensors, know workers beyond their id, choose block sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from w5xde_async.plan.leases import FailedWork, Grant, LeaseTable, LeaseTerms
from w5xde_async.plan.tree import Block, aligned_block

COORDINATOR = ""  #: the worker whose leases the coordinator computes itself
_MOST_OPEN = 2  # steps


@dataclass(slots=True)
class Slot:
    """One block that was leased and, while somebody works on it, the lease.

    ``contested``: two workers have computed it at once, so a bucket of either may have been turned away.
    """

    block: Block
    lease: int | None = None
    backup: int | None = None
    contested: bool = False
    finished: bool = False


@dataclass(frozen=True, slots=True)
class BlockGrant(Grant):
    """A lease of a block. Its deadline is from when its step became computable."""

    block: Block


@dataclass(slots=True)
class OpenStep:
    """One step that is being worked on."""

    step: int
    num_leaves: int
    opened_at: float
    free: list[Block]  # maximal free runs, ascending; not aligned
    free_leaves: int  # that nobody holds, those of begun blocks among them
    slots: dict[int, Slot] = field(default_factory=dict)  # first leaf -> slot
    orphans: dict[int, Slot] = field(default_factory=dict)  # those that are begun and nobody holds
    leases: dict[int, BlockGrant] = field(default_factory=dict)  # open ones, in order
    held_leaves: int = 0  # in these
    finished_leaves: int = 0

    @property
    def complete(self) -> bool:
        return self.finished_leaves == self.num_leaves


class Ledger(LeaseTable[BlockGrant]):
    """The book of all open leases of blocks. Two steps at most are open at once: the current one and the next."""

    def __init__(
        self, terms: LeaseTerms | None = None, *, allowed_s: Callable[[BlockGrant], float] = lambda g: g.deadline_s,
        has_come: Callable[[int, Block], bool] = lambda step, block: False,
        waits: Callable[[BlockGrant], bool] = lambda grant: False,
    ) -> None:  # fmt: skip
        """``has_come``: whether anything is there of a block of a step. ``allowed_s``: see ``LeaseTable``. ``waits``:
        whether a lease waits for its data: its time has not begun."""
        super().__init__(terms or LeaseTerms(), allowed_s)
        self._has_come, self._waits = has_come, waits
        self._waited: dict[int, float] = {}  # lease -> until when it has waited, where it has
        self._steps: dict[int, OpenStep] = {}
        self._watched: set[str] = set()
        self._eased: dict[str, None] = {}  # of those, who has had a lease less since somebody asked
        self._audits: set[int] = set()

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def open_steps(self) -> list[int]:
        """Numbers of the open steps, the current one first."""
        return list(self._steps)

    def open(self, step: int, num_leaves: int, now: float) -> None:
        """Begin ``step``; all its leaves are free.

        Raises ValueError where the step is open already, or too many are open.
        """
        if step in self._steps or len(self._steps) >= _MOST_OPEN:
            raise ValueError(f"step {step} cannot be opened beside {self.open_steps}")
        self._steps[step] = OpenStep(step, num_leaves, now, [Block(0, num_leaves)], num_leaves)

    def begin(self, step: int, now: float) -> None:
        """``step`` can be computed from now on: deadlines of leases given ahead start here."""
        self._steps[step].opened_at = now

    def close(self, step: int) -> None:
        """Forget a step (committed or given up); leases on it are stale from now on."""
        for lease in [lease for lease in self._audits if self._grants[lease].step == step]:
            self.give_back(lease)
        for slot in self._steps.pop(step).slots.values():
            for open_lease in (slot.lease, slot.backup):
                if open_lease is not None:
                    self._drop(open_lease)
        for tried in (self._failures, self._deaths, self._overran):
            for work in [work for work in tried if work[0] == step]:
                del tried[work]

    def complete(self, step: int) -> bool:
        """True when every leaf of ``step`` lies in a finished block; False where it is not open, as after the last one
        and while the next one's order is still being computed."""
        opened = self._steps.get(step)
        return opened is not None and opened.complete

    def num_leaves(self, step: int) -> int:
        """Leaves of an open step."""
        return self._steps[step].num_leaves

    def free_leaves(self, step: int) -> int:
        """Leaves of ``step`` that nobody holds."""
        return self._steps[step].free_leaves

    def free_runs(self, step: int) -> Sequence[Block]:
        """What nobody holds of ``step``: runs of leaves, ascending, and begun blocks. Not to be changed."""
        opened = self._steps[step]
        return [*opened.free, *(slot.block for slot in opened.orphans.values())] if opened.orphans else opened.free

    def held_leaves(self, step: int) -> int:
        """Leaves of ``step`` in open leases, twice where two workers have them."""
        return self._steps[step].held_leaves

    def leases_on(self, step: int) -> Collection[BlockGrant]:
        """Open leases on ``step``, in the order in which they were given."""
        return self._steps[step].leases.values()

    def watch(self, worker: str, do: bool = True) -> None:
        """From now on ``eased`` tells of ``worker``, or no more."""
        if do:
            self._watched.add(worker)
        else:
            self._watched.discard(worker)
            self._eased.pop(worker, None)

    def eased(self) -> Collection[str]:
        """Workers that have had a lease less since the last call, whatever ended it, of those that are watched."""
        eased, self._eased = self._eased, {}
        return eased.keys()

    # -- leases --------------------------------------------------------------------------------------------

    def num_held_up_to(self, worker: str, step: int) -> int:
        """Open leases of a worker but those of steps after ``step``."""
        return sum(self._grants[lease].step <= step for lease in self._held.get(worker, ()))

    def contested(self, lease: int) -> bool:
        """True when another worker has computed the block of this open lease too."""
        return lease not in self._audits and self._slot(self._grants[lease]).contested

    def untouched(self, lease: int) -> bool:
        """Whether nobody else is at the block of an open lease, and nothing of it has come."""
        grant = self._grants[lease]
        return not (lease in self._audits or self.contested(lease) or self._has_come(grant.step, grant.block))

    def opened_at(self, step: int) -> float:
        """When an open step became computable, or was opened."""
        return self._steps[step].opened_at

    def num_held_leaves(self, worker: str, step: int) -> int:
        """Leaves of ``step`` in the open leases of a worker."""
        held = (self._grants[lease] for lease in self._held.get(worker, ()))
        return sum(grant.block.num_leaves for grant in held if grant.step == step)

    def began_at(self, grant: BlockGrant) -> float:
        """When the lease could be begun at the earliest: granted, its step computable, and its data there."""
        return max(grant.granted_at, self._steps[grant.step].opened_at, self._waited.get(grant.lease, -math.inf))

    def data_came(self, lease: int, now: float) -> None:
        """An open lease does not wait for its data any more."""
        self._waited[lease] = now

    def may_back_up(self, lease: int, worker: str) -> bool:
        """Whether ``worker`` could back up an open lease: another's, never backed up yet, not failed on by it."""
        grant = self._grants[lease]
        if grant.worker == worker or not self.unbacked(lease):
            return False
        return not any(worker in tried for tried in self._tried(grant.step, grant.block))

    def unbacked(self, lease: int) -> bool:
        """Whether an open lease may be backed up: nobody has, and it is no audit and not the coordinator's own."""
        grant = self._grants[lease]
        return lease not in self._audits and grant.worker != COORDINATOR and not self._slot(grant).contested

    def back_up(self, lease: int, worker: str, *, now: float, deadline_s: float) -> BlockGrant:
        """Lease the block of ``lease`` to a second worker too; whoever has it done first is paid.

        Raises ValueError where the worker cannot back it up.
        """
        grant = self._grants[lease]
        slot = self._slot(grant)
        if slot.contested or grant.worker in (worker, COORDINATOR):
            raise ValueError(f"lease {lease} of {grant.worker} cannot be backed up by {worker}")
        second = self._grant(grant.step, slot.block, worker, now, deadline_s)
        slot.backup, slot.contested = second.lease, True
        self.num_backups += 1
        return second

    def audit(self, step: int, block: Block, worker: str, *, now: float, deadline_s: float) -> BlockGrant:
        """Lease a finished block of an open step once more, to compare. It counts in no sum of the ledger's."""
        grant = self._grant(step, block, worker, now, deadline_s)
        self._audits.add(grant.lease)
        return grant

    def is_audit(self, lease: int) -> bool:
        """True for an open lease that ``audit`` gave."""
        return lease in self._audits

    def reopen(self, step: int, block: Block, worker: str) -> None:
        """A finished block of ``worker`` did not hold: its leaves are for others first.

        Raises ValueError where the block is not finished.
        """
        opened = self._steps[step]
        slot = opened.slots.pop(block.start)
        if not slot.finished:
            raise ValueError(f"{block} of step {step} is not finished")
        opened.finished_leaves -= block.num_leaves
        opened.free_leaves += block.num_leaves
        for leaf in range(*block):
            self._failures.setdefault((step, leaf), []).append(worker)
        _add_run(opened.free, block)

    def emptied(self, step: int, start: int) -> None:
        """Something of an unfinished block is missing again: who sent it is not trusted any more."""
        opened = self._steps[step]
        slot = opened.slots[start]
        slot.contested = True  # who has it now may have had a bucket turned away that is missing again
        if slot.lease is None and slot.backup is None and not self._has_come(step, slot.block):
            del opened.slots[start]
            opened.orphans.pop(start, None)
            _add_run(opened.free, slot.block)

    def grant(
        self,
        worker: str,
        step: int,
        max_leaves: int,
        *,
        now: float,
        deadline_s: float,
        others: Collection[str] = (),
        start: int | None = None,
    ) -> BlockGrant | None:
        """Lease ``worker`` the first free block of ``step``, of at most ``max_leaves`` leaves.

        Blocks that were begun go first, whole as they were. ``start``: of the block that is wanted, which is free. A
        leaf that failed on ``worker`` is left to ``others`` while there are any.
        """
        opened = self._steps[step]
        for slot in opened.orphans.values():
            if not self._shuns(opened, slot.block, worker, others):
                return self._lease(opened, slot, worker, now, deadline_s)
        for position, run in enumerate(opened.free):
            at = run.start
            if start is not None:
                if start >= run.stop:
                    continue
                at, start = max(at, start), None
            while at < run.stop:
                block = aligned_block(at, run.stop, opened.num_leaves, max_leaves)
                block = self._isolate(opened, block)
                if not self._shuns(opened, block, worker, others):
                    left, right = Block(run.start, block.start), Block(block.stop, run.stop)
                    opened.free[position : position + 1] = [part for part in (left, right) if part.num_leaves]
                    slot = opened.slots[block.start] = Slot(block)
                    return self._lease(opened, slot, worker, now, deadline_s)
                at = block.stop
        return None

    def grant_again(self, past: BlockGrant, *, now: float, deadline_s: float) -> BlockGrant | None:
        """Lease the block of a lease that has ended to its worker again. None where it is not free as it was."""
        opened, block = self._steps.get(past.step), past.block
        if opened is None or self._tried(past.step, block):
            return None
        slot = opened.orphans.get(block.start)
        if slot is not None:
            return self._lease(opened, slot, past.worker, now, deadline_s) if slot.block == block else None
        for position, run in enumerate(opened.free):
            if run.start <= block.start and block.stop <= run.stop:
                left, right = Block(run.start, block.start), Block(block.stop, run.stop)
                opened.free[position : position + 1] = [part for part in (left, right) if part.num_leaves]
                slot = opened.slots[block.start] = Slot(block)
                return self._lease(opened, slot, past.worker, now, deadline_s)
        return None

    def finish(self, lease: int) -> BlockGrant | None:
        """The lease is done and all of its block has come, which is finished by it.

        Returns the other lease on the block, which is stale from now on, where there was one.
        """
        if lease in self._audits:
            self._drop(lease, finished=True)
            return None
        grant = self._grants[lease]
        slot = self._slot(grant)
        other = slot.backup if slot.lease == lease else slot.lease
        slot.finished, slot.lease, slot.backup = True, None, None
        self._steps[grant.step].finished_leaves += slot.block.num_leaves
        self._drop(lease, finished=True)
        return None if other is None else self._drop(other, finished=True)

    def give_back(self, lease: int) -> BlockGrant:
        """The lease ends unfinished: its leaves are free again (what has come of it stays), or its backup's."""
        audit, grant = lease in self._audits, self._drop(lease)
        if audit:
            return grant
        opened, slot = self._steps[grant.step], self._slot(grant)
        if slot.backup is not None:
            slot.lease, slot.backup = (slot.backup if slot.lease == lease else slot.lease), None
            return grant
        slot.lease = None
        opened.free_leaves += slot.block.num_leaves
        if self._has_come(grant.step, slot.block):
            opened.orphans[slot.block.start] = slot
        else:
            del opened.slots[slot.block.start]
            _add_run(opened.free, slot.block)
        return grant

    def fail(self, lease: int, leaf: int) -> FailedWork | None:
        """The job raised on ``leaf`` of the lease. The lease goes back.

        A leaf that failed too often is returned, once nobody is left whose word would count for more; never one of an
        audit, which is finished.
        """
        audit, grant = lease in self._audits, self.give_back(lease)
        return None if audit else self._raised(grant.step, leaf, grant.worker)

    def pass_over(self, lease: int, leaves: Iterable[int], workers: Collection[str]) -> None:
        """These leaves of the lease, which has not been sent, are none for ``workers``. The lease goes back."""
        grant = self.give_back(lease)
        for leaf in leaves:
            tried = self._failures.setdefault((grant.step, leaf), [])
            tried += [worker for worker in workers if worker not in tried]

    def lose(self, worker: str, *, died: bool = True) -> tuple[list[BlockGrant], FailedWork | None]:
        """The worker is gone: all its leases go back. A leaf on which too many workers died is returned as well.

        ``died`` is False for one that was given up: silence says nothing about the leaf it had. Workers are counted,
        not their links: ``returned`` takes one back. Only the oldest lease of a computable step counts against its
        leaves: the others had not been begun. An audit's are finished.
        """
        audits = self._audits.intersection(self._held.get(worker, ()))
        grants = [self.give_back(lease) for lease in tuple(self._held.get(worker, ()))]
        failed_work = None
        current = next(iter(self._steps.values()), None)
        begun = next((grant for grant in grants if current is not None and grant.step == current.step), None)
        if died and current is not None and begun is not None and begun.lease not in audits:
            # Buckets leave with a block's last leaf; where one has come, that leaf is to blame.
            block = begun.block
            suspects = range(*block)[-1:] if self._has_come(current.step, block) else range(*block)
            blamed = [self._died(current.step, leaf, worker) for leaf in suspects]
            failed_work = blamed[0] if len(blamed) == 1 else None
        self.places.left(worker)
        return grants, failed_work

    def take_over(self, step: int, leaf: int, *, now: float) -> BlockGrant | None:
        """Lease the coordinator a leaf, in the block that it was sent in where something of that has come.

        None where it is finished, or somebody else is at it.
        """
        opened = self._steps[step]
        for slot in opened.slots.values():
            if slot.block.start <= leaf < slot.block.stop:
                taken = slot.finished or slot.lease is not None
                return None if taken else self._lease(opened, slot, COORDINATOR, now, math.inf)
        position = next(index for index, run in enumerate(opened.free) if run.start <= leaf < run.stop)
        run = opened.free[position]
        parts = Block(run.start, leaf), Block(leaf + 1, run.stop)
        opened.free[position : position + 1] = [part for part in parts if part.num_leaves]
        slot = opened.slots[leaf] = Slot(Block(leaf, leaf + 1))
        return self._lease(opened, slot, COORDINATOR, now, math.inf)

    def overdue(self, now: float) -> list[BlockGrant]:
        """Leases of the current step whose deadline has passed; the coordinator's own have none."""
        current = next(iter(self._steps.values()), None)
        if current is None:
            return []
        held = (grant for grant in current.leases.values() if grant.worker != COORDINATOR)
        return [grant for grant in held if self._is_overdue(grant, now) and not self._waits(grant)]

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold (for tests and the simulator)."""
        for opened in self._steps.values():
            seen = [0] * opened.num_leaves
            for block in [*opened.free, *(slot.block for slot in opened.slots.values())]:
                for leaf in range(*block):
                    seen[leaf] += 1
            assert seen == [1] * opened.num_leaves, f"step {opened.step}: leaves counted {seen}"
            done = sum(slot.block.num_leaves for slot in opened.slots.values() if slot.finished)
            assert done == opened.finished_leaves
            waiting = {start: s for start, s in opened.slots.items() if s.lease is None and not s.finished}
            assert waiting == opened.orphans
            free = sum(b.num_leaves for b in (*opened.free, *(slot.block for slot in waiting.values())))
            assert free == opened.free_leaves
            assert opened.free == sorted(opened.free)
            held = {lease: grant for lease, grant in self._grants.items() if grant.step == opened.step}
            assert held == opened.leases
            assert sum(grant.block.num_leaves for grant in held.values()) == opened.held_leaves
            for slot in opened.slots.values():
                for lease in (slot.lease, slot.backup):
                    assert lease is None or self._grants[lease].block == slot.block
                assert slot.backup is None or slot.lease is not None
            for slot in waiting.values():
                assert self._has_come(opened.step, slot.block), f"nothing of {slot.block} is there to be kept"
        assert self._audits <= set(self._grants)
        self._check_held()

    # -- inner ---------------------------------------------------------------------------------------------

    def _works(self, grant: BlockGrant) -> list[tuple[int, int]]:
        return [(grant.step, leaf) for leaf in range(*grant.block)]

    def _slot(self, grant: BlockGrant) -> Slot:
        return self._steps[grant.step].slots[grant.block.start]

    def _lease(self, opened: OpenStep, slot: Slot, worker: str, now: float, deadline_s: float) -> BlockGrant:
        grant = self._grant(opened.step, slot.block, worker, now, deadline_s)
        slot.lease, slot.contested = grant.lease, False
        opened.orphans.pop(slot.block.start, None)
        opened.free_leaves -= slot.block.num_leaves
        return grant

    def _grant(self, step: int, block: Block, worker: str, now: float, deadline_s: float) -> BlockGrant:
        grant = self._enter(BlockGrant(self._number(), step, worker, now, deadline_s, block))
        opened = self._steps[step]
        opened.leases[grant.lease] = grant
        opened.held_leaves += block.num_leaves
        return grant

    def _drop(self, lease: int, *, finished: bool = False) -> BlockGrant:
        grant = super()._drop(lease, finished=finished)
        self._audits.discard(lease)
        self._waited.pop(lease, None)
        if grant.worker in self._watched:
            self._eased[grant.worker] = None
        opened = self._steps.get(grant.step)
        if opened is not None:
            del opened.leases[lease]
            opened.held_leaves -= grant.block.num_leaves
        return grant

    def _tried(self, step: int, block: Block) -> list[list[str]]:
        """On whom each leaf of a block raised, of those that did."""
        if not self._failures:
            return []
        return [self._failures[step, leaf] for leaf in range(*block) if (step, leaf) in self._failures]

    def _shuns(self, opened: OpenStep, block: Block, worker: str, others: Collection[str]) -> bool:
        return any(self.places.leaves(worker, tried, others) for tried in self._tried(opened.step, block))

    def _isolate(self, opened: OpenStep, block: Block) -> Block:
        """A leaf that failed, or on which workers died twice, is leased alone, so that it alone is to blame."""
        if block.num_leaves == 1 or not (self._failures or self._deaths):
            return block
        works = [(opened.step, leaf) for leaf in range(*block)]
        suspects = [leaf for step, leaf in works if (step, leaf) in self._failures
                    or len(self._deaths.get((step, leaf), ())) > 1]  # fmt: skip
        while block.num_leaves > 1 and any(block.start <= leaf < block.stop for leaf in suspects):
            half = 1 << ((block.num_leaves - 1).bit_length() - 1)
            block = Block(block.start, block.start + half)
        return block


def _add_run(runs: list[Block], block: Block) -> None:
    """Put a block among maximal runs, ascending: it becomes one with those that it touches."""
    at = bisect_left(runs, block)
    start, stop, first, last = block.start, block.stop, at, at
    if at and runs[at - 1].stop == start:
        first, start = at - 1, runs[at - 1].start
    if at < len(runs) and runs[at].start == stop:
        last, stop = at + 1, runs[at].stop
    runs[first:last] = [Block(start, stop)]
