"""The engine alone, without coordinator or network, over a plain loop's forward and backward on the same device.

    python bench/gpu_engine.py [--quick] [--device cuda:0] [--leaf 32] [--leaves 1 2 4 8] [--rounds 5]
    python bench/gpu_engine.py --device cpu --tiny --quick      # tries the script

A GPT of about 124M parameters, bf16 autocast, blocks of 1, 2, 4 and 8 leaves of 1024-token samples. Engine and loop
take turns on the same batches; neither has an optimizer. Below 0.95 the engine is to be mended, above it the
coordinator.

Figures, for n leaves: ``over_plain_n`` (tokens/s over the plain loop's), ``tail_ms_n`` (what is left of the copies when
the device has finished the block), ``memory_over_plain_n`` (peak device memory; CUDA), ``tokens_per_s_n``; and
``load_ms``, what it takes to bring a whole version to the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from models import device_name, free_device, lacks_device, make_job
from report import Report, parser
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import Task
from w5xde_async.compute.engine import Engine
from w5xde_async.job import Job, build_model


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --tiny")
    flags.add_argument("--tiny", action="store_true", help="a toy model, to try the script")
    flags.add_argument("--leaf", type=int, default=0, help="samples a leaf (32)")
    flags.add_argument("--leaves", type=int, nargs="*", default=[1, 2, 4, 8])
    flags.add_argument("--rounds", type=int, default=0, help="rounds (5; 2 with --quick)")
    args = flags.parse_args()
    if lacks_device(args.device):
        return
    torch.set_num_threads(1)
    rounds, cuda = args.rounds or (2 if args.quick else 5), args.device.startswith("cuda")
    options = {
        "leaves": max(args.leaves), "samples": args.leaf or (4 if args.tiny else 32),
        "precision": "bf16" if cuda else "fp32", "tiny": args.tiny,
    }  # fmt: skip
    job = make_job("gpt2", **options)
    report = Report({**options, "rounds": rounds, "device": device_name(args.device)})
    tasks = {leaves: block_of(job, leaves) for leaves in args.leaves}
    ours: list[dict[int, Measured]] = []
    plain: list[dict[int, Measured]] = []
    loads: list[float] = []
    for _ in range(rounds):
        of_engine, load_s = engine_round(job, tasks, args.device)
        ours.append(of_engine)
        loads.append(load_s)
        free_device(args.device)
        plain.append(loop_round(job, tasks, args.device))
        free_device(args.device)
    for leaves, task in tasks.items():
        tokens = task.tensors[0].numel()
        pairs = [(a[leaves], b[leaves]) for a, b in zip(ours, plain, strict=True)]
        report.add(f"over_plain_{leaves}", [b.seconds / a.seconds for a, b in pairs])
        report.add(f"tail_ms_{leaves}", [a.tail_s * 1e3 for a, _ in pairs])
        report.add(f"tokens_per_s_{leaves}", [tokens / a.seconds for a, _ in pairs])
        if cuda:
            report.add(f"memory_over_plain_{leaves}", [a.peak_bytes / b.peak_bytes for a, b in pairs])
    report.add("load_ms", [seconds * 1e3 for seconds in loads])
    report.show()
    report.write(args.json)


def block_of(job: Job, leaves: int) -> Task:
    count = leaves * job.leaf_samples
    structure, tensors = flatten(tuple(tensor[:count] for tensor in job.dataset.tensors))
    return Task(
        step=0, start=0, samples=(job.leaf_samples,) * leaves, loss_scale=1.0, structure=structure, packed=True,
        tensors=tensors,
    )  # fmt: skip


class Measured(NamedTuple):
    seconds: float
    tail_s: float
    peak_bytes: float


def engine_round(job: Job, tasks: dict[int, Task], device: str) -> tuple[dict[int, Measured], float]:
    """Every block by an engine; the seconds that loading a version takes."""
    engine = Engine(job, device=device)
    found = {leaves: measured(device, partial(computed, engine, task)) for leaves, task in tasks.items()}
    loading = measured(device, partial(loaded, engine))
    engine.close()
    return found, loading.seconds


def loop_round(job: Job, tasks: dict[int, Task], device: str) -> dict[int, Measured]:
    model = build_model(job).to(device)
    return {leaves: measured(device, partial(looped, model, job, task, device)) for leaves, task in tasks.items()}


def measured(device: str, action: Callable[[], float]) -> Measured:
    """Once to warm up, then three times in one go. ``action`` gives its tail."""
    cuda, times = device.startswith("cuda"), 3
    action()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    tails = [action() for _ in range(times)]
    if cuda:
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - began) / times
    peak = float(torch.cuda.max_memory_allocated(device)) if cuda else 0.0
    return Measured(seconds, sum(tails) / times, peak)


def computed(engine: Engine, task: Task) -> float:
    """A block, as a worker without a network would. The seconds that its copies took after the device was done."""
    wait, tail = engine._transfer.wait, 0.0

    def waited() -> None:
        nonlocal tail
        began = time.perf_counter()
        wait()
        tail += time.perf_counter() - began

    engine._transfer.wait = waited  # type: ignore[method-assign]
    try:
        outcome = engine.compute(task, lambda bucket, vector: None)
    finally:
        engine._transfer.wait = wait  # type: ignore[method-assign]
    for vector in outcome.vectors:
        engine.release(vector)
    return tail


def loaded(engine: Engine) -> float:
    engine.load(range(len(engine.layout.buckets)))
    return 0.0


def looped(model: torch.nn.Module, job: Job, task: Task, device: str) -> float:
    """The same leaves, gradients added up by autograd."""
    loss_of: Any = job.loss
    cuda = device.startswith("cuda")
    model.zero_grad(set_to_none=False)
    total = torch.zeros((), device=device)
    for rows in zip(*[torch.split(tensor, list(task.samples)) for tensor in task.tensors], strict=True):
        x, y = [tensor.pin_memory().to(device, non_blocking=True) if cuda else tensor for tensor in rows]
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = loss_of(model(x), y).float()
        loss.backward()
        total += loss.detach()
    total.item()
    return 0.0


if __name__ == "__main__":
    main()
