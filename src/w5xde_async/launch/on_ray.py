"""Ray: an actor for the coordinator, an actor for each worker, which Ray places where it has room and starts again.

An actor keeps one program as a process of its node, and ends with it: Ray then starts the actor anew, on another node
where it has to, and calls ``run`` again. Actors are detached, so that a run outlives who has started it; starting it
again under its name finds them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import ray

from w5xde_async.errors import ExitCode
from w5xde_async.launch.plan import HOPELESS, Plan, not_of_the_run
from w5xde_async.net.join import write_private_line
from w5xde_async.process import interrupts, note
from w5xde_async.runtime import start_process

logger = logging.getLogger(__name__)

_NAMESPACE = "w5xde"
_FINAL = (ExitCode.OK, ExitCode.ERROR, *HOPELESS)  # no other start would end otherwise, or none is wanted
_AGAIN_S, _LOOK_S = 1.0, 1.0
_STOPPED: dict[int, str] = {
    ExitCode.DRAINED: "stopped in good order; the same command goes on from there",
    ExitCode.OK: "the run has come to its end",
}
_NOT_STOPPED = (
    "the run has not stopped in good order (exit code {code}): its coordinator's log says why, and ray list actors "
    "whether it goes on"
)
_STOPPING = "Ctrl-C: the run stops in good order, with a checkpoint (at most {seconds} s); again: ends at once"
_ENDED = "ended at once: the same command goes on from the run's last checkpoint"
_GOES_ON = "ended at once, and the run's actors may go on: the same command finds them"
_NOTHING = "stopped before it began"
_FOLDER = "w5xde-ray-"
_NOT_UPLOADED = [".git", ".venv", "runs"]


class Keeper:
    """One program of this package as a process. Made into an actor by ``Fleet``."""

    def __init__(self, program: str, arguments: list[str], coordinator: Any = None) -> None:
        """``coordinator``: the actor that a worker asks for the join string; None: this is it."""
        self._program, self._arguments, self._coordinator = program, arguments, coordinator
        self._folder, self._held = _own_folder()
        self._process: Process | None = None
        self._running: asyncio.Task[int] | None = None
        self._leaving = asyncio.Event()

    async def run(self) -> int:
        """From the program's start to its end for good: the exit code. Whoever asks again waits for the same end."""
        if self._running is None:
            self._running = asyncio.create_task(self._keep())
        return await asyncio.shield(self._running)

    async def _keep(self) -> int:
        following = asyncio.create_task(self._follow())
        code: int = ExitCode.ERROR
        try:
            if self._leaving.is_set():
                return ExitCode.DRAINED
            where = ["--join-file", str(self._join)]
            if self._coordinator is None:
                where += ["--host", ray.util.get_node_ip_address(), "--port", "0"]
            dropped = not_of_the_run(os.environ)  # a cluster of one machine has that of who launches
            self._process = process = await start_process(
                sys.executable, "-m", f"w5xde_async.{self._program}", *self._arguments, *where, "--exit-with-stdin",
                stdin=PIPE, env={name: value for name, value in os.environ.items() if name not in dropped},
            )  # fmt: skip
            if self._leaving.is_set():  # told to while it was being started
                self._tell()
            code = await process.wait()
            ended = f"ended with exit code {code}"
        except Exception as error:  # this node lacks memory, processes, ...: Ray may find another one
            ended = f"could not be started ({error})"
        else:
            if code in _FINAL:
                return code
        finally:
            following.cancel()
        if not self._leaving.is_set():
            logger.warning("%s %s, and its actor ends with it: Ray starts it again", self._program, ended)
            await asyncio.sleep(_AGAIN_S)
        if self._leaving.is_set():
            return code
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        os._exit(1)

    async def join(self) -> str:
        """The coordinator's join string, once it has one."""
        while not self._join.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
        return self._join.read_text(encoding="utf-8").strip()

    async def leave(self) -> None:
        """Have the program leave in good order, and wait for that."""
        self._leaving.set()
        self._tell()
        if self._running is not None:
            await asyncio.wait([self._running])
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _tell(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def pids(self) -> tuple[int, int]:
        """Process ids: of the actor, and of the program once it runs, else 0."""
        return os.getpid(), 0 if self._process is None else self._process.pid

    @property
    def _join(self) -> Path:
        return self._folder / "join"

    async def _follow(self) -> None:
        """Keep a worker's join file at what the coordinator's actor says, which may be another one by then."""
        written = ""
        while self._coordinator is not None:
            with suppress(ray.exceptions.RayError, OSError):  # which the next look may not meet
                if (told := await self._coordinator.join.remote()) != written:
                    write_private_line(self._join, told)
                    written = told
            await asyncio.sleep(_LOOK_S)


class Fleet:
    """The actors of one run. Entering connects to the cluster that Ray finds (RAY_ADDRESS; none: one of this machine).
    Leaving leaves them as they are."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._prefix = f"{plan.name}.worker-"  # no run has a dot in its name: none is called as a worker of another
        self._coordinator: Any = None
        self._end: Any = None
        self._workers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if not ray.is_initialized():
            # A job that was submitted to the cluster has brought its folder already.
            brought = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
            place = {} if brought else {"working_dir": os.getcwd(), "excludes": _NOT_UPLOADED}
            ray.init(namespace=_NAMESPACE, runtime_env=place, logging_level=logging.WARNING)
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def start(self) -> None:
        """Start those that are not there."""
        plan = self._plan
        arguments = [*plan.train, "--run-dir", str(plan.run_dir)]
        self._coordinator = _actor(plan.name, "coordinator", arguments, num_cpus=0)
        self._end = self._coordinator.run.remote()
        self._find()
        self.scale(plan.workers)

    def _find(self) -> None:
        """Those that are there, whoever has started them, or was interrupted while it did."""
        known = (
            one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == _NAMESPACE
        )
        for name in sorted(known):
            if name == self._plan.name and self._coordinator is None:
                self._coordinator = ray.get_actor(name, _NAMESPACE)
            elif name.startswith(self._prefix) and name not in self._workers:
                self._workers[name] = ray.get_actor(name, _NAMESPACE)

    @property
    def workers(self) -> list[Any]:
        """The workers' actors. Those for which there is no room wait."""
        return list(self._workers.values())

    def scale(self, count: int) -> None:
        """Have so many workers: more wait for room where there is none, and the last ones leave in good order."""
        plan, number = self._plan, 0
        while len(self._workers) < count:
            name = f"{self._prefix}{number}"
            number += 1
            if name not in self._workers:
                self._workers[name] = worker = _actor(
                    name, "worker", list(plan.compute), self._coordinator, num_cpus=plan.cpus, num_gpus=plan.gpus,
                    memory=plan.memory_bytes,
                )  # fmt: skip
                worker.run.remote()
        leaving = [self._workers.pop(name) for name in list(self._workers)[count:]]
        _end(leaving, plan.worker_grace_s)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The coordinator's exit code once the run has ended for good; then no actor is left. None: not yet."""
        done, _ = ray.wait([self._end], timeout=timeout_s)
        if not done:
            return None
        code = int(ray.get(self._end))
        _end([*self._workers.values(), self._coordinator], self._plan.worker_grace_s)
        return code

    def stop(self) -> int:
        """Have the run stop in good order, with a checkpoint, also where not all of it has been started. The
        coordinator's exit code; ERROR where it has not stopped in time, and goes on."""
        self._find()
        if self._coordinator is None:  # nor any worker, which come after it
            return ExitCode.DRAINED
        if self._end is None:
            self._end = self._coordinator.run.remote()
        ray.wait([self._coordinator.leave.remote()], timeout=self._plan.coordinator_grace_s)
        code = self.wait(5.0)
        return ExitCode.ERROR if code is None else code

    def kill(self) -> None:
        """End the run at once."""
        self._find()
        for actor in (self._coordinator, *self._workers.values()):
            if actor is not None:
                ray.kill(actor, no_restart=True)


def run(plan: Plan) -> int:
    """Start the run, or join in with who has started it, and wait for its end. The exit code."""
    code: int | None = None
    try:
        with interrupts(), Fleet(plan) as fleet:
            code = _until_its_end(fleet, plan)
    except KeyboardInterrupt:
        if code is None:
            note(_NOTHING)
    return ExitCode.OK if code in (None, ExitCode.DRAINED) else int(code)


def _until_its_end(fleet: Fleet, plan: Plan) -> int | None:
    try:
        try:
            fleet.start()
            return fleet.wait()
        except KeyboardInterrupt:
            note(_STOPPING.format(seconds=plan.coordinator_grace_s))
            code = fleet.stop()
            note(_STOPPED.get(code, _NOT_STOPPED).format(code=code))
            return code
    except KeyboardInterrupt:  # another one
        said = _GOES_ON
        with suppress(KeyboardInterrupt):
            fleet.kill()
            said = _ENDED
        note(said)
        return ExitCode.INTERRUPTED_TWICE


def _actor(name: str, program: str, arguments: list[str], coordinator: Any = None, **needs: Any) -> Any:
    options = {
        "name": name, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1,
        "max_task_retries": -1,
    }  # fmt: skip
    return ray.remote(**needs)(Keeper).options(**options).remote(program, arguments, coordinator)


def _own_folder() -> tuple[Path, int]:
    """A folder for join strings, which hold the run's secret, and the descriptor by which this process has it locked.

    An actor that was killed has left its own. The next one on its node removes it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):  # another user's, or of one that lives
            held = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        if sys.platform == "win32":  # pragma: no cover
            return folder, -1
        with suppress(OSError):  # somebody has found it before it was locked
            return folder, _locked(folder)


def _locked(folder: Path) -> int:
    """The descriptor of a folder of this user that nobody else has. Raises OSError."""
    if sys.platform == "win32":  # pragma: no cover
        raise OSError("no lock on folders")
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(str(folder))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists():
            raise FileNotFoundError(str(folder))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _end(actors: list[Any], patience_s: float) -> None:
    """Have their programs leave, and end them. One that never found room is not waited for longer than the others."""
    if actors:
        ray.wait([actor.leave.remote() for actor in actors], num_returns=len(actors), timeout=patience_s)
    for actor in actors:
        ray.kill(actor, no_restart=True)
