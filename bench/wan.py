"""Slow links: two workers and a coordinator on an emulated wide-area network, beside PyTorch DDP on the same links.

    python bench/wan.py                       # all cells, then table, figures and plots (root and Linux: netem.py)
    python bench/wan.py --networks 100/40     # some of the cells; rows of others stay as they are
    python bench/wan.py --rules local --codecs int8
    python bench/wan.py --cells 0             # no measurement: table, figures and plots of what is there
    python bench/wan.py --quick               # three cells of a few steps; nothing is kept

The work: the GPT of ``text_job.py`` with 10.9M parameters, ``--steps`` optimizer steps of two leaves (one for each
worker) of 4 x 128 bytes of text, or as much text in steps of workers' own; the loss is of held-out text at the end.
A network's name is Mbit/s of every host's line, each way, over ms of round trip; ``unequal``: one worker 20/100, the
other and the coordinator 100/40; ``none``: loopback. Every cell is a **row** in ``--rows FILE`` (JSON lines; a newer
one replaces an older one), so that a table can be measured in pieces. Processes have one torch thread each; on two
cores, workers, coordinator and the emulator share them, for DDP as for us.

What a row says:

- ``start_s``: from the command (the processes run and have imported everything) to the first leaf: connecting, the
  parameters on their way to everybody included; for DDP the rendezvous and its broadcast. ``wall_s``: from then to the
  last commit. Both together are what a user waits
- ``utilization``: seconds of computing over ``wall_s``, of each worker: forward, backward, and the optimizer where it
  is the worker's (DDP, local steps). DDP: seconds of a step without communication, both ranks at once, over seconds
  of a step
- ``leaf_s``: seconds of computing for a leaf. Where rows differ in it, the machine had other work
- ``sent_mb``, ``received_mb``: of each worker's device, whole IP packets, start included
- ``steps_measured``: less than ``steps`` where a slow link would take very long. Such a row's ``wall_s`` and bytes are
  those of a measured step times ``steps``, and it has no loss of its own: DDP's and exact sync's mathematics do not
  depend on the link, so their loss is that of the same work without a network

DDP has the remedies that torch ships for slow links, each as its own row: the communication hooks ``fp16`` and
``powersgd`` (rank 4, error feedback and warm start), and post-local SGD (``ddp-local``: parameters averaged every H
steps of each rank). Exact sync and DDP, whose mathematics are one, get the search of a learning rate that the rules of
local steps had: rows without a network at several rates, and losses are compared with the lowest of them.

Figures, for 100/40 and 20/100: ``utilization``, ``loss_over_sync`` of our best cell (utilization of the worker that
waited more); ``bytes_over_ddp``, ``wall_over_ddp``: plain DDP's over ours, start included; ``bytes_over_remedy``,
``wall_over_remedy``: those of DDP's best remedy, by the same rule as our best cell.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
import uvloop
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import netem
from models import Reply, Rig, serve
from netem import Line, Network
from report import Report, commit, parser
from text_job import collate, held_out_loss, text_job
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import Unreachable
from w5xde_async.job import Job, build_model
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.plan.sampler import Sampler
from w5xde_async.telemetry.events import Bus, Evaluated, Event, RunFinished, StepCommitted, Warned, WorkerReported
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker
from wan_table import add_figures, draw, exact_loss, load, put_table, table

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ("worker-0", "worker-1")
PORT = 5555
TOKEN = "jQ3vX9mTbLwZ2pRsYdF4hJ6nGcA1eUkW"  # off loopback a weak one is refused
TOKENS_A_STEP = 2 * 4 * 128
_FAST, _HOME, _FAR = (
    Line(rate_mbit=1000, round_trip_s=0.010),
    Line(rate_mbit=100, round_trip_s=0.040),
    Line(rate_mbit=20, round_trip_s=0.100),
)
#: Lines of the coordinator and both workers.
NETWORKS: dict[str, list[Line]] = {
    "none": [],
    "1000/10": [_FAST] * 3,
    "100/40": [_HOME] * 3,
    "20/100": [_FAR] * 3,
    "unequal": [_HOME, _HOME, _FAR],
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run. ``settings``: of ``UpdateConfig``. ``measured``: steps where the whole budget would take very long.

    ``ahead``: leases that a worker has at once, where it is not the default: they come behind fragments.
    ``windows`` and ``rate``: of a worker's own step under rules of local steps; of fewer windows, as many more steps.
    """

    network: str
    rule: str
    codec: str = "raw"
    settings: dict[str, Any] = field(default_factory=dict)
    measured: int = 0
    ahead: int = 0
    windows: int = 4
    rate: float = 1e-3

    @property
    def key(self) -> str:
        more = f" {self.ahead} ahead" if self.ahead else ""
        more += f" {self.windows} windows at {self.rate:g}" if (self.windows, self.rate) != (4, 1e-3) else ""
        return f"{self.network} {self.rule} {self.codec} {json.dumps(self.settings, sort_keys=True)}{more}"

    @property
    def update(self) -> dict[str, Any]:
        if self.rule == "auto":
            return dict(self.settings)
        return {"rule": self.rule, "codec": self.codec, **self.settings}


