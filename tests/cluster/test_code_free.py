"""Workers without the job's code: the same bits as with it, alone and mixed; and what they are told where it fails."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support import jobs, programs, reference
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.processes import programs as processes

from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.coordinator.training import _rounded_s
from w5xde_async.errors import JobError, RefusalCode, Refused
from w5xde_async.hub.members.program_server import ProgramServer
from w5xde_async.params.flat import named_digest
from w5xde_async.telemetry.events import Bus, Event, Waiting, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker import engine_source
from w5xde_async.worker.connection.connection import RunFailed
from w5xde_async.worker.service import Departure, Worker

#: Of the jobs that can be traced, those that differ in what travels or in how steps are put together. What a bigger
#: model computes without its code is the engine's: tests/unit/test_program.py has all of them.
SMALL = ("mlp", "words")
OTHERS = ("cnn", "accumulated", "metrics", "bf16", "fp16")


async def train(name: str, *, free: int, local: int) -> RunResult:
    """Run with so many workers without the job's code and with it."""
    make_job = programs.TRACEABLE[name]
    config = settings(code_free=True, min_workers=free + local, max_time_s=60.0)
    async with Coordinator(make_job(), config=config) as coordinator:
        workers = [Worker(coordinator.address, job=None, config=QUICK_WORKER) for _ in range(free)]
        workers += [Worker(coordinator.address, job=make_job(), config=QUICK_WORKER) for _ in range(local)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        result = await coordinator.wait()
        departures = await asyncio.gather(*running)
    assert departures == [Departure.FINISHED] * len(workers)
    assert all(worker.leases_done for worker in workers)
    return result


@pytest.mark.slow
async def test_digest_equals_the_plain_loop_without_any_code() -> None:
    result = await train("mlp", free=1, local=0)
    assert result.digest == named_digest(reference.train(programs.TRACEABLE["mlp"]())[0])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
async def test_digest_equals_the_plain_loop(name: str) -> None:
    """One worker without code beside one with it: leaves of either are in every step."""
    result = await train(name, free=1, local=1)
    job = programs.TRACEABLE[name]()
    steps = job.max_steps or (job.epochs or 0) * -(-len(job.dataset) // job.batch_size)
    assert result.outcome == "finished"
    assert result.digest == named_digest(reference.train(job, steps)[0])


async def test_that_a_program_is_being_made_is_said_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may take a minute, in which nobody computes."""
    made, waits = asyncio.Event(), asyncio.Event()
    known = ProgramServer.run

    async def slowly(self: ProgramServer, *given: Any, **named: Any) -> None:
        await made.wait()
        await known(self, *given, **named)

    def see(event: Event) -> None:
        if isinstance(event, Waiting):
            reasons.append(event.reason)
            if "program" in event.reason:
                waits.set()

    reasons: list[str] = []
    monkeypatch.setattr(ProgramServer, "run", slowly)
    monkeypatch.setattr(engine_source, "_AT_ONCE_S", 0.0)
    caplog.set_level(logging.INFO)
    make_job, bus = programs.TRACEABLE["mlp"], Bus()
    bus.subscribe(see)
    async with Coordinator(make_job(), config=settings(code_free=True, min_workers=1), bus=bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=None, config=QUICK_WORKER).run())
        await asyncio.wait_for(waits.wait(), 20)
        made.set()
        await coordinator.wait()
        assert await worker is Departure.FINISHED
    assert "0 of 1 workers, 1 joining: the step is being made a program for workers without --job" in reasons
    (_, line) = [text for text in caplog.messages if text.startswith(("joined ", "waiting for the coordinator"))][:2]
    assert line == "waiting for the coordinator to make the step a program (--job needs none)"


def test_how_long_a_program_has_been_awaited_is_told_now_and_then() -> None:
    assert [_rounded_s(s) for s in (0.5, 9.9, 10.0, 38.2, 61.0, 119.0, 120.5)] == [0, 0, 10, 30, 60, 60, 120]


@pytest.mark.timeout(60)
async def test_a_step_that_cannot_be_traced_is_said_and_workers_with_the_code_go_on() -> None:
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    async with Coordinator(jobs.odd(), config=settings(code_free=True), bus=bus) as coordinator:
        with pytest.raises(Refused) as caught:
            await Worker(coordinator.address, config=QUICK_WORKER).run()
        running = asyncio.create_task(Worker(coordinator.address, job=jobs.odd(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await running
    assert result.outcome == "finished"
    assert caught.value.code is RefusalCode.NO_PROGRAM
    assert "jobs.py:" in caught.value.reason
    assert "--job" in caught.value.hint
    assert any("--job" in event.text and "jobs.py:" in event.text for event in events if isinstance(event, Warned))


@pytest.mark.slow
@pytest.mark.timeout(180)  # an LSTM is traced for each length, which takes seconds of a core that others want, too
@pytest.mark.parametrize("local", [0, 1], ids=["alone", "beside one with the code"])
async def test_leaves_of_sizes_that_no_graph_takes_are_not_given_to_workers_without_code(local: int) -> None:
    """They are computed by workers with the code, or by the coordinator; said once; the table says who did what."""
    job, events, bus = programs.padded(), list[Event](), Bus()
    bus.subscribe(events.append)
    async with Coordinator(job, config=settings(code_free=True, min_workers=1 + local), bus=bus) as coordinator:
        workers = [Worker(coordinator.address, config=QUICK_WORKER)]
        workers += [Worker(coordinator.address, job=programs.padded(), config=QUICK_WORKER) for _ in range(local)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        result = await coordinator.wait()
        await asyncio.gather(*running)
    assert result.digest == named_digest(reference.train(job, result.step)[0])
    said = [event.text for event in events if isinstance(event, Warned)]
    assert [text for text in said if "failed" in text] == []
    (told,) = [text for text in said if "--job" in text]
    assert "int64[2, " in told
    assert sum(share.leaves for share in result.shares) == 14
    own = sum(share.leaves for share in result.shares if share.name == "coordinator")
    assert own == 0 if local else 0 < own < 14


@pytest.mark.slow
async def test_under_other_rules_sizes_that_no_graph_takes_end_the_run_and_say_what_to_do() -> None:
    """A lease is a whole step there, so workers without code have nothing else to do; nothing is tried three times."""
    events, bus = list[Event](), Bus()
    bus.subscribe(events.append)
    config = settings(code_free=True, update=UpdateConfig(rule="local"))
    async with Coordinator(programs.padded(), config=config, bus=bus) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, config=QUICK_WORKER).run())
        with pytest.raises(JobError, match=r"cannot compute batches of int64\[2, .*; start workers with --job"):
            await coordinator.wait()
        with pytest.raises(RunFailed):
            await running
    assert [event.text for event in events if isinstance(event, Warned)] == []


async def test_a_coordinator_that_makes_no_program_says_so() -> None:
    async with Coordinator(jobs.mlp_sgd(), config=settings()) as coordinator:
        with pytest.raises(Refused, match="this coordinator makes none") as caught:
            await Worker(coordinator.address, config=QUICK_WORKER).run()
    assert caught.value.exit_code == 5


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_worker_process_needs_the_address_alone(tmp_path: Path) -> None:
    """Real processes: the coordinator's child traces, a worker without --job and one with it train."""
    ended = {}
    with processes() as start:
        common = ("--threads", "1", "--log-format", "json")
        coordinator = start(
            "w5xde_async.coordinator", "tests/support/jobs.py:mlp_sgd", "--port", "0", "--min-workers", "2",
            "--run-dir", str(tmp_path / "run"), *common, code_free=True,
        )  # fmt: skip
        server = coordinator.wait_for("run_started")["address"]
        workers = {
            "free": start("w5xde_async.worker", "--server", server, *common),
            "local": start("w5xde_async.worker", "--server", server, "--job", "tests/support/jobs.py:mlp_sgd", *common),
        }
        for name, worker in workers.items():
            assert worker.finish() == 0, (name, worker.text)
            ended[name] = "".join(worker.text)
        assert coordinator.finish() == 0
        finished = coordinator.last("run_finished")
    job = jobs.mlp_sgd()
    assert finished["digest"] == named_digest(reference.train(job)[0])
    assert "program received" in ended["free"]
    assert "program received" not in ended["local"]


TOLD = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from w5xde_async import Job

torch.backends.mkldnn.enabled = False
torch.backends.cuda.enable_flash_sdp(False)
torch.set_float32_matmul_precision("high")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(16, 4)
    def forward(self, x):
        rows = self.second(self.first(x).relu()).flatten(2).transpose(1, 2).unflatten(2, (4, 4)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2).mean(1))

def job():
    made = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 1, 9, 9, generator=made), torch.randint(0, 4, (64,), generator=made))
    return Job(model=Model, dataset=data, loss=functional.cross_entropy, batch_size=16, microbatch_size=4, epochs=3,
               optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_what_the_jobs_file_tells_torch_holds_for_workers_that_never_see_it(tmp_path: Path) -> None:
    """Which kernels it is to take changes bits: in a sandbox, in a worker's own process, and where the code is."""
    (tmp_path / "told.py").write_text(TOLD)
    job, digests = f"{tmp_path}/told.py:job", []
    for kinds in ([("--job", job)], [("--sandbox", "on"), ("--sandbox", "off")]):
        with processes() as start:
            common = ("--threads", "1", "--log-format", "json")
            coordinator = start(
                "w5xde_async.coordinator", job, "--port", "0", "--min-workers", str(len(kinds)), "--short-steps",
                "workers", "--run-dir", str(tmp_path / f"run{len(digests)}"), *common, code_free=True,
            )  # fmt: skip
            server = coordinator.wait_for("run_started")["address"]
            workers = [start("w5xde_async.worker", "--server", server, *kind, *common) for kind in kinds]
            for worker in workers:
                assert worker.finish() == 0, worker.text
            assert coordinator.finish() == 0
            digests.append(coordinator.last("run_finished")["digest"])
    assert digests[0] == digests[1]
