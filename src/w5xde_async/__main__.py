"""``w5xde coordinator ...``, and the other programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from w5xde_async.errors import ExitCode
from w5xde_async.process import imported, note, tell

_USAGE = """\
usage: w5xde coordinator JOB [options]
       w5xde worker --server COORDINATOR [options]
       w5xde status [--server DASHBOARD | --run-dir DIR] [--watch]
       w5xde doctor --join-file FILE
       w5xde predict JOB [--workers N] [options]
       w5xde memory JOB [--island MODE=N]
       w5xde tune JOB [--workers N] [options]
       w5xde launch k8s|slurm|ray JOB --workers N [options]

COORDINATOR and DASHBOARD are two addresses, HOST:PORT: the coordinator names
both when it starts. Each has its own --help. The same as python -m
w5xde_async.coordinator, python -m w5xde_async.worker and so on.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names; the result is the exit code."""
    from w5xde_async.coordinator.__main__ import main as coordinator
    from w5xde_async.doctor.__main__ import main as doctor
    from w5xde_async.worker.__main__ import main as worker

    given = sys.argv[1:] if arguments is None else list(arguments)
    from w5xde_async.launch.program import main as launch
    from w5xde_async.predict import main as predict
    from w5xde_async.status import main as status
    from w5xde_async.tune import main as tune

    programs: dict[str, Callable[..., int]] = {
        "coordinator": coordinator, "worker": worker, "status": status, "doctor": doctor, "predict": predict,
        "memory": partial(imported, "w5xde_async.memory"), "tune": tune, "launch": launch,
    }  # fmt: skip
    if given and given[0] in programs:
        return programs[given[0]](given[1:], prog=f"w5xde {given[0]}")
    if given and given[0] == "--version":
        return programs["coordinator"](given[:1], prog="w5xde")
    if given and given[0] in ("--help", "-h"):
        return tell("w5xde", _USAGE)
    note(_USAGE.rstrip("\n"))
    return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
