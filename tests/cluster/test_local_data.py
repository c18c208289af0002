"""Workers that read their own copy of the data: leases name samples, and the bits are those of data that was sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cluster import QUICK_WORKER, settings
from tests.support.oracle import PLAIN
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.errors import JobError, UsageError
from w5xde_async.job import Job
from w5xde_async.telemetry.events import (
    Bus,
    Event,
    RunFinished,
    RunReported,
    SampleLeftOut,
    Warned,
    WorkerLeft,
    WorkerReported,
)
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Departure, Worker

SAMPLES, WIDTH = 192, 256
OWN = replace(QUICK_WORKER, local_data="here")


class Rows(Dataset[Any]):
    """Counts what is read; ``lacks``: what this copy has not got. ``shift``: other data."""

    def __init__(self, lacks: Sequence[int] = (), shift: float = 0.0, noisy: bool = False) -> None:
        self.lacks, self.shift, self.noisy, self.read = set(lacks), shift, noisy, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.lacks:
            raise FileNotFoundError(f"no sample {index}")
        self.read += 1
        x = torch.full((WIDTH,), index / SAMPLES + self.shift)
        if self.noisy:
            x = x + torch.rand(WIDTH)
        return {"x": x, "labels": index % 2, "name": f"sample {index}"}


def step(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def job(dataset: Any = None, copy: Callable[[str], Any] | None = None, **changes: Any) -> Job:
    return Job(**{
        "model": lambda: nn.Linear(WIDTH, 2), "dataset": Rows() if dataset is None else dataset, "step": step,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "batch_size": 16, "epochs": 4,
        "microbatch_size": 2, "local_data": copy, **changes,
    })  # fmt: skip


async def run(
    made: Job, workers: Sequence[tuple[WorkerConfig, Job]], **kwargs: Any
) -> tuple[RunResult, list[Event], int]:
    """The run, what was told of it, and the bytes that workers were sent."""
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append, samples=True)
    kwargs = {"min_workers": len(workers), "heartbeat_s": 0.05, **kwargs}
    async with Coordinator(made, config=settings(**kwargs), bus=bus) as coordinator:
        here = [Worker(coordinator.address, job=own, config=config) for config, own in workers]
        running = [asyncio.create_task(worker.run()) for worker in here]
        try:
            result = await coordinator.wait()
            assert set(await asyncio.gather(*running)) == {Departure.FINISHED}
        finally:
            await asyncio.gather(*running, return_exceptions=True)
    return result, events, sum(worker.bytes_received for worker in here)


def reads_own(copy: Any) -> tuple[WorkerConfig, Job]:
    return OWN, job(copy=lambda where: copy)


@pytest.mark.slow
@pytest.mark.parametrize("noisy", [False, True])
async def test_the_bits_are_those_of_data_that_is_sent(noisy: bool) -> None:
    # Long beside the time until fingerprints have been compared: before that, a worker is sent its data.
    sent, _, sent_bytes = await run(job(Rows(noisy=noisy), epochs=16), [(QUICK_WORKER, job())])
    ours, copy = Rows(noisy=noisy), Rows(noisy=noisy)
    own, events, own_bytes = await run(job(ours, epochs=16), [reads_own(copy)])
    assert own.digest == sent.digest
    assert copy.read >= SAMPLES
    assert own_bytes < sent_bytes / 2
    both, _, _ = await run(job(Rows(noisy=noisy), epochs=16), [reads_own(Rows(noisy=noisy)), (QUICK_WORKER, job())])
    assert both.digest == sent.digest
    told = [event for event in events if isinstance(event, WorkerReported) and event.state != "joining"]
    assert not told or told[-1].data_from in ("itself", "coordinator")
    assert all(event.sample_bytes < 2 * 4 * WIDTH for event in events if isinstance(event, RunReported))


@pytest.mark.slow
async def test_a_worker_whose_disk_hangs_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that never ends, as of a file on a server that is gone: another computes what it had. One step waits for
    it, not all: who has not finished with a lease that was taken from it is given no other."""
    monkeypatch.setattr("w5xde_async.worker.connection.own_data._READ_S", 0.2)
    comes_back, reading = threading.Event(), threading.Event()

    class Hanging(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if self.read > 500:  # fingerprints, and the first reads, which hold the random numbers of this process
                reading.set()
                comes_back.wait(30.0)
            return super().__getitem__(index)

    made = job(epochs=16)
    sent, _, _ = await run(made, [(QUICK_WORKER, made)])
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    async with Coordinator(made, config=settings(min_workers=2, heartbeat_s=0.05), bus=bus) as coordinator:
        config, own = reads_own(Hanging())
        hangs = Worker(coordinator.address, job=own, config=config)
        other = Worker(coordinator.address, job=made, config=QUICK_WORKER)
        running = [asyncio.create_task(worker.run()) for worker in (hangs, other)]
        try:
            result = await coordinator.wait()
            departures = await asyncio.wait_for(asyncio.gather(*running), 10.0)
            assert reading.is_set()
        finally:
            comes_back.set()
    assert result.digest == sent.digest
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    assert finished.leases_backed_up < 20
    assert departures == [Departure.FINISHED] * 2
    assert hangs.abandoned
    assert not other.abandoned


@pytest.mark.slow
async def test_rows_of_tensors_are_gathered_by_whoever_has_them() -> None:
    x = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) / 1e4
    data = TensorDataset(x, torch.arange(SAMPLES) % 2)

    def made(copy: Callable[[str], Any] | None = None) -> Job:
        # Long beside the time until fingerprints have been compared: before that, a worker is sent its data.
        return job(data, copy, step=None, loss=nn.functional.cross_entropy, epochs=40)

    sent, _, sent_bytes = await run(made(), [(QUICK_WORKER, made())])
    own, _, own_bytes = await run(made(), [(OWN, made(lambda where: TensorDataset(x.clone(), data.tensors[1])))])
    assert own.digest == sent.digest
    assert own_bytes < sent_bytes / 2


