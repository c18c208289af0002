"""Whole runs with a worker on this machine's accelerator (on the CPU where there is none): rules, codecs, no code."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_device import DEVICE, without_dropout
from tests.support import jobs, programs, reference
from tests.support.cluster import settings
from tests.support.processes import programs as processes

from w5xde_async.compute.program import sandbox as sandboxes
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.errors import ExitCode
from w5xde_async.job import Job, build_model
from w5xde_async.params.flat import named_state
from w5xde_async.segments import unsupported
from w5xde_async.telemetry.events import Bus, Event, StepCommitted, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Departure, Worker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


async def train(
    job: Job,
    config: CoordinatorConfig,
    *,
    workers: int = 1,
    without_code: bool = False,
    link: str = "auto",
    run_dir: Path | None = None,
    events: list[Event] | None = None,
) -> tuple[RunResult, dict[str, torch.Tensor]]:
    """The run's result and what was trained."""
    given = WorkerConfig(device=str(DEVICE), connect_timeout_s=60.0, link=link)
    bus = Bus()
    if events is not None:
        bus.subscribe(events.append)
    async with Coordinator(job, config=config, bus=bus, run_dir=run_dir) as coordinator:
        made = [
            Worker(coordinator.address, job=None if without_code else replace(job), config=given)
            for _ in range(workers)
        ]  # fmt: skip
        running = [asyncio.create_task(worker.run()) for worker in made]
        result = await coordinator.wait()
        assert await asyncio.gather(*running) == [Departure.FINISHED] * workers
        assert all(worker.leases_done for worker in made)
        assert coordinator._prepared is not None
        trained = {name: tensor.detach() for name, tensor, _ in named_state(coordinator._prepared.spec.model)}
    assert result.outcome == "finished"
    return result, trained


def calm(name: str) -> Job:
    """A job without dropout, whose masks differ between kinds of devices."""
    job = jobs.ALL[name]()
    return replace(job, model=lambda: without_dropout(jobs.ALL[name]().model()))  # type: ignore[operator]


def assert_as_the_plain_loop(job: Job, trained: dict[str, torch.Tensor]) -> None:
    """It went where the plain loop goes: devices round differently, and an optimizer makes more of that."""
    begun = {name: tensor.detach().double() for name, tensor, _ in named_state(build_model(job))}
    apart = moved = 0.0
    for name, tensor, _ in named_state(reference.train(job)[0]):
        if tensor.is_floating_point() and tensor.isfinite().all():
            expected = tensor.detach().double()
            apart += float((trained[name].double() - expected).square().sum())
            moved += float((expected - begun[name]).square().sum())
    assert moved > 0
    assert apart <= 0.1**2 * moved


@pytest.mark.parametrize("name", ["cnn_adamw", "gpt_sgd", "odd", "accumulated"])
async def test_defaults(name: str) -> None:
    """Default pacing and buckets: what a first run meets, with batch norm, ties, frozen and bfloat16 parameters."""
    _, trained = await train(calm(name), CoordinatorConfig(port=0, max_time_s=100.0), workers=1)
    assert_as_the_plain_loop(calm(name), trained)


