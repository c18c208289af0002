"""Which device each worker of a machine is given. No process is started."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from w5xde_async.cluster.worker_processes import LocalWorkers
from w5xde_async.settings.flags import read
from w5xde_async.settings.programs import CoordinatorSettings


class Asked:
    """What would have been started: (name, --device, W5XDE_DEVICE)."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []
        self.ends = asyncio.Event()

    async def start(self, *command: str, env: dict[str, str], **_: Any) -> Any:
        flag = command[command.index("--device") + 1] if "--device" in command else ""
        self.rows.append((command[command.index("--name") + 1], flag, env.get("W5XDE_DEVICE", "")))
        await self.ends.wait()  # it runs
        raise OSError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", asked.start)
    monkeypatch.delenv("W5XDE_DEVICE", raising=False)
    return asked


def with_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


async def begun(workers: LocalWorkers, count: int, asked: Asked) -> None:
    await workers.scale(count)
    for _ in range(3):
        await asyncio.sleep(0)


async def test_each_worker_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    with_devices(monkeypatch, 4)
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 4, asked)
        assert asked.rows == [(f"local-{n}", "", f"cuda:{n}") for n in range(4)]
        await begun(workers, 2, asked)
        await begun(workers, 4, asked)  # the two that are free, not the next two in turn
        assert asked.rows[4:] == [("local-4", "", "cuda:2"), ("local-5", "", "cuda:3")]


async def test_more_workers_than_devices_are_told(
    monkeypatch: pytest.MonkeyPatch, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    with_devices(monkeypatch, 2)
    caplog.set_level(logging.WARNING)
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 2, asked)
        assert not caplog.records
        await begun(workers, 5, asked)
        assert [device for _, _, device in asked.rows] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
        (told,) = [record.getMessage() for record in caplog.records]
        assert "5 workers share 2 CUDA devices" in told
        assert "--workers 2" in told


async def test_without_cuda_the_worker_chooses(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    with_devices(monkeypatch, 0)
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 2, asked)
        assert [row[1:] for row in asked.rows] == [("", "")] * 2


def test_what_the_user_asks_for_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("W5XDE_DEVICE", raising=False)

    def devices(*arguments: str) -> tuple[str, ...]:
        return read(CoordinatorSettings, ("train.py:job", *arguments), prog="")[0].worker_devices()

    assert devices() == ()
    file = tmp_path / "run.toml"
    file.write_text('[worker]\ndevice = "cpu"\n')
    assert devices("--config", str(file)) == ("cpu",)
    monkeypatch.setenv("W5XDE_DEVICE", "cuda:3")
    assert devices("--config", str(file)) == ("cuda:3",)


async def test_what_the_user_asks_for_wins(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    with_devices(monkeypatch, 4)
    monkeypatch.setenv("W5XDE_DEVICE", "cuda:3")
    async with LocalWorkers(0, address="a:1", reference="") as workers:
        await begun(workers, 1, asked)
    async with LocalWorkers(0, address="a:1", reference="", devices=("cpu",)) as workers:
        await begun(workers, 1, asked)
    assert [row[1:] for row in asked.rows] == [("", "cuda:3"), ("cpu", "cuda:3")]
