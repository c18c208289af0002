"""A model whose parameters are of half precision, and updates that break off: what is saved is of one version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.oracle import BATCH, PLAIN, applied, job
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.parameters.delta_publisher import DeltaPublisher
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import UpdateFailed
from w5xde_async.job import Job
from w5xde_async.telemetry.events import Event, StepCommitted
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Worker


class Mixed(nn.Module):
    """Three dtypes of parameters, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.narrow = nn.Linear(64, 64).to(torch.bfloat16)
        self.tiny = nn.Parameter(torch.ones(64, dtype=torch.float16))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(torch.relu(self.first(x)).to(torch.bfloat16)).float()
        out: Tensor = self.head(hidden * self.tiny.float())
        return out


def mixed() -> Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=generator)
    return Job(
        model=Mixed, dataset=TensorDataset(x, x[:, :1] + x[:, 1:2]), loss=nn.functional.mse_loss, batch_size=24,
        microbatch_size=6, epochs=4, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    )  # fmt: skip


@pytest.mark.parametrize(
    "update",
    [{"codec": "int8"}, {"downlink": "int8"}, {"downlink": "bf16"}, {"codec": "lz4"}, {"codec": "topk:0.1"}],
    ids=str,
)
async def test_parameters_of_half_precision_with_a_coded_downlink(update: dict[str, Any]) -> None:
    events: list[Event] = []
    result = await train(mixed, workers=2, events=events, update=UpdateConfig(**update))
    losses = [event.loss for event in events if isinstance(event, StepCommitted)]
    assert result.step == 16
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize("rule", ["sync", "async", "local", "async-local", "streaming"])
async def test_what_breaks_off_between_an_update_and_its_version_is_not_saved(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run applies each sample once, wherever the first one broke off."""
    from dataclasses import replace

    update, path = replace(PLAIN[rule], downlink="lz4"), tmp_path / "run"
    advance, calls = DeltaPublisher.advance, 0

    def fail(publisher: DeltaPublisher, changed: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ValueError("planted")
        return advance(publisher, changed)

    config = settings(update=update, checkpoint_every=1)
    with monkeypatch.context() as patched:
        patched.setattr(DeltaPublisher, "advance", fail)
        async with Coordinator(job(), run_dir=path, config=config) as coordinator:
            working = asyncio.create_task(Worker(coordinator.address, job=job(), config=QUICK_WORKER).run())
            with pytest.raises(UpdateFailed, match="planted"):
                await coordinator.wait()
            await asyncio.gather(working, return_exceptions=True)
    async with Coordinator(job(), run_dir=path, config=config, bus=(commits := Commits()).bus) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=job(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await working
    assert commits.step == result.step == 256 // BATCH
    assert result.model_path is not None
    counts = applied(result.model_path)
    if rule == "streaming":  # the checkpoint may have a Delta in an open round: the new worker's is averaged with it
        assert all(count <= 1.0 for copy in counts for count in copy)
    else:
        assert counts == [[1.0] * 256] * 2
