"""The same job on this machine's accelerator: CUDA where there is one, else MPS, else the CPU (the name says which)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import settings
from torch import Tensor

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import Task
from w5xde_async.compute.engine import Engine, choose_device
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.params.flat import ResultVector
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

DEVICE = choose_device("auto")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def task(job: Job, leaves: int) -> Task:
    samples = [job.dataset[index] for index in range(leaves * job.leaf_samples)]
    batch = tuple(torch.stack(column) for column in zip(*samples, strict=True))
    structure, tensors = flatten(batch)
    return Task(
        step=0, start=0, samples=(job.leaf_samples,) * leaves, loss_scale=1.0, structure=structure, packed=True,
        tensors=tensors,
    )  # fmt: skip


def block_sum(engine: Engine, given: Task) -> tuple[list[int], Tensor, float]:
    """Compute a block: the order of its buckets, a copy of its gradient, its mean loss."""
    order: list[int] = []
    pieces: dict[int, Tensor] = {}

    def emit(bucket: int, vector: ResultVector) -> None:
        order.append(bucket)
        pieces[bucket] = vector.buckets[bucket].clone()

    outcome = engine.compute(given, emit)
    for vector in outcome.vectors:
        engine.release(vector)
    gradient = torch.cat([pieces[bucket].float() for bucket in sorted(pieces)])
    return order, gradient, sum(outcome.losses) / len(outcome.losses)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any call that waits for the device raises (CUDA; elsewhere nothing is asynchronous)."""
    if DEVICE.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it may change its mind about this mode
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def engines(job: Job) -> tuple[Engine, Engine]:
    return Engine(job, device="cpu", bucket_bytes=64 << 10), Engine(job, device=DEVICE, bucket_bytes=64 << 10)


@pytest.mark.parametrize("name", ["mlp_sgd", "cnn_sgd", "gpt_adamw"])
@pytest.mark.parametrize("leaves", [1, 2, 3, 8])
def test_block_sums_agree_with_the_cpu(name: str, leaves: int) -> None:
    job = jobs.ALL[name]()
    job = replace(job, model=lambda: without_dropout(jobs.ALL[name]().model()))  # type: ignore[operator]
    host, device = engines(job)
    try:
        given = task(job, leaves)
        for _ in range(3):
            expected, actual = block_sum(host, given), block_sum(device, given)
            assert sorted(actual[0]) == sorted(expected[0])
            assert len(set(actual[0])) == len(actual[0])
            assert actual[2] == pytest.approx(expected[2], rel=1e-4)
            torch.testing.assert_close(actual[1], expected[1], rtol=2e-2, atol=2e-4 * float(expected[1].abs().max()))
    finally:
        host.close()
        device.close()


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def test_the_same_block_gives_the_same_bits_again() -> None:
    job = jobs.gpt_adamw()
    engine = Engine(job, device=DEVICE, bucket_bytes=64 << 10)
    try:
        given = task(job, 4)
        first = block_sum(engine, given)[1]
        for _ in range(3):
            assert torch.equal(block_sum(engine, given)[1], first)
    finally:
        engine.close()


def test_nothing_synchronises_inside_a_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.cnn_sgd()
    engine = Engine(job, device=DEVICE, bucket_bytes=64 << 10)
    try:
        given = task(job, 4)
        block_sum(engine, given)  # the first leaf of an engine's life may look at buffers' values
        leaf, entered = engine._leaf, []

        def watched(*args: object, **kwargs: object) -> None:
            entered.append(1)
            with no_synchronisation():
                leaf(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "_leaf", watched)
        block_sum(engine, given)
        assert len(entered) == 4
    finally:
        engine.close()


def test_lack_of_memory_halves_the_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.mlp_sgd()
    engine = Engine(job, device=DEVICE, bucket_bytes=64 << 10)
    try:
        given = task(job, 2)
        _, expected, loss = block_sum(engine, given)
        step = engine._step

        def hungry(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> object:
            if len(batch[0]) > job.leaf_samples // 3:
                raise torch.OutOfMemoryError("too large")
            return step(model, batch)

        monkeypatch.setattr(engine, "_step", hungry)
        _, actual, again = block_sum(engine, given)
        assert again == pytest.approx(loss, rel=1e-4)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["cnn_adamw", "half_precision"])
async def test_a_run_on_the_device_learns_what_the_plain_loop_learns(name: str) -> None:
    job = jobs.ALL[name]()
    _, losses = reference.train(job)
    async with Coordinator(job, config=settings(max_time_s=100.0)) as coordinator:
        worker = Worker(coordinator.address, job=jobs.ALL[name](), config=WorkerConfig(device=str(DEVICE)))
        await worker.run()
        result = await coordinator.wait()
    assert result.outcome == "finished"
    assert result.loss == pytest.approx(losses[-1], rel=0.15)