def local(network: str, codec: str, inner_steps: int = 40, **settings: Any) -> Cell:
    """Rounds of local steps, each of half as many windows as a worker has of a step of sync, at the rate that goes with
    them. Short rounds make successive Deltas alike: a smaller momentum (``updates.local``)."""
    more = {"inner_steps": inner_steps, "outer_momentum": 0.5, "outer_lr": 0.9, "quorum": 1.0, **settings}
    return Cell(network=network, rule="local", codec=codec, settings=more, windows=2, rate=6e-4)


def streaming(network: str, codec: str, inner_steps: int = 40, **settings: Any) -> Cell:
    """The same in fragments that take turns."""
    more = {"fragments": 4, "overlap": 4, **settings}
    return dataclasses.replace(local(network, codec, inner_steps, **more), rule="streaming")


def ddp_local(network: str, inner_steps: int = 40, **more: Any) -> Cell:
    """Post-local SGD (Lin et al. 2018): the same own steps as ``local``, parameters averaged every ``inner_steps``."""
    more = {"windows": 2, "rate": 6e-4, **more}
    return Cell(network=network, rule="ddp-local", settings={"inner_steps": inner_steps}, **more)


def remedies(network: str, fp16: int) -> list[Cell]:
    """What torch ships for slow links; of ``fp16``, whose mathematics are nearly DDP's, a few steps."""
    return [
        Cell(network=network, rule="ddp", codec="fp16", measured=fp16),
        Cell(network=network, rule="ddp", codec="powersgd", settings={"rank": 4}),
        ddp_local(network),
        ddp_local(network, windows=4, rate=1e-3),
    ]


def cells() -> list[Cell]:
    """The table. DDP and exact sync on slow links: a few steps."""
    found = [Cell(network="none", rule="ddp"), Cell(network="none", rule="ddp", codec="fp16")]
    found += [Cell(network="none", rule="sync", rate=rate) for rate in (1e-3, 5e-4, 7e-4, 1.4e-3)]
    for network, few in (("1000/10", 12), ("100/40", 5), ("20/100", 2), ("unequal", 2)):
        found.append(Cell(network=network, rule="ddp", measured=few))
    found += remedies("1000/10", 12) + remedies("100/40", 5) + remedies("20/100", 2)
    whole = streaming("100/40", "int4", overlap=2, outer_lr=0.7)  # as many steps as sync: half of its batch each
    found += [
        Cell(network="1000/10", rule="sync", measured=12),
        Cell(network="1000/10", rule="sync", codec="int8", measured=20),
        local("1000/10", "int8"),
        Cell(network="100/40", rule="sync", measured=4),
        Cell(network="100/40", rule="sync", codec="bf16", measured=6),
        Cell(network="100/40", rule="sync", codec="int8", measured=8),
        dataclasses.replace(whole, windows=4, rate=1e-3),
        local("100/40", "int4"),
        streaming("100/40", "int8"),
        streaming("100/40", "int4"),
        streaming("100/40", "int4", inner_steps=80),
        streaming("100/40", "sparseloco", downlink="int4"),
        Cell(network="100/40", rule="auto", windows=2, rate=6e-4),
        Cell(network="20/100", rule="auto", windows=2, rate=6e-4),
        local("20/100", "int4", inner_steps=80),
        streaming("20/100", "int4", inner_steps=80, overlap=16),
        dataclasses.replace(streaming("20/100", "int4", inner_steps=80, overlap=16), ahead=12),
        dataclasses.replace(streaming("20/100", "int4", inner_steps=60, overlap=16), ahead=12),
        dataclasses.replace(streaming("unequal", "int4", overlap=16), ahead=12),
        Cell(network="unequal", rule="async-local", codec="int4", windows=2, rate=6e-4,
             settings={"inner_steps": 40, "outer_momentum": 0.5, "results_per_step": 2}),
    ]  # fmt: skip
    return found


