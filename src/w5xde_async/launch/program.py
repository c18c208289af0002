"""``w5xde launch k8s|slurm|ray JOB --workers N``: a run on a job engine; ``--print`` writes what it would start."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from w5xde_async.config import Parser, size, whole
from w5xde_async.errors import UsageError, need
from w5xde_async.launch.plan import KEPT, Plan, name_of, not_of_the_run
from w5xde_async.process import note, tell, without_loop

_MEMORY = size("a size like 4GB or 16GiB, at least 64MiB", lambda n: n >= 64 << 20)
_WHOLE, _COUNT = whole(0), whole(1, 100_000)


def parser(prog: str) -> Parser:
    """Of the command line; its ``read`` raises UsageError."""
    parser = Parser(
        prog=prog, usage=f"{prog} k8s|slurm|ray JOB --workers N [options] [-- options of the coordinator]",
        description="Start a run on a job engine: it begins with the first worker that the engine starts, and has more "
        "or fewer as the engine does. The same image, disk or cluster must have the job everywhere.",
    )  # fmt: skip
    parser.add_argument("engine", choices=("k8s", "slurm", "ray"))
    parser.add_argument("job", metavar="JOB", help="FILE.py:NAME or MODULE:NAME, as the coordinator takes it")
    parser.add_argument("--workers", metavar="N", required=True, help="how many to have")
    parser.add_argument("--print", action="store_true", help="write what would be started, and start nothing")
    parser.add_argument("--name", metavar="NAME", help="of the run and its objects [the job's file or module]")
    parser.add_argument("--image", metavar="IMAGE", help="container image with the job in it (k8s)")
    parser.add_argument("--cpus", metavar="N", default="2", help="of each worker, and its threads [2]")
    parser.add_argument("--gpus", metavar="N", default="0", help="of each worker [0]")
    parser.add_argument("--memory", metavar="SIZE", default="4GiB", help="of each worker [4GiB]")
    parser.add_argument(
        "--worker-options",
        metavar="OPTIONS",
        default="",
        help="flags of each worker: --worker-options='--island fsdp=2'",
    )
    return parser


def parse(arguments: Sequence[str], prog: str) -> tuple[argparse.Namespace, Plan]:
    """The command line and what it asks for. Raises UsageError, and Answer for --help."""
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    told = parser(prog).read(given[:cut])
    need((told.engine == "k8s") == (told.image is not None), "--image is for k8s, and needed there")
    try:
        worker_options = tuple(shlex.split(told.worker_options))
    except ValueError as error:
        raise UsageError(f"--worker-options: {told.worker_options!r:.200}: {error}; close the quote") from None
    plan = Plan(
        job=told.job, name=name_of(told.job) if told.name is None else told.name,
        workers=_COUNT.value_at("--workers", told.workers), cpus=_COUNT.value_at("--cpus", told.cpus),
        gpus=_WHOLE.value_at("--gpus", told.gpus), memory_bytes=_MEMORY.value_at("--memory", told.memory),
        options=tuple(given[cut + 1 :]), worker_options=worker_options,
    )  # fmt: skip
    return told, plan


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.launch") -> int:
    """Start it, or write it; the result is the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return without_loop(prog, lambda: _start(*parse(given, prog), prog))


def _start(told: argparse.Namespace, plan: Plan, prog: str) -> int:
    unheeded = not_of_the_run(os.environ)
    if told.engine == "k8s":  # its machines have nothing of this one's environment
        unheeded += [name for name in KEPT if os.environ.get(name)]
    if unheeded:
        note(
            f"{prog}: the run does not heed {', '.join(unheeded)} of this environment: give flags, but for what launch "
            "says itself"
        )
    if told.engine == "k8s":
        from w5xde_async.launch import kubernetes

        return tell(prog, kubernetes.objects(plan, told.image)) if told.print else kubernetes.start(plan, told.image)
    if told.engine == "slurm":
        from w5xde_async.launch import slurm

        return tell(prog, slurm.script(plan)) if told.print else slurm.start(plan)
    if told.print:
        from w5xde_async.launch.plan import fill

        values = {field: repr(getattr(plan, field)) for field in Plan.__dataclass_fields__}
        return tell(prog, fill("ray.template", **values))
    try:
        from w5xde_async.launch import on_ray
    except ImportError:
        raise UsageError("ray is not installed: pip install 'w5xde-async[ray]'") from None
    return on_ray.run(plan)


if __name__ == "__main__":
    sys.exit(main())
