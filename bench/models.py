"""What the training benches share: models and jobs, child processes that are told what to do line by line, and the two
things that every one of them does: coordinate a run, work for it.

A child is this interpreter on the bench's own file with ``--child``. It imports once and then serves many rounds, so
that a round measures training and not the start of Python. Told and answered are lines of JSON. No child outlives the
bench: each is killed at the end, dies with its parent, and an answer that does not come in time ends the bench.
"""

from __future__ import annotations

import asyncio
import cProfile
import ctypes
import gc
import io
import json
import logging
import os
import pstats
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import uvloop
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import Unreachable
from w5xde_async.job import Job
from w5xde_async.openmp import spare_this_thread, spin_briefly
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.process import use_batch_scheduling, use_short_slices
from w5xde_async.telemetry.events import Bus, Event, RunFinished, StepCommitted
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

__all__ = ["GPT", "JOBS", "Child", "Reply", "Rig", "coordinate", "cpu_seconds", "make_job", "serve", "work"]


# -- models


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with learnt positions, pre-norm. Takes token numbers, gives logits."""

    def __init__(self, *, vocabulary: int, length: int, width: int, layers: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -- data: synthetic, the same everywhere, and it can be learnt


def classes(samples: int, inputs: int, *, repeat: int = 1) -> TensorDataset:
    """Gaussian inputs with the argmax of a fixed random linear map as label; the samples ``repeat`` times over."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, inputs, generator=generator)
    y = (x @ torch.randn(inputs, 10, generator=generator)).argmax(1)
    return TensorDataset(x.repeat(repeat, 1), y.repeat(repeat))


def text(samples: int, length: int, vocabulary: int) -> TensorDataset:
    """Token sequences in which a token mostly determines the next (x -> 5x + 17, one in eight is noise)."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.empty(samples, length + 1, dtype=torch.int64)
    tokens[:, 0] = torch.randint(vocabulary, (samples,), generator=generator)
    noise = torch.randint(vocabulary, (samples, length), generator=generator)
    noisy = torch.rand(samples, length, generator=generator) < 0.125
    for at in range(length):
        tokens[:, at + 1] = torch.where(noisy[:, at], noise[:, at], (5 * tokens[:, at] + 17) % vocabulary)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


# -- jobs


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def _seeds(*, leaves: int = 320, samples: int = 1000) -> Job:
    """The seeds' headline work: 10-20-10, leaves of 32 of 1000 samples, tiled so that a step can have ``leaves``."""
    return Job(
        model=lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10)),
        dataset=classes(samples, 10, repeat=max(1, -(-32 * leaves * 16 // samples))),
        loss=functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch_size=32 * leaves,
        microbatch_size=32,
        drop_last=True,
        max_steps=1 << 40,
    )


def _tiny(*, workers: int = 2, steps: int = 1000) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10)),
        dataset=classes(1 << 15, 10),
        loss=functional.cross_entropy,
        optimizer=sgd,
        batch_size=32 * workers,
        microbatch_size=32,
        max_steps=steps,
    )


def _mlp(*, workers: int = 2, steps: int = 100) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        dataset=classes(1 << 14, 784),
        loss=functional.cross_entropy,
        optimizer=sgd,
        batch_size=64 * workers,
        microbatch_size=64,
        max_steps=steps,
    )


def _gpt(*, workers: int = 2, steps: int = 10) -> Job:
    """10.9M parameters, bytes, 4 x 128 tokens a worker."""
    return Job(
        model=lambda: GPT(vocabulary=256, length=128, width=384, layers=6, heads=6, tied=False),
        dataset=text(1024, 128, 256),
        loss=next_token_loss,
        optimizer=adamw,
        batch_size=4 * workers,
        microbatch_size=4,
        max_steps=steps,
    )


def _gpt2(
    *, leaves: int = 8, samples: int = 32, steps: int = 10, precision: Any = "bf16", tiny: bool = False,
    fused: bool = False,
) -> Job:  # fmt: skip
    """About 124M parameters (the shape of GPT-2 small), 1024 tokens a sample; ``tiny``: the same on a toy scale."""
    length, vocabulary = (32, 256) if tiny else (1024, 50304)
    shape = {"width": 32, "layers": 2, "heads": 2} if tiny else {"width": 768, "layers": 12, "heads": 12}
    return Job(
        model=lambda: GPT(vocabulary=vocabulary, length=length, tied=True, **shape),
        dataset=text(4 * leaves * samples, length, vocabulary),
        loss=next_token_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused or None),
        batch_size=leaves * samples,
        microbatch_size=samples,
        max_steps=steps,
        precision=precision,
    )


