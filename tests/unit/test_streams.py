"""The engine's CUDA branch on fake streams: whatever the order of events, the bits are the synchronous engine's.

Each planted fault is one that this must find: it says that the harness looks where it should.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from tests.support import fake_cuda as fakes
from tests.support import jobs
from tests.support.blocks import BUCKET_BYTES, JOBS, Line, differences, hungry, play, play_again, task, turns
from tests.support.fake_cuda import DEVICE, FakeCuda, fake_cuda
from torch import Tensor, nn
from torch.nn import functional as F

from w5xde_async.compute import transfer
from w5xde_async.compute.block import Task
from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.compute.inner import describe_inner
from w5xde_async.compute.transfer import Transfer
from w5xde_async.job import Job, build_model
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.updates.coded import coded_up
from w5xde_async.updates.outer import bucket_fragments
from w5xde_async.wire.messages import VerdictCode
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.executors.published import Published
from w5xde_async.worker.executors.replicas import SteppingReplica
from w5xde_async.worker.service import Worker

LONG = {"gpt_adamw", "accumulated", "hungry"}  # seconds each


def compare(job: Job, seed: int, *, pace: float, blocks: int, left: bool = False) -> tuple[FakeCuda, list[str]]:
    """The same blocks and versions by an engine on late streams, and by one on the CPU: what differs.

    ``left``: sums of gradients are taken from the device, as codecs take them."""
    plan = turns(seed, blocks)
    expected = play(Engine(job, device="cpu", bucket_bytes=BUCKET_BYTES), job, plan)
    with fake_cuda(seed, pace=pace) as cuda:
        engine = Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES)
        there = coded_up(engine.layout) if left else ()
        actual = play_again(engine, job, plan, expected.versions, seed, there)
        cuda.synchronize()
    return cuda, differences(expected.blocks, actual.blocks)


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=[pytest.mark.slow][name not in LONG :]) for name, make in JOBS.items()]
)
@pytest.mark.parametrize("pace", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("left", [False, True], ids=["brought", "left"])
def test_late_streams_change_no_bit(make: Callable[[], Job], pace: float, left: bool) -> None:
    cuda, differing = compare(make(), seed=len(make.__name__), pace=pace, blocks=10, left=left)
    assert differing == []
    assert cuda.hazards == []
    assert cuda.counts.copies_out


def local_steps(job: Job, engine: Engine, streaming: list[object] | None) -> list[bytes]:
    """Every pseudo-gradient of a replica that makes its own steps."""
    published = Published(engine.layout)
    published.version = 0
    published.state.copy_groups(engine.incoming)
    optimizer = job.optimizer(engine.model)
    inner = describe_inner(optimizer, engine.layout, engine.model)
    replica = SteppingReplica(engine, published, msgpack.packb({**inner, "clip": 1.0, "streaming": streaming}))
    rates = [1e-3] * len(optimizer.param_groups)
    everything = [bucket.index for bucket in engine.layout.result_buckets]
    found = []
    for step in range(8):
        replica.compute(task(job, 1 + step % 3, step), rates, lambda bucket, vector: None)
        if step % 2:
            asked = bucket_fragments(engine.layout, 2)[step // 2 % 2] if streaming else everything
            vector, _ = replica.submission(step, asked)
            found += [bytes(bytes_of(vector.buckets[bucket])) for bucket in asked]
            replica.settle([step], VerdictCode.APPLIED if step != 5 else VerdictCode.REJECTED)
    engine.close()
    return found


@pytest.mark.parametrize("name", ["cnn_adamw", "gpt_adamw", "mlp_sgd"])
@pytest.mark.parametrize("streaming", [None, [2, 1, 0.5]])
def test_local_steps_on_late_streams_have_the_same_bits(name: str, streaming: list[object] | None) -> None:
    """Optimizer and parameters stay on the device; nothing of a block leaves it."""
    job = jobs.ALL[name]()
    expected = local_steps(job, Engine(job, device="cpu", bucket_bytes=BUCKET_BYTES), streaming)
    with fake_cuda(2, pace=0.1) as cuda:
        actual = local_steps(job, Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES), streaming)
    assert actual == expected
    assert cuda.hazards == []


# -- what it finds -------------------------------------------------------------------------------------------------


def found(seeds: int = 4, *, left: bool = False) -> bool:
    """Whether some order of events shows a fault."""
    for seed in range(seeds):
        cuda, differing = compare(hungry(), seed, pace=(0.0, 0.05, 0.3, 0.8)[seed % 4], blocks=4, left=left)
        if cuda.hazards or differing:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("left", [False, True])
def test_without_a_planted_fault_nothing_is_found(left: bool) -> None:
    assert not found(left=left)


def forgets(
    owner: type, name: str, when: Callable[..., bool] = lambda *_: True
) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant: a call that is not made."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        made = getattr(owner, name)
        patch.setattr(owner, name, lambda *arguments: None if when(*arguments) else made(*arguments))

    return plant


def gives_back_at_once(patch: pytest.MonkeyPatch) -> None:
    """Host memory goes back to the pool when its last copy has begun."""
    send = Transfer.send

    def sent(self: Transfer, vector: ResultVector, host: ResultVector, bucket: int, emit: Any) -> None:
        send(self, vector, host, bucket, emit)
        self.host_pool.give(host)

    patch.setattr(Transfer, "send", sent)


def does_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    """A block is done while its copies are under way."""
    patch.setattr(Transfer, "wait", lambda self: self._copies.clear())


def does_not_wait_for_versions(patch: pytest.MonkeyPatch) -> None:
    """``load`` returns while it copies."""
    load = Transfer.load

    def loaded(self: Transfer, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            for owner in (fakes.Stream, fakes.Event):
                meanwhile.setattr(owner, "synchronize", lambda self: None)
            load(self, *arguments)

    patch.setattr(Transfer, "load", loaded)


def overwrites_before_it_waits(patch: pytest.MonkeyPatch) -> None:
    """The wait for earlier copies comes after the memory was written."""
    guard = Transfer.guard

    def guarded(self: Transfer, vector: ResultVector) -> None:
        vector.reset()
        guard(self, vector)

    patch.setattr(Transfer, "guard", guarded)


def records_before_it_copies(patch: pytest.MonkeyPatch) -> None:
    """A copy's event is recorded before the copy."""
    copied = FakeCuda.copied

    def swapped(self: FakeCuda, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        result = copied(self, target, source, non_blocking)
        if self.current.late:
            self.held = self.current.queue.pop()  # type: ignore[attr-defined]
        return result

    record = fakes.Event.record

    def recorded(self: fakes.Event, stream: Any = None) -> None:
        record(self, stream)
        held = self.cuda.__dict__.pop("held", None)
        if held is not None:
            self.cuda.current.queue.append(held)

    patch.setattr(FakeCuda, "copied", swapped)
    patch.setattr(fakes.Event, "record", recorded)


def leaves_memory_to_the_allocator(patch: pytest.MonkeyPatch) -> None:
    """A vector that the pool has no room for is freed, though the side stream still reads it."""
    patch.setattr(Transfer, "make_vector", lambda self, layout: ResultVector(layout, self.device))


@contextmanager
def planted(plant: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(forgets(fakes.Stream, "wait_event", lambda stream, _: stream.late), id="a copy waits for no sum"),
        pytest.param(forgets(Transfer, "guard"), id="memory is overwritten while it is copied"),
        pytest.param(
            forgets(fakes.Event, "synchronize", lambda event: bool(event.recording and event.recording.stream.late)),
            id="a bucket is sent before it is here",
        ),
        pytest.param(does_not_wait_for_versions, id="a version is received while the last is copied"),
        pytest.param(gives_back_at_once, id="host memory is given back early"),
        pytest.param(does_not_wait_for_copies, id="a block ends before its copies"),
        pytest.param(overwrites_before_it_waits, id="written, then waited"),
        pytest.param(leaves_memory_to_the_allocator, id="memory is freed while it is copied"),
        pytest.param(records_before_it_copies, id="recorded, then copied"),
    ],
)  # fmt: skip
def test_it_finds(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with planted(plant):
        assert found()


def test_it_finds_memory_that_is_overwritten_while_it_is_encoded() -> None:
    with planted(forgets(Transfer, "guard")):
        assert found(left=True)


# -- an error that stays ------------------------------------------------------------------------------------------


class Asserting:
    """A step whose kernel asserts on one leaf; ``raises``: Python raises on a later one, which is innocent."""

    def __init__(self, bad: int, *, cuda: FakeCuda, calls: int, raises: int = -1) -> None:
        self.leaf, self.bad, self.raises, self.cuda, self.calls = -1, bad, raises, cuda, calls

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
        self.leaf += 1
        loss = jobs.lm_loss(model(batch[0]), batch[1])
        if self.leaf == self.bad:
            self.cuda.trip(calls=self.calls)
        if self.leaf == self.raises:
            raise ValueError("something else")
        return loss, {}


@pytest.mark.parametrize("calls", [0, 1, 30, 100, 200, 400, 10_000])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_an_asserting_kernel_is_blamed_on_its_leaf_however_late_it_shows(bad: int, calls: int) -> None:
    """Every later call fails, those that would tell where it happened among them."""
    job, emitted = jobs.gpt_adamw(), dict[int, ResultVector]()
    with fake_cuda(calls, pace=0.3) as cuda:
        engine = Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES)
        line = Line(engine)
        for step in range(2):  # leaves of earlier blocks count for nothing
            line.block(task(job, 8, step))
        engine._step = Asserting(bad, cuda=cuda, calls=calls)
        with pytest.raises(LeafError) as raised:
            engine.compute(task(job, 8, 2), emitted.__setitem__)
        assert (raised.value.leaf, raised.value.device_lost) == (bad, True)
        assert fakes.ASSERTED in raised.value.error
        assert len(raised.value.vectors) >= bool(emitted)
        for vector in raised.value.vectors:
            engine.release(vector)
        assert engine._transfer.host_pool.num_out == 0
        engine.close()


