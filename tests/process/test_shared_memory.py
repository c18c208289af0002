"""Either side dies of ``kill -9`` at every place where memory is handed over: the run goes on to the reference's bits,
and whoever lives has no memory of the dead."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support import jobs, reference
from tests.support.ports import free_port
from tests.support.processes import Program, programs

from w5xde_async.params.flat import named_digest
from w5xde_async.segments import unsupported
from w5xde_async.store.failpoints import FAILPOINTS

pytestmark = [
    pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(240),
    pytest.mark.skipif(unsupported() != "", reason=unsupported()),
]  # fmt: skip

JOB = "tests/support/jobs.py:wide"
OF_WORKERS = ("shared.offer.after", "shared.result.before", "shared.result.after", "shared.answer.after")
#: Also in the middle of a step's own, where the parameters that workers see have changed.
OF_COORDINATORS = ("shared.open.after", "shared.lay.before", "shared.lay.after", "apply.after")
STEPS_EACH = 4


def segments(program: Program, name: str) -> set[str]:
    """Those of a kind that a process has mapped, by their inode."""
    lines = Path(f"/proc/{program.process.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if f"memfd:w5xde-shared-{name}" in line}


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds within a few seconds: the other process has first to notice."""
    ends = time.monotonic() + 10.0
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def test_all_places_are_here() -> None:
    shared = {name for name in FAILPOINTS if name.startswith("shared.")}
    assert shared <= {*OF_WORKERS, *OF_COORDINATORS}


def worker(start: Callable[..., Program], server: str, **environment: str) -> Program:
    return start(
        "w5xde_async.worker", "--server", server, "--job", JOB, "--threads", "1", "--link", "shm", "--log-format",
        "json", "--connect-timeout", "60", **environment,
    )  # fmt: skip


def test_both_sides_die_everywhere_and_nothing_is_left(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    steps = STEPS_EACH * len(OF_COORDINATORS) + 30
    command = [
        "w5xde_async.coordinator", JOB, "--run-dir", str(tmp_path / "run"), "--threads", "1", "--max-steps", str(steps),
        "--checkpoint-every", "2", "--log-format", "json", "--log", "verbose", "--port", str(free_port()),
    ]  # fmt: skip
    with programs() as start:
        # No step before both are there: one worker could take all steps while the other is still importing.
        first = start(*command, "--min-workers", "2", W5XDE_FAILPOINTS=f"{OF_COORDINATORS[0]}=kill@2")
        server = first.wait_for("run_started")["address"]
        survivor = worker(start, server)
        other = worker(start, server)  # it is the second to hand over its memory
        assert first.finish() == -signal.SIGKILL
        for place in OF_COORDINATORS[1:]:
            coordinator = start(*command, W5XDE_FAILPOINTS=f"{place}=kill@3")
            assert coordinator.finish() == -signal.SIGKILL, f"{place}: {''.join(coordinator.text[-20:])}"
        other.signal(signal.SIGKILL)
        assert soon(lambda: not segments(survivor, "parameters")), "a dead coordinator's parameters are kept"
        # All are there before the first step, but for who dies as it joins.
        dying = [worker(start, server, W5XDE_FAILPOINTS=f"{place}=kill@1") for place in OF_WORKERS]
        last = start(*command, "--min-workers", str(len(OF_WORKERS)))
        for died in dying:
            assert died.finish() == -signal.SIGKILL, "".join(died.text[-20:])
        assert len(segments(survivor, "parameters")) == 1
        assert soon(lambda: len(segments(last, "results")) == 1), "a dead worker's results are kept"
        assert last.finish() == 0, "".join(last.text[-30:])
        ended = last.last("run_finished")
        assert survivor.finish() == 0
    assert ended["digest"] == named_digest(reference.train(jobs.wide(), steps)[0])
    assert {event["link"] for event in last.events if event["event"] == "worker_joined"} == {"shm"}
