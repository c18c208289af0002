"""G13: one of five workers lies. It is found, nobody else is, and the model is as good as without it.

bench/bad_workers.py has the whole table, at the default settings and without the defence.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.attacks import ATTACKS, SLIGHT, THIRTYFOLD, FalseWorker, Found, Report, digits, run
from tests.support.cluster import QUICK_WORKER, Commits, settings
from tests.support.jobs import mlp_sgd

from w5xde_async.compute.block import ComputedBlock
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync import verification
from w5xde_async.coordinator.sync.recomputation import Recomputation, ReferenceResult
from w5xde_async.errors import RefusalCode, Refused
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Event, WorkerQuarantined
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Worker

STEPS = 40
OFF: dict[str, Any] = {"norm_gate": 0.0, "audit_fraction": 0.0}


@pytest.fixture(scope="module")
def clean() -> Found:
    """Everybody is honest, and nobody looks."""
    return asyncio.run(run(None, steps=STEPS, workers=2, **OFF))


@pytest.mark.slow
async def test_honest_workers_have_the_same_bits_and_no_alarm(clean: Found):
    found = await run(None, steps=STEPS, audit_fraction=0.2)
    assert found.digest == clean.digest
    assert found.audits > 0  # it did look
    assert found.false_alarms == 0
    assert found.found_at == -1


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
async def test_a_liar_is_found_and_does_no_harm(name: str, clean: Found):
    # What is drawn is secret; in every step one is, so that luck has little part in it.
    found = await run(ATTACKS[name], steps=STEPS, begins=2, audit_fraction=1.0)
    assert found.finished
    assert 2 <= found.found_at <= 40, found
    assert found.false_alarms == 0
    assert found.accuracy >= clean.accuracy * 0.95
    if name in ("nan", "inf", "x1e6"):  # what the gate sees never counts, so the bits are those of honest workers
        assert found.found_at == found.lied_in[-1], found  # in the step of its lie, however early others had leases
        assert len(set(found.lied_in)) <= 2, found  # one may have come too late for its step
        assert found.digest == clean.digest


@pytest.mark.slow
@pytest.mark.parametrize("falsifies", ["grad", "mean"])
@pytest.mark.parametrize("name", ATTACKS)
async def test_a_liar_is_found_beside_a_buffer_that_is_not_finite(name: str, falsifies: str, clean: Found):
    """That buffer keeps its values where it is not, so it skips no step and excuses nothing."""
    found = await run(
        ATTACKS[name], steps=STEPS, workers=3, begins=2, falsifies=falsifies, log_shares=True, audit_fraction=1.0
    )
    assert found.finished
    assert 2 <= found.found_at <= 40, found
    assert found.false_alarms == 0
    assert found.accuracy >= clean.accuracy * 0.95
    if falsifies == "grad" and name in ("nan", "inf", "x1e6"):
        assert found.found_at == found.lied_in[-1], found


async def test_honest_workers_with_a_buffer_that_is_not_finite_are_seldom_looked_at():
    plain = await run(None, steps=20, workers=3, audit_fraction=0.0)
    found = await run(None, steps=20, workers=3, log_shares=True, audit_fraction=0.0)
    assert found.finished
    assert found.accuracy == plain.accuracy
    assert found.false_alarms == 0
    assert 0 < found.audits <= 40, "each element for the first time, of some 400 blocks"


@pytest.mark.slow
async def test_a_small_lie_is_within_what_unlike_machines_may_differ_by_and_is_told_of(clean: Found):
    found = await run(SLIGHT, steps=STEPS, workers=3, begins=2, audit_fraction=1.0)
    assert found.finished
    assert found.digest != clean.digest
    assert found.found_at == -1
    assert found.false_alarms == 0
    (told,) = [text for text in found.told if "--audit-tolerance" in text]
    assert told.startswith("worker 'bad' computes something else than 'honest-")
    assert "relative L2 distance 0.005," in told


async def test_with_a_lower_tolerance_a_small_lie_is_proven(clean: Found):
    found = await run(SLIGHT, steps=STEPS, workers=3, begins=2, audit_fraction=1.0, audit_tolerance=1e-3)
    assert 2 <= found.found_at
    assert found.false_alarms == 0


def _honest(gradients: torch.Tensor, task: Any, memory: dict[str, Any]) -> None:
    """Its sums are right."""


def _with_metric(outcome: ComputedBlock, name: str, value: float) -> ComputedBlock:
    count, known = len(outcome.metric_names), list(outcome.metrics)
    if name in outcome.metric_names:
        known[outcome.metric_names.index(name) :: count] = [value] * len(outcome.losses)
        return replace(outcome, metrics=tuple(known))
    rows = [(*known[at * count : (at + 1) * count], value) for at in range(len(outcome.losses))]
    return replace(
        outcome, metric_names=(*outcome.metric_names, name), metrics=tuple(one for row in rows for one in row)
    )


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (lambda one: _with_metric(one, "right", 2.0), "another metric 'right' than 'honest-"),
        (lambda one: _with_metric(one, "right", math.nan), "another metric 'right' than 'honest-"),
        (lambda one: _with_metric(one, "val_loss", math.inf), "another metric 'val_loss' than 'honest-"),
        (lambda one: replace(one, losses=tuple(loss * 0.7 for loss in one.losses)), "another loss than 'honest-"),
    ],
    ids=["another value", "none", "another name", "loss"],
)
async def test_who_reports_other_numbers_is_told_of_once_and_stays(
    report: Report, told: str, monkeypatch: pytest.MonkeyPatch
):
    """Honest numbers may differ, by machine or by time: nobody is put out for them."""
    # It says that its machine is another: of one that is an honest one's equal the smallest difference is told anyway.
    monkeypatch.setattr(verification.Verification, "_alike", lambda *_: False)
    found = await run(_honest, steps=20, workers=3, reports=True, report=report, audit_fraction=1.0)
    assert (found.finished, found.found_at, found.false_alarms) == (True, -1, 0)
    (text,) = [text for text in found.told if "reports another" in text]
    assert text.startswith(f"worker 'bad' reports {told}")


def _without(outcome: ComputedBlock, name: str) -> ComputedBlock:
    """As of a worker whose step has returned too many other names before."""
    count, at = len(outcome.metric_names), outcome.metric_names.index(name)
    metrics = tuple(value for index, value in enumerate(outcome.metrics) if index % count != at)
    return replace(outcome, metric_names=tuple(one for one in outcome.metric_names if one != name), metrics=metrics)


@pytest.mark.parametrize("report", [None, lambda one: _without(one, "right")], ids=["all", "one left out"])
async def test_metrics_that_are_no_function_of_the_block_raise_no_alarm(
    report: Report | None, monkeypatch: pytest.MonkeyPatch
):
    """Nor do such as are left out. And each costs one computation of the coordinator's, not one for each audit."""
    computed: list[int] = []
    recompute = Recomputation.recompute

    async def counted(self: Recomputation, plan: StepPlan, *given: Any) -> ReferenceResult | None:
        computed.append(plan.step)
        return await recompute(self, plan, *given)

    monkeypatch.setattr(Recomputation, "recompute", counted)
    found = await run(_honest, steps=20, workers=3, reports=True, report=report, audit_fraction=1.0)
    assert (found.finished, found.found_at, found.false_alarms) == (True, -1, 0)
    assert found.audits > 10
    assert not [text for text in found.told if "reports another" in text]
    assert 1 <= len(computed) <= 2  # for the calls, and for who leaves one out


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["nan", "x1e6"])
async def test_through_a_lossy_codec_what_is_odd_is_judged_by_the_coordinator(name: str, clean: Found):
    found = await run(ATTACKS[name], steps=20, workers=3, begins=2, update=UpdateConfig(codec="int8"))
    assert found.finished
    assert found.audits == 0  # no two results are alike
    assert found.found_at >= 2, found
    assert found.false_alarms == 0
    assert found.accuracy > 0.6  # a step that counted a millionfold result would leave it at a tenth


