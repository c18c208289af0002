"""Checkpoints of a run, off the step path: each is a copy made between two commits, written in an executor.

At most one is under way; one that falls due meanwhile is made at the next commit. A disk that fails, or memory that
lacks, does not end the run: it is said, once a minute as long as it lasts and whenever somebody asked for a checkpoint,
and tried again, at first after seconds, later once a minute. State that no disk could keep ends the run. A checkpoint
counts only when all that led to it is on the disk too: its steps' lines of metrics.jsonl and, with a journal, their
records.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from w5xde_async.compute.halving import lacks_memory
from w5xde_async.coordinator.durability.journal_writer import REMIND_S, RETRY_S, JournalWriter
from w5xde_async.coordinator.training import Commit, ParametersNotFinite, Training
from w5xde_async.errors import JobError, StoreError, W5xdeError, in_one_line
from w5xde_async.openmp import release_helpers
from w5xde_async.store.checkpoint import CheckpointStore, Record, SavedCheckpoint
from w5xde_async.store.journal import Position
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import Bus, CheckpointFailed, CheckpointSaved
from w5xde_async.users_code import users_code

_Copied = tuple[Record, float, int]  # a checkpoint, the seconds that copying took, and the state's version


class RunState(Protocol):
    """What of a run is kept."""

    @property
    def version(self) -> int:
        """Of a rule whose versions are not its steps; else 0."""

    def record(self, step: int, samples: int) -> Record:
        """A copy of everything that a resume needs, after so many steps and samples. In the parameters' thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """Where checkpoints go, and how often.

    ``store`` None: nothing is kept. ``every``: steps between two; ``every_s``: seconds, where these are over first.
    ``before_save`` runs before one is written, and may block. ``saved_step``: of the newest one that there is when the
    run starts; -1: none.
    """

    store: CheckpointStore | None
    every: int
    every_s: float = math.inf
    before_save: Callable[[], None] = lambda: None
    saved_step: int = -1


class Checkpointing:
    """Checkpoints of one run. ``save_error`` is what the last attempt to save met, if anything."""

    def __init__(
        self, policy: CheckpointPolicy, state: RunState, training: Training, bus: Bus, clock: Callable[[], float],
        journal: JournalWriter | None = None,
    ) -> None:  # fmt: skip
        self._policy, self._state, self._training = policy, state, training
        self._bus, self._clock, self._journal = bus, clock, journal
        self.save_error: W5xdeError | None = None
        self._wanted = self._asked = False
        self._saved_step, self._saved_version = policy.saved_step, state.version
        self._tried_at = clock()
        self._retry_at = self._remind_at = self._retry_s = 0.0  # after a failure
        self._saving: asyncio.Task[None] | None = None

    def go_on_with(self, state: RunState, training: Training) -> None:
        """The run goes on by another rule; nothing is under way. What has been saved is of the one before."""
        self._state, self._training, self._saved_version = state, training, -1

    def request(self) -> None:
        """A checkpoint after the next commit; that it failed is said even if it was said a moment ago."""
        self._wanted = self._asked = True

    def on_commit(self, commit: Commit, tasks: asyncio.TaskGroup) -> None:
        """Runs before anything else can touch the parameters: what is submitted to their thread sees this version."""
        late = self._clock() >= self._tried_at + self._policy.every_s
        due = self._wanted or late or commit.passes(self._policy.every) or self._again()
        if due and self._policy.store is not None:
            self._wanted = self._saving is not None and not self._saving.done()
            if not self._wanted:
                self._tried_at = self._clock()
                asked, self._asked = self._asked, False
                saving = self._save(
                    self._policy.store, commit.step, self._copy(commit.step), self._rotate(commit.step), asked=asked
                )  # fmt: skip
                self._saving = tasks.create_task(saving, name=f"checkpoint {commit.step}")

    async def save_last(self) -> None:
        """The run has ended: a last checkpoint."""
        if self._journal is not None:
            await self._journal.flush()
        await self.settle()
        step, store = self._training.progress, self._policy.store
        stands = step and not self._training.aggregator.torn
        saved = self._saved_step == step and self._saved_version == self._state.version
        if stands and store is not None and not (saved and await self._lies_there(store, step)):
            await self._save(store, step, self._copy(step), self._rotate(step))

    @staticmethod
    async def _lies_there(store: CheckpointStore, step: int) -> bool:
        """Whether what was saved has not been deleted, or moved, with its directory."""
        with suppress(StoreError, OSError):  # which says nothing of it
            return step in await asyncio.get_running_loop().run_in_executor(None, store.steps)
        return True

    def abandon(self) -> bool:
        """Wait for nothing that is under way: its thread is left to itself. Whether anything was."""
        return self._saving is not None and self._saving.cancel()

    async def settle(self) -> None:
        """Wait for what is under way."""
        if self._saving is not None and not self._saving.done():
            await asyncio.wait([self._saving])

    def _again(self) -> bool:
        """Whether a disk that failed is to be tried again."""
        failed = self.save_error is not None and self._clock() >= self._retry_at
        return failed or (self._journal is not None and self._journal.wants_checkpoint)

    def _rotate(self, step: int) -> asyncio.Future[Position | None] | None:
        return None if self._journal is None else self._journal.rotate(step)

    def _copy(self, step: int) -> asyncio.Future[_Copied]:
        """Have the parameters' thread copy what is to be saved, before anything that is given to it later."""
        samples = self._training.phase.samples_applied

        def copy() -> _Copied:
            began = time.perf_counter()
            with users_code():  # an optimizer's and a scheduler's state_dict()
                record = self._state.record(step, samples)
            release_helpers()
            return record, time.perf_counter() - began, self._state.version

        return self._training.aggregator.submit(copy)

    async def _save(
        self, store: CheckpointStore, step: int, copying: asyncio.Future[_Copied],
        rotation: asyncio.Future[Position | None] | None, *, asked: bool = False,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()

        def write() -> SavedCheckpoint:
            try:
                self._policy.before_save()
                return store.save(record)
            except StoreError:
                raise
            except Exception as error:  # no memory for it, say: a later one may fare better
                raise StoreError(f"checkpoint {step}", f"cannot save it: {in_one_line(error)}") from error

        try:
            record, pause_s, version = await copying
        except ParametersNotFinite as error:
            self._training.phase.lifecycle.fail(error)
            return
        except Exception as error:
            if lacks_memory(error):
                reason = StoreError(f"checkpoint {step}", f"cannot copy it: {in_one_line(error)}")
                await self._put_off(store, step, reason, asked)
                return
            # Whatever a state_dict() raises: no later checkpoint would fare better.
            what = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            self.save_error = JobError("optimizer", f"after step {step} its state cannot be kept: {what}")
            self._training.phase.lifecycle.fail(self.save_error)
            return
        self._training.phase.note_beside(record.beside)
        if rotation is not None:  # done when every step up to this one is in the journal
            position = await rotation
            record.meta["journal"] = None if position is None else [position.sequence, position.chain]
        try:
            saved = await loop.run_in_executor(None, write)
        except Superseded as error:
            self.save_error = error
            self._training.phase.lifecycle.fail(error)
            return
        except StoreError as error:
            await self._put_off(store, step, error, asked)
            return
        self.save_error, self._retry_s = None, 0.0
        self._saved_step, self._saved_version = max(self._saved_step, step), version
        if self._journal is not None:
            self._journal.saved(step, saved.oldest)
        self._bus.publish(
            CheckpointSaved(
                step=step, path=str(saved.path), nbytes=saved.nbytes, pause_s=pause_s, seconds=saved.seconds
            )
        )

    async def _put_off(self, store: CheckpointStore, step: int, error: StoreError, asked: bool) -> None:
        """It is tried again later; said at once where somebody ``asked`` for it."""
        now = self._clock()
        self._retry_s = min(max(2 * self._retry_s, RETRY_S), REMIND_S)  # each attempt costs a copy
        self._retry_at = now + self._retry_s
        if asked or self.save_error is None or now >= self._remind_at:
            self._remind_at = now + REMIND_S
            stands = self._saved_step <= 0 or await self._lies_there(store, self._saved_step)
            safe_step = max(self._saved_step, 0) if stands else None
            if safe_step is not None and self._journal is not None:
                safe_step = max(safe_step, self._journal.safe_step or 0)
            self._bus.publish(CheckpointFailed(step=step, reason=str(error), safe_step=safe_step))
        self.save_error = error
