"""Two islands on home lines beside two single workers on the same lines: what it costs to share a model within a site.

    python bench/islands_wan.py                    # root and Linux: netem.py
    python bench/islands_wan.py --rules streaming --workers fsdp=2 single

Three hosts: a coordinator and two sites, each on a line of 100 Mbit/s and 40 ms of round trip (``--mbit``, ``--ms``).
A site is one worker of one torch thread, or an island of two ranks of one thread each, on loopback. The model is
``examples/llama.py``; a worker's own step is 8 windows in 4 leaves, so that each rank has two. On two cores four ranks
share what two workers have to themselves: where there are fewer cores than ranks, compare what the line costs
(``kept``), not an island's seconds with a worker's.

``utilization``: seconds of computing over those from the moment when both sites are there to the last commit, of the
site that waited more; an island's own exchange counts as computing. ``kept``: these seconds without a network over
those with it. ``loss``: of held-out text at the end. ``sent_mb``, ``received_mb``: of a site's device, whole IP
packets.

Figures, for each rule: these of both, ``..._over_single`` for utilization, kept, loss and bytes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import netem
from netem import Line, Network
from report import Report, parser

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from llama import make  # noqa: E402
from w5xde_async.job import Job  # noqa: E402

PORT, TOKEN = 5555, "jQ3vX9mTbLwZ2pRsYdF4hJ6nGcA1eUkW"  # off loopback a weak one is refused
RULES = {
    "streaming": ("--update", "streaming", "--codec", "int4", "--fragments", "4", "--overlap", "2"),
    "local": ("--update", "local", "--codec", "int8"),
    "sync": ("--update", "sync", "--codec", "int8"),
}
COMPARED = ("utilization", "kept", "loss", "sent_mb", "received_mb")
WORKERS = ("single", "fsdp=2", "dp=2")
_TIMEOUT_S = 1800


def job() -> Job:
    size, steps = os.environ["BENCH_SIZE"], int(os.environ["BENCH_STEPS"])
    return make(size, batch_size=8, microbatch_size=2, steps=steps)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--size", choices=("tiny", "m1"), help="of the model (m1; tiny with --quick)")
    flags.add_argument("--steps", type=int, help="own steps of both sites together (600; 48 with --quick)")
    flags.add_argument("--rules", nargs="+", choices=list(RULES), help="only these (streaming, local)")
    flags.add_argument("--workers", nargs="+", choices=WORKERS, default=["single", "fsdp=2"], help="only these")
    flags.add_argument("--mbit", type=float, default=100.0, help="of each host's line, each way")
    flags.add_argument("--ms", type=float, default=40.0, help="of round trip")
    args = flags.parse_args()
    if reason := netem.why_not():
        print(f"no emulated network here: {reason}", file=sys.stderr)
        raise SystemExit(0 if args.quick else 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or namespaces would be left behind
    size, steps = args.size or ("tiny" if args.quick else "m1"), args.steps or (48 if args.quick else 600)
    inner_steps = 6 if args.quick else 20
    os.environ |= {"BENCH_SIZE": size, "BENCH_STEPS": str(steps), "OMP_NUM_THREADS": "1", "W5XDE_TOKEN": TOKEN}
    report = Report({"size": size, "steps": steps, "inner_steps": inner_steps, "mbit": args.mbit, "ms": args.ms})
    line = Line(rate_mbit=args.mbit, round_trip_s=args.ms / 1e3)
    for rule in args.rules or (["streaming"] if args.quick else ["streaming", "local"]):
        rows = {}
        for workers in args.workers:
            free, row = (measure(rule, workers, one, inner_steps) for one in (Line(), line))
            rows[workers] = row | {"kept": free["wall_s"] / row["wall_s"]}
        for workers, row in rows.items():
            for name, value in row.items():
                report.add(f"{rule}_{workers}_{name}", [value])
            for name in COMPARED if workers != "single" and "single" in rows else ():
                report.add(f"{rule}_{workers}_{name}_over_single", [row[name] / rows["single"][name]])
    print()
    report.show()
    report.write(args.json)


def measure(rule: str, workers: str, line: Line, inner_steps: int) -> dict[str, float]:
    """One run of two sites."""
    options = [*RULES[rule], *(() if rule == "sync" else ("--inner-steps", str(inner_steps)))]
    island = [] if workers == "single" else ["--island", workers]
    with Network([line] * 3) as network, tempfile.TemporaryDirectory() as folder:
        at, *sites = network.hosts
        run = Path(folder) / "run"
        join = ("--server", f"{at.address}:{PORT}", "--insecure", "--job", f"{__file__}:job", "--threads", "1")
        processes = [
            started(at, "coordinator", f"{__file__}:job", "--host", at.address, "--port", str(PORT), "--insecure",
                    "--no-code-free", "--min-workers", "2", "--run-dir", str(run), "--no-dashboard", *options)
        ]  # fmt: skip
        processes += [started(site, "worker", *join, *island) for site in sites]
        try:
            for process in processes:
                if process.wait(_TIMEOUT_S):
                    raise SystemExit(f"{rule}, {workers}: a process failed")
        finally:
            for process in processes:
                process.terminate()
                process.wait(30)
        events = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        moved = [(site.sent_bytes / 1e6, site.received_bytes / 1e6) for site in sites]
    row = figures(events) | {"sent_mb": max(sent for sent, _ in moved), "received_mb": max(got for _, got in moved)}
    print(f"{rule}, {workers}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return row


def started(host: Any, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A program of ours on a host."""
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", f"w5xde_async.{program}", *arguments]
    return subprocess.Popen([*command, "--log", "silent"], cwd=ROOT / "bench")


def figures(events: list[dict[str, Any]]) -> dict[str, float]:
    def of(kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["event"] == kind]

    commits, ended = of("step_committed"), of("run_finished")[-1]
    wall_s = commits[-1]["time"] - of("worker_joined")[1]["time"]
    return {
        "utilization": min(share["compute_s"] for share in ended["shares"]) / wall_s,
        "loss": of("evaluated")[-1]["metrics"]["val_loss"],
        "wall_s": wall_s,
        "leaves_in_vain": ended["leaves_in_vain"],
    }


if __name__ == "__main__":
    main()
