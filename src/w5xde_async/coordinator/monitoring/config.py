"""Who is shown the run, beside the screen."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.config import Config, Kind, setting, text
from w5xde_async.net.endpoint import parse_address
from w5xde_async.telemetry.trackers import TRACKERS, check_trackers

_NAMES = Kind(
    f"one text of trackers with commas between them: {', '.join(TRACKERS)}", "NAMES",
    lambda names: tuple(name.strip() for name in names.split(",") if name.strip()),
    lambda names: isinstance(names, tuple) and bool(names) and all(n.partition(":")[0] in TRACKERS for n in names),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MonitoringConfig(Config):
    """Settings of dashboard and trackers. No ``dashboard``: none; port 0 picks a free one."""

    dashboard: str = setting(
        "", "where; off loopback with a token and TLS, and where the port is taken at another",
        text("HOST or HOST:PORT", "ADDRESS"), "watching", flag="dashboard_address",
    )  # fmt: skip
    trackers: tuple[str, ...] = setting(
        (), "experiment trackers, each with a target if wanted: tensorboard[:DIR], wandb[:online], mlflow[:URI], "
        "trackio[:PROJECT]", _NAMES, "watching", flag="tracker",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trackers(self.trackers)
        if self.dashboard:
            parse_address(self.dashboard, place="--dashboard-address", listens=True)
