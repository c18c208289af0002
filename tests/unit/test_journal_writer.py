"""The journal behind the step path: what waits for the disk, what does not, and how far one may run ahead."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pytest
import torch
from torch import nn

from w5xde_async.coordinator.durability.journal_writer import MOST_AHEAD, REMIND_S, RETRY_S, JournalWriter, apply_entry
from w5xde_async.coordinator.parameters.aggregator import StepState
from w5xde_async.errors import CheckpointCorrupt
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.plan.sampler import Sampler
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.journal import Entry, Gap, Journal, Replay
from w5xde_async.telemetry.events import Bus, CheckpointFailed, Event, JournalFailed, JournalRestored, StepCommitted
from w5xde_async.telemetry.wording import line, plain

_E = TypeVar("_E", bound=Event)
LAYOUT = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
SAMPLER = Sampler(num_samples=32, batch_size=8, leaf_samples=4, seed=0, shuffle=True, drop_last=False)


class Hands(Executor):
    """Runs what was submitted when it is told to: the disk's own pace."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: call(*args, **kwargs)))
        return future

    async def work(self) -> None:
        future, call = self.waiting.pop(0)
        try:
            future.set_result(await asyncio.to_thread(call))
        except Exception as error:
            future.set_exception(error)


class Disk(Filesystem):
    """Counts syncs of files; ``full`` makes writes fail."""

    def __init__(self) -> None:
        self.syncs = 0
        self.full = False
        self.failing: list[int] = []  # codes of the next syncs

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self.syncs += 1
        if self.failing:
            raise OSError(self.failing.pop(), "sync")
        super().sync(file)


class Bench:
    """A journal in ``path`` that has begun, and everything around it."""

    def __init__(self, path: Path) -> None:
        self.path, self.disk, self.hands, self.now = path, Disk(), Hands(), 100.0
        journal = self.journal()
        journal.begin(0, 1)
        self.disk.syncs = 0
        self.events: list[Event] = []
        self.errors: list[BaseException] = []
        bus = Bus()
        bus.subscribe(self.events.append)
        self.journaling = JournalWriter(
            journal, LAYOUT, bus, step=0, clock=lambda: self.now, wall=lambda: 7.0, executor=self.hands,
            on_error=self.errors.append,
        )  # fmt: skip

    def journal(self) -> Journal:
        return Journal(self.path / "journal", run_id="0" * 16, fingerprint="ab", filesystem=self.disk)

    def append(self, version: int) -> None:
        step = StepState(SAMPLER.plan(version - 1), [], [0.0, 0.0], 0.0)
        step.root, step.present = self.journaling.pool.take(), [True] * len(LAYOUT.result_buckets)
        step.root.memory.fill_(version)
        event = StepCommitted(
            step=version, epoch=0, loss=0.5, metrics={}, samples=8, leaves=2, learning_rate=0.1, gradient_norm=1.0,
            loss_scale=1.0, skipped=False, seconds=0.1, num_workers=1, bytes_sent=0, bytes_received=0, phases_s={},
        )  # fmt: skip
        self.journaling.append(version, step, event, 8 * version)

    async def work(self) -> None:
        """The disk does one batch."""
        await self.hands.work()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def told(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, StepCommitted)]

    def of(self, kind: type[_E]) -> list[_E]:
        return [event for event in self.events if isinstance(event, kind)]

    def durable(self) -> list[int]:
        """What a start would read now."""
        return [entry.step for entry in self.journal().read(0, None, Replay(0))]

    async def aclose(self) -> None:
        closing = asyncio.ensure_future(self.journaling.aclose())
        while not closing.done():
            await asyncio.sleep(0)
            if self.hands.waiting:
                await self.work()
        await closing


async def waits(call: Any) -> bool:
    """Whether it is still waiting after everything that is ready has run."""
    task = asyncio.ensure_future(call)
    for _ in range(5):
        await asyncio.sleep(0)
    if task.done():
        await task
        return False
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return True


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_step_is_told_when_it_is_durable_and_not_before(bench: Bench) -> None:
    bench.append(1)
    assert bench.told == []
    assert await waits(bench.journaling.settled(1))
    await bench.work()
    assert bench.told == [1]
    assert not await waits(bench.journaling.settled(1))
    await bench.aclose()
    assert await asyncio.to_thread(bench.durable) == [1]


async def test_what_has_gathered_is_synced_once(bench: Bench) -> None:
    for version in (1, 2, 3, 4):
        bench.append(version)
    await bench.work()
    assert (bench.told, bench.disk.syncs) == ([1], 1)
    await bench.work()
    assert (bench.told, bench.disk.syncs) == ([1, 2, 3, 4], 2)
    await bench.aclose()


