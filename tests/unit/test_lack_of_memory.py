"""Memory lacks anywhere in a block: what comes out is PyTorch's own gradient, or an error, never something else."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.fake_cuda import DEVICE, fake_cuda
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.compute.halving import Halving, lacks_memory
from w5xde_async.job import Job
from w5xde_async.params.flat import ResultVector

ERRORS: list[Callable[[], RuntimeError | MemoryError]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("CUDA error: out of memory"),  # pinned memory
    lambda: RuntimeError("MPS backend out of memory (MPS allocated: 17.94 GiB, max allowed: 18.13 GiB)."),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    MemoryError,  # the host's, and numpy's
]
PLACES = ("forward", "backward", "last backward", "make_vector", "copies")


class Lack:
    """Raises ``errors`` in turn at calls of ``place``, the first at its call ``after``. Counts what it has raised."""

    def __init__(self) -> None:
        self.arm("", 0, [])

    def arm(self, place: str, after: int, errors: list[RuntimeError | MemoryError]) -> None:
        self.place, self.after, self.errors, self.raised = place, after, errors, 0

    def __call__(self, place: str) -> None:
        if place != self.place or not self.errors:
            return
        self.after -= 1
        if self.after < 0:
            self.raised += 1
            raise self.errors.pop(0)


LACK = Lack()


class Deep(nn.Module):
    """Layers enough that the last of backward comes after some buckets have left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        LACK("forward")
        h: Tensor = self.layers[0](x)
        h.register_hook(lambda _: LACK("last backward"))
        for layer in list(self.layers)[1:]:
            h = torch.tanh(layer(h))
        h.register_hook(lambda _: LACK("backward"))
        return h[:, :3]


@contextmanager
def lacking(engine: Engine) -> Iterator[None]:
    """Taking a vector to sum in, as if it were made, and copies to the device are places too."""
    take, batch = engine._pool.take, engine._transfer.batch

    def taken() -> ResultVector:
        LACK("make_vector")
        return take()

    def copied(given: Any) -> Any:
        LACK("copies")
        return batch(given)

    engine._pool.take, engine._transfer.batch = taken, copied  # type: ignore[method-assign]
    try:
        yield
    finally:
        LACK.arm("", 0, [])
        engine.close()


def job(accumulate: int) -> Job:
    return Job(
        model=Deep, dataset=TensorDataset(torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)),
        loss=nn.CrossEntropyLoss(), batch_size=64, microbatch_size=4, accumulate_grad_batches=accumulate, max_steps=5,
        seed=2, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )  # fmt: skip


def block(chance: random.Random, leaf: int) -> Task:
    """One to six leaves, the last perhaps smaller."""
    samples = (leaf,) * chance.randrange(6) + (chance.randrange(1, leaf + 1),)
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    x = torch.randn(sum(samples), 8, generator=generator)
    structure, tensors = flatten((x, torch.randint(3, (len(x),), generator=generator)))
    return Task(step=0, start=0, samples=samples, loss_scale=1.0, structure=structure, packed=True, tensors=tensors)


def plain(engine: Engine, task: Task) -> list[Tensor]:
    """The gradient of the summed loss."""
    model, (x, y) = Deep(), task.tensors
    model.load_state_dict(engine.model.state_dict())
    F.cross_entropy(model(x), y, reduction="sum").backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Results:
    """What ``emit`` gets: copies of buckets that leave, or where kept ones lie."""

    def __init__(self, engine: Engine, *, local: bool) -> None:
        self._engine, self._local = engine, local
        self.vector, self.emitted = ResultVector(engine.layout), list[int]()

    def __call__(self, bucket: int, vector: ResultVector) -> None:
        self.emitted.append(bucket)
        if self._local:
            self.vector = vector
        else:
            self.vector.buckets[bucket].copy_(vector.buckets[bucket])

    def gradients(self) -> list[Tensor]:
        return [gradient for gradient in self.vector.gradients if gradient is not None]


def error_of(found: list[Tensor], expected: list[Tensor]) -> float:
    gap = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return (gap / sum(float(b.square().sum()) for b in expected)) ** 0.5


