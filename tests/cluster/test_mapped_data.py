"""Datasets in mapped files: what of them is read, and that the result is that of data in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.facade import calls, no_secret_of_this_machine, node_for, serve, server_of
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from w5xde_async.plan.sampler import Sampler

__all__ = ["calls", "no_secret_of_this_machine"]

pytestmark = pytest.mark.usefixtures("no_secret_of_this_machine")

ROWS, WIDTH = 2048, 1 << 10  # 8 MiB of float32, a page a row
STEPS, BATCH = 4, 16


class Narrow(nn.Module):
    """Looks at a few columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x[:, :16])
        return out


class Rows(Dataset[Any]):
    """A dataset of one's own over ``np.memmap``: a sample is read when it is asked for."""

    def __init__(self, path: Path, read: list[int]) -> None:
        self.x, self.read = np.memmap(path / "x.bin", np.float32, "r", shape=(ROWS, WIDTH)), read

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        row = self.x[index]
        return {"input_ids": np.array(row), "labels": int(row[:16].sum() > 0)}


class Noted(Tensor):
    """Notes which rows are taken."""

    read: list[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = super().__torch_function__(func, types, args, kwargs)
        if func in (Tensor.__getitem__, Tensor.index_select):
            rows = args[-1]
            args[0].read.extend(rows.tolist() if isinstance(rows, Tensor) else range(ROWS)[rows])
        return taken.as_subclass(Tensor) if isinstance(taken, Tensor) else taken


def npy(path: Path, read: list[int]) -> TensorDataset:
    """Rows of .npy files, gathered a chunk at a time. ``c``: mapped for reading; what is written stays in memory."""
    x, y = (torch.from_numpy(np.load(path / name, mmap_mode="c")) for name in ("x.npy", "y.npy"))
    x = x.as_subclass(Noted)
    x.read = read
    return TensorDataset(x, y)


def in_memory(path: Path, read: list[int]) -> TensorDataset:
    x = np.load(path / "x.npy")
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(labels(x)))


def labels(x: Any) -> Any:
    return (x[:, :16].sum(1) > 0).astype(np.int64)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    x = np.zeros((ROWS, WIDTH), np.float32)
    x[:, :16] = np.random.default_rng(0).normal(size=(ROWS, 16))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", labels(x))
    x.tofile(tmp_path / "x.bin")
    return tmp_path


def test_only_the_rows_of_a_run_are_read_from_mapped_files(files: Path, calls: Callable[..., Any]) -> None:
    """Once each, but for the first few, by which a dataset is looked at; and the bits are those of data in memory."""
    sampler = Sampler(num_samples=ROWS, batch_size=BATCH, leaf_samples=2, seed=0)
    planned = [row for step in range(STEPS) for row in sampler.plan(step).indices.tolist()]
    digests, read = set(), {}
    for make in (npy, Rows, in_memory):
        rows = read[make] = []
        server = server_of(
            None, model=Narrow(), dataset=make(files, rows), max_steps=STEPS, batch_size=BATCH,
            optimizer_kwargs={"lr": 0.05},
        )  # fmt: skip
        running, _ = serve(calls, server)
        node_for(server, model=Narrow).train()
        digests.add(running.result(30).digest)
        del server
    assert len(digests) == 1
    for make in (npy, Rows):
        assert sorted(set(read[make]) - {0}) == sorted(set(planned) - {0})
        assert len(read[make]) <= len(planned) + 4
