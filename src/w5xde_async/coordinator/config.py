"""What a coordinator can be told, beside the job."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Literal

from w5xde_async.config import PATH, TIME, Kind, setting, text, whole
from w5xde_async.coordinator.durability.config import DurabilityConfig
from w5xde_async.coordinator.monitoring.config import MonitoringConfig
from w5xde_async.coordinator.verification_config import VerificationConfig
from w5xde_async.data.config import DataConfig
from w5xde_async.errors import need
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.updates.config import UpdateConfig

_SAMPLES = whole(1)
_BATCH = Kind(
    f"auto or {_SAMPLES.accepts}", "N", lambda told: told if told == "auto" else _SAMPLES.read(told),
    lambda value: (isinstance(value, str) and value == "auto") or _SAMPLES.holds(value),
)  # fmt: skip


_CHANGE = r"\s*(?:optimizer|scheduler)\.[A-Za-z]\w*=[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*"
_CHANGES = text(
    "optimizer.NAME=NUMBER or scheduler.NAME=NUMBER, each finite", "NAME=X", f"{_CHANGE}(?:,{_CHANGE})*"
)  # fmt: skip
_FINITE_CHANGES = _CHANGES._replace(
    holds=lambda value: (
        _CHANGES.holds(value) and all(isfinite(float(one.partition("=")[2])) for one in value.split(","))
    )
)


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(VerificationConfig, MonitoringConfig, DurabilityConfig, DataConfig, NetworkConfig):
    """Settings of one coordinator: those of its parts (below), and how long and by what it trains.

    All of them are given to this class, by name. ``auto``: choose rule, codec and H from what the first steps show of
    the links, and look again now and then. Raises UsageError for a value that is out of range, or that does not go
    with another.
    """

    max_steps: int | None = setting(
        None, "end at that step; with --epochs in place of what the job says", whole(1), "the run", shown="the job's"
    )
    epochs: int | None = setting(None, "end after so many passes over the data", whole(1), "the run", shown="the job's")
    max_time_s: float | None = setting(None, "stop in good order after that long", TIME, "the run", flag="max_time")
    auto: bool = False
    init_from: Path | None = setting(
        None, "begin a new run with the weights of this safetensors file; a resume goes on from its checkpoint", PATH,
        "the run",
    )  # fmt: skip
    override: str | None = setting(
        None, "from here on: optimizer.lr=3e-4, or another setting of the optimizer or the scheduler, several with "
        "commas between; with a scheduler lr is what its schedule begins with",
        _FINITE_CHANGES, "the run",
    )  # fmt: skip
    update_device: str = setting(
        "cpu", "sync: where the optimizer steps, and what it keeps is: here, or on a GPU of the coordinator's machine",
        text("cpu, cuda or cuda:N", "DEVICE", r"cpu|cuda(:(0|[1-9][0-9]?))?"), "updates",
    )  # fmt: skip
    target_batch: int | Literal["auto"] | None = setting(
        None, "sync: double the batch as the gradient noise scale asks for it, up to N samples; auto: the dataset",
        _BATCH, "updates",
    )  # fmt: skip
    batch_patience: int = setting(100, "steps before each time that it doubles", whole(1), "updates")

    def __post_init__(self) -> None:
        super().__post_init__()
        need(
            self.override is None or (self.update.rule in ("sync", "async") and not self.auto),
            "--override changes an optimizer that steps at the coordinator: under --update sync or async",
        )
        need(
            (self.update.rule == "sync" and not self.auto) or self.durability == "checkpoint",
            "a journal keeps the gradients of the sync rule; other rules, and auto, have --durability checkpoint",
        )
        need(
            self.update_device == "cpu" or (self.update.rule == "sync" and not self.auto),
            f"--update-device {self.update_device} is for an optimizer that steps at the coordinator, under --update "
            "sync",
        )
        if self.target_batch is not None:
            self._check_growth(f"--target-batch {self.target_batch}")

    def _check_growth(self, target: str) -> None:
        """What a batch that grows goes with. Raises UsageError, beginning with ``target``."""
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
