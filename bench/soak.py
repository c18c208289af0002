"""Chaos for a long time, and whether anything grows: memory, descriptors, threads, tasks, files.

Four workers, two of them behind fault proxies; every minute, workers are killed, stopped for longer than they may be
silent, drained and replaced, connections reset, held and delayed. The coordinator and one worker are left alone and
sampled every two seconds. A checkpoint every 200 steps, three kept; metrics.jsonl grows by a line a step, by design,
and is not counted.

For each of ``coordinator`` and ``worker``: ``W_rss_kib_per_min``, ``W_descriptors_per_min``, ``W_threads_per_min``;
``coordinator_tasks_per_min`` and ``disk_kib_per_min``: slopes of a line through all samples but those of the first
quarter. ``grown_*``: the median of the last quarter over that of the second, in %, which should be within noise of 0.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import (
    Stage,
    disk_bytes,
    num_descriptors,
    num_threads,
    per_minute,
    rss_bytes,
)

from churn import JOB
from report import Report, median, parser

WORKERS, LEAVES, LEAF_S, SAMPLE_S = 4, 8, 0.02, 2.0
RATES = {"kill": 3.0, "stop": 1.0, "drain": 1.0, "reset": 3.0, "hold": 1.0, "lag": 1.0}
STOPPED_S = 5.0


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--minutes", type=float, default=0.0, help="20; 0.5 with --quick")
    flags.add_argument("--durability", default="checkpoint", help="checkpoint or journal")
    flags.add_argument("--seed", type=int, default=1)
    args = flags.parse_args()
    minutes = args.minutes or (0.5 if args.quick else 20.0)
    report = Report({"minutes": minutes, "rates": RATES, "durability": args.durability, "seed": args.seed})
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        soak(report, folder, minutes * 60, args.durability, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.show()
    report.write(args.json)


def soak(report: Report, folder: Path, seconds: float, durability: str, seed: int) -> None:
    environment = [{"BENCH_LEAF_S": str(LEAF_S), "BENCH_LEAVES": str(LEAVES)}] * WORKERS
    series: dict[str, list[float]] = {}
    times: list[float] = []
    with Stage(
        JOB, folder / "run", workers=WORKERS, proxied=2, seed=seed, environment=environment, keep=(),
        coordinator_environment=environment[0],
        flags=("--min-workers", str(WORKERS), "--checkpoint-every", "200", "--heartbeat", "500ms", "--silence", "2s",
               "--durability", durability),
    ) as stage:  # fmt: skip
        stage.spared = frozenset({WORKERS - 1})
        pids = {"coordinator": stage.coordinator.process.pid, "worker": stage.workers[WORKERS - 1].process.pid}
        actions = per_minute(seed, RATES, seconds, seconds=STOPPED_S)
        began = time.monotonic()
        span = 0.0
        while span < seconds:
            span += SAMPLE_S
            stage.play(actions, for_s=span, timeout_s=span + 120)
            actions = [action for action in actions if (action.at_s or 0.0) > span]
            times.append((time.monotonic() - began) / 60)
            found = {"coordinator_tasks": stage.record.commits[-1].tasks, "disk_kib": disk_kib(folder / "run")}
            for name, pid in pids.items():
                found |= {
                    f"{name}_rss_kib": rss_bytes(pid) / 1024,
                    f"{name}_descriptors": num_descriptors(pid),
                    f"{name}_threads": num_threads(pid),
                }
            for name, value in found.items():
                series.setdefault(name, []).append(value)
        fired, steps = dict(stage.record.fired), stage.step
        stage.stop_run()
    print(f"{steps} steps in {seconds / 60:.1f} min; fired {fired}")
    for name, values in series.items():
        report.add(f"{name}_per_min", [slope(times, values)])
        quarter = max(1, len(values) // 4)
        before = median(values[quarter : 2 * quarter] or values)
        grown = 100 * (median(values[-quarter:]) / before - 1) if before else 0.0
        report.add(f"grown_{name}", [grown])
        print(f"{name:<24} {values[0]:>10.0f} -> {before:>10.0f} -> {values[-1]:>10.0f}")


def slope(times: list[float], values: list[float]) -> float:
    """Of the line of least squares, the first quarter left out."""
    times, values = times[len(times) // 4 :], values[len(values) // 4 :]
    middle, level = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    return sum((at - middle) * (value - level) for at, value in zip(times, values, strict=True)) / (spread or 1.0)


def disk_kib(run: Path) -> float:
    metrics = run / "metrics.jsonl"
    return (disk_bytes(run) - (metrics.stat().st_size if metrics.exists() else 0)) / 1024


if __name__ == "__main__":
    main()
