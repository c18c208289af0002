"""A worker on a GPU that is played on the CPU (tests/support/fake_cuda.py), beside a coordinator on the CPU."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.fake_cuda import ASSERTED, FakeCuda, fake_cuda
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import DeviceLost
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.params.slots import SHARED_SLOTS
from w5xde_async.runtime import Runtime, thread_pool
from w5xde_async.segments import unsupported
from w5xde_async.telemetry.events import Bus, Event, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Departure, Worker

ON_GPU = replace(QUICK_WORKER, device="cuda:0", inline_block_s=0.0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "played")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with fake_cuda(3, pace=0.1, here=False) as cuda:
        yield cuda


def on(cuda: FakeCuda) -> Runtime:
    """Its compute thread has the device."""

    def executor(count: int, name: str) -> Executor:
        if name == "w5xde-compute":
            return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=cuda.enter)
        return thread_pool(count, name)

    return Runtime(executor=executor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_sgd", "cnn_adamw", "odd"])
async def test_exact_sync_on_late_streams_is_the_plain_loop(name: str, cuda: FakeCuda) -> None:
    """Versions are received while blocks are computed, results leave while copies are under way."""
    make = jobs.ALL[name]
    async with Coordinator(make(), config=settings()) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, job=make(), config=ON_GPU, runtime=on(cuda)).run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    assert result.digest == named_digest(reference.train(make())[0])
    assert cuda.hazards == []
    assert cuda.counts.copies_out


@pytest.mark.slow
@pytest.mark.skipif(unsupported() != "", reason=unsupported())
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("name", ["gpt_sgd", "cnn_adamw", "odd"])
async def test_shared_memory_is_the_devices_own_source_and_target(
    name: str, refuses: bool, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies go straight from the coordinator's parameters and to where it reads results; where CUDA does not take such
    memory, they wait. The bits are the plain loop's, and nothing stays registered."""
    monkeypatch.setattr("w5xde_async.params.layout._SMALL_BYTES", 0)
    make, cuda.refuses, most = jobs.ALL[name], refuses, 0
    register = cuda.cudaHostRegister

    def registering(address: int, nbytes: int, flags: int) -> int:
        nonlocal most
        code = register(address, nbytes, flags)
        most = max(most, len(cuda.registered))
        return code

    monkeypatch.setattr(cuda, "cudaHostRegister", registering)
    config = replace(ON_GPU, link="shm")
    async with Coordinator(make(), config=settings()) as coordinator:
        running = asyncio.create_task(Worker(coordinator.address, job=make(), config=config, runtime=on(cuda)).run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    assert result.digest == named_digest(reference.train(make())[0])
    assert cuda.hazards == []
    gc.collect()
    assert cuda.registered == {}
    assert (most == 0) if refuses else 2 <= most <= 1 + SHARED_SLOTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "update",
    [{"codec": "lz4", "downlink": "lz4"}, {"rule": "local", "inner_steps": 3, "codec": "int8"}, {"codec": "int4"},
     {"codec": "topk:0.1"}, {"codec": "lz4:int8", "feedback": False}],
    ids=str,
)  # fmt: skip
async def test_local_steps_and_codecs_on_late_streams(update: dict[str, Any], cuda: FakeCuda) -> None:
    """The bits are those of a worker on the CPU."""
    digests = []
    for config, runtime in ((ON_GPU, on(cuda)), (QUICK_WORKER, Runtime())):
        given = settings(update=UpdateConfig(**update), norm_gate=0.0)
        async with Coordinator(jobs.gpt_sgd(), config=given) as coordinator:
            worker = Worker(coordinator.address, job=jobs.gpt_sgd(), config=config, runtime=runtime)
            running = asyncio.create_task(worker.run())
            digests.append((await coordinator.wait()).digest)
            assert await running is Departure.FINISHED
    assert digests[0] == digests[1]
    assert cuda.hazards == []


class Asserts(nn.Module):
    """Its kernel asserts for one sample; on a CPU there is nothing wrong with that."""

    def __init__(self, trip: Callable[[], None]) -> None:
        super().__init__()
        self.net, self.trip = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)), trip

    def forward(self, x: Tensor) -> Tensor:
        if (x == 7.0).any():
            self.trip()
        out: Tensor = self.net(x.clamp(max=1.0))
        return out


async def test_an_asserting_kernel_costs_a_worker_and_no_bit(cuda: FakeCuda) -> None:
    """Its leaf is reported, another worker computes it, and nobody is held to have died."""
    x, y = [tensor.clone() for tensor in jobs.digits()]
    x[700] = 7.0

    def job(trip: Callable[[], None] = lambda: None) -> Job:
        return replace(
            jobs.mlp_sgd(), model=lambda: Asserts(trip), dataset=TensorDataset(x, y), loss=F.cross_entropy, max_steps=10
        )

    def trips() -> None:
        cuda.trip(calls=40)  # the error shows some calls later

    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    async with Coordinator(job(), config=settings(), bus=bus) as coordinator:
        with pytest.raises(DeviceLost, match="device-side assert"):
            await Worker(coordinator.address, job=job(trips), config=ON_GPU, runtime=on(cuda)).run()
        running = asyncio.create_task(Worker(coordinator.address, job=job(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await running is Departure.FINISHED
    said = [event.text for event in events if isinstance(event, Warned)]
    assert any("failed on step" in text and ASSERTED in text for text in said), said
    assert result.digest == named_digest(reference.train(job())[0])
