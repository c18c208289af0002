"""Worker processes of this machine: started, watched, started again, ended.

Invariants: no process outlives the ``LocalWorkers`` that started it (SIGTERM, then SIGKILL; and where this process
is killed itself, its end of their standard input closes and they go). Each has a session of its own, so that a
terminal's Ctrl-C reaches the coordinator alone, which then lets them finish. A worker that crashes is started again,
three times within a minute at most, in which the time that it takes to load does not count; one that could never work
(usage, token, model) is not. One that the coordinator has lost (``heard``) and that does not come back hangs: it is
killed, and started again. The token travels in the environment, which other users cannot read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from w5xde_async.cluster.words import BY_OTHERS, MOST_BY_OTHERS, WordReader
from w5xde_async.config import BESIDE_FILE
from w5xde_async.errors import ExitCode, LocalError
from w5xde_async.net.token import JOINING
from w5xde_async.runtime import is_stopped, start_process
from w5xde_async.telemetry.events import Event, WorkerJoined, WorkerLeft

logger = logging.getLogger(__name__)

#: The last argument but one of a worker process that learns the others from standard input; the last says of whom. Its
#: standard output is for its words (``words``), on every system: what is printed goes to standard error.
PRESTARTED = "--prestarted-by"

#: How a worker finds out whom it talks to, which these are told: by a certificate's hash, where there is TLS.
_OF_LINK = ("W5XDE_INSECURE", "W5XDE_TLS_CA_FILE")
_OF_TLS = ("W5XDE_TLS_CERT", "W5XDE_TLS_KEY")  # a worker that is given one speaks TLS

#: By these, worker processes learn that they are islands.
_OF_ISLANDS = ("W5XDE_ISLAND", "W5XDE_ISLAND_MEMBER", "W5XDE_CONFIG")

_RESTARTS, _RESTART_WINDOW_S, _RESTART_DELAY_S = 3, 60.0, 0.25
_LOST_S = 30.0  # so long a worker that has lost its link may take to come back: it tries every few seconds
_JOINS_S = 60.0  # until one that has not joined is told of
_LOOKS_S = 1.0  # between two looks whether a process is gone of which the event loop has heard nothing
#: What a library that ends its process (SIGABRT) most often lacks.
_ABORTED = " (as for lack of threads or memory: ulimit -u, ulimit -v)"
_HOPELESS = (ExitCode.USAGE, ExitCode.AUTHENTICATION, ExitCode.MISMATCH)
_LINE_BYTES, _READ_BYTES = 1 << 20, 1 << 16
_LAST_LINES = 30  # lines kept to show after a crash


def cuda_devices() -> tuple[str, ...]:
    """The CUDA devices of this machine, by name."""
    import torch  # not before workers were started: it takes long

    return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))


def may_be_islands() -> bool:
    """Whether worker processes that are told nothing of it may be islands: they read this process's environment."""
    return any(os.environ.get(name) for name in _OF_ISLANDS)


def least_used(devices: Sequence[str], used: Iterable[str]) -> str:
    """The device that stands least often in ``used``; the first of several."""
    counts = Counter(used)
    return min(devices, key=lambda device: counts[device])


def tell_sharing(devices: Sequence[str], num_workers: int) -> None:
    """Say where workers share devices."""
    if len(devices) < num_workers and devices[0].startswith("cuda"):
        what = f"{len(devices)} CUDA devices" if len(devices) > 1 else "one CUDA device"
        logger.warning(
            "%d workers share %s: each holds a model there, and they take turns; --workers %d is one for each",
            num_workers, what, len(devices),
        )  # fmt: skip


