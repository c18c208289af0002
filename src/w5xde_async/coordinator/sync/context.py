"""What the parts of a synchronous training share."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.coordinator.parameters.aggregator import Aggregator
from w5xde_async.coordinator.sync.recomputation import Recomputation
from w5xde_async.coordinator.training import Phase, RunContext
from w5xde_async.hub.work.block_store import BlockStore
from w5xde_async.plan.ledger import Ledger
from w5xde_async.plan.sampler import Steps


@dataclass(frozen=True, slots=True)
class SyncContext:
    """``steps``: which samples make which step. ``recomputation``: who computes what workers do not agree about, or
    fail on."""

    run: RunContext
    phase: Phase
    ledger: Ledger
    store: BlockStore
    aggregator: Aggregator
    steps: Steps
    recomputation: Recomputation | None

    def wake(self) -> None:
        """Have the task that drives the training look again."""
        self.phase.lifecycle.wake.set()
