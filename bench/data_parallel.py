"""Data-parallel training on one machine, 2 workers of one torch thread, beside PyTorch DDP on gloo.

Ours is a coordinator and two worker processes, exact float32, with the link that they have by default (shared memory)
and over TCP on loopback; a step is two leaves. As in the coordinator program, what is too short to be sent (tiny's
steps, one of mlp's two leaves) is computed by the coordinator once it has made sure of the workers' bits. Over TCP that
is measured too (``_tcp_default``), and a run in which all leases are sent, as they are to other machines (``_tcp``).
As in the program too, updates that the event loop does not make itself have both cores, which are free then: DDP's two
processes make theirs at the same time, on a core each. DDP is two processes. All have the same initial weights,
per-rank batches, order of the data, optimizer and number of steps, and must come to the same loss. They take turns
(A B A B) in processes that stay, with two processes that only compute forward and backward in between; a figure is the
median of the rounds' ratios.

Models: tiny (10-20-10, batch 32 a worker), mlp (784-512-512-10, 64), gpt (10.9M parameters, 4 x 128 tokens).

Figures: ``over_ddp_tiny`` (aim 3.5), ``over_ddp_mlp`` (1.9), ``over_ddp_gpt`` (1.05), the same with ``_tcp`` (2.5, 1.3,
1.0) and with ``_tcp_default``; ``efficiency_gpt``: ours over forward and backward alone in both processes (no optimizer
there); ``limit_over_ddp_*``: those two processes over DDP, which nobody can be over; ``coordinator_cpu_ms_*`` and
``workers_cpu_ms_*``: processor time of a step, of the workers together; ``loop_stall_ms_max``: the longest that the
coordinator's event loop kept a timer waiting in the gpt runs (aim below 10); samples/s of all five kinds.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from models import Reply, Rig, coordinate, cpu_seconds, make_job, serve, work
from report import Report, median, parser
from w5xde_async.job import build_model
from w5xde_async.plan.sampler import Sampler

#: Steps of a round and, before them, steps that warm up: (full, quick, warm).
STEPS = {"tiny": (4000, 1000, 200), "mlp": (400, 120, 40), "gpt": (20, 5, 2)}
#: The sums of two gradients are added in another order; that much may the losses of the last step differ, relatively.
TOLERANCE = 2e-3
WORKERS = ("worker-0", "worker-1")
PROCESSES = ("coordinator", "workers")
#: What the figures of a link end with, and the kind of run that has it.
LINKS = {"": "ours", "_tcp": "tcp", "_tcp_default": "tcp default"}
RANKS = ("rank-0", "rank-1")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="rounds of each model (5; 2 with --quick)")
    flags.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS), help="only these")
    flags.add_argument("--profile", action="store_true", help="one run of ours a model under cProfile, nothing else")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"coordinate": coordinate, "work": work, "ddp": ddp, "compute": compute})
        return
    rounds = args.rounds or (2 if args.quick else 5)
    steps = {name: STEPS[name][int(args.quick)] for name in args.models}
    report = Report({"rounds": rounds, "steps": steps, "workers": 2, "threads": 1})
    with Rig(__file__, ["coordinator", *WORKERS, *RANKS]) as rig:
        for name in args.models:
            if args.profile:
                show_profile(rig, name, steps[name])
            else:
                compare(report, rig, name, steps[name], rounds)
    if not args.profile:
        print()
        report.show()
        report.write(args.json)


def compare(report: Report, rig: Rig, name: str, steps: int, rounds: int) -> None:
    samples = make_job(name).batch_size
    kinds = {
        "ours": ours, "tcp": partial(ours, link="tcp", short_steps="workers"),
        "tcp default": partial(ours, link="tcp"), "ddp": theirs, "compute": computing,
    }  # fmt: skip
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {f"{who}_cpu_ms_{name}{link}": [] for link in LINKS for who in PROCESSES}
    stalls: list[float] = []
    ended: dict[str, Any] = {}
    for _ in range(rounds):
        for kind, run in kinds.items():
            ended[kind] = run(rig, name, steps)
            rates[kind].append(ended[kind]["rate"] * samples)
        stalls.append(ended["ours"]["stall_ms"])
        for link, kind in LINKS.items():
            same(name, ended[kind], ended["ddp"])
            for who in PROCESSES:
                cpu[f"{who}_cpu_ms_{name}{link}"].append(ended[kind][who])
    for link, kind in LINKS.items():
        report.add(f"over_ddp_{name}{link}", [a / b for a, b in zip(rates[kind], rates["ddp"], strict=True)])
    for figure, found in cpu.items():
        report.add(figure, found)
    efficiencies = [a / b for a, b in zip(rates["ours"], rates["compute"], strict=True)]
    report.add(f"efficiency_{name}", efficiencies)
    limits = [a / b for a, b in zip(rates["compute"], rates["ddp"], strict=True)]
    report.add(f"limit_over_ddp_{name}", limits)
    for kind, found in rates.items():
        report.add(f"{kind.replace(' ', '_')}_samples_per_s_{name}", found)
    if name == "gpt":
        report.add("loop_stall_ms_max", stalls)
        report.figures["loop_stall_ms_max"] = max(stalls)
    losses = f"{ended['ours']['loss']:.6f} (ours), {ended['ddp']['loss']:.6f} (DDP)"
    print(f"\n{name}: global samples/s, {ended['ours']['step']} steps each, last loss {losses}")
    for kind, found in rates.items():
        print(f"  {kind:<12} {median(found):>12,.1f}   {' '.join(f'{rate:,.0f}' for rate in found)}")
    show_phases(rig, name, steps)


def same(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Both did the same: as many steps, to the same loss."""
    if ours["step"] != theirs["step"]:
        raise SystemExit(f"{name}: {ours['step']} steps of ours, {theirs['step']} of DDP")
    if abs(ours["loss"] - theirs["loss"]) > TOLERANCE * abs(theirs["loss"]):
        raise SystemExit(f"{name}: the last loss is {ours['loss']:.6f} of ours, {theirs['loss']:.6f} of DDP")


