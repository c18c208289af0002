"""Islands of two ranks beside the same torch engine without us, on one machine: gloo, one torch thread a rank.

Ours is a coordinator and ``worker --island dp=2|fsdp=2|pp=2|tp=2``. The peers are what a user would write: DDP with
``no_sync`` over all microbatches but the last; ``fully_shard`` of each layer and of the root; a ``PipelineStage`` a
rank under 1F1B; ``parallelize_module`` with the same plan as ours. Model (a GPT of 10.8M parameters), weights,
microbatches (eight of 8 x 128 tokens a step), order of the data and AdamW are the same, and both must come to the same
loss. They take turns (A B A B); a figure is the median of the rounds' ratios.

Figures: ``dp_over_torch``, ``fsdp_over_torch``, ``pp_over_torch``, ``tp_over_torch`` (aims 0.95); tokens/s of each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import GPT, adamw, next_token_loss, text
from report import Report, median, parser
from w5xde_async.job import Job, build_model
from w5xde_async.plan.sampler import Sampler

LENGTH, VOCABULARY, LAYERS = 128, 512, 6
MICROBATCH, LEAVES, RANKS = 8, 8, 2
WARM, STEPS, QUICK = 3, 20, 6
TOLERANCE = 2e-3
MODES = ("dp", "fsdp", "pp", "tp")
_TIMEOUT_S = 240


def split(model: nn.Module, mesh: Any) -> None:
    """Tensor parallel: the feed-forward layers, and the last one."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def job() -> Job:
    return Job(
        model=lambda: GPT(vocabulary=VOCABULARY, length=LENGTH, width=384, layers=LAYERS, heads=6, tied=False),
        dataset=text(512, LENGTH, VOCABULARY), loss=next_token_loss, optimizer=adamw, batch_size=MICROBATCH * LEAVES,
        microbatch_size=MICROBATCH, drop_last=True, max_steps=int(os.environ.get("BENCH_STEPS", "10")),
        parallelize=split if os.environ.get("BENCH_MODE") == "tp" else None,
    )  # fmt: skip


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="rounds of each mode (4; 2 with --quick)")
    flags.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="only these")
    flags.add_argument("--peer", nargs=3, metavar=("MODE", "RANK", "PORT"), help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.peer:
        peer(args.peer[0], int(args.peer[1]), int(args.peer[2]))
        return
    steps, rounds = QUICK if args.quick else STEPS, args.rounds or (2 if args.quick else 4)
    os.environ |= {"BENCH_STEPS": str(WARM + steps), "OMP_NUM_THREADS": "1", "W5XDE_DASHBOARD": "false"}
    report = Report({"rounds": rounds, "steps": steps, "ranks": RANKS, "threads": 1})
    tokens = MICROBATCH * LEAVES * LENGTH
    for mode in args.modes:
        os.environ["BENCH_MODE"] = mode
        found: dict[str, list[float]] = {"ours": [], "torch": []}
        losses: dict[str, float] = {}
        for _ in range(rounds):
            for kind, run in (("ours", ours), ("torch", theirs)):
                seconds, losses[kind] = run(mode)
                found[kind].append(tokens / seconds)
            if abs(losses["ours"] - losses["torch"]) > TOLERANCE * abs(losses["torch"]):
                raise SystemExit(
                    f"{mode}: the last loss is {losses['ours']:.6f} of ours, {losses['torch']:.6f} of torch"
                )
        report.add(f"{mode}_over_torch", [a / b for a, b in zip(found["ours"], found["torch"], strict=True)])
        for kind, rates in found.items():
            report.add(f"{mode}_tokens_per_s_{kind}", rates)
        print(f"{mode}: last loss {losses['ours']:.6f} (ours), {losses['torch']:.6f} (torch)", flush=True)
    print()
    report.show()
    report.write(args.json)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def ours(mode: str) -> tuple[float, float]:
    """Median seconds of a step after those that warm up, and the last step's loss."""
    here, port = Path(__file__), free_port()
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "w5xde_async.coordinator", f"{here}:job", "--port", str(port), "--run-dir",
               f"{folder}/run", "--log", "silent"]  # fmt: skip
        if mode != "pp":
            run.append("--no-code-free")
        coordinator = subprocess.Popen(run, cwd=here.parent)
        work = [sys.executable, "-m", "w5xde_async.worker", "--server", f"127.0.0.1:{port}", "--threads", "1",
                "--island", f"{mode}={RANKS}", "--log", "silent"]  # fmt: skip
        worker = subprocess.Popen(work if mode == "pp" else [*work, "--job", f"{here}:job"], cwd=here.parent)
        try:
            if coordinator.wait(_TIMEOUT_S) or worker.wait(60):
                raise SystemExit(f"{mode}: our run failed")
        finally:
            for process in (coordinator, worker):
                process.terminate()
                process.wait(30)
        events = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [event for event in events if event.get("event") == "step_committed"]
    return median([row["seconds"] for row in rows[WARM:]]), rows[-1]["loss"]