def test_an_asserting_kernel_is_blamed_even_where_something_else_raises_first() -> None:
    job = jobs.gpt_adamw()
    with fake_cuda(1) as cuda:
        engine = Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES)
        engine._step = Asserting(1, cuda=cuda, calls=10_000, raises=4)
        with pytest.raises(LeafError) as raised:
            engine.compute(task(job, 8), lambda bucket, vector: None)
        assert (raised.value.leaf, raised.value.device_lost) == (1, True)
        engine.close()


def test_an_error_of_the_jobs_own_leaves_the_device() -> None:
    job = jobs.gpt_adamw()
    with fake_cuda(1) as cuda:
        engine = Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES)
        step, engine._step = engine._step, Asserting(-1, cuda=cuda, calls=0, raises=4)
        with pytest.raises(LeafError, match="something else") as raised:
            engine.compute(task(job, 8), lambda bucket, vector: None)
        assert (raised.value.leaf, raised.value.device_lost) == (4, False)
        engine._step = step
        Line(engine).block(task(job, 8))
        engine.close()


# -- what it costs -------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Many small buffers."""

    def __init__(self, count: int = 20, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norms = nn.Sequential(*[nn.BatchNorm1d(64) for _ in range(count)])
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 10).to(dtype)
        self.layers = nn.ModuleList(nn.Linear(10, 10).to(dtype) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.frozen(self.norms(x)).to(self.head.weight.dtype))
        for layer in self.layers:
            h = layer(h)
        return h.float()


