"""The same job on this machine's accelerator: CUDA where there is one, else MPS, else the CPU (the name says which)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.support import blocks, jobs, reference
from tests.support.cluster import settings
from torch import Tensor

from w5xde_async.codecs.codec import BytePool
from w5xde_async.codecs.feedback import Feedback
from w5xde_async.codecs.registry import codec
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import Task
from w5xde_async.compute.engine import Engine, choose_device
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job
from w5xde_async.params.flat import ResultVector
from w5xde_async.updates.coded import coded_up
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

DEVICE = choose_device("auto")
CODECS = (
    "raw", "bf16", "fp16", "int8", "int4", "sign", "topk:0.1", "sparseloco", "lz4", "lz4-shuffle", "lz4:int8",
)  # fmt: skip
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


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


@pytest.mark.parametrize("name", ["odd", "accumulated", "metrics"])
@pytest.mark.parametrize("leaves", [1, 3, 8])
def test_blocks_of_unusual_models_agree_with_the_cpu(name: str, leaves: int) -> None:
    """bfloat16, frozen, rare and scalar parameters; leaves of several microbatches; numbers among metrics."""
    job = jobs.ALL[name]()
    job = replace(job, model=lambda: without_dropout(jobs.ALL[name]().model()))  # type: ignore[operator]
    host, device = engines(job)
    try:
        given = blocks.task(job, leaves)
        for _ in range(3):
            expected, actual = block_sum(host, given), block_sum(device, given)
            assert sorted(actual[0]) == sorted(expected[0])
            torch.testing.assert_close(actual[1], expected[1], rtol=5e-2, atol=5e-3 * float(expected[1].abs().max()))
    finally:
        host.close()
        device.close()


@pytest.mark.parametrize("left", [False, True], ids=["brought", "left"])
@pytest.mark.parametrize("name", blocks.JOBS)
def test_overlapping_copies_change_no_bit(name: str, left: bool) -> None:
    """Both streams stand still at random, results are read late, memory lacks once (bench/gpu_stress.py does more)."""
    plan, job = blocks.turns(3, 8), blocks.JOBS[name]()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis.*")  # cuBLAS asks for a variable of the environment
            with blocks.one_after_the_other(Engine(job, device=DEVICE, bucket_bytes=blocks.BUCKET_BYTES)) as engine:
                expected = blocks.play(engine, job, plan)
            with blocks.delayed_at_random(Engine(job, device=DEVICE, bucket_bytes=blocks.BUCKET_BYTES), 3) as engine:
                there = coded_up(engine.layout) if left else ()
                actual = blocks.play_again(engine, job, plan, expected.versions, 3, there)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert blocks.differences(expected.blocks, actual.blocks) == []


@pytest.mark.parametrize("numel", [5000, 300_000])
@pytest.mark.parametrize("name", [name for name in CODECS if name not in ("raw", "lz4", "lz4-shuffle")])
def test_residuals_in_host_memory_are_those_on_the_device(name: str, numel: int) -> None:
    """Verdicts of both kinds, values that are not finite: the same bytes and residuals wherever they are kept."""
    pinned = DEVICE.type == "cuda"
    host = Feedback(codec(name), {0: numel}, pool=BytePool(pinned=pinned))
    device = Feedback(codec(name), {0: numel}, pool=BytePool(device=DEVICE))
    for key in range(6):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(key))
        if key == 3:
            values[7], values[2000] = torch.nan, torch.inf
        there = values.to(DEVICE)
        first, second = host.encode(key, 0, there), device.encode(key, 0, there)
        assert first.data.device.type == "cpu"
        if key != 3:  # the scale of a block that is not finite is one of many
            assert torch.equal(first.data, second.data.cpu())
        for feedback in (host, device):
            feedback.settle(key, applied=key != 1)
    mine, theirs = host.residual(0), device.residual(0)
    assert mine is not None
    assert theirs is not None
    assert torch.equal(mine, theirs.cpu())
    decoded = torch.empty(numel)
    last = host.encode(9, 0, there)
    last.codec.decode(last.data, decoded)  # on the host, as the coordinator does
    assert decoded.isfinite().all()
    host.drop()
    assert host.pool.num_out == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
def test_the_second_device_gives_the_first_ones_bits() -> None:
    """Dropout too: each device has a generator of its own."""
    job = jobs.gpt_adamw()
    found = []
    for index in (0, 1):
        engine = Engine(job, device=torch.device("cuda", index), bucket_bytes=64 << 10)
        assert all(tensor.device.index == index for tensor in engine.tensors)
        found.append(block_sum(engine, task(job, 4))[1])
        engine.close()
    assert torch.equal(*found)


class Wide(torch.nn.Module):
    """64 MiB of parameters; 1 MiB a sample and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 1 << 18, bias=False), torch.nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.first(x)
        for _ in range(4):
            wide = torch.sin(wide)  # each keeps its input
        out: Tensor = self.last(x) + wide.mean(1, keepdim=True)
        return out


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA is needed: elsewhere memory has no limit of our own")
def test_a_leaf_larger_than_the_devices_memory_is_halved() -> None:
    job = replace(jobs.mlp_sgd(), model=Wide, microbatch_size=256, batch_size=512)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    engine = Engine(job, device=DEVICE)
    try:
        given = blocks.task(job, 1)
        _, expected, _ = block_sum(engine, given)
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_allocated(DEVICE) + 2 * engine.layout.vector_bytes + (1 << 30)  # 1.25 GiB are needed
        torch.cuda.set_per_process_memory_fraction(limit / total, DEVICE)
        outcome = engine.compute(given, lambda bucket, vector: None)
        assert outcome.splits >= 1
        for vector in outcome.vectors:
            engine.release(vector)
        _, actual, _ = block_sum(engine, given)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        engine.close()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [1, 257, 65537, 200_000])
def test_codecs_on_the_device(name: str, numel: int) -> None:
    """What the device wrote the CPU reads as the device does."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(4)
    made = codec(name)
    there = made.encode(values.to(DEVICE), BytePool(device=DEVICE))
    here = made.encode(values, BytePool())
    read_there = torch.full((numel,), 77.0, device=DEVICE)
    read_here = torch.full((numel,), 77.0)
    there.codec.decode(there.data, read_there)
    there.codec.decode(there.data.cpu(), read_here)
    torch.testing.assert_close(read_there.cpu(), read_here, rtol=1e-6, atol=1e-9)
    again = torch.full((numel,), 77.0)
    here.codec.decode(here.data, again)
    assert float((again - values).norm()) == pytest.approx(float((read_here - values).norm()), rel=1e-2, abs=1e-6)
