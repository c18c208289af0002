"""One worker on a GPU beside its coordinator, over a plain PyTorch loop on that GPU.

A GPT of about 124M parameters, AdamW, bf16 autocast, steps of 8 leaves that are leased as one block: the worker sums
eight microbatches and sends one gradient. The plain loop does the same leaves with the same optimizer. Both take turns
in processes that stay; a figure is the median of the rounds' ratios, and both must come to the same loss.

Figures: ``gpu_over_plain`` (tokens/s, aim 0.95 or more) and ``gpu_memory_over_plain`` (peak device memory of worker and
coordinator together) where the optimizer steps on the GPU (``--update-device``); the same with ``_cpu`` where it steps
on the host, as it does by default; tokens/s of all three.

Without CUDA it says so and ends. ``--device cpu --tiny`` runs the script itself, on a toy model.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch

from models import Reply, Rig, coordinate, device_name, free_device, lacks_device, make_job, serve, work
from report import Report, parser
from w5xde_async.job import build_model
from w5xde_async.plan.sampler import Sampler

#: bf16 leaves are computed alike, but the optimizers run on different devices: that much may the last losses differ.
TOLERANCE = 2e-2
WARM = 3


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --tiny")
    flags.add_argument("--tiny", action="store_true", help="a toy model, to try the script")
    flags.add_argument("--leaf", type=int, default=0, help="samples of 1024 tokens a leaf (32)")
    flags.add_argument("--steps", type=int, default=0, help="steps a round (20; 6 with --quick)")
    flags.add_argument("--rounds", type=int, default=0, help="rounds (3; 1 with --quick)")
    flags.add_argument("--threads", type=int, default=0, help="threads of the coordinator (every core, as its program)")
    flags.add_argument("--default-leases", action="store_true", help="as a run decides, not a step's leaves in one")
    flags.add_argument("--not-fused", action="store_true", help="AdamW as torch makes it, without fused=True, on both")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"coordinate": coordinate, "work": work, "plain": plain})
        return
    if lacks_device(args.device):
        return
    rounds, steps = args.rounds or (1 if args.quick else 3), args.steps or (6 if args.quick else 20)
    options = {
        "leaves": 8,
        "samples": args.leaf or (4 if args.tiny else 32),
        "steps": WARM + steps,
        "precision": "fp32" if args.device == "cpu" else "bf16",
        "tiny": args.tiny,
        "fused": not args.not_fused,
    }
    job = make_job("gpt2", **options)
    tokens = job.batch_size * job.dataset.tensors[0].shape[1]
    # So long a lease that a block is all the leaves that are free: the step's 8, once the worker's speed is known.
    pacing = {} if args.default_leases else {"target_lease_s": 1e6}
    threads = args.threads or os.cpu_count() or 1
    report = Report(
        {**options, "rounds": rounds, "threads": threads, "tokens_a_step": tokens, "device": device_name(args.device)}
    )
    report.config["parameters"] = sum(p.numel() for p in build_model(job).parameters())
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "ours_cpu": [], "plain": []}
    with Rig(__file__, ["coordinator", "worker", "plain"]) as rig:
        for _ in range(rounds):
            on_device = {"threads": threads, "update_device": args.device, "pacing": pacing}
            found["ours"].append(ours(rig, options, args.device, **on_device))
            rig["plain"].tell("plain", options=options, device=args.device)
            found["plain"].append(rig["plain"].answer(600.0))
            found["ours_cpu"].append(ours(rig, options, args.device, **{**on_device, "update_device": "cpu"}))
            *mine, other = [found[kind][-1]["loss"] for kind in ("ours", "ours_cpu", "plain")]
            print(f"last loss {mine[0]:.4f} and {mine[1]:.4f} (ours), {other:.4f} (plain)")
            if any(abs(loss - other) > TOLERANCE * abs(other) for loss in mine):
                raise SystemExit("the losses differ")
    for kind in ("", "_cpu"):
        pairs = list(zip(found[f"ours{kind}"], found["plain"], strict=True))
        report.add(f"gpu_over_plain{kind}", [a["rate"] / b["rate"] for a, b in pairs])
        if all(b["device_bytes"] for _, b in pairs):
            report.add(f"gpu_memory_over_plain{kind}", [a["device_bytes"] / b["device_bytes"] for a, b in pairs])
    for kind, runs in found.items():
        report.add(f"{kind}_tokens_per_s", [run["rate"] * tokens for run in runs])
    for kind in ("ours", "ours_cpu"):
        phases = found[kind][-1]["phases"].items()
        print(f"{kind}, a step: " + ", ".join(f"{name} {seconds / steps * 1e3:.1f} ms" for name, seconds in phases))
    report.show()
    report.write(args.json)


def ours(
    rig: Rig, options: dict[str, Any], device: str, *, threads: int, update_device: str, pacing: dict[str, Any]
) -> dict[str, Any]:
    rig["coordinator"].tell(
        "coordinate", job="gpt2", options=options, workers=1, warm_steps=WARM, observe=True,
        threads=threads, config={"update_device": update_device}, pacing=pacing,
    )  # fmt: skip
    port = rig["coordinator"].answer()["port"]
    rig["worker"].tell("work", port=port, job="gpt2", options=options, device=device)
    rig["coordinator"].answer(600.0)  # it is warm
    passed = rig["coordinator"].answer(600.0)
    ended = rig["coordinator"].answer()
    worked = rig["worker"].answer()
    return {
        "rate": passed["steps"] / passed["seconds"],
        "loss": ended["loss_last"],
        "phases": ended["phases"],
        "device_bytes": worked["device_bytes"] + ended["device_bytes"],
    }


def plain(reply: Reply, *, options: dict[str, Any], device: str) -> None:
    """The same leaves in the same order, gradients summed by autograd."""
    job = make_job("gpt2", **options)
    model = build_model(job).to(device)
    optimizer = job.optimizer(model)
    loss_of: Any = job.loss
    sampler = Sampler(
        num_samples=len(job.dataset), batch_size=job.batch_size, leaf_samples=job.leaf_samples, seed=job.seed
    )
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began, loss = 0.0, torch.zeros(())
    for step in range(options["steps"]):
        if step == WARM:
            began = now(cuda)
        plan = sampler.plan(step)
        optimizer.zero_grad(set_to_none=False)
        loss = torch.zeros((), device=device)
        for leaf in range(plan.num_leaves):
            at = torch.from_numpy(plan.leaf_indices(leaf).copy())
            x, y = [tensor[at] for tensor in job.dataset.tensors]
            if cuda:
                x, y = [tensor.pin_memory().to(device, non_blocking=True) for tensor in (x, y)]
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                share = loss_of(model(x), y).float() / plan.num_leaves
            share.backward()
            loss += share.detach()
        optimizer.step()
    rate = (options["steps"] - WARM) / (now(cuda) - began)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    last = loss.item()
    del model, optimizer, loss
    free_device(device)
    reply(rate=rate, loss=last, device_bytes=peak)


def now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