def total(name: str, steps: int) -> int:
    return steps + STEPS[name][2]


# -- ours


def ours(
    rig: Rig, name: str, steps: int, *, link: str = "auto", short_steps: str = "here", observe: bool = False,
    profile: bool = False,
) -> dict[str, Any]:  # fmt: skip
    options = {"steps": total(name, steps)}
    warm = STEPS[name][2]
    rig["coordinator"].tell(
        "coordinate", job=name, options=options, workers=2, warm_steps=warm, observe=observe, profile=profile,
        time_stalls=name == "gpt", pacing={"short_steps": short_steps}, spares_loop=True,
    )  # fmt: skip
    port = rig["coordinator"].answer()["port"]
    for worker in WORKERS:
        first = worker == WORKERS[0]
        rig[worker].tell("work", port=port, job=name, options=options, profile=profile and first, link=link)
    rig["coordinator"].answer()  # it is warm
    used_s = sum(cpu_seconds(rig[worker].pid) for worker in WORKERS)
    passed = rig["coordinator"].answer()
    used_s = sum(cpu_seconds(rig[worker].pid) for worker in WORKERS) - used_s
    ended = rig["coordinator"].answer()
    for worker in WORKERS:
        rig[worker].answer()
    ended |= {"rate": passed["steps"] / passed["seconds"], "loss": ended["loss_last"], "stall_ms": passed["stall_ms"]}
    ended |= {"coordinator": passed["cpu_s"] / passed["steps"] * 1e3, "workers": used_s / passed["steps"] * 1e3}
    return ended


def show_phases(rig: Rig, name: str, steps: int) -> None:
    """One more run of ours, observed: where a step's time goes by the project's own timers."""
    seen = ours(rig, name, steps, observe=True)
    count = max(seen["observed"], 1)
    step_ms = seen["phases"].pop("step") / count * 1e3
    print(f"  ours, observed: {step_ms:.3f} ms a step")
    for phase, seconds in seen["phases"].items():
        print(f"    coordinator: {phase:<8} {seconds / count * 1e3:8.3f} ms")
    leaves = sum(share["leaves"] for share in seen["shares"])
    for what in ("compute_s", "wait_s"):
        print(f"    worker: {what:<13} {sum(share[what] for share in seen['shares']) / leaves * 1e3:8.3f} ms a leaf")


def show_profile(rig: Rig, name: str, steps: int) -> None:
    ended = ours(rig, name, steps, profile=True)
    print(f"=== {name}: {ended['rate']:.1f} steps/s under cProfile")
    for who in ("coordinator", WORKERS[0]):
        for thread, table in rig[who].answer()["profile"]:
            print(f"--- {who}, {thread}\n{table}")


# -- DDP, and computing alone


def theirs(rig: Rig, name: str, steps: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank, child in enumerate(RANKS):
        rig[child].tell("ddp", name=name, steps=steps, rank=rank, port=port)
    answers = [rig[child].answer() for child in RANKS]
    losses = [answer["loss"] for answer in answers]
    return {"rate": answers[0]["rate"], "loss": sum(losses) / len(losses), "step": answers[0]["step"]}


def computing(rig: Rig, name: str, steps: int) -> dict[str, Any]:
    for rank, child in enumerate(RANKS):
        rig[child].tell("compute", name=name, steps=steps, rank=rank)
    return {"rate": sum(rig[child].answer()["rate"] for child in RANKS) / 2}


def ddp(reply: Reply, *, name: str, steps: int, rank: int, port: int) -> None:
    """One rank: the same samples that leaf ``rank`` of each step holds."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    job = make_job(name)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model: Any = DistributedDataParallel(build_model(job))
    optimizer = job.optimizer(model)
    loss = torch.zeros(())
    began = 0.0
    for step, (x, y) in enumerate(batches(job, rank, total(name, steps))):
        if step == STEPS[name][2]:
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = job.loss(model(x), y)
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    answer = {"rate": steps / seconds, "loss": loss.item(), "step": step + 1}
    del model, optimizer, loss  # a rank may abort where its reducer outlives the group
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    reply(**answer)


def compute(reply: Reply, *, name: str, steps: int, rank: int) -> None:
    """Forward and backward of one worker's leaves, nothing else."""
    job = make_job(name)
    model = build_model(job)
    began = 0.0
    for step, (x, y) in enumerate(batches(job, rank, total(name, steps))):
        if step == STEPS[name][2]:
            began = time.perf_counter()
        model.zero_grad(set_to_none=False)
        job.loss(model(x), y).backward()
    reply(rate=steps / (time.perf_counter() - began))


def batches(job: Any, rank: int, steps: int) -> Any:
    """Leaf ``rank`` of each step, in the order of the project's own sampler."""
    sampler = Sampler(
        num_samples=len(job.dataset), batch_size=job.batch_size, leaf_samples=job.leaf_samples, seed=job.seed
    )
    for step in range(steps):
        at = torch.from_numpy(sampler.plan(step).leaf_indices(rank).copy())
        yield tuple(tensor[at] for tensor in job.dataset.tensors)


if __name__ == "__main__":
    main()
