"""What a hub can be told: where it listens, who may join, and how work travels."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from w5xde_async.config import PATH, TIME, TIME_OR_0, YES_OR_NO, Kind, number, setting, size, text, whole
from w5xde_async.errors import need
from w5xde_async.net.endpoint import DEFAULT_PORT, bare_host
from w5xde_async.net.join import check_strength
from w5xde_async.net.own_addresses import advertised
from w5xde_async.net.tls import SecurityConfig, is_loopback
from w5xde_async.plan.numerics import EXACT, FIRST
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import HEARTBEAT_S, SILENCE_S

_AXIS = r"(dp|fsdp|pp|tp)=[1-9]\d*"
_NUMERICS = rf"first|any|exact|{_AXIS}(,{_AXIS})*( .+)?"


def _time_within(least: float, most: float) -> Kind:
    """A time that WELCOME can tell (``wire.messages.Welcome``): beyond its bounds nobody could join."""
    seconds = number(f"from {least:g} to {most:.0f}", lambda value: least <= value <= most)
    return TIME._replace(
        accepts=f"a time from {least:g}s to {most:.0f}s, like 90, 90s or 5m", holds=seconds.holds,
        in_python=f"seconds from {least:g} to {most:.0f}",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(SecurityConfig):
    """Settings of a hub: its listener, its members and what it sends them.

    ``token`` empty: none on loopback, one of its own over TLS. ``tls.ca``: authorities that workers must have.
    ``bulk_threads`` are 2 where there are four cores: on fewer they take turns with the workers. ``pacing``: how many
    leases a worker has, how large they are and how long it may take. ``update``: how results become parameters, and
    how both travel.
    """

    host: str = setting(
        "127.0.0.1", "address to listen on; off loopback with TLS", text("a host name or address", "ADDRESS"), "network"
    )
    port: int = setting(5555, "port to listen on; 0 picks a free one", whole(0, 65535), "network")
    join_file: Path | None = setting(
        None, "write the join string there, for --join-file of workers; TLS on loopback too", PATH, "network",
        shown="join in the run directory",
    )  # fmt: skip
    advertise: str = setting(
        "", "where others reach this machine, for the join string: a host name or address, with its port where that is "
        "forwarded; several with commas between", text("HOST[:PORT] or [IPv6][:PORT]", "HOST[:PORT]"), "network",
        shown="where it listens",
    )  # fmt: skip
    heartbeat_s: float = setting(
        3.0, "how often each side says that it lives", _time_within(*HEARTBEAT_S), "network", flag="heartbeat"
    )
    silence_s: float = setting(
        12.0, "a peer that is silent for so long counts as gone", _time_within(*SILENCE_S), "network", flag="silence"
    )
    handshake_s: float = setting(10.0, "an unauthenticated connection has that long", TIME)
    join_s: float = setting(900.0, "a worker that was let in has that long to build its model", TIME)
    bucket_bytes: int = setting(
        4 << 20, "piece of the parameters that travels at once",
        size("a size from 64KiB to 1GiB", lambda n: 64 << 10 <= n <= 1 << 30), "network", flag="bucket_size",
        shown="4MiB",
    )  # fmt: skip
    bulk_threads: int = setting(
        lambda: 2 if (os.cpu_count() or 1) >= 4 else 0, "threads that copy big payloads; 0: the event loop does",
        whole(0, 4096), "network", shown="2 from four cores on, else 0",
    )  # fmt: skip
    credit_bytes: int = setting(
        16 << 20, "a worker gets no new lease while more than this of earlier ones waits to be sent to it", whole(0)
    )
    min_workers: int = setting(
        1, "the first step waits for so many workers", whole(1), "workers", shown="--workers, at least 1"
    )
    max_workers: int = setting(256, "more workers are refused", whole(1), "workers")
    grace_s: float = setting(10.0, "a stop waits so long for the step under way", TIME_OR_0, "workers", flag="grace")
    numerics: str = setting(
        FIRST, "whose results count: of workers that compute as the one whose result counts first, to the last bit "
        "('first'; with workers of the coordinator's own that are no islands: 'exact'), of all ('any'), or of some: "
        "'exact' (as one process), 'tp=2'",
        text("first, any, exact or an island's shape", "KIND", _NUMERICS),
        "workers",
    )  # fmt: skip
    quarantine: bool = setting(
        True, "put a worker out of the run whose result was proven wrong", YES_OR_NO, "bad workers"
    )
    code_free: bool = setting(
        False, "make a program of the job's step, for workers without --job", YES_OR_NO, "the run"
    )
    island: str = ""  #: what workers that ask are to form together, ``pp=2``; empty: each is a worker by itself
    pacing: PacingConfig = field(default_factory=PacingConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("update", UpdateConfig), ("pacing", PacingConfig)):
            given = getattr(self, name)
            need(isinstance(given, kind), f"{name} is {given!r:.200}; give {kind.__name__}(...)")
        object.__setattr__(self, "host", bare_host(self.host, place="--host"))
        need(
            self.min_workers <= self.max_workers,
            f"--min-workers {self.min_workers} is more than --max-workers {self.max_workers}",
        )
        need(
            self.silence_s > self.heartbeat_s,
            f"--silence {self.silence_s:g}s is not longer than --heartbeat {self.heartbeat_s:g}s",
        )
        need(
            bool(self.token) or not self.insecure or is_loopback(self.host),
            f"without TLS and without a token the coordinator listens on loopback only, not on {self.host}; leave out "
            "--insecure, or set W5XDE_TOKEN or --token-file on both sides",
        )
        if self.advertise:
            advertised(self.advertise, self.port or DEFAULT_PORT)
        if not is_loopback(self.host):
            check_strength(self.token, "the token")

    @property
    def share(self) -> int:
        """Most workers under one proven name, or from one address off this machine with the run's secret alone."""
        return min(self.max_workers, max(8, self.max_workers // 4))

    @property
    def uses_tls(self) -> bool:
        """Off loopback always, on it when asked for; never with ``insecure``."""
        return not self.insecure and (self.asks_for_tls or not is_loopback(self.host))

    @property
    def asks_for_tls(self) -> bool:
        return super().asks_for_tls or self.join_file is not None

    def with_own_workers(self) -> Self:
        """For a coordinator that starts workers which are no islands: the run's sums are made as one process does."""
        return replace(self, numerics=EXACT) if self.numerics == FIRST else self