# -- what children do


class Marks:
    """When a worker's job was first called, on the clock that all processes share."""

    def __init__(self) -> None:
        self.first: float | None = None

    def watch(self, job: Job) -> Job:
        inner = job.step
        assert inner is not None

        def step(model: nn.Module, batch: Any) -> Any:
            if self.first is None:
                self.first = time.monotonic()
            return inner(model, batch)

        return dataclasses.replace(job, step=step)


def move(reply: Reply, *, namespace: str) -> None:
    """Enter a namespace; empty: the one that the bench was started in."""
    netem.enter(namespace)
    reply(moved=True)


def coordinate(
    reply: Reply, *, host: str, job: dict[str, Any], update: dict[str, Any], auto: bool, evaluate: bool, ahead: int
) -> None:  # fmt: skip
    """One run. Answers when it listens, and at its end."""
    commits: list[tuple[float, float, int]] = []
    ended: dict[str, Any] = {}
    said: list[str] = []
    shares: dict[str, dict[str, Any]] = {}

    def on_event(event: Event) -> None:
        if isinstance(event, StepCommitted):
            commits.append((time.monotonic(), event.loss, event.samples))
        elif isinstance(event, Evaluated):
            ended["loss"] = event.metrics["val_loss"]
        elif isinstance(event, Warned):  # what ``auto`` chose, and why
            said.append(event.text)
        elif isinstance(event, WorkerReported):  # behind a slow link a worker may still be there at the end
            shares[event.name] = {"compute_s": event.compute_s, "wait_s": event.wait_s, "leaves": event.leaves}
        elif isinstance(event, RunFinished):
            shares.update({share.name: asdict(share) for share in event.shares})

    async def run() -> None:
        bus = Bus()
        bus.subscribe(on_event, samples=True)
        settings = CoordinatorConfig(
            host=host, port=PORT, token=TOKEN, insecure=True, resume="never", min_workers=2, silence_s=60.0,
            evaluate=evaluate, update=UpdateConfig(**update), auto=auto,
            pacing=PacingConfig(leases_ahead=ahead) if ahead else PacingConfig(),
        )  # fmt: skip
        async with Coordinator(text_job(**job), config=settings, bus=bus) as coordinator:
            reply(listens=time.monotonic())
            ended["outcome"] = (await coordinator.wait()).outcome

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    reply(**ended, shares=shares, commits=commits, said=said)


def work(reply: Reply, *, host: str, name: str, job: dict[str, Any]) -> None:
    """One worker, until the run is over."""
    marks = Marks()

    async def run() -> None:
        config = WorkerConfig(name=name, token=TOKEN, insecure=True, device="cpu", threads=1, connect_timeout_s=20.0)
        try:
            await Worker(f"{host}:{PORT}", job=marks.watch(text_job(**job)), config=config).run()
        except Unreachable:  # the run ended while it looked for it
            pass

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    reply(first=marks.first)


def ddp(
    reply: Reply, *, host: str, device: str, rank: int, steps: int, measured: int, rule: str, codec: str,
    settings: dict[str, Any], windows: int, rate: float,
) -> None:  # fmt: skip
    """One rank: ``measured`` of ``steps`` steps after two that warm up, then a few without communication."""
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(PORT + 1), "GLOO_SOCKET_IFNAME": device}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=300))
    one = Rank(rank, rule, codec, settings, windows, rate, steps)
    dist.barrier()
    ready = time.monotonic()
    answer = one.run(measured)
    del one
    gc.collect()  # a rank may abort where its reducer outlives the group
    dist.barrier()
    dist.destroy_process_group()
    reply(**answer, ready=ready)


