"""What a run on one machine costs beside the loop that a user would write: the demo, a GPT-2 of transformers, a CNN, a
network of 300 small layers, a mixture of experts, a frozen net with a head that is trained, a recurrence in a loop, and
a small net over samples that Python code reads one by one.

Ours is the command that users give, ``w5xde_async.coordinator JOB --workers N``, with the job's own settings. The peer
is a plain loop in one process over whole batches in the same order, with the same model, weights and optimizer, and as
many torch threads as are faster here, one or all cores. They take turns (A B A B); a figure is the median of the
rounds' ratios. Where nothing is random but the order (all but the CNN and the layers) both must end at the same loss.

Figures: ``demo_over_plain_1`` and ``_2`` (workers, of which one alone has all cores; aims 0.5, 0.7),
``gpt2_over_plain_1`` and ``_2`` (aim of two 0.95), the same of the other jobs; ``first_commit_over_plain``: from the
command to the demo's first step (aim at most 1.3); ``..._per_s`` are samples a second,
``cpu_ms_...`` processor time of a step, all processes and their start included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from models import text
from report import Report, median, parser
from w5xde_async.job import Job, build_model, load_job, step_function
from w5xde_async.plan.sampler import Sampler

ROOT = Path(__file__).resolve().parents[1]
STEPS = {
    "demo": 400,
    "gpt2": 40,
    "cnn": 150,
    "layers": 120,
    "experts": 400,
    "frozen": 300,
    "recurrent": 250,
    "rows": 800,
}
WARM = {"demo": 60, "gpt2": 8, "cnn": 30, "layers": 20, "experts": 100, "frozen": 60, "recurrent": 50, "rows": 200}
EXACT = ("demo", "gpt2", "experts", "frozen", "recurrent", "rows")  # no dropout, no statistics of a batch
TOLERANCE = 5e-3
_TIMEOUT_S = 240


def demo() -> Job:
    return _steps("demo", load_job(f"{ROOT}/examples/digits.py:job"))


def cnn() -> Job:
    return _steps("cnn", load_job(f"{ROOT}/examples/digits.py:cnn"))


def gpt2() -> Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=96, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip

    def step(model: Any, batch: Any) -> Any:
        return model(input_ids=batch[0], labels=batch[0]).loss

    return _steps("gpt2", Job(
        model=lambda: GPT2LMHeadModel(size), dataset=text(1024, 64, 256), step=step, batch_size=32,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), max_steps=1, drop_last=True,
    ))  # fmt: skip


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(300)), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.out(x)


class _Experts(nn.Module):
    """Each sample goes to one of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(64, 8), nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        chosen, mixed = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                mixed[rows] = expert(x[rows]) * weights[rows, number : number + 1]
        return self.out(x + mixed)


def layers() -> Job:
    x = torch.randn(1 << 14, 32, generator=torch.Generator().manual_seed(7))
    return _steps("layers", _classifier(_Layers, TensorDataset(x, (x[:, 0] > 0).long()), batch=32))


def experts() -> Job:
    x = torch.randn(1 << 14, 64, generator=torch.Generator().manual_seed(7))
    return _steps("experts", _classifier(_Experts, TensorDataset(x, x[:, :4].argmax(1)), batch=128))


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(64, elementwise_affine=False),
        ).requires_grad_(False)  # fmt: skip
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class _Recurrent(nn.Module):
    """Tells what the first symbol was."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(100, 64), nn.GRUCell(64, 64), nn.Linear(64, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        state, rows = torch.zeros(len(tokens), 64), self.embed(tokens)
        for at in reversed(range(tokens.shape[1])):
            state = self.cell(rows[:, at], state)
        return self.out(state)


def frozen() -> Job:
    x = torch.randn(1 << 11, 3, 32, 32, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(len(x)) % 2
    x[labels == 1] *= 1.5
    return _steps("frozen", _classifier(_Frozen, TensorDataset(x, labels), batch=32, rate=1e-2))


def recurrent() -> Job:
    tokens = torch.randint(0, 100, (1 << 13, 32), generator=torch.Generator().manual_seed(7))
    return _steps("recurrent", _classifier(_Recurrent, TensorDataset(tokens, tokens[:, 0] % 2), batch=64))


class _Rows(Dataset[tuple[Tensor, int]]):
    """A table of numbers, as a user reads one."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(7).normal(size=(1 << 13, 50))
        self.labels = (self.x[:, 0] > 0).astype(int)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.as_tensor(self.x[index], dtype=torch.float32), int(self.labels[index])


def rows() -> Job:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(50, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    return _steps("rows", _classifier(net, _Rows(), batch=64))


def _classifier(model: Callable[[], nn.Module], dataset: Dataset[Any], *, batch: int, rate: float = 1e-3) -> Job:
    """As a user would write it: nothing is said of microbatches, nor of the optimizer's forms."""
    return Job(
        model=model, dataset=dataset, loss=nn.functional.cross_entropy, batch_size=batch, max_steps=1,
        optimizer=lambda model: torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate),
    )  # fmt: skip


