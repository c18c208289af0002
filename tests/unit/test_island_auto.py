"""``--island auto``: from a job, or from a coordinator's program, to what is started."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulator.loop import VirtualLoop
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.memory_links import MemoryLink, memory_pair
from torch import nn

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.machine import available_memory_bytes
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import LinkLost, Refused, UsageError
from w5xde_async.job import Job
from w5xde_async.memory import ProgramSurvey, Survey, fitting
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.plan.island_choice import ALONE, Devices
from w5xde_async.runtime import Runtime
from w5xde_async.settings import WorkerSettings, read
from w5xde_async.telemetry.events import Bus, Event, WorkerJoined
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.frame import SESSION_CAPS, encode
from w5xde_async.wire.messages import Heartbeat, Welcome
from w5xde_async.worker import __main__ as program
from w5xde_async.worker import devices
from w5xde_async.worker.connection.dialing import Dialer
from w5xde_async.worker.connection.looking import look


def deep() -> Job:
    """Eight layers that are alike, with a loss that needs no code."""

    def model() -> nn.Module:
        return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())])

    return replace(jobs.mlp_sgd(), model=model, loss=nn.CrossEntropyLoss())


def test_what_is_measured_of_a_program_is_what_is_measured_of_its_job() -> None:
    job = deep()
    of_job = Survey(job)
    atoms: Any = of_job.atoms()
    of_program = ProgramSurvey(atoms.program, of_job.layout, LeafSpec.of(job))
    for mode, ranks in (("dp", 2), ("fsdp", 2), ("pp", 2), ("pp", 4)):
        assert of_program.needs(mode, ranks) == of_job.needs(mode, ranks), mode
    (alone,), (also,) = of_program.needs(ALONE, 1), of_job.needs(ALONE, 1)
    assert replace(alone, activations=0) == replace(also, activations=0)  # type: ignore[type-var]
    assert alone.activations == pytest.approx(also.activations, rel=0.1)  # type: ignore[union-attr]


def test_the_arithmetic_is_shown_as_far_as_it_was_needed() -> None:
    survey = Survey(deep())
    most = {mode: max(need.together for need in survey.needs(mode, 4)) for mode in ("dp", "pp")}  # type: ignore[union-attr]
    found, said = fitting(survey, Devices(4, 2 * most["dp"]), with_job=False)
    assert (found and found.name) == "dp=4"
    assert said.splitlines()[-1].endswith("KiB on each of 4 devices, of which 90% may be needed: dp=4")
    assert "fsdp" not in said
    found, said = fitting(survey, Devices(4, 1 + int(most["pp"] / 0.9)), with_job=False)
    assert (found and found.name) == "pp=4"
    assert [line.split("  ")[0] for line in said.splitlines()[1:4]] == [
        "dp=4, a rank", "fsdp=4, a rank", "pp=4, rank 0"
    ]  # fmt: skip
    found, said = fitting(survey, Devices(1, 100, shared=True), with_job=True)
    assert found is None
    assert "a worker alone" in said
    assert said.endswith("0.1 KiB for all ranks together, of which 90% may be needed: nothing fits")
    assert fitting(survey, Devices(4, 1 << 40), with_job=True, islands=False)[0] == (ALONE, 1, survey.needs(ALONE, 1))


@pytest.mark.slow
async def test_a_program_is_looked_at_without_joining() -> None:
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    async with Coordinator(deep(), config=settings(min_workers=1, code_free=True), bus=bus) as coordinator:
        seen = await look(Dialer(coordinator.address, QUICK_WORKER, Runtime()))
        assert seen.takes_islands
        assert seen.program.fingerprint == seen.layout.fingerprint
        assert seen.spec.microbatch_samples == deep().microbatch_samples
    assert not [event for event in events if isinstance(event, WorkerJoined)]
    config = settings(min_workers=1, code_free=True, update=UpdateConfig(codec="int8"))
    async with Coordinator(deep(), config=config) as coordinator:
        assert not (await look(Dialer(coordinator.address, QUICK_WORKER, Runtime()))).takes_islands


def test_a_coordinator_that_falls_silent_is_not_looked_at_for_ever() -> None:
    """While it makes its program it says that it lives."""

    async def silent() -> None:
        near, far = memory_pair()
        near.caps = far.caps = SESSION_CAPS
        loop = asyncio.get_running_loop()
        welcome = Welcome("0" * 16, "silent", 1, 0, "fp32", 2, 1, 64 << 10, bytes(32), 3.0, 12.0)
        dialer: Any = SimpleNamespace(join=lambda: joined(near, welcome))
        looking = asyncio.create_task(look(dialer))
        for _ in range(10):
            await asyncio.sleep(3.0)
            await far.send(encode(Heartbeat("makes its program")))
        with pytest.raises(LinkLost, match="silent for 12 s"):
            await looking
        assert loop.time() - 30.0 == pytest.approx(12.0, abs=4.0)
        far.abort()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(silent())


async def joined(link: MemoryLink, welcome: Welcome) -> Any:
    return link, welcome, None


async def test_a_run_of_a_jobs_code_cannot_be_looked_at() -> None:
    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=1, code_free=False)) as coordinator:
        with pytest.raises(Refused, match=r"(?i)program"):
            await look(Dialer(coordinator.address, QUICK_WORKER, Runtime()))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of what is started, None for a worker alone."""
    found: list[Any] = []

    def note(shape: Any) -> Callable[[], Coroutine[Any, Any, int]]:
        async def ran() -> int:
            found.append(shape)
            return 0

        return ran

    monkeypatch.setattr(program, "_work", lambda settings, config, server, shape, job: note(shape))
    monkeypatch.setattr(program, "_supervise", lambda arguments, settings, config, server, shape: note(
        (arguments[-1], shape)))  # fmt: skip
    return found


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program does to the process's logging and scheduling stays out of it."""
    monkeypatch.setattr(program, "use_batch_scheduling", lambda: None)
    monkeypatch.setattr(program, "_show_log", lambda settings: None)