class Rank:
    """One of DDP's two ranks, with the remedy that the cell names."""

    def __init__(
        self, rank: int, rule: str, codec: str, settings: dict[str, Any], windows: int, rate: float, steps: int
    ) -> None:
        # As for ``shape``: the windows of the budget are the same, whatever a rank's step has of them.
        self.rank, self.windows, self.steps = rank, windows, steps * 4 // windows
        self.job = text_job(steps=self.steps, microbatch=windows, rate=rate)
        # One bucket for PowerSGD: it starts collectives from callbacks, and gloo, which pairs them by their order,
        # mixes those of two buckets up.
        whole = 1 << 10 if codec == "powersgd" else None
        self.ddp: Any = DistributedDataParallel(build_model(self.job), bucket_cap_mb=whole)
        self.optimizer: Any = self.job.optimizer(self.ddp)
        assert self.job.scheduler is not None
        self.scheduler = self.job.scheduler(self.optimizer)
        if codec == "fp16":
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif codec == "powersgd":
            # Two whole exchanges are the fewest that its warm start and error feedback allow.
            state = powerSGD_hook.PowerSGDState(
                process_group=None, matrix_approximation_rank=settings["rank"], start_powerSGD_iter=2
            )
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif codec != "raw":
            raise SystemExit(f"no such hook: {codec}")
        if rule == "ddp-local":
            mine, _ = dist.new_subgroups(group_size=1)
            local = post_localSGD_hook.PostLocalSGDState(
                process_group=None, subgroup=mine, start_localSGD_iter=0, post_local_gradient_allreduce=False
            )
            self.ddp.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
            averager = PeriodicModelAverager(period=settings["inner_steps"], warmup_steps=0)
            averager.step = 1  # the ranks begin alike: the first average is that of the first ``inner_steps`` steps
            self.optimizer = PostLocalSGDOptimizer(optim=self.optimizer, averager=averager)
        self.sampler = Sampler(num_samples=len(self.job.dataset), batch_size=2 * windows, leaf_samples=windows,
                               seed=self.job.seed)  # fmt: skip
        self.losses: list[float] = []

    def one(self, number: int) -> None:
        job = self.job
        assert job.step is not None
        self.optimizer.zero_grad()
        loss = job.step(self.ddp, collate(job, self.sampler.plan(number).leaf_indices(self.rank)))  # type: ignore[arg-type]
        loss.backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(self.ddp.parameters(), job.gradient_clip_val or 0.0)
        self.optimizer.step()
        self.losses.append(loss.item())  # type: ignore[union-attr]

    def run(self, measured: int) -> dict[str, Any]:
        """``measured``: of the budget's steps; all of them is a run with a loss of its own."""
        whole = measured * 4 // self.windows
        warm = 0 if whole == self.steps else 2
        times: list[float] = []
        for number in range(warm + whole):
            if number == warm:
                dist.barrier()
                times.append(time.monotonic())
            self.one(number)
            self.scheduler.step()
            if number >= warm:
                times.append(time.monotonic())
        if isinstance(self.optimizer, PostLocalSGDOptimizer) and not warm:
            average_parameters(self.ddp.module.parameters(), dist.group.WORLD)  # the model that is kept is one
            times[-1] = time.monotonic()
        found = held_out_loss(self.ddp.module)["val_loss"] if not warm else None
        dist.barrier()
        losses, began = self.losses[:], time.monotonic()
        plain = self.optimizer.optim if isinstance(self.optimizer, PostLocalSGDOptimizer) else self.optimizer
        self.optimizer = plain
        with self.ddp.no_sync():
            for number in range(6):
                self.one(number)
        return {"times": times, "losses": losses, "loss": found, "compute_s": (time.monotonic() - began) / 6}


# -- measuring


