"""Who gets the next block: the ledger's blocks, sized by pacing, filled by the loader.

A lease exists from the moment it is granted; it is sent once its data has been read. Workers with nothing in hand are
served before those that want one lease ahead, and the step after the current one is leased ahead too: its data
travels while the version it needs is still being made. When nothing of the current step is left, a worker without work
backs up a lease that is late.

Nothing here goes through all workers or all leases. A worker waits in a queue from when it has room until it has none,
one queue for each number of leases it has; where nothing is free nobody is looked at. Leases that may become late wait
in a heap, filled once a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from w5xde_async.data.loader import Loader
from w5xde_async.plan.ledger import BlockGrant, Ledger
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.tree import Block, right_half
from w5xde_async.wire.frame import Buffer, BufferSpec
from w5xde_async.wire.messages import Lease


class Sendable(NamedTuple):
    """A LEASE with its data."""

    message: Lease
    buffers: list[tuple[BufferSpec, Buffer]]


class LeaseScheduler:
    """Grants leases and pairs them with their data. Knows no sessions."""

    def __init__(self, ledger: Ledger, pacing: Pacing, loader: Loader, *, at_most_half: bool = False) -> None:
        """``at_most_half``: no lease holds leaves of both halves of its step, which are measured."""
        self._ledger, self._pacing, self._loader = ledger, pacing, loader
        self._fresh: list[BlockGrant] = []  # granted since ``leases`` was last called
        self.unread: dict[int, BlockGrant] = {}  #: leases whose data had not been read, some that have ended among them
        self._awaiting: dict[tuple[int, Block], list[BlockGrant]] = {}  # the same by what is being read
        self._most_unread = 64  # more of them are looked through for such as will never be read
        self._workers: dict[str, None] = {}  # that take work
        # Who may have room: for the current step alone, and for any. Indexed by the worker's lease count when it was
        # queued; stale entries are moved when they are taken.
        self._current: list[dict[str, None]] = []
        self._any: list[dict[str, None]] = []
        self._refused: dict[str, None] = {}  # who could be given nothing of what there was
        self._late: list[tuple[float, int]] = []  # heap: from when a lease of the current step is late at the earliest
        self._late_step, self._late_by_speed = -1, False  # of what the heap says it; whether speeds were known then
        self._timed: dict[str, None] = {}  # workers whose leases are late at another time than the heap says
        self._free_since: dict[str, float] = {}  # worker -> when its last lease was done
        self._ahead = pacing.config.leases_ahead
        self._at_most_half = at_most_half
        self._gave_back = False
        self.look_again_at = math.inf  #: when a lease of the current step will be late enough for a backup

    def takes_work(self, worker: str, does: bool) -> None:
        """``worker`` takes work from now on, or no more."""
        self._pacing.takes_work(worker, does)
        self._ledger.watch(worker, does)
        if does:
            self._workers[worker] = self._timed[worker] = None
            self._queue(worker)
        else:
            self._workers.pop(worker, None)  # from the queues when it is its turn

    def forget(self, worker: str) -> None:
        """The worker is gone: so is what was known of its speed."""
        self._pacing.forget(worker)
        self._free_since.pop(worker, None)

    def observe(self, grant: BlockGrant, compute_s: float, now: float) -> None:
        """A lease of the current step was done, in ``compute_s`` on the worker."""
        began = max(self._ledger.began_at(grant), self._free_since.get(grant.worker, -math.inf))
        self._pacing.observe(grant.worker, grant.block.num_leaves, compute_s, taken_s=now - began)
        self._free_since[grant.worker] = now
        self._timed[grant.worker] = None

    def overtaken(self, grant: BlockGrant, now: float) -> None:
        """Another worker has finished the block of a lease of the current step."""
        began = max(self._ledger.began_at(grant), self._free_since.get(grant.worker, -math.inf))
        self._pacing.overtaken(grant.worker, grant.block.num_leaves, now - began)
        self._timed[grant.worker] = None

    def observe_late(self, grant: BlockGrant, compute_s: float, now: float) -> None:
        """A lease that had ended was done after all: deadlines learn from it too, so that one too short gets longer."""
        self._pacing.observe_late(grant.worker, grant.block.num_leaves, compute_s, now - grant.granted_at)
        self._free_since[grant.worker] = now
        self._timed[grant.worker] = None

    def send(self, grant: BlockGrant) -> None:
        """A lease that somebody else has granted: ``leases`` gives it out with its data."""
        self._fresh.append(grant)

    def leases(
        self,
        steps: Sequence[int],
        now: float,
        *,
        has_credit: Callable[[str], bool],
        again: bool = False,
        hold_back: bool = False,
    ) -> Iterator[tuple[str, Sendable]]:
        """Leases to send now, on ``steps`` (the current one first), to workers that have credit.

        ``again``: who could be given nothing the last times may get something now. ``hold_back``: nothing more of the
        current step is leased, since too much of it waits for verification.
        """
        if again:
            self._look_again()
        for worker in self._ledger.eased():
            self._queue(worker)
        if steps:
            self._grant(steps, now, has_credit, hold_back)
            self._back_up(steps[0], now, has_credit)
        fresh, self._fresh = self._fresh, []
        yield from self._send(fresh)

    def gave_back(self) -> bool:
        """Whether a lease was too large to be sent since the last call: its leaves are to be leased anew."""
        gave_back, self._gave_back = self._gave_back, False
        return gave_back

    def read(self) -> Iterator[tuple[str, Sendable]]:
        """Leases to send now because their data has come."""
        yield from self._send([grant for block in self._loader.came() for grant in self._awaiting.pop(block, ())])

    def _send(self, grants: Sequence[BlockGrant]) -> Iterator[tuple[str, Sendable]]:
        for grant in grants:
            if self._ledger.get(grant.lease) is not grant:
                self.unread.pop(grant.lease, None)
                continue  # given back meanwhile
            data = self._loader.data(grant.step, grant.block)
            if data is None:
                self.unread[grant.lease] = grant
                self._awaiting.setdefault((grant.step, grant.block), []).append(grant)
                continue
            self.unread.pop(grant.lease, None)
            if data.too_large and self._ledger.untouched(grant.lease):
                self._ledger.give_back(grant.lease)
                self._gave_back = True
                continue
            message = Lease(
                grant.lease, grant.step, grant.step, grant.block.start, data.samples, grant.deadline_s, data.packed,
                data.structure,
            )  # fmt: skip
            yield grant.worker, Sendable(message, data.buffers)

    def _look_again(self) -> None:
        refused, self._refused = self._refused, {}
        if self._ahead != self._pacing.config.leases_ahead:  # who had no room may have some now
            self._ahead = self._pacing.config.leases_ahead
            refused = dict(self._workers)
        for worker in refused:
            self._queue(worker)
        if len(self.unread) > self._most_unread:  # what was given back, or whose step was closed, may never be read
            for grant in [grant for grant in self.unread.values() if self._ledger.get(grant.lease) is not grant]:
                del self.unread[grant.lease]
                self._awaiting.pop((grant.step, grant.block), None)
            self._most_unread = 2 * len(self.unread) + 64

    # -- who is next ---------------------------------------------------------------------------------------

    def _queue(self, worker: str, queue: list[dict[str, None]] | None = None, held: int = 0) -> None:
        """``worker`` may have room."""
        if held >= self._pacing.config.leases_ahead:
            return
        for known in (self._current, self._any) if queue is None else (queue,):
            while len(known) <= held:
                known.append({})
            known[held][worker] = None

    def _next(self, queue: list[dict[str, None]], room: int, step: int | None) -> str | None:
        """Take from a queue the first worker that has ``room`` leases (of those up to ``step``)."""
        ledger = self._ledger
        waiting = queue[room] if room < len(queue) else {}
        while waiting:
            worker = next(iter(waiting))
            del waiting[worker]
            held = ledger.num_held(worker) if step is None else ledger.num_held_up_to(worker, step)
            if worker not in self._workers:
                continue
            if held == room:
                return worker
            self._queue(worker, queue, held)
        return None

    def _grant(self, steps: Sequence[int], now: float, has_credit: Callable[[str], bool], hold_back: bool) -> None:
        for room in range(self._pacing.config.leases_ahead):
            for step in steps:
                current = step == steps[0]
                if current and hold_back:
                    continue
                # Leases of a later step do not count: what an earlier one needs now must find a place.
                queue, up_to = (self._current, step) if current else (self._any, None)
                for held in range(room + 1):
                    while self._ledger.free_leaves(step) and (worker := self._next(queue, held, up_to)) is not None:
                        if has_credit(worker) and self._grant_one(worker, step, now, current=current):
                            self._queue(worker, queue, held + 1)
                        else:
                            self._refused[worker] = None

    def _grant_one(self, worker: str, step: int, now: float, *, current: bool) -> bool:
        """Lease ``worker`` a block of ``step``. False where there is none for it."""
        ledger, pacing = self._ledger, self._pacing
        free, step_leaves = ledger.free_leaves(step), ledger.num_leaves(step)
        leaves = pacing.block_leaves(worker, free, step_leaves=step_leaves)
        leaves = min(leaves, self._loader.max_block_leaves)
        if self._at_most_half:
            leaves = min(leaves, max(1, right_half(step_leaves)))
        if current and pacing.unequal:
            leaves = min(leaves, self._most_in_time(worker, step, free, now))
        elif not current:  # leaves beyond its share are for workers that are still busy with the current step
            leaves = min(leaves, pacing.fair_leaves(worker, step_leaves) - ledger.num_held_leaves(worker, step))
        if leaves < 1:
            return False
        deadline_s = pacing.deadline_s(worker, leaves)
        grant = ledger.grant(worker, step, leaves, now=now, deadline_s=deadline_s, others=self._workers.keys())
        if grant is None:
            return False
        self._fresh.append(grant)
        self._timed[worker] = None
        return True

    def _most_in_time(self, worker: str, step: int, free: int, now: float) -> int:
        """Leaves of the current step that this worker may take without holding the others up at its end."""
        ledger = self._ledger
        everybodys = ledger.held_leaves(step)
        if not everybodys:
            return free  # nobody is at it
        held, elapsed_s = ledger.num_held_leaves(worker, step), now - ledger.opened_at(step)
        return self._pacing.in_time(worker, held, everybodys - held, free, ledger.num_leaves(step), elapsed_s)

    # -- backups -------------------------------------------------------------------------------------------

    def _back_up(self, step: int, now: float, has_credit: Callable[[str], bool]) -> None:
        ledger, self.look_again_at = self._ledger, math.inf
        if ledger.free_leaves(step) or ledger.complete(step):
            return
        while (first := self._first_late(step)) is not None:
            if (worker := self._next(self._current, 0, step)) is None:
                return
            if not has_credit(worker):
                self._refused[worker] = None
                continue
            at, lease = first
            if at > now:
                self._queue(worker, self._current)
                self.look_again_at = at
                return
            if not ledger.may_back_up(lease, worker):  # it has failed on it
                other = self._first_for(worker, step, now)
                if other is None:
                    self._refused[worker] = None
                    continue
                lease = other
            late = ledger.get(lease)
            assert late is not None
            deadline_s = self._pacing.deadline_s(worker, late.block.num_leaves)
            self._fresh.append(ledger.back_up(lease, worker, now=now, deadline_s=deadline_s))
            self._queue(worker, self._current, 1)

    def _first_for(self, worker: str, step: int, now: float) -> int | None:
        """The lease that is late for longest of those that ``worker`` may back up."""
        late = [
            (at, grant.lease) for grant in self._ledger.leases_on(step)
            if self._ledger.may_back_up(grant.lease, worker) and (at := self._late_at(grant)) is not None and at <= now
        ]  # fmt: skip
        return min(late)[1] if late else None

    def _first_late(self, step: int) -> tuple[float, int] | None:
        """Which lease of ``step`` is late first, and from when; None where that cannot be said of any."""
        ledger = self._ledger
        by_speed = self._pacing.fastest_leaf_s is not None
        if (self._late_step, self._late_by_speed) != (step, by_speed):
            self._late_step, self._late_by_speed, self._late = step, by_speed, []
            self._timed = dict.fromkeys(grant.worker for grant in ledger.leases_on(step))
        timed, self._timed = self._timed, {}
        for worker in timed:
            for held in ledger.held(worker):
                if held.step == step and (late_at := self._late_at(held)) is not None:
                    heapq.heappush(self._late, (late_at, held.lease))
        while self._late:
            at, lease = self._late[0]
            grant = ledger.get(lease)
            if grant is not None and grant.step == step and ledger.unbacked(lease):
                now_at = self._late_at(grant)
                if now_at is not None and now_at <= at:
                    return now_at, lease
                if now_at is not None:
                    heapq.heapreplace(self._late, (now_at, lease))
                    continue
            heapq.heappop(self._late)
        return None

    def _late_at(self, lease: BlockGrant) -> float | None:
        """From when a lease is late; a worker's leases are computed one after the other."""
        if lease.worker not in self._workers:
            return None
        at = self._free_since.get(lease.worker, -math.inf)
        for grant in self._ledger.held(lease.worker):
            late_s = self._pacing.late_s(grant.worker, grant.block.num_leaves)
            if grant.step != lease.step:
                return None
            if late_s is None:  # nothing is known of anybody: one that hangs with the whole first step holds none up
                late_s = self._pacing.config.min_deadline_s
            at = max(at, self._ledger.began_at(grant)) + late_s
            if grant is lease:
                return at
        return None
