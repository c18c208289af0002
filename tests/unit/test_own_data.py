"""A worker's own copy of the data: which shards of it are the run's, and the batches that are made of it."""

from __future__ import annotations

import asyncio
import os
import select
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from w5xde_async.data.config import ReadersConfig
from w5xde_async.data.shards import fingerprints, shard_samples, shards_of
from w5xde_async.errors import LocalError, MalformedFrame
from w5xde_async.job import Job, load_job
from w5xde_async.runtime import thread_pool
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Lease
from w5xde_async.worker.connection import own_data
from w5xde_async.worker.connection.own_data import OwnData

JOB = """
import torch
from torch import nn
from w5xde_async import Job

def local_data(where):
    return [(torch.full((2,), float(index)), index, where) for index in range(20)]

def job():
    return Job(model=nn.Identity, dataset=local_data("there"), local_data=local_data, optimizer=lambda m: None,
               batch_size=4, epochs=1)
"""
LEASE = Lease(1, 0, 3, 4, (2, 1), 1.0, False, b"", local=True)


class Numbers(Dataset[Any]):
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if np.isnan(self.values[index]):
            raise OSError("not there")
        return torch.tensor([self.values[index]]), index


def job(values: list[float]) -> Job:
    return Job(
        model=nn.Identity, dataset=Numbers(values), optimizer=lambda m: None, batch_size=2, epochs=1,
        local_data=lambda where: Numbers(values),
    )  # type: ignore[arg-type, return-value]  # fmt: skip


def shards(values: list[float]) -> tuple[int, ...]:
    return fingerprints(job(values)).shards


@pytest.mark.parametrize("num", [1, 2, 63, 64, 65, 1000])
def test_each_shard_has_a_fingerprint_of_its_own_samples(num: int) -> None:
    values = [float(index) for index in range(num)]
    found = shards(values)
    assert shards(values) == found
    assert len(found) == -(-num // shard_samples(num)) <= 64
    assert shards_of(np.arange(num), num) == frozenset(range(len(found)))
    last = num - 1  # the last one of a shard is looked at
    for changed in ([*values[:last], -1.0], [*values[:last], float("nan")]):
        other = shards(changed)
        assert other[:-1] == found[:-1]
        assert other[-1] != found[-1]
    assert other[-1] == 0
    assert not set(shards([*values, 0.0])) & set(found)


def test_another_order_is_other_data() -> None:
    values = [float(index) for index in range(200)]
    assert not set(shards(values[::-1])) & set(shards(values))


@pytest.mark.slow
@pytest.mark.allow_leaks  # what Python starts beside spawned processes stays
async def test_processes_open_the_copy_by_the_jobs_name(tmp_path: Path) -> None:
    """Each loads the job anew, and reads what the worker was told to."""
    path = tmp_path / "training.py"
    path.write_text(JOB)
    reference = f"{path}:job"
    loaded = await asyncio.to_thread(load_job, reference)
    own = OwnData(
        loaded, "here", ReadersConfig(loader_processes=1), reference=reference, make_pool=thread_pool
    )  # fmt: skip
    structure, packed, tensors = await own.read(LEASE, torch.tensor([7, 3, 19]), seed=1)
    await own.aclose()
    assert b"here" in structure
    assert not packed
    assert [tensor.tolist() for tensor in tensors] == [[[7.0, 7.0], [3.0, 3.0]], [7, 3], [[19.0, 19.0]], [19]]


async def test_samples_that_it_has_not_got() -> None:
    own = OwnData(job([0.0, 1.0]), "here", ReadersConfig(), reference="", make_pool=thread_pool)
    for indices in ([0, 1, 2], [-1, 0, 1]):
        with pytest.raises(IndexError, match="of 2"):
            await own.read(LEASE, torch.tensor(indices), seed=1)
    await own.aclose()


@pytest.mark.parametrize(
    "spec",
    [("int64", (2,)), ("int32", (3,)), ("int64", (3, 1)), ("float32", (3,))],
)
async def test_a_lease_names_its_samples_in_one_way(spec: tuple[str, tuple[int, ...]]) -> None:
    own = OwnData(job([0.0, 1.0]), "here", ReadersConfig(), reference="", make_pool=thread_pool)
    own.check(LEASE, [BufferSpec("", "int64", (3,), "raw", 24)])
    right = BufferSpec("", *spec, "raw", 24)
    for lease, specs in ((LEASE, [right]), (LEASE, []), (structs.replace(LEASE, packed=True), [right])):
        with pytest.raises(MalformedFrame, match="in another way"):
            own.check(lease, specs)
    await own.aclose()


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_read_that_hangs_does_not_keep_a_worker_joining(
    processes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It joins without the data, and has them on a later link if the disk has come back; where a thread reads, which
    holds the random numbers of the process, it ends."""
    if processes and not hasattr(os, "fork"):
        pytest.skip("the job is inherited by fork")
    monkeypatch.setattr(own_data, "_SILENT_S", 0.05)
    hangs, ends = os.pipe()  # a read of it returns once the other end was written to

    class Hanging(Numbers):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            assert index != 1 or select.select([hangs], [], [], 60)[0]
            return super().__getitem__(index)

    values = [0.0, 1.0, 2.0]
    made = replace(job(values), local_data=lambda where: Hanging(values))
    own = OwnData(made, "", ReadersConfig(loader_processes=processes), reference="", make_pool=thread_pool)
    joining = asyncio.ensure_future(own.shards())
    await asyncio.sleep(0)
    assert own.activity == "reading its own data, 0 s for one sample"
    if processes:
        assert await joining == ()
        assert "joins without its own data" in caplog.text
        assert await own.shards() == ()  # of the next link, which does not wait for it anew
    else:
        with pytest.raises(LocalError, match=r"nothing can be computed in the process that .* --loader-processes"):
            await joining
    assert not own.activity
    os.write(ends, b"\0")
    monkeypatch.setattr(own_data, "_SILENT_S", 60.0)
    assert await own.shards() == shards(values)
    assert await own.aclose()
    os.close(hangs)
    os.close(ends)


async def test_rows_that_hang_are_not_said_to_be_read_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tensors that lie in a mapped file: they are gathered here in any case."""
    monkeypatch.setattr(own_data, "_SILENT_S", 0.0)
    rows = TensorDataset(torch.zeros(4, 2))
    made = replace(job([0.0]), dataset=rows, local_data=lambda where: rows)
    own = OwnData(made, "", ReadersConfig(loader_processes=1), reference="", make_pool=thread_pool)
    with pytest.raises(LocalError, match="start the worker without --local-data, and it is sent its data"):
        await own.shards()
    await own.aclose()