@pytest.mark.parametrize("where", ["cpu", "cuda", "left"])
@pytest.mark.parametrize("local", [False, True], ids=["exact", "local"])
@pytest.mark.parametrize("seed", range(6))
def test_a_block_that_lacks_memory_anywhere_gives_the_plain_gradient(seed: int, local: bool, where: str) -> None:
    if where == "cpu":
        return lack_anywhere(seed, "cpu", local=local)
    with fake_cuda(seed) as device:
        lack_anywhere(seed, DEVICE, local=local, left=where == "left")
        assert device.hazards == []


def lack_anywhere(seed: int, device: torch.device | str, *, local: bool, left: bool = False) -> None:
    chance = random.Random(seed)
    accumulate = chance.choice([1, 1, 2])
    engine = Engine(job(accumulate), device=device, bucket_bytes=chance.choice([256, 1 << 20]))
    if local:
        engine.keep_results()
    if left:
        engine.leave_on_device(range(len(engine.layout.result_buckets)))
    with lacking(engine):
        for number in range(6):
            task = block(chance, 4 * accumulate)
            LACK.arm("", 0, [])
            expected, results = plain(engine, task), Results(engine, local=local)
            place, splits = chance.choice(PLACES), chance.choice([0, 0, 1, 2])
            engine._halving, smallest = Halving(4, splits=splits), splits == 2
            calls = sum(-(-samples // (4 >> splits)) for samples in task.samples)
            if number:  # the first shows that each gradient comes once
                errors = [chance.choice(ERRORS)() for _ in range(chance.randrange(3))]
                LACK.arm(place, chance.choice([chance.randrange(calls), calls - 1]), errors)
            failed: LeafError | None = None
            try:
                outcome = engine.compute(task, results)
            except LeafError as error:
                failed = error
            if failed is not None:
                assert smallest or (LACK.raised == 2 and (results.emitted or engine._halving.splits == 2)), place
                assert smallest or not local or engine._halving.splits == 2, "nothing has left"
                assert engine._transfer.host_pool.num_out == len(failed.vectors)
                for vector in failed.vectors:
                    engine.release(vector)
                LACK.arm("", 0, [])
                results = Results(engine, local=local)
                done(engine, engine.compute(task, results))
            else:
                assert local or len(results.emitted) == len(set(results.emitted)), "each bucket leaves once"
                done(engine, outcome)
            assert engine._pool.num_out == engine._transfer.host_pool.num_out == 0
            assert error_of(results.gradients(), expected) < 1e-5, (number, place, LACK.raised)


def done(engine: Engine, outcome: ComputedBlock) -> None:
    assert outcome.splits <= 2
    for vector in outcome.vectors:
        engine.release(vector)


def test_memory_that_lacks_after_a_part_has_left_does_not_halve_the_rest() -> None:
    """What has left was computed whole: other masks and statistics beside it would be nobody's gradient."""
    engine = Engine(job(1), bucket_bytes=256)
    with lacking(engine):
        task = block(random.Random(1), 4)
        done(engine, engine.compute(task, lambda *_: None))
        LACK.arm("last backward", len(task.samples) - 1, [ERRORS[0]()])
        outcome = engine.compute(task, Results(engine, local=False))
        assert (LACK.raised, outcome.splits) == (1, 0), "once is tried again as it was"
        done(engine, outcome)
        results = Results(engine, local=False)
        LACK.arm("last backward", len(task.samples) - 1, [ERRORS[0]() for _ in range(9)])
        with pytest.raises(LeafError, match="out of memory"):
            engine.compute(task, results)
        assert results.emitted
        LACK.arm("", 0, [])
        assert engine.compute(task, lambda *_: None).splits == 1, "the next block is halved"


def hungry(engine: Engine, most: list[int]) -> None:
    """Memory for at most ``most[0]`` rows at once."""
    step = engine._step

    def limited(model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) > most[0]:
            raise ERRORS[0]()
        return step(model, batch)

    engine._step = limited


def test_memory_that_has_come_back_is_used_again() -> None:
    engine, most = Engine(job(1), bucket_bytes=256), [2]
    hungry(engine, most)
    task, found = block(random.Random(3), 4), []
    for number in range(120):
        most[0] = 2 if number < 70 else 4
        results = Results(engine, local=False)
        outcome = engine.compute(task, results)
        assert len(results.emitted) == len(set(results.emitted))
        assert error_of(results.gradients(), plain(engine, task)) < 1e-5
        found.append(outcome.splits)
        done(engine, outcome)
    engine.close()
    assert found[:70] == [1] * 70, "a try is made again in halves before anybody hears of it"
    assert found[70:] == [1] * 26 + [0] * 24, "the second try comes 64 blocks after the first"


# -- a job that cannot compute the smallest pieces


def choosy(engine: Engine, least: int) -> None:
    """The job's code refuses fewer than ``least`` rows at once, as batch norm does single ones."""
    step = engine._step

    def picky(model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) < least:
            raise ValueError("Expected more than 1 value per channel when training")
        return step(model, batch)

    engine._step = picky


def of_leaves(number: int, samples: int, seed: int = 0) -> Task:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number * samples, 8, generator=generator)
    structure, tensors = flatten((x, torch.randint(3, (len(x),), generator=generator)))
    return Task(
        step=0, start=0, samples=(samples,) * number, loss_scale=1.0, structure=structure, packed=True, tensors=tensors
    )  # fmt: skip


@pytest.mark.parametrize("lacks", range(1, 4))
def test_memory_that_lacks_for_a_moment_spoils_no_worker_whose_job_refuses_small_pieces(lacks: int) -> None:
    engine, task = Engine(job(1)), of_leaves(3, 4)
    choosy(engine, 2)
    with lacking(engine):
        expected = plain(engine, task)
        LACK.arm("forward", 1, [ERRORS[0]() for _ in range(lacks)])
        results, failed = Results(engine, local=False), False
        try:
            outcome = engine.compute(task, results)
        except LeafError:
            failed = True
            outcome = engine.compute(task, results)
        assert failed == (lacks == 3), "whole, in halves, and in halves again"
        assert outcome.splits == 1
        assert error_of(results.gradients(), expected) < 1e-5
        done(engine, outcome)
        assert engine._pool.num_out == engine._transfer.host_pool.num_out == 0


def test_a_single_lack_where_nothing_can_be_halved_is_none() -> None:
    engine, task = Engine(job(1)), of_leaves(2, 4)
    choosy(engine, 4)
    with lacking(engine):
        LACK.arm("backward", 1, [ERRORS[0]()])
        outcome = engine.compute(task, lambda *_: None)
        assert (LACK.raised, outcome.splits) == (1, 0)
        done(engine, outcome)


def test_who_lacks_memory_for_the_smallest_pieces_says_both() -> None:
    engine, most, task = Engine(job(1), bucket_bytes=256), [1], of_leaves(2, 4)
    hungry(engine, most)
    choosy(engine, 2)
    with lacking(engine):
        for _ in range(3):
            with pytest.raises(LeafError) as caught:
                engine.compute(task, lambda *_: None)
            assert "out of memory with microbatches of 2 samples" in caught.value.error
            assert "the job cannot compute smaller ones: ValueError: Expected more than 1 value" in caught.value.error
            assert "CUDA out of memory" in caught.value.error
            assert caught.value.lacked_memory
            assert engine._pool.num_out == engine._transfer.host_pool.num_out == 0
        most[0] = 2
        outcome = engine.compute(task, lambda *_: None)
        assert outcome.splits == 1
        done(engine, outcome)


def test_what_the_job_raises_on_whole_microbatches_too_is_said_as_it_is() -> None:
    engine, most = Engine(job(1)), [2]
    hungry(engine, most)
    with lacking(engine):
        task = of_leaves(2, 4)
        done(engine, engine.compute(task, lambda *_: None))
        most[0] = 4
        choosy(engine, 5)
        with pytest.raises(LeafError, match="ValueError: Expected more than 1 value") as caught:
            engine.compute(task, lambda *_: None)
        assert "memory" not in caught.value.error


@pytest.mark.parametrize("local", [False, True], ids=["exact", "local"])
@pytest.mark.parametrize("seed", range(12))
def test_a_job_that_refuses_small_pieces_gives_the_plain_gradient_or_says_that_memory_lacks(
    seed: int, local: bool
) -> None:
    chance = random.Random(seed)
    engine, least = Engine(job(1), bucket_bytes=chance.choice([256, 1 << 20])), chance.choice([2, 4])
    if local:
        engine.keep_results()
    choosy(engine, least)
    with lacking(engine):
        for number in range(12):
            task = of_leaves(chance.randrange(1, 5), 4, seed=chance.randrange(1 << 30))
            LACK.arm("", 0, [])
            expected, results = plain(engine, task), Results(engine, local=local)
            if number:
                errors = [chance.choice(ERRORS)() for _ in range(chance.randrange(5))]
                LACK.arm(chance.choice(PLACES), chance.randrange(8), errors)
            failed: LeafError | None = None
            try:
                outcome = engine.compute(task, results)
            except LeafError as error:
                failed = error
            if failed is not None:
                assert failed.lacked_memory, failed.error
                for vector in failed.vectors:
                    engine.release(vector)
                LACK.arm("", 0, [])
                results = Results(engine, local=local)
                outcome = engine.compute(task, results)
            assert 4 >> outcome.splits >= least
            assert error_of(results.gradients(), expected) < 1e-5
            done(engine, outcome)
            assert engine._pool.num_out == engine._transfer.host_pool.num_out == 0


def test_what_was_computed_is_freed_before_memory_is_given_back() -> None:
    """An error's traceback holds the frames, and they hold what the forward pass has made."""
    engine, held = Engine(job(1)), list[weakref.ref[Tensor]]()
    step, freed = engine._step, list[bool]()

    def greedy(model: nn.Module, batch: Any) -> Any:
        made = torch.ones(9)
        held.append(weakref.ref(made))
        if len(batch[0]) > 1:
            raise ERRORS[0]()
        return step(model, batch)

    engine._step = greedy
    engine._transfer.empty_cache = lambda: freed.append(all(ref() is None for ref in held))  # type: ignore[method-assign]
    done(engine, engine.compute(block(random.Random(1), 4), lambda *_: None))
    engine.close()
    assert freed == [True, True]


# -- what lack of memory looks like


@pytest.mark.parametrize("make", ERRORS)
def test_every_kind_of_lack_is_known(make: Callable[[], RuntimeError | MemoryError]) -> None:
    assert lacks_memory(make())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x8)"),
        ValueError("out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_none(error: BaseException) -> None:
    assert not lacks_memory(error)


def test_the_cpus_allocator_says_it_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert lacks_memory(caught.value)


# -- halves, and back


def fitted(halving: Halving, blocks: int) -> list[int]:
    found = []
    for _ in range(blocks):
        found.append(halving.splits)
        halving.fitted()
    return found


def test_halves_are_doubled_again_after_a_while() -> None:
    halving = Halving(4)
    assert [halving.lacked(), halving.lacked(), halving.lacked()] == [True, True, False]
    found = fitted(halving, 200)
    assert found == [2] * 32 + [1] * 32 + [0] * 136


def test_a_try_that_fails_is_not_made_again_soon() -> None:
    halving, waits = Halving(2), []
    for _ in range(8):
        assert halving.lacked()
        blocks = 0
        while halving.splits:
            halving.fitted()
            blocks += 1
        assert halving.tries
        waits.append(blocks)
    assert waits == [32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_a_try_that_went_well_is_over() -> None:
    halving = Halving(2, splits=1)
    fitted(halving, 64)
    assert (halving.splits, halving.tries) == (0, False)
    halving.lacked()
    assert fitted(halving, 33)[-2:] == [1, 0], "it waits no longer than the first time"


@pytest.mark.parametrize("samples", [1, 3, 4, 5])
def test_pieces_are_never_less_than_a_sample(samples: int) -> None:
    halving = Halving(samples)
    while halving.lacked():
        pass
    assert -(-samples // halving.pieces) == 1
