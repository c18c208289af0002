"""Workers that are killed and replaced: what is left of their computing, and torchrun under the same churn.

Four workers (processes of one torch thread) and a coordinator on loopback; a step is 16 leaves of 8 samples, and a leaf
takes 0.1 s of sleep besides its little computing, so that two cores carry it (throttled.py). At each rate, that share
of the workers is killed with SIGKILL a minute, at seeded moments, and a new process started at once.

Figures, for each rate R in % a minute:
  ``goodput_R``   samples applied, over those that the live workers could have computed: a worker is live from its
                  joining to its kill, and could compute as many samples/s as a worker alone does (measured first)
  ``gap_R_s``     the longest time between two commits
  ``vain_R``      leaves computed twice over leaves applied, in %: those that came too late, and for each kill a whole
                  block of two leaves, though it fell somewhere in its middle
``longest_gap_over_lease``: the longest gap at any rate over what a worker computes in one undisturbed step (its leases
of that step together). ``over_torchrun_R``: steps that stand after the same wall time, ours with two workers over DDP
with two ranks under torchrun, which restarts all ranks from its last snapshot (every 10 steps); both from their first
step on, the kills at the same moments. ``torchrun_gap_R_s``: its longest time without a step. Nearly all of the ratio
is that restart: how long it takes to import torch twice and to meet again, on the machine as it is.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import Stage, per_minute
from tests.support.faults import Record

from ddp import Elastic
from report import Report, parser

JOB = f"{Path(__file__).parent}/throttled.py:job"
WORKERS, LEAVES, LEAF_S = 4, 16, 0.1
RATES = (0, 10, 30, 60, 100)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rates", type=int, nargs="*", help="percent of the workers a minute (0 10 30 60 100)")
    flags.add_argument("--seconds", type=float, default=0.0, help="at each rate (60; 12 with --quick)")
    flags.add_argument("--torchrun", type=int, nargs="*", help="rates beside torchrun (30; 300 with --quick)")
    flags.add_argument("--torchrun-seconds", type=float, default=0.0, help="at each of them (200; 12 with --quick)")
    flags.add_argument("--seed", type=int, default=1)
    args = flags.parse_args()
    rates = args.rates if args.rates is not None else [0, 100] if args.quick else list(RATES)
    beside = args.torchrun if args.torchrun is not None else [300] if args.quick else [30]
    seconds = args.seconds or (12.0 if args.quick else 60.0)
    beside_s = args.torchrun_seconds or (12.0 if args.quick else 200.0)
    report = Report(
        {"workers": WORKERS, "leaves": LEAVES, "leaf_s": LEAF_S, "rates": rates, "seconds": seconds, "torchrun": beside,
         "torchrun_seconds": beside_s, "seed": args.seed}
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="churn-"))
    try:
        if rates:
            churn(report, folder, rates, seconds, args.seed)
        for rate in beside:
            beside_torchrun(report, folder, rate, beside_s, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print()
    report.show()
    report.write(args.json)


def stage(folder: Path, workers: int, seed: int = 1) -> Stage:
    environment = [{"BENCH_LEAF_S": str(LEAF_S), "BENCH_LEAVES": str(LEAVES)}] * workers
    return Stage(
        JOB, folder / "ours", workers=workers, seed=seed, environment=environment,
        flags=("--min-workers", str(workers), "--checkpoint-every", "50"), keep=("worker_joined", "worker_left"),
        coordinator_environment=environment[0],
    )  # fmt: skip


def churn(report: Report, folder: Path, rates: list[int], seconds: float, seed: int) -> None:
    alone = play(folder, 1, [], max(6.0, seconds / 5), seed)
    solo = rate_of(alone)
    report.add("solo_samples_per_s", [solo])
    print(f"one worker alone: {solo:.1f} samples/s")
    gaps, lease_s = [], 0.0
    for rate in rates:
        actions = per_minute(seed, {"kill": rate / 100 * WORKERS}, seconds)
        record = play(folder, WORKERS, actions, seconds, seed)
        live = live_workers(record)
        goodput = rate_of(record) / (solo * live)
        applied = sum(commit.leaves for commit in record.commits)
        begun = sum(event["leases_returned"] > 0 for event in record.kept if event.get("clean") is False)
        vain = record.finished["leaves_in_vain"] + begun * LEAVES // WORKERS // 2
        if not rate:
            lease_s = record.span_s / (len(record.commits) - 1)
        gaps.append(record.longest_gap_s)
        report.add(f"goodput_{rate}", [goodput])
        report.add(f"gap_{rate}_s", [record.longest_gap_s])
        report.add(f"vain_{rate}", [100 * vain / applied])
        print(
            f"{rate:3d} %/min: {record.fired['kill']} killed in {seconds:.0f} s, {live:.2f} workers live on average, "
            f"{len(record.commits)} steps, goodput {goodput:.3f}, longest gap {record.longest_gap_s:.2f} s"
        )
    if lease_s:
        report.add("longest_gap_over_lease", [max(gaps) / lease_s])


def play(folder: Path, workers: int, actions: list, seconds: float, seed: int) -> Record:
    with stage(folder, workers, seed) as ours:
        ours.play(actions, for_s=seconds, timeout_s=seconds + 120)
        return ours.stop_run()


def rate_of(record: Record) -> float:
    """Samples/s from the first commit to the last."""
    return sum(commit.samples for commit in record.commits[1:]) / record.span_s


def live_workers(record: Record) -> float:
    """Members of the run on average, between the first commit and the last."""
    first, last = record.commits[0].at, record.commits[-1].at
    live, worker_s, before = 0, 0.0, first
    for event in sorted(record.kept, key=lambda event: event["read_at"]):
        at = min(max(event["read_at"], first), last)
        worker_s += live * (at - before)
        before = at
        live += 1 if event["event"] == "worker_joined" else -1
    return (worker_s + live * (last - before)) / (last - first)


def beside_torchrun(report: Report, folder: Path, rate: int, seconds: float, seed: int) -> None:
    actions = per_minute(seed, {"kill": rate / 100 * 2}, seconds)
    record = play(folder, 2, actions, seconds, seed)
    first = record.commits[0]
    ours = max(commit.step for commit in record.commits if commit.at - first.at <= seconds) - first.step
    with Elastic(folder / f"ddp-{rate}", leaf_s=[LEAF_S, LEAF_S], leaves=LEAVES) as elastic:
        theirs, kills = elastic.play(seconds, [action.at_s or 0.0 for action in actions], seed)
        standstill_s = elastic.standstill_s(seconds)
    report.add(f"over_torchrun_{rate}", [ours / theirs])
    report.add(f"torchrun_gap_{rate}_s", [standstill_s])
    print(
        f"{rate} %/min of two, {seconds:.0f} s: ours {ours} steps with {record.fired['kill']} kills, torchrun {theirs} "
        f"with {kills}"
    )


if __name__ == "__main__":
    main()
