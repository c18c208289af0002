"""The worker's side of the sandbox and the child's, in one process: what passes between them is real, the doors are
open. What the doors keep in is ``tests/process/test_sandbox.py``'s."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from tests.support import programs
from tests.support.memory_links import memory_pair
from torch import nn

from w5xde_async.compute import engine
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import LeafSpec, Task
from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.compute.program import runner
from w5xde_async.compute.program.channel import _LEAST_SLOTS, _PLENTY, NUM_SLOTS, num_slots
from w5xde_async.compute.program.sandbox import Sandbox, Sandboxed
from w5xde_async.compute.program.tracing import probe_batches, trace
from w5xde_async.errors import LinkLost, Unreachable
from w5xde_async.job import build_model
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.slots import slot_bytes
from w5xde_async.telemetry.memory import usage_of
from w5xde_async.wire.frame import SESSION_CAPS, BufferSpec, encode
from w5xde_async.wire.messages import Lease, Params, Ready, Welcome
from w5xde_async.worker import engine_source
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.connection import Connection
from w5xde_async.worker.executors.in_place import InPlaceExecutor
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


def test_where_python_has_no_pidfd_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was built on an old system: an error that whoever waits expects."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with pytest.raises(OSError, match="not implemented"):
        Sandbox(torch.device("cpu"), threads=1, memory_bytes=1 << 30).watch()


@contextmanager
def sandboxed(
    *, copies: bool, slots: int = 0, leaves: int = 1, accumulated: int = 1
) -> Iterator[tuple[Sandboxed, Task]]:
    """``slots``: on a machine that has memory for no more results; 0: on any."""
    job = programs.TRACEABLE["mlp"]()
    model = build_model(job)
    layout = Layout.of(model, bucket_bytes=1 << 12)
    (batch,) = probe_batches(job, [job.microbatch_samples])
    samples = accumulated * job.microbatch_samples
    document = trace(job, model, layout, [batch])
    memory_bytes = layout.state_bytes + layout.vector_bytes + slots * slot_bytes(layout) if slots else 1 << 30
    made = Sandboxed(
        Here(), document, layout, LeafSpec(1, "fp32", job.microbatch_samples, accumulated), batch_bytes=1 << 20,
        memory_bytes=memory_bytes, copies=copies,
    )  # fmt: skip
    structure, tensors = flatten(batch)
    task = Task(
        step=0,
        start=0,
        samples=(samples,) * leaves,
        loss_scale=1.0,
        structure=structure,
        packed=True,
        tensors=[torch.cat([tensor] * leaves * accumulated) for tensor in tensors],
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


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_block_of_many_leaves_has_a_vector_for_each_level_where_there_is_room_for_few(
    accumulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w5xde_async.compute.program.sandbox.num_slots", lambda layout, memory_bytes: _LEAST_SLOTS)
    with sandboxed(copies=False, leaves=40, accumulated=accumulated) as (made, task):
        outcome = made.compute(task, lambda bucket, vector: None)
        assert (len(outcome.losses), outcome.splits) == (40, 0)
        assert made._in_flight == 1


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


def test_results_that_have_not_left_take_room_from_the_next_block() -> None:
    with sandboxed(copies=False, slots=6) as (made, task):
        assert made.has_room
        vectors = made.compute(task, lambda bucket, vector: None).vectors
        assert not made.has_room
        for vector in vectors:
            made.release(vector)
        assert made.has_room


def test_a_link_that_is_lost_while_the_next_block_has_no_room_ends() -> None:
    """Its compute thread waited for what its own unsent results held."""
    with sandboxed(copies=False, slots=6) as (made, task), ThreadPoolExecutor(1) as pool:
        asyncio.run(lose_link(made, task, pool))


async def lose_link(made: Sandboxed, task: Task, pool: Executor) -> None:
    near, far = memory_pair(limit_bytes=4096)
    near.caps = far.caps = SESSION_CAPS
    layout = made.layout
    welcome = Welcome("0" * 16, "served", 1, 0, "fp32", 2, 1, 1 << 12, layout.fingerprint, 1e6, 2e6)
    connection = Connection(near, welcome, ComputeThread(pool=pool))

    async def prepare(*_: Any) -> tuple[InPlaceExecutor, Ready]:
        return InPlaceExecutor(made, capacity_bytes=1 << 30), Ready(layout.fingerprint, "cpu", "test", 1, "0")

    running = asyncio.create_task(connection.run(prepare))
    await far.recv()  # READY; from here on nothing is read
    for bucket in layout.buckets:
        data = bytes(made.incoming.bucket_bytes[bucket.index])
        spec = BufferSpec("", "float32", (bucket.numel,), "raw", len(data))
        await far.send(encode(Params(0, bucket.index, len(layout.buckets), 1.0), ((spec, data),)))
    buffers = [
        (BufferSpec("", str(t.dtype).removeprefix("torch."), tuple(t.shape), "raw", t.nbytes), bytes_of(t))
        for t in task.tensors
    ]
    for number in (1, 2):
        lease = Lease(number, 0, 0, number - 1, task.samples, 60.0, False, task.structure)
        await far.send(encode(lease, buffers))
    assert connection.leases is not None
    while not connection.leases._unsent or made.has_room:  # noqa: ASYNC110 - a block's end tells nobody
        await asyncio.sleep(0)
    far.abort()
    ended, _ = await asyncio.wait([running], timeout=10.0)
    for vector in made._slots.vectors if not ended else ():  # or the thread, and this test, would never end
        made.release(vector)
    assert ended
    assert isinstance(running.exception(), LinkLost)
    assert [one.lease.lease for one in connection.unsent] == [1]


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
