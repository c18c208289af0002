"""Slurm: a coordinator, and an array of workers that find it by its join file on the disk that all nodes share.

An array's tasks start one by one, as nodes are free. Before the time limit, and where they are preempted, they are told
to go by a signal, end with 75 and are put into the queue again.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import sys

from w5xde_async.errors import ExitCode, UsageError
from w5xde_async.launch.plan import Plan, dropped, fill
from w5xde_async.process import note, say

_PATIENCE = "1h"  # of workers, while the coordinator waits in the queue
_GOODBYE_S = 60  # in which workers that the coordinator has said goodbye to end by themselves
_AGAIN_S = 60  # for the script to put it into the queue again
_MOST_S = 65535  # that a signal can be before a time limit


def script(plan: Plan) -> str:
    """A shell script that submits itself."""
    run_dir = plan.run_dir
    join, python = str(run_dir / "join"), [sys.executable, "-m"]
    coordinator = [
        *python, "w5xde_async.coordinator", *plan.train, "--host", "0.0.0.0", "--port", "0", "--run-dir", str(run_dir),
    ]  # fmt: skip
    which = hashlib.blake2b(str(run_dir).encode(), digest_size=4).hexdigest()
    worker = [*python, "w5xde_async.worker", "--join-file", join, "--connect-timeout", _PATIENCE, *plan.compute]
    return fill(
        "slurm.sh", dropped=" ".join(dropped()), file=f"{plan.name}.sh", name=plan.name,
        worker_jobs=f"{plan.name}-worker-{which}", run_dir=shlex.quote(str(run_dir)), workers=plan.workers,
        cpus=plan.cpus, gpus=f" --gpus-per-task={plan.gpus}" if plan.gpus else "",
        megabytes=max(1, plan.memory_bytes >> 20), drained=int(ExitCode.DRAINED), coordinator=shlex.join(coordinator),
        worker=shlex.join(worker), goodbye_s=_GOODBYE_S, worker_signal=_signal("USR1", plan.worker_grace_s),
        coordinator_signal=_signal("TERM", plan.coordinator_grace_s),
    )  # fmt: skip


def _signal(name: str, grace_s: int) -> str:
    """What Slurm sends, and how long before the time limit."""
    return f"{name}@{min(grace_s + _AGAIN_S, _MOST_S)}"


def start(plan: Plan) -> int:
    """Write the script into the run directory and submit it. The exit code."""
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not here: run this where it is, or take what --print writes there")
    path = plan.run_dir / f"{plan.name}.sh"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(script(plan), encoding="utf-8")
    say(f"{path}\n")
    try:
        code = subprocess.run(["bash", str(path)], check=False).returncode
    except KeyboardInterrupt:
        code = ExitCode.ERROR
    if code:
        more = shlex.join(["bash", str(path), "grow", str(plan.workers)])
        note(
            "not all was submitted. Where Slurm has named a job above, that is the coordinator (scancel NUMBER ends "
            f"it): {more} submits the workers. If it has named none, nothing is in its queue: give this command again"
        )
    return code