def chosen(*arguments: str) -> Callable[[], Coroutine[Any, Any, int]]:
    given = ["--island", "auto", *arguments]
    read_settings, _ = read(WorkerSettings, given, prog="")
    return program._prepare(given, read_settings, "")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "mode"), [("", "pp"), (f"{Path(__file__)}:deep", "fsdp")])
async def test_what_fits_is_started(job: str, mode: str, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of the job's code are smaller than those of its program, which is cut into few: it is a small one."""

    def together(survey: Survey, one: str) -> int:
        return max(need.together for need in survey.needs(one, 4, with_job=bool(job)))  # type: ignore[union-attr]

    survey = await asyncio.to_thread(Survey, deep())
    dp, less = [await asyncio.to_thread(together, survey, one) for one in ("dp", mode)]
    async with Coordinator(deep(), config=settings(min_workers=1, code_free=True)) as coordinator:
        arguments = ["--server", coordinator.address, *(("--job", job) if job else ())]
        for each, number in ((2 * dp, 1), (2 * dp, 4), (1 + int(less / 0.9), 4)):
            monkeypatch.setattr(devices, "devices_of", lambda _, each=each, number=number: Devices(number, each))
            assert await (await asyncio.to_thread(chosen, *arguments))() == 0
        assert started == [
            None, ("dp=4", IslandShape("dp", 4)), (f"{mode}=4", IslandShape(mode, 4)),
        ]  # fmt: skip
        monkeypatch.setattr(devices, "devices_of", lambda _: Devices(2, 100))
        with pytest.raises(UsageError, match=r"(?s)does not fit.*fsdp=2, a rank.*nothing fits"):
            await (await asyncio.to_thread(chosen, *arguments))()


@pytest.mark.parametrize("island", [["--island", "auto"], []])
def test_a_prestarted_job_is_loaded_once_and_the_main_thread_is_the_one_that_is_scheduled(
    island: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled: list[threading.Thread] = []
    monkeypatch.setattr(program, "use_batch_scheduling", lambda: scheduled.append(threading.current_thread()))
    monkeypatch.setattr(program, "_loaded", ("train.py:job", deep()))
    given = [*island, "--server", "localhost:5555", "--job", "train.py:job", "--device", "cpu", "--threads", "1"]
    assert program._prepare(given, read(WorkerSettings, given, prog="")[0], "")  # type: ignore[arg-type]
    assert scheduled == [threading.main_thread()]


def test_a_coordinators_program_is_not_looked_at_where_it_needs_a_sandbox() -> None:
    with pytest.raises(UsageError, match="--sandbox off"):
        asyncio.run(chosen("--server", "192.0.2.1:5555", "--insecure")())


def test_ranks_that_are_started_need_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="give their shape"):
        chosen("--server", "localhost:5555")


def test_a_member_says_its_shape() -> None:
    given = ["--server", "localhost:5555", "--island-member", "auto"]
    with pytest.raises(UsageError, match="auto"):
        program._prepare(given, read(WorkerSettings, given, prog="")[0], "")


def test_processes_on_a_cpu_share_what_is_available(tmp_path: Path) -> None:
    found = devices.devices_of("cpu")
    assert found.shared
    assert found.number == 1
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       65536 kB\nMemAvailable:      2048 kB\n")
    assert available_memory_bytes(tmp_path) == 2048 * 1024
    (tmp_path / "proc/meminfo").write_text("odd\n")
    assert available_memory_bytes(tmp_path) > 1 << 26
