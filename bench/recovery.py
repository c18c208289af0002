"""The coordinator is killed again and again: time to the next commit, and steps that had to be computed again.

Two workers that are never restarted, steps of 8 leaves of 10 ms (throttled.py), a checkpoint every 20 steps. The
coordinator gets SIGKILL at a seeded moment of 0.5 to 1.5 s after a commit of its own, and the same command is started
at once. For each durability:
  ``down_p50_s_D``, ``down_p99_s_D``      from the kill to the next commit: Python and torch start anew in between
  ``resume_p50_s_D``, ``resume_p99_s_D``  from the new coordinator's first word (it listens) to the next commit
  ``recomputed_D``                        steps computed again for a kill, on average
With few kills p99 is the worst of them.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import Stage

from churn import JOB
from report import Report, parser

LEAVES, LEAF_S, EVERY = 8, 0.01, 20


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--kills", type=int, default=0, help="of each durability (100; 3 with --quick)")
    flags.add_argument("--durability", nargs="*", default=["checkpoint", "journal"])
    flags.add_argument("--seed", type=int, default=1)
    args = flags.parse_args()
    kills = args.kills or (3 if args.quick else 100)
    report = Report({"kills": kills, "leaves": LEAVES, "leaf_s": LEAF_S, "checkpoint_every": EVERY, "seed": args.seed})
    for durability in args.durability:
        recover(report, durability, kills, args.seed)
    print()
    report.show()
    report.write(args.json)


def recover(report: Report, durability: str, kills: int, seed: int) -> None:
    moments, down, resume = random.Random(seed), [], []
    environment = [{"BENCH_LEAF_S": str(LEAF_S), "BENCH_LEAVES": str(LEAVES)}] * 2
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    try:
        with Stage(
            JOB, folder / "ours", workers=2, environment=environment, coordinator_environment=environment[0],
            flags=("--checkpoint-every", str(EVERY), "--durability", durability), keep=(),
        ) as stage:  # fmt: skip
            stage.until(lambda: stage.record.commits, "the first commit")
            for _ in range(kills):
                ends = time.monotonic() + moments.uniform(0.5, 1.5)
                stage.until(lambda ends=ends: time.monotonic() > ends, "")
                stage.crash()
                listens, seen = time.monotonic(), len(stage.record.commits)
                stage.until(lambda seen=seen: len(stage.record.commits) > seen, "the next commit")
                commit = stage.record.commits[seen]
                down.append(commit.at - stage.record.crashed_at[-1][0])
                resume.append(commit.at - listens)
            stage.stop_run()
            recomputed = stage.record.steps_recomputed / kills
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, found in (("down", down), ("resume", resume)):
        for share in (50, 99):
            figure = f"{name}_p{share}_s_{durability}"
            report.add(figure, found)
            report.figures[figure] = sorted(found)[min(len(found) - 1, round(share / 100 * len(found)))]
    report.add(f"recomputed_{durability}", [recomputed])


if __name__ == "__main__":
    main()
