"""A stranger's program in a process of its own: what that process cannot do, that it computes the same bits, and that
the worker outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import forking, jobs, programs, reference
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.programs import tiny_layout
from tests.support.sealed import ATTEMPTS, HARMLESS, WITH_DEVICES
from tests.unit.test_program_hostile import BIG, HOSTILE

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.program import sandbox as sandboxes
from w5xde_async.compute.program import sealing
from w5xde_async.compute.program.sandbox import Sandbox, Sandboxed
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.errors import DeviceLost, ProgramKilled, ProgramRefused
from w5xde_async.params.flat import named_digest
from w5xde_async.worker import engine_source
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Departure, Worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(sandboxes.unsupported(torch.device("cpu"))), reason="no sandbox on this machine"),
]

SANDBOXED = replace(QUICK_WORKER, sandbox="on", threads=1)


# -- what it cannot do


class Kept(Sandbox):
    """Is told of one program after the other."""

    def end(self) -> None:
        """At the end of the test."""


@pytest.fixture(scope="module")
def tried() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.support.sealed"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    made = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100, text=True)
    found: dict[str, str] = json.loads(made.stdout)
    return found


@pytest.mark.parametrize("name", ATTEMPTS)
def test_whoever_asks_the_kernel_for_more_is_ended(name: str, tried: dict[str, str]) -> None:
    assert tried[name] == "SIGSYS"
    assert not Path("/tmp/w5xde-owned").exists()


def test_what_computing_takes_is_let_through(tried: dict[str, str]) -> None:
    assert {name: tried[name] for name in HARMLESS} == {
        "nothing": "0", "its number": "True", "a name of a thread": "0", "another filter": "-1", "memory": str(1 << 20),
    }  # fmt: skip


@pytest.mark.parametrize("name", WITH_DEVICES)
def test_whoever_may_use_devices_signals_nobody_and_empties_no_file_on_any_kernel(
    name: str, tried: dict[str, str]
) -> None:
    assert tried[name] == WITH_DEVICES[name][1]


OPENED = """
import os, sys
from w5xde_async.compute.program import sealing

def tried(path):
    try:
        with open(path, "w") as file:
            file.write("named")
    except OSError as error:
        return type(error).__name__
    return "written"

