"""The settings of the two programs, flag by flag, and the config objects they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import UsageError
from w5xde_async.net.join import Invitation, read_secret_file
from w5xde_async.net.tls import TlsFiles
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.settings.flags import Program, setting
from w5xde_async.settings.kinds import (
    BYTES,
    FROM_0,
    FROM_1,
    NAME,
    SECONDS,
    AtLeast0,
    AtLeast1,
    Durability,
    Folder,
    LogFormat,
    LogMode,
    LoopKind,
    Name,
    Part,
    Sandboxing,
    Text,
    Time,
)  # fmt: skip
from w5xde_async.settings.training import TrainingSettings
from w5xde_async.settings.values import Duration, Size, WholeNumber, size_bytes
from w5xde_async.telemetry.progress import ProgressConfig
from w5xde_async.worker.config import WorkerConfig

__all__ = ["CoordinatorSettings", "WorkerSettings"]

_COORDINATOR, _WORKER = CoordinatorConfig(), WorkerConfig()
_PRECEDENCE = """\
In brackets: the default, and the environment variable of the same setting.
Arguments win over the environment, the environment over --config, that over
defaults. Times: 90, 90s, 5m, 2h. Sizes: 512KiB, 4MiB, 1GB."""
_SECRETS = """\
The shared secret is read from a join file, W5XDE_JOIN, W5XDE_TOKEN,
--token-file or ~/.config/w5xde/token, never from an argument."""
_EXIT_CODES = """\
Exit codes: 0 finished or stopped in good order, 1 error, 2 wrong usage or job,
3 unreachable, 4 authentication, 5 version or model mismatch, 6 port in use,
130 second Ctrl-C or SIGTERM."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoordinatorSettings(TrainingSettings):
    """Settings of ``w5xde_async.coordinator``."""

    table: ClassVar[str] = "coordinator"
    usage: ClassVar[str] = "JOB [options]"
    about: ClassVar[str] = f"Train JOB on the workers that connect.\n\n{_PRECEDENCE}"
    ending: ClassVar[str] = (
        f"{_SECRETS}\n\nCtrl-C or SIGTERM stops in good order with a checkpoint; the same command goes\n"
        f"on from there. SIGUSR1 writes a checkpoint.\n\n{_EXIT_CODES}"
    )

    norm_gate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = setting(
        _COORDINATOR.norm_gate, "a result larger than the median by so many median deviations is computed by a second "
        "worker before it counts; 0: no such check", group="bad workers", metavar="X", accepts="a number >= 0",
    )  # fmt: skip
    audit_fraction: Part = setting(
        _COORDINATOR.audit_fraction, "blocks for each step, on average, that are drawn by chance and computed by a "
        "second worker, to compare; 0: none", group="bad workers", metavar="X", accepts="a number from 0 to 1",
    )  # fmt: skip
    audit_tolerance: Annotated[float, Field(gt=0, lt=1)] = setting(
        _COORDINATOR.audit_tolerance, "relative distance that two honest results on unlike machines may have",
        group="bad workers", metavar="X", accepts="a number between 0 and 1",
    )  # fmt: skip
    quarantine: bool = setting(
        _COORDINATOR.quarantine, "put a worker out of the run whose result was proven wrong", group="bad workers",
        accepts="true or false",
    )  # fmt: skip

    host: Text = setting(
        _COORDINATOR.host, "address to listen on; off loopback with TLS", group="network",
        metavar="ADDRESS", accepts="a host name or address",
    )  # fmt: skip
    port: Annotated[WholeNumber, Field(ge=0, le=65535)] = setting(
        _COORDINATOR.port, "port to listen on; 0 picks a free one", group="network",
        accepts="a whole number from 0 to 65535",
    )  # fmt: skip
    token_file: Path | None = setting(
        None, "file with the shared secret, readable by its owner alone", group="network", metavar="FILE",
        accepts="a path",
    )  # fmt: skip
    tls_cert: Path | None = setting(
        None,
        "TLS certificate (PEM); without it a self-signed one is made",
        group="network",
        metavar="FILE",
        accepts="a path",
    )
    tls_key: Path | None = setting(None, "its private key", group="network", metavar="FILE", accepts="a path")
    tls_ca_file: Path | None = setting(
        None, "authorities: every worker needs a certificate of them", group="network",
        metavar="FILE", accepts="a path",
    )  # fmt: skip
    insecure: bool = setting(
        False, "no TLS off loopback: whoever sits between can read and alter everything", group="network",
        accepts="true or false",
    )  # fmt: skip
    join_file: Path | None = setting(
        None, "write the join string there, for --join-file of workers; TLS on loopback too", group="network",
        metavar="FILE", accepts="a path", shown="join in the run directory",
    )  # fmt: skip
    advertise: Text | None = setting(
        None, "host name or address in the join string", group="network", metavar="HOST",
        accepts="a host name or address", shown="where it listens",
    )  # fmt: skip
    heartbeat: Time = setting(
        _COORDINATOR.heartbeat_s, "how often each side says that it lives", group="network", metavar="TIME",
        accepts=SECONDS, shown=f"{_COORDINATOR.heartbeat_s:g}s",
    )  # fmt: skip
    silence: Time = setting(
        _COORDINATOR.silence_s, "a peer that is silent for so long counts as gone", group="network", metavar="TIME",
        accepts=SECONDS, shown=f"{_COORDINATOR.silence_s:g}s",
    )  # fmt: skip
    bucket_size: Annotated[Size, Field(ge=64 << 10, le=1 << 30)] = setting(
        _COORDINATOR.bucket_bytes, "piece of the parameters that travels at once", group="network", metavar="SIZE",
        accepts="a size from 64KiB to 1GiB", shown="4MiB",
    )  # fmt: skip
    bulk_threads: AtLeast0 = setting(
        _COORDINATOR.bulk_threads, "threads that copy big payloads; 0: the event loop does", group="network",
        accepts=FROM_0, shown="2 from four cores on, else 0",
    )  # fmt: skip

    workers: AtLeast0 = setting(0, "start so many worker processes on this machine", group="workers", accepts=FROM_0)
    worker_threads: AtLeast1 | None = setting(
        None, "threads of each of them", group="workers", accepts=FROM_1, shown="cores / workers"
    )
    min_workers: AtLeast1 | None = setting(
        None, "the first step waits for so many workers", group="workers", accepts=FROM_1,
        shown="--workers, at least 1",
    )  # fmt: skip
    max_workers: AtLeast1 = setting(
        _COORDINATOR.max_workers, "more workers are refused", group="workers", accepts=FROM_1
    )
    grace: Annotated[Duration, Field(ge=0, allow_inf_nan=False)] = setting(
        _COORDINATOR.grace_s, "a stop waits so long for the step under way", group="workers", metavar="TIME",
        accepts="a time like 0, 10s or 5m", shown=f"{_COORDINATOR.grace_s:g}s",
    )  # fmt: skip
    leases_ahead: AtLeast1 = setting(
        _COORDINATOR.pacing.leases_ahead, "leases that a worker has at once, the one it computes included; more where "
        "they come late over a slow line", group="workers", accepts=FROM_1,
    )  # fmt: skip

    name: Name | None = setting(
        None, "name of the run", group="files", metavar="NAME", accepts=NAME, shown="the job's file or module"
    )
    run_dir: Path | None = setting(
        None, "directory of the run", group="files", metavar="DIR", accepts="a path", shown="runs/NAME"
    )
    checkpoint_every: AtLeast1 = setting(
        _COORDINATOR.checkpoint_every, "steps between checkpoints; the end always writes one", group="files",
        accepts=FROM_1,
    )  # fmt: skip
    keep_checkpoints: AtLeast1 = setting(
        _COORDINATOR.keep_checkpoints, "how many are kept", group="files", accepts=FROM_1
    )
    durability: Durability = setting(
        "checkpoint", "what a crash goes back to: the newest checkpoint, or, with a journal of every step, nothing",
        group="files", metavar="HOW", accepts="checkpoint or journal",
    )  # fmt: skip
    resume: Text = setting(
        _COORDINATOR.resume,
        "auto: go on from the newest checkpoint; never: start afresh and set the old run aside; or a checkpoint",
        group="files", metavar="HOW", accepts="auto, never or the path of a checkpoint",
    )  # fmt: skip

    dashboard: bool = setting(True, "show the run in a browser", group="watching", accepts="true or false")
    dashboard_address: Text = setting(
        "127.0.0.1:5556", "where; off loopback with a token and TLS, and where the port is taken at another",
        group="watching", metavar="ADDRESS", accepts="HOST or HOST:PORT",
    )  # fmt: skip
    tracker: Text | None = setting(
        None, "experiment trackers, each with a target if wanted: tensorboard[:DIR], wandb[:online], mlflow[:URI], "
        "trackio[:PROJECT]", group="watching", metavar="NAMES", accepts="names of trackers with commas between them",
    )  # fmt: skip

    loader_threads: AtLeast0 = setting(
        _COORDINATOR.loader_threads, "threads that read the dataset", group="data", accepts=FROM_0
    )
    loader_processes: AtLeast0 = setting(
        _COORDINATOR.loader_processes, "processes that read the dataset", group="data", accepts=FROM_0
    )
    prefetch_leaves: AtLeast1 = setting(
        _COORDINATOR.prefetch_leaves, "microbatches that are read ahead", group="data", accepts=FROM_1
    )

    threads: AtLeast1 | None = setting(
        None, "torch's threads in the coordinator itself", group="program", accepts=FROM_1, shown="torch's choice"
    )
    data_dir: Folder | None = setting(
        None, "what a lossy codec has left out is kept there when the worker leaves in good order", group="machine",
        metavar="DIR", accepts="a directory, which need not exist yet",
    )  # fmt: skip

    loop: LoopKind = setting(
        "auto", "event loop: auto, uvloop or asyncio", group="program", metavar="KIND",
        accepts="auto, uvloop or asyncio",
    )  # fmt: skip
    log: LogMode = setting(
        "normal", "silent, normal or verbose", group="program", metavar="HOW", accepts="silent, normal or verbose"
    )
    log_format: LogFormat = setting(
        "text", "text, or json: an object per line", group="program", metavar="HOW", accepts="text or json"
    )
    profile_memory: Folder | None = setting(
        None, "note what allocates memory; SIGUSR2 and the end write a report there (it costs time and memory)",
        group="program", metavar="DIR", accepts="a directory, which need not exist yet",
    )  # fmt: skip
    config: Path | None = setting(
        None, "TOML file with the tables [coordinator] and [worker]", group="program", metavar="FILE", accepts="a path"
    )

    def defaults(self) -> Mapping[str, object]:
        target = (self.job or "").rpartition(":")[0]
        stem = Path(target).stem if target.endswith(".py") else target.rpartition(".")[2]
        name = self.name or (self.run_dir.name if self.run_dir is not None else "") or stem or "run"
        threads = os.environ.get("OMP_NUM_THREADS", "")
        own = int(threads) if threads.isdecimal() and int(threads) else max(1, _cores() // max(self.workers, 1))
        return {
            "name": name,
            "run_dir": Path("runs") / name,
            "min_workers": max(self.workers, 1),
            "worker_threads": own,
        }

    def check(self) -> None:
        def need(holds: bool, text: str) -> None:
            if not holds:
                raise UsageError(text)

        need(
            (self.min_workers or 1) <= self.max_workers,
            f"--min-workers {self.min_workers} is more than --max-workers {self.max_workers}",
        )
        need(
            self.workers <= self.max_workers, f"--workers {self.workers} is more than --max-workers {self.max_workers}"
        )
        need(
            self.silence > self.heartbeat,
            f"--silence {self.silence:g}s is not longer than --heartbeat {self.heartbeat:g}s",
        )

    def require(self) -> None:
        if self.job is None:
            raise UsageError("JOB is missing: give FILE.py:NAME or MODULE:NAME, for example train.py:job")

    def coordinator_config(self, token: str) -> CoordinatorConfig:
        """Raises UsageError (a host off loopback without a token)."""
        return CoordinatorConfig(
            host=self.host,
            port=self.port,
            token=token,
            tls=TlsFiles(self.tls_cert, self.tls_key, self.tls_ca_file),
            insecure=self.insecure,
            join_file=self.join_file,
            advertise=self.advertise or "",
            min_workers=self.min_workers or 1,
            max_workers=self.max_workers,
            max_steps=self.max_steps,
            epochs=self.epochs,
            max_time_s=self.max_time,
            checkpoint_every=self.checkpoint_every,
            keep_checkpoints=self.keep_checkpoints,
            durability=self.durability,
            resume=self.resume,
            bucket_bytes=self.bucket_size,
            loader_threads=self.loader_threads,
            loader_processes=self.loader_processes,
            prefetch_leaves=self.prefetch_leaves,
            bulk_threads=self.bulk_threads,
            heartbeat_s=self.heartbeat,
            silence_s=self.silence,
            grace_s=self.grace,
            pacing=PacingConfig(leases_ahead=self.leases_ahead),
            max_leaf_failures=self.max_leaf_failures,
            evaluate=self.evaluate,
            code_free=self.code_free,
            norm_gate=self.norm_gate,
            update=self.update_config(),
            auto=self.update == "auto",
            target_batch=self.target_batch,
            batch_patience=self.batch_patience,
            audit_fraction=self.audit_fraction,
            audit_tolerance=self.audit_tolerance,
            quarantine=self.quarantine,
            dashboard=self.dashboard_address if self.dashboard else "",
            trackers=tuple(name.strip() for name in (self.tracker or "").split(",") if name.strip()),
        )

    def progress_config(self, *, color: bool) -> ProgressConfig:
        return ProgressConfig(mode=self.log, log_format=self.log_format, color=color)


def _auto_or_size(value: object) -> object:
    return None if value == "auto" else size_bytes(value)


class WorkerSettings(Program):
    """Settings of ``w5xde_async.worker``."""

    table: ClassVar[str] = "worker"
    usage: ClassVar[str] = "--join-file FILE [--job JOB] [options]"
    about: ClassVar[str] = (
        "Compute for the coordinator at --server. It sends what is to be computed; a\n"
        "step that cannot be sent needs --job, read from the current directory.\n\n"
        f"{_PRECEDENCE}"
    )
    ending: ClassVar[str] = (
        f"{_SECRETS}\n\nCtrl-C or SIGTERM leaves in good order after the lease under way.\n\n{_EXIT_CODES}"
    )

    server: Text | None = setting(
        None,
        "the coordinator's address; without a port, 5555",
        group="the run",
        metavar="HOST:PORT",
        accepts="HOST or HOST:PORT",
    )
    job: Text | None = setting(
        None, "the job that the coordinator trains, as this machine finds it: its own code in place of the "
        "coordinator's program", group="the run", metavar="JOB", accepts="FILE.py:NAME or MODULE:NAME",
        shown="the coordinator's program",
    )  # fmt: skip
    name: Name | None = setting(
        None,
        "shown in the coordinator's list",
        group="the run",
        metavar="NAME",
        accepts=NAME,
        shown="host and process",
    )
    token_file: Path | None = setting(
        None, "file with the shared secret, readable by its owner alone", group="the run", metavar="FILE",
        accepts="a path",
    )  # fmt: skip
    join_file: Path | None = setting(
        None, "file with the coordinator's join string: address, secret and certificate", group="the run",
        metavar="FILE", accepts="a path",
    )  # fmt: skip
    join: Text | None = setting(
        None, "a join string; as an argument only without its secret", group="the run", metavar="STRING",
        accepts="w5xde://host:port?cert=sha256:...",
    )  # fmt: skip
    tls_cert: Path | None = setting(
        None,
        "TLS certificate of this worker (PEM), where the coordinator wants one",
        group="network",
        metavar="FILE",
        accepts="a path",
    )
    tls_key: Path | None = setting(None, "its private key", group="network", metavar="FILE", accepts="a path")
    tls_ca_file: Path | None = setting(
        None,
        "authorities that the coordinator's certificate must have",
        group="network",
        metavar="FILE",
        accepts="a path",
    )
    insecure: bool = setting(
        False, "no TLS off loopback: whoever sits between can read and alter everything", group="network",
        accepts="true or false",
    )  # fmt: skip
    connect_timeout: Time = setting(
        _WORKER.connect_timeout_s, "how long to look for the coordinator, at the start and when it was lost",
        group="the run", metavar="TIME", accepts=SECONDS, shown=f"{_WORKER.connect_timeout_s:g}s",
    )  # fmt: skip
    lifetime: Time | None = setting(
        None, "leave in good order after that long", group="the run", metavar="TIME", accepts=SECONDS
    )
    grace: Annotated[Duration, Field(ge=0, allow_inf_nan=False)] = setting(
        _WORKER.grace_s, "asked to leave, finish the lease under way within that long or give it back",
        group="the run", metavar="TIME", accepts="a time like 0, 10s or 5m", shown=f"{_WORKER.grace_s:g}s",
    )  # fmt: skip

    device: Text = setting(
        _WORKER.device, "auto, cpu, cuda, cuda:N or mps", group="machine", metavar="DEVICE",
        accepts="auto, cpu, cuda, cuda:N or mps",
    )  # fmt: skip
    threads: AtLeast1 | None = setting(None, "torch's threads", group="machine", accepts=FROM_1, shown="torch's choice")
    compile: bool = setting(
        False, "torch.compile the step where that pays; gives other bits", group="machine", accepts="true or false"
    )
    sandbox: Sandboxing = setting(
        "auto", "run the coordinator's program in a process without files, network and secrets (Linux): on, off, or "
        "auto, which is on off loopback; it does not touch --job", group="machine", metavar="HOW",
        accepts="auto, on or off",
    )  # fmt: skip
    inline_block: Annotated[Duration, Field(ge=0, le=0.1)] = setting(
        0.0005, "blocks expected to take no longer are computed on the event loop; 0: none", group="machine",
        metavar="TIME", accepts="a time from 0 to 100ms", shown="0.5ms",
    )  # fmt: skip
    memory_limit: Annotated[Annotated[int, Field(ge=1 << 20)] | None, BeforeValidator(_auto_or_size)] = setting(
        None, "most memory for batches that it holds; a run whose leases need more ends it, exit code 2",
        group="machine", metavar="SIZE", accepts=f"auto, or {BYTES}, at least 1MiB", shown="auto",
    )  # fmt: skip

    data_dir: Folder | None = setting(
        None, "what a lossy codec has left out is kept there when the worker leaves in good order", group="machine",
        metavar="DIR", accepts="a directory, which need not exist yet",
    )  # fmt: skip

    loop: LoopKind = setting(
        "auto", "event loop: auto, uvloop or asyncio", group="program", metavar="KIND",
        accepts="auto, uvloop or asyncio",
    )  # fmt: skip
    log: LogMode = setting(
        "normal", "silent, normal or verbose", group="program", metavar="HOW", accepts="silent, normal or verbose"
    )
    log_format: LogFormat = setting(
        "text", "text, or json: an object per line", group="program", metavar="HOW", accepts="text or json"
    )
    profile_memory: Folder | None = setting(
        None, "note what allocates memory; SIGUSR2 and the end write a report there (it costs time and memory)",
        group="program", metavar="DIR", accepts="a directory, which need not exist yet",
    )  # fmt: skip
    config: Path | None = setting(
        None, "TOML file with the tables [coordinator] and [worker]", group="program", metavar="FILE", accepts="a path"
    )
    exit_with_stdin: bool = setting(
        False, "end when standard input does: whoever holds its other end is gone", group="program",
        accepts="true or false", hidden=True,
    )  # fmt: skip

    def require(self) -> None:
        given = [name for name in ("join_file", "join", "server") if getattr(self, name) is not None]
        if not given:
            raise UsageError("--join-file or --server is missing: the coordinator prints the whole command")
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} both say where the coordinator is; leave out one of them")

    def where(self) -> str:
        """The coordinator: ``host:port`` or a join string. Raises UsageError."""
        if self.join_file is not None:
            place, text = f"join file {self.join_file}", read_secret_file(self.join_file, kind="join file")
        elif self.join is not None:
            place, text = "W5XDE_JOIN or --join", self.join
        else:
            assert self.server is not None
            if "://" in self.server:  # every user of the machine reads arguments
                raise UsageError(
                    "--server takes host:port; put a join string into a file of mode 0600 and give --join-file, or "
                    "into W5XDE_JOIN"
                )
            return self.server
        Invitation.parse(text, place=place)
        return text

    def worker_config(self, token: str) -> WorkerConfig:
        """Raises UsageError (a device that is none)."""
        return WorkerConfig(
            name=self.name or "",
            token=token,
            tls=TlsFiles(self.tls_cert, self.tls_key, self.tls_ca_file),
            insecure=self.insecure,
            device=self.device,
            threads=self.threads,
            connect_timeout_s=self.connect_timeout,
            lifetime_s=self.lifetime,
            data_dir=self.data_dir,
            grace_s=self.grace,
            inline_block_s=self.inline_block,
            sandbox=self.sandbox,
            compile=self.compile,
            memory_limit_bytes=_WORKER.memory_limit_bytes if self.memory_limit is None else self.memory_limit,
        )

    def progress_config(self, *, color: bool) -> ProgressConfig:
        return ProgressConfig(mode=self.log, log_format=self.log_format, color=color)
