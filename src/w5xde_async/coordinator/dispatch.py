"""Who gets the next block: the ledger's blocks, sized by pacing, filled by the loader.

A lease exists from the moment it is granted; it is sent once its data has been read. Workers with nothing in hand are
served before those that want one lease ahead, and the step after the current one is leased ahead too: its data
travels while the version it needs is still being made. When nothing of the current step is left, a worker without work
backs up a lease that is late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.loader import Loader
from w5xde_async.plan.ledger import Grant, Ledger
from w5xde_async.plan.pacing import Pacing
from w5xde_async.plan.tree import right_half
from w5xde_async.wire.frame import Buffer, BufferSpec
from w5xde_async.wire.messages import Lease

__all__ = ["Dispatch", "Sendable"]


class Sendable(NamedTuple):
    """A LEASE with its data."""

    message: Lease
    buffers: list[tuple[BufferSpec, Buffer]]


class Dispatch:
    """Grants leases and pairs them with their data. Knows no sessions."""

    def __init__(self, ledger: Ledger, pacing: Pacing, loader: Loader, config: CoordinatorConfig) -> None:
        self._ledger, self._pacing, self._loader, self._config = ledger, pacing, loader, config
        self._unread: list[Grant] = []  # granted, waiting for their data; bounded by workers x leases_ahead
        self._free_since: dict[str, float] = {}  # worker -> when its last lease was done
        self.num_backups = 0
        self.holds_back = False  #: nothing more of the current step is leased: too much of it waits for judgement
        self.at_most_half = False  #: no lease holds leaves of both halves of its step, which are measured
        self.look_again_at = math.inf  #: when a lease of the current step will be late enough for a backup

    @property
    def unread(self) -> set[int]:
        """Leases whose data has not been read yet."""
        return {grant.lease for grant in self._unread}

    def forget(self, worker: str) -> None:
        """The worker is gone: so is what was known of its speed."""
        self._pacing.forget(worker)
        self._free_since.pop(worker, None)

    def observe(self, grant: Grant, compute_s: float, now: float) -> None:
        """A lease of the current step was done, in ``compute_s`` on the worker."""
        began = max(self._ledger.began_at(grant), self._free_since.get(grant.worker, -math.inf))
        self._pacing.observe(grant.worker, grant.block.num_leaves, compute_s, taken_s=now - began)
        self._free_since[grant.worker] = now

    def observe_late(self, grant: Grant, compute_s: float, now: float) -> None:
        """A lease that had ended was done after all: deadlines learn from it too, so that one too short gets longer."""
        self._pacing.observe_late(grant.worker, grant.block.num_leaves, compute_s, now - grant.granted_at)
        self._free_since[grant.worker] = now

    def send(self, grant: Grant) -> None:
        """A lease that somebody else has granted: ``leases`` gives it out with its data."""
        self._unread.append(grant)

    def leases(
        self, workers: Sequence[str], steps: Sequence[int], now: float, *, hungry: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Sendable]]:
        """Leases to send now, for ``workers`` that take work, on ``steps`` (the current one first).

        ``hungry`` are those that may be given something new (default: all); the others count for the shares alone.
        """
        hungry = workers if hungry is None else hungry
        self._grant(workers, steps, now, hungry)
        if steps:
            self._back_up(workers, steps[0], now, hungry)
        waiting, self._unread = self._unread, []
        for grant in waiting:
            if self._ledger.get(grant.lease) is not grant:
                continue  # given back meanwhile
            data = self._loader.data(grant.step, grant.block)
            if data is None:
                self._unread.append(grant)
                continue
            message = Lease(
                grant.lease, grant.step, grant.step, grant.block.start, data.samples, grant.deadline_s, data.packed,
                data.structure,
            )  # fmt: skip
            yield grant.worker, Sendable(message, data.buffers)

    def _most_in_time(self, worker: str, workers: Sequence[str], step: int, free: int, now: float) -> int:
        """Leaves of the current step that this worker may take without holding the others up at its end."""
        ledger = self._ledger
        held = {other: ledger.num_held_leaves(other, step) for other in workers}
        if not any(held.values()):
            return free  # nobody else is at it
        return self._pacing.in_time(worker, held, free, ledger.num_leaves(step), now - ledger.opened_at(step))

    def _grant(self, workers: Sequence[str], steps: Sequence[int], now: float, hungry: Sequence[str]) -> None:
        ledger, unequal = self._ledger, self._pacing.unequal(workers)
        for room in range(self._pacing.config.leases_ahead):
            for worker in hungry:
                for step in steps:
                    if self.holds_back and step == steps[0]:
                        continue
                    # Leases of a later step do not count: what an earlier one needs now must find a place.
                    if ledger.num_held(worker, up_to_step=step) > room:
                        continue
                    free = ledger.free_leaves(step)
                    if not free:
                        continue
                    leaves = self._pacing.block_leaves(worker, free, workers, step_leaves=ledger.num_leaves(step))
                    leaves = min(leaves, self._loader.max_block_leaves)
                    if self.at_most_half:
                        leaves = min(leaves, max(1, right_half(ledger.num_leaves(step))))
                    if unequal and step == steps[0]:
                        leaves = min(leaves, self._most_in_time(worker, workers, step, free, now))
                        if not leaves:
                            continue
                    deadline_s = self._pacing.deadline_s(worker, leaves)
                    grant = ledger.grant(worker, step, leaves, now=now, deadline_s=deadline_s, others=workers)
                    if grant is not None:
                        self._unread.append(grant)
                        break

    def _back_up(self, workers: Sequence[str], step: int, now: float, hungry: Sequence[str]) -> None:
        ledger, self.look_again_at = self._ledger, math.inf
        if ledger.complete(step) or ledger.free_leaves(step):
            return
        late: dict[int, float] = {}  # lease -> from when it is late
        for worker in hungry:
            if ledger.num_held(worker, up_to_step=step):
                continue
            candidates = ledger.unbacked(step, worker)
            if candidates and not late:
                late = self._late(workers, step)
            grant = min(candidates, key=lambda grant: late.get(grant.lease, math.inf), default=None)
            if grant is None:
                continue
            if (at := late.get(grant.lease, math.inf)) > now:
                self.look_again_at = min(self.look_again_at, at)
                continue
            deadline_s = self._pacing.deadline_s(worker, grant.block.num_leaves)
            self._unread.append(ledger.back_up(grant.lease, worker, now=now, deadline_s=deadline_s))
            self.num_backups += 1

    def _late(self, workers: Sequence[str], step: int) -> dict[int, float]:
        """From when each lease of ``step`` is late; a worker's leases are computed one after the other."""
        late: dict[int, float] = {}
        for worker in workers:
            at = self._free_since.get(worker, -math.inf)
            for grant in self._ledger.held(worker):
                late_s = self._pacing.late_s(worker, grant.block.num_leaves, workers)
                if grant.step != step or late_s is None:
                    break
                at = max(at, self._ledger.began_at(grant)) + late_s
                late[grant.lease] = at
        return late
