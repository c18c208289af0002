"""``python -m tests.support.elsewhere win32|darwin``: a run on a Python that lacks what Python lacks there.

What the platform's Python does not have is taken away before anything of this package is imported: modules, functions,
signals, socket options, methods of the event loop, ``/proc``; on Windows the clock has the steps that it has there.
Then every module is imported, and a model trained, saved, resumed and looked at. It ends with one line of JSON.

This is Linux all the same: what the system's calls do there is not shown, nor how torch computes.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import io
import json
import math
import mmap
import multiprocessing
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

MISSING = {
    "win32": {
        "modules": "fcntl resource pwd grp termios uvloop",
        "os": "fork forkpty geteuid getuid getegid getgid sched_getaffinity memfd_create pread preadv pwrite killpg "
        "sysconf nice uname statvfs set_blocking setsid mkfifo getpgid getpgrp O_PATH fchown chown getloadavg",
        "mmap": "PROT_READ PROT_WRITE MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS",
        "signal": "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGALRM SIGQUIT SIGSTOP SIGCONT",
        "socket": "SO_REUSEPORT TCP_USER_TIMEOUT TCP_QUICKACK TCP_INFO",
        "select": "poll epoll",
    },
    "darwin": {
        "modules": "",
        "os": "sched_getaffinity memfd_create O_PATH",
        "mmap": "",
        "signal": "",
        "socket": "TCP_USER_TIMEOUT TCP_QUICKACK TCP_INFO TCP_KEEPIDLE",
        "select": "epoll",
    },
}
THIRD_PARTIES = """asyncio.subprocess concurrent.futures.process cryptography.x509 lz4.frame matplotlib.pyplot msgpack
msgspec multiprocessing.connection numpy prometheus_client rich.console rich.live safetensors.torch sklearn.datasets
starlette.applications tensorboardX torch.distributed.fsdp torch.distributed.pipelining
torch.utils.data tqdm uvicorn"""
TICKS_PER_S = 64  # of Windows' clock


class NoDescriptors(asyncio.SelectorEventLoop):
    """An event loop as Windows' is: it watches no descriptors and hears no signals by itself."""

    add_reader = asyncio.AbstractEventLoop.add_reader
    add_writer = asyncio.AbstractEventLoop.add_writer
    add_signal_handler = asyncio.AbstractEventLoop.add_signal_handler
    remove_signal_handler = asyncio.AbstractEventLoop.remove_signal_handler


class _Policy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = NoDescriptors


def pretend(platform: str) -> None:
    """Take away what is not there."""
    for name in THIRD_PARTIES.split():
        importlib.import_module(name)
    missing = MISSING[platform]
    fcntl = sys.modules.get("fcntl") or importlib.import_module("fcntl")
    for name in missing["modules"].split():
        sys.modules[name] = None  # type: ignore[assignment]
    for module in (os, mmap, signal, socket, select):
        for name in missing[module.__name__].split():
            if hasattr(module, name):
                delattr(module, name)
    _without_proc()
    if platform == "win32":
        asyncio.set_event_loop_policy(_Policy())
        sys.modules["msvcrt"] = _msvcrt(fcntl)
        subprocess.Popen.__init__ = _refusing(subprocess.Popen.__init__)  # type: ignore[method-assign]
        multiprocessing.get_context = _spawning(multiprocessing.get_context)
        socket.SO_EXCLUSIVEADDRUSE = socket.SO_REUSEADDR  # type: ignore[attr-defined]
        clock = time.monotonic
        time.monotonic = lambda: math.floor(clock() * TICKS_PER_S) / TICKS_PER_S
    sys.platform = platform


def _without_proc() -> None:
    def hiding(opens: Any) -> Any:
        def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys/")):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            return opens(path, *args, **kwargs)

        return opened

    os.open, io.open = hiding(os.open), hiding(io.open)
    builtins.open = io.open


def _msvcrt(fcntl: Any) -> types.ModuleType:
    """What of it is used: a lock of a byte."""
    made = types.ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if mode == 2 else fcntl.LOCK_UN)

    vars(made).update(LK_NBLCK=2, LK_UNLCK=0, locking=locking)
    return made


def _refusing(begins: Any) -> Any:
    def begun(self: Any, *args: Any, pass_fds: Any = (), preexec_fn: Any = None, **kwargs: Any) -> None:
        if pass_fds or preexec_fn:
            raise ValueError("not supported on Windows")
        begins(self, *args, **kwargs)

    return begun


def _spawning(gives: Any) -> Any:
    def given(method: str | None = None) -> Any:
        if method not in (None, "spawn"):
            raise ValueError(f"cannot find context for {method!r}")
        return gives("spawn")

    return given


def import_everything() -> list[str]:
    """Every module of this package but those of engines and frameworks; how many."""
    import w5xde_async

    names = []
    for module in pkgutil.walk_packages(w5xde_async.__path__, "w5xde_async."):
        if not module.name.endswith(("__main__", ".on_ray", ".hf", ".lightning", ".child")):
            importlib.import_module(module.name)
            names.append(module.name)
    return names


async def train(run_dir: Path) -> dict[str, Any]:
    """A run that is stopped in the middle, resumed and finished, with two workers and the dashboard."""
    from tests.support import jobs

    from w5xde_async import Coordinator, CoordinatorConfig, Worker, WorkerConfig

    found: dict[str, Any] = {}
    for steps in (10, 32):
        config = CoordinatorConfig(port=0, min_workers=2, dashboard="127.0.0.1:0", max_steps=steps)
        async with Coordinator(jobs.mlp_sgd(), run_dir=run_dir, config=config) as coordinator:
            workers = [
                Worker(coordinator.address, job=jobs.mlp_sgd(), config=WorkerConfig(threads=1)) for _ in range(2)
            ]
            result, *departures = await asyncio.gather(coordinator.wait(), *[worker.run() for worker in workers])
            found[f"digest_{steps}"] = result.digest
            found["departures"] = [departure.name for departure in departures]
    return found


def refused() -> dict[str, str]:
    """What cannot be done there is said in one line."""
    from tests.support import jobs

    from w5xde_async.data.reader import _process_pool
    from w5xde_async.errors import UsageError
    from w5xde_async.worker.__main__ import main

    said = {}
    with tempfile.TemporaryFile("w+") as errors:
        before, sys.stderr = sys.stderr, errors
        code = main(["--server", "127.0.0.1:1", "--island", "dp=2"])
        sys.stderr = before
        errors.seek(0)
        said["island"] = f"{int(code)} {errors.read()}"
    try:
        _process_pool(jobs.mlp_sgd(), None, "", 1).close()
        said["processes"] = ""
    except UsageError as error:
        said["processes"] = str(error)
    return said


def stopped() -> int:
    """The exit code of a worker that looks for its coordinator when Ctrl-C comes."""
    from w5xde_async.worker import __main__ as worker

    tells = worker.logger.info

    def info(text: str, *args: object, **kwargs: Any) -> None:
        tells(text, *args, **kwargs)
        if text.startswith("connecting"):
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)

    worker.logger.info = info  # type: ignore[method-assign]
    return int(worker.main(["--server", "127.0.0.1:1"]))


def main(platform: str) -> None:
    """Do it all."""
    pretend(platform)
    modules = import_everything()

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(train(Path(folder) / "run"))
    found |= {"modules": len(modules), "code": stopped()}
    if platform == "win32":
        found |= refused()
    print(json.dumps(found))  # noqa: T201 - for the test


if __name__ == "__main__":
    main(sys.argv[1])
