"""Guava's interface with a model in pieces: real processes, the bits of data parallelism."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.facade import calls, no_secret_of_this_machine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from w5xde_async.errors import W5xdeError
from w5xde_async.facade.guava import DistributedConfig, NetworkWorker, Orchestrator
from w5xde_async.telemetry.events import Event, RunFinished, StepCommitted, WorkerJoined

__all__ = ["calls", "no_secret_of_this_machine"]

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(180)]

Call = Callable[..., Future[Any]]


@pytest.fixture(autouse=True)
def one_thread(no_secret_of_this_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("W5XDE_THREADS", "1")


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Embedding(16, 32), *layers, nn.Linear(32, 16))


def config(directory: Path, **fields: Any) -> DistributedConfig:
    return DistributedConfig(master_port=0, learning_rate=1e-2, checkpoint_dir=str(directory), **fields)


class Run:
    """An orchestrator that trains in a thread; its first batch is there once ``members`` workers are."""

    def __init__(self, call: Call, config: DistributedConfig, mode: Any, members: int = 1) -> None:
        self.orchestrator = Orchestrator(config, mode=mode)
        self.orchestrator.register_model(model())
        self.events: list[Event] = []
        self._members, self._all_here = members, threading.Event()
        self.orchestrator.bus.subscribe(self._on_event)
        tokens = torch.randint(16, (96, 4), generator=torch.Generator().manual_seed(0))
        self._data = TensorDataset(tokens, (tokens + 1) % 16)
        self.ended = call(self.orchestrator.start_training, DataLoader(self, batch_size=8, shuffle=True), 4)

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerJoined) and event.num_workers >= self._members:
            self._all_here.set()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if self.orchestrator.listening.is_set():
            assert self._all_here.wait(100)
        return self._data[index]

    def result(self) -> Any:
        ended = self.ended.result(150)
        assert ended.outcome == "finished"
        losses = [event.loss for event in self.events if isinstance(event, StepCommitted)]
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
        return ended

    def workers(self) -> int:
        """Those whose results counted."""
        (end,) = (event for event in self.events if isinstance(event, RunFinished))
        return sum(share.leaves > 0 for share in end.shares)


def test_on_this_machine_the_bits_are_those_of_as_many_batches_in_parallel(calls: Call, tmp_path: Path) -> None:
    pipeline = {"pipeline_parallel": True, "micro_batches": 2}
    pieces, whole = [
        Run(calls, config(tmp_path / name, num_workers=2, **fields), "local").result()
        for name, fields in (("pieces", pipeline), ("whole", {}))
    ]
    assert pieces.step == whole.step == 24
    assert pieces.digest == whole.digest


@pytest.mark.parametrize(("fields", "batches", "islands"), [({"model_parallel": True}, 1, 1)])
def test_workers_that_know_an_address_alone_hold_a_model_together(
    fields: dict[str, bool], batches: int, islands: int, calls: Call, tmp_path: Path
) -> None:
    """Its bits are those of as many workers that each hold the whole."""
    run = Run(calls, config(tmp_path / "pieces", num_workers=2, **fields), "orchestrator", members=islands)
    assert run.orchestrator.listening.wait(60)
    address = "localhost", run.orchestrator.port
    workers = [calls(NetworkWorker(0, DistributedConfig(), *address).connect_and_train) for _ in range(2 * islands)]
    pieces = run.result()
    for worker in workers:
        worker.result(60)
    assert run.workers() == islands
    whole = Run(calls, config(tmp_path / "whole", num_workers=batches), "orchestrator")
    assert whole.orchestrator.listening.wait(60)
    single = [
        calls(NetworkWorker(0, DistributedConfig(), "localhost", whole.orchestrator.port).connect_and_train)
        for _ in range(batches)
    ]
    assert pieces.digest == whole.result().digest
    for worker in single:
        worker.result(60)


class Branching(nn.Module):
    """What it computes depends on values: no program can be made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(tokens)
        return embedded if embedded.sum().item() < 1e9 else 2 * embedded


def test_what_cannot_be_cut_says_what_to_leave_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    orchestrator = Orchestrator(config(tmp_path, num_workers=2, model_parallel=True))
    orchestrator.register_model(Branching())
    tokens = torch.zeros(32, 4, dtype=torch.int64)
    with pytest.raises(W5xdeError):
        orchestrator.start_training(DataLoader(TensorDataset(tokens, tokens), batch_size=8))
    said = capfd.readouterr().err
    assert "leave out model_parallel, pipeline_parallel and tensor_parallel" in said
    assert 'mode="local"' not in said
