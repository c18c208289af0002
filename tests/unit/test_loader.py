"""The dataset's side: leaves in order, ahead of need and not further, the same whoever reads them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent import futures
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from w5xde_async.compute.batch import flatten, leaves_of
from w5xde_async.data import loader
from w5xde_async.data.config import DataConfig
from w5xde_async.data.loader import BlockData, Loader
from w5xde_async.data.reader import LeafReader, _fetch
from w5xde_async.data.stream import AT_FAULT, StreamReader
from w5xde_async.errors import JobError, LeafFailed
from w5xde_async.job import Job
from w5xde_async.plan.sampler import Sampler
from w5xde_async.plan.tree import Block
from w5xde_async.wire.frame import SESSION_CAPS

SAMPLES, BATCH, LEAF = 96, 32, 4
X = torch.arange(SAMPLES * 3, dtype=torch.float32).reshape(SAMPLES, 3)
Y = torch.arange(SAMPLES)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The same rows one by one; notes what is read."""

    def __init__(self, bad: int = -1) -> None:
        self.read: list[int] = []
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise OSError("unreadable")
        self.read.append(index)
        return X[index], Y[index]


class Failing(Rows):
    """Some cannot be read the first ``left`` times."""

    def __init__(self, left: dict[int, int]) -> None:
        super().__init__()
        self.left = left

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.left.get(index, 0):
            self.left[index] -= 1
            raise OSError("unreadable")
        return super().__getitem__(index)


class Many(Rows):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


