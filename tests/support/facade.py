"""W5XDE's interface under test: a small model and its data, blocking calls in threads, servers that end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from w5xde_async.facade.w5xde import CentralServer, TrainingNode
from w5xde_async.hub.members import roster
from w5xde_async.telemetry.events import Event


class Model(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Data(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 96) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.x[index], "labels": self.y[index]}


@pytest.fixture
def no_secret_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("TOKEN", "TOKEN_FILE", "JOIN", "JOIN_FILE"):
        monkeypatch.delenv(f"W5XDE_{name}", raising=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Future[Any]]]:
    """``call(f, ...)`` runs a blocking call in a thread of its own. At their end runs wait less for who was cut off."""
    monkeypatch.setattr(roster, "_RETURN_S", 0.2)
    threads: list[threading.Thread] = []

    def call(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return future

    yield call
    for thread in threads:
        thread.join(10)


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def server_of(directory: Path | None, **kwargs: Any) -> CentralServer:
    given: dict[str, Any] = {"model": model(), "dataset": Data(), "batch_size": 16, "port": 0, "log": "silent",
                             "max_steps": 6, "checkpoint_dir": directory}  # fmt: skip
    return CentralServer(**(given | kwargs))


def serve(calls: Callable[..., Future[Any]], server: CentralServer) -> tuple[Future[Any], list[Event]]:
    events: list[Event] = []
    server.bus.subscribe(events.append)
    running = calls(server.start)
    while not server.listening.wait(0.01):
        if running.done():
            running.result()
    return running, events


def node_for(server: CentralServer, **kwargs: Any) -> TrainingNode:
    return TrainingNode(**({"model": Model, "server_address": ("localhost", server.port), "device": "cpu",
                            "timeout_s": 5.0} | kwargs))  # fmt: skip