JOBS: Mapping[str, Callable[..., Job]] = {"seeds": _seeds, "tiny": _tiny, "mlp": _mlp, "gpt": _gpt, "gpt2": _gpt2}


def make_job(name: str, **options: Any) -> Job:
    return JOBS[name](**options)


# -- children

Reply = Callable[..., None]
Task = Callable[..., None]
_TIMEOUT_S = 120.0


def serve(tasks: Mapping[str, Task]) -> None:
    """In a child: do what each line says; ``tasks[name](reply, **rest of the line)``. Ends with its standard input."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # a run that is stopped makes its workers look for it again, loudly
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not mix with the answers

    def reply(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    reply(ready=True)
    for line in sys.stdin:
        told = json.loads(line)
        tasks[told.pop("task")](reply, **told)
    os._exit(0)


class Child:
    """A child process, as its parent sees it."""

    def __init__(self, file: str, name: str) -> None:
        self.name = name
        spin_briefly()  # as in the programs
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, file, "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._pending = b""
        self.pid = self._process.pid

    def tell(self, task: str, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"task": task, **what}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if not select.select([self._process.stdout], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise SystemExit(f"{self.name} gave no answer within {timeout_s:.0f} s")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                raise SystemExit(f"{self.name} ended (exit code {self._process.wait()})")
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Rig:
    """Children by name; all of them are killed at the end, whatever happens."""

    def __init__(self, file: str, names: list[str]) -> None:
        self._children = {name: Child(str(Path(file).resolve()), name) for name in names}

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def __enter__(self) -> Self:
        try:
            for child in self._children.values():
                child.answer()  # it has imported everything
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.kill()


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- what children do


def coordinate(
    reply: Reply,
    *,
    job: str,
    options: dict[str, Any],
    workers: int,
    warm_s: float = 0.0,
    warm_steps: int = 1,
    windows: int = 0,
    window_s: float = 0.0,
    observe: bool = False,
    profile: bool = False,
    time_stalls: bool = False,
    threads: int = 1,
    spares_loop: bool = False,
    config: dict[str, Any] | None = None,
    pacing: dict[str, Any] | None = None,
) -> None:
    """One run. Answers its port, that it is warm, each window's ``steps``, ``seconds`` and ``cpu_s``, how it ended.

    With ``windows`` it is stopped after so many of ``window_s`` each; without, all steps after the warm ones are one
    window. ``observe`` listens to every step (which costs time itself) and sums the project's own timers;
    ``time_stalls`` keeps a timer of 2 ms on the loop, which costs as much as a small step's messages. ``spares_loop``:
    the loop has one thread and short slices, and larger updates all cores, as in the program.
    """
    given = dict(config or {})
    if "join_file" in given:
        given["join_file"] = Path(given["join_file"])
    settings = CoordinatorConfig(
        port=0, resume="never", min_workers=workers, evaluate=False, silence_s=60.0,
        pacing=PacingConfig(**pacing or {}), **given,
    )  # fmt: skip
    torch.set_num_threads(threads)
    if spares_loop:
        spare_this_thread(os.cpu_count() or 1)
        use_short_slices()
    made = make_job(job, **options)
    seen = _Seen(observe)

    async def run() -> None:
        async with Coordinator(made, config=settings, bus=seen) as coordinator:
            reply(port=coordinator.port, join=coordinator.local_join)
            ending = asyncio.ensure_future(coordinator.wait())
            await _until(coordinator, warm_steps, ending)
            await asyncio.sleep(warm_s)
            seen.begin()
            reply(warm=True)
            if windows:
                await _next_step(coordinator, ending)
                for _ in range(windows):
                    mark = _Mark(coordinator)
                    await asyncio.sleep(window_s)
                    await _next_step(coordinator, ending)  # whole steps, over the time that they took
                    reply(**mark.passed())
                coordinator.request_stop()
                result = await ending
            else:
                stalls = asyncio.ensure_future(_stalls()) if time_stalls else None
                mark = _Mark(coordinator)
                await _until(coordinator, made.max_steps or 0, ending)
                passed = mark.passed()
                if stalls is not None:
                    stalls.cancel()
                result = await ending
                reply(**passed, stall_ms=0.0 if stalls is None else await stalls)
        device_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        reply(
            device_bytes=device_bytes, step=result.step, loss_first=seen.loss_first, loss_last=result.loss,
            digest=result.digest, phases=seen.phases, observed=seen.observed, shares=seen.shares,
        )  # fmt: skip

    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    _profiled(reply, run(), profile)
    if torch.cuda.is_initialized():
        free_device("cuda")


class _Mark:
    """A moment of a run, and what has passed since."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._at = time.perf_counter(), coordinator.step, time.process_time()

    def passed(self) -> dict[str, float]:
        then, step, cpu = self._at
        now = time.perf_counter()
        return {"seconds": now - then, "steps": self._coordinator.step - step, "cpu_s": time.process_time() - cpu}


