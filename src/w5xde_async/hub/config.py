"""What a hub can be told: where it listens, who may join, and how work travels."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from w5xde_async.errors import need
from w5xde_async.net.endpoint import format_address, parse_address
from w5xde_async.net.join import check_strength
from w5xde_async.net.tls import TlsFiles, is_loopback
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.updates.config import UpdateConfig

__all__ = ["NetworkConfig"]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Settings of a hub: its listener, its members and what it sends them.

    host, port              where it listens; port 0 picks a free one
    token                   the shared secret that workers prove; empty: none on loopback, one of its own over TLS
    tls                     certificate and key (off loopback it makes its own), authorities that workers must have
    insecure                no TLS off loopback either; a token is then required
    join_file               where the join string goes (default: ``join`` in the run directory); asks for TLS anywhere
    advertise               the host in the join string, where it is not what it listens on
    min_workers             the first lease waits for that many
    max_workers             more are refused
    bucket_bytes            the unit on the wire and in the reducer
    bulk_threads            threads that copy big payloads to and from sockets (0: the event loop does); 2 where
                            there are four cores, since on fewer they take turns with the workers
    heartbeat_s, silence_s  how often each side says that it lives; after how long a silent peer counts as gone
    handshake_s             an unauthenticated connection has that long
    join_s                  a worker that was let in has that long to build its model
    credit_bytes            a worker gets no new lease while more than this of earlier ones waits to be sent to it
    grace_s                 a stop waits that long for the step under way
    quarantine              put a worker out of the run whose result was proven wrong; False: only say so
    code_free               make a program of the step, for workers that start without the job's code
    pacing                  how many leases a worker has, how large they are and how long it may take (``PacingConfig``)
    update                  how results become parameters, and how both travel (``UpdateConfig``)
    """

    host: str = "127.0.0.1"
    port: int = 5555
    token: str = field(default="", repr=False)
    tls: TlsFiles = field(default_factory=TlsFiles)
    insecure: bool = False
    join_file: Path | None = None
    advertise: str = ""
    min_workers: int = 1
    max_workers: int = 256
    bucket_bytes: int = 4 << 20
    bulk_threads: int = field(default_factory=lambda: 2 if (os.cpu_count() or 1) >= 4 else 0)
    heartbeat_s: float = 3.0
    silence_s: float = 12.0
    handshake_s: float = 10.0
    join_s: float = 900.0
    credit_bytes: int = 16 << 20
    grace_s: float = 10.0
    quarantine: bool = True
    code_free: bool = False
    pacing: PacingConfig = field(default_factory=PacingConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        need(0 <= self.port <= 65535, f"port is {self.port}; give a number from 0 to 65535")
        for name in ("min_workers", "max_workers"):
            need(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; give a number >= 1")
        for name in ("heartbeat_s", "silence_s", "handshake_s", "join_s"):
            need(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; give seconds > 0")
        need(self.credit_bytes >= 0, f"credit_bytes is {self.credit_bytes}; give a number >= 0")
        need(self.grace_s >= 0, f"grace_s is {self.grace_s}; give seconds >= 0")
        need(self.min_workers <= self.max_workers, "min_workers is more than max_workers")
        need(self.silence_s > self.heartbeat_s, "silence_s must be longer than heartbeat_s")
        need(64 << 10 <= self.bucket_bytes <= 1 << 30, "bucket_bytes lies between 64 KiB and 1 GiB")
        need(self.bulk_threads >= 0, "threads are >= 0")
        need(
            bool(self.token) or not self.insecure or is_loopback(self.host),
            f"without TLS and without a token the coordinator listens on loopback only, not on {self.host}; leave out "
            "--insecure, or set W5XDE_TOKEN or --token-file on both sides",
        )
        if self.advertise:
            parse_address(format_address(self.advertise, self.port))
        if not is_loopback(self.host):
            check_strength(self.token, "the token")
        need((self.tls.cert is None) == (self.tls.key is None), "a TLS certificate and its key go together")
        need(
            not (self.insecure and (self.tls.cert or self.tls.ca or self.join_file)),
            "--insecure and TLS's settings contradict each other; leave out one of them",
        )

    @property
    def share(self) -> int:
        """Most workers under one proven name, or from one address off this machine with the run's secret alone."""
        return min(self.max_workers, max(8, self.max_workers // 4))

    @property
    def uses_tls(self) -> bool:
        """Off loopback always, on it when asked for; never with ``insecure``."""
        asked = self.tls.cert is not None or self.tls.ca is not None or self.join_file is not None
        return not self.insecure and (asked or not is_loopback(self.host))
