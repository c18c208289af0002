"""The journal on the event loop: each step's root to the disk, behind the step path, and what that makes committed.

A step is applied, its version published and its record queued; one thread writes whatever has gathered and syncs it
once. Only when the record is durable is the step told to whoever follows the run (docs/decisions/0014-journal.md).
The step path runs at most ``MOST_AHEAD`` steps ahead of the disk and then waits for it.

A disk that fails, or memory that lacks, does not end the run. The journal stops, loudly; steps are told as soon as
they are applied, as they are without a journal; every ``RETRY_S`` it is tried whether the disk takes a record again,
and if so a checkpoint is asked for and a new segment begins at it. When that checkpoint is durable, and every step that
was told meanwhile, the journal counts again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from w5xde_async.compute.halving import lacks_memory
from w5xde_async.errors import CheckpointCorrupt, StoreError, in_one_line
from w5xde_async.params.flat import ResultVector, bytes_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.filesystem import explain
from w5xde_async.store.journal import Entry, Journal, Position
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import Bus, JournalFailed, JournalRestored, StepCommitted
from w5xde_async.telemetry.records import number, to_record
from w5xde_async.updates.sync import Applied, SyncRule

#: Steps that may be applied and not durable yet. Each holds one result vector.
MOST_AHEAD = 4
#: A failed disk is tried again that long after, and a person is reminded so often that it still fails.
RETRY_S = 5.0
REMIND_S = 60.0
_MAX_PROBE_BYTES = 64 << 20


class AppliedStep(Protocol):
    """A step whose update was applied. ``root`` is the sum as the rule got it, a vector from the writer's ``pool``."""

    @property
    def plan(self) -> StepPlan: ...

    @property
    def root(self) -> ResultVector | None: ...

    @property
    def present(self) -> Sequence[bool]:
        """Which result buckets are in it."""

    @property
    def untouched(self) -> Collection[int] | None:
        """Entries that no result had a gradient of."""


class _State(Enum):
    SOUND = "every step that was told is durable"
    RECOVERING = "steps are journalled again, but no checkpoint stands under them yet"
    CATCHING_UP = "one does; steps that were told already are not all durable"
    FAILED = "nothing is journalled"


@dataclass(frozen=True, slots=True)
class _Record:
    """A step to be written. ``told``: it was told before it is durable, because the disk had failed. ``news``: what is
    to be known after a kill beside it, since the one before."""

    version: int
    step: AppliedStep
    event: StepCommitted
    samples_applied: int
    wall: float
    told: bool
    news: Mapping[str, Sequence[int | str | list[int]]]


@dataclass(frozen=True, slots=True)
class _Rotation:
    step: int
    done: asyncio.Future[Position | None]


@dataclass(frozen=True, slots=True)
class _Prune:
    step: int


@dataclass(frozen=True, slots=True)
class _Probe:
    """Whether the disk takes as much as a record."""


_Work = _Record | _Rotation | _Prune | _Probe