def theirs(mode: str) -> tuple[float, float]:
    port = str(free_port())
    command = [sys.executable, __file__, "--peer", mode]
    ranks = [subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
    told = [json.loads(rank.communicate(timeout=_TIMEOUT_S)[0].splitlines()[-1]) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{mode}: torch's run failed")
    losses = [loss for one in told for loss in one["losses"]]
    return max(one["seconds"] for one in told), sum(losses) / len(losses)


# -- the peers


def peer(mode: str, rank: int, port: int) -> None:
    """One rank. It prints the median seconds of a step and the losses of its last step."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=_TIMEOUT_S))
    made = job()
    torch.manual_seed(made.seed)
    model = build_model(made)
    sampler = Sampler(
        num_samples=len(made.dataset), batch_size=made.batch_size, leaf_samples=MICROBATCH, seed=made.seed
    )
    peers = {"dp": data_parallel, "fsdp": fully_sharded, "pp": pipeline, "tp": tensor_parallel}
    step_of = peers[mode](model, made, rank)
    seconds, losses = [], []
    for step in range(int(os.environ["BENCH_STEPS"])):
        plan = sampler.plan(step)
        leaves = [
            tuple(tensor[torch.from_numpy(plan.leaf_indices(leaf).copy())] for tensor in made.dataset.tensors)
            for leaf in range(LEAVES)
        ]
        dist.barrier()
        began = time.perf_counter()
        losses = step_of(leaves)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": median(seconds[WARM:]), "losses": losses}), flush=True)
    dist.barrier()
    os._exit(0)


def data_parallel(model: nn.Module, made: Job, rank: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    wrapped: Any = DistributedDataParallel(model)
    optimizer = made.optimizer(wrapped)

    def step(leaves: Any) -> list[float]:
        optimizer.zero_grad()
        mine, losses = leaves[rank * LEAVES // RANKS : (rank + 1) * LEAVES // RANKS], []
        for number, (x, y) in enumerate(mine):
            wrapped.require_backward_grad_sync = number == len(mine) - 1  # what no_sync sets
            loss = made.loss(wrapped(x), y)
            (loss / len(mine)).backward()
            losses.append(loss.detach())
        optimizer.step()
        return [loss.item() for loss in losses]

    return step


def fully_sharded(model: nn.Module, made: Job, rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = made.optimizer(model)

    def step(leaves: Any) -> list[float]:
        optimizer.zero_grad()
        losses = []
        for x, y in leaves[rank::RANKS]:
            loss = made.loss(model(x), y)
            (loss * RANKS / LEAVES).backward()
            losses.append(loss.detach())
        optimizer.step()
        return [loss.item() for loss in losses]

    return step


def tensor_parallel(model: nn.Module, made: Job, rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    split(model, init_device_mesh("cpu", (RANKS,)))
    optimizer = made.optimizer(model)

    def step(leaves: Any) -> list[float]:
        optimizer.zero_grad()
        losses = []
        for x, y in leaves:
            loss = made.loss(model(x), y)
            (loss / LEAVES).backward()
            losses.append(loss.detach())
        optimizer.step()
        return [loss.item() for loss in losses]

    return step


class _Stage(nn.Module):
    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.first = rank == 0
        self.layers = nn.ModuleList(list(model.layers)[rank * LAYERS // RANKS : (rank + 1) * LAYERS // RANKS])
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x if self.first else self.head(self.norm(x))


def pipeline(model: nn.Module, made: Job, rank: int) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    part = _Stage(model, rank)
    tokens = torch.zeros(MICROBATCH, LENGTH, dtype=torch.int64)
    hidden = torch.zeros(MICROBATCH, LENGTH, 384, requires_grad=True)
    logits = torch.zeros(MICROBATCH, LENGTH, VOCABULARY)
    stage = PipelineStage(
        part, rank, RANKS, torch.device("cpu"), input_args=(tokens if rank == 0 else hidden,),
        output_args=(hidden if rank == 0 else logits,),
    )  # fmt: skip
    schedule = Schedule1F1B(stage, LEAVES, loss_fn=made.loss)
    optimizer = made.optimizer(part)

    def step(leaves: Any) -> list[float]:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        x, y = (torch.cat([leaf[place] for leaf in leaves]) for place in (0, 1))
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        return [loss.item() for loss in losses]

    return step


if __name__ == "__main__":
    main()
