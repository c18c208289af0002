"""The two programs: what they have beside the configs that they make, and where they differ from those."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from w5xde_async.compute.machine import usable_cores
from w5xde_async.config import (
    MOST_NAMED,
    NAME,
    PATH,
    THREADS,
    TIME,
    YES_OR_NO,
    one_of,
    path_or,
    same_as,
    setting,
    text,
    whole,
)
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import UsageError, need, utf8
from w5xde_async.net.endpoint import is_no_address, parse_address
from w5xde_async.net.join import Invitation, expanded, read_join_file
from w5xde_async.settings.flags import Program, declared, read
from w5xde_async.telemetry.progress import ProgressConfig
from w5xde_async.updates.config import USED_BY, UpdateConfig
from w5xde_async.worker.config import WorkerConfig

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
7 device lost, 8 island lost, 75 told to leave before the end (worker: SIGTERM,
SIGUSR1, a notice), 130 second Ctrl-C or SIGTERM."""
_CLOUD = r"off|auto|(aws|gcp|azure)(=http://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,4}|:[1-5]\d{4}|:6[0-4]\d{3})?(/\S*)?)?"
_JOB = path_or(text("FILE.py:NAME or MODULE:NAME", "JOB"))
#: The run's files name it, and it names the run.
_RUN_DIR = PATH._replace(
    accepts="a path, in UTF-8", metavar="DIR", holds=lambda value: PATH.holds(value) and utf8(str(value)) == str(value)
)


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(Program):
    """Settings of ``w5xde_async.coordinator``."""

    table = "coordinator"
    usage = "JOB [options]"
    about = f"Train JOB on the workers that connect.\n\n{_PRECEDENCE}"
    ending = (
        f"{_SECRETS}\n\nCtrl-C or SIGTERM stops in good order with a checkpoint; the same command goes\n"
        f"on from there. SIGUSR1 writes a checkpoint.\n\n{_EXIT_CODES}"
    )
    everyday = "job max_steps epochs host port workers name resume override dashboard_address config"
    parts = (CoordinatorConfig, ProgressConfig)
    first = (
        "job max_steps epochs max_time update norm_gate audit_fraction audit_tolerance host port workers name "
        "dashboard loader_threads threads data_dir loop log log_format"
    )
    defaults: ClassVar = {
        "code_free": True, "min_workers": None, "dashboard_address": "127.0.0.1:5556", "short_steps": "here",
    }  # fmt: skip

    job: str | None = setting(
        None, "what to train: FILE.py:NAME or MODULE:NAME, a Job or a function that returns one", _JOB, "the run",
        positional=True,
    )  # fmt: skip
    workers: int = setting(0, "start so many worker processes on this machine", whole(0), "workers")
    worker_threads: int | None = setting(
        None,
        "threads of each of them",
        THREADS,
        "workers",
        shown="cores / workers; 1 for short leaves where microbatch_size is open",
    )
    name: str | None = setting(None, "name of the run", NAME, "files", shown="the job's file or module")
    run_dir: Path | None = setting(None, "directory of the run", _RUN_DIR, "files", shown="runs/NAME")
    dashboard: bool = setting(True, "show the run in a browser", YES_OR_NO, "watching")
    threads: int | None = setting(
        None,
        "torch's threads in the coordinator itself",
        THREADS,
        "program",
        shown="torch's choice, at most the container's cores",
    )
    data_dir: Path | None = same_as(WorkerConfig, "data_dir")  # of the workers on this machine

    @classmethod
    def derived(cls, values: Mapping[str, Any]) -> Mapping[str, object]:
        target = (values["job"] or "").rpartition(":")[0]
        stem = Path(target).stem if target.endswith(".py") else target.rpartition(".")[2]
        named = "" if values["run_dir"] is None else os.path.basename(os.path.abspath(values["run_dir"]))
        found = [one[:MOST_NAMED] for one in (named, stem)]  # a directory may have a longer name
        name = values["name"] or next(filter(NAME.holds, found), "run")
        workers, threads = max(values["workers"], 1), os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and threads.strip("0"):
            own = THREADS.value_at("OMP_NUM_THREADS", threads)
        else:  # not set, or of OpenMP's other kinds
            own = max(1, usable_cores() // workers)
        return {"name": name, "run_dir": Path("runs") / name, "min_workers": workers, "worker_threads": own}

    def require(self) -> None:
        need(self.job is not None, "JOB is missing: give FILE.py:NAME or MODULE:NAME, for example train.py:job")

    def worker_devices(self) -> tuple[str, ...]:
        """What the environment or the [worker] table says of local workers' device; empty: they are dealt out."""
        device = str(self._of_workers().values["device"])
        return () if device == "auto" else (device,)

    def require_certificates(self) -> None:
        """Raises UsageError where local workers would not be let in."""
        need(
            not self.workers or self.values["tls_ca_file"] is None or self._of_workers().values["tls_cert"] is not None,
            "--tls-ca-file asks every worker for a certificate, and those of --workers have none: give them one "
            "(W5XDE_TLS_CERT and W5XDE_TLS_KEY, or tls_cert and tls_key below [worker] in the file of --config), or "
            "leave out --workers and start each with --tls-cert and --tls-key",
        )

    def _of_workers(self) -> WorkerSettings:
        """What local workers read of their settings beside their arguments. Raises UsageError."""
        given = ("--server", "localhost", *(() if self.config is None else ("--config", str(self.config))))
        return read(WorkerSettings, given, prog="")[0]

    def coordinator_config(self, token: str) -> CoordinatorConfig:
        """Raises UsageError (a host off loopback without a token, settings of local workers that do not hold)."""
        most = self.values["max_workers"]
        need(self.workers <= most, f"--workers {self.workers} is more than --max-workers {most}")
        more: dict[str, Any] = {} if self.dashboard else {"dashboard": ""}
        if self.values["update"] == "auto":
            more |= {"auto": True, "update": self.make(UpdateConfig, rule="sync")}
        config = self.make(CoordinatorConfig, token=token, **more)
        if not self.workers:
            return config
        told = self._of_workers()
        return config if told.island or told.island_member else config.with_own_workers()

    def without_effect(self) -> str:
        """One line on what was given and is not used; "" where there is nothing to say.

        A default that was given says nothing: a file of ``--print-config`` has those of every rule.
        """
        known, rule = declared(type(self)), self.values["update"]
        given = {name for name in self.told if self.values[name] != known[name].default}
        lines = [
            f"{known[name].option} does nothing without {known[without].option}"
            for name, without in _NEEDS.items()
            if name in given and not self.values[without]
        ]
        if rule == "auto":  # which may choose a rule that uses it
            return "; ".join(lines)
        update, found = self.make(UpdateConfig), dict[tuple[str, ...], list[str]]()
        for one in fields(update):
            if one.name in given and not update.uses(one.name):
                found.setdefault(USED_BY[one.name], []).append(known[one.name].option)
        said = [f"{', '.join(options)} ({', '.join(rules)})" for rules, options in found.items()]
        if "feedback" in given and update.uplink_codec.exact:
            lines.append(f"--no-feedback does nothing under --codec {update.codec}, which leaves nothing out")
        return "; ".join([f"--update {rule} has no use for " + "; ".join(said)] * bool(said) + lines)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Program):
    """Settings of ``w5xde_async.worker``."""

    table = "worker"
    usage = "(--join-file FILE | --server HOST:PORT)\n       [--job JOB] [options]"
    about = (
        "Compute for the coordinator at --server. It sends what is to be computed; a\n"
        "step that cannot be sent needs --job, read from the current directory.\n\n"
        f"{_PRECEDENCE}"
    )
    ending = (
        f"{_SECRETS}\n\nCtrl-C, SIGTERM or SIGUSR1: it leaves in good order after the lease under way.\n\n{_EXIT_CODES}"
    )
    everyday = "join_file server job name device threads lifetime config"
    parts = (WorkerConfig, ProgressConfig)
    first = "server job name token_file tls_cert device loop log log_format"
    defaults: ClassVar = {"inline_block": 0.005, "exit_on_drain": 75}
    alternatives = ("join_file", "join", "server")
    changed: ClassVar = {
        "token_file": {"group": "the run"},
        "exit_on_drain": {
            "meaning": "exit code after SIGTERM, SIGUSR1 or a notice before the run's end: after 0, engines count it "
            "as done and start no other"
        },
        "tls_cert": {"meaning": "TLS certificate of this worker (PEM), where the coordinator wants one"},
        "tls_ca_file": {"meaning": "authorities that the coordinator's certificate must have"},
    }

    server: str | None = setting(
        None, "the coordinator's address; without a port, 5555", text("HOST or HOST:PORT", "HOST:PORT"), "the run"
    )
    job: str | None = setting(
        None, "the job that the coordinator trains, as this machine finds it: its own code in place of the "
        "coordinator's program", _JOB, "the run", shown="the coordinator's program",
    )  # fmt: skip
    join_file: Path | None = setting(
        None, "file with the coordinator's join string: address, secret and certificate", PATH, "the run"
    )
    join: str | None = setting(
        None, "a join string; as an argument only without its secret",
        text("w5xde://host:port?cert=sha256:...", "STRING"), "the run",
    )  # fmt: skip
    island: str | None = setting(
        None, "compute with several processes or devices as one worker: dp=N (each has leaves of its own), fsdp=N "
        "(each holds a part of every layer), pp=N (each holds some of the layers), tp=N (each computes a part of large "
        "layers), fsdp=N,tp=M, dp=N,tp=M, dp=N,pp=M, or auto: what the model's size and this machine's devices ask for",
        text("dp=N, fsdp=N, pp=N, tp=N, two of them, or auto", "SHAPE"), "machine", shown="one device",
    )  # fmt: skip
    island_member: str | None = setting(
        None, "the same, as one rank: the coordinator brings those together that say the same shape, from any machines",
        text("as for --island, but auto", "SHAPE"), "machine", shown="no",
    )  # fmt: skip
    island_interface: str | None = setting(
        None, "network interface for what an island's ranks tell each other, without any protection: one that you "
        "trust",
        text("the name of an interface", "NAME"), "machine", shown="loopback",
    )  # fmt: skip
    pp_schedule: str = setting(
        "1f1b", "the order in which the stages of pp=N compute: 1f1b (forward and backward take turns, over a whole "
        "lease) or gpipe (leaf by leaf, all microbatches forward, then all backward)", one_of("1f1b", "gpipe"),
        "machine",
    )  # fmt: skip
    pp_stages: str = setting(
        "", "modules of the model at which the stages of pp=N begin, but the first one: layers.4,layers.8 for three",
        text("names with commas between", "NAMES"), "machine", shown="even shares of the arithmetic",
    )  # fmt: skip
    checkpoint_activations: bool = setting(
        False, "under fsdp=N, tp=N and pp=N, compute forward passes once more in backward, in place of keeping what "
        "they made", YES_OR_NO, "machine",
    )  # fmt: skip

    watch_preemption: str = setting(
        "off", "leave when the cloud announces the machine's end: aws, gcp, azure, or auto, which asks the machine "
        "whose it is; it calls that cloud's metadata service",
        text("off, auto, aws, gcp or azure (the last three also with =URL)", "CLOUD", _CLOUD), "machine",
    )  # fmt: skip

    def require(self) -> None:
        need(self.island is None or self.island_member is None, "give --island or --island-member, not both")
        if self.island is None and self.island_member is None:
            useless = [name for name in _OF_ISLANDS if getattr(self, name) != getattr(type(self), name)]
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in useless)
            need(not useless, f"{flags}: there is no island; give --island or --island-member too, or leave it out")
        given = [name for name in self.alternatives if getattr(self, name) is not None]
        need(bool(given), "--join-file or --server is missing: the coordinator prints the whole command")
        need(len(given) < 2, f"{' and '.join(given)} both say where the coordinator is; leave out one of them")

    def where(self) -> str:
        """The coordinator: ``host:port`` or a join string; "" where there is no join file yet. Raises UsageError."""
        if self.join_file is not None:
            with suppress(OSError):  # as for a name that is too long: it is told where it is read
                if not expanded(self.join_file, "join file").exists():
                    return ""
            return read_join_file(self.join_file).reveal()
        if self.join is not None:
            return Invitation.parse(self.join, place="W5XDE_JOIN or --join").reveal()
        assert self.server is not None
        if is_no_address(self.server):  # every user of the machine reads arguments
            raise UsageError(
                "--server takes host:port; put a join string into a file of mode 0600 and give --join-file, or "
                "into W5XDE_JOIN"
            )
        parse_address(self.server, place="--server")
        return self.server


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(WorkerSettings):
    """Settings of ``w5xde_async.doctor``: a worker's, so that its command line will do."""

    about = (
        "Say what is wrong between this machine and the coordinator: name, route, port,\ncertificate, secret, clock, "
        "round trip, rate each way, and what --update auto would\nchoose. It takes the options of a worker, does not "
        "join the run and takes ten\nseconds at most."
    )
    ending = f"{_SECRETS}\n\n{_EXIT_CODES}"


