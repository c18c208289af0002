"""Random numbers of this machine's accelerator, and its memory after an engine's end."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from tests.support import jobs
from torch import Tensor
from torch.nn import functional as F

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import Task
from w5xde_async.compute.engine import Engine, choose_device
from w5xde_async.job import Job
from w5xde_async.randomness import has_drawn, random_state, seed_all

DEVICE = choose_device("auto")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def attended(p: float) -> Tensor:
    return F.scaled_dot_product_attention(*[torch.ones(1, 2, 16, 32, device=DEVICE)] * 3, dropout_p=p)


@pytest.mark.parametrize(
    ("draw", "drawn"),
    [
        (lambda: torch.rand(3, device=DEVICE), True),
        (lambda: torch.rand(3), True),
        (lambda: F.dropout(torch.ones(64, device=DEVICE), 0.5), True),
        (lambda: torch.randperm(9, device=DEVICE), True),
        (lambda: attended(0.5), True),
        (lambda: attended(0.0), False),
        (lambda: torch.ones(9, device=DEVICE).sum(), False),
    ],
)
def test_whether_the_device_drew_is_seen(draw: Callable[[], object], drawn: bool) -> None:
    with random_state():
        for seed in (0, 5, (1 << 63) - 1):
            seed_all(seed, DEVICE)
            assert not has_drawn(DEVICE)
            draw()
            assert has_drawn(DEVICE) is drawn


def task(job: Job) -> Task:
    samples = [job.dataset[index] for index in range(2 * job.leaf_samples)]
    structure, tensors = flatten(tuple(torch.stack(column) for column in zip(*samples, strict=True)))
    return Task(
        step=0, start=0, samples=(job.leaf_samples,) * 2, loss_scale=1.0, structure=structure, packed=True,
        tensors=tensors,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "drew"), [("mlp_sgd", False), ("gpt_adamw", True)])
def test_a_block_says_whether_it_drew(name: str, drew: bool) -> None:
    job = jobs.ALL[name]()
    engine = Engine(job, device=DEVICE, bucket_bytes=64 << 10)
    try:
        assert engine.compute(task(job), lambda *_: None).drew is drew
    finally:
        engine.close()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only CUDA says how much memory tensors have")
@pytest.mark.parametrize("bucket_bytes", [64 << 10, 4 << 20])
def test_a_closed_engine_leaves_nothing_on_the_device(bucket_bytes: int) -> None:
    job = jobs.gpt_adamw()
    used = []
    for _ in range(3):  # the first call of some kernels keeps a workspace
        engine = Engine(job, device=DEVICE, bucket_bytes=bucket_bytes)
        for _ in range(2):
            engine.release(engine.compute(task(job), lambda *_: None).vectors[-1])
        engine.close()
        del engine
        gc.collect()
        torch.cuda.synchronize(DEVICE)
        used.append(torch.cuda.memory_allocated(DEVICE))
    assert used[1] == used[2]
