"""Workers that read their own copy of the data beside workers that are sent it, each on a line of 100 Mbit/s.

    python bench/local_data.py                     # root and Linux: netem.py

A coordinator and two workers, of one torch thread each, on hosts of their own; lines of 100 Mbit/s and 20 ms of round
trip (``--mbit``, ``--ms``). Samples are images as they are decoded, 224 x 224 x 3 bytes, in a mapped file; the model is
a small CNN. Rounds alternate. A round's two runs must end with the same digest.

Figures: ``local_over_streamed``, samples a second; ``streamed_samples_per_s``, ``local_samples_per_s``;
``streamed_sample_kb``, ``local_sample_kb``: what the workers received for each sample, whole IP packets, parameters
included. ``line_samples_per_s``: what the coordinator's line could carry of samples alone.
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

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import netem
from netem import Line, Network
from report import Report, parser
from w5xde_async.job import Job

PORT, TOKEN = 5555, "jQ3vX9mTbLwZ2pRsYdF4hJ6nGcA1eUkW"  # off loopback a weak one is refused
SIDE, SAMPLES, BATCH, SKIPPED = 224, 512, 64, 2  # the first steps wait for workers
_TIMEOUT_S = 900


class Images(Dataset[tuple[Tensor, int]]):
    """Of a mapped file: a byte for each colour of each pixel."""

    def __init__(self, path: str) -> None:
        self.images = np.memmap(path, np.uint8, "r").reshape(-1, SIDE, SIDE, 3)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.array(self.images[index])), index % 10


class Net(nn.Module):
    """Takes the bytes as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images.permute(0, 3, 1, 2).float() / 255)
        return logits


def job() -> Job:
    path = os.environ["BENCH_IMAGES"]
    return Job(
        model=Net, dataset=Images(path), local_data=Images, loss=nn.functional.cross_entropy, batch_size=BATCH,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01), microbatch_size=8,
        max_steps=int(os.environ["BENCH_STEPS"]),
    )  # fmt: skip


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, help="pairs of runs (3; 1 with --quick)")
    flags.add_argument("--steps", type=int, help="of 64 samples, a run (24; 8 with --quick)")
    flags.add_argument("--mbit", type=float, default=100.0, help="of each host's line, each way")
    flags.add_argument("--ms", type=float, default=20.0, help="of round trip")
    args = flags.parse_args()
    if reason := netem.why_not():
        print(f"no emulated network here: {reason}", file=sys.stderr)
        raise SystemExit(0 if args.quick else 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or namespaces would be left behind
    rounds, steps = args.rounds or (1 if args.quick else 3), args.steps or (8 if args.quick else 24)
    line = Line(rate_mbit=args.mbit, round_trip_s=args.ms / 1e3)
    report = Report({"steps": steps, "mbit": args.mbit, "ms": args.ms, "sample_bytes": SIDE * SIDE * 3})
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.bin"
        np.random.default_rng(0).integers(0, 256, (SAMPLES, SIDE, SIDE, 3), np.uint8).tofile(images)
        os.environ |= {
            "BENCH_IMAGES": str(images), "BENCH_STEPS": str(steps), "OMP_NUM_THREADS": "1", "W5XDE_TOKEN": TOKEN
        }  # fmt: skip
        figures: dict[str, list[float]] = {}
        for _ in range(rounds):
            streamed, local = measure(line, ""), measure(line, str(images))
            if streamed["digest"] != local["digest"]:
                raise SystemExit("data of the workers' own gave other bits than data that was sent")
            figures.setdefault("local_over_streamed", []).append(local["samples_per_s"] / streamed["samples_per_s"])
            for how, row in (("streamed", streamed), ("local", local)):
                for name in ("samples_per_s", "sample_kb"):
                    figures.setdefault(f"{how}_{name}", []).append(row[name])
        for name, values in figures.items():
            report.add(name, values)
    report.add("line_samples_per_s", [args.mbit * 1e6 / 8 / (SIDE * SIDE * 3)])
    print()
    report.show()
    report.write(args.json)


def measure(line: Line, own: str) -> dict[str, Any]:
    """One run. ``own``: where the workers' copy lies; "": they are sent the data."""
    with Network([line] * 3) as network, tempfile.TemporaryDirectory() as folder:
        at, *sites = network.hosts
        run = Path(folder) / "run"
        join = ("--server", f"{at.address}:{PORT}", "--insecure", "--job", f"{__file__}:job", "--threads", "1")
        processes = [
            started(at, "coordinator", f"{__file__}:job", "--host", at.address, "--port", str(PORT), "--insecure",
                    "--no-code-free", "--min-workers", "2", "--run-dir", str(run), "--no-dashboard")
        ]  # fmt: skip
        more = ("--local-data", own) if own else ()
        processes += [started(site, "worker", *join, *more) for site in sites]
        try:
            for process in processes:
                if process.wait(_TIMEOUT_S):
                    raise SystemExit(f"a process failed: {process.args}")
        finally:
            for process in processes:
                process.terminate()
                process.wait(30)
        events = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        received = sum(site.received_bytes for site in sites)
    commits = [event for event in events if event["event"] == "step_committed"]
    (ended,) = [event for event in events if event["event"] == "run_finished"]
    seconds = commits[-1]["time"] - commits[SKIPPED - 1]["time"]
    row = {
        "samples_per_s": BATCH * (len(commits) - SKIPPED) / seconds,
        "sample_kb": received / (BATCH * len(commits)) / 1e3,
    }
    print(f"{'local' if own else 'streamed'}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    return row | {"digest": ended["digest"]}


def started(host: Any, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A program of ours on a host."""
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", f"w5xde_async.{program}", *arguments]
    return subprocess.Popen([*command, "--log", "silent"], cwd=Path(__file__).parent)


if __name__ == "__main__":
    main()
