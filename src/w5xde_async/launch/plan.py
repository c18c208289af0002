"""What is to be launched: one coordinator and some workers, with what each needs."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TypeVar

from w5xde_async.config import Answer
from w5xde_async.errors import ExitCode, UsageError, need
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.settings import CoordinatorSettings, WorkerSettings, read, variables
from w5xde_async.worker.config import WorkerConfig

_P = TypeVar("_P", CoordinatorSettings, WorkerSettings)

PORT = 5555
#: No other start would end otherwise: an engine is to stop at these.
HOPELESS = (ExitCode.USAGE, ExitCode.AUTHENTICATION, ExitCode.MISMATCH)

_GOODBYE_S = 5  # of a worker whose --grace is over
_LAST_FILES_S = 170  # for what a coordinator writes to a slow disk at its end, beside what it has for it in any case
_LONGEST = 40
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?")
_OURS = (
    "--host", "--port", "--advertise", "--join-file", "--token-file", "--insecure", "--exit-on-drain", "--workers",
    "--no-dashboard", "--dashboard-address", "--config", "--name", "--exit-with-stdin",
)  # fmt: skip
_OURS_OF_WORKERS = (
    "--server", "--join-file", "--join", "--token-file", "--insecure", "--exit-on-drain", "--job", "--name", "--config",
    "--connect-timeout", "--threads", "--exit-with-stdin",
)  # fmt: skip
#: Of who launches, the programs of a run on Slurm or Ray heed these variables: no flag after -- says the same.
KEPT = ("W5XDE_TOKEN", "W5XDE_TOKEN_FILE", "W5XDE_ADVERTISE", "W5XDE_DASHBOARD", "W5XDE_DASHBOARD_ADDRESS")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of ``job``. Options are flags as its programs take them; ``memory_bytes``, ``cpus`` and ``gpus`` are those
    of each worker."""

    job: str
    name: str
    workers: int
    cpus: int
    gpus: int
    memory_bytes: int
    options: tuple[str, ...] = ()
    worker_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for what the programs would refuse, or an engine."""
        need(
            bool(_NAME.fullmatch(self.name)),
            f"--name (if it is left out, it is made of the job's file): {self.name!r} will not do; give up to 40 small "
            "letters, digits and hyphens that begin with a letter",
        )
        refuse(self.options, _OURS, "after --")
        told = _told(CoordinatorSettings, [self.job, *self.options], "after --")
        told.coordinator_config("as an engine gives it")
        most = told.values["max_workers"]
        need(self.workers <= most, f"--workers {self.workers} is more than --max-workers {most}; give that after --")
        need(
            told.values["resume"] == "auto",
            "after --: --resume would begin anew each time that the engine starts the coordinator; leave it out, and "
            "give another --name for another run",
        )
        refuse(self.worker_options, _OURS_OF_WORKERS, "--worker-options")
        worker = _told(WorkerSettings, ["--server", "localhost", *self.worker_options], "--worker-options")
        worker.make(WorkerConfig)
        for shape in (worker.island, worker.island_member):
            if shape is not None and not (shape == "auto" and worker.island):
                IslandShape.parse(shape)

    @property
    def train(self) -> tuple[str, ...]:
        """The coordinator's job and flags, but for where it is."""
        return (self.job, "--name", self.name, "--exit-on-drain", str(int(ExitCode.DRAINED)), *self.options)

    @property
    def worker_grace_s(self) -> int:
        """For a worker to leave: --grace, and its goodbye."""
        told, _ = read(WorkerSettings, ("--server", "localhost", *self.compute), prog="", environment={})
        return math.ceil(float(told.values["grace"])) + _GOODBYE_S

    @property
    def coordinator_grace_s(self) -> int:
        """For a coordinator to stop: --grace for the step, six times that for its last checkpoint, and the files."""
        told, _ = read(CoordinatorSettings, self.train, prog="", environment={})
        return math.ceil(7 * float(told.values["grace"])) + _LAST_FILES_S

    @property
    def run_dir(self) -> Path:
        """Where an engine whose machines share a disk has the run, absolute."""
        run_dir = read(CoordinatorSettings, self.train, prog="", environment={})[0].run_dir
        assert run_dir is not None
        return run_dir.absolute()

    @property
    def compute(self) -> tuple[str, ...]:
        """A worker's flags, but for where the coordinator is."""
        return ("--job", self.job, "--threads", str(self.cpus), *self.worker_options)


def name_of(job: str) -> str:
    """A run's name that every engine takes, made of the job's file or module; two that are cut have two names."""
    file = job.rpartition(":")[0]
    stem = Path(file.replace("\\", "/")).stem if file.endswith(".py") else file.rpartition(".")[2]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "run"
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9].strip('-')}-{hashlib.blake2b(stem.encode(), digest_size=4).hexdigest()}"


def fill(template: str, **values: object) -> str:
    """The text of a template with ``@@name`` replaced."""
    return _Filled(files(__package__).joinpath("templates", template).read_text(encoding="utf-8")).substitute(values)


class _Filled(Template):
    delimiter = "@@"  # shells have the dollar


def not_of_the_run(environment: Mapping[str, str]) -> list[str]:
    """Variables that say a setting, by which none of a run is said: a flag is checked, and none of an engine's own."""
    return [name for name in dropped() if environment.get(name)]


def dropped() -> list[str]:
    """The variables that say a setting, and that a run's programs are not to have of who launches."""
    return sorted(variables().difference(KEPT))


def _told(program: type[_P], arguments: Sequence[str], where: str) -> _P:
    """Raises UsageError, also for a flag that has the program print something in place of a run."""
    try:
        return read(program, arguments, prog="", environment={})[0]
    except Answer:
        raise UsageError(
            f"{where}: --help, --version and --print-config start no run; give them to w5xde {program.table}"
        ) from None


def refuse(options: Sequence[str], ours: Collection[str], where: str) -> None:
    """Raises UsageError where ``ours``, flags that an engine's module gives, are among ``options``."""
    flags = (word.partition("=")[0].replace("_", "-") for word in options)
    if taken := next((flag for flag in flags if flag in ours), ""):
        raise UsageError(f"{where}: {taken} is for w5xde launch to say")
