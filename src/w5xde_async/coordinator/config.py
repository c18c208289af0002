"""What a coordinator can be told, beside the job."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from w5xde_async.coordinator.durability.config import DurabilityConfig
from w5xde_async.coordinator.monitoring.config import MonitoringConfig
from w5xde_async.coordinator.verification_config import VerificationConfig
from w5xde_async.data.config import DataConfig
from w5xde_async.errors import need
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.updates.config import UpdateConfig

__all__ = ["CoordinatorConfig"]


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(VerificationConfig, MonitoringConfig, DurabilityConfig, DataConfig, NetworkConfig):
    """Settings of one coordinator: those of its parts (below), and how long and by what it trains.

    All of them are given to this class, by name.

    max_steps, epochs       override the job's
    max_time_s              stop, with a checkpoint, after that long
    target_batch            let the batch grow with the gradient noise scale, up to so many samples a step; ``auto``:
                            up to the dataset
    batch_patience          steps before each time it doubles
    auto                    choose rule, codec and H from what the first steps show of the links, once

    Raises UsageError for a value that is out of range, or that does not go with another.
    """

    max_steps: int | None = None
    epochs: int | None = None
    max_time_s: float | None = None
    auto: bool = False
    target_batch: int | Literal["auto"] | None = None
    batch_patience: int = 100

    def __post_init__(self) -> None:
        for part in (NetworkConfig, DataConfig, DurabilityConfig, MonitoringConfig, VerificationConfig):
            part.__post_init__(self)
        need(self.batch_patience >= 1, f"batch_patience is {self.batch_patience}; give a number >= 1")
        for name in ("max_steps", "epochs"):
            need(getattr(self, name) is None or getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; give >= 1")
        need(self.max_time_s is None or self.max_time_s > 0, "max_time_s is more than 0")
        need(
            (self.update.rule == "sync" and not self.auto) or self.durability == "checkpoint",
            "a journal keeps the gradients of the sync rule; other rules, and auto, have --durability checkpoint",
        )
        if self.target_batch is not None:
            self._check_growth(f"target_batch is {self.target_batch!r}")

    def _check_growth(self, target: str) -> None:
        """What a batch that grows goes with. Raises UsageError, beginning with ``target``."""
        need(
            self.target_batch == "auto" or (isinstance(self.target_batch, int) and self.target_batch >= 1),
            f"{target}; give auto or a number of samples >= 1",
        )
        need(
            self.update.rule == "sync" and not self.auto,
            f"{target}: the batch of a step grows under --update sync alone; other rules have no such step",
        )
        need(
            self.update.uplink_codec.exact,
            f"{target}: codec {self.update.codec} is lossy, and what it leaves out would count as the gradient's "
            "noise; use --codec raw or lz4",
        )
        need(
            self.durability == "checkpoint",
            f"{target}: a journal keeps the sums of steps, not of their halves, which the batch grows by; use "
            "--durability checkpoint",
        )

    def shown(self) -> dict[str, object]:
        """The settings by name, without the secrets, which have no place in ``repr`` either."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def unlike_results(self, update: UpdateConfig) -> str | None:
        """What to say where results by ``update`` are not compared although these settings ask for it."""
        if update.uplink_codec.exact or update.rule != "sync" or not self.compares:
            return None
        return (
            f"results in codec {update.codec} hold what was left out before, so no two are alike: they are not "
            "computed again to be compared (see SECURITY.md)"
        )
