"""Streams put to the test: blocks whose copies overlap at random, against blocks that do one thing after the other.

    python bench/gpu_stress.py [--quick] [--device cuda:0] [--blocks 200] [--seed 1] [--jobs gpt_adamw odd]

The tests' small jobs. On one engine either stream of the device stands still at random, results are read late,
versions are received where the last one was, and memory lacks once; the other waits for the device around every copy.
With deterministic kernels both must give the same bits. The first look at a new device, after `pytest -m gpu`: it ends
with 1 where anything differs. On the CPU, where nothing overlaps, it tries the script.

Figures: ``blocks``, ``differences`` (aim 0), and the seconds that either engine took.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests.support

import torch
from tests.support import blocks

from models import device_name, lacks_device
from report import Report, parser
from w5xde_async.compute.engine import Engine


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    flags.add_argument("--blocks", type=int, default=0, help="blocks a job (200; 10 with --quick)")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--jobs", nargs="*", default=list(blocks.JOBS), choices=list(blocks.JOBS))
    args = flags.parse_args()
    if lacks_device(args.device):
        return
    count = args.blocks or (10 if args.quick else 200)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    report = Report({"device": device_name(args.device), "blocks": count, "seed": args.seed, "jobs": args.jobs})
    found: list[str] = []
    for name in args.jobs:
        job, plan = blocks.JOBS[name](), blocks.turns(args.seed, count)
        began = time.perf_counter()
        with blocks.one_after_the_other(Engine(job, device=args.device, bucket_bytes=blocks.BUCKET_BYTES)) as engine:
            expected = blocks.play(engine, job, plan)
        between = time.perf_counter()
        with blocks.delayed_at_random(
            Engine(job, device=args.device, bucket_bytes=blocks.BUCKET_BYTES), args.seed
        ) as engine:
            actual = blocks.play_again(engine, job, plan, expected.versions, args.seed)
        report.add(f"{name}_in_turn_s", [between - began])
        report.add(f"{name}_overlapping_s", [time.perf_counter() - between])
        differing = blocks.differences(expected.blocks, actual.blocks)
        found += [f"{name}: {text}" for text in differing]
    report.add("blocks", [float(count * len(args.jobs))])
    report.add("differences", [float(len(found))])
    report.show()
    report.write(args.json)
    if found:
        raise SystemExit("\n".join(["bits differ:", *found[:20]]))


if __name__ == "__main__":
    main()
