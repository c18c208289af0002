"""What the parts of a synchronous training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from w5xde_async.coordinator.parameters.aggregator import Aggregator
from w5xde_async.coordinator.training import RunContext
from w5xde_async.hub.work.block_store import BlockStore
from w5xde_async.plan.ledger import Ledger
from w5xde_async.telemetry.events import Warned

__all__ = ["SyncContext"]


@dataclass(frozen=True, slots=True)
class SyncContext:
    """``wake`` has the task that drives the training look again."""

    run: RunContext
    ledger: Ledger
    store: BlockStore
    aggregator: Aggregator
    wake: Callable[[], None]

    def warn(self, text: str) -> None:
        """For a person."""
        self.run.bus.publish(Warned(text=text))
