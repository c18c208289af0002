"""Leases, deadlines, exactly-once: who computes which block, and what has arrived.

Invariants, checked by ``validate`` in tests:
  - every leaf of an open step is in exactly one place: free, in one unfinished block, or in one finished block;
  - a (block, bucket) slot is filled once; a second arrival is a duplicate;
  - a lease that was returned, revoked or outlived by its step is stale, for ever;
  - a block has at most two open leases: its own and a backup, which another worker holds;
  - an audit is a lease on a finished block beside these: what it fills is its own and finishes nothing.

Nothing that is asked for each lease goes through a step's leaves or all workers' leases: what is free, half done or
held of a step is counted as it changes.

Which buckets a block still lacks is kept here as far as leasing needs it: a block of which something has come is leased
whole again, and one that lacks something is not finished. Where they lie, who has sent them and what is being received
is known to the block store (``hub.work.block_store``).

Time is an argument. What this room does not do: hold tensors, know workers beyond their id, choose block sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from w5xde_async.plan.attempts import Places
from w5xde_async.plan.tree import Block, aligned_block

__all__ = ["COORDINATOR", "FailedWork", "Grant", "Ledger", "OpenStep", "Slot"]

COORDINATOR = ""  #: the worker whose leases the coordinator computes itself
_REMEMBERED = 4096  # leases that ended, by which late results are told from noise


@dataclass(slots=True)
class Slot:
    """One block that was leased: its filled buckets and, while somebody works on it, the lease.

    ``contested``: two workers have computed it at once, so a bucket of either may have been turned away.
    """

    block: Block
    buckets: set[int] = field(default_factory=set)
    lease: int | None = None
    backup: int | None = None
    contested: bool = False
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease as given out. ``deadline`` is on the caller's clock, from when the step became computable."""

    lease: int
    step: int
    block: Block
    worker: str
    granted_at: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class FailedWork:
    """A leaf that failed more often than allowed; ``died`` when workers vanished on it rather than reported."""

    step: int
    leaf: int
    attempts: int
    died: bool


@dataclass(slots=True)
class OpenStep:
    """One step that is being worked on."""

    step: int
    num_leaves: int
    opened_at: float
    free: list[Block]  # maximal free runs, ascending; not aligned
    free_leaves: int  # that nobody holds, those of half-filled blocks among them
    slots: dict[int, Slot] = field(default_factory=dict)  # first leaf -> slot
    orphans: dict[int, Slot] = field(default_factory=dict)  # those that are half-filled and nobody holds
    leases: dict[int, Grant] = field(default_factory=dict)  # open ones, in order
    held_leaves: int = 0  # in these
    failures: dict[int, list[str]] = field(default_factory=dict)  # leaf -> workers that failed on it
    # Leaf -> workers that vanished on it, and whether results of theirs had counted.
    deaths: dict[int, dict[str, bool]] = field(default_factory=dict)
    finished_leaves: int = 0

    @property
    def complete(self) -> bool:
        return self.finished_leaves == self.num_leaves