async def _until(coordinator: Coordinator, step: int, ending: asyncio.Future[Any]) -> None:
    while coordinator.step < step and not ending.done():  # noqa: ASYNC110 (an event would have to listen to every step)
        await asyncio.sleep(0.01)


async def _next_step(coordinator: Coordinator, ending: asyncio.Future[Any]) -> None:
    step = coordinator.step
    while coordinator.step == step and not ending.done():  # noqa: ASYNC110 (as above)
        await asyncio.sleep(0.001)


async def _stalls() -> float:
    """The longest time, in ms, that the event loop kept a timer of 2 ms waiting beyond its time; until cancelled."""
    longest = 0.0
    try:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.002)
            longest = max(longest, time.perf_counter() - began - 0.002)
    except asyncio.CancelledError:
        return longest * 1e3


class _Seen(Bus):
    """Listens to the first step and the last word; to the steps between only where told to."""

    def __init__(self, observe: bool) -> None:
        super().__init__()
        self._observe, self._counts = observe, False
        self.loss_first: float | None = None
        self.phases: dict[str, float] = {}
        self.observed = 0
        self.shares: list[dict[str, Any]] = []
        self.subscribe(self._on_event, prompt=False)  # as the programs' own

    @property
    def active(self) -> bool:
        return self._observe or self.loss_first is None

    def begin(self) -> None:
        """The warm-up is over."""
        self._counts = True

    def _on_event(self, event: Event) -> None:
        if isinstance(event, StepCommitted):
            if self.loss_first is None:
                self.loss_first = event.loss
            if self._counts:
                self.observed += 1
                for name, seconds in {**event.phases_s, "step": event.seconds}.items():
                    self.phases[name] = self.phases.get(name, 0.0) + seconds
        elif isinstance(event, RunFinished):
            self.shares = [{"leaves": s.leaves, "compute_s": s.compute_s, "wait_s": s.wait_s} for s in event.shares]


def work(
    reply: Reply,
    *,
    port: int,
    job: str,
    options: dict[str, Any],
    join: str = "",
    token: str = "",
    count: int = 1,
    device: str = "cpu",
    profile: bool = False,
    link: str = "auto",
) -> None:
    """``count`` workers on one loop, as their program runs them, until the run is over. ``join``: a join string in
    place of the port."""
    if device == "cpu":
        use_batch_scheduling()
    config = WorkerConfig(
        device=device, threads=1, token=token, connect_timeout_s=2.0, inline_block_s=0.005, link=link
    )  # fmt: skip

    async def one() -> Worker:
        worker = Worker(join or f"127.0.0.1:{port}", job=make_job(job, **options), config=config)
        try:
            await worker.run()
        except Unreachable:  # the run was stopped; a worker would wait for it to come back
            pass
        return worker

    async def run() -> None:
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        workers = await asyncio.gather(*[one() for _ in range(count)])
        peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
        leases, stale = sum(w.leases_done for w in workers), sum(w.leases_stale for w in workers)
        workers.clear()
        free_device(device)
        reply(leases=leases, stale=stale, device_bytes=peak)

    _profiled(reply, run(), profile)


def free_device(device: str) -> None:
    """Give back what nothing uses any more: this process stays, and the next one needs the memory."""
    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()


def lacks_device(device: str) -> bool:
    """Whether there is no such GPU here; says so then."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return False
    print("no CUDA on this machine: nothing measured (--device cpu tries the script)")
    return True


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def _profiled(reply: Reply, main: Coroutine[Any, Any, None], profile: bool) -> None:
    """Run ``main`` on uvloop; with ``profile`` every thread under cProfile, and one more answer: the tables."""
    profiles: list[tuple[str, cProfile.Profile]] = []

    def begin(*_: Any) -> None:
        found = cProfile.Profile(time.thread_time)  # waiting, and what else the machine does, does not count
        profiles.append((threading.current_thread().name, found))
        found.enable()

    if profile:
        threading.setprofile(begin)
        begin()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
    if profile:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
        reply(profile=[[name, _table(found)] for name, found in profiles if found.getstats()])


def _table(profile: cProfile.Profile) -> str:
    out = io.StringIO()
    pstats.Stats(profile, stream=out).strip_dirs().sort_stats("tottime").print_stats(28)
    return out.getvalue()
