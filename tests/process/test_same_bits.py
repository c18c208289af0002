"""The same digest from real processes: one worker, three, three of which one is killed and one comes late, and a run
that is interrupted in the middle of an epoch and goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import jobs, reference
from tests.support.processes import Gate, Program, programs

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(240)]

Start = Callable[..., Program]

COORDINATOR = "w5xde_async.coordinator"
WORKER = "w5xde_async.worker"


def arguments(name: str, run: Path, *more: str) -> list[str]:
    return [
        COORDINATOR, f"tests/support/jobs.py:{name}", "--run-dir", str(run), "--port", "0", "--threads", "1",
        "--log-format", "json", "--log", "verbose", *more,
    ]  # fmt: skip


def finished(coordinator: Program) -> tuple[str, dict[str, Any]]:
    assert coordinator.finish() == 0, "".join(coordinator.text[-30:])
    event = coordinator.last("run_finished")
    return event["digest"], event


def worker(start: Start, name: str, server: str, label: str, leaf_s: float = 0.0) -> Program:
    return start(
        WORKER, "--server", server, "--job", f"tests/support/jobs.py:{name}", "--threads", "1", "--name", label,
        "--log-format", "json", leaf_s=leaf_s,
    )  # fmt: skip


def begun(start: Start, name: str, run: Path, workers: int, leaf_s: float = 0.0) -> tuple[Program, list[Program]]:
    """A coordinator and so many workers."""
    coordinator = start(*arguments(name, run, "--min-workers", str(workers)))
    server = coordinator.wait_for("run_started")["address"]
    return coordinator, [worker(start, name, server, f"worker-{number}", leaf_s) for number in range(workers)]


def one_worker(name: str, run: Path) -> str:
    with programs() as start:
        coordinator, (one,) = begun(start, name, run, 1)
        digest, _ = finished(coordinator)
        assert one.finish() == 0
        return digest


def three_workers(name: str, run: Path) -> str:
    with programs() as start:
        coordinator, _ = begun(start, name, run, 3)
        digest, event = finished(coordinator)
        names = {share["name"] for share in event["shares"] if share["leaves"]}
        assert len(names - {"coordinator"}) == 3  # it may have taken the place of one of them
        return digest


def killed_and_late(name: str, run: Path) -> str:
    with programs() as start:
        coordinator = start(*arguments(name, run, "--min-workers", "3"))
        host, port = coordinator.wait_for("run_started")["address"].rsplit(":", 1)
        gate = Gate((host, int(port)))
        try:
            late = worker(start, name, f"127.0.0.1:{gate.port}", "late", 0.01)
            early = [worker(start, name, f"{host}:{port}", f"early-{number}", 0.05) for number in range(3)]
            assert gate.knocked.wait(60)
            coordinator.wait_for("step_committed", step=4)
            early[0].signal(signal.SIGKILL)
            left = coordinator.wait_for("worker_left")
            assert left["name"] == "early-0"
            assert not left["clean"]
            gate.open()
            digest, event = finished(coordinator)
            leaves = {share["name"]: share["leaves"] for share in event["shares"]}
            assert leaves["late"] > 0
            assert 0 < leaves["early-0"] < leaves["early-1"] + leaves["early-2"]
            assert [program.finish() for program in (late, *early[1:])] == [0, 0, 0]
            return digest
        finally:
            gate.close()


def interrupted_and_resumed(name: str, run: Path) -> str:
    with programs() as start:
        first, _ = begun(start, name, run, 2, 0.01)
        first.wait_for("step_committed", step=11)
        first.signal(signal.SIGINT)
        assert first.finish() == 0, "".join(first.text[-30:])
        stopped = first.last("run_finished")
        assert stopped["outcome"] == "stopped"
        assert 11 <= stopped["step"] < 32
        second, _ = begun(start, name, run, 2)
        digest, event = finished(second)
        assert second.last("run_started")["resumed_step"] == stopped["step"]
        assert event["outcome"] == "finished"
        return digest


#: Every kind of run, every model. tests/cluster has all jobs with one worker and
#: with three, resumed and with workers that come and go.
RUNS = [
    (one_worker, "gpt_adamw"), (three_workers, "cnn_adamw"), (killed_and_late, "mlp_adamw"),
    (interrupted_and_resumed, "cnn_sgd"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "name"), RUNS)
def test_digest_is_the_plain_loops(run: Callable[[str, Path], str], name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    assert run(name, tmp_path / "run") == reference.digest(jobs.ALL[name]())
