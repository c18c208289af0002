"""A worker without the job's code beside one with it: samples/s, the program's size, the time to the first gradient.

One coordinator and one worker process of one torch thread. Both kinds of worker take turns (A B A B) in processes that
stay; a figure is the median of the rounds' ratios. Both kinds must end with the same digest.

Models: mlp (784-512-512-10, 64 samples a leaf), cnn (two convolutions, batch norm, dropout, 64), lstm (two layers of
128, 16 x 64 tokens), gpt (10.9M parameters, 4 x 128 tokens).

Figures: ``over_local_code_<model>``, ``over_local_code_min`` (aim 0.98): samples/s without the code over with it;
``cpu_over_local_code_<model>``: the same by CPU time of the compute thread alone, where nothing else counts;
``program_bytes_<model>``: the program on the wire, constants included; ``trace_s_<model>``: what the coordinator
takes to trace and to compare; ``first_gradient_ms_<model>`` and ``first_gradient_local_ms_<model>``: from connecting
to the first block computed, with Python started and the job loaded; ``first_gradient_sandbox_ms_<model>``: with the
start of the sandbox's process. ``sandbox_over_in_process_<model>``: samples/s of a worker without the code in the
sandbox over one without it (aim 0.95).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import models
from models import Reply, Rig, coordinate, make_job, serve
from report import Report, median, parser
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import LeafSpec, Task
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.carriage import buffers_of
from w5xde_async.compute.program.form import parse
from w5xde_async.compute.program.program_job import ProgramJob
from w5xde_async.compute.program.tracing import probe_batches, trace_job
from w5xde_async.job import Job, build_model
from w5xde_async.params.layout import Layout
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

#: Steps of a round: (full, quick); as many again, at most 20, warm up.
STEPS = {"mlp": (600, 150), "cnn": (200, 50), "lstm": (120, 30), "gpt": (16, 6)}
WARM = 20


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norm, self.after = nn.BatchNorm2d(16), nn.BatchNorm2d(32)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(32 * 49, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x.view(-1, 1, 28, 28)))), 2)
        x = functional.max_pool2d(functional.relu(self.after(self.second(x))), 2)
        out: Tensor = self.head(self.drop(x.flatten(1)))
        return out


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return out


def _cnn(*, workers: int = 1, steps: int = 10) -> Job:
    return Job(
        model=CNN, dataset=models.classes(1 << 12, 784), loss=functional.cross_entropy, optimizer=models.sgd,
        batch_size=64 * workers, microbatch_size=64, max_steps=steps,
    )  # fmt: skip


def _lstm(*, workers: int = 1, steps: int = 10) -> Job:
    return Job(
        model=LSTM, dataset=models.text(1024, 64, 256), loss=models.next_token_loss, optimizer=models.adamw,
        batch_size=16 * workers, microbatch_size=16, max_steps=steps,
    )  # fmt: skip


models.JOBS = {**models.JOBS, "cnn": _cnn, "lstm": _lstm}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="rounds of each model (7; 3 with --quick)")
    flags.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS), help="only these")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"coordinate": coordinate, "work": work, "trace": trace})
        return
    rounds = args.rounds or (3 if args.quick else 7)
    steps = {name: STEPS[name][int(args.quick)] for name in args.models}
    report = Report({"rounds": rounds, "steps": steps, "workers": 1, "threads": 1})
    with Rig(__file__, ["coordinator", "local", "free", "sandbox"]) as rig:
        lowest = [compare(report, rig, name, steps[name], rounds) for name in args.models]
    report.add("over_local_code_min", [min(lowest)])
    print()
    report.show()
    report.write(args.json)


def compare(report: Report, rig: Rig, name: str, steps: int, rounds: int) -> float:
    rig["coordinator"].tell("trace", job=name)
    traced = rig["coordinator"].answer()
    report.add(f"program_bytes_{name}", [traced["bytes"]])
    report.add(f"trace_s_{name}", [traced["seconds"]])
    report.add(f"cpu_over_local_code_{name}", traced["cpu_ratios"])
    kinds = ("local", "free", "sandbox")
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    firsts: dict[str, list[float]] = {kind: [] for kind in kinds}
    digests = set()
    for number in range(rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            ended = one_run(rig, kind, name, steps)
            rates[kind].append(ended["rate"])
            firsts[kind].append(ended["first_ms"])
            digests.add(ended["digest"])
    if len(digests) != 1:
        raise SystemExit(f"{name}: the digests differ")
    report.add(f"first_gradient_ms_{name}", firsts["free"])
    report.add(f"first_gradient_local_ms_{name}", firsts["local"])
    report.add(f"first_gradient_sandbox_ms_{name}", firsts["sandbox"])
    report.add(f"sandbox_over_in_process_{name}", [a / b for a, b in zip(rates["sandbox"], rates["free"], strict=True)])
    shown = ", ".join(f"{median(rates[kind]):,.0f} ({kind})" for kind in kinds)
    print(f"{name}: samples/s {shown}")
    return report.add(f"over_local_code_{name}", [a / b for a, b in zip(rates["free"], rates["local"], strict=True)])


def one_run(rig: Rig, kind: str, name: str, steps: int) -> dict[str, Any]:
    options = {"workers": 1, "steps": steps + min(WARM, steps)}
    rig["coordinator"].tell(
        "coordinate", job=name, options=options, workers=1, warm_steps=min(WARM, steps),
        config={"code_free": kind != "local"},
    )  # fmt: skip
    port = rig["coordinator"].answer()["port"]
    rig[kind].tell("work", port=port, job=name if kind == "local" else "", options=options, sandbox=kind == "sandbox")
    rig["coordinator"].answer()  # it is warm
    passed = rig["coordinator"].answer()
    ended = rig["coordinator"].answer()
    batch = make_job(name, **options).batch_size
    return {
        "rate": passed["steps"] / passed["seconds"] * batch,
        "digest": ended["digest"],
        "first_ms": rig[kind].answer()["first_ms"],
    }


def trace(reply: Reply, *, job: str) -> None:
    """Trace once to import what it takes, then measure; and compute blocks with and without the code in turns."""
    torch.set_num_threads(1)
    made = make_job(job, workers=1)
    began = 0.0
    for _ in range(2):
        began = time.perf_counter()
        model = build_model(made)
        document = trace_job(made, model, Layout.of(model))
    seconds = time.perf_counter() - began
    layout = Layout.of(model)
    replica = ProgramJob.of(
        parse(document, layout), layout, torch.device("cpu"), precision="fp32", memory_bytes=1 << 40
    )
    local = Engine(made)
    free = Engine(replica, LeafSpec(made.seed, "fp32", made.microbatch_samples, 1))
    for mine, theirs in zip(free.incoming.groups, local.incoming.groups, strict=True):
        mine.copy_(theirs)
    for engine in (local, free):
        engine.load(range(len(layout.buckets)))
    structure, tensors = flatten(probe_batches(made, [made.microbatch_samples])[0])
    task = Task(
        step=0, start=0, samples=(made.microbatch_samples,), loss_scale=1.0, structure=structure, packed=False,
        tensors=tensors,
    )  # fmt: skip
    ratios = []
    for _ in range(16):
        spent = [_cpu_s(engine, task) for engine in (local, free, free, local)]
        ratios.append((spent[0] + spent[3]) / (spent[1] + spent[2]))
    reply(seconds=seconds, bytes=sum(len(data) for _, data in buffers_of(document)), cpu_ratios=ratios[1:])


def _cpu_s(engine: Engine, task: Task) -> float:
    """The CPU time of a few blocks in this thread: what others do on this machine does not count in it."""
    began = time.thread_time()
    for _ in range(4):
        for vector in engine.compute(task, lambda bucket, vector: None).vectors:
            engine.release(vector)
    return time.thread_time() - began


def work(reply: Reply, *, port: int, job: str, options: dict[str, Any], sandbox: bool) -> None:
    """One worker, with the code of ``job`` or, where it is empty, without; then perhaps in a sandbox."""
    torch.set_num_threads(1)
    made = make_job(job, **options) if job else None
    config = WorkerConfig(device="cpu", threads=1, inline_block_s=0.002, sandbox="on" if sandbox else "off")
    worker = Worker(f"127.0.0.1:{port}", job=made, config=config)

    async def run() -> float:
        began = time.perf_counter()
        running = asyncio.ensure_future(worker.run())
        while not _leases_done(worker) and not running.done():  # noqa: ASYNC110 (a worker tells nobody)
            await asyncio.sleep(0.0005)
        first = time.perf_counter() - began
        await running
        return first

    reply(first_ms=asyncio.run(run()) * 1e3)


def _leases_done(worker: Worker) -> int:
    leases = None if worker._connection is None else worker._connection.leases
    return worker.leases_done + (0 if leases is None else leases.num_done)


if __name__ == "__main__":
    main()