@dataclass(frozen=True, kw_only=True)
class PredictionSettings(CoordinatorSettings):
    """Settings of ``w5xde_async.predict``: a coordinator's, so that its command line will do."""

    about = (
        "Say what a run of JOB will need: memory of the coordinator and of a worker, bytes\non the network, time. "
        "A few microbatches are computed on this machine; nothing is\nwritten. It takes the options of a coordinator; "
        "--workers says for how many workers."
    )
    ending = _EXIT_CODES


@dataclass(frozen=True, kw_only=True)
class TuningSettings(CoordinatorSettings):
    """Settings of ``w5xde_async.tune``: a coordinator's, so that its command line will do."""

    about = (
        "Measure which microbatch_size of JOB trains fastest on this machine, with one worker\nand with --workers (2), "
        "beside a plain loop on the same cores. Takes a minute or two;\nnothing is written. It takes the options "
        "of a coordinator."
    )
    ending = _EXIT_CODES
    everyday = "job workers worker_threads seconds update codec"

    workers: int = setting(2, "workers to measure with, beside one; 0 and 1: one alone", whole(0), "workers")
    seconds: float = setting(3.0, "of each measurement; two for each size", TIME, "the run")


#: Settings of a coordinator that do nothing without another.
_NEEDS = {"batch_patience": "target_batch", "worker_threads": "workers", "data_dir": "workers"}
#: Settings of a worker that only an island has a use for.
_OF_ISLANDS = ("island_interface", "pp_schedule", "pp_stages", "checkpoint_activations")
PROGRAMS: tuple[type[Program], ...] = (CoordinatorSettings, WorkerSettings)
_OTHER_VARIABLES = ("W5XDE_TOKEN", "W5XDE_DASHBOARD_LINK", "W5XDE_FAILPOINTS")


def variables() -> frozenset[str]:
    """Those of the environment that say a setting of a program."""
    return frozenset(one.variable for program in PROGRAMS for one in declared(program).values())


def misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """What to say of variables that no program reads and that are spelt nearly as one that is."""
    known = {*_OTHER_VARIABLES, *variables()}
    names = [name.removeprefix("W5XDE_") for name in known]
    for name in sorted(name for name, value in environment.items() if value and name.startswith("W5XDE_")):
        if name not in known and (near := difflib.get_close_matches(name.removeprefix("W5XDE_"), names, 1, 0.7)):
            yield f"no program reads {name}; did you mean W5XDE_{near[0]}?"
