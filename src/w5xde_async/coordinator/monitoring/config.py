"""Who is shown the run, beside the screen."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.net.endpoint import parse_address
from w5xde_async.telemetry.trackers import check_trackers

__all__ = ["MonitoringConfig"]


@dataclass(frozen=True, kw_only=True)
class MonitoringConfig:
    """Settings of dashboard and trackers.

    dashboard       ``host:port`` of the dashboard; empty: none. Port 0 picks a free one. Off loopback it asks for a
                    token and speaks TLS (not with ``insecure``)
    trackers        names of experiment trackers, each with its target behind a colon (``telemetry.trackers``)
    """

    dashboard: str = ""
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dashboard:
            parse_address(self.dashboard)
        check_trackers(self.trackers)