@pytest.mark.slow
@pytest.mark.skipif(unsupported() != "", reason=unsupported())
@pytest.mark.parametrize("name", ["cnn_adamw", "odd", "accumulated"])
async def test_in_memory_that_the_coordinator_has_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go straight from its parameters, and to where it reads results. The bits are those that TCP carries."""
    monkeypatch.setattr("w5xde_async.params.layout._SMALL_BYTES", 0)
    digests = []
    for link in ("shm", "tcp", "shm"):
        config = CoordinatorConfig(port=0, max_time_s=100.0, bucket_bytes=64 << 10)
        result, trained = await train(calm(name), config, link=link)
        assert_as_the_plain_loop(calm(name), trained)
        digests.append(result.digest)
    if DEVICE.type != "cuda" or name != "cnn_adamw":  # whose convolutions' kernels need not repeat their bits
        assert len(set(digests)) == 1


@pytest.mark.parametrize("link", ["shm", "tcp"] if not unsupported() else ["tcp"])
@pytest.mark.parametrize("name", ["cnn_adamw", "mlp_sgd", "odd", "clipped", "fp16"])
async def test_an_optimizer_that_steps_on_the_device(name: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w5xde_async.params.layout._SMALL_BYTES", 0)
    config = CoordinatorConfig(port=0, max_time_s=100.0, bucket_bytes=64 << 10, update_device=str(DEVICE))
    job = replace(calm("mlp_adamw"), gradient_clip_val=0.1) if name == "clipped" else calm(name)
    _, trained = await train(job, config, link=link)
    assert_as_the_plain_loop(job, trained)


@pytest.mark.slow
async def test_a_run_goes_on_with_its_optimizer_on_another_device(tmp_path: Path) -> None:
    """What it keeps goes into the checkpoint and to where it steps next, and that is told."""
    job, events = calm("mlp_adamw"), list[Event]()
    steps = job.max_steps or 0
    for stop, where in ((steps // 3, str(DEVICE)), (2 * steps // 3, "cpu"), (steps, str(DEVICE))):
        config = CoordinatorConfig(port=0, max_time_s=100.0, update_device=where, bucket_bytes=64 << 10, max_steps=stop)
        _, trained = await train(job, config, events=events, run_dir=tmp_path)
    assert_as_the_plain_loop(job, trained)
    told = [event.text for event in events if isinstance(event, Warned) and "updates were made on" in event.text]
    assert len(told) == (2 if DEVICE.type == "cuda" else 0)


@pytest.mark.slow
async def test_two_workers_share_a_device() -> None:
    config = CoordinatorConfig(port=0, max_time_s=100.0, min_workers=2, bucket_bytes=64 << 10)
    _, trained = await train(calm("gpt_sgd"), config, workers=2)
    assert_as_the_plain_loop(calm("gpt_sgd"), trained)


@pytest.mark.parametrize("name", ["cnn_sgd", "mlp_adamw"])
async def test_local_steps_of_one_worker_are_the_plain_loop(name: str) -> None:
    """The inner optimizer, its state and the parameters it changes stay on the device."""
    update = UpdateConfig(rule="local", inner_steps=5, outer_lr=1.0, outer_momentum=0.0)
    job = calm(name)
    steps = job.max_steps or 0
    config = settings(update=update, norm_gate=0.0, max_time_s=100.0)
    _, trained = await train(replace(job, max_steps=steps - steps % 5), config)
    assert_as_the_plain_loop(replace(job, max_steps=steps - steps % 5), trained)


RULES: dict[str, dict[str, Any]] = {
    "async": {"rule": "async", "results_per_step": 2},
    "radial": {"rule": "local", "inner_steps": 3, "average": "radial", "codec": "int8"},
    "streaming": {"rule": "streaming", "inner_steps": 4, "fragments": 2, "codec": "int4"},
    "async-local": {"rule": "async-local", "inner_steps": 3, "codec": "sparseloco"},
    "sync": {"rule": "sync", "codec": "topk:0.1", "downlink": "bf16"},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_every_rule_and_codec_learns(rule: dict[str, Any]) -> None:
    job, events = jobs.mlp_sgd(), list[Event]()
    config = settings(update=UpdateConfig(**rule), min_workers=2, max_time_s=100.0)
    result, _ = await train(job, config, workers=2, events=events)
    losses = [event.loss for event in events if isinstance(event, StepCommitted)]
    assert result.step == job.max_steps
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "words", "cnn"])
async def test_without_the_jobs_code(name: str) -> None:
    """Traced on the coordinator's CPU, replayed on the device."""
    job = programs.TRACEABLE[name]()
    result, _ = await train(job, settings(code_free=True, max_time_s=100.0), without_code=True)
    _, losses = reference.train(programs.TRACEABLE[name](), result.step)
    assert result.loss == pytest.approx(losses[-1], rel=0.15)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sandboxes.unsupported(DEVICE) != "", reason=sandboxes.unsupported(DEVICE))
@pytest.mark.parametrize("name", ["mlp", "cnn"])
async def test_the_same_bits_in_a_sealed_process(name: str) -> None:
    digests = []
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for sandbox in ("off", "on"):
            given = WorkerConfig(device=str(DEVICE), connect_timeout_s=60.0, sandbox=sandbox, deterministic=True)
            config = settings(code_free=True, max_time_s=100.0)
            async with Coordinator(programs.TRACEABLE[name](), config=config) as coordinator:
                running = asyncio.create_task(Worker(coordinator.address, config=given).run())
                digests.append((await coordinator.wait()).digest)
                assert await running is Departure.FINISHED
    finally:
        torch.use_deterministic_algorithms(before)
    assert digests[0] == digests[1]


ASSERTING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from w5xde_async import Job

def job():
    labels = torch.zeros(64, dtype=torch.int64)
    labels[21] = 7  # out of range, in the second leaf of the third step
    return Job(
        model=lambda: nn.Linear(4, 2), dataset=TensorDataset(torch.zeros(64, 4), labels), shuffle=False,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy,
        batch_size=8, microbatch_size=4, max_steps=8,
    )
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_label_out_of_range_ends_the_run_and_names_the_samples(tmp_path: Path) -> None:
    """On CUDA the worker's process loses its device, says which leaf it was, and is started again."""
    (tmp_path / "job.py").write_text(ASSERTING)
    (tmp_path / "w5xde.toml").write_text(f'[worker]\ndevice = "{DEVICE}"\n')
    place = ("--run-dir", str(tmp_path / "run"), "--port", "0", "--log-format", "json", "--workers", "1")
    with processes() as start:
        program = start(
            "w5xde_async.coordinator", f"{tmp_path}/job.py:job", *place, "--config", str(tmp_path / "w5xde.toml")
        )
        assert program.finish() == ExitCode.ERROR
    failed = program.last("run_finished")
    assert "step 2, leaf 1: " in failed["reason"]
    assert "samples 20, 21, 22, 23" in failed["reason"]
    assert "Target 7 is out of bounds" in failed["reason"]
    again = f"ended with exit code {int(ExitCode.DEVICE_LOST)} and is started again"
    log = [event["message"] for event in program.events if event["event"] == "log"]
    assert any(again in text for text in log) == (DEVICE.type == "cuda"), log
