"""Programs by fork from one process that has imported everything: a start costs tenths of a second, not seconds.

Each is a process of its own, in a session of its own, with its own environment, directory and pipes, runs the same
``__main__`` and waits for its threads and exit functions at the end. What differs from ``python -m``: modules are there
already and are not taken apart at the end, pages are shared until they are written, and torch has one thread until it
is told otherwise. A test that is about these things starts a real one.

Between a program and the server stands a small process that waits for it: it tells how the program ended, and kills it
where the tests are gone. Run as a module, this is the server.

``ForkServer.commands`` is a folder with a ``python`` for shells and for programs that start programs: what the server
can run is handed to it (relay.py), anything else is a real interpreter's.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
#: Where programs look for modules: the tests first, then where this process does (it may be another working tree).
SEARCHED = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
PYTHON = sys.executable
_MESSAGE_BYTES = 1 << 17
_MOST_INHERITED, _APART = 16, 200  # files beside the first three, and numbers that none of them has


class Forked:
    """A process that the server forked, as far as tests use subprocess.Popen."""

    def __init__(self, status: socket.socket, stdout: IO[str], stderr: IO[str]) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        self._status = status
        self._told = status.makefile("rb", buffering=0)  # nothing is read ahead of what select() is asked for
        self.pid = int(self._told.readline())
        self._asking = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            select.select([self._status], [], [], 0.1)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        with self._asking:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int(self._told.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number is not given to another before close(): whoever waits for it does not reap
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """After its end."""
        self._told.close()
        self._status.close()


class ForkServer:
    """Starts programs. All test processes of a run share one: the first starts it, the others know its folder."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: of a server that another process has started and will close."""
        self._started: _Started | None = None
        if folder is None:
            self._started = _Started()
            folder = self._started.folder
        self.folder = folder
        self.commands = self.folder / "bin"

    def start(self, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] = os.environ) -> Forked:
        """``python -m`` with these arguments; text of both its outputs is in pipes, its input is empty."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        status, status_end = socket.socketpair()
        told = {"arguments": ["-m", *arguments], "cwd": str(cwd), "env": dict(env), "ignored": [], "inherited": []}
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
                asked.connect(str(self.folder / "door"))
                files = [nothing, out_end, err_end, status_end.fileno()]
                socket.send_fds(asked, [json.dumps(told).encode()], files)
        finally:
            os.close(nothing)
            os.close(out_end)
            os.close(err_end)
            status_end.close()
        return Forked(status, os.fdopen(out), os.fdopen(err))

    def close(self) -> None:
        """End it where this process started it, and with it all of its programs."""
        if self._started is not None:
            self._started.close()


class _Started:
    """The server's process and its folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="w5xde-tests-"))
        commands = self.folder / "bin"
        commands.mkdir()
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(str(self.folder / "door"))
        door.listen(64)
        relay = ROOT / "tests" / "support" / "relay.py"
        words = [PYTHON, "-IS", str(relay), str(self.folder / "door"), PYTHON, SEARCHED]
        command = commands / "python"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        command.chmod(0o700)
        self._held, theirs = socket.socketpair()
        env = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")}
        env.pop("OMP_NUM_THREADS", None)
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.support.forking", str(theirs.fileno()), str(door.fileno()), str(command)],
            cwd=ROOT, pass_fds=[theirs.fileno(), door.fileno()], env=env | {"PYTHONPATH": SEARCHED},
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        door.close()

    def close(self) -> None:
        self._held.close()
        self._process.kill()  # while it imports it would not see that nobody holds it any more
        self._process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


#: The one that tests/conftest.py keeps for tests with processes; without it (in benches) programs are not forked.
running: ForkServer | None = None


# -- the server


def _serve(held: socket.socket, door: socket.socket) -> None:
    """Returns in a program that is to run, when it has its arguments, files and directory.

    The server ends where whoever started it no longer holds ``held``.
    """
    _prepare()
    while True:
        ready, _, _ = select.select([held, door], [], [])
        if held in ready:
            os._exit(0)
        with door.accept()[0] as asked:
            data, files, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 4 + _MOST_INHERITED)
        if not data:
            continue
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those whose programs have ended
                pass
        if not os.fork():
            held.close()
            door.close()
            _wait_for_it(json.loads(data), *files)
            return
        for file in files:
            os.close(file)


#: What programs import, early or late.
_IMPORTED = (
    "encodings.idna", "matplotlib.backends.backend_agg", "matplotlib.figure", "sklearn.datasets", "torch._dynamo",
    "torch._functorch.aot_autograd", "torch.distributed.fsdp", "torch.export._trace", "torch.utils.checkpoint",
    "uvloop", "w5xde_async.cluster.worker_processes",
    "w5xde_async.coordinator.service", "w5xde_async.facade.guava", "w5xde_async.facade.w5xde", "w5xde_async.job",
    "w5xde_async.parallel.building", "w5xde_async.process", "w5xde_async.settings", "w5xde_async.telemetry.progress",
    "w5xde_async.worker.service",
)  # fmt: skip


def _prepare() -> None:
    """No thread may start here: none would be there after a fork."""
    for name in _IMPORTED:
        importlib.import_module(name)
    import torch
    from tests.support import jobs

    from w5xde_async.coordinator.config import CoordinatorConfig
    from w5xde_async.coordinator.run.startup import prepare

    torch.set_num_threads(1)
    # The first model and the first optimizer import more, most of a second.
    prepare(jobs.mlp_adamw(), CoordinatorConfig(), None, lambda: "0" * 16)
    gc.collect()
    gc.freeze()  # a collection would copy every page that it looks at


def _wait_for_it(told: dict[str, Any], given: int, out: int, err: int, status: int, *inherited: int) -> None:
    """Returns in the program."""
    program = os.fork()
    if not program:
        os.close(status)
        _become(told, given, out, err, inherited)
        return
    for number in inherited:
        os.close(number)
    os.close(given)
    os.close(out)
    os.close(err)
    with contextlib.suppress(BrokenPipeError):  # who asked for it is gone
        os.write(status, b"%d\n" % program)
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([ended, status], [], [])
    if ended in ready:
        how = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
        assert how is not None
        code = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        with contextlib.suppress(OSError):
            os.write(status, b"%d\n" % code)
            os.read(status, 1)  # until nobody asks for it any more
    else:
        os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)
    os._exit(0)


def _become(told: dict[str, Any], given: int, out: int, err: int, inherited: Sequence[int]) -> None:
    os.setsid()
    kept = [fcntl.fcntl(number, fcntl.F_DUPFD, _APART) for number in inherited]
    for number in told["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(given, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, max(given, out, err, *inherited) + 1)
    for number, place in zip(kept, told["inherited"], strict=True):
        os.dup2(number, place)
        os.close(number)
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    sys.executable = sys.argv[3]  # whatever it starts is forked as well
    sys.argv = told["arguments"]
    sys.path[0] = told["cwd"] if sys.argv[0] == "-m" else os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run() -> int:
    """As ``python`` does with these arguments; the exit code."""
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
    code = _run()
    threading._shutdown()  # waits for threads, as the end of an interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking every module apart would copy most of the memory, and takes a second
