"""Three workers of speeds 1:4:10: what they do together over the sum of what each does alone; and DDP beside it.

The throttle is a sleep in the job's loss (throttled.py), so that the speeds of three processes add up on two cores. A
leaf takes 0.2 s, 0.05 s and 0.02 s; a step is 96 leaves.

Figures: ``over_sum_of_solo`` (aim 0.9): samples/s of the three over the sum of their rates alone, each measured as the
only worker of a run of its own, whose steps have as many leaves as its fair share of the 96 (so that a step takes as
long). Rates are from the third commit on: the first steps find out who is how fast. ``over_ddp``: over DDP with the
same throttles, where each of three ranks computes a third of every step and all wait for the slowest. ``vain``: leaves
computed for nothing over leaves applied, in %.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import Stage
from tests.support.faults import Record

from churn import JOB, rate_of
from ddp import Elastic
from report import Report, median, parser
from throttled import LEAF_SAMPLES

LEAF_S = (0.2, 0.05, 0.02)
LEAVES = 96


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seconds", type=float, default=0.0, help="of each run (20; 4 with --quick)")
    flags.add_argument("--rounds", type=int, default=0, help="3; 1 with --quick")
    args = flags.parse_args()
    seconds = args.seconds or (4.0 if args.quick else 20.0)
    rounds = args.rounds or (1 if args.quick else 3)
    report = Report({"leaf_s": LEAF_S, "leaves": LEAVES, "seconds": seconds, "rounds": rounds})
    rates: dict[str, list[float]] = {"sum_of_solo": [], "together": [], "ddp": []}
    vain = []
    folder = Path(tempfile.mkdtemp(prefix="unequal-"))
    try:
        for number in range(rounds):
            alone = [warm_rate(play(folder, [leaf_s], seconds / 2, leaves)) for leaf_s, leaves in fair_shares()]
            record = play(folder, list(LEAF_S), seconds, LEAVES)
            with Elastic(folder / f"ddp-{number}", leaf_s=LEAF_S, leaves=LEAVES) as elastic:
                elastic.play(2.1 * LEAVES / 3 * LEAF_S[0], [], 1)
                steps = elastic.steps()
            rates["sum_of_solo"].append(sum(alone))
            rates["together"].append(warm_rate(record))
            rates["ddp"].append((len(steps) - 1) * LEAF_SAMPLES * LEAVES / (steps[-1][0] - steps[0][0]))
            vain.append(100 * record.finished["leaves_in_vain"] / sum(commit.leaves for commit in record.commits))
            print("alone " + ", ".join(f"{rate:.1f}" for rate in alone) + f"; together {rates['together'][-1]:.1f}")
            for share in record.finished["shares"]:
                print(f"  {share['name']}: {share['leaves']} leaves, computing {share['compute_s']:.1f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    together = rates["together"]
    report.add("over_sum_of_solo", [a / b for a, b in zip(together, rates["sum_of_solo"], strict=True)])
    report.add("over_ddp", [a / b for a, b in zip(together, rates["ddp"], strict=True)])
    report.add("vain", vain)
    for name, found in rates.items():
        report.add(f"{name}_samples_per_s", found)
    print(f"\nmedian of {rounds}: {median(together):.1f} samples/s together")
    report.show()
    report.write(args.json)


def fair_shares() -> list[tuple[float, int]]:
    """(throttle, leaves) of each worker: the leaves that it should compute of a step."""
    speeds = [1 / leaf_s for leaf_s in LEAF_S]
    return [(leaf_s, round(LEAVES * speed / sum(speeds))) for leaf_s, speed in zip(LEAF_S, speeds, strict=True)]


def warm_rate(record: Record) -> float:
    """Samples/s from the third commit on."""
    return rate_of(replace(record, commits=record.commits[2:]))


def play(folder: Path, leaf_s: list[float], seconds: float, leaves: int) -> Record:
    """A run of one worker for each throttle."""
    environment = [{"BENCH_LEAF_S": str(each), "BENCH_LEAVES": str(leaves)} for each in leaf_s]
    step_s = leaves / sum(1 / each for each in leaf_s)
    with Stage(
        JOB, folder / "ours", workers=len(leaf_s), environment=environment, coordinator_environment=environment[0],
        flags=("--min-workers", str(len(leaf_s)), "--checkpoint-every", "1000"),
    ) as stage:  # fmt: skip
        stage.play(for_s=seconds + 2 * step_s, timeout_s=200)
        return stage.stop_run()


if __name__ == "__main__":
    main()