class Ledger:
    """The book of all open leases. At most ``max_open_steps`` steps are open at once (the current and those ahead)."""

    def __init__(
        self,
        *,
        num_buckets: int,
        max_open_steps: int = 2,
        max_failures: int = 3,
        max_deaths: int = 8,
        first_lease: int = 1,
        present: Callable[[], Iterable[str]] = tuple,
        allowed_s: Callable[[Grant], float] = lambda grant: grant.deadline_s,
    ) -> None:
        """``first_lease``: leases are numbered from here on; terms that do not overlap make them unique in a run.

        ``present``: workers that take work now. ``allowed_s``: how long a lease may take, where that has changed since
        it was given.
        """
        self.num_buckets = num_buckets
        self.max_open_steps = max_open_steps
        self.max_failures = max_failures
        self.max_deaths = max_deaths
        self.places = Places(present)
        self._allowed_s = allowed_s
        self._steps: dict[int, OpenStep] = {}
        self._grants: dict[int, Grant] = {}
        self._next_lease = first_lease
        self._held: dict[str, list[int]] = {}
        self._watched: set[str] = set()
        self._eased: dict[str, None] = {}  # of those, who has had a lease less since somebody asked
        self._ended: deque[int] = deque()
        self._past: dict[int, tuple[Grant, bool]] = {}  # the last leases that ended, and whether finished
        self._audits: dict[int, Slot] = {}  # lease -> what an audit has filled

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def open_steps(self) -> list[int]:
        """Numbers of the open steps, the current one first."""
        return list(self._steps)

    def open(self, step: int, num_leaves: int, now: float) -> None:
        """Begin ``step``; all its leaves are free."""
        if step in self._steps or len(self._steps) >= self.max_open_steps:
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

    def complete(self, step: int) -> bool:
        """True when every leaf of ``step`` lies in a finished block."""
        return self._steps[step].complete

    def num_leaves(self, step: int) -> int:
        """Leaves of an open step."""
        return self._steps[step].num_leaves

    def free_leaves(self, step: int) -> int:
        """Leaves of ``step`` that nobody holds."""
        return self._steps[step].free_leaves

    def held_leaves(self, step: int) -> int:
        """Leaves of ``step`` in open leases, twice where two workers have them."""
        return self._steps[step].held_leaves

    def leases_on(self, step: int) -> Collection[Grant]:
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

    def get(self, lease: int) -> Grant | None:
        """An open lease, or None when it is not open (any more)."""
        return self._grants.get(lease)

    def held(self, worker: str) -> list[Grant]:
        """Open leases of a worker, oldest first."""
        return [self._grants[lease] for lease in self._held.get(worker, ())]

    def num_held(self, worker: str, *, up_to_step: int | None = None) -> int:
        """Open leases of a worker; with ``up_to_step`` only those that come before later steps'."""
        held = self._held.get(worker, ())
        if up_to_step is None:
            return len(held)
        return sum(self._grants[lease].step <= up_to_step for lease in held)

    @property
    def num_open(self) -> int:
        return len(self._grants)

    def past(self, worker: str, lease: int) -> Grant | None:
        """A lease of ``worker`` that ended not long ago (the last few thousand are remembered)."""
        grant, _ = self._past.get(lease, (None, False))
        return grant if grant is not None and grant.worker == worker else None

    def is_duplicate(self, lease: int) -> bool:
        """True when that lease ended because its block was finished, by itself or by the other one on it."""
        return self._past.get(lease, (None, False))[1]

    def contested(self, lease: int) -> bool:
        """True when another worker has computed the block of this open lease too."""
        return self._slot(self._grants[lease]).contested

    def opened_at(self, step: int) -> float:
        """When an open step became computable, or was opened."""
        return self._steps[step].opened_at

    def num_held_leaves(self, worker: str, step: int) -> int:
        """Leaves of ``step`` in the open leases of a worker."""
        held = (self._grants[lease] for lease in self._held.get(worker, ()))
        return sum(grant.block.num_leaves for grant in held if grant.step == step)

    def began_at(self, grant: Grant) -> float:
        """When the lease could be begun at the earliest: granted, and its step computable."""
        return max(grant.granted_at, self._steps[grant.step].opened_at)

    def may_back_up(self, lease: int, worker: str) -> bool:
        """Whether ``worker`` could back up an open lease: another's, never backed up yet, not failed on by it."""
        grant = self._grants[lease]
        if grant.worker == worker or not self.unbacked(lease):
            return False
        failures = self._steps[grant.step].failures
        return not (failures and any(worker in failures.get(leaf, ()) for leaf in range(*grant.block)))

    def unbacked(self, lease: int) -> bool:
        """Whether nobody has backed up an open lease yet. Audits are not backed up."""
        return lease not in self._audits and not self._slot(self._grants[lease]).contested

    def back_up(self, lease: int, worker: str, *, now: float, deadline_s: float) -> Grant:
        """Lease the block of ``lease`` to a second worker too; whoever has it done first is paid."""
        grant = self._grants[lease]
        slot = self._slot(grant)
        if slot.contested or grant.worker == worker:
            raise ValueError(f"lease {lease} of {grant.worker} cannot be backed up by {worker}")
        second = self._enter(grant.step, slot, worker, now, deadline_s)
        slot.backup, slot.contested = second.lease, True
        return second

    def audit(self, step: int, block: Block, worker: str, *, now: float, deadline_s: float) -> Grant:
        """Lease a finished block of an open step once more, to compare. It counts in no sum of the ledger's."""
        slot = Slot(block)
        grant = self._enter(step, slot, worker, now, deadline_s)
        slot.lease = grant.lease
        self._audits[grant.lease] = slot
        return grant

    def is_audit(self, lease: int) -> bool:
        """True for an open lease that ``audit`` gave."""
        return lease in self._audits

    def reopen(self, step: int, block: Block, worker: str) -> None:
        """A finished block of ``worker`` did not hold: nothing of it is filled, and its leaves are for others first."""
        opened = self._steps[step]
        slot = opened.slots.pop(block.start)
        if not slot.finished:
            raise ValueError(f"{block} of step {step} is not finished")
        opened.finished_leaves -= block.num_leaves
        opened.free_leaves += block.num_leaves
        for leaf in range(*block):
            opened.failures.setdefault(leaf, []).append(worker)
        _add_run(opened.free, block)

    def unfill(self, step: int, start: int, buckets: Iterable[int]) -> None:
        """What an unfinished block got from a worker that is not believed any more is missing again."""
        opened = self._steps[step]
        slot = opened.slots[start]
        slot.buckets.difference_update(buckets)
        slot.contested = True  # who has it now may have had a bucket turned away that is missing again
        if slot.lease is None and slot.backup is None and not slot.buckets:
            del opened.slots[start]
            opened.orphans.pop(start, None)
            _add_run(opened.free, slot.block)

    def grant(
        self, worker: str, step: int, max_leaves: int, *, now: float, deadline_s: float, others: Collection[str] = ()
    ) -> Grant | None:
        """Lease ``worker`` the first free block of ``step``, of at most ``max_leaves`` leaves.

        Half-filled blocks go first, whole as they were. A leaf that failed on ``worker`` is left to ``others`` while
        there are any.
        """
        opened = self._steps[step]
        for slot in opened.orphans.values():
            if not self._shuns(opened, slot.block, worker, others):
                return self._lease(opened, slot, worker, now, deadline_s)
        for position, run in enumerate(opened.free):
            start = run.start
            while start < run.stop:
                block = aligned_block(start, run.stop, opened.num_leaves, max_leaves)
                block = self._isolate(opened, block)
                if not self._shuns(opened, block, worker, others):
                    left, right = Block(run.start, block.start), Block(block.stop, run.stop)
                    opened.free[position : position + 1] = [part for part in (left, right) if part.num_leaves]
                    slot = opened.slots[block.start] = Slot(block)
                    return self._lease(opened, slot, worker, now, deadline_s)
                start = block.stop
        return None

    def fill(self, lease: int, bucket: int) -> bool:
        """Fill slot (block of ``lease``, ``bucket``). False when it was filled before (a duplicate)."""
        slot = self._slot(self._grants[lease])
        if bucket in slot.buckets:
            return False
        slot.buckets.add(bucket)
        return True

    def filled(self, lease: int, bucket: int) -> bool:
        """True when the slot is filled already."""
        return bucket in self._slot(self._grants[lease]).buckets

    def missing(self, lease: int) -> list[int]:
        """Buckets of the lease's block that nobody has filled yet."""
        filled = self._slot(self._grants[lease]).buckets
        return [bucket for bucket in range(self.num_buckets) if bucket not in filled]

    def finish(self, lease: int) -> Grant | None:
        """The lease is done and all its buckets are filled: its block is finished.

        Returns the other lease on the block, which is stale from now on, where there was one.
        """
        grant = self._grants[lease]
        slot = self._slot(grant)
        if len(slot.buckets) != self.num_buckets:
            raise ValueError(f"lease {lease} is not complete")
        if self._audits.pop(lease, None) is not None:
            self._drop(lease, finished=True)
            return None
        other = slot.backup if slot.lease == lease else slot.lease
        slot.finished, slot.lease, slot.backup = True, None, None
        self._steps[grant.step].finished_leaves += slot.block.num_leaves
        self._drop(lease, finished=True)
        return None if other is None else self._drop(other, finished=True)

    def give_back(self, lease: int) -> Grant:
        """The lease ends unfinished: its leaves are free again (its filled slots stay filled), or its backup's."""
        grant = self._grants[lease]
        opened, slot = self._steps[grant.step], self._slot(grant)
        self._drop(lease)
        if self._audits.pop(lease, None) is not None:
            return grant
        if slot.backup is not None:
            slot.lease, slot.backup = (slot.backup if slot.lease == lease else slot.lease), None
            return grant
        slot.lease = None
        opened.free_leaves += slot.block.num_leaves
        if slot.buckets:
            opened.orphans[slot.block.start] = slot
        else:
            del opened.slots[slot.block.start]
            _add_run(opened.free, slot.block)
        return grant

    def fail(self, lease: int, leaf: int) -> FailedWork | None:
        """The job raised on ``leaf`` of the lease. The lease goes back.

        A leaf that failed too often is returned, once nobody is left whose word would count for more.
        """
        grant = self.give_back(lease)
        opened = self._steps[grant.step]
        failures = opened.failures.setdefault(leaf, [])
        failures.append(grant.worker)
        if self.places.fails(failures, self.max_failures):
            return FailedWork(grant.step, leaf, len(failures), died=False)
        return None

    def lose(self, worker: str, *, died: bool = True) -> tuple[list[Grant], FailedWork | None]:
        """The worker is gone: all its leases go back. A leaf on which too many workers died is returned as well.

        ``died`` is False for one that was given up: silence says nothing about the leaf it had. Workers are counted,
        not their links: ``returned`` takes one back. Only the oldest lease of a computable step counts against its
        leaves: the others had not been begun.
        """
        grants = [self.give_back(lease) for lease in tuple(self._held.get(worker, ()))]
        failed_work = None
        current = next(iter(self._steps.values()), None)
        begun = next((grant for grant in grants if current is not None and grant.step == current.step), None)
        if died and current is not None and begun is not None:
            # Buckets leave with a block's last leaf; where one is filled, that leaf is to blame.
            block = begun.block
            slot = current.slots.get(block.start)
            suspects = range(block.stop - 1, block.stop) if slot is not None and slot.buckets else range(*block)
            for leaf in suspects:
                deaths = current.deaths.setdefault(leaf, {})
                deaths[worker] = self.places.has_delivered(worker)
                if len(suspects) == 1 and self.places.kills(deaths, self.max_deaths):
                    failed_work = FailedWork(current.step, leaf, len(deaths), died=True)
        return grants, failed_work

    def returned(self, worker: str) -> None:
        """The worker is here again: it had lost its link, not its life."""
        for opened in self._steps.values():
            for deaths in opened.deaths.values():
                deaths.pop(worker, None)

    def take_over(self, step: int, leaf: int, *, now: float) -> Grant | None:
        """Lease the coordinator a leaf, in the block that it was sent in where something of that is filled.

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

    def overdue(self, now: float) -> list[Grant]:
        """Leases of the current step whose deadline has passed."""
        current = next(iter(self._steps.values()), None)
        if current is None:
            return []
        return [grant for grant in current.leases.values() if self.began_at(grant) + self._allowed_s(grant) <= now]

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
                assert not slot.finished or len(slot.buckets) == self.num_buckets
        assert set(self._audits) <= set(self._grants)
        assert sorted(self._grants) == sorted(lease for held in self._held.values() for lease in held)

    # -- inner ---------------------------------------------------------------------------------------------

    def _slot(self, grant: Grant) -> Slot:
        return self._audits.get(grant.lease) or self._steps[grant.step].slots[grant.block.start]

    def _lease(self, opened: OpenStep, slot: Slot, worker: str, now: float, deadline_s: float) -> Grant:
        grant = self._enter(opened.step, slot, worker, now, deadline_s)
        slot.lease, slot.contested = grant.lease, False
        opened.orphans.pop(slot.block.start, None)
        opened.free_leaves -= slot.block.num_leaves
        return grant

    def _enter(self, step: int, slot: Slot, worker: str, now: float, deadline_s: float) -> Grant:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        grant = self._grants[lease] = Grant(lease, step, slot.block, worker, now, deadline_s)
        self._held.setdefault(worker, []).append(lease)
        opened = self._steps[step]
        opened.leases[lease] = grant
        opened.held_leaves += slot.block.num_leaves
        return grant

    def _drop(self, lease: int, *, finished: bool = False) -> Grant:
        grant = self._grants.pop(lease)
        held = self._held[grant.worker]
        held.remove(lease)
        if not held:
            del self._held[grant.worker]
        if grant.worker in self._watched:
            self._eased[grant.worker] = None
        opened = self._steps.get(grant.step)
        if opened is not None:
            del opened.leases[lease]
            opened.held_leaves -= grant.block.num_leaves
        self._ended.append(lease)
        self._past[lease] = (grant, finished)
        if len(self._ended) > _REMEMBERED:
            del self._past[self._ended.popleft()]
        return grant

    def _shuns(self, opened: OpenStep, block: Block, worker: str, others: Collection[str]) -> bool:
        if not opened.failures:
            return False
        return any(self.places.leaves(worker, opened.failures.get(leaf, ()), others) for leaf in range(*block))

    def _isolate(self, opened: OpenStep, block: Block) -> Block:
        """A leaf that failed, or on which workers died twice, is leased alone, so that it alone is to blame."""
        if block.num_leaves == 1 or not (opened.failures or opened.deaths):
            return block
        suspects = [leaf for leaf in range(*block) if leaf in opened.failures or len(opened.deaths.get(leaf, ())) > 1]
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