sealing.restrict_files([sys.prefix, "/proc"], ["/dev/null"])
name = f"/proc/self/task/{os.getpid()}/comm"
print(tried(name), tried("/dev/null"), tried("/proc/self/coredump_filter"), tried("here"))
sealing.restrict_files()
print(tried(name), tried("/dev/null"))
"""


def test_whoever_may_use_devices_may_name_its_threads(tmp_path: Path) -> None:
    """Without a name for a thread of its own CUDA's driver says that there is no device."""
    said = subprocess.run(
        [forking.PYTHON, "-c", OPENED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.split()  # fmt: skip
    if sealing.landlock_abi():
        assert said == ["written"] * 2 + ["PermissionError"] * 4
    else:
        assert set(said) == {"written"}


# -- what it computes


async def train(name: str, config: WorkerConfig, **options: Any) -> RunResult:
    make_job = programs.TRACEABLE[name]
    async with Coordinator(make_job(), config=settings(code_free=True, max_time_s=100.0, **options)) as coordinator:
        worker = Worker(coordinator.address, config=config)
        running = asyncio.create_task(worker.run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    assert worker.leases_done
    return result


@pytest.mark.parametrize("name", ["cnn", "bf16", "checkpointed"])
async def test_the_same_bits_in_it_as_outside(name: str) -> None:
    result = await train(name, SANDBOXED)
    expected = reference.train(programs.TRACEABLE[name]())[0]
    assert result.digest == named_digest(expected)


async def test_the_same_bits_through_local_steps() -> None:
    from w5xde_async.updates.config import UpdateConfig

    update = UpdateConfig(rule="local", inner_steps=3, codec="int8")
    inside = await train("mlp", SANDBOXED, update=update)
    outside = await train("mlp", replace(SANDBOXED, sandbox="off"), update=update)
    assert inside.digest == outside.digest


# -- what it dies of


class Deadly(Sandbox):
    """Computes until its kernels go astray."""

    module = "tests.support.deadly"


DEATHS = {
    "reads beside its memory": "SIGSEGV", "opens a file": "SIGSYS", "lies": "never says",
    "raises": "its process failed: KeyError: 'what nobody expects'",
}  # fmt: skip


@pytest.mark.parametrize("how", DEATHS)
async def test_the_worker_outlives_it_says_why_and_the_run_goes_on(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_TEST_DEATH", how)
    monkeypatch.setattr(engine_source, "Sandbox", Deadly)
    async with Coordinator(jobs.mlp_adamw(), config=settings(code_free=True, max_time_s=100.0)) as coordinator:
        worker = Worker(coordinator.address, config=SANDBOXED)
        with pytest.raises(ProgramKilled, match=DEATHS[how]) as caught:
            await worker.run()
        assert caught.value.exit_code == 5
        assert worker.leases_done == 2
        # The same process works on: what its child died of has touched nothing of its own.
        monkeypatch.setattr(engine_source, "Sandbox", Sandbox)
        next_one = Worker(coordinator.address, config=replace(SANDBOXED, sandbox="off"))
        running = asyncio.create_task(next_one.run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    assert result.digest == named_digest(reference.train(jobs.mlp_adamw())[0])


async def test_a_child_that_loses_its_device_is_not_held_against_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker says which leaf it was, and is to be started again."""
    monkeypatch.setenv("CUDA_TEST_DEATH", "loses its device")
    monkeypatch.setattr(engine_source, "Sandbox", Deadly)
    async with Coordinator(jobs.mlp_adamw(), config=settings(code_free=True, max_time_s=100.0)) as coordinator:
        with pytest.raises(DeviceLost, match="an illegal address") as caught:
            await Worker(coordinator.address, config=SANDBOXED).run()
        assert caught.value.exit_code == 7
        monkeypatch.setattr(engine_source, "Sandbox", Sandbox)
        again = asyncio.create_task(Worker(coordinator.address, config=SANDBOXED).run())
        result = await coordinator.wait()
        assert await again is Departure.FINISHED
    assert result.digest == named_digest(reference.train(jobs.mlp_adamw())[0])


def test_who_stops_all_of_a_workers_group_does_not_end_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the worker does when it has finished its lease."""
    monkeypatch.setattr(sys, "executable", forking.PYTHON)  # not one that is forked
    sandbox = Sandbox(torch.device("cpu"), threads=1, memory_bytes=1 << 30)
    sandbox.start()
    try:
        assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os.kill(sandbox.pid, signal.SIGINT)
        os.kill(sandbox.pid, signal.SIGTERM)
        sandbox.wait()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{sandbox.pid}/status").read_text().splitlines())
        ignored = int(status["SigIgn"], 16)
        assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))
    finally:
        sandbox.end()


async def test_a_child_that_somebody_kills_ends_the_lease_and_not_the_worker() -> None:
    job = replace(jobs.mlp_adamw(), max_steps=100_000)
    async with Coordinator(job, config=settings(code_free=True, max_time_s=100.0)) as coordinator:
        worker = Worker(coordinator.address, config=SANDBOXED)
        running = asyncio.create_task(worker.run())
        while not (worker._connection and worker._connection.leases and worker._connection.leases.num_done):  # noqa: ASYNC110 (a worker tells nobody)
            await asyncio.sleep(0.01)
        assert isinstance(worker._engines._engine, Sandboxed)
        os.kill(worker._engines._engine._sandbox.pid, signal.SIGKILL)
        with pytest.raises(ProgramKilled, match="SIGKILL"):
            await running


async def test_a_child_that_dies_while_there_is_no_lease_is_noticed() -> None:
    alone = settings(code_free=True, max_time_s=100.0, min_workers=2)
    async with Coordinator(jobs.mlp_adamw(), config=alone) as coordinator:
        worker = Worker(coordinator.address, config=SANDBOXED)
        running = asyncio.create_task(worker.run())
        while not (worker._connection and worker._connection.leases):  # noqa: ASYNC110 (a worker tells nobody)
            await asyncio.sleep(0.01)
        assert isinstance(worker._engines._engine, Sandboxed)
        os.kill(worker._engines._engine.child, signal.SIGKILL)
        with pytest.raises(ProgramKilled, match="SIGKILL") as caught:
            await running
        assert (caught.value.exit_code, worker.leases_done) == (5, 0)


async def test_a_child_that_dies_while_there_is_no_coordinator_is_noticed_with_the_next() -> None:
    options: dict[str, Any] = {"code_free": True, "max_time_s": 100.0, "min_workers": 2}
    async with Coordinator(jobs.mlp_adamw(), config=settings(**options)) as coordinator:
        worker = Worker(coordinator.address, config=SANDBOXED)
        running = asyncio.create_task(worker.run())
        while not (worker._connection and worker._connection.leases):  # noqa: ASYNC110 (a worker tells nobody)
            await asyncio.sleep(0.01)
        port = coordinator.port
    assert isinstance(worker._engines._engine, Sandboxed)
    os.kill(worker._engines._engine.child, signal.SIGKILL)
    async with Coordinator(jobs.mlp_adamw(), config=settings(port=port, **options)):
        with pytest.raises(ProgramKilled, match="SIGKILL"):
            await running


# -- hostile programs


def test_it_has_no_secret_and_refuses_every_hostile_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sandbox = Kept(torch.device("cpu"), threads=1, memory_bytes=4 << 30)
    try:
        monkeypatch.setenv("W5XDE_TOKEN", "hush-hush")
        monkeypatch.setenv("HOME", "/home/hush-hush")
        monkeypatch.setattr(sys, "executable", forking.PYTHON)  # not one that is forked
        with (tmp_path / "secret").open("w") as file:
            os.set_inheritable(file.fileno(), True)
            sandbox.wait()
        has_no_secret(Path("/proc") / str(sandbox.pid))
        refuses_every_hostile_program(sandbox)
    finally:
        Sandbox.end(sandbox)


def has_no_secret(place: Path) -> None:
    said = (place / "status").read_text()
    assert "Seccomp:\t2" in said
    assert "NoNewPrivs:\t1" in said
    assert (place / "oom_score_adj").read_text() == "1000\n"
    limits = (place / "limits").read_text()
    assert limits.split("Max core file size")[1].split()[:2] == ["0", "0"]
    assert limits.split("Max file size")[1].split()[:2] == ["0", "0"]
    if os.geteuid() == 0:  # a process that hides can be looked into by root alone
        environment = (place / "environ").read_bytes()
        assert b"hush" not in environment
        assert b"W5XDE" not in environment
        files = [os.readlink(entry.path) for entry in os.scandir(place / "fd")]
        assert len(files) == 4, files
        assert not any("secret" in name for name in files)


def refuses_every_hostile_program(kept: Kept) -> None:
    layout, passed = tiny_layout(), []
    for name, (make, _) in HOSTILE.items():
        if name in BIG:
            continue
        try:
            Sandboxed(
                kept, make(), layout, LeafSpec(1, "fp32", 8, 1), batch_bytes=1 << 20, memory_bytes=1 << 30, copies=False
            )
        except ProgramKilled as error:
            raise AssertionError(f"{name}: {error}") from error
        except ProgramRefused:
            continue
        passed.append(name)
    assert not passed