async def test_through_a_lossy_codec_results_that_are_larger_than_usual_are_told_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verification, "_MANY_UNUSUAL", 1)
    found = await run(THIRTYFOLD, steps=STEPS, workers=3, begins=8, update=UpdateConfig(codec="bf16"))
    told = [text for text in found.told if "larger than usual" in text]
    assert any("results of worker 'bad' were larger than usual, the last for step" in text for text in told)
    assert found.false_alarms == 0


@pytest.mark.parametrize(("first", "usual_between", "told"), [(0, 0, 1), (0, 8, 1), (0, 12, 0), (1000, 0, 1)])
def test_many_results_that_are_larger_than_usual_are_told_of_once_where_they_are_many_of_all(
    first: int, usual_between: int, told: int
):
    """Also where a worker was honest for long, but for one that was larger."""
    warned: list[str] = []
    verified = object.__new__(verification.Verification)
    verified._unusual = {}
    verified._context = SimpleNamespace(phase=SimpleNamespace(warn=warned.append))  # type: ignore[assignment]
    grant, session = SimpleNamespace(worker="w", step=3), SimpleNamespace(name="w")
    block: Any = SimpleNamespace(grant=grant, session=session)
    for number in range(100):
        verified._tell_of_unusual_ones(block)
        if "w" in verified._unusual:
            verified._unusual["w"][1] += usual_between if number else first
    assert len(warned) == told
    assert all(text.startswith("16 of ") for text in warned)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "topk:0.05"])
