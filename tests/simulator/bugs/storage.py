"""Bugs of what is kept: resumes, checkpoints, journal."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulator.bugs.registry import BUGS, POWER, RESTART, Bug, Put, bug
from tests.simulator.disk import HostFilesystem

from w5xde_async.coordinator.durability.checkpointing import Checkpointing
from w5xde_async.coordinator.run import resume
from w5xde_async.coordinator.run.shutdown import Shutdown
from w5xde_async.coordinator.run.spec import ResumePoint, RunSpec
from w5xde_async.data.loader import Loader
from w5xde_async.plan.sampler import Sampler, StepPlan
from w5xde_async.plan.tree import Block
from w5xde_async.store import rundir
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.store.journal import Journal
from w5xde_async.store.rundir import RunDir
from w5xde_async.updates.sync import SyncRule

# -- resume ----------------------------------------------------------------------------------------------


@bug("cursor-ahead", "a resume skips one step", *RESTART)
def _cursor_ahead(put: Put) -> None:
    real = resume._restore

    def restore(*args: Any, **kwargs: Any) -> ResumePoint:
        point = real(*args, **kwargs)
        return dataclasses.replace(point, step=point.step + 1)

    put(resume, "_restore", restore)


@bug("cursor-behind", "a resume does one step again", *RESTART)
def _cursor_behind(put: Put) -> None:
    real = resume._restore

    def restore(*args: Any, **kwargs: Any) -> ResumePoint:
        point = real(*args, **kwargs)
        return dataclasses.replace(point, step=max(0, point.step - 1))

    put(resume, "_restore", restore)


def _forgetting(forget: Callable[[dict[str, Any], SyncRule], None]) -> Callable[[Put], None]:
    def plant(put: Put) -> None:
        real = SyncRule.load_state_dict

        def load(self: SyncRule, state: dict[str, Any]) -> None:
            state = dict(state)
            forget(state, self)
            real(self, state)

        put(SyncRule, "load_state_dict", load)

    return plant


def _no_momentum(state: dict[str, Any], rule: SyncRule) -> None:
    state["optimizer"] = {**state["optimizer"], "state": {}}


def _no_schedule(state: dict[str, Any], rule: SyncRule) -> None:
    if rule.scheduler is not None:
        state["scheduler"] = rule.scheduler.state_dict()


def _no_scale(state: dict[str, Any], rule: SyncRule) -> None:
    if rule.scale is not None:
        state["scale"] = [rule.scale.value, rule.scale.good_steps]


BUGS["forget-momentum"] = Bug("a resume begins with a fresh optimizer state", _forgetting(_no_momentum), RESTART)
BUGS["forget-schedule"] = Bug("a resume begins the schedule anew", _forgetting(_no_schedule), RESTART)
BUGS["forget-loss-scale"] = Bug("a resume begins with the first loss scale", _forgetting(_no_scale), RESTART)


@bug("wrong-permutation", "after a resume the epochs are counted from there", *RESTART)
def _wrong_permutation(put: Put) -> None:
    real_plan, real_restore = Sampler.plan, resume._restore
    shift: dict[int, int] = {}

    def restore(spec: RunSpec, *args: Any, **kwargs: Any) -> ResumePoint:
        point = real_restore(spec, *args, **kwargs)
        shift[id(spec.sampler)] = point.step // spec.sampler.steps_per_epoch
        return point

    def plan(self: Sampler, step: int) -> StepPlan:
        made = real_plan(self, step)
        if back := shift.get(id(self), 0):
            older = real_plan(self, max(0, step - back * self.steps_per_epoch))
            return dataclasses.replace(made, indices=older.indices)
        return made

    put(resume, "_restore", restore)
    put(Sampler, "plan", plan)


@bug("samples-counted-twice", "a resume counts the samples of the step that it resumed at again", *RESTART)
def _samples_twice(put: Put) -> None:
    real = resume._restore

    def restore(spec: RunSpec, *args: Any, **kwargs: Any) -> ResumePoint:
        point = real(spec, *args, **kwargs)
        if not point.step:
            return point
        return dataclasses.replace(point, samples=point.samples + spec.sampler.plan(point.step - 1).num_samples)

    put(resume, "_restore", restore)


@bug("copy-late", "a checkpoint is copied some time after the commit that it is named for", *RESTART)
def _copy_late(put: Put) -> None:
    real = Checkpointing._copy

    async def later(checkpointing: Checkpointing, step: int) -> Any:
        await asyncio.sleep(0.3)
        return await real(checkpointing, step)

    def copy(self: Checkpointing, step: int) -> asyncio.Future[Any]:
        return asyncio.ensure_future(later(self, step))

    put(Checkpointing, "_copy", copy)


# -- the disk --------------------------------------------------------------------------------------------


@bug(
    "told-too-early",
    "workers are told of the end before the last step is on the disk",
    "coordinator killed",
    "disk full",
)
def _told_early(put: Put) -> None:
    real_save, real_evaluate = Shutdown._save, Shutdown._evaluate

    async def save(self: Shutdown) -> None:
        training = self._run.training
        if training.progress < training.total_steps:
            await real_save(self)

    async def evaluate(self: Shutdown, *, finished: bool) -> None:
        if finished:
            await real_save(self)
        await real_evaluate(self, finished=finished)

    put(Shutdown, "_save", save)
    put(Shutdown, "_evaluate", evaluate)


@bug(
    "no-store-fence",
    "a coordinator that has been superseded goes on writing checkpoints and journal",
    "two coordinators",
)
def _no_fence(put: Put) -> None:
    put(RunDir, "_check_term", lambda self: None)


@bug("no-fsync", "files are not synced", *POWER)
def _no_fsync(put: Put) -> None:
    def sync(self: HostFilesystem, file: Any) -> None:
        self._call()
        file.flush()

    put(HostFilesystem, "sync", sync)


@bug("no-directory-sync", "directories are not synced after a rename", *POWER)
def _no_directory_sync(put: Put) -> None:
    put(HostFilesystem, "sync_directory", lambda self, path: self._call(grows=False))


@bug("prune-first", "older checkpoints are removed before the new one is durable", *POWER)
def _prune_first(put: Put) -> None:
    real = CheckpointStore.save

    def save(self: CheckpointStore, record: Any) -> Any:
        for path in self._paths():
            self._filesystem.remove(path)
        return real(self, record)

    put(CheckpointStore, "save", save)


@bug("term-in-place", "the run's term is written over the old one, not beside it and renamed", *POWER)
def _in_place(put: Put) -> None:
    def replace_file(filesystem: Any, path: Path, fill: Callable[[Any], None]) -> None:
        if path.exists():
            filesystem.remove(path)
        with filesystem.create(path) as file:
            fill(file)
            filesystem.sync(file)
        filesystem.sync_directory(path.parent)

    put(rundir, "replace_file", replace_file)


@bug("term-not-stored", "a start does not store its term", *RESTART)
def _term_not_stored(put: Put) -> None:
    def next_term(self: RunDir) -> int:
        self.term += 1
        return self.term

    put(RunDir, "next_term", next_term)


@bug("oldest-checkpoint", "a resume takes the oldest checkpoint", *RESTART)
def _oldest(put: Put) -> None:
    def latest(self: CheckpointStore) -> Any:
        paths = self._paths()
        return (self.load(paths[0]) if paths else None), []

    put(CheckpointStore, "latest", latest)


@bug("journal-tells-early", "a step counts as durable before its record is synced", *POWER)
def _tells_early(put: Put) -> None:
    put(Journal, "sync", lambda self: None)


@bug("chunk-dropped-early", "a chunk of data is forgotten when the first of its blocks is done")
def _chunk_early(put: Put) -> None:
    def finished(self: Loader, step: int, block: Block) -> None:
        for number in self._numbers(block):
            chunk = self._chunks.get((step, number))
            if chunk is not None:
                chunk.read = None
        self._prefetch()

    put(Loader, "finished", finished)