class JournalWriter:
    """Writes one run's journal. Everything but the writing itself happens on the loop's thread."""

    def __init__(
        self,
        journal: Journal,
        layout: Layout,
        bus: Bus,
        *,
        step: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        executor: Executor | None = None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """``journal`` has begun at ``step``. ``executor`` runs one call at a time; it belongs to this object.

        ``on_error`` is given what must end the run.
        """
        self.pool = VectorPool(layout, spare=MOST_AHEAD)
        self._on_error = on_error
        self._journal, self._layout, self._bus = journal, layout, bus
        self._clock, self._wall = clock, wall
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="w5xde-journal")
        self._state = _State.SOUND
        self._queue: list[_Work] = []
        self._writing = False
        self._pending = 0  # records in the queue and in the thread, and those of them that were told before their time
        self._told_early = 0
        self._durable_step = step
        #: What a start would come to by the journal, and the checkpoints under it; None: it is gone.
        self.safe_step: int | None = step
        self._changed = asyncio.Event()
        self._failed_at = self._retry_at = self._remind_at = 0.0
        self._works_again = False  # the disk, tried since it failed
        self._superseded = False  # nothing is told any more: another coordinator commits now
        self._abandoned = False  # the run ends and the disk hangs: nothing waits for it any more
        self._base = 0  # the checkpoint of this step or a later one ends the recovery

    @property
    def sound(self) -> bool:
        """False from a failure of the disk until every step that was told is durable again."""
        return self._state is _State.SOUND

    @property
    def wants_checkpoint(self) -> bool:
        """The journal has failed and the disk takes records again: one that stands on a checkpoint can begin."""
        return self._state is _State.FAILED and self._works_again

    async def room(self) -> None:
        """Wait until the step path may go one step further."""
        while self._pending >= MOST_AHEAD and self._state is not _State.FAILED:
            await self._wait()

    async def settled(self, step: int) -> None:
        """Wait until ``step`` has been told."""
        while self._durable_step < step and self._holds_back:
            await self._wait()

    async def flush(self) -> None:
        """Wait until nothing is left to be written."""
        while (self._writing or self._queue) and not self._abandoned:
            await self._wait()

    def abandon(self) -> bool:
        """The disk hangs and the run ends: whoever waits for it goes on. Whether anything was to be written."""
        if self._abandoned or not (self._writing or self._queue):
            return False
        self._abandoned = True
        self._fail(self._queue, StoreError("journal", "the disk does not answer"))
        self._changed.set()
        return True

    async def aclose(self) -> None:
        """Write the rest and let go of the file and the thread."""
        await self.flush()
        closing = self._executor.submit(self._journal.close)
        if self._abandoned:  # closed when the disk comes back
            self._executor.shutdown(wait=False)
            return
        await asyncio.wrap_future(closing)
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    def append(
        self, version: int, step: AppliedStep, event: StepCommitted, samples_applied: int,
        news: Mapping[str, Sequence[int | str | list[int]]] | None = None,
    ) -> None:  # fmt: skip
        """A step is applied: ``event`` is published when it counts. ``step.root`` belongs to this object now.

        ``news``: ``bad_samples`` that were found, and ``numerics`` and ``devices`` that came, since the last step was
        given, and leases that it has ``counted``; they go into its record.
        """
        told = not self._holds_back
        if told:
            self._tell(event)
        if self._state is _State.FAILED:
            self._release(step)
            if self._clock() >= self._retry_at and not self._works_again and not self._writing:
                self._queue.append(_Probe())
                self._kick()
            return
        self._pending += 1
        self._told_early += told
        self._queue.append(_Record(version, step, event, samples_applied, self._wall(), told, news or {}))
        self._kick()

    def rotate(self, step: int) -> asyncio.Future[Position | None]:
        """A checkpoint of ``step``, the last one appended, is being made: go on in a segment of its own.

        The result is where that segment begins, when everything before it is durable; None where the disk fails.
        """
        done: asyncio.Future[Position | None] = asyncio.get_running_loop().create_future()
        if self._abandoned:
            done.set_result(None)
            return done
        if self._state is _State.FAILED:
            self._state, self._base, self._works_again = _State.RECOVERING, step, False
        self._queue.append(_Rotation(step, done))
        self._kick()
        return done

    def saved(self, step: int, oldest: int) -> None:
        """The checkpoint of ``step`` is durable; ``oldest`` is the oldest one kept."""
        if self._state is _State.RECOVERING and step >= self._base:
            self._state, self._base = _State.CATCHING_UP, step
            self._durable_step = self.safe_step = max(self._durable_step, step)
            self._catch_up()
        self._queue.append(_Prune(oldest))
        self._kick()

    # -- writing -------------------------------------------------------------------------------------------

    @property
    def _holds_back(self) -> bool:
        """Whether a step is told only when it is durable."""
        return self._state in (_State.SOUND, _State.CATCHING_UP)

    def _catch_up(self) -> None:
        if self._state is _State.CATCHING_UP and not self._told_early:
            self._state = _State.SOUND
            self._bus.publish(JournalRestored(step=self._base, seconds=self._clock() - self._failed_at))

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _kick(self) -> None:
        if self._writing or not self._queue or self._abandoned:
            return
        batch, self._queue = self._queue, []
        self._writing = True
        writing = asyncio.get_running_loop().run_in_executor(self._executor, self._write, batch)
        writing.add_done_callback(lambda done: self._written(batch, done))

    def _write(self, batch: list[_Work]) -> list[Position]:
        """In the thread: everything that has gathered, with one sync."""
        journal, positions, dirty = self._journal, [], False
        try:
            for item in batch:
                match item:
                    case _Record():
                        journal.append(_entry(item, self._layout))
                        dirty = True
                    case _Rotation():
                        positions.append(journal.rotate(item.step))
                        dirty = False
                    case _Prune():
                        journal.prune(item.step)
                    case _Probe():
                        journal.probe(min(self._layout.vector_bytes, _MAX_PROBE_BYTES))
            if dirty:
                journal.sync()
        except BaseException:
            journal.close()  # after a failed write or sync nobody knows what the file holds: it is not gone on with
            raise
        return positions

    def _written(self, batch: list[_Work], done: asyncio.Future[list[Position]]) -> None:
        self._writing = False
        error = done.exception()
        if error is None:
            positions = iter(done.result())
            for item in batch:
                if isinstance(item, _Record):
                    self._durable_step = max(self._durable_step, item.version)
                    self._finish(item)
                elif isinstance(item, _Rotation):
                    position = next(positions)
                    if not item.done.done():  # cancelled
                        item.done.set_result(position)
                elif isinstance(item, _Probe):
                    self._works_again = True
            if self._holds_back:  # else there is a gap before what has been written
                self.safe_step = self._durable_step
            self._catch_up()
        else:
            if isinstance(error, FileNotFoundError):
                self.safe_step = None
            self._fail([*batch, *self._queue], error)
        self._changed.set()
        self._kick()

    def _fail(self, lost: list[_Work], error: BaseException) -> None:
        self._queue = []
        again = self._state is not _State.SOUND
        self._state = _State.FAILED
        self._superseded |= isinstance(error, Superseded)
        now = self._clock()
        self._retry_at = now + RETRY_S
        if not again:
            self._failed_at = now
        if self._superseded or not (isinstance(error, OSError | StoreError) or lacks_memory(error)):
            self._on_error(error)
        elif not again or now >= self._remind_at:
            told = str(error) if isinstance(error, StoreError) else in_one_line(error)
            self._remind(explain(error, looks=False) if isinstance(error, OSError) else told)
        for item in lost:  # said first: these steps are told and not durable
            if isinstance(item, _Record):
                self._finish(item)
            elif isinstance(item, _Rotation) and not item.done.done():
                item.done.set_result(None)

    def _finish(self, record: _Record) -> None:
        self._pending -= 1
        self._told_early -= record.told
        self._release(record.step)
        if not record.told:
            self._tell(record.event)

    def _tell(self, event: StepCommitted) -> None:
        if not self._superseded:
            self._bus.publish(event)
            failpoint("commit.after")

    def _release(self, step: AppliedStep) -> None:
        if step.root is not None:
            self.pool.give(step.root)

    def _remind(self, reason: str) -> None:
        now = self._clock()
        self._remind_at = now + REMIND_S
        seconds = now - self._failed_at
        self._bus.publish(
            JournalFailed(step=self._durable_step, reason=reason, seconds=seconds, safe_step=self.safe_step)
        )


