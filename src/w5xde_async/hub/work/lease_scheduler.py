"""Who gets the next block: the ledger's blocks, sized by pacing, filled by the loader.

A lease exists from the moment it is granted; it is sent once its data has been read. Workers with nothing in hand are
served before those that want one lease ahead, and the step after the current one is leased ahead too: its data
travels while the version it needs is still being made. When nothing of the current step is left, a worker without work
backs up a lease that is late.

Where a result takes longer on some worker's line than a leaf to compute, a step is dealt out at once
(``plan.sharing``). Otherwise nothing here goes through all workers or all leases. A worker waits in a queue from when
it has room until it has none, one queue for each number of leases it has; where nothing is free nobody is looked at.
Leases that may become late wait in a heap, filled once a step.

Steps so short that they are not shared out go to one worker for ``TURN_S``, then to the one that has waited longest:
who has no lease is sent no parameters, and the next lease lies with the worker that makes its version.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from w5xde_async.data.loader import BlockData, Loader
from w5xde_async.plan.ledger import BlockGrant, Ledger
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.sharing import finish_s, share_out
from w5xde_async.plan.tree import Block, right_half
from w5xde_async.wire.frame import Buffer, BufferSpec
from w5xde_async.wire.messages import Lease

TURN_S = 0.1  #: some hundred steps, and handing over costs about one


class Sendable(NamedTuple):
    """A LEASE with its data."""

    message: Lease
    buffers: list[tuple[BufferSpec, Buffer]]


@dataclass(slots=True)
class _Plan:
    """Who is to have what of a step. ``served``: who has had its part, or some of it. ``fair_s``: seconds that the step
    would take if its leaves could be cut as one likes."""

    workers: frozenset[str]
    blocks: dict[str, list[Block]]
    served: set[str]
    fair_s: float

    def outdated(self, worker: str, runs: Sequence[Block], workers: Collection[str], *, waited: bool) -> bool:
        """Whether things are not as they were planned, as far as ``worker`` is concerned. ``waited``: for others."""
        own = self.blocks.get(worker)
        if own:
            return not any(run.start <= own[-1].start and own[-1].stop <= run.stop for run in runs)
        theirs = [other for other, blocks in self.blocks.items() if blocks]
        return waited or worker not in self.workers or not theirs or not all(other in workers for other in theirs)


class LeaseScheduler:
    """Grants leases and pairs them with their data. Knows no sessions."""

    def __init__(
        self, ledger: Ledger, pacing: Pacing, loader: Loader, *, at_most_half: bool = False,
        granted: Callable[[BlockGrant], None] = lambda grant: None,
        there: Callable[[BlockGrant], tuple[int, ...]] = lambda grant: (),
        beyond: Callable[[BlockGrant, BlockData], bool] = lambda grant, data: False,
        revoke: Callable[[BlockGrant], None] = lambda grant: None,
    ) -> None:  # fmt: skip
        """``at_most_half``: no lease holds leaves of both halves of its step, which are measured. ``granted`` is told
        of each lease before its data is read. ``there``: result buckets that have come of its block. ``beyond``:
        whether its worker cannot compute it, now that its data is known; then it has gone back. ``revoke`` takes one
        back of which its worker has been told."""
        self._ledger, self._pacing, self._loader = ledger, pacing, loader
        self._fresh: list[BlockGrant] = []  # granted since ``leases`` was last called
        self.unread: dict[int, BlockGrant] = {}  #: leases whose data had not been read, some that have ended among them
        self.known: set[int] = set()  #: of ``unread``, those that their workers have been told of
        self._awaiting: dict[tuple[int, Block], list[BlockGrant]] = {}  # the same by what is being read
        self._most_unread = 64  # more of them are looked through for such as will never be read
        self._workers: dict[str, None] = {}  # that take work
        # Who may have room: for the current step alone, and for any. Indexed by the worker's lease count when it was
        # queued; stale entries are moved when they are taken.
        self._current: list[dict[str, None]] = []
        self._known: list[dict[str, None]] = []  # those of ``_current`` that have finished a lease
        self._any: list[dict[str, None]] = []
        self._refused: dict[str, None] = {}  # who could be given nothing of what there was
        self._late: list[tuple[float, int]] = []  # heap: from when a lease of the current step is late at the earliest
        self._late_step, self._late_by_speed = -1, False  # of what the heap says it; whether speeds were known then
        self._timed: dict[str, None] = {}  # workers whose leases are late at another time than the heap says
        self._free_since: dict[str, float] = {}  # worker -> when its last lease was done
        self._plans: dict[int, _Plan] = {}  # by step, where lines are slow
        self._left_out: dict[str, int] = {}  # workers whose line is too slow to be of use -> in which step
        self._turn: tuple[str, float] | None = None  # who computes whole steps now, and until when
        self._ahead = pacing.config.leases_ahead
        self._at_most_half, self._granted, self._there, self._beyond = at_most_half, granted, there, beyond
        self._revoke = revoke
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
            self._workers.pop(worker, None)  # from the queues when it is its turn, or is gone

    def left(self, worker: str) -> None:
        """The worker is gone."""
        self._pacing.left(worker)
        self._free_since.pop(worker, None)
        for queue in (self._refused, self._timed, *self._current, *self._known, *self._any):
            queue.pop(worker, None)
        self._left_out.pop(worker, None)

    def observe(self, grant: BlockGrant, compute_s: float, now: float, *, result_s: float | None = None) -> None:
        """A lease of the current step was done, in ``compute_s`` on the worker; its results took ``result_s``."""
        began = max(self._ledger.began_at(grant), self._free_since.get(grant.worker, -math.inf))
        self._pacing.observe(grant.worker, grant.block.num_leaves, compute_s, taken_s=now - began, result_s=result_s)
        self._free_since[grant.worker] = now
        self._timed[grant.worker] = None

    def overtaken(self, grant: BlockGrant, now: float) -> None:
        """Another worker has finished the block of a lease of the current step."""
        began = max(self._ledger.began_at(grant), self._free_since.get(grant.worker, -math.inf))
        self._pacing.overtaken(grant.worker, grant.block.num_leaves, now - began)
        self._timed[grant.worker] = None

    def observe_late(self, grant: BlockGrant, compute_s: float, now: float, *, result_s: float | None = None) -> None:
        """A lease that had ended was done after all: deadlines learn from it too, so that one too short gets longer."""
        leaves, taken_s = grant.block.num_leaves, now - grant.granted_at
        self._pacing.observe_late(grant.worker, leaves, compute_s, taken_s, result_s=result_s)
        self._free_since[grant.worker] = now
        self._timed[grant.worker] = None

    def send(self, grant: BlockGrant) -> None:
        """A lease that somebody else has granted: ``leases`` gives it out with its data."""
        self._fresh.append(grant)

    def grant_again(self, worker: str, lease: int, now: float) -> None:
        """``worker`` has still what it computed under a lease that ended: it has the block again, if that is free and
        it has not as many as a worker may have."""
        past = self._ledger.past(worker, lease)
        if past is None or self._ledger.num_held_up_to(worker, past.step) >= self._pacing.config.leases_ahead:
            return
        deadline_s = self._pacing.deadline_s(worker, past.block.num_leaves)
        grant = self._ledger.grant_again(past, now=now, deadline_s=deadline_s)
        if grant is not None:
            self._fresh.append(grant)
            if (plan := self._plans.get(grant.step)) is not None:
                plan.served.add(worker)

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
        if self._turn is not None and now >= self._turn[1]:
            self._turn = self._next_turn(now)
            again = True
        if again:
            self._look_again()
        for worker in self._ledger.eased():
            self._queue(worker)
        self.look_again_at = math.inf
        if steps:
            self._close_before(steps[0])
            self._grant(steps, now, has_credit, hold_back)
            self._back_up(steps[0], now, has_credit)
        fresh, self._fresh = self._fresh, []
        for grant in fresh:
            self._granted(grant)
        yield from self._send(fresh, now)

    def gave_back(self) -> bool:
        """Whether a lease was not sent after all since the last call: its leaves are to be leased anew."""
        gave_back, self._gave_back = self._gave_back, False
        return gave_back

    def read(self, now: float) -> Iterator[tuple[str, Sendable]]:
        """Leases to send now because their data has come."""
        came = [grant for block in self._loader.came() for grant in self._awaiting.pop(block, ())]
        yield from self._send(came, now)

    def send_data(self, grant: BlockGrant, now: float) -> Iterator[tuple[str, Sendable]]:
        """A lease that named samples, once more with them; at once, or when they have been read."""
        self._loader.unread(grant.worker, grant.step, grant.block)
        self.known.add(grant.lease)
        yield from self._send([grant], now)

    def _send(self, grants: Sequence[BlockGrant], now: float) -> Iterator[tuple[str, Sendable]]:
        for grant in grants:
            if self._ledger.get(grant.lease) is not grant:
                self.unread.pop(grant.lease, None)
                self.known.discard(grant.lease)
                continue  # given back meanwhile
            data = self._loader.data(grant.step, grant.block, grant.worker)
            if data is None:
                self.unread[grant.lease] = grant
                self._awaiting.setdefault((grant.step, grant.block), []).append(grant)
                continue
            if self.unread.pop(grant.lease, None) is not None:
                self._ledger.data_came(grant.lease, now)
                self._timed[grant.worker] = None  # from now on it may be late
            told = grant.lease in self.known  # and its worker waits for it
            self.known.discard(grant.lease)
            if data.too_large and self._ledger.untouched(grant.lease):
                self._ledger.give_back(grant.lease)
                if told:
                    self._revoke(grant)
                self._gave_back = True
                continue
            if not told and self._beyond(grant, data):
                self._gave_back = True
                continue
            message = Lease(
                grant.lease, grant.step, grant.step, grant.block.start, data.samples, grant.deadline_s, data.packed,
                data.structure, there=self._there(grant), local=data.local,
                step_samples=data.step_samples,
            )  # fmt: skip
            yield grant.worker, Sendable(message, data.buffers)

    def _close_before(self, step: int) -> None:
        """Steps before ``step`` are over: whose line was too slow for one is tried again some time."""
        for over in [known for known in self._plans if known < step]:
            del self._plans[over]
        for worker in [worker for worker, over in self._left_out.items() if over < step]:
            del self._left_out[worker]
            self._pacing.left_out(worker)

    def _next_turn(self, now: float) -> tuple[str, float] | None:
        """Whose turn it is after the one that is over: of those that could be given nothing, who came first."""
        waiting = (worker for worker in self._refused if worker in self._workers)
        worker = next(waiting, None)
        return None if worker is None else (worker, now + TURN_S)

    def _has_turn(self, worker: str, now: float) -> bool:
        """Whether a step that is not shared out may be ``worker``'s."""
        if self._turn is None or self._turn[0] not in self._workers:
            self._turn = worker, now + TURN_S
        return self._turn[0] == worker

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
                self.known.discard(grant.lease)
                if waiting := self._awaiting.get((grant.step, grant.block)):
                    waiting[:] = [other for other in waiting if other.lease in self.unread]  # leased again meanwhile
                    if not waiting:
                        del self._awaiting[grant.step, grant.block]
            self._most_unread = 2 * len(self.unread) + 64

    # -- who is next ---------------------------------------------------------------------------------------

    def _queue(self, worker: str, queue: list[dict[str, None]] | None = None, held: int = 0) -> None:
        """``worker`` may have room."""
        if held >= self._pacing.config.leases_ahead:
            return
        queues = [self._current, self._any] if queue is None else [queue]
        if queues[0] is self._current and self._pacing.leaf_s(worker) is not None:
            queues.append(self._known)
        for waiting in queues:
            while len(waiting) <= held:
                waiting.append({})
            waiting[held][worker] = None

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
                            if self._turn is not None and self._turn[0] == worker:
                                # Its line is full, or it has failed on what there is: others need not wait for that.
                                self._turn, self.look_again_at = None, min(self.look_again_at, now + TURN_S)

    def _grant_one(self, worker: str, step: int, now: float, *, current: bool) -> bool:
        """Lease ``worker`` a block of ``step``. False where there is none for it."""
        ledger, pacing, start = self._ledger, self._pacing, None
        step_leaves = ledger.num_leaves(step)
        most = self._loader.max_block_leaves
        if self._at_most_half:
            most = min(most, max(1, right_half(step_leaves)))
        if pacing.slow_lines:
            block = self._planned_block(worker, step, most, now, current=current)
            if block is None:
                return False
            leaves, start = 1 << (block.num_leaves - 1).bit_length(), block.start  # more where the step's end cuts it
        else:
            leaves = self._most_leaves(worker, step, now, current=current)
            leaves = min(most, max(leaves, pacing.least_leaves(worker)) if leaves > 0 else 0)
        if leaves < 1:
            return False
        grant = ledger.grant(
            worker, step, leaves, now=now, deadline_s=pacing.deadline_s(worker, leaves),
            others=self._workers.keys(), start=start,
        )  # fmt: skip
        if grant is None:
            return False
        self._fresh.append(grant)
        self._timed[worker] = None
        return True

    def _most_leaves(self, worker: str, step: int, now: float, *, current: bool) -> int:
        """Of the next lease, where results cost little: blocks get smaller towards the step's end."""
        ledger, pacing = self._ledger, self._pacing
        free, step_leaves = ledger.free_leaves(step), ledger.num_leaves(step)
        whole = pacing.takes_whole(worker, step_leaves)
        if whole and not self._has_turn(worker, now):
            return 0
        leaves = pacing.block_leaves(worker, free, step_leaves=step_leaves)
        if whole:
            return leaves
        if current and pacing.unequal:
            return min(leaves, self._most_in_time(worker, step, free, now))
        if current:
            return leaves
        # Leaves beyond its share are for workers that are still busy with the current step.
        return min(leaves, pacing.fair_leaves(worker, step_leaves) - ledger.num_held_leaves(worker, step))

    def _planned_block(self, worker: str, step: int, most: int, now: float, *, current: bool) -> Block | None:
        """The next block of ``step`` that is ``worker``'s, where results cost more than leaves; None where none is."""
        runs, plan = self._ledger.free_runs(step), self._plans.get(step)
        waited = current and plan is not None and now > self._ledger.opened_at(step) + 2 * plan.fair_s
        if plan is None or plan.outdated(worker, runs, self._workers, waited=waited):
            served = set() if plan is None else plan.served
            among = [worker] if waited else [one for one in self._workers if one not in served] or list(self._workers)
            plan = self._plans[step] = self._plan(step, runs, most, among, served)
        blocks = plan.blocks.get(worker)
        if not blocks:
            if worker not in plan.served and self._pacing.cost(worker).lease_s > plan.fair_s:
                self._left_out[worker] = step
            return None
        plan.served.add(worker)
        self._left_out.pop(worker, None)
        return blocks.pop()

    def _plan(self, step: int, runs: Sequence[Block], most: int, among: Sequence[str], served: set[str]) -> _Plan:
        costs = {worker: self._pacing.cost(worker) for worker in among}
        several = [worker for worker in among if not self._pacing.one_lease(worker)]
        step_leaves = self._ledger.num_leaves(step)
        fair_s = finish_s(map(self._pacing.cost, self._workers), step_leaves)
        blocks = share_out(runs, step_leaves, most, costs, several)
        return _Plan(frozenset(among) | served, blocks, served, fair_s)

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
        ledger = self._ledger
        if ledger.free_leaves(step) or ledger.complete(step):
            return
        while (first := self._first_late(step)) is not None:
            # What is late may be with somebody who never answers. The next one is not to be another such: where others
            # than its worker have finished leases before, it waits for one of them.
            holder = ledger.get(first[1])
            assert holder is not None
            someone = self._pacing.num_known > (self._pacing.leaf_s(holder.worker) is not None)
            worker = self._next(self._known if someone else self._current, 0, step)
            if worker is None:
                return
            if not has_credit(worker):
                self._refused[worker] = None
                continue
            at, lease = first
            if at > now:
                self._queue(worker)
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
        """From when a lease is late; a worker's leases are computed one after the other.

        Also where its worker takes no work any more: one that leaves has it done in time, and one that has not answered
        for another lease will hardly answer for this one.
        """
        at = self._free_since.get(lease.worker, -math.inf)
        for grant in self._ledger.held(lease.worker):
            late_s = self._pacing.late_s(grant.worker, grant.block.num_leaves)
            if grant.step != lease.step or grant.lease in self.unread:
                continue  # of a later step, though it may have been given before: it waits for its version; or for data
            if late_s is None:  # nothing is known of anybody: one that hangs with the whole first step holds none up
                late_s = self._pacing.config.min_deadline_s
            at = max(at, self._ledger.began_at(grant)) + late_s
            if grant is lease:
                return at
        return None
