"""Who gets the next block: the ledger's blocks, sized by pacing, filled by the loader.

A lease exists from the moment it is granted; it is sent once its data has been read. Workers with nothing in hand are
served before those that want one lease ahead, and the step after the current one is leased ahead too: its data
travels while the version it needs is still being made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.loader import Loader
from w5xde_async.plan.ledger import Grant, Ledger
from w5xde_async.plan.pacing import Pacing
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

    def forget(self, worker: str) -> None:
        """The worker is gone: so is what was known of its speed."""
        self._pacing.forget(worker)

    def leases(
        self, workers: Sequence[str], steps: Sequence[int], now: float, *, only: str | None = None
    ) -> Iterator[tuple[str, Sendable]]:
        """Leases to send now, for ``workers`` that take work, on ``steps`` (the current one first).

        ``only`` names the one worker that has more room than before, where nothing else has changed.
        """
        self._grant(workers, steps, now, workers if only is None else [only])
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

    def _grant(self, workers: Sequence[str], steps: Sequence[int], now: float, hungry: Sequence[str]) -> None:
        ledger = self._ledger
        for room in range(self._config.pacing.leases_ahead):
            for worker in hungry:
                for step in steps:
                    # Leases of a later step do not count: what an earlier one needs now must find a place.
                    if ledger.num_held(worker, up_to_step=step) > room:
                        continue
                    free = ledger.free_leaves(step)
                    if not free:
                        continue
                    leaves = self._pacing.block_leaves(worker, free, workers, step_leaves=ledger.num_leaves(step))
                    leaves = min(leaves, self._loader.max_block_leaves)
                    deadline_s = self._pacing.deadline_s(worker, leaves)
                    grant = ledger.grant(worker, step, leaves, now=now, deadline_s=deadline_s, others=workers)
                    if grant is not None:
                        self._unread.append(grant)
                        break
