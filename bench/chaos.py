"""What ``make chaos`` runs: long mixed schedules over real processes, and a report of the promises.

First, rounds of training (the digits CNN and the small GPT of the tests, lengthened) in which everything happens at
once, at seeded steps: workers killed and replaced, stopped for longer than they may be silent, drained;
the coordinator killed; connections reset, held and delayed. Each round must end with the digest of a plain loop in one
process, every step committed once in the surviving history. Then the tests behind each promise, one command a row.

    python bench/chaos.py [--quick] [--rounds 8] [--seed 1] [--no-tests] [--json FILE]

A round that fails prints the command that plays it alone. Exits with 1 where anything failed.
Figures: ``rounds``, ``same_bits``, ``steps_lost``, ``steps_twice``, ``fired_*``, ``longest_gap_s``, ``promises_shown``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tests.support import jobs, reference
from tests.support.chaos import Stage, at_steps
from tests.support.faults import Record

from report import Report, parser
from w5xde_async.params.flat import named_digest

ROOT = Path(__file__).resolve().parents[1]
STEPS, STOPPED_S = 96, 5.0
JOBS = ("cnn_adamw", "gpt_adamw", "cnn_sgd", "gpt_sgd")
FAULTS = {"kill": 4, "stop": 2, "drain": 1, "crash": 3, "reset": 2, "hold": 1, "lag": 1}


class Promise(NamedTuple):
    """One row of the report: the tests that must pass."""

    name: str
    says: str
    tests: str


PROMISES = (
    Promise("G1", "each sample once an epoch", "tests/cluster/test_simulator.py"),
    Promise("G2", "a killed coordinator loses what it says", "tests/process/test_failpoints.py"),
    Promise("G3", "the same bits", "tests/process/test_chaos.py tests/process/test_same_bits.py"),
    Promise("G4", "no torn checkpoint", "tests/contract/test_store.py tests/contract/test_journal.py"),
    Promise("G5", "no stall as workers come and go", "tests/process/test_chaos.py -k killed_and_replaced"),
    Promise("G6", "a hung worker costs one lease", "tests/process/test_liveness.py -k stopped"),
    Promise("G7", "half-open links found in 15 s", "tests/process/test_liveness.py -k half_open"),
    Promise("G8", "memory is bounded", "tests/process/test_liveness.py -k 200_peers"),
    Promise("G12", "replay and wrong clocks", "tests/cluster -k clocks_that_are_wrong or another_term"),
    Promise("G14", "of two coordinators one commits", "tests/cluster/test_journal.py -k two_coordinators"),
    Promise("G15", "a coordinator's death is not the end", "tests/process/test_liveness.py -k outlive"),
    Promise("G16", "a slow worker holds nobody", "tests/cluster/test_leases.py -k back"),
    Promise("G17", "SIGTERM wastes nothing", "tests/process/test_liveness.py -k sigterm"),
    Promise("G18", "errors are for people", "tests/cluster/test_bad_input.py tests/process/test_reports.py"),
    Promise("reports", "failures that others reported", "tests/cluster/test_reports.py"),
)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="8; 1 with --quick")
    flags.add_argument("--seed", type=int, default=1, help="of the first round; the others count on")
    flags.add_argument("--no-tests", action="store_true", help="the rounds alone (so does --quick)")
    args = flags.parse_args()
    torch.set_num_threads(1)
    rounds = args.rounds or (1 if args.quick else 8)
    report = Report({"rounds": rounds, "seed": args.seed, "steps": STEPS, "faults": FAULTS})
    failed = play(report, rounds, args.seed, quick=args.quick)
    if not (args.no_tests or args.quick):
        failed += show_promises(report)
    print()
    report.show()
    report.write(args.json)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def play(report: Report, rounds: int, seed: int, *, quick: bool) -> list[str]:
    fired: Counter[str] = Counter()
    failed: list[str] = []
    lost = twice = 0
    gaps = []
    print(f"{'seed':>4}  {'job':<10} {'durability':<10}  {'digest':<9} {'steps':>5} {'again':>5} {'gap s':>6}  fired")
    for number in range(seed, seed + rounds):
        job, durability = JOBS[number % len(JOBS)], ("checkpoint", "journal")[number // len(JOBS) % 2]
        steps = STEPS // 3 if quick else STEPS
        try:
            record = one_round(job, durability, number, steps)
        except AssertionError as error:
            failed.append(f"seed {number}")
            print(f"{number:>4}  {job:<10} {durability:<10}  FAILED: {error}")
            print(f"      alone: python bench/chaos.py --no-tests --rounds 1 --seed {number}" + " --quick" * quick)
            continue
        surviving = record.surviving_steps
        lost += len(set(range(1, steps + 1)) - set(surviving))
        twice += len(surviving) - len(set(surviving))
        same = record.digest == expected(job, steps)
        if not same or surviving != list(range(1, steps + 1)):
            failed.append(f"seed {number}")
            print(f"      alone: python bench/chaos.py --no-tests --rounds 1 --seed {number}" + " --quick" * quick)
        fired += record.fired
        gaps.append(record.longest_gap_s)
        print(
            f"{number:>4}  {job:<10} {durability:<10}  {'same' if same else 'DIFFERENT':<9} {len(surviving):>5} "
            f"{record.steps_recomputed:>5} {record.longest_gap_s:>6.2f}  "
            + ", ".join(f"{kind} {count}" for kind, count in sorted(record.fired.items()))
        )
    for name, value in (
        ("rounds", rounds), ("same_bits", rounds - len(failed)), ("steps_lost", lost), ("steps_twice", twice),
        *((f"fired_{kind}", count) for kind, count in sorted(fired.items())),
    ):  # fmt: skip
        report.add(name, [value])
    if gaps:
        report.add("longest_gap_s", gaps)
        report.figures["longest_gap_s"] = max(gaps)
    return failed


def one_round(job: str, durability: str, seed: int, steps: int) -> Record:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    faults = {kind: max(1, count // (1 if steps == STEPS else 3)) for kind, count in FAULTS.items()}
    try:
        with Stage(
            f"tests/support/jobs.py:{job}", folder / "run", workers=5, proxied=2, leaf_s=0.1, seed=seed,
            flags=("--min-workers", "5", "--heartbeat", "500ms", "--silence", "2s", "--checkpoint-every", "8",
                   "--max-steps", str(steps), "--durability", durability),
        ) as stage:  # fmt: skip
            stage.play(at_steps(seed, faults, 2, steps * 3 // 4, seconds=STOPPED_S), timeout_s=240)
            return stage.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def expected(job: str, steps: int) -> str:
    return named_digest(reference.train(jobs.ALL[job](), steps)[0])


def show_promises(report: Report) -> list[str]:
    failed, shown = [], 0
    print(f"\n{'':<8} {'promise':<42} {'result':<34} {'s':>5}  command")
    for promise in PROMISES:
        tests, _, chosen = promise.tests.partition(" -k ")
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests.split(), *(["-k", chosen] if chosen else [])]
        if missing := [path for path in tests.split() if not (ROOT / path).exists()]:
            result, seconds, good = f"no {missing[0]}", 0.0, False
        else:
            began = time.monotonic()
            ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
            good, seconds = ended.returncode == 0, time.monotonic() - began
            result = ended.stdout.strip().splitlines()[-1].partition(" in ")[0] if ended.stdout.strip() else "no output"
            shown += good
            if not good:
                print(ended.stdout[-3000:])
        if not good:
            failed.append(promise.name)
        shown_command = f"pytest {tests}" + (f" -k '{chosen}'" if chosen else "")
        print(f"{promise.name:<8} {promise.says:<42} {result:<34} {seconds:>5.0f}  {shown_command}")
    report.add("promises_shown", [shown])
    return failed


if __name__ == "__main__":
    main()