def plain_launches(job: Job, given: Task) -> int:
    """What a plain loop launches for the same leaves, gradients added up by autograd."""
    model = build_model(job)
    rows = torch.split(given.tensors[0], given.samples), torch.split(given.tensors[1], given.samples)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with fake_cuda() as cuda:
        for x, y in zip(*rows, strict=True):
            F.cross_entropy(model(x), y).backward()
    return cuda.counts.launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_adds_few_launches_to_a_leaf(dtype: torch.dtype) -> None:
    """However many buffers there are, and parameters of another dtype."""
    job = replace(jobs.mlp_sgd(), model=lambda: Norms(dtype=dtype), loss=F.cross_entropy)
    given = task(job, 8)
    with fake_cuda() as cuda:
        engine = Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES)
        line = Line(engine)
        for _ in range(2):  # the first blocks of an engine's life look at the values of buffers and parameters
            line.block(given)
        before = cuda.counts.copy()
        line.block(given)
        spent = cuda.counts - before
        line.close()
    assert spent.launches - plain_launches(job, given) <= 20 * 8 + len(engine.layout.result_buckets)
    assert spent.events_made == 0
    assert spent.spinning == 1  # for the losses


def test_a_version_brings_what_changed() -> None:
    """No frozen parameters at each version; neighbours in one copy; no core is kept busy meanwhile."""
    job = replace(jobs.mlp_sgd(), model=Norms, loss=F.cross_entropy)
    with fake_cuda() as cuda:
        engine = Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES)
        trained = [b.index for b in engine.layout.buckets if engine.layout.groups[b.group].role == "grad"]
        assert len(trained) > 2
        for buckets, copies in ((trained, 1), (trained[:1], 1), (trained[::2], len(trained[::2])), ([], 0)):
            before = cuda.counts.copy()
            engine.load(buckets)
            spent = cuda.counts - before
            assert (spent.copies_in, spent.spinning) == (copies, 0)
        engine.close()


