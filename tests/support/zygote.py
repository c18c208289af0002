"""Coordinator processes by fork from one that has imported everything: a start costs tenths of a second, not seconds.

Each is a process of its own, with its own environment and standard error, and ends as one: ``Zygote.run`` tells how.
Run as a module it is the process that forks; it is told what to do by lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


class Zygote:
    """Runs coordinators, one at a time."""

    def __init__(self) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")}
        env.pop("OMP_NUM_THREADS", None)
        env["W5XDE_DASHBOARD"] = "false"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"], cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, log: Path, **environment: str) -> int:
        """Train in a process of its own, whose standard error goes to ``log``; its exit code, -9 for ``kill -9``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = {"arguments": arguments, "environment": environment, "log": str(log)}
        print(json.dumps(told), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _serve() -> None:
    import torch
    from tests.support import jobs

    from w5xde_async.coordinator import __main__, config, local, preparation, service
    from w5xde_async.telemetry import progress

    assert all((__main__, local, service, progress))
    torch.set_num_threads(1)  # nothing may have started a thread when it forks
    # Much is imported at the first use of it: the first step of an optimizer alone takes most of a second.
    preparation.prepare(jobs.mlp_adamw(), config.CoordinatorConfig(), None, lambda: "0" * 16)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _be(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _be(told: dict[str, Any]) -> None:
    import ctypes
    import signal

    from w5xde_async.coordinator.__main__ import main

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no child outlives the tests
    os.dup2(os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(told["environment"])
    code = 1
    try:
        code = main(told["arguments"])
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