async def test_honest_workers_with_a_lossy_codec_are_not_put_out(codec: str, clean: Found):
    found = await run(None, steps=STEPS, workers=3, update=UpdateConfig(codec=codec))
    assert found.finished
    assert found.false_alarms == 0
    assert not [text for text in found.told if "larger than usual" in text]


@pytest.mark.slow
async def test_without_the_defence_it_does_harm(clean: Found):
    million = await run(ATTACKS["x1e6"], steps=STEPS, **OFF)
    assert million.accuracy < clean.accuracy * 0.5
    assert million.found_at == -1


def liar(coordinator: Coordinator) -> FalseWorker:
    """Each is the same worker: it has the same key."""
    runtime = Runtime(random_bytes=lambda count: bytes(count))
    return FalseWorker(
        coordinator.address, job=mlp_sgd(), config=QUICK_WORKER, attack=ATTACKS["sign flip"], runtime=runtime
    )


async def test_two_that_disagree_are_judged_by_the_coordinator_and_the_wrong_one_stays_out(tmp_path: Path):
    """With two workers there is no majority: the coordinator computes the block itself."""
    events: list[Event] = []
    commits = Commits()
    commits.bus.subscribe(events.append)
    made = settings(max_steps=2000, min_workers=2, audit_fraction=1.0)
    async with Coordinator(mlp_sgd(), run_dir=tmp_path / "run", config=made, bus=commits.bus) as coordinator:
        honest = asyncio.create_task(Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER).run())
        false = liar(coordinator)
        with pytest.raises(Refused) as caught:
            await false.run()
        assert caught.value.code == RefusalCode.QUARANTINED
        assert "is not what the block gives" in caught.value.reason
        with pytest.raises(Refused) as caught:
            await liar(coordinator).run()
        assert caught.value.code == RefusalCode.QUARANTINED  # its id stays out
        await commits.reach(commits.step + 3)  # the honest one goes on
        assert not honest.done()
        put_out = [event for event in events if isinstance(event, WorkerQuarantined)]
        assert [event.worker_id for event in put_out] == [false.worker_id]

        listed = (tmp_path / "run" / "revoked").read_text()
        assert listed.startswith(f"{false.worker_id}  # quarantined: its result for step")
        await coordinator.reload_access()  # the list says the same as before
        with pytest.raises(Refused):
            await liar(coordinator).run()
        (tmp_path / "run" / "revoked").write_text("")  # the operator lets it in again
        await coordinator.reload_access()
        before = len(put_out)
        with pytest.raises(Refused):  # it lies again
            await liar(coordinator).run()
        put_out = [event for event in events if isinstance(event, WorkerQuarantined)]
        assert len(put_out) == before + 1
        honest.cancel()
        await asyncio.gather(honest, return_exceptions=True)


async def test_without_quarantine_it_is_only_said_and_its_results_still_do_not_count():
    events: list[Event] = []
    commits = Commits()
    commits.bus.subscribe(events.append)
    made = settings(max_steps=12, min_workers=3, audit_fraction=1.0, quarantine=False)
    async with Coordinator(mlp_sgd(), config=made, bus=commits.bus) as coordinator:
        workers = [Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER) for _ in range(2)]
        running = [asyncio.create_task(worker.run()) for worker in (*workers, liar(coordinator))]
        result = await coordinator.wait()
        await asyncio.gather(*running)
    assert result.outcome == "finished"
    said = [event for event in events if isinstance(event, WorkerQuarantined)]
    assert said
    assert not any(event.put_out for event in said)


def test_the_attacks_change_what_they_say() -> None:
    """An attack that does nothing would make every test here pass."""
    from w5xde_async.compute.block import Task

    memory: dict[str, Any] = {}
    for name, attack in ATTACKS.items():
        changed = False
        for step in range(3):
            gradients = torch.arange(1.0, 65.0) * (step + 1)
            task = Task(
                step=step, start=0, samples=(8,), loss_scale=1.0, structure=b"", packed=True, tensors=()
            )  # fmt: skip
            before = gradients.clone()
            attack(gradients, task, memory.setdefault(name, {}))
            changed = changed or not torch.equal(before, gradients)
        assert changed, name
    assert digits(5).max_steps == 5