def test_numbers_cost_no_wait_for_the_device() -> None:
    job = jobs.metrics()  # one metric is a tensor, the other a number
    given = task(job, 8)
    with fake_cuda() as cuda:
        engine = Engine(job, device=DEVICE)
        line = Line(engine)
        line.block(given)
        before = cuda.counts.copy()
        line.block(given)  # one of those in which parameters are looked at: all of them at once
        looked = cuda.counts - before
        before = cuda.counts.copy()
        line.block(given)
        spent = cuda.counts - before
        line.close()
    assert (spent.spinning, looked.spinning) == (1, 2)
    assert spent.copies_in == looked.copies_in == 2 * 8


def test_an_emit_that_raises_is_over_with_its_block() -> None:
    """Nothing of the block is emitted after ``compute`` has raised, and the next block knows nothing of it."""
    job, emitted = jobs.mlp_sgd(), list[int]()

    def emit(bucket: int, vector: ResultVector) -> None:
        emitted.append(bucket)
        if len(emitted) == 1:
            raise ZeroDivisionError

    with fake_cuda(1, pace=0.0) as cuda:
        engine = Engine(job, device=DEVICE, bucket_bytes=BUCKET_BYTES)
        with pytest.raises(ZeroDivisionError):
            engine.compute(task(job, 2), emit)
        assert len(emitted) == len(engine.layout.result_buckets)
        assert not any(copier.queue for copier in cuda.copiers)
        emitted[:] = [-1]
        engine.compute(task(job, 2), emit)
        assert len(emitted) == 1 + len(engine.layout.result_buckets)
        engine.close()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_where_no_more_memory_can_be_pinned_the_bits_are_the_same(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, pin, refused = random.Random(2), FakeCuda.pin, list[int]()

    def scarce(self: FakeCuda, tensor: Tensor) -> Tensor:
        if self.sides and tensor.nbytes > 8 and chance.random() < share:  # an engine is there
            refused.append(tensor.nbytes)
            raise RuntimeError("CUDA error: out of memory")
        return pin(self, tensor)

    monkeypatch.setattr(FakeCuda, "pin", scarce)
    cuda, differing = compare(jobs.gpt_adamw(), 5, pace=0.1, blocks=6)
    assert refused
    assert differing == []
    assert cuda.hazards == []


def test_threads_mean_the_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not said so makes a context on the first device, of each worker of a host."""
    said: list[Any] = []
    with fake_cuda() as cuda:
        monkeypatch.setattr(cuda, "set_device", said.append)
        monkeypatch.setattr(transfer, "ThreadPoolExecutor", ThreadPoolExecutor)
        layout = Layout.of(nn.Linear(4, 2))
        moved = Transfer(layout, torch.device("cuda", 0))
        assert moved._copier is not None
        moved._copier.submit(lambda: None).result()
        moved.close()
    assert said == [torch.device("cuda", 0)]
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    worker = Worker("127.0.0.1:1", config=WorkerConfig(device="cpu"))
    worker._device = torch.device("cuda", 1)
    worker._begin_thread()
    assert said[1:] == [torch.device("cuda", 1)]