class LocalWorkers:
    """``count`` worker processes for the coordinator at ``address``, which ``at`` may say later.

    ``reference`` "" starts them without the job's code. Each gets that one of ``devices`` which the fewest others have;
    none given: the machine's CUDA devices are dealt out so, unless the environment says W5XDE_DEVICE.
    ``join`` is a join string, to be used in place of ``address`` and ``token``. ``insecure``: the coordinator speaks no
    TLS, wherever it listens. ``data_dir`` is for all of them.
    ``island``: each worker is an island of that shape, whose ranks have a device each.
    ``on_all_lost(reason)`` is called when one has failed for good and no other is left. ``on_given_up(name, reason,
    left)`` is called for each that has failed for good, after that: ``left`` are there yet.
    """

    def __init__(
        self,
        count: int,
        *,
        address: str = "",
        reference: str,
        threads: int = 1,
        devices: Sequence[str] = (),
        token: str = "",
        join: str = "",
        insecure: bool = False,
        config_path: Path | None = None,
        data_dir: Path | None = None,
        island: str = "",
        grace_s: float = 10.0,
        on_all_lost: Callable[[str], None] | None = None,
        on_given_up: Callable[[str, str, int], None] | None = None,
    ) -> None:
        self._wanted = count
        self._prestarted: deque[Process] = deque()
        self._address, self._reference, self._threads = address, reference, threads
        self._island = island
        self._devices, self._device_of = devices, dict[str, str]()
        self._token, self._join, self._insecure = token, join, insecure
        self._config_path, self._data_dir, self._grace_s = config_path, data_dir, grace_s
        self._on_all_lost, self._on_given_up = on_all_lost, on_given_up
        self._hears = False  # what becomes of its workers
        self._here: Counter[str] = Counter()  # links of all workers, by id
        self._ids: dict[str, str] = {}  # by name; by these they are known: anybody may call himself local-0
        self._awaited: dict[str, asyncio.TimerHandle] = {}  # when is told of who has not joined
        self._lost: dict[str, asyncio.TimerHandle] = {}  # when who has lost its last link is killed
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, Process] = {}
        self._number = 0

    async def __aenter__(self) -> Self:
        await self.scale(self._wanted)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def prestart(self) -> None:
        """Start the processes of ``count`` workers: they import what they need until ``scale`` says where to go.

        Raises LocalError where none can be started; what some of them lack is told where ``scale`` fails to start it.
        """
        for _ in range(self._wanted):
            try:
                self._prestarted.append(await self._start())
            except (OSError, LocalError) as error:
                if not self._prestarted:
                    raise LocalError(f"worker local-{self._number} {_unstarted(error)}") from error
                return

    def job_is_loaded(self) -> None:
        """Those of ``prestart`` may load it too: what it fetches once is there."""
        for process in self._prestarted:
            _say(process, b"\n")

    def at(
        self, address: str, *, join: str = "", on_all_lost: Callable[[str], None] | None = None,
        on_given_up: Callable[[str, str, int], None] | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        """Where the coordinator is, if the constructor was not told; ``threads`` where there is a better number now."""
        self._address, self._join = address, join
        self._on_all_lost, self._on_given_up = on_all_lost, on_given_up
        self._threads = threads or self._threads

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of those that run, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    def heard(self, event: Event) -> None:
        """What a coordinator's bus tells, of these workers among others."""
        self._hears = True
        if isinstance(event, WorkerJoined):
            self._here[event.worker_id] += 1
            self._is_here(event.worker_id)
        elif isinstance(event, WorkerLeft) and self._here[event.worker_id]:
            self._here[event.worker_id] -= 1
            if not event.clean and not self._here[event.worker_id]:
                for name in self._names_of(event.worker_id):
                    self._wait_for(name)
            self._here += Counter()  # those without a link are forgotten

    def _told_id(self, name: str, worker_id: str) -> None:
        """A process says what its id is. Others may have said before that it is here."""
        self._ids[name] = worker_id
        if self._here[worker_id]:
            self._is_here(worker_id)

    def _is_here(self, worker_id: str) -> None:
        for name in self._names_of(worker_id):
            self._found(name)
            self._joined(name)

    def _names_of(self, worker_id: str) -> list[str]:
        return [name for name, known in self._ids.items() if known == worker_id]

    def _wait_for(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:
            self._found(name)
            self._lost[name] = asyncio.get_running_loop().call_later(_LOST_S, self._end_lost, name, process)

    def _joined(self, name: str) -> None:
        if name in self._awaited:
            self._awaited.pop(name).cancel()

    def _found(self, name: str) -> None:
        if name in self._lost:
            self._lost.pop(name).cancel()

    def _end_lost(self, name: str, process: Process) -> None:
        del self._lost[name]
        if is_stopped(process.pid):  # by whoever has a reason: it may go on
            self._wait_for(name)
            return
        logger.warning(
            "worker %s neither answers nor comes back: it hangs, in the job's code or its device, and is killed pid=%d",
            name, process.pid,
        )  # fmt: skip
        _kill(process)

    async def scale(self, count: int) -> None:
        """Start workers, or end the youngest ones and wait until they have left in good order."""
        for name in [name for name, keeper in self._keepers.items() if keeper.done()]:  # has left, or was given up
            del self._keepers[name]
            self._device_of.pop(name, None)
        devices = () if self._island else self._devices or cuda_devices()
        if devices and len(self._keepers) < count:
            tell_sharing(devices, count)
        while len(self._keepers) < count:
            name = f"local-{self._number}"
            self._number += 1
            if devices:
                used = (device for other, device in self._device_of.items() if other in self._keepers)
                self._device_of[name] = least_used(devices, used)
            self._keepers[name] = asyncio.create_task(self._keep(name), name=f"keep {name}")
        await self._end(list(self._keepers)[count:])

    async def aclose(self) -> None:
        """End all of them. May be called twice; cancelled, it kills what is left."""
        prestarted = list(self._prestarted)
        self._prestarted.clear()
        for process in prestarted:  # all of them before anything is waited for: that may be cancelled
            _kill(process)
        await self._end(list(self._keepers))
        for process in prestarted:
            await _ended(process)

    def kill(self) -> None:
        """End all of them now, without waiting."""
        for process in (*self._processes.values(), *self._prestarted):
            _kill(process)

    async def _end(self, names: list[str]) -> None:
        keepers = [self._keepers.pop(name) for name in names]
        for name in names:
            self._device_of.pop(name, None)
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            try:
                await asyncio.wait(keepers)
            except asyncio.CancelledError:
                for keeper in keepers:
                    keeper.cancel()  # a second cancel: no more patience
                await asyncio.wait(keepers)
                raise

    # -- one worker ----------------------------------------------------------------------------------------

    async def _keep(self, name: str) -> None:
        device = self._device_of.get(name, "")
        restarts: deque[float] = deque(maxlen=_RESTARTS)  # at how much of ``lasted_s``
        lasted_s, by_others = 0.0, 0
        while True:
            words, printed = WordReader(partial(self._told_id, name)), deque[str](maxlen=_LAST_LINES)
            try:
                code = await self._run(name, device, words, printed)
            except (OSError, LocalError) as error:
                return self._give_up(name, _unstarted(error))
            now = asyncio.get_running_loop().time()
            is_own = words.is_own_end(words.ran_at)
            if code == ExitCode.OK and is_own:
                logger.info("worker %s has left", name)
                return None
            if code is None:
                how = "has ended, how is not known (the job ignores SIGCHLD or waits for processes of others),"
            else:
                how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                how += _ABORTED if code == -6 else ""
            said = "".join(f"\n  {line}" for line in printed)
            if code in _HOPELESS and is_own:
                return self._give_up(name, how, said)
            if code in (ExitCode.OK, *_HOPELESS):
                how += BY_OTHERS
                by_others += 1
            lasted_s += words.lasted_s(now)
            if len(restarts) == _RESTARTS and lasted_s - restarts[0] < _RESTART_WINDOW_S:
                return self._give_up(name, f"{how} again, {_RESTARTS} restarts within a minute", said)
            if by_others > MOST_BY_OTHERS:
                return self._give_up(name, f"{how} again, after {MOST_BY_OTHERS} restarts", said)
            restarts.append(lasted_s)
            logger.warning("worker %s %s and is started again%s", name, how, said)
            await asyncio.sleep(_RESTART_DELAY_S)

    def _give_up(self, name: str, reason: str, said: str = "") -> None:
        """``said``: what it printed last, each in a line that begins with the line's end before it."""
        logger.error("worker %s %s%s%s", name, reason, ":" if said else "", said)
        left = sum(not keeper.done() for other, keeper in self._keepers.items() if other != name)
        if self._on_all_lost is not None and not left:
            self._on_all_lost(f"every local worker has failed; {name} {reason}")
        if self._on_given_up is not None:
            self._on_given_up(name, reason, left)

    async def _start(self) -> Process:
        """A process that waits for its orders."""
        command = [
            sys.executable, "-m", "w5xde_async.worker", "--log", "normal", "--log-format", "json", "--exit-with-stdin",
            "--exit-on-drain", "0",
        ]  # fmt: skip
        if self._reference:
            command += ["--job", self._reference]
        if self._island:
            command += ["--island", self._island]
        if self._config_path is not None:
            command += ["--config", str(self._config_path)]
        if self._data_dir is not None:
            command += ["--data-dir", str(self._data_dir)]
        # The child's environment is ours, with this run's address and token in place of what ours says of them.
        environment = {key: value for key, value in os.environ.items() if key not in (*JOINING, *_OF_LINK)}
        return await start_process(
            *command, PRESTARTED, str(os.getpid()), stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, **_apart()
        )

    def _orders(self, name: str, device: str) -> bytes:
        """What a process learns when there is work: the rest of its arguments, and secrets."""
        arguments, environment = ["--name", name, "--threads", str(self._threads)], dict[str, str]()
        told = _OF_LINK if self._join else (*_OF_LINK, *_OF_TLS)
        environment[BESIDE_FILE] = ",".join(variable.removeprefix("W5XDE_").lower() for variable in told)
        if device and self._devices:
            arguments += ["--device", device]
        elif device and "W5XDE_DEVICE" not in os.environ:
            environment["W5XDE_DEVICE"] = device
        if self._join:
            environment["W5XDE_JOIN"] = self._join
        else:
            arguments += ["--server", self._address]
            environment |= {**dict.fromkeys(_OF_TLS, ""), "W5XDE_INSECURE": str(self._insecure).lower()}
            if self._token:
                environment["W5XDE_TOKEN"] = self._token
        return json.dumps({"arguments": arguments, "environment": environment}).encode() + b"\n"

    async def _run(self, name: str, device: str, words: WordReader, printed: deque[str]) -> int | None:
        """One process from start to end, as ``_ended`` says; cancelled, the process is ended first."""
        if self._prestarted:
            process = self._prestarted.popleft()
        else:
            process = await self._start()
            _say(process, b"\n")
        _say(process, self._orders(name, device))
        self._processes[name] = process
        if self._hears:
            self._awaited[name] = asyncio.get_running_loop().call_later(
                _JOINS_S, logger.warning,
                "worker %s has not joined %.0f s after it was told to: it imports the job, or hangs in that pid=%d",
                name, _JOINS_S, process.pid,
            )  # fmt: skip
        reading = [
            asyncio.create_task(self._hear(process, name, words), name=f"hear {name}"),
            asyncio.create_task(self._forward(process, name, printed), name=f"read {name}"),
        ]

        def runs() -> None:
            words.ran_at = asyncio.get_running_loop().time()

        try:
            code = await _ended(process, runs)
            await asyncio.wait(reading, timeout=1.0)  # a grandchild may hold the pipes
            return code
        except asyncio.CancelledError:
            await self._stop(process)
            raise
        finally:
            if process.returncode is None:
                _kill(process)
            if process.stdin is not None:
                process.stdin.close()
            for task in reading:
                task.cancel()
            if (transport := getattr(process, "_transport", None)) is not None:
                transport.close()  # it would not close by itself while something else holds the process's pipes
            self._found(name)
            self._joined(name)
            self._ids.pop(name, None)
            del self._processes[name]

    async def _stop(self, process: Process) -> None:
        with suppress(ProcessLookupError):
            if sys.platform == "win32":
                process.send_signal(signal.CTRL_BREAK_EVENT)  # terminate() would end it at once
            elif not _is_gone(process):
                process.terminate()
        try:
            async with asyncio.timeout(self._grace_s):
                await _ended(process)
        except TimeoutError:
            logger.warning("a local worker did not end within %.0f s and was killed pid=%d", self._grace_s, process.pid)
            _kill(process)
            await _ended(process)

    async def _hear(self, process: Process, name: str, words: WordReader) -> None:
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        while data := await process.stdout.read(_READ_BYTES):
            words.feed(data, loop.time())
        words.feed(b"", loop.time())
        self._joined(name)  # or will not say by what id it has

    async def _forward(self, process: Process, name: str, printed: deque[str]) -> None:
        """Its warnings and errors become our log lines; the rest is there in verbose mode, and after a crash."""
        assert process.stderr is not None
        async for line in _lines(process.stderr):
            level, text = _parse(line)
            if level is not None:
                logger.log(level, "worker %s: %s", name, text)
                if level == logging.INFO:
                    continue
            printed.append(text)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """What is printed there, line by line, as a terminal shows it in the end: of a bar, what followed its last \\r. Of
    a line that is too long, its end."""
    rest = b""
    while data := await stream.read(_READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[-_LINE_BYTES:]
        for line in lines:
            yield _shown(line)
    if rest:
        yield _shown(rest)


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _unstarted(error: OSError | LocalError) -> str:
    """What is said of a worker whose process cannot be started: the program may be one that this user may not run."""
    if isinstance(error, LocalError):
        return f"cannot be started: {error}"
    return f"cannot be started: {sys.executable}: {error.strerror or error}"


def _parse(line: str) -> tuple[int | None, str]:
    """Level and text; no level for what is only worth showing after a crash."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or "message" not in record:
            return None, line
        text, named, source = (str(record.get(name)) for name in ("message", "level", "logger"))
    except (ValueError, RecursionError):  # the job may print whatever it likes
        return None, line
    if record.get("event") != "log":
        return None, text
    level = {"warning": logging.WARNING, "error": logging.ERROR, "critical": logging.CRITICAL}.get(named)
    if level is None or (level == logging.WARNING and source.startswith("w5xde_async.worker.")):
        return logging.INFO, text  # about the link: the coordinator says that itself
    return level, text


def _apart() -> dict[str, Any]:
    """How a process is started that a terminal's Ctrl-C is not to reach."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _say(process: Process, line: bytes) -> None:
    """A few hundred bytes: they fit into the pipe. One that has ended is told nothing: whoever waits for it hears."""
    assert process.stdin is not None
    with suppress(RuntimeError, OSError):  # uvloop's transport raises where its process is gone
        process.stdin.write(line)


async def _ended(process: Process, runs: Callable[[], object] = lambda: None) -> int | None:
    """Its exit code, once it has ended; until then ``runs`` is called each second or so. None where code in this
    process has taken that (``os.wait``) or has the kernel drop it (SIGCHLD is ignored): the event loop would never
    tell. Asyncio's own does not tell either while something else holds the process's pipes."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        looks = 0
        while not waiting.done() and looks < 2:  # the loop may be about to tell
            await asyncio.wait([waiting], timeout=_LOOKS_S)
            if process.returncode is not None or _is_gone(process):
                looks += 1
            elif not waiting.done():
                runs()
        return waiting.result() if waiting.done() else process.returncode
    finally:
        waiting.cancel()


def _is_gone(process: Process) -> bool:
    """Whether nothing is left of a process, not even its exit code."""
    if sys.platform == "win32" or process.returncode is not None:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _kill(process: Process) -> None:
    if process.returncode is None and not _is_gone(process):
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