# -- records ---------------------------------------------------------------------------------------------------


def _entry(record: _Record, layout: Layout) -> Entry:
    root, step = record.step.root, record.step
    assert root is not None
    # Pieces are noted by group and offset, not by bucket: the bucket size may be another one after a restart.
    pieces: list[list[int]] = []
    for bucket, present in zip(layout.result_buckets, step.present, strict=True):
        if not present:
            continue
        if pieces and pieces[-1][0] == bucket.group and pieces[-1][1] + pieces[-1][2] == bucket.offset:
            pieces[-1][2] += bucket.numel
        else:
            pieces.append([bucket.group, bucket.offset, bucket.numel])
    meta: dict[str, Any] = {
        "pieces": pieces,
        "untouched": sorted(step.untouched or ()),
        "num_samples": step.plan.num_samples,
        "samples_applied": record.samples_applied,
        "time": round(record.wall, 3),
        "event": to_record(record.event),
        **{name: list(values) for name, values in record.news.items() if values},
    }
    data = [bytes_of(root.group(group)[offset : offset + numel]) for group, offset, numel in pieces]
    return Entry(step=record.version, meta=meta, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One step applied again. ``line`` is its record for ``metrics.jsonl``; ``same`` whether it gave the same norm;
    ``bad_samples`` were found, ``numerics`` and ``devices`` came by then, and were not recorded before; ``counted`` are
    the leases that are in it, as ``Counted.records``."""

    applied: Applied
    samples_applied: int
    line: Mapping[str, object]
    same: bool
    bad_samples: tuple[int, ...] = ()
    numerics: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    counted: tuple[tuple[int, ...], ...] = ()


def apply_entry(entry: Entry, layout: Layout, rule: SyncRule, vector: ResultVector) -> Replayed:
    """Apply one record of the journal as its step was applied; ``vector`` is memory to do it in.

    Raises:
        CheckpointCorrupt: the record does not fit the layout.
    """
    meta: Any = entry.meta
    (data,) = entry.data
    present = [False] * len(layout.result_buckets)
    for group in layout.groups:
        if group.role != "frozen":
            neutral = {"grad": 0.0, "mean": -0.0, "max": torch.iinfo(torch.int64).min}[group.role]
            vector.group(group.index).fill_(neutral)
    at = 0
    try:
        for group_index, offset, numel in meta["pieces"]:
            piece = vector.group(group_index)[offset : offset + numel]
            target = bytes_of(piece)
            if len(piece) != numel or len(data) - at < len(target):
                raise ValueError("a piece lies outside of the vector")
            target[:] = data[at : at + len(target)]
            at += len(target)
            for bucket in layout.result_buckets:
                if bucket.group == group_index and bucket.offset < offset + numel:
                    present[bucket.index] |= bucket.offset + bucket.numel > offset
        untouched, samples, told = set(meta["untouched"]), int(meta["num_samples"]), meta["event"]
        bad_samples = tuple(map(int, meta.get("bad_samples", ())))
        numerics, devices = (tuple(map(str, meta.get(name, ()))) for name in ("numerics", "devices"))
        counted = tuple(tuple(map(int, one)) for one in meta.get("counted", ()))
        applied_before, line = int(meta["samples_applied"]), {"time": meta["time"], **told}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointCorrupt(
            f"journal, step {entry.step}", f"the record does not fit the model ({error!r})"
        ) from error
    applied = rule.apply(vector, present, samples, untouched, step=entry.step - 1)
    before = number(told.get("gradient_norm"))
    same = applied.gradient_norm == before or (applied.gradient_norm != applied.gradient_norm and before != before)
    return Replayed(
        applied=applied, samples_applied=applied_before, line=line, same=same, bad_samples=bad_samples,
        numerics=numerics, devices=devices, counted=counted,
    )  # fmt: skip
