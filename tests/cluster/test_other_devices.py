"""Devices that draw other random numbers from the same seed, and workers that halve their microbatches: nobody honest
is put out, and who lies is found wherever somebody computes alike."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.support import jobs
from tests.support.attacks import ATTACKS, FalseWorker
from tests.support.cluster import QUICK_WORKER, settings
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.compute.engine import Engine
from w5xde_async.compute.halving import Halving
from w5xde_async.compute.program.sandbox import Computing
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync import recomputation
from w5xde_async.errors import RefusalCode, Refused
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Audited, Bus, Event, ResultHeld, WorkerQuarantined
from w5xde_async.wire.messages import Ready

MICROBATCH = 8


def job(steps: int = 30, *, dropout: float = 0.5, norm: bool = False) -> Job:
    x, y = jobs.digits()
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(64) if norm else nn.Identity()
    model = nn.Sequential(nn.Linear(64, 64), middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))
    return Job(
        model=model, dataset=TensorDataset(x, y), loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        batch_size=64, microbatch_size=MICROBATCH, max_steps=steps, seed=5,
    )  # fmt: skip


def honest(*_: Any) -> None:
    pass


class OnDevice(FalseWorker):
    """A worker on a device of its ``kind`` (0: this CPU), whose masks are its own, with too little memory for
    microbatches that are not halved ``splits`` times. ``claims``: how often it says that it has halved them."""

    def __init__(
        self, *arguments: Any, kind: int, splits: int = 0, lies: str = "", claims: int | None = None,
        loss: float | None = None, **named: Any,
    ) -> None:  # fmt: skip
        """``lies``: the attack. ``loss``: what it says the losses were."""
        super().__init__(*arguments, attack=ATTACKS[lies] if lies else honest, **named)
        self._kind, self._halved, self.lies, self._claims = kind, splits, lies, claims
        self._loss = loss

    def _false(self, engine: Computing) -> Computing:
        assert isinstance(engine, Engine)
        engine.seed += self._kind
        engine._halving = Halving(MICROBATCH, self._halved)
        false = super()._false(engine)
        if (claims := self._claims) is not None:
            compute = false.compute
            false.compute = lambda *given: dataclasses.replace(compute(*given), splits=claims)  # type: ignore[method-assign]
        if (loss := self._loss) is not None:
            compute = false.compute
            false.compute = lambda task, emit: dataclasses.replace(  # type: ignore[method-assign]
                compute(task, emit), losses=[loss] * len(task.samples)
            )
        return false

    async def _prepare(self, *given: Any) -> Any:
        executor, ready = await super()._prepare(*given)
        assert isinstance(ready, Ready)
        if self._kind:
            ready = replace(ready, device="cuda:0", device_name=f"Test GPU {self._kind}")
        return executor, ready


class Outcome:
    def __init__(self) -> None:
        self.put_out: dict[str, str] = {}
        self.audits: list[Audited] = []
        self.held: list[ResultHeld] = []
        self.finished = False

    def see(self, event: Event) -> None:
        if isinstance(event, WorkerQuarantined):
            self.put_out[event.name] = event.reason
        elif isinstance(event, Audited):
            self.audits.append(event)
        elif isinstance(event, ResultHeld):
            self.held.append(event)


async def run(made: Job, *workers: dict[str, Any], invited: int = 0, **config: Any) -> Outcome:
    """Train on these workers, named 0, 1, 2, ..., of whom the first few are invited by their names."""
    outcome, bus = Outcome(), Bus()
    bus.subscribe(outcome.see)
    config = {"audit_fraction": 1.0, "min_workers": len(workers), **config}
    async with Coordinator(made, config=settings(**config), bus=bus) as coordinator:
        tasks = []
        for number, given in enumerate(workers):
            named = QUICK_WORKER.__class__(device="cpu", connect_timeout_s=60.0, name=str(number))
            told = coordinator.invite(str(number)) if number < invited else coordinator.invitation
            where = coordinator.address if told is None else told.reveal()
            tasks.append(asyncio.create_task(OnDevice(where, job=made, config=named, **given).run()))
        outcome.finished = (await coordinator.wait()).outcome == "finished"
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Refused):
                assert ended.code == RefusalCode.QUARANTINED
            elif isinstance(ended, BaseException):
                raise ended
    return outcome


CPU, GPU, OTHER = {"kind": 0}, {"kind": 1}, {"kind": 2}
LIAR = {"lies": "sign flip"}


@pytest.mark.parametrize("norm", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "workers", [(CPU, GPU), (GPU, OTHER), (CPU, CPU, GPU, GPU), (GPU, GPU, OTHER)], ids=["cg", "go", "ccgg", "ggo"]
)
async def test_nobody_is_put_out_for_the_masks_of_its_device(workers: tuple[dict[str, Any], ...], norm: bool):
    outcome = await run(job(norm=norm), *workers)
    assert outcome.finished
    assert outcome.put_out == {}
    assert all(event.agreed for event in outcome.audits)
    if len(workers) > 2:
        assert outcome.audits, "those of one kind are compared"


@pytest.mark.parametrize(
    ("workers", "liar"),
    [
        ((CPU, GPU | LIAR, GPU, GPU), "1"),  # two of its kind say so
        ((CPU | LIAR, GPU, GPU), "0"),  # nobody of its kind but the coordinator
        ((CPU | LIAR, CPU, GPU), "0"),
    ],
    ids=["of three GPUs", "the only CPU", "of two CPUs"],
)
async def test_a_liar_is_found_where_somebody_computes_alike(workers: tuple[dict[str, Any], ...], liar: str):
    outcome = await run(job(), *workers)
    assert outcome.finished
    assert set(outcome.put_out) == {liar}


@pytest.mark.parametrize(
    "invited", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
async def test_who_has_not_proved_a_name_has_no_say_about_who_has(invited: int, tmp_path: Path):
    """They may all be one. (Of four invited ones two lie: that is no majority either.)"""
    honest = (GPU,) * min(invited, 2)
    liars = (GPU | LIAR,) * (3 if invited < 4 else 2)
    outcome = await run(job(), *honest, *liars, invited=invited, join_file=tmp_path / "join")
    assert outcome.finished
    assert not {str(number) for number in range(len(honest))} & set(outcome.put_out)
    assert any(not event.agreed for event in outcome.audits)


async def test_a_liar_on_a_device_of_its_own_is_found_where_nothing_is_drawn():
    """It says that it drew; nobody else does."""
    outcome = await run(job(dropout=0.0), CPU, GPU | LIAR, OTHER)
    assert set(outcome.put_out) == {"1"}


async def test_of_two_that_nobody_else_computes_like_none_is_put_out():
    outcome = await run(job(), GPU, GPU | LIAR, CPU)
    assert outcome.finished
    assert outcome.put_out == {}
    assert any(not event.agreed for event in outcome.audits)


@pytest.mark.parametrize("others", [(CPU,), (CPU, OTHER), (OTHER, OTHER, OTHER)], ids=["c", "co", "ooo"])
async def test_zeros_are_found_though_nobody_computes_alike(others: tuple[dict[str, Any], ...]):
    """As of a device that is broken: with whatever random numbers, what it computes is not next to nothing. Though it
    were most of what comes, it does not become the usual."""
    outcome = await run(job(), *others, GPU | {"lies": "zeros"})
    assert outcome.finished
    assert set(outcome.put_out) == {str(len(others))}
    assert "3 results that were looked at" in outcome.put_out[str(len(others))]


async def test_zeros_that_nobody_has_looked_at_do_not_become_the_usual():
    """Beside them every honest result would be far too large. (Of the very first nothing is known.)"""
    zeros = {"lies": "zeros"}
    outcome = await run(job(), CPU, GPU | zeros, GPU | zeros, OTHER | zeros, audit_fraction=1e-12)
    assert outcome.finished
    assert [event for event in outcome.held if event.step > 3] == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
async def test_losses_that_are_not_finite_are_found_though_nobody_computes_alike(loss: float):
    """With gradients that are: no display shows a loss any more."""
    outcome = await run(job(), CPU, GPU | {"loss": loss}, OTHER)
    assert outcome.finished
    assert set(outcome.put_out) == {"1"}
    assert "3 results in a row" in outcome.put_out["1"]
    assert "were not finite, unlike what their blocks give" in outcome.put_out["1"]


async def test_gradients_that_vanish_put_nobody_out():
    """Most samples of this loss have none: the coordinator computes the same nothing."""

    def hinge(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.cross_entropy(output, target, reduction="none") - 1.9).mean()

    outcome = await run(dataclasses.replace(job(60, dropout=0.1), loss=hinge), CPU, GPU, OTHER)
    assert outcome.finished
    assert outcome.put_out == {}


@pytest.mark.parametrize(("dropout", "norm"), [(0.5, False), (0.0, True)])
async def test_nobody_is_put_out_for_halved_microbatches(dropout: float, norm: bool):
    outcome = await run(job(dropout=dropout, norm=norm), CPU, CPU | {"splits": 1}, CPU | {"splits": 2})
    assert outcome.finished
    assert outcome.put_out == {}


async def test_halved_microbatches_hide_no_lie():
    outcome = await run(job(norm=True), CPU, CPU | {"splits": 1} | LIAR, CPU)
    assert outcome.finished
    assert set(outcome.put_out) == {"1"}


@pytest.mark.parametrize("claims", [3, 63])
async def test_pieces_that_nobody_can_compute_hide_no_lie(claims: int):
    """Batch norm refuses single samples: nobody honest has sent sums of them."""
    outcome = await run(job(norm=True), CPU, CPU | LIAR | {"claims": claims}, CPU)
    assert outcome.finished
    assert set(outcome.put_out) == {"1"}
    assert f"2^{claims} pieces" in outcome.put_out["1"]
    assert "Expected more than 1 value per channel" in outcome.put_out["1"]


async def test_a_coordinator_that_lacks_memory_itself_puts_out_nobody_honest(monkeypatch: pytest.MonkeyPatch):
    """What it computes in smaller pieces than the workers has other batch statistics."""

    def halving(*given: Any, splits: int, **named: Any) -> Engine:
        return Engine(*given, splits=splits + 1, **named)

    monkeypatch.setattr(recomputation, "Engine", halving)
    outcome = await run(job(norm=True), CPU, CPU | LIAR, CPU)
    assert outcome.finished
    assert any(not event.agreed for event in outcome.audits)
    assert set(outcome.put_out) <= {"1"}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
async def test_in_any_company_nobody_honest_is_put_out_and_who_lies_is_found_if_it_can_be(seed: int):
    """Generated: who is there, what they halve, what is drawn, whether one lies."""
    chance = random.Random(seed)
    kinds = [chance.randrange(3) for _ in range(chance.randrange(2, 6))]
    workers = [{"kind": kind, "splits": chance.choice([0, 0, 0, 1, 2])} for kind in kinds]
    liar = chance.choice([None, *range(len(workers))])
    if liar is not None:
        workers[liar] |= LIAR
    draws = chance.random() < 0.7
    made = job(40, dropout=0.5 if draws else 0.0, norm=chance.random() < 0.5)
    outcome = await run(made, *workers)
    assert outcome.finished
    assert set(outcome.put_out) <= {str(liar)}, (workers, outcome.put_out)
    if liar is None:
        return
    alike = [number for number, one in enumerate(workers) if one["kind"] == kinds[liar] and number != liar]
    like_it = [number for number in alike if workers[number]["splits"] == workers[liar]["splits"]]
    if not draws or kinds[liar] == 0 or (len(like_it) >= 2 and 2 * len(like_it) > len(alike) + 1):
        assert set(outcome.put_out) == {str(liar)}, workers
