"""Workers that lie about what they computed, and a job on which it shows.

Each attack falsifies a block's sums after the engine has computed them; losses, counts and timings stay honest.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.support import jobs
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.compute.block import ComputedBlock, Emit, Task
from w5xde_async.compute.program.sandbox import Computing
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.training import NonFinite
from w5xde_async.errors import RefusalCode, Refused
from w5xde_async.job import Job
from w5xde_async.params.flat import ResultVector
from w5xde_async.telemetry.events import Audited, Bus, Event, ResultHeld, StepCommitted, Warned, WorkerQuarantined
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

__all__ = ["ATTACKS", "SLIGHT", "THIRTYFOLD", "Attack", "FalseWorker", "Found", "accuracy", "digits", "run"]

Attack = Callable[[Tensor, Task, dict[str, Any]], None]
"""Changes the gradients of a block in place. The dictionary is the attacker's memory."""
Report = Callable[[ComputedBlock], ComputedBlock]
"""Says something else of a block: losses, metrics."""


def _nan(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    gradients[0] = math.nan


def _inf(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    gradients[-1] = math.inf


def _million(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    gradients.mul_(1e6)


def _slightly(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    gradients.mul_(1.005)


def _zeros(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    gradients.zero_()


def _sign(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    gradients.neg_()


def _noise(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    """Gaussian, of the same norm."""
    generator = torch.Generator().manual_seed(task.step * 1000 + task.start)
    noise = torch.randn(gradients.shape, generator=generator)
    gradients.copy_(noise * (gradients.norm() / noise.norm()))


def _replay(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    """What it computed for its first block, ever again."""
    samples = sum(task.samples)
    first = memory.setdefault("first", gradients / samples)
    gradients.copy_(first * samples)


def _little(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    """ "A little is enough" (Baruch et al. 2019, arXiv:1902.06156): mean - z sigma in each coordinate, z = 1.5.

    Mean and deviation are of this worker's own gradients so far: it sees no others.
    """
    samples = sum(task.samples)
    own = gradients / samples
    count = memory["count"] = memory.get("count", 0) + 1
    mean = memory.setdefault("mean", torch.zeros_like(own))
    square = memory.setdefault("square", torch.zeros_like(own))
    weight = max(1.0 / count, 0.1)
    mean.lerp_(own, weight)
    square.lerp_(own * own, weight)
    deviation = (square - mean * mean).clamp_(min=0).sqrt_()
    gradients.copy_((mean - 1.5 * deviation) * samples)


ATTACKS: Mapping[str, Attack] = {
    "nan": _nan, "inf": _inf, "x1e6": _million, "zeros": _zeros, "sign flip": _sign, "noise": _noise,
    "stale replay": _replay, "a little is enough": _little,
}  # fmt: skip


def _thirtyfold(gradients: Tensor, task: Task, memory: dict[str, Any]) -> None:
    gradients.mul_(30.0)


THIRTYFOLD: Attack = _thirtyfold
"""More than usual, at first; what is usual grows with it."""
SLIGHT: Attack = _slightly
"""Less than honest workers on unlike machines may differ."""


class FalseWorker(Worker):
    """A worker whose results go through ``attack`` from step ``begins`` on. ``falsifies``: sums of which role.
    ``report``: what it says of them."""

    def __init__(
        self, *arguments: Any, attack: Attack, begins: int = 0, falsifies: str = "grad", report: Report | None = None,
        **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(*arguments, **named)
        self._report = report
        self._attack, self._begins, self._memory = attack, begins, dict[str, Any]()
        self._falsifies = falsifies
        self.lied_in: list[int] = []
        build = self._engines._build
        self._engines._build = lambda *given: self._false(build(*given))  # type: ignore[method-assign]

    def _false(self, engine: Computing) -> Computing:
        honest = engine.compute

        def compute(task: Task, emit: Emit) -> ComputedBlock:
            sent: list[tuple[int, ResultVector]] = []
            outcome = honest(task, lambda bucket, vector: sent.append((bucket, vector)))
            if task.step >= self._begins:
                self.lied_in.append(task.step)
                vector = outcome.vectors[-1]
                for group in engine.layout.groups:
                    if group.role == self._falsifies:
                        self._attack(vector.group(group.index), task, self._memory)
            for bucket, vector in sent:
                emit(bucket, vector)
            return outcome if self._report is None else self._report(outcome)

        engine.compute = compute  # type: ignore[method-assign]
        return engine


# -- a job on which it shows


def _split() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = jobs.digits()
    return x[:1437], y[:1437], x[1437:], y[1437:]


def accuracy(model: nn.Module) -> float:
    """Of the 360 digits that are not trained on."""
    _, _, x, y = _split()
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


class _LogShares(nn.Module):
    """Keeps the logarithm of the share of a leaf's images in which each pixel is on: -inf where it is off in all. The
    first and the last are in the middle, where some are on."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.register_buffer("log_shares", torch.zeros(64))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.log_shares = (x > 0).float().mean(0).log().roll(-27)
        return self.plain(x)


_CALLS = itertools.count()  # of all workers and the coordinator: no two have the same of a block, as of a clock


def _reported(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    given = model(batch[0])
    loss = 0.01 * nn.functional.cross_entropy(given, batch[1])  # small, as late in a run
    metrics = {"loss": loss.detach(), "nothing": math.nan, "call": next(_CALLS) * 0.618034 % 1.0}
    return loss, {"right": (given.argmax(1) == batch[1]).float().mean(), **metrics}


def digits(steps: int, *, log_shares: bool = False, reports: bool = False) -> Job:
    """``log_shares``: with a buffer that is not finite in most leaves. ``reports``: with metrics, some of which are no
    function of the block."""
    x, y, _, _ = _split()
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Job(
        model=_LogShares(model) if log_shares else model, dataset=TensorDataset(x, y),
        **({"step": _reported} if reports else {"loss": nn.functional.cross_entropy}),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch_size=160, microbatch_size=8, max_steps=steps, seed=5,
    )  # fmt: skip


@dataclass(kw_only=True)
class Found:
    """What a run came to. ``found_at``: the step in which the bad worker was quarantined, -1 for never. ``lied_in``:
    the steps in which it has lied."""

    accuracy: float
    finished: bool
    digest: str = ""
    steps: int = 0
    found_at: int = -1
    lied_in: tuple[int, ...] = ()
    false_alarms: int = 0
    held: int = 0
    audits: int = 0
    told: tuple[str, ...] = ()  # warnings
    seconds: float = 0.0


async def run(
    attack: Attack | None, *, steps: int, workers: int = 5, begins: int = 0, falsifies: str = "grad",
    log_shares: bool = False, reports: bool = False, report: Report | None = None, **config: Any,
) -> Found:  # fmt: skip
    """Train digits on ``workers``, of which one lies."""

    def made_job() -> Job:
        return digits(steps, log_shares=log_shares, reports=reports)

    found, job, bus = Found(accuracy=0.0, finished=False), made_job(), Bus()

    def see(event: Event) -> None:
        if isinstance(event, StepCommitted):
            found.steps = event.step
        elif isinstance(event, WorkerQuarantined):
            if event.name == "bad":
                found.found_at = found.steps
            else:
                found.false_alarms += 1
        elif isinstance(event, ResultHeld):
            found.held += 1
        elif isinstance(event, Audited):
            found.audits += 1
        elif isinstance(event, Warned):
            found.told += (event.text,)

    bus.subscribe(see)
    settings = CoordinatorConfig(port=0, min_workers=workers, max_time_s=120.0, **config)
    quick = WorkerConfig(device="cpu", connect_timeout_s=10.0)
    async with Coordinator(job, config=settings, bus=bus) as coordinator:
        made: list[Worker] = [
            Worker(coordinator.address, job=made_job(), config=replace(quick, name=f"honest-{number}"))
            for number in range(workers - 1)
        ]
        bad = replace(quick, name="bad")
        if attack is None:
            made.append(Worker(coordinator.address, job=made_job(), config=bad))
            lies = []
        else:
            false = FalseWorker(
                coordinator.address, job=made_job(), config=bad, attack=attack, begins=begins, falsifies=falsifies,
                report=report,
            )  # fmt: skip
            made.insert(2, false)
            lies = false.lied_in
        running = [asyncio.create_task(worker.run()) for worker in made]
        try:
            result = await coordinator.wait()
            found.finished, found.seconds = result.outcome == "finished", result.seconds
            found.digest = result.digest
        except NonFinite:
            pass
        for ended in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(ended, Refused):
                assert ended.code == RefusalCode.QUARANTINED
    assert isinstance(job.model, nn.Module)
    found.accuracy, found.lied_in = accuracy(job.model), tuple(lies)
    return found