class Noisy(Rows):
    """A few samples draw from every generator, most do not: the first leaf often shows nothing."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        if index % 5 == 0:
            x = x + torch.rand(()) + random.random() + float(np.random.rand())
        return x, y


def job(dataset: Any, **changes: Any) -> Job:
    return Job(
        model=nn.Identity, dataset=dataset, optimizer=lambda m: None, batch_size=BATCH, microbatch_size=LEAF, epochs=2,
        **changes,
    )  # type: ignore[arg-type]  # fmt: skip


def sampler(seed: int = 3) -> Sampler:
    return Sampler(num_samples=SAMPLES, batch_size=BATCH, leaf_samples=LEAF, seed=seed)


class Reader:
    """A loader with somewhere to wait. ``turns``: reading takes turns with who asks, before that step."""

    def __init__(self, job: Job, plans: Sampler, *, turns: int = 0, **kwargs: Any) -> None:
        self.plans = plans
        self.errors: list[BaseException] = []
        self._came = asyncio.Event()
        config = DataConfig(**{name: kwargs.pop(name) for name in tuple(kwargs) if hasattr(DataConfig, name)})
        self.loader = Loader(job, plans, config, on_ready=self._came.set, on_error=self._failed, **kwargs)
        self.loader.take_turns(turns)

    def _failed(self, error: BaseException) -> None:
        self.errors.append(error)
        self._came.set()

    def open(self, *steps: int) -> None:
        for step in steps:
            self.loader.open(self.plans.plan(step))

    async def block(self, step: int, start: int, stop: int) -> BlockData:
        while True:
            self._came.clear()
            data = self.loader.data(step, Block(start, stop))
            if data is not None:
                return data
            await self._came.wait()
            if self.errors:
                raise self.errors[0]

    async def rest(self) -> None:
        """Until nothing is being read."""
        while self.loader._reading:
            self._came.clear()
            await self._came.wait()


@asynccontextmanager
async def reading(dataset: Any, **kwargs: Any) -> AsyncIterator[Reader]:
    reader = Reader(job(dataset), sampler(), **kwargs)
    try:
        yield reader
    finally:
        await reader.loader.aclose()


def first_line(failure: LeafFailed) -> str:
    return str(failure).splitlines()[0]


def batches(data: BlockData) -> list[tuple[Tensor, ...]]:
    tensors = []
    for spec, buffer in data.buffers:
        flat = torch.frombuffer(bytearray(buffer), dtype=getattr(torch, spec.dtype))
        tensors.append(flat.reshape(spec.shape))
    return [batch for _, batch in leaves_of(data.structure, tensors, data.samples, data.packed)]


@pytest.mark.parametrize("samples", [64, 61])
@pytest.mark.parametrize("order", [range(48), [*range(5), *range(20, 30), *range(7, 12), 47]])
async def test_small_steps_are_gathered_several_at_once_each_as_by_itself(
    samples: int, order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the ends of epochs, whose last step may be shorter, and where a run goes on from another step."""
    gather, gathers = LeafReader.gather, 0

    def count(self: LeafReader, indices: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(self, indices)

    monkeypatch.setattr(LeafReader, "gather", count)
    made = Job(
        model=nn.Identity, dataset=TensorDataset(X[:samples], Y[:samples]), optimizer=lambda m: None, batch_size=4,
        microbatch_size=2, epochs=9,
    )  # type: ignore[arg-type]  # fmt: skip
    reader = Reader(made, Sampler(num_samples=samples, batch_size=4, leaf_samples=2, seed=3))
    for step in order:
        reader.open(step)
        plan = reader.plans.plan(step)
        found = batches(await reader.block(step, 0, plan.num_leaves))
        for leaf, (x, y) in enumerate(found):
            indices = torch.from_numpy(plan.leaf_indices(leaf).copy())
            assert torch.equal(x, X[indices])
            assert torch.equal(y, Y[indices])
        reader.loader.close_step(step)
    assert gathers < len(order) / 2
    await reader.loader.aclose()


@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize("dataset", [Rows, Many, lambda: TensorDataset(X, Y)], ids=["rows", "many", "gathered"])
async def test_leaves_come_in_the_samplers_order(dataset: Callable[[], Any], turns: int) -> None:
    async with reading(dataset(), turns=turns) as reader:
        reader.open(0, 1)
        for step in (1, 0):  # whichever is asked for first
            plan = reader.plans.plan(step)
            for start, stop in ((0, 2), (2, 3), (4, 8), (3, 4)):
                found = batches(await reader.block(step, start, stop))
                for leaf, (x, y) in zip(range(start, stop), found, strict=True):
                    indices = torch.from_numpy(plan.leaf_indices(leaf).copy())
                    assert torch.equal(x, X[indices])
                    assert torch.equal(y, Y[indices])


async def test_the_next_epoch_and_its_shorter_step() -> None:
    plans = Sampler(num_samples=SAMPLES, batch_size=36, leaf_samples=LEAF, seed=1)
    reader = Reader(job(TensorDataset(X, Y)), plans)
    loader = reader.loader
    reader.open(2)
    assert (await reader.block(2, 4, 6)).samples == (4, 4)
    loader.close_step(2)
    reader.open(3)
    assert batches(await reader.block(3, 0, 1))[0][1].tolist() == plans.plan(3).leaf_indices(0).tolist()
    await loader.aclose()


async def test_it_reads_ahead_but_not_further() -> None:
    dataset = Rows()
    async with reading(dataset, prefetch_leaves=3) as reader:
        reader.open(0, 1)
        await reader.block(0, 0, 1)
        await reader.rest()
        assert sorted(dataset.read) == sorted(reader.plans.plan(0).indices[: 3 * LEAF].tolist())
        reader.loader.finished(0, Block(0, 1))
        await reader.rest()
        assert len(dataset.read) == 4 * LEAF
        await reader.block(0, 7, 8)  # asked for out of turn
        assert set(reader.plans.plan(0).leaf_indices(7).tolist()) <= set(dataset.read)


async def test_finished_leaves_are_forgotten_and_unfinished_ones_kept() -> None:
    dataset = Rows()
    async with reading(dataset, prefetch_leaves=8) as reader:
        reader.open(0)
        await reader.block(0, 0, 4)
        await reader.rest()
        reader.loader.finished(0, Block(0, 2))
        assert {number for _, number in reader.loader._chunks} == {2, 3, 4, 5, 6, 7}
        before = len(dataset.read)
        await reader.block(0, 2, 4)  # leased again
        assert len(dataset.read) == before
        reader.loader.close_step(0)
        assert reader.loader._chunks == {}


async def test_gathered_chunks_are_kept_until_their_last_leaf() -> None:
    async with reading(TensorDataset(X, Y)) as reader:
        reader.open(0)
        await reader.block(0, 0, 8)
        reader.loader.finished(0, Block(0, 4))
        assert len((await reader.block(0, 4, 8)).samples) == 4
        reader.loader.finished(0, Block(4, 8))
        assert reader.loader._chunks == {}


@pytest.mark.parametrize("turns", [0, 3])
async def test_every_sample_is_read_once(turns: int) -> None:
    dataset = Rows()
    async with reading(dataset, loader_threads=3, turns=turns) as reader:
        for step in range(3):
            reader.open(step)
            for leaf in range(8):
                await reader.block(step, leaf, leaf + 1)
                reader.loader.finished(step, Block(leaf, leaf + 1))
            reader.loader.close_step(step)
        assert sorted(dataset.read) == list(range(SAMPLES))


@pytest.mark.parametrize("seconds", [0.0, 10.0], ids=["no time", "time"])
async def test_in_turns_what_follows_is_read_with_what_is_asked_for(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing before, no other epoch, no step that is not to be, no more than may be read ahead."""
    monkeypatch.setattr(loader, "_TURN_S", seconds)
    dataset, plans = Rows(), Sampler(num_samples=SAMPLES, batch_size=24, leaf_samples=8, seed=3)  # 4 steps of 3 leaves
    reader = Reader(job(dataset), plans, turns=7, prefetch_leaves=4)
    reader.open(0, 1)
    await reader.rest()
    assert dataset.read == []

    async def read_for(step: int, start: int, stop: int) -> list[int]:
        dataset.read.clear()
        await reader.block(step, start, stop)
        await reader.rest()
        return dataset.read

    def leaves(*which: tuple[int, int]) -> list[int]:
        return [index for step, leaf in which for index in plans.plan(step).leaf_indices(leaf).tolist()]

    there = seconds > 0
    assert await read_for(0, 0, 1) == leaves((0, 0))  # it is not known yet how large they are
    ahead = [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert await read_for(0, 1, 3) == leaves((0, 1), (0, 2), *ahead[: 4 * there])
    reader.open(2)
    assert await read_for(1, 0, 3) == leaves(*[(1, leaf) for leaf in range(3 * (not there))])
    ahead = [(3, 0), (3, 1), (3, 2)]  # then an epoch ends
    assert await read_for(2, 0, 3) == leaves(*[(2, leaf) for leaf in range(there, 3)], *ahead[: 3 * there])
    for step in range(3):
        reader.loader.close_step(step)
    reader.open(3, 4, 5, 6)
    assert await read_for(4, 2, 3) == leaves((4, 2), *[(5, 0), (5, 1), (5, 2), (6, 0)][: 4 * there])
    others = [(4, 1), (6, 1), (6, 2)]  # what was read ahead before is not read again
    assert await read_for(4, 0, 1) == leaves((4, 0), *others[: 3 * there])
    assert await read_for(6, 2, 3) == leaves(*[(6, 2)][there:])  # the last step
    assert (3, 0) not in reader.loader._chunks
    reader.loader.take_turns(0)
    assert (3, 0) in reader.loader._chunks  # what nobody has asked for is read ahead again
    await reader.rest()
    for step in (3, 4, 5, 6):
        reader.loader.close_step(step)
    assert (reader.loader._chunks, reader.loader._ahead) == ({}, {})
    await reader.loader.aclose()


async def test_in_turns_what_cannot_be_read_is_told_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_TURN_S", 10.0)
    bad = int(sampler().plan(1).indices[9])
    async with reading(Rows(bad=bad), turns=3) as reader:
        reader.open(0, 1)
        await reader.block(0, 0, 1)
        await reader.block(0, 1, 8)
        assert reader.loader._ahead.keys() == {(1, 0), (1, 1), (1, 2)}
        await reader.block(1, 0, 2)
        assert reader.errors == []
        with pytest.raises(LeafFailed) as caught:
            await reader.block(1, 2, 3)
        assert caught.value.sample == bad


@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize("most", [0, 1])
async def test_a_sample_that_could_not_be_read_cannot_whenever_that_was(most: int, turns: int) -> None:
    """The third read would go well."""
    bad = int(sampler().plan(1).indices[9])

    async with reading(Failing({bad: 2}), turns=turns, max_bad_samples=most) as reader:
        reader.open(0, 1)
        await reader.block(0, 0, 1)
        await reader.block(0, 1, 8)
        if most:
            await reader.block(1, 0, 8)
            assert reader.loader.bad.all() == [bad]
        else:
            with pytest.raises(LeafFailed, match=f"sample {bad}"):
                await reader.block(1, 0, 8)


@pytest.mark.parametrize(
    "kwargs", [{"loader_threads": 1}, {"loader_threads": 3}, {"loader_processes": 1}, {"turns": 3}], ids=str
)
async def test_a_sample_that_fails_once_is_read_again(kwargs: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """One for each of several samples of a leaf, too: a file system that is away for a moment."""
    failing = [*sampler().plan(0).indices[:4].tolist(), int(sampler().plan(1).indices[9])]
    async with reading(Failing(dict.fromkeys(failing, 1)), max_bad_samples=1, **kwargs) as reader:
        reader.open(0, 1)
        for step in range(2):
            for leaf, (x, _) in enumerate(batches(await reader.block(step, 0, 8))):
                assert torch.equal(x, X[sampler().plan(step).leaf_indices(leaf).tolist()])
        assert reader.loader.bad.all() == []
    if "loader_processes" not in kwargs:  # theirs is written to standard error
        said = [record.getMessage() for record in caplog.records]
        again = "could not be read (OSError: unreadable); read once more it was there"
        assert sorted(said) == sorted(f"sample {sample} {again}" for sample in failing)


@pytest.mark.parametrize("gives", [0, 3, 5])
@pytest.mark.parametrize("kwargs", [{"loader_threads": 1}, {"loader_processes": 1}, {"turns": 3}], ids=str)
async def test_another_number_of_samples_than_was_asked_for_is_refused(gives: int, kwargs: dict[str, int]) -> None:
    """They would count as trained."""

    class Miscounting(Rows):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
            return [self[index] for index in [*indices, *indices][:gives]]

    async with reading(Miscounting(), max_bad_samples=50, **kwargs) as reader:
        reader.open(0)
        with pytest.raises(JobError, match=f"__getitems__ gave {gives} samples for 4 indices"):
            await reader.block(0, 0, 8)


async def test_what_a_read_raised_may_be_looked_at_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Of several that fail the first ends the run."""

    class Broken(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise OSError("unreadable")

    reader = LeafReader(job(Broken()))
    read = reader.read(np.array([1, 2]), 0)
    await asyncio.wait([read])
    del read
    gc.collect()
    await asyncio.sleep(0)
    await reader.aclose()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("kwargs", [{"loader_threads": 2}, {"loader_processes": 1}, {"turns": 3}], ids=str)
@pytest.mark.parametrize("error", [TimeoutError, futures.CancelledError, futures.InvalidStateError])
async def test_whatever_a_sample_raises_it_is_named(error: type[Exception], kwargs: dict[str, int]) -> None:
    bad = int(sampler().plan(0).indices[9])

    class Raising(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == bad:
                raise error("the server does not answer")
            return super().__getitem__(index)

    async with reading(Raising(), **kwargs) as reader:
        reader.open(0)
        with pytest.raises(LeafFailed, match="the server does not answer") as caught:
            await reader.block(0, 0, 8)
        assert caught.value.sample == bad
        assert "test_loader.py" in first_line(caught.value)


@pytest.mark.parametrize("seconds", [0.0, 10.0], ids=["no time", "time"])
async def test_what_a_turn_reads_just_now_is_not_read_beside_it(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_TURN_S", seconds)
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if len(self.read) == 2 * LEAF:
                begun.set()
                assert goes_on.wait(10)
            return super().__getitem__(index)

    dataset = Slow()
    async with reading(dataset, turns=2) as reader:
        reader.open(0, 1)
        await reader.block(0, 0, 2)
        assert reader.loader.data(0, Block(2, 8)) is None
        await asyncio.to_thread(begun.wait, 10)
        assert reader.loader.data(1, Block(0, 2)) is None  # is about to be read
        reader.loader.take_turns(0)
        goes_on.set()
        found = batches(await reader.block(1, 0, 8))
        await reader.block(0, 2, 8)
        await reader.rest()
        assert [y.tolist() for _, y in found] == [sampler().plan(1).leaf_indices(leaf).tolist() for leaf in range(8)]
        assert sorted(dataset.read) == sorted(sampler().plan(0).indices.tolist() + sampler().plan(1).indices.tolist())
        assert reader.loader._coming == {}


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_takes_turns_and_when(seed: int) -> None:
    """Blocks in any order, asked for again, steps given up, samples left out, turns begun and ended at any time."""
    chance, plans = random.Random(seed), sampler(seed)
    bad = chance.sample(range(SAMPLES), 2) if seed % 2 else []

    class Damaged(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index in bad:
                raise OSError("unreadable")
            return super().__getitem__(index)

    reader = Reader(job(Damaged()), plans, max_bad_samples=2, prefetch_leaves=chance.choice([1, 3, 64]))
    open_steps, to_open = set[int](), 0
    for _ in range(60):
        reader.loader.take_turns(chance.choice([0, 0, to_open, 20]))
        if len(open_steps) < 2:
            reader.open(to_open)
            open_steps.add(to_open)
            to_open += 1
        step = chance.choice(sorted(open_steps))
        start = chance.randrange(8)
        block = Block(start, chance.randrange(start + 1, 9))
        if chance.random() < 0.2:
            reader.loader.close_step(step)
            open_steps.remove(step)
            continue
        if chance.random() < 0.3:
            reader.loader.data(step, block)  # and nobody waits for it
            continue
        found = batches(await reader.block(step, *block))
        await reader.rest()
        if len(reader.loader.bad) < len(bad):
            continue  # another may stand in for what was given
        for leaf, (x, y) in zip(range(*block), found, strict=True):
            chosen = reader.loader.bad.chosen(plans.plan(step), leaf * LEAF, leaf * LEAF + LEAF)
            assert y.tolist() == chosen.tolist()
            assert torch.equal(x, X[y])
    await reader.loader.aclose()
    assert reader.errors == []


async def test_where_no_turn_can_be_taken_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(LeafReader, "read_in_turn", fail)
    async with reading(Rows(), turns=3) as reader:
        reader.open(0)
        with pytest.raises(RuntimeError, match="new thread"):
            await reader.block(0, 0, 8)


@pytest.mark.parametrize(
    ("dataset", "kwargs", "does"),
    [
        (Rows, {}, True), (Rows, {"loader_threads": 2}, False), (Rows, {"loader_processes": 1}, False),
        (lambda: TensorDataset(X, Y), {}, False),
    ],
)  # fmt: skip
async def test_who_takes_turns(dataset: Callable[[], Any], kwargs: dict[str, int], does: bool) -> None:
    """Nobody who has asked for several readers; and none where samples are left out, of which others stand in."""
    async with reading(dataset(), max_bad_samples=1, **kwargs) as reader:
        assert reader.loader.can_take_turns == does
        reader.loader.bad.found(5)
        assert not reader.loader.can_take_turns


async def test_what_is_not_wanted_any_more_is_not_read() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            begun.set()
            assert goes_on.wait(10)
            return super().__getitem__(index)

    dataset = Slow()
    reader = LeafReader(job(dataset))
    reads = [reader.read(np.array([index]), 1) for index in range(5)]
    await asyncio.to_thread(begun.wait, 10)
    for read in reads[:4]:
        read.cancel()
    for _ in range(5):  # futures tell each other by turns of the loop, and the last of them the pool
        await asyncio.sleep(0)
    goes_on.set()
    assert len((await reads[4]).tensors) == 2
    assert dataset.read == [0, 4]
    await reader.aclose()


async def test_a_turn_that_was_asked_for_when_it_is_closed() -> None:
    dataset, raised = Rows(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with reading(dataset, turns=3) as reader:
        reader.open(0)
        assert reader.loader.data(0, Block(0, 8)) is None
    await asyncio.sleep(0)
    assert (dataset.read, raised) == ([], [])


async def read_all(dataset: Any, **kwargs: Any) -> list[list[Any]]:
    found = []
    async with reading(dataset, **kwargs) as reader:
        for step in range(3):
            reader.open(step)
            for leaf in reversed(range(8)):
                found.extend(
                    [tensor.tolist() for tensor in batch] for batch in batches(await reader.block(step, leaf, leaf + 1))
                )
    return found


async def test_random_datasets_are_the_same_whoever_reads_them() -> None:
    torch.manual_seed(0)
    expected = await read_all(Noisy(), loader_threads=1)
    state = torch.get_rng_state()
    assert await read_all(Noisy(), loader_threads=3) == expected
    assert torch.equal(torch.get_rng_state(), state)  # the caller's own is left alone
    torch.rand(5)
    assert await read_all(Noisy(), loader_threads=1, prefetch_leaves=1) == expected
    assert await read_all(Noisy(), loader_processes=2) == expected
    assert await read_all(Noisy(), loader_threads=1, turns=3) == expected
    assert await read_all(Noisy(), loader_threads=2, turns=2) == expected
    assert await read_all(Rows(), loader_threads=1) != expected


async def test_samples_are_the_same_with_any_number_of_torchs_threads() -> None:
    """A large sum has other bits for each of them; readers compute by themselves, threads as processes do."""

    class Summing(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return (numbers * (index + 0.1)).sum(), torch.tensor(torch.get_num_threads())

    numbers = torch.rand(1 << 20, generator=torch.Generator().manual_seed(1))
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found += [await read_all(Summing(), loader_threads=2), await read_all(Summing(), loader_processes=1)]
    assert {threads for batch in found[0] for threads in batch[1]} == {1}
    assert found[0] == found[1] == found[2] == found[3]


async def test_a_dataset_that_does_not_draw_is_read_side_by_side() -> None:
    """After 64 samples: readers wait for each other inside the dataset, which takes two at once."""
    both = threading.Barrier(2, timeout=5)

    class Meeting(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            item = super().__getitem__(index)
            if len(self.read) > 64 and index in self.meet:
                both.wait()
            return item

        meet: frozenset[int] = frozenset()

    dataset = Meeting()
    async with reading(dataset, loader_threads=2, prefetch_leaves=1) as reader:
        for step in range(2):
            reader.open(step)
            for leaf in range(8):
                await reader.block(step, leaf, leaf + 1)
            reader.loader.close_step(step)
        plan = reader.plans.plan(2)
        dataset.meet = frozenset([int(plan.leaf_indices(0)[0]), int(plan.leaf_indices(1)[0])])
        reader.open(2)
        await reader.block(2, 0, 2)


@pytest.mark.parametrize(
    "kwargs", [{"loader_threads": 2}, {"loader_processes": 1}, {"turns": 3}], ids=["threads", "processes", "turns"]
)
async def test_a_sample_that_cannot_be_read_is_named(kwargs: dict[str, int]) -> None:
    bad = int(sampler().plan(0).indices[9])
    async with reading(Rows(bad=bad), **kwargs) as reader:
        reader.open(0)
        with pytest.raises(LeafFailed, match="while reading the dataset") as caught:
            await reader.block(0, 0, 8)
    failure = caught.value
    assert (failure.step, failure.leaf) == (0, 2)
    assert failure.indices == sampler().plan(0).leaf_indices(2).tolist()
    assert failure.sample == bad
    assert re.fullmatch(
        rf"step 0, leaf 2: OSError: unreadable \(test_loader.py:\d+\), sample {bad}", first_line(failure)
    )


@pytest.mark.parametrize(
    "kwargs", [{"loader_threads": 3}, {"loader_processes": 1}, {"turns": 3}], ids=["threads", "processes", "turns"]
)
async def test_others_stand_in_for_samples_that_cannot_be_read(kwargs: dict[str, int]) -> None:
    plan, told = sampler().plan(0), list[tuple[int, str]]()
    order = plan.indices.tolist()

    class Damaged(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index in (order[9], order[10]):
                raise OSError("unreadable")
            return super().__getitem__(index)

    async with reading(Damaged(), max_bad_samples=2, on_skip=lambda *of: told.append(of), **kwargs) as reader:
        reader.open(0)
        (x, y), *_ = batches(await reader.block(0, 2, 3))
        assert y.tolist() == [order[8], order[11], order[11], order[11]]
        assert torch.equal(x, X[y])
        await reader.block(0, 0, 8)
    assert sorted(sample for sample, _ in told) == sorted(order[9:11])
    assert all(re.fullmatch(r"OSError: unreadable \(test_loader.py:\d+\)", said) for _, said in told)


async def test_the_sample_is_left_out_that_goes_with_no_other() -> None:
    """Each of them collates alone, and all but one do together."""
    odd = int(sampler().plan(0).indices[6])

    class Ragged(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(index)
            return (x[:2] if index == odd else x), y

    async with reading(Ragged(), max_bad_samples=1) as reader:
        reader.open(0)
        await reader.block(0, 0, 8)
        assert reader.loader.bad.all() == [odd]


async def test_what_no_single_sample_is_at_fault_of_ends_the_run() -> None:
    def broken(samples: list[Any]) -> Any:
        raise ValueError("broken collate")

    reader = Reader(job(Rows(), collate=broken), sampler(), max_bad_samples=9)
    reader.open(0)
    with pytest.raises(LeafFailed, match="no single sample is at fault"):
        await reader.block(0, 0, 1)
    assert not len(reader.loader.bad)
    await reader.loader.aclose()


class Together(Rows):
    """Reads samples together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("where", ["dataset", "collate"])
@pytest.mark.parametrize("bad", [1, 4], ids=["one", "all"])
async def test_the_sample_is_named_that_fails_alone(where: str, bad: int) -> None:
    """Of those that are read, or collated, together. Where all fail alone, all are named."""
    indices = sampler().plan(0).leaf_indices(2).tolist()
    wrong = indices[-bad:]

    def collate(samples: list[Any]) -> Any:
        if any(torch.equal(x, X[index]) for x, _ in samples for index in wrong):
            raise OSError("unreadable")
        return default_collate(samples)

    class All(Together):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index in wrong:
                raise OSError("unreadable")
            return super().__getitem__(index)

    dataset = All() if where == "dataset" else Rows()
    reader = Reader(job(dataset, collate=collate if where == "collate" else None), sampler())
    reader.open(0)
    with pytest.raises(LeafFailed) as caught:
        await reader.block(0, 0, 8)
    await reader.loader.aclose()
    assert caught.value.sample == (wrong[0] if bad == 1 else None)
    named = f", sample {wrong[0]}" if bad == 1 else f", samples {', '.join(map(str, wrong))}"
    assert first_line(caught.value).endswith(named)


class Named(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": X[index], "y": Y[index]}


class NamedStream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([Named()[index] for index in range(len(X))])


@pytest.mark.parametrize("streamed", [False, True])
def test_the_sample_is_named_of_a_collate_that_changes_what_it_is_given(streamed: bool) -> None:
    """Whatever it was given once has no "y" any more."""
    bad = torch.clone(X[5])

    def collate(samples: list[dict[str, Tensor]]) -> Tensor:
        targets = torch.stack([sample.pop("y") for sample in samples])
        if any(torch.equal(sample["x"], bad) for sample in samples):
            raise ValueError("unreadable")
        return targets

    given = job(NamedStream() if streamed else Named(), collate=collate, max_steps=1, shuffle=False)
    stream = StreamReader(given) if streamed else None
    with pytest.raises(ValueError, match="unreadable") as caught:
        _fetch(given, np.arange(3, 7), stream)
    assert getattr(caught.value, AT_FAULT) == 5
    rest = np.array([3, 4, 6, 7])
    assert torch.equal(_fetch(given, rest, stream).tensors[0], Y[rest])


async def test_the_sample_is_named_where_what_was_read_together_is_an_array() -> None:
    wrong = sampler().plan(0).leaf_indices(2).tolist()[-1]

    class Rowed(Rows):
        def __getitems__(self, indices: list[int]) -> Any:
            return X[indices].numpy()

    def collate(rows: Any) -> Any:
        if any(np.array_equal(row, X[wrong].numpy()) for row in rows):
            raise OSError("unreadable")
        return torch.as_tensor(np.asarray(rows))

    reader = Reader(job(Rowed(), collate=collate), sampler())
    reader.open(0)
    with pytest.raises(LeafFailed, match="unreadable") as caught:
        await reader.block(0, 0, 8)
    await reader.loader.aclose()
    assert caught.value.sample == wrong


def test_what_is_read_together_is_given_to_collate_as_it_is() -> None:
    class Batches(Rows):
        def __getitems__(self, indices: list[int]) -> Tensor:
            return X[indices]

    given = job(Batches(), collate=lambda batch: batch * 2, max_steps=1)
    assert torch.equal(_fetch(given, np.arange(4)).tensors[0], X[:4] * 2)


@dataclass(frozen=True)
class Frozen(Exception):
    """It lets nobody set an attribute."""

    why: str


async def test_a_sample_whose_exception_takes_no_attribute_is_left_out() -> None:
    odd = int(sampler().plan(0).leaf_indices(2)[0])

    class Odd(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == odd:
                raise Frozen("corrupt")
            return super().__getitem__(index)

    async with reading(Odd(), max_bad_samples=1) as reader:
        reader.open(0)
        await reader.block(0, 0, 8)
        assert reader.loader.bad.all() == [odd]


@pytest.mark.parametrize("array", [False, True])
async def test_a_collate_may_write_into_the_same_memory_each_time(array: bool) -> None:
    """Or give a part of the dataset, which whoever computes may write into."""
    memory = torch.zeros(LEAF, 3)
    taken = torch.from_numpy(memory.numpy()) if array else memory

    def collate(samples: list[Any]) -> Any:
        torch.stack([x for x, _ in samples], out=memory)
        return taken, samples[0][0]

    reader = Reader(job(Rows(), collate=collate), sampler())
    try:
        reader.open(0)
        read = batches(await reader.block(0, 0, 8))
    finally:
        await reader.loader.aclose()
    for leaf, (x, first) in enumerate(read):
        indices = sampler().plan(0).leaf_indices(leaf).tolist()
        assert torch.equal(x, X[indices])
        assert torch.equal(first, X[indices[0]])
        assert not memory.untyped_storage().data_ptr() <= x.data_ptr() < memory.untyped_storage().data_ptr() + 48


async def test_leaves_of_a_block_may_have_different_structures() -> None:
    def collate(samples: list[Any]) -> Any:
        x = torch.stack([x for x, _ in samples])
        return {"x": x} if float(x[0, 0]) % 2 else {"y": x, "note": f"from {float(x[0, 0])}", "twice": [x, x]}

    reader = Reader(job(Rows(), collate=collate), sampler())
    loader = reader.loader
    reader.open(0)
    found = batches(await reader.block(0, 0, 8))
    await loader.aclose()
    plan = sampler().plan(0)
    assert len({tuple(batch) for batch in found}) == 2
    for leaf, batch in enumerate(found):
        wanted = collate([Rows()[index] for index in plan.leaf_indices(leaf).tolist()])
        assert batch.keys() == wanted.keys()
        assert torch.equal(next(iter(batch.values())), next(iter(wanted.values())))
        assert batch.get("note") == wanted.get("note")


async def test_blocks_are_bounded_by_bytes_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w5xde_async.data.loader._LEASE_BYTES", 200)
    async with reading(Rows()) as reader:
        reader.open(0)
        await reader.block(0, 0, 1)
        assert reader.loader.max_block_leaves == 2  # 80 bytes a leaf
    async with reading(TensorDataset(X, Y)) as reader:
        assert reader.loader.max_block_leaves == 256


async def test_blocks_are_bounded_by_the_largest_leaf_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w5xde_async.data.loader._LEASE_BYTES", 4000)

    sizes = itertools.chain([10], itertools.repeat(200))
    reader = Reader(job(Rows(), collate=lambda samples: torch.zeros(next(sizes))), sampler())
    loader = reader.loader
    reader.open(0)
    await reader.block(0, 0, 1)
    await reader.block(0, 1, 8)
    assert (loader.leaf_bytes, loader.max_block_leaves) == (800, 5)
    await loader.aclose()


def written(sizes: Iterator[int]) -> Job:
    """Leaves with texts of these lengths."""
    return job(Rows(), collate=lambda samples: {"x": samples[0][0], "text": "x" * next(sizes) + str(samples[0][1])})


async def test_a_step_whose_strings_are_more_than_a_lease_can_bear_is_refused() -> None:
    """Where a lease is a step, of which none can be made smaller."""
    for nbytes in (100 << 10, 200 << 10):  # times eight leaves; a header has 1 MiB
        reader = Reader(written(itertools.repeat(nbytes)), sampler(), whole_steps=True)
        reader.open(0)
        if nbytes == 100 << 10:
            data = await reader.block(0, 0, 8)
            assert data.header_bytes < SESSION_CAPS.header_bytes
        else:
            with pytest.raises(JobError, match=r"of 8 leaves has 1,6.* bytes of strings.*or use --update sync"):
                await reader.block(0, 0, 8)
        await reader.loader.aclose()


async def test_blocks_whose_strings_have_grown_are_to_be_smaller() -> None:
    reader = Reader(written(itertools.chain([10], itertools.repeat(200 << 10))), sampler())
    reader.open(0)
    await reader.block(0, 0, 1)
    assert (await reader.block(0, 1, 8)).too_large
    most = reader.loader.max_block_leaves
    assert most == 2
    assert not (await reader.block(0, 2, 2 + most)).too_large
    assert not (await reader.block(0, 2, 3)).too_large
    await reader.loader.aclose()


async def test_a_block_of_as_many_leaves_as_may_be_is_never_too_large() -> None:
    """What joins their strings would have it given back again and again."""
    text = "x" * ((64 << 10) - 9)
    structure, _ = flatten({"x": X[0], "text": text})
    text = text[: (64 << 10) - len(structure)]  # an eighth of what a lease may have, to the byte

    def collate(samples: list[Any]) -> Any:
        return {"x": samples[0][0], "text": text[1:] + str(int(samples[0][1]) % 10)}

    reader = Reader(job(Rows(), collate=collate), sampler())
    reader.open(0)
    data = await reader.block(0, 0, 8)
    assert len(data.structure) > 512 << 10
    assert reader.loader.max_block_leaves == 8
    assert not data.too_large
    await reader.loader.aclose()


async def test_closing_in_the_middle_of_reading() -> None:
    async with reading(Rows(), loader_threads=2) as reader:
        reader.open(0, 1)


async def test_strings_and_empty_tensors_travel() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"none": torch.zeros(0), "names": ["a"] * len(samples), "x": torch.stack([x for x, _ in samples])}

    reader = Reader(job(Rows(), collate=collate), sampler())
    loader = reader.loader
    reader.open(0)
    data = await reader.block(0, 0, 2)
    assert [spec.nbytes for spec, _ in data.buffers] == [0, LEAF * 12] * 2
    await loader.aclose()


async def test_for_how_long_nothing_is_read_that_somebody_waits_for() -> None:
    ends = threading.Event()

    class Hanging(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            ends.wait(10.0)
            return super().__getitem__(index)

    async with reading(Hanging(), loader_threads=1) as reader:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        reader.open(0)
        assert reader.loader.silent_s == 0.0  # nobody has asked for anything
        assert reader.loader.data(0, Block(0, 1)) is None
        assert 0.0 <= reader.loader.silent_s <= loop.time() - began
        reader.loader._heard_at -= 100.0
        assert reader.loader.silent_s >= 100.0
        ends.set()
        await reader.block(0, 0, 1)
        assert reader.loader.silent_s < 50.0
        await reader.rest()
        assert reader.loader.silent_s == 0.0
