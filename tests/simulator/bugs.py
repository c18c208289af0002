"""Planted bugs: defects put into the real rooms at run time, to see that the simulator notices each.

A bug replaces methods by name for the time of one run; nothing of it stays. ``docs/planted-bugs.md`` says which seed
caught which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.simulator.disk import HostFilesystem

from w5xde_async.coordinator import preparation
from w5xde_async.coordinator.aggregator import Aggregator
from w5xde_async.coordinator.following import Following
from w5xde_async.coordinator.journaling import Journaling
from w5xde_async.coordinator.liveness import Liveness
from w5xde_async.coordinator.loader import Loader
from w5xde_async.coordinator.publisher import Publisher
from w5xde_async.coordinator.results import Place, Results
from w5xde_async.coordinator.training import Training
from w5xde_async.net.outbox import Outbox
from w5xde_async.params.reducer import Reducer
from w5xde_async.plan.ledger import Ledger, OpenStep
from w5xde_async.plan.sampler import Sampler, StepPlan
from w5xde_async.plan.tree import Block, Frontier, Merge
from w5xde_async.store import rundir
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.store.rundir import RunDir
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.messages import Result
from w5xde_async.worker import service as worker
from w5xde_async.worker.inbox import Inbox, Version
from w5xde_async.worker.serving import Serving

__all__ = ["BUGS", "Bug", "planted"]

Put = Callable[[Any, str, Any], None]


@dataclasses.dataclass(frozen=True)
class Bug:
    """``text`` says what is wrong, ``plant`` puts it there."""

    text: str
    plant: Callable[[Put], None]


BUGS: dict[str, Bug] = {}


def _bug(name: str, text: str) -> Callable[[Callable[[Put], None]], Callable[[Put], None]]:
    def register(plant: Callable[[Put], None]) -> Callable[[Put], None]:
        BUGS[name] = Bug(text, plant)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is there for the time of the block."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, attribute: str, value: Any) -> None:
        undo.append((owner, attribute, owner.__dict__[attribute]))
        setattr(owner, attribute, value)

    try:
        BUGS[name].plant(put)
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)


# -- leases ----------------------------------------------------------------------------------------------------


@_bug("stale-lease", "a lease that was given back stays open: two workers hold the same block")
def _stale_lease(put: Put) -> None:
    real = Ledger.give_back

    def give_back(self: Ledger, lease: int) -> Any:
        grant = real(self, lease)
        self._grants[lease] = grant
        self._held.setdefault(grant.worker, []).append(lease)
        return grant

    put(Ledger, "give_back", give_back)


@_bug("no-requeue", "the leases of a worker that is lost are forgotten, not given out again")
def _no_requeue(put: Put) -> None:
    def lose(self: Ledger, worker: str) -> Any:
        for lease in tuple(self._held.get(worker, ())):
            self._drop(lease)
        return [], None

    put(Ledger, "lose", lose)


@_bug("duplicate-fill", "a result for a slot that is filled is taken, and added, again")
def _duplicate_fill(put: Put) -> None:
    def fill(self: Ledger, lease: int, bucket: int) -> bool:
        self._slot(self._grants[lease]).buckets.add(bucket)
        return True

    put(Ledger, "fill", fill)
    put(Ledger, "filled", lambda self, lease, bucket: False)


@_bug("lease-numbers-restart", "leases are numbered from 1 again in each term")
def _lease_numbers(put: Put) -> None:
    real = Ledger.__init__

    def init(self: Ledger, **kwargs: Any) -> None:
        kwargs.pop("first_lease", None)
        real(self, **kwargs)

    put(Ledger, "__init__", init)


@_bug("any-worker", "a result is taken for a lease of another worker, or of none any more")
def _any_worker(put: Put) -> None:
    real_place, real_get = Results.place, Ledger.get
    latest: dict[int, Any] = {}

    def get(self: Ledger, lease: int) -> Any:
        grant = real_get(self, lease)
        if grant is not None:
            latest[id(self)] = grant
        return grant

    def place(self: Results, session: Any, result: Result, spec: Any, *, member: bool) -> Place:
        placed = real_place(self, session, result, spec, member=member)
        grant = latest.get(id(self._ledger))
        if placed.view is None and grant is not None and self._aggregator.step is not None:
            if self._ledger._grants.get(grant.lease) is grant and grant.step == self._aggregator.step.plan.step:
                bucket = self._layout.result_buckets[result.bucket]
                self._aggregator.memory(grant.block, bucket.index)[:] = bytes(spec.nbytes)
        return placed

    put(Ledger, "get", get)
    put(Results, "place", place)


@_bug("early-commit", "a step counts as complete with one leaf missing")
def _early_commit(put: Put) -> None:
    put(OpenStep, "complete", property(lambda self: self.finished_leaves >= max(1, self.num_leaves - 1)))


@_bug("no-deadline", "deadlines never fire")
def _no_deadline(put: Put) -> None:
    put(Ledger, "overdue", lambda self, now: [])


@_bug("overdue-kept", "a lease that is overdue is revoked at its worker and given to nobody else")
def _overdue_kept(put: Put) -> None:
    put(Liveness, "_overdue", lambda self, grant: self._revoke(grant, "its deadline passed"))


@_bug("reconnect-keeps-leases", "a worker that connects anew keeps the leases of its old connection")
def _reconnect(put: Put) -> None:
    real = Training._return_leases

    def return_leases(self: Training, session: Any) -> int:
        later = any(s.worker_id == session.worker_id for s in self._joining) or session.seen_bytes % 2
        return 0 if later else real(self, session)

    put(Training, "_return_leases", return_leases)


@_bug("silent-kept", "a silent worker is never given up")
def _silent(put: Put) -> None:
    real = Liveness.tick

    def tick(self: Liveness, now: float, activity: str) -> None:
        for member in self._membership.members.values():
            member.last_seen = now
        put_back = self._ledger.overdue
        self._ledger.overdue = lambda now: []  # type: ignore[method-assign]
        try:
            real(self, now, activity)
        finally:
            self._ledger.overdue = put_back  # type: ignore[method-assign]

    put(Liveness, "tick", tick)


# -- sums ------------------------------------------------------------------------------------------------------


@_bug("arrival-order", "block sums are added in the order in which they arrive")
def _arrival_order(put: Put) -> None:
    waiting: dict[int, list[int]] = {}

    def fill(self: Frontier, block: Block) -> list[Merge]:
        first = self._filled == 0
        self._filled += block.num_leaves
        late = waiting.setdefault(id(self), [])
        if first:
            late.clear()
        if block.start == 0:
            self._level[0] = 0
            merges = [Merge(0, start) for start in late]
            late.clear()
            return merges
        if 0 in self._level:
            return [Merge(0, block.start)]
        late.append(block.start)
        return []

    put(Frontier, "fill", fill)


@_bug("drop-last-bucket", "the last bucket of a result is left out of the sum")
def _drop_bucket(put: Put) -> None:
    real = Aggregator.fill

    def fill(self: Aggregator, block: Block, bucket: int, *, present: bool) -> bool:
        last = bucket == len(self.layout.result_buckets) - 1
        return real(self, block, bucket, present=present and not last)

    put(Aggregator, "fill", fill)


@_bug("absent-is-present", "a bucket that no leaf of the block touched is added all the same")
def _absent(put: Put) -> None:
    real = Reducer.put
    put(Reducer, "put", lambda self, bucket, start, *, present: real(self, bucket, start, present=True))


@_bug("short-step-mean", "a step's mean is taken over the batch size though the epoch's last step is shorter")
def _short_step(put: Put) -> None:
    real = SyncRule.apply

    def apply(self: SyncRule, root: Any, present: Any, samples: int, untouched: Any) -> Any:
        whole = max(samples, getattr(self, "_whole", 0))
        self._whole = whole  # type: ignore[attr-defined]
        return real(self, root, present, whole, untouched)

    put(SyncRule, "apply", apply)


@_bug("accept-infinite", "a gradient that is not finite is applied")
def _infinite(put: Put) -> None:
    put(SyncRule, "_norm", lambda self, root: 1.0)


@_bug("forget-partial", "what a lost worker had sent of a block is forgotten by the sum, not by the ledger")
def _forget_partial(put: Put) -> None:
    real = Ledger.lose

    def lose(self: Ledger, worker: str) -> Any:
        halves = [grant for grant in self.held(worker) if self._slot(grant).buckets]
        for grant in halves:
            self._slot(grant).buckets.update(range(self.num_buckets - 1))
        return real(self, worker)

    put(Ledger, "lose", lose)


# -- versions --------------------------------------------------------------------------------------------------


@_bug("publish-before-apply", "workers are sent the parameters of the version before")
def _publish_early(put: Put) -> None:
    real_frame, real_begin = Publisher._frame, Publisher.begin
    before: dict[int, list[bytes]] = {}
    now: dict[int, list[bytes]] = {}

    def begin(self: Publisher, version: int, loss_scale: float) -> None:
        state = [bytes(piece) for piece in self._state.bucket_bytes]
        before[id(self)] = now.get(id(self), state) if version else state
        now[id(self)] = state
        real_begin(self, version, loss_scale)

    def frame(self: Publisher, number: int, num_buckets: int) -> Any:
        state = self._state
        stale = before[id(self)]
        self._state = SimpleNamespace(bucket_bytes=[memoryview(piece) for piece in stale])  # type: ignore[assignment]
        try:
            return real_frame(self, number, num_buckets)
        finally:
            self._state = state

    put(Publisher, "begin", begin)
    put(Publisher, "_frame", frame)


@_bug("superseded-is-sent", "a bucket counts as sent when it is queued, also when a newer version takes its place")
def _superseded(put: Put) -> None:
    real = Outbox.post

    def post(self: Outbox, chunks: Any, *, sent: Any = None, version: int = -1, lease: int = 0) -> None:
        if sent is not None and version >= 0:
            sent()
        real(self, chunks, sent=sent, version=version, lease=lease)

    put(Outbox, "post", post)


@_bug("torn-version", "a version counts as whole when its first bucket has come")
def _torn_version(put: Put) -> None:
    real = Inbox.params

    def params(self: Inbox, message: Any) -> Version | None:
        if message.version == self.version:
            self._fresh.add(message.bucket)
            return None
        return real(self, dataclasses.replace(message, num_buckets=min(1, message.num_buckets)))

    put(Inbox, "params", params)


@_bug("old-version", "a worker computes a lease with the parameters that it has, whatever version the lease names")
def _old_version(put: Put) -> None:
    def take(self: Inbox) -> list[Any]:
        if self.version < 0:
            return []
        held, self._leases = list(self._leases.values()), {}
        return [
            dataclasses.replace(item, message=dataclasses.replace(item.message, version=self.version)) for item in held
        ]

    put(Inbox, "take", take)


@_bug("release-early", "a worker's result memory is reused before it is sent")
def _release_early(put: Put) -> None:
    real = Serving._send_done

    def send_done(self: Serving, lease: int, outcome: Any, *rest: Any) -> None:
        real(self, lease, outcome, *rest)
        for vector in outcome.vectors:
            vector.memory.fill_(0xFF)

    put(Serving, "_send_done", send_done)


@_bug("ignore-term", "a worker serves a coordinator of an older term than it has served")
def _ignore_term(put: Put) -> None:
    real = worker.join

    async def join(link: Any, **kwargs: Any) -> Any:
        return await real(link, **{**kwargs, "terms": {}})

    put(worker, "join", join)


# -- resume ----------------------------------------------------------------------------------------------------


@_bug("cursor-ahead", "a resume skips one step")
def _cursor_ahead(put: Put) -> None:
    real = preparation._restore

    def restore(prepared: Any, record: Any, where: str) -> None:
        real(prepared, record, where)
        prepared.first_step += 1

    put(preparation, "_restore", restore)


@_bug("cursor-behind", "a resume does one step again")
def _cursor_behind(put: Put) -> None:
    real = preparation._restore

    def restore(prepared: Any, record: Any, where: str) -> None:
        real(prepared, record, where)
        prepared.first_step = max(0, prepared.first_step - 1)

    put(preparation, "_restore", restore)


def _forgetting(name: str, forget: Callable[[dict[str, Any], SyncRule], None]) -> Callable[[Put], None]:
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


BUGS["forget-momentum"] = Bug("a resume begins with a fresh optimizer state", _forgetting("momentum", _no_momentum))
BUGS["forget-schedule"] = Bug("a resume begins the schedule anew", _forgetting("schedule", _no_schedule))
BUGS["forget-loss-scale"] = Bug("a resume begins with the first loss scale", _forgetting("scale", _no_scale))


@_bug("wrong-permutation", "after a resume the epochs are counted from there")
def _wrong_permutation(put: Put) -> None:
    real_plan, real_restore = Sampler.plan, preparation._restore
    shift: dict[int, int] = {}

    def restore(prepared: Any, record: Any, where: str) -> None:
        real_restore(prepared, record, where)
        shift[id(prepared.sampler)] = prepared.first_step // prepared.sampler.steps_per_epoch

    def plan(self: Sampler, step: int) -> StepPlan:
        made = real_plan(self, step)
        if back := shift.get(id(self), 0):
            older = real_plan(self, max(0, step - back * self.steps_per_epoch))
            return dataclasses.replace(made, indices=older.indices)
        return made

    put(preparation, "_restore", restore)
    put(Sampler, "plan", plan)


@_bug("samples-counted-twice", "a resume counts the samples of the step that it resumed at again")
def _samples_twice(put: Put) -> None:
    real = preparation._restore

    def restore(prepared: Any, record: Any, where: str) -> None:
        real(prepared, record, where)
        if prepared.first_step:
            prepared.samples += prepared.sampler.plan(prepared.first_step - 1).num_samples

    put(preparation, "_restore", restore)


@_bug("copy-late", "a checkpoint is copied some time after the commit that it is named for")
def _copy_late(put: Put) -> None:
    import asyncio

    real = Following._save

    async def save(self: Following, *args: Any) -> None:
        await asyncio.sleep(0.3)
        await real(self, *args)

    put(Following, "_save", save)


# -- the disk --------------------------------------------------------------------------------------------------


@_bug("told-too-early", "workers are told of the end before the last step is on the disk")
def _told_early(put: Put) -> None:
    real = Following.finish

    async def finish(self: Following, *, evaluate: bool) -> None:
        if evaluate or self._training.version < self._training.total_steps:
            await real(self, evaluate=evaluate)

    put(Following, "finish", finish)


@_bug("no-store-fence", "a coordinator that has been superseded goes on writing checkpoints and journal")
def _no_fence(put: Put) -> None:
    put(RunDir, "_check_term", lambda self: None)


@_bug("no-fsync", "files are not synced")
def _no_fsync(put: Put) -> None:
    def sync(self: HostFilesystem, file: Any) -> None:
        self._call()
        file.flush()

    put(HostFilesystem, "sync", sync)


@_bug("no-directory-sync", "directories are not synced after a rename")
def _no_directory_sync(put: Put) -> None:
    put(HostFilesystem, "sync_directory", lambda self, path: self._call(grows=False))


@_bug("prune-first", "older checkpoints are removed before the new one is durable")
def _prune_first(put: Put) -> None:
    real = CheckpointStore.save

    def save(self: CheckpointStore, record: Any) -> Any:
        for path in self._paths():
            self._filesystem.remove(path)
        return real(self, record)

    put(CheckpointStore, "save", save)


@_bug("term-in-place", "the run's term is written over the old one, not beside it and renamed")
def _in_place(put: Put) -> None:
    def replace_file(filesystem: Any, path: Path, fill: Callable[[Any], None]) -> None:
        if path.exists():
            filesystem.remove(path)
        with filesystem.create(path) as file:
            fill(file)
            filesystem.sync(file)
        filesystem.sync_directory(path.parent)

    put(rundir, "replace_file", replace_file)


@_bug("term-not-stored", "a start does not store its term")
def _term_not_stored(put: Put) -> None:
    def next_term(self: RunDir) -> int:
        self._term += 1
        return self._term

    put(RunDir, "next_term", next_term)


@_bug("oldest-checkpoint", "a resume takes the oldest checkpoint")
def _oldest(put: Put) -> None:
    def latest(self: CheckpointStore) -> Any:
        paths = self._paths()
        return (self.load(paths[0]) if paths else None), []

    put(CheckpointStore, "latest", latest)


@_bug("journal-tells-early", "a step counts as durable before its record is synced")
def _tells_early(put: Put) -> None:
    from w5xde_async.store.journal import Journal

    put(Journal, "sync", lambda self: None)


@_bug("chunk-dropped-early", "a chunk of data is forgotten when the first of its blocks is done")
def _chunk_early(put: Put) -> None:
    def finished(self: Loader, step: int, block: Block) -> None:
        for number in range(block.start // self._chunk_leaves, (block.stop - 1) // self._chunk_leaves + 1):
            chunk = self._chunks.get((step, number))
            if chunk is not None:
                chunk.ready = False
        self._prefetch()

    put(Loader, "finished", finished)


_ = (torch, Journaling)
