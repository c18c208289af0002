"""Workers with ``deterministic``: what they refuse, and that they count as another kind of machine."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings
from torch import Tensor, nn

from w5xde_async.compute.program.sandbox import Sandbox
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import LeafFailed, LocalError
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.worker.service import Worker

DETERMINISTIC = replace(QUICK_WORKER, deterministic=True)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


async def train(monkeypatch: pytest.MonkeyPatch, job: Job, config: Any) -> tuple[str, list[str]]:
    """The digest, and how workers called their devices."""
    devices = list[str]()
    async with Coordinator(job, config=settings(max_leaf_failures=1)) as coordinator:
        introduce = coordinator._training.introduce  # type: ignore[union-attr]

        def introduced(session: Session, awaited: Sequence[int]) -> None:
            assert session.ready is not None
            devices.append(session.ready.device_name)
            introduce(session, awaited)

        monkeypatch.setattr(coordinator._training, "introduce", introduced)
        running = asyncio.create_task(Worker(coordinator.address, job=job, config=config).run())
        try:
            result = await coordinator.wait()
        finally:
            await asyncio.gather(running, return_exceptions=True)
    return result.digest, devices


async def test_it_is_another_machine_with_the_same_bits_where_kernels_were_deterministic_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, (usual,) = await train(monkeypatch, jobs.mlp_sgd(), QUICK_WORKER)
    same, (named,) = await train(monkeypatch, jobs.mlp_sgd(), DETERMINISTIC)
    assert same == plain
    assert named == f"{usual}, deterministic kernels"


def scattering(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Which of the values that go to one place stays there is nobody's choice."""
    x, y = batch
    kept = torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    return nn.functional.cross_entropy(model(x), y) + 0 * kept.sum()


async def test_what_has_no_such_kernel_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(jobs.mlp_sgd(), loss=None, step=scattering)
    assert (await train(monkeypatch, job, QUICK_WORKER))[0]
    with pytest.raises(LeafFailed, match=r"put_.*does not have a deterministic implementation"):
        await train(monkeypatch, job, DETERMINISTIC)


def test_the_sandbox_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **_: Any) -> Any:
        commands.append(command)
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", start)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        with pytest.raises(LocalError):
            Sandbox(torch.device("cpu"), threads=1, memory_bytes=1 << 30).start()
    assert [command[-1] for command in commands] == ["0", "1"]
