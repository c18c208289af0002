"""Three workers of speeds 1:4:10 under every update rule: what they do together over the sum of what each does alone.

    python bench/mixed_speeds.py [--quick] [--json FILE] [--rules async local]

The throttle is a sleep in the job's loss (throttled.py): a leaf of 8 samples takes 0.2 s, 0.05 s and 0.02 s. All rules
use the same samples in the same order from the same start, SGD with momentum 0.5 and one learning rate; commits of
``sync`` and ``async`` (three results of 32) are of 96 samples, inner steps of the local rules of 32;
``streaming`` has four fragments of the 85,000 parameters. One seed: losses differ by chance too.

Figures: ``{rule}_over_sum_of_solo``: samples/s of the whole run, from the first commit to the last, over the sum of
the three rates alone (``sync`` with one worker). ``{rule}_loss_over_sync``: held-out loss at the end over that of
``sync``, after as many samples.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tests.support.chaos import Stage
from tests.support.faults import Record
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from churn import rate_of
from models import classes
from report import Report, parser
from throttled import INPUTS, LEAF_SAMPLES, loss
from w5xde_async.job import Job

JOB = f"{Path(__file__).resolve()}:job"
LEAF_S = (0.2, 0.05, 0.02)
RULES = {
    "sync": (),
    "async": ("--results-per-step", "3"),
    "local": ("--inner-steps", "8", "--outer-momentum", "0.5"),
    "streaming": (
        "--inner-steps",
        "8",
        "--outer-momentum",
        "0.5",
        "--outer-lr",
        "0.7",
        "--fragments",
        "4",
        "--overlap",
        "1",
    ),
    "async-local": ("--inner-steps", "8", "--outer-momentum", "0.5", "--results-per-step", "3"),
}


def model() -> nn.Module:
    """Of six buckets of 64 KiB."""
    return nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def job() -> Job:
    data = classes(1 << 14, INPUTS)
    held_out, rest = slice(0, 1 << 12), slice(1 << 12, None)
    x, y = data.tensors

    @torch.no_grad()
    def evaluate(trained: nn.Module) -> dict[str, float]:
        return {"val_loss": cross_entropy(trained(x[held_out]), y[held_out]).item()}

    return Job(
        model=model,
        dataset=TensorDataset(x[rest], y[rest]),
        loss=loss,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5),
        batch_size=int(os.environ["BENCH_BATCH"]),
        microbatch_size=LEAF_SAMPLES,
        max_steps=int(os.environ["BENCH_STEPS"]),
        evaluate=evaluate,
        evaluate_every=1 << 30,
    )


def play(folder: Path, leaf_s: tuple[float, ...], rule: str, samples: int) -> Record:
    """A run of so many samples by a worker for each throttle."""
    batch = 96 if rule == "sync" else 32
    shared = {"BENCH_BATCH": str(batch), "BENCH_STEPS": str(samples // batch)}
    environment = [shared | {"BENCH_LEAF_S": str(each)} for each in leaf_s]
    flags = ("--min-workers", str(len(leaf_s)), "--checkpoint-every", "100000", "--bucket-size", "64KiB",
             "--update", rule, *RULES[rule])  # fmt: skip
    with Stage(
        JOB, folder / "run", workers=len(leaf_s), environment=environment, coordinator_environment=environment[0],
        flags=flags,
    ) as stage:  # fmt: skip
        return stage.play(timeout_s=280)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    flags.add_argument("--samples", type=int, default=0, help="of each run (11520; 3840 with --quick)")
    args = flags.parse_args()
    samples = args.samples or (3840 if args.quick else 11520)
    report = Report({"leaf_s": LEAF_S, "samples": samples})
    folder = Path(tempfile.mkdtemp(prefix="mixed-speeds-"))
    try:
        fastest = max(1 / leaf_s for leaf_s in LEAF_S)
        alone = [rate_of(play(folder, (each,), "sync", max(480, int(samples / 4 / each / fastest)))) for each in LEAF_S]
        print("alone: " + ", ".join(f"{each:.1f}" for each in alone) + " samples/s")
        report.add("sum_of_solo_samples_per_s", [sum(alone)])
        losses: dict[str, float] = {}
        for rule in dict.fromkeys(["sync", *args.rules]):
            record = play(folder, LEAF_S, rule, samples)
            losses[rule] = record.finished["metrics"]["val_loss"]
            over = report.add(f"{rule}_over_sum_of_solo", [rate_of(record) / sum(alone)])
            report.add(f"{rule}_loss_over_sync", [losses[rule] / losses["sync"]])
            leaves = ", ".join(f"{share['name']} {share['leaves']}" for share in record.finished["shares"])
            print(f"{rule}: {rate_of(record):.1f} samples/s, {over:.3f} of the sum; loss {losses[rule]:.4f}; {leaves}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
