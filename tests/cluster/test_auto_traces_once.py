"""A change of the update rule: what the job's program is was found out before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cluster.test_autotuning import over_a_poor_line
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings

from w5xde_async.coordinator.run.strategy_chooser import StrategyChooser
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.hub.members.program_server import ProgramServer
from w5xde_async.worker.service import Departure, Worker


@pytest.mark.slow
@pytest.mark.processes
async def test_a_change_of_the_rule_traces_nothing_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(StrategyChooser, "situation", over_a_poor_line)
    traced: list[str] = []
    trace = ProgramServer._trace

    async def counted(self: ProgramServer, reference: str, *arguments: Any) -> None:
        traced.append(reference)
        await trace(self, reference, *arguments)

    monkeypatch.setattr(ProgramServer, "_trace", counted)
    reference = f"{jobs.__file__}:mlp_sgd"
    config = settings(auto=True, code_free=True)
    async with Coordinator(
        jobs.mlp_sgd(), run_dir=tmp_path / "run", config=config, job_reference=reference
    ) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
        assert coordinator._run is not None
        assert coordinator._run.config.update.rule != "sync"  # it was changed, and its worker has no code
    assert result.outcome == "finished"
    assert traced == [reference]