class Meter:
    """Bytes of every host over time: (when, [sent and received of each])."""

    def __init__(self, network: Network | None) -> None:
        self._network = network
        self.samples: list[tuple[float, list[tuple[int, int]]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._note()
        self._thread.start()

    def _note(self) -> None:
        hosts = self._network.hosts if self._network else []
        self.samples.append((time.monotonic(), [(host.sent_bytes, host.received_bytes) for host in hosts]))

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self._note()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._note()

    def at(self, when: float) -> list[tuple[int, int]]:
        """Sent and received by each host, by the sample before ``when``."""
        before = [bytes_of for then, bytes_of in self.samples if then <= when]
        return before[-1] if before else self.samples[0][1]

    def megabytes(self, host: int, way: int, since: float = 0.0) -> float:
        """Of one host since then (its start), to the end."""
        if self._network is None:
            return 0.0
        return (self.samples[-1][1][host][way] - (self.at(since)[host][way] if since else 0)) / 1e6


def measure(cell: Cell, steps: int) -> dict[str, Any]:
    """Run one cell in processes of its own."""
    with ExitStack() as stack:
        lines = NETWORKS[cell.network]
        network = stack.enter_context(Network(lines)) if lines else None
        rig = stack.enter_context(Rig(__file__, ["coordinator", *WORKERS]))
        for child, host in zip(("coordinator", *WORKERS), network.hosts if network else (), strict=False):
            rig[child].tell("move", namespace=host.namespace)
            rig[child].answer()
        meter = Meter(network)
        try:
            row = (measure_ddp if cell.rule.startswith("ddp") else measure_ours)(cell, steps, rig, network, meter)
        finally:
            meter.stop()
    row |= {"steps": steps, "tokens": steps * TOKENS_A_STEP, "tokens_s": steps * TOKENS_A_STEP / row["wall_s"]}
    return {**asdict(cell), **row, "key": cell.key}


def measure_ddp(cell: Cell, steps: int, rig: Rig, network: Network | None, meter: Meter) -> dict[str, Any]:
    measured = cell.measured or steps
    hosts = network.hosts[1:] if network else []
    began = time.monotonic()
    for rank, child in enumerate(WORKERS):
        device = hosts[rank].device if hosts else "lo"
        rig[child].tell(
            "ddp", host=hosts[0].address if hosts else "127.0.0.1", device=device, rank=rank, steps=steps,
            measured=measured, rule=cell.rule, codec=cell.codec, settings=cell.settings, windows=cell.windows,
            rate=cell.rate,
        )  # fmt: skip
    answers = [rig[child].answer(1200.0) for child in WORKERS]
    times = answers[0]["times"]
    meter.stop()
    scale = steps / measured
    wall_s, step_s = (times[-1] - times[0]) * scale, (times[-1] - times[0]) / (len(times) - 1)
    before, after = meter.at(times[0]), meter.at(times[-1] + 0.2)
    moved = [[(b - a) / 1e6 for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    start = [[value / 1e6 for value in host] for host in before]
    whole = [[first + more * scale for first, more in zip(*pair, strict=True)] for pair in
             zip(start, moved, strict=True)]  # fmt: skip
    losses = [sum(pair) / 2 for pair in zip(*(answer["losses"][: len(times) - 1] for answer in answers), strict=True)]
    return {
        "steps_measured": measured, "wall_s": wall_s, "start_s": answers[0]["ready"] - began, "step_s": step_s,
        "utilization": [answer["compute_s"] / step_s for answer in answers],
        "leaf_s": [answer["compute_s"] for answer in answers],
        "sent_mb": [host[0] for host in whole[1:]], "received_mb": [host[1] for host in whole[1:]],
        "start_mb": [sum(host) for host in start[1:]],
        "loss": answers[0]["loss"],
        "samples_s": [after - before for before, after in pairwise(times)],
        "curve": [[when - times[0], sum(map(sum, meter.at(when)[1:])) / 1e6, loss]
                  for when, loss in zip(times[1:], losses, strict=True)],
    }  # fmt: skip


def shape(cell: Cell, steps: int) -> dict[str, Any]:
    """The job's options. Under rules that give out whole steps, a step is one leaf, and there are twice as many."""
    measured = cell.measured or steps
    if cell.rule == "sync":
        return {"steps": steps, "commits": measured, "rate": cell.rate}
    times = 2 * 4 // cell.windows
    if cell.rule == "auto":  # it begins with steps of sync, which two workers share
        return {"steps": times * steps, "microbatch": cell.windows // 2, "rate": cell.rate}
    return {"steps": times * steps, "leaves": 1, "microbatch": cell.windows, "rate": cell.rate,
            "commits": times * measured}  # fmt: skip


def measure_ours(cell: Cell, steps: int, rig: Rig, network: Network | None, meter: Meter) -> dict[str, Any]:
    job, measured = shape(cell, steps), cell.measured or steps
    host = network.hosts[0].address if network else "127.0.0.1"
    began = time.monotonic()
    rig["coordinator"].tell("coordinate", host=host, job=job, update=cell.update, auto=cell.rule == "auto",
                            evaluate=measured == steps, ahead=cell.ahead)  # fmt: skip
    rig["coordinator"].answer(60.0)
    for name in WORKERS:
        rig[name].tell("work", host=host, name=name, job=job)
    ended = rig["coordinator"].answer(1200.0)
    firsts = [rig[name].answer(60.0)["first"] for name in WORKERS]
    meter.stop()
    if ended["outcome"] != "finished":
        raise SystemExit(f"{cell.key}: the run is {ended['outcome']}")
    first, commits = min(firsts), ended["commits"]
    if measured < steps:  # the first commits still wait for what the start left in the queues
        first, commits = commits[0][0], commits[1:]
    wall_s = commits[-1][0] - first
    shares = [ended["shares"][name] for name in WORKERS]
    scale = steps / len(commits) if measured < steps else 1.0
    part = len(commits) / measured if measured < steps else 1.0
    since = first if measured < steps else 0.0
    start = meter.at(first)
    row = {
        "steps_measured": len(commits) if measured < steps else steps,
        "wall_s": wall_s * scale, "start_s": min(firsts) - began,
        "utilization": [share["compute_s"] * part / wall_s for share in shares],
        "leaf_s": [share["compute_s"] / max(share["leaves"], 1) for share in shares],
        "leaves": [share["leaves"] for share in shares],
        "loss": ended.get("loss"),
        "said": ended["said"],
        "curve": [[when - first, sum(map(sum, meter.at(when)[1:])) / 1e6, loss] for when, loss, _ in commits],
        "start_mb": [sum(host) / 1e6 for host in start[1:]],
        "samples_s": [b[0] - a[0] for a, b in pairwise(commits)],
    }  # fmt: skip
    for name, way in (("sent_mb", 0), ("received_mb", 1)):
        row[name] = [
            meter.megabytes(host, way, since) * scale + (start[host][way] / 1e6 if since else 0.0)
            for host in ((1, 2) if network else ())
        ]
    return row


def in_order(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """As the table has them; cells that it no longer has come last."""
    places = {cell.key: place for place, cell in enumerate(cells())}
    known = sorted(rows.values(), key=lambda row: list(NETWORKS).index(row["network"]))
    return sorted(known, key=lambda row: places.get(row["key"], len(places)))


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--steps", type=int, default=240, help="optimizer steps of the whole budget")
    flags.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="only these")
    flags.add_argument("--rules", nargs="+", help="only these")
    flags.add_argument("--codecs", nargs="+", help="only these")
    flags.add_argument("--cells", type=int, help="at most so many of them")
    flags.add_argument("--rows", type=Path, default=ROOT / "bench" / "results" / "wan.jsonl", help="kept there")
    flags.add_argument("--images", type=Path, help="make the plots in this folder")
    flags.add_argument("--document", type=Path, help="put the table between its marks there")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"move": move, "coordinate": coordinate, "work": work, "ddp": ddp})
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or namespaces would be left behind
    steps = QUICK_STEPS if args.quick else args.steps
    chosen = [
        cell
        for cell in (quick_cells() if args.quick else cells())
        if cell.network in args.networks
        and (not args.rules or cell.rule in args.rules)
        and (not args.codecs or cell.codec in args.codecs)
    ][: args.cells]
    if chosen and (reason := netem.why_not()):
        print(f"no emulated network here: {reason}", file=sys.stderr)
        raise SystemExit(0 if args.quick else 2)
    rows: dict[str, dict[str, Any]] = {} if args.quick else load(args.rows, steps)
    report = Report({"steps": steps, "networks": args.networks, "lines": "Mbit/s / ms of round trip", "threads": 1})
    for cell in chosen:
        began = time.monotonic()
        row = measure(cell, steps)
        row["commit"] = commit()
        rows[row["key"]] = row
        print(
            *table([row], None)[2:], f"({time.monotonic() - began:.0f} s)", *row.get("said", ()), sep="\n", flush=True
        )
        if not args.quick:
            args.rows.parent.mkdir(parents=True, exist_ok=True)
            with args.rows.open("a") as out:
                out.write(json.dumps(row) + "\n")
    ordered = in_order(rows)
    lines = table(ordered, exact_loss(ordered))
    print("", *lines, "", sep="\n")
    add_figures(report, ordered)
    report.show()
    report.write(args.json)
    for network in ("1000/10", "100/40", "20/100", "unequal") if args.images is not None else ():
        draw(ordered, network, args.images)
    if args.document is not None:
        put_table(args.document, lines)


QUICK_STEPS = 6


def quick_cells() -> list[Cell]:
    """Each kind of run once, over a network that is fast enough for it."""
    return [Cell(network="1000/10", rule="ddp", measured=2), local("1000/10", "int4", inner_steps=3)]


if __name__ == "__main__":
    main()