async def test_the_step_path_runs_so_far_ahead_and_no_further(bench: Bench) -> None:
    for version in range(1, MOST_AHEAD + 1):
        assert not await waits(bench.journaling.room())
        bench.append(version)
    assert await waits(bench.journaling.room())
    assert bench.journaling.pool.num_out == MOST_AHEAD
    await bench.work()
    assert not await waits(bench.journaling.room())
    assert bench.journaling.pool.num_out == MOST_AHEAD - 1
    await bench.work()
    await bench.aclose()
    assert bench.journaling.pool.num_out == 0


async def test_nobody_waits_for_a_disk_that_hangs_once_it_is_given_up(bench: Bench) -> None:
    journaling = bench.journaling
    for version in range(1, MOST_AHEAD + 1):
        bench.append(version)
    assert await waits(journaling.room())
    assert await waits(journaling.flush())
    assert journaling.abandon()
    assert not journaling.abandon()
    assert [event.step for event in bench.of(JournalFailed)] == [0]
    assert bench.told == list(range(2, MOST_AHEAD + 1)), "the first is in the thread"
    assert not await waits(journaling.room())
    assert not await waits(journaling.settled(1))
    assert journaling.rotate(MOST_AHEAD).result() is None
    bench.append(MOST_AHEAD + 1)
    assert bench.told[-1] == MOST_AHEAD + 1
    assert not await waits(journaling.aclose())
    for _ in range(2):  # the disk comes back: what the thread had is written, and the file is closed
        await bench.work()
    assert await asyncio.to_thread(bench.durable) == [1]
    assert journaling.pool.num_out == 0


async def test_nothing_is_given_up_where_nothing_is_to_be_written(bench: Bench) -> None:
    assert not bench.journaling.abandon()
    assert bench.journaling.sound
    await bench.aclose()


async def test_a_rotation_waits_for_what_is_before_it(bench: Bench) -> None:
    bench.append(1)
    bench.append(2)
    rotation = bench.journaling.rotate(2)
    bench.append(3)
    await bench.work()
    assert not rotation.done()
    await bench.work()
    position = rotation.result()
    assert position is not None
    assert position.sequence == 2
    bench.journaling.saved(2, 2)
    await bench.aclose()
    assert bench.told == [1, 2, 3]
    assert await asyncio.to_thread(lambda: sorted(path.name for path in (bench.path / "journal").iterdir())) == [
        "segment-000000002"
    ]


async def test_a_disk_that_fails_is_said_and_tried_and_said_again(bench: Bench) -> None:
    bench.append(1)
    await bench.work()
    bench.disk.full = True
    bench.append(2)
    bench.append(3)
    rotation = bench.journaling.rotate(3)
    await bench.work()
    assert bench.told == [1, 2, 3]  # as without a journal
    assert rotation.result() is None
    (failed,) = bench.of(JournalFailed)
    assert (failed.step, failed.seconds) == (1, 0.0)
    assert "disk is full" in failed.reason
    assert not await waits(bench.journaling.room())
    assert not await waits(bench.journaling.settled(9))

    bench.append(4)
    assert not bench.hands.waiting  # not yet
    bench.now += RETRY_S
    bench.append(5)
    await bench.work()
    assert not bench.journaling.wants_checkpoint
    assert len(bench.of(JournalFailed)) == 1  # said already
    bench.now += REMIND_S
    bench.append(6)
    await bench.work()
    assert len(bench.of(JournalFailed)) == 2

    bench.disk.full = False
    bench.now += RETRY_S
    bench.append(7)
    await bench.work()
    assert bench.journaling.wants_checkpoint
    rotation = bench.journaling.rotate(7)
    assert not bench.journaling.wants_checkpoint
    bench.append(8)
    assert bench.told[-1] == 8  # nothing stands under it yet, so nobody waits for it
    assert not bench.journaling.sound
    await bench.work()  # the rotation
    assert rotation.result() is not None
    bench.journaling.saved(7, 0)
    assert not bench.journaling.sound  # step 8 was told and is not durable
    assert bench.of(JournalRestored) == []
    bench.append(9)
    assert bench.told[-1] == 8  # held back again
    await bench.work()
    assert bench.journaling.sound
    (restored,) = bench.of(JournalRestored)
    assert restored.step == 7
    assert not await waits(bench.journaling.settled(8))
    await bench.aclose()
    assert bench.told == list(range(1, 10))
    assert bench.journaling.pool.num_out == 0
    read = Replay(7)
    assert [entry.step for entry in await asyncio.to_thread(lambda: list(bench.journal().read(7, None, read)))] == [
        8,
        9,
    ]