def _steps(name: str, job: Job) -> Job:
    steps = int(os.environ.get("BENCH_STEPS", STEPS[name]))
    return replace(job, max_steps=steps, epochs=None, evaluate=None)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="rounds of each (5; 2 with --quick)")
    flags.add_argument("--jobs", nargs="+", choices=list(STEPS), default=list(STEPS), help="only these")
    flags.add_argument("--loop", nargs=2, metavar=("JOB", "THREADS"), help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.loop:
        loop(args.loop[0], int(args.loop[1]))
        return
    rounds, cores = args.rounds or (2 if args.quick else 5), os.cpu_count() or 1
    report = Report({"rounds": rounds, "steps": STEPS, "cores": cores})
    for name in args.jobs:
        threads = max((1, cores), key=lambda count: theirs(name, count)["rate"])
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            plain = theirs(name, threads)
            note(found, f"{name}_plain_per_s", plain["rate"])
            note(found, f"cpu_ms_{name}_plain", plain["cpu_ms"])
            for count in (1, 2):
                run = ours(name, count)
                if name in EXACT and abs(run["loss"] - plain["loss"]) > TOLERANCE * abs(plain["loss"]):
                    raise SystemExit(f"{name}: the last loss is {run['loss']:.6f} of ours, {plain['loss']:.6f} plain")
                if not run["loss"] < run["loss_first"] / 2:
                    raise SystemExit(f"{name}: the loss went from {run['loss_first']:.4f} to {run['loss']:.4f} only")
                note(found, f"{name}_over_plain_{count}", run["rate"] / plain["rate"])
                note(found, f"{name}_per_s_{count}", run["rate"])
                note(found, f"cpu_ms_{name}_{count}", run["cpu_ms"])
                if name == "demo" and count == 1:
                    note(found, "first_commit_over_plain", run["first_s"] / plain["first_s"])
                    note(found, "first_commit_s", run["first_s"])
        for figure, samples in found.items():
            report.add(figure, samples)
        print(f"{name}: last loss {run['loss']:.4f} (ours), {plain['loss']:.4f} (plain, {threads} threads)", flush=True)
    print()
    report.show()
    report.write(args.json)


def note(found: dict[str, list[float]], name: str, value: float) -> None:
    found.setdefault(name, []).append(value)


def spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ours(name: str, workers: int) -> dict[str, float]:
    """Samples a second after the first steps, losses, seconds to the first commit, processor time a step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "w5xde_async.coordinator", f"{Path(__file__).resolve()}:{name}", "--port", "0",
                   "--workers", str(workers), "--run-dir", f"{folder}/run", "--log", "silent",
                   "--no-dashboard"]  # fmt: skip
        began, before = time.time(), spent_s()
        subprocess.run(command, check=True, timeout=_TIMEOUT_S, cwd=Path(__file__).parent)
        used = spent_s() - before
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [event for event in map(json.loads, lines) if event.get("event") == "step_committed"]
    late = rows[WARM[name] :]
    return {
        "rate": sum(row["samples"] for row in late) / sum(row["seconds"] for row in late),
        "loss": median([row["loss"] for row in rows[-10:]]), "loss_first": rows[0]["loss"],
        "first_s": rows[0]["time"] - began, "cpu_ms": 1e3 * used / len(rows),
    }  # fmt: skip


def theirs(name: str, threads: int) -> dict[str, float]:
    """The same of a plain loop."""
    command = [sys.executable, str(Path(__file__).resolve()), "--loop", name, str(threads)]
    began, before = time.time(), spent_s()
    done = subprocess.run(command, check=True, timeout=_TIMEOUT_S, capture_output=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return {**told, "first_s": told["first_at"] - began, "cpu_ms": 1e3 * (spent_s() - before) / STEPS[name]}


def loop(name: str, threads: int) -> None:
    """What a user would write. It prints what it did."""
    torch.set_num_threads(threads)
    jobs = (demo, gpt2, cnn, layers, experts, frozen, recurrent, rows)
    job = next(made for made in jobs if made.__name__ == name)()
    torch.manual_seed(job.seed)
    model, step = build_model(job), step_function(job)
    optimizer = job.optimizer(model)
    sampler = Sampler(
        num_samples=len(job.dataset), batch_size=job.batch_size, leaf_samples=job.leaf_samples, seed=job.seed,
        drop_last=job.drop_last,
    )  # fmt: skip
    losses, samples, first_at, began = [], 0, 0.0, 0.0

    def batch(order: Tensor) -> Any:
        if isinstance(job.dataset, TensorDataset):
            return tuple(tensor[order] for tensor in job.dataset.tensors)
        return default_collate([job.dataset[index] for index in order.tolist()])

    for number in range(STEPS[name]):
        if number == WARM[name]:
            began = time.perf_counter()
        plan = sampler.plan(number)
        order = torch.cat([torch.from_numpy(plan.leaf_indices(leaf).copy()) for leaf in range(plan.num_leaves)])
        optimizer.zero_grad()
        loss, _ = step(model, batch(order))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        first_at = first_at or time.time()
        samples += len(order) if number >= WARM[name] else 0
    seconds = time.perf_counter() - began
    print(json.dumps({"rate": samples / seconds, "loss": median(losses[-10:]), "first_at": first_at}))


if __name__ == "__main__":
    main()
