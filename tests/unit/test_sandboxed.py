"""The worker's side of the sandbox and the child's, in one process: what passes between them is real, the doors are
open. What the doors keep in is ``tests/process/test_sandbox.py``'s."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from tests.support import programs
from torch import nn

from w5xde_async.compute import engine
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import LeafSpec, Task
from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.compute.program import runner
from w5xde_async.compute.program.channel import _LEAST_SLOTS, _PLENTY, NUM_SLOTS, num_slots
from w5xde_async.compute.program.sandbox import Sandbox, Sandboxed
from w5xde_async.compute.program.tracing import probe_batches, trace
from w5xde_async.errors import Unreachable
from w5xde_async.job import build_model
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.params.slots import slot_bytes
from w5xde_async.telemetry.memory import usage_of
from w5xde_async.worker import engine_source
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker


class Here(Sandbox):
    """A child that is a thread of this process."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), threads=1, memory_bytes=1 << 30)
        self.control, self.theirs = socket.socketpair()
        self._sealed = True
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            runner.serve(self.theirs)
        finally:
            self.theirs.shutdown(socket.SHUT_RDWR)

    def _death(self) -> Any:
        raise AssertionError("the child has hung up")

    def end(self) -> None:
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)
        self.control.close()
        self.theirs.close()


@contextmanager
def sandboxed(*, copies: bool) -> Iterator[tuple[Sandboxed, Task]]:
    job = programs.TRACEABLE["mlp"]()
    model = build_model(job)
    layout = Layout.of(model, bucket_bytes=1 << 12)
    (batch,) = probe_batches(job, [job.microbatch_samples])
    document = trace(job, model, layout, [batch])
    made = Sandboxed(
        Here(), document, layout, LeafSpec(1, "fp32", job.microbatch_samples, 1), batch_bytes=1 << 20,
        memory_bytes=1 << 30, copies=copies,
    )  # fmt: skip
    structure, tensors = flatten(batch)
    task = Task(
        step=0,
        start=0,
        samples=(job.microbatch_samples,),
        loss_scale=1.0,
        structure=structure,
        packed=False,
        tensors=tensors,
    )
    try:
        yield made, task
    finally:
        made.close()


@pytest.mark.parametrize("size", [1, 1 << 12, 1 << 20, 1 << 22])
@pytest.mark.parametrize("memory_bytes", [1 << 26, 1 << 28, 1 << 30, 1 << 36])
def test_what_the_child_may_fill_is_bounded_by_the_machines_memory(size: int, memory_bytes: int) -> None:
    layout = Layout.of(nn.Linear(size, 1))
    nbytes = num_slots(layout, memory_bytes) * slot_bytes(layout)
    needed = layout.state_bytes + layout.vector_bytes + nbytes
    assert needed <= memory_bytes or num_slots(layout, memory_bytes) == _LEAST_SLOTS
    assert nbytes <= max(memory_bytes // 4, _PLENTY * slot_bytes(layout))
    assert num_slots(layout, memory_bytes) == NUM_SLOTS or memory_bytes < 1 << 36


@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True])
def test_leaves_that_fail_after_some_of_them_has_left_cost_no_slot(
    monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    finish, failing = Engine._finish, False

    def fails_at_the_second(self: Engine, block: Any, bucket: Any) -> None:
        if failing and block.emitted:
            raise RuntimeError("a kernel has failed")
        finish(self, block, bucket)

    monkeypatch.setattr(engine.Engine, "_finish", fails_at_the_second)
    with sandboxed(copies=copies) as (made, task):
        sent: list[ResultVector] = []
        for vector in made.compute(task, lambda bucket, vector: None).vectors:  # buckets leave early from the second on
            made.release(vector)
        failing = True
        for _ in range(2 * NUM_SLOTS + 8):
            with pytest.raises(LeafError, match="a kernel has failed") as caught:
                made.compute(task, lambda bucket, vector: sent.append(vector))
            assert set(map(id, sent)) == set(map(id, caught.value.vectors))
            for vector in caught.value.vectors:
                made.release(vector)
            sent.clear()
        failing = False
        outcome = made.compute(task, lambda bucket, vector: None)
        assert len(outcome.losses) == 1


def test_what_another_process_uses_is_known() -> None:
    own = usage_of(os.getpid())
    assert own.host_bytes > 1 << 20
    assert own.cpu_s > 0
    assert usage_of(0) == usage_of(1 << 30) == type(own)()


async def test_a_child_has_as_many_threads_as_its_worker_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Noted(Sandbox):
        def start(self) -> None:
            begun.append(self._threads)

    monkeypatch.setattr(engine_source, "Sandbox", Noted)
    told = torch.get_num_threads() + 2
    config = WorkerConfig(device="cpu", sandbox="on", threads=told, connect_timeout_s=0.1)
    with pytest.raises(Unreachable):
        await Worker("127.0.0.1:1", config=config).run()
    assert begun == [told]


def test_a_child_computes_with_as_many_as_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    with sandboxed(copies=False):
        assert told == [3]