async def test_memory_that_lacks_for_a_moment_is_said_as_a_disk_that_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(bench.disk, "write", lacking)
    bench.append(1)
    await bench.work()
    (failed,) = bench.of(JournalFailed)
    assert failed.reason.startswith("MemoryError")
    assert (bench.told, bench.errors) == ([1], [])


async def test_after_a_sync_that_failed_the_file_is_not_trusted_again(bench: Bench) -> None:
    """The kernel may report a lost page once: a second fsync of the same file proves nothing."""
    bench.append(1)
    await bench.work()
    bench.disk.failing.append(errno.EIO)
    bench.append(2)
    await bench.work()
    assert len(bench.of(JournalFailed)) == 1
    rotation = bench.journaling.rotate(2)
    await bench.work()
    assert rotation.result() is not None
    bench.journaling.saved(2, 0)
    bench.append(3)
    await bench.aclose()
    replay = Replay(0)
    read = await asyncio.to_thread(lambda: [entry.step for entry in bench.journal().read(0, None, replay)])
    assert (read, replay.gap) == ([1], Gap(1, 2))


async def test_a_bug_of_ours_ends_the_run(bench: Bench) -> None:
    bench.append(5)  # does not follow
    await bench.work()
    assert [type(error) for error in bench.errors] == [ValueError]
    await bench.aclose()


class Rule:
    """Notes what it is given."""

    loss_scale = 1.0

    def apply(self, root: ResultVector, present: list[bool], samples: int, untouched: set[int], *, step: int) -> Any:
        self.given = ([piece.clone() for piece in root.buckets], present, samples, untouched)
        assert step >= 0
        raise StopIteration


@pytest.mark.parametrize(
    "meta",
    [{}, {"pieces": [[0, 0, 10**9]]}, {"pieces": [[9, 0, 1]]}, {"pieces": [["x", 0, 1]]}, {"pieces": 3}],
    ids=str,
)
def test_a_record_that_does_not_fit_is_refused(meta: dict[str, Any]) -> None:
    entry = Entry(step=1, meta=meta, data=[memoryview(bytes(8))])
    with pytest.raises(CheckpointCorrupt, match="step 1"):
        apply_entry(entry, LAYOUT, Rule(), ResultVector(LAYOUT))  # type: ignore[arg-type]


def test_what_no_worker_sent_is_nothing_again() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), bucket_bytes=1 << 10)
    grad, rule = layout.groups[0], Rule()
    assert grad.role == "grad"
    half = layout.buckets[1].offset
    data = torch.arange(grad.numel - half, dtype=torch.float32)
    entry = Entry(
        step=1,
        meta={
            "pieces": [[0, half, grad.numel - half]], "untouched": [0], "num_samples": 8, "samples_applied": 8,
            "time": 0, "event": {},
        },
        data=[memoryview(data.numpy()).cast("B")],
    )  # fmt: skip
    with pytest.raises(StopIteration):
        apply_entry(entry, layout, rule, ResultVector(layout))  # type: ignore[arg-type]
    pieces, present, samples, untouched = rule.given
    assert (samples, untouched) == (8, {0})
    assert present == [bucket.group == 0 and bucket.offset >= half for bucket in layout.result_buckets]
    assert not pieces[0].any()
    assert torch.equal(torch.cat([piece for piece, there in zip(pieces, present, strict=True) if there]), data)
    counters = next(b.index for b in layout.result_buckets if layout.groups[b.group].role == "max")
    assert bool((pieces[counters] == torch.iinfo(torch.int64).min).all())


def test_a_person_reads_what_it_means() -> None:
    failed = JournalFailed(step=1200, reason="the disk is full", seconds=0.01)
    assert line(failed, plain) == (
        "! nothing is journalled after step 1,200: the disk is full; the run goes on, a crash would go back to the "
        "last checkpoint"
    )
    assert str(line(replace(failed, safe_step=1200), plain)).endswith("a crash would go back to step 1,200 or later")
    assert "for 2:00 after step 1,200" in str(line(replace(failed, seconds=120.0), plain))
    restored = JournalRestored(step=1300, seconds=75.0)
    assert line(restored, plain) == "* the journal counts again from step 1,300, after 1:15"
    missed = CheckpointFailed(step=9, reason="full", safe_step=5)
    assert line(missed, plain) == (
        "! no checkpoint of step 9: full; it is tried again, a crash before that goes back to step 5"
    )
