"""What a coordinator can be told, beside the job."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from w5xde_async.errors import UsageError
from w5xde_async.net.endpoint import format_address, parse_address
from w5xde_async.net.join import check_strength
from w5xde_async.net.tls import TlsFiles, is_loopback
from w5xde_async.plan.audit import AuditConfig
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.trackers import check_trackers
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.norm_gate import NormGateConfig

__all__ = ["CoordinatorConfig"]


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Settings of one coordinator.

    host, port              where it listens; port 0 picks a free one
    token                   the shared secret that workers prove; empty: none on loopback, one of its own over TLS
    tls                     certificate and key (off loopback it makes its own), authorities that workers must have
    insecure                no TLS off loopback either; a token is then required
    join_file               where the join string goes (default: ``join`` in the run directory); asks for TLS anywhere
    advertise               the host in the join string, where it is not what it listens on
    min_workers             the first lease waits for that many
    max_workers             more are refused
    max_steps, epochs       override the job's
    max_time_s              stop, with a checkpoint, after that long
    checkpoint_every        steps between checkpoints; one is always written at the end
    keep_checkpoints        how many are kept
    durability              ``checkpoint``: a crash goes back to the newest checkpoint; ``journal``: every step is on
                            the disk before it counts, and a crash goes back to none
    resume                  ``auto``: go on from the newest whole checkpoint; ``never``: start afresh, the old run is
                            set aside; a path: go on from that checkpoint
    bucket_bytes            the unit on the wire and in the reducer
    loader_threads, loader_processes, prefetch_leaves   how the dataset is read, and how far ahead
    bulk_threads            threads that copy big payloads to and from sockets (0: the event loop does); 2 where
                            there are four cores, since on fewer they take turns with the workers
    heartbeat_s, silence_s  how often each side says that it lives; after how long a silent peer counts as gone
    handshake_s             an unauthenticated connection has that long
    join_s                  a worker that was let in has that long to build its model
    credit_bytes            a worker gets no new lease while more than this of earlier ones waits to be sent to it
    grace_s                 a stop waits that long for the step under way
    max_leaf_failures       attempts on one leaf before the run stops
    max_nonfinite_steps     steps in a row with a non-finite gradient before the run stops
    norm_gate               a block whose norm is over the median of the last ones by more than that many median
                            deviations is computed by a second worker before it counts; 0: no such check
    audit_fraction          blocks for each step, on average, that are drawn by chance and computed by a second worker
    audit_tolerance         relative distance that two honest computations of a block on unlike machines may have
    quarantine              put a worker out of the run whose result was proven wrong; False: only say so
    evaluate                False switches the job's evaluation off
    dashboard               ``host:port`` of the dashboard; empty: none. Port 0 picks a free one. Off loopback it asks
                            for a token and speaks TLS (not with ``insecure``)
    trackers                names of experiment trackers, each with its target behind a colon (telemetry.trackers)
    update                  how results become parameters, and how both travel (``UpdateConfig``)
    target_batch            let the batch grow with the gradient noise scale, up to so many samples a step; ``auto``:
                            up to the dataset
    batch_patience          steps before each time it doubles
    auto                    choose rule, codec and H from what the first steps show of the links, and go on looking
    code_free               make a program of the step, for workers that start without the job's code
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
    max_steps: int | None = None
    epochs: int | None = None
    max_time_s: float | None = None
    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    durability: str = "checkpoint"
    resume: str = "auto"
    bucket_bytes: int = 4 << 20
    loader_threads: int = 1
    loader_processes: int = 0
    prefetch_leaves: int = 64
    bulk_threads: int = field(default_factory=lambda: 2 if (os.cpu_count() or 1) >= 4 else 0)
    heartbeat_s: float = 3.0
    silence_s: float = 12.0
    handshake_s: float = 10.0
    join_s: float = 900.0
    credit_bytes: int = 16 << 20
    grace_s: float = 10.0
    max_leaf_failures: int = 3
    max_nonfinite_steps: int = 50
    norm_gate: float = 6.0
    audit_fraction: float = 0.01
    audit_tolerance: float = 0.01
    quarantine: bool = True
    evaluate: bool = True
    dashboard: str = ""
    trackers: tuple[str, ...] = ()
    code_free: bool = False
    pacing: PacingConfig = field(default_factory=PacingConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    auto: bool = False
    target_batch: int | Literal["auto"] | None = None
    batch_patience: int = 100

    def __post_init__(self) -> None:
        def need(holds: bool, text: str) -> None:
            if not holds:
                raise UsageError(text)

        need(0 <= self.port <= 65535, f"port is {self.port}; give a number from 0 to 65535")
        for name in ("min_workers", "max_workers", "checkpoint_every", "keep_checkpoints", "prefetch_leaves",
                     "max_leaf_failures", "max_nonfinite_steps", "batch_patience"):  # fmt: skip
            need(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; give a number >= 1")
        for name in ("max_steps", "epochs"):
            need(getattr(self, name) is None or getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; give >= 1")
        for name in ("heartbeat_s", "silence_s", "handshake_s", "join_s"):
            need(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; give seconds > 0")
        need(self.norm_gate >= 0, f"norm_gate is {self.norm_gate}; give a number >= 0 (0: no gate)")
        need(0 <= self.audit_fraction <= 1, f"audit_fraction is {self.audit_fraction}; give a number from 0 to 1")
        need(0 < self.audit_tolerance < 1, f"audit_tolerance is {self.audit_tolerance}; give one between 0 and 1")
        need(self.credit_bytes >= 0, f"credit_bytes is {self.credit_bytes}; give a number >= 0")
        need(self.grace_s >= 0, f"grace_s is {self.grace_s}; give seconds >= 0")
        need(
            self.durability in ("checkpoint", "journal"),
            f"durability is {self.durability!r}; give checkpoint or journal",
        )
        need(
            (self.update.rule == "sync" and not self.auto) or self.durability == "checkpoint",
            "a journal keeps the gradients of the sync rule; other rules, and auto, have --durability checkpoint",
        )
        if self.target_batch is not None:
            target = f"target_batch is {self.target_batch!r}"
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
        need(self.min_workers <= self.max_workers, "min_workers is more than max_workers")
        need(self.silence_s > self.heartbeat_s, "silence_s must be longer than heartbeat_s")
        need(64 << 10 <= self.bucket_bytes <= 1 << 30, "bucket_bytes lies between 64 KiB and 1 GiB")
        need(self.bulk_threads >= 0 and self.loader_threads >= 0 and self.loader_processes >= 0, "threads are >= 0")
        need(self.max_time_s is None or self.max_time_s > 0, "max_time_s is more than 0")
        need(
            bool(self.token) or not self.insecure or is_loopback(self.host),
            f"without TLS and without a token the coordinator listens on loopback only, not on {self.host}; leave out "
            "--insecure, or set W5XDE_TOKEN or --token-file on both sides",
        )
        if self.dashboard:
            parse_address(self.dashboard)
        if self.advertise:
            parse_address(format_address(self.advertise, self.port))
        check_trackers(self.trackers)
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
    def gate(self) -> NormGateConfig | None:
        """The norm gate's own settings; None where it is off."""
        return NormGateConfig(deviations=self.norm_gate) if self.norm_gate else None

    @property
    def audit(self) -> AuditConfig:
        """The audits' own settings."""
        return AuditConfig(fraction=self.audit_fraction, tolerance=self.audit_tolerance)

    def unlike_results(self, update: UpdateConfig) -> str | None:
        """What to say where results by ``update`` are not compared although these settings ask for it."""
        if update.uplink_codec.exact or update.rule != "sync" or not (self.norm_gate or self.audit_fraction):
            return None
        return (
            f"results in codec {update.codec} hold what was left out before, so no two are alike: they are not "
            "computed again to be compared (see SECURITY.md)"
        )
