"""Batches of every type that PyTorch users have: a run has the bits of the plain loop, or says at its start why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.support import reference
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import JobError, LeafFailed
from w5xde_async.job import Job
from w5xde_async.plan.pacing import PacingConfig

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


class Rows(Dataset[dict[str, Tensor]]):
    """Samples that are dicts of a tensor of each type."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def columns(dtypes: list[torch.dtype]) -> list[Tensor]:
    values = torch.randint(0, 2, (30, 3), generator=torch.Generator().manual_seed(0))
    return [values.to(dtype) for dtype in dtypes]


def _step(model: nn.Module, batch: Any) -> Tensor:
    tensors = batch.values() if isinstance(batch, dict) else batch
    real = [torch.view_as_real(t).sum(-1).float() if t.is_complex() else t.float() for t in tensors]
    loss: Tensor = model(torch.cat(real, 1)).square().mean()
    return loss


def job(dataset: Any, width: int) -> Job:
    return Job(
        model=lambda: nn.Linear(width, 4), dataset=dataset, step=_step, batch_size=12, microbatch_size=2, max_steps=4,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("tensors", [True, False])
async def test_every_type_arrives(tensors: bool) -> None:
    found = columns(DTYPES)
    conjugate = torch.randn(30, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).conj()
    found.append(conjugate)  # a view whose bytes say something else
    dataset = TensorDataset(*found) if tensors else Rows({str(i): column for i, column in enumerate(found)})
    wanted = job(dataset, 3 * len(found))
    result = await train(lambda: wanted, workers=2, code_free=False)
    assert result.digest == reference.digest(wanted)


class Growing(Dataset[Tensor]):
    """Samples of which later ones are larger."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4 if index < 20 else 20_000, 3), 0.5)


async def test_leaves_that_grow_are_leased_in_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker would leave for good over a lease that is larger than its memory limit."""
    monkeypatch.setattr("w5xde_async.data.loader._LEASE_BYTES", 500_000)
    config = dataclasses.replace(QUICK_WORKER, memory_limit_bytes=1_200_000)
    monkeypatch.setattr("tests.support.cluster.QUICK_WORKER", config)
    wanted = dataclasses.replace(
        job(Growing(), 3), step=lambda model, batch: model(batch.mean(1)).square().mean(), microbatch_size=1,
        batch_size=40, max_steps=4, shuffle=False,
    )  # fmt: skip
    result = await train(lambda: wanted, code_free=False, prefetch_leaves=1,
                         pacing=PacingConfig(target_lease_s=60.0))  # fmt: skip
    assert result.digest == reference.digest(wanted)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("tensors", [True, False])
async def test_what_does_not_travel_is_refused_before_any_lease(tensors: bool) -> None:
    [column] = columns([torch.complex32])
    dataset = TensorDataset(column) if tensors else Rows({"x": column})
    with pytest.raises(JobError if tensors else LeafFailed, match="complex32, which does not travel"):
        async with Coordinator(job(dataset, 3), config=settings(code_free=False)) as coordinator:
            await coordinator.wait()