async def test_only_shards_with_our_fingerprint_are_named() -> None:
    """Half of a copy, a copy of other data, and one of another length: what is not the run's is sent."""
    sent, _, _ = await run(job(), [(QUICK_WORKER, job())])
    half, other = Rows(lacks=range(SAMPLES // 2, SAMPLES)), Rows(shift=1.0)
    result, events, _ = await run(job(), [reads_own(half), reads_own(other), reads_own([{"x": 1}])])
    assert result.digest == sent.digest
    told_of = sorted(event.text for event in events if isinstance(event, Warned) and "own data is not" in event.text)
    assert [" in 32 of its 64 shards" in text for text in told_of].count(True) == 1
    assert [" everywhere (other samples, another order" in text for text in told_of].count(True) == 2
    assert not [event for event in events if isinstance(event, Warned) and "cannot read" in event.text]
    told = {event.data_from for event in events if isinstance(event, WorkerReported)}
    assert told <= {"", "coordinator", "itself, 32 of 64 shards"}


@pytest.mark.parametrize(
    "rule", ["sync", "async", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("local", "async-local"))]
)
async def test_what_its_copy_lacks_a_worker_is_sent(rule: str) -> None:
    """Samples that the fingerprints did not look at: under every rule the lease keeps its place."""
    copy = Rows(lacks=[index for index in range(SAMPLES) if index % 7 == 1])
    drawn = await asyncio.to_thread(_looked_at)
    copy.lacks -= drawn
    assert copy.lacks
    sent, _, _ = await run(job(), [(QUICK_WORKER, job())], update=PLAIN[rule])
    result, events, _ = await run(job(), [reads_own(copy)], update=PLAIN[rule])
    assert (result.outcome, result.step) == ("finished", sent.step)
    if rule == "sync":
        assert result.digest == sent.digest
    told = [event.text for event in events if isinstance(event, Warned) and "its own data" in event.text]
    assert len(told) == 1
    assert "FileNotFoundError: no sample" in told[0]


async def test_what_it_lacks_is_sent_in_as_many_leases_as_it_takes() -> None:
    """All at once has more text than a message may: nobody knew that before the coordinator has read it too."""

    class Told(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            long = "x" * 100_000 * (index >= SAMPLES - 16)  # the last step of each epoch
            return super().__getitem__(index) | {"text": long}

    copy = Told(lacks=range(SAMPLES - 16, SAMPLES))
    copy.lacks -= await asyncio.to_thread(_looked_at)
    sent, _, _ = await run(job(shuffle=False), [(QUICK_WORKER, job())])
    result, events, _ = await run(job(Told(), shuffle=False), [reads_own(copy)])
    assert (result.outcome, result.digest) == ("finished", sent.digest)
    assert any("FileNotFoundError: no sample" in event.text for event in events if isinstance(event, Warned))
    (left,) = [event for event in events if isinstance(event, WorkerLeft)]
    assert left.clean


def _looked_at() -> set[int]:
    from w5xde_async.data.shards import fingerprints

    seen: set[int] = set()

    class Noted(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            seen.add(index)
            return super().__getitem__(index)

    fingerprints(job(Noted()))
    return seen


async def test_the_coordinator_says_which_samples_are_left_out() -> None:
    """Where neither can read a sample, the worker asks, and the coordinator leaves it out."""
    bad = [index for index in range(SAMPLES) if index % 50 == 4]
    sent, _, _ = await run(job(Rows(lacks=bad)), [(QUICK_WORKER, job())], max_bad_samples=9)
    result, events, _ = await run(job(Rows(lacks=bad)), [reads_own(Rows(lacks=bad))], max_bad_samples=9)
    assert result.digest == sent.digest
    assert {event.sample for event in events if isinstance(event, SampleLeftOut)} == set(bad)


@pytest.mark.slow
async def test_processes_read_it() -> None:
    sent, _, _ = await run(job(), [(QUICK_WORKER, job())])
    copy = Rows()
    result, _, _ = await run(job(), [(replace(OWN, loader_processes=1), job(copy=lambda where: copy))])
    assert result.digest == sent.digest


@pytest.mark.slow
async def test_nothing_is_read_at_the_coordinator_while_all_have_it() -> None:
    ours = Rows()
    await run(job(ours, epochs=20), [reads_own(Rows())], prefetch_leaves=2)
    assert ours.read < 20 * SAMPLES / 2


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--local-data needs --job"):
        Worker("127.0.0.1:1", config=OWN)


@pytest.mark.parametrize(
    ("copy", "said"),
    [
        (None, "the job has none; give Job"),
        (lambda where: iter(()), "it gave a tuple_iterator; give a dataset"),
        (lambda where: open("/no/such/file"), "FileNotFoundError"),
    ],
)
async def test_a_copy_that_cannot_be_opened(copy: Any, said: str) -> None:
    with pytest.raises(JobError, match=f"local_data: .*{said}|local_data.*{said}"):
        await Worker("127.0.0.1:1", job=job(copy=copy), config=OWN).run()
