"""What shows a run to people and programs beside the screen: dashboard, metrics and trackers, opened and closed as one.

A guest of the run: whatever goes wrong here is said in one line and the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from w5xde_async.coordinator.monitoring.config import MonitoringConfig
from w5xde_async.coordinator.monitoring.status_sampler import StatusSampler
from w5xde_async.coordinator.training import Training
from w5xde_async.errors import in_one_line
from w5xde_async.hub.members.access import Access
from w5xde_async.net.endpoint import DASHBOARD_PORT, parse_address
from w5xde_async.net.join import write_private_line
from w5xde_async.net.own_addresses import advertised, own_addresses
from w5xde_async.net.tls import is_loopback
from w5xde_async.telemetry.events import Bus, Evaluated, Warned
from w5xde_async.telemetry.links import LINK_FILE, DashboardLink
from w5xde_async.telemetry.trackers import Tracking

if TYPE_CHECKING:
    from w5xde_async.telemetry.dashboard.server import Dashboard
    from w5xde_async.telemetry.dashboard.view import LogHandler

_LOGGER = "w5xde_async"
_REMOVING_S = 5.0


class Outputs:
    """Subscribers of one run's bus that have a life of their own. ``open`` before the first event is published."""

    def __init__(
        self, config: MonitoringConfig, bus: Bus, run_path: Path | None, *,
        insecure: bool = False, advertise: str = "",
    ) -> None:  # fmt: skip
        """``insecure``: no TLS for the dashboard either. ``advertise``: the host in its link, where that is given."""
        self._config, self._bus, self._run_path = config, bus, run_path
        self._insecure, self._advertise = insecure, advertise
        self._sampler: StatusSampler | None = None
        self._dashboard: Dashboard | None = None
        self._link = ""
        self._tracking: Tracking | None = None
        self._handler: LogHandler | None = None
        self._link_file: Path | None = None
        self._leave: list[Callable[[], None]] = []
        self._notes: list[str] = []

    @property
    def address(self) -> str:
        """Where the dashboard is; empty without one."""
        return "" if self._dashboard is None else self._dashboard.address

    @property
    def link(self) -> str:
        """The same, with the token that it may need and its certificate's hash."""
        return self._link

    async def open(self, access: Access, settings: Mapping[str, object], resumed_step: int) -> None:
        """Start what the configuration asks for; ``settings`` are shown.

        Raises UsageError for a tracker or an address that is none.
        """
        if self._config.trackers:
            folder = self._run_path or Path("runs")
            self._tracking = Tracking(self._config.trackers, folder)
            self._leave.append(self._bus.subscribe(self._tracking, samples=True, prompt=False))
        if self._config.dashboard:
            await self._open_dashboard(access, settings, resumed_step)

    def began(self, training: Training) -> None:
        """The run was announced, or goes on by another rule: say what was met on the way, look at it from now on."""
        if self._sampler is None:
            self._sampler = StatusSampler(training)
        else:
            self._sampler.follow(training)
        notes, self._notes = self._notes, []
        for note in notes:
            self._bus.publish(Warned(text=note))

    def tick(self, now: float) -> None:
        """Once a second or so."""
        if self._sampler is not None:
            self._see(partial(self._sampler.tick, now))

    def look(self, now: float) -> None:
        """At once, for the end: what was seen last is what remains."""
        if self._sampler is not None:
            self._see(partial(self._sampler.look, now))

    def _see(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            self._sampler = None  # it would fail of the same again
            self._bus.publish(Warned(text=f"the state of the run is not shown any more: {in_one_line(error)}"))

    async def aclose(self) -> None:
        """Let viewers and trackers have the end of the run, then go. Calling it twice is fine."""
        for leave in self._leave:
            leave()
        if self._handler is not None:
            logging.getLogger(_LOGGER).removeHandler(self._handler)
        if self._dashboard is not None:
            await self._dashboard.aclose()
        loop = asyncio.get_running_loop()
        if self._link_file is not None:
            # Who finds it there finds nobody at its address: a disk that hangs or fails is for others to tell.
            await asyncio.wait([loop.run_in_executor(None, _remove, self._link_file)], timeout=_REMOVING_S)
        if self._tracking is not None:
            await loop.run_in_executor(None, self._tracking.close)

    async def _open_dashboard(self, access: Access, settings: Mapping[str, object], resumed_step: int) -> None:
        host, port = parse_address(self._config.dashboard, DASHBOARD_PORT, listens=True)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, _import)
        except ImportError as error:
            self._notes.append(f"no dashboard: {error.name} is not installed (pip install 'w5xde-async[dashboard]')")
            return
        from w5xde_async.telemetry.dashboard.server import Dashboard
        from w5xde_async.telemetry.dashboard.view import LogHandler, View, recorded
        from w5xde_async.telemetry.metrics import Metrics

        local = is_loopback(host)
        context, certificate = None, b""
        if not local and not self._insecure:
            context, certificate = await loop.run_in_executor(None, access.page_context)
        view, metrics = View(settings), Metrics()
        if resumed_step and self._run_path is not None:
            path = self._run_path / "metrics.jsonl"
            known = await loop.run_in_executor(None, lambda: list(recorded(path, resumed_step)))
            view.recall(known)
            for evaluated in known:
                if isinstance(evaluated, Evaluated):
                    metrics(evaluated)
        if self._advertise:
            shown = advertised(self._advertise)[0][0]
        else:
            shown = (await loop.run_in_executor(None, own_addresses, host))[0]
        dashboard = Dashboard(
            view, metrics, host=host, port=port, token="" if local else secrets.token_urlsafe(24), ssl=context,
            shown="" if local else shown,
        )  # fmt: skip
        try:
            await dashboard.start()
            link = DashboardLink(dashboard.link, certificate).line()
            if self._run_path is not None:
                self._link_file = self._run_path / LINK_FILE
                await loop.run_in_executor(None, write_private_line, self._link_file, link)
        except OSError as error:
            self._notes.append(f"no dashboard: {self._config.dashboard}: {error.strerror or error}")
            await dashboard.aclose()
            return
        if dashboard.moved:
            self._notes.append(f"port {port} is taken: the dashboard is at {dashboard.address}")
        self._dashboard, self._link = dashboard, link
        self._leave += [self._bus.subscribe(one, samples=True, prompt=False) for one in (view, metrics)]
        self._handler = LogHandler(view, loop.call_soon_threadsafe)
        logging.getLogger(_LOGGER).addHandler(self._handler)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _import() -> None:
    import w5xde_async.telemetry.dashboard.server  # noqa: F401 - takes a moment, so not on the event loop
