"""Who asks for the program while it is being made: one answer each, and nothing is kept for who has left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import LocalError
from w5xde_async.hub.members import program_server
from w5xde_async.hub.members.program_server import ProgramServer, _frame
from w5xde_async.params.layout import Layout
from w5xde_async.telemetry.events import Bus
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.messages import Program, ProgramRequest


class Asking:
    """As much of a session as is asked for here."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.told: list[object] = []

    def refuse(self, refusal: object) -> None:
        self.told.append(refusal)


async def test_a_session_waits_once_and_only_while_it_lasts() -> None:
    programs = ProgramServer(Layout.of(nn.Linear(2, 2)), CoordinatorConfig(), Bus())
    stays: Any = Asking()
    for _ in range(1000):
        programs.ask(stays, ProgramRequest(1, b""))
        left: Any = Asking()
        programs.ask(left, ProgramRequest(1, b""))
        left.ended.set()
    assert len(programs._waiting) <= 2
    programs.set(None, "")
    assert len(stays.told) == 1
    assert not programs._waiting


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("error", [OSError(11, "no room"), LocalError("no room")])
async def test_it_is_traced_for_who_asks_or_while_nobody_computes(
    monkeypatch: pytest.MonkeyPatch, idle: bool, error: Exception
) -> None:
    """A child that traces would take a core from workers on this machine, which have the job's code."""
    started: list[str] = []

    async def fails(*command: str, **options: object) -> None:
        started.append(command[-3])
        raise error

    monkeypatch.setattr(program_server, "_AFTER_S", 0.0)
    monkeypatch.setattr(program_server, "start_process", fails)
    programs = ProgramServer(Layout.of(nn.Linear(2, 2)), CoordinatorConfig(code_free=True), Bus())
    running = asyncio.create_task(programs.run("train.py:job", 4, None, idle=lambda: idle))
    await asyncio.wait([running], timeout=0.05)
    assert started == (["train.py:job"] if idle else [])
    asks: Any = Asking()
    programs.ask(asks, ProgramRequest(1, b""))
    await asyncio.wait([running], timeout=5.0)
    assert started == ["train.py:job"]
    (told,) = asks.told
    assert told.reason.endswith("no process could be started for it (no room)")
    await running


class Child:
    """A process that traces until ``ends``."""

    pid, stdout = 7, None

    def kill(self) -> None:
        raise ProcessLookupError

    async def wait(self) -> int:
        return 0


@pytest.mark.parametrize("computes", [True, False])
async def test_it_gives_way_as_soon_as_somebody_computes(monkeypatch: pytest.MonkeyPatch, computes: bool) -> None:
    """Until then everybody waits for it: on a busy machine it must not be the last."""
    ends, gave_way, at_work, niced = asyncio.Event(), asyncio.Event(), [False], list[int]()

    async def started(*_: str, **__: object) -> Any:
        return Child()

    def gives_way(child: Any) -> None:
        niced.append(child.pid)
        gave_way.set()

    async def output(child: Any) -> bytes:
        await ends.wait()
        return b""

    monkeypatch.setattr(program_server, "_LOOK_S", 0.001)
    monkeypatch.setattr(program_server, "start_process", started)
    monkeypatch.setattr(program_server, "_output", output)
    monkeypatch.setattr(program_server, "_give_way", gives_way)
    programs = ProgramServer(Layout.of(nn.Linear(2, 2)), CoordinatorConfig(code_free=True), Bus())
    asks: Any = Asking()
    programs.ask(asks, ProgramRequest(1, b""))
    assert list(programs.awaited_by) == [asks]
    running = asyncio.create_task(programs.run("train.py:job", 4, None, idle=lambda: not at_work[0]))
    await asyncio.wait([running], timeout=0.02)
    assert not niced
    at_work[0] = computes
    if computes:
        await gave_way.wait()
    ends.set()
    await running
    assert niced == [7] * computes
    assert asks.told
    assert not programs.awaited_by


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="has no nice")
def test_a_child_that_gives_way_is_nice() -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE) as child:
        before = os.getpriority(os.PRIO_PROCESS, child.pid)
        program_server._give_way(child)  # type: ignore[arg-type]
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(before + 5, 19)
        child.kill()
    program_server._give_way(child)  # type: ignore[arg-type]  # which has ended


@pytest.mark.parametrize("left", [2, 20, 900])
def test_what_a_child_said_before_it_was_killed_is_no_program(left: int) -> None:
    programs = ProgramServer(Layout.of(nn.Linear(2, 2)), CoordinatorConfig(), Bus())
    text = bytes(1000)
    said = b"".join(encode(Program(bytes(32)), [(BufferSpec("", "uint8", (1000,), "raw", 1000), text)]))
    document, why, _ = programs._read(said[:left], 1)
    assert document is None
    assert why.startswith("the process that traces ended ")


READS = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from w5xde_async import Job

def step(model, batch):
    assert not sys.stdin.readline()
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

job = Job(
    model=lambda: nn.Linear(4, 3), dataset=TensorDataset(torch.ones(8, 4), torch.arange(8) % 3), step=step, max_steps=1,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""


@pytest.mark.slow
def test_a_step_that_reads_standard_input_is_traced(tmp_path: Path) -> None:
    """The coordinator holds the other end of that, and says nothing: the first worker would wait for ever."""
    (tmp_path / "reads.py").write_text(READS)
    command = [sys.executable, "-m", "w5xde_async.compute.program", f"{tmp_path}/reads.py:job", str(1 << 20), "4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.wait(50) == 0
            assert child.stdout is not None
            assert isinstance(_frame(child.stdout.read())[0], Program)
        finally:
            child.kill()
