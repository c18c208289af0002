"""Bugs within a step: leases, sums, versions."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from msgspec import structs
from tests.simulator.bugs.registry import LOST, RESTART, Put, bug

from w5xde_async.coordinator.parameters.publisher import LivePublisher
from w5xde_async.coordinator.sync.results import Results
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.hub.members.liveness import Liveness
from w5xde_async.hub.members.session import Uptake
from w5xde_async.hub.work.block_store import BlockStore, Destination, SlotKey
from w5xde_async.net.outbox import Outbox
from w5xde_async.params.reducer import Reducer
from w5xde_async.plan.leases import LeaseTable, LeaseTerms
from w5xde_async.plan.ledger import Ledger, OpenStep
from w5xde_async.plan.tree import Block, Frontier, Merge
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.messages import Result
from w5xde_async.worker.connection import dialing
from w5xde_async.worker.connection.inbox import Inbox
from w5xde_async.worker.connection.leases import Leases
from w5xde_async.worker.executors.executor import Unsent, Version

# -- leases ----------------------------------------------------------------------------------------------


@bug(
    "stale-lease",
    "a lease that was given back stays open: two workers hold the same block",
    "worker ten times slower",
    "worker drained",
    *LOST,
)
def _stale_lease(put: Put) -> None:
    real = Ledger.give_back

    def give_back(self: Ledger, lease: int) -> Any:
        grant = real(self, lease)
        self._grants[lease] = grant
        self._held.setdefault(grant.worker, []).append(lease)
        return grant

    put(Ledger, "give_back", give_back)


@bug(
    "own-lease-overdue",
    "a lease that the coordinator computes itself is taken from it when it takes long, and backed up",
    "late joiner",
    "worker killed",
    kind="curses",
)
def _own_lease_overdue(put: Put) -> None:
    def overdue(self: Ledger, now: float) -> Any:
        current = next(iter(self._steps.values()), None)
        held = () if current is None else current.leases.values()
        return [grant for grant in held if self._is_overdue(grant, now) and not self._waits(grant)]

    def unbacked(self: Ledger, lease: int) -> bool:
        return lease not in self._audits and not self._slot(self._grants[lease]).contested

    put(Ledger, "overdue", overdue)
    put(Ledger, "unbacked", unbacked)


@bug("no-requeue", "the leases of a worker that is lost are forgotten, not given out again", *LOST)
def _no_requeue(put: Put) -> None:
    def lose(self: Ledger, worker: str, *, died: bool = True) -> Any:
        for lease in tuple(self._held.get(worker, ())):
            self._drop(lease)
        return [], None

    put(Ledger, "lose", lose)


@bug("duplicate-fill", "a result for a slot that is filled is taken, and added, again", *LOST)
def _duplicate_fill(put: Put) -> None:
    real = BlockStore.reserve

    def reserve(self: BlockStore, key: SlotKey, writer: Any) -> memoryview | None:
        self._filled.get(key.of, {}).pop(key.bucket, None)
        return real(self, key, writer)

    put(BlockStore, "reserve", reserve)
    put(BlockStore, "is_filled", lambda self, key: False)
    put(SyncTraining, "_there", lambda self, grant: ())  # nobody is told what need not be sent


@bug("lease-numbers-restart", "leases are numbered from 1 again in each term", "frames replayed", *RESTART)
def _lease_numbers(put: Put) -> None:
    real = Ledger.__init__

    def init(self: Ledger, terms: LeaseTerms, **kwargs: Any) -> None:
        real(self, dataclasses.replace(terms, first_lease=1), **kwargs)

    put(Ledger, "__init__", init)


@bug(
    "any-worker",
    "a result is taken for a lease of another worker, or of none any more",
    "worker ten times slower",
    "frames replayed",
    *LOST,
)
def _any_worker(put: Put) -> None:
    real_place, real_get = Results.place, LeaseTable.held_by
    latest: dict[int, Any] = {}

    def held_by(self: LeaseTable[Any], worker: str, lease: int) -> Any:
        if (grant := self.get(lease)) is not None:
            latest[id(self)] = grant
        return real_get(self, worker, lease)

    def place(self: Results, session: Any, result: Result, spec: Any, *, member: bool) -> Destination:
        placed = real_place(self, session, result, spec, member=member)
        grant = latest.get(id(self._ledger))
        if placed.view is None and grant is not None and self._aggregator.step is not None:
            if self._ledger._grants.get(grant.lease) is grant and grant.step == self._aggregator.step.plan.step:
                self._store.vector(grant.block).bucket_bytes[result.bucket][:] = bytes(spec.nbytes)
        return placed

    put(LeaseTable, "held_by", held_by)
    put(Results, "place", place)


@bug("early-commit", "a step counts as complete with one leaf missing")
def _early_commit(put: Put) -> None:
    put(OpenStep, "complete", property(lambda self: self.finished_leaves >= max(1, self.num_leaves - 1)))


@bug("no-deadline", "deadlines never fire", "worker ten times slower", "peer that never reads", "worker reads nothing")
def _no_deadline(put: Put) -> None:
    put(Ledger, "overdue", lambda self, now: [])


@bug(
    "overdue-kept",
    "a lease that is overdue is revoked at its worker and given to nobody else",
    "worker ten times slower",
    "peer that never reads",
    "worker reads nothing",
)
def _overdue_kept(put: Put) -> None:
    put(Liveness, "_overdue", lambda self, grant, now: self._revoke(grant, "its deadline passed"))


@bug("reconnect-keeps-leases", "the leases of a connection that has ended are kept for when its worker is back", *LOST)
def _reconnect(put: Put) -> None:
    put(SyncTraining, "take_back", lambda self, session: 0)


@bug("silent-kept", "a silent worker is never given up", "worker without power", "partition")
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
    put(Uptake, "stalled_s", lambda self, link, now, silence_s: 0.0)


# -- sums ------------------------------------------------------------------------------------------------


@bug("arrival-order", "block sums are added in the order in which they arrive")
def _arrival_order(put: Put) -> None:
    waiting: dict[int, tuple[Frontier, list[int]]] = {}

    def fill(self: Frontier, block: Block) -> list[Merge]:
        _, late = waiting.setdefault(id(self), (self, []))  # it is kept, so that no other gets its id
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


@bug("drop-last-bucket", "the last bucket of a result is left out of the sum")
def _drop_bucket(put: Put) -> None:
    real = BlockStore.count

    def count(self: BlockStore, block: Block, bucket: int, *, present: bool) -> bool:
        last = bucket == len(self.layout.result_buckets) - 1
        return real(self, block, bucket, present=present and not last)

    put(BlockStore, "count", count)


@bug("absent-is-present", "a bucket that no leaf of the block touched is added all the same")
def _absent(put: Put) -> None:
    real = Reducer.put
    put(Reducer, "put", lambda self, bucket, start, *, present: real(self, bucket, start, present=True))


@bug("short-step-mean", "a step's mean is taken over the batch size though the epoch's last step is shorter")
def _short_step(put: Put) -> None:
    real = SyncRule.apply

    def apply(self: SyncRule, root: Any, present: Any, samples: int, untouched: Any, **named: Any) -> Any:
        whole = max(samples, getattr(self, "_whole", 0))
        self._whole = whole  # type: ignore[attr-defined]
        return real(self, root, present, whole, untouched, **named)

    put(SyncRule, "apply", apply)


@bug("accept-infinite", "a gradient that is not finite is applied")
def _infinite(put: Put) -> None:
    put(SyncRule, "_norm", lambda self, squares: 1.0)


@bug("forget-partial", "what a lost worker had not sent of a block that it had begun counts as absent", *LOST)
def _forget_partial(put: Put) -> None:
    real = SyncTraining.take_back

    def take_back(self: SyncTraining, session: Any) -> int:
        for grant in self.ledger.held(session.worker_id):
            for bucket in self.store.buckets[:-1] if self.store.suppliers(grant.block) else ():
                self.store._filled[grant.block].setdefault(bucket, None)
        return real(self, session)

    put(SyncTraining, "take_back", take_back)


# -- versions --------------------------------------------------------------------------------------------


@bug("publish-before-apply", "workers are sent the parameters of the version before")
def _publish_early(put: Put) -> None:
    real_frame, real_init, real_send = LivePublisher._frame, LivePublisher.__init__, LivePublisher.send
    before: dict[int, list[bytes]] = {}
    now: dict[int, list[bytes]] = {}

    def init(self: LivePublisher, *given: Any) -> None:
        real_init(self, *given)
        before[id(self)] = now[id(self)] = [bytes(piece) for piece in self._state.bucket_bytes]

    def send(self: LivePublisher, sessions: Any, version: int, pieces: Any, *, idle: Any = ()) -> None:
        before[id(self)], now[id(self)] = now[id(self)], [bytes(piece) for piece in self._state.bucket_bytes]
        real_send(self, sessions, version, pieces, idle=idle)

    def frame(self: LivePublisher, number: int, num_buckets: int, shard: Any) -> Any:
        state = self._state
        stale = before[id(self)]
        self._state = SimpleNamespace(bucket_bytes=[memoryview(piece) for piece in stale])  # type: ignore[assignment]
        try:
            return real_frame(self, number, num_buckets, shard)
        finally:
            self._state = state

    put(LivePublisher, "__init__", init)
    put(LivePublisher, "send", send)
    put(LivePublisher, "_frame", frame)


@bug(
    "superseded-is-sent",
    "a bucket counts as sent when it is queued, also when a newer version takes its place",
    "worker reads nothing at first",
)
def _superseded(put: Put) -> None:
    real = Outbox.post

    def post(self: Outbox, chunks: Any, *, sent: Any = None, version: int = -1, **how: Any) -> None:
        if sent is not None and version >= 0:
            sent()
        real(self, chunks, sent=sent, version=version, **how)

    put(Outbox, "post", post)


@bug("torn-version", "a version counts as whole when its first bucket has come")
def _torn_version(put: Put) -> None:
    real = Inbox.params

    def params(self: Inbox, message: Any) -> Version | None:
        if message.version == self.version:
            self._fresh.add(message.bucket)
            return None
        return real(self, structs.replace(message, num_buckets=min(1, message.num_buckets)))

    put(Inbox, "params", params)


@bug(
    "any-answer",
    "what was left unsent on one link answers any lease of as many leaves on the next",
    *LOST,
    "small slices",
)
def _any_answer(put: Put) -> None:
    put(Unsent, "answers", lambda self, lease: len(self.lease.samples) == len(lease.samples))


@bug("old-version", "a worker computes a lease with the parameters that it has, whatever version the lease names")
def _old_version(put: Put) -> None:
    def take(self: Inbox) -> list[Any]:
        if self.version < 0:
            return []
        held, self._waiting = self._waiting, []
        return [dataclasses.replace(item, message=structs.replace(item.message, version=self.version)) for item in held]

    put(Inbox, "take", take)


@bug("release-early", "a worker's result memory is reused before it is sent")
def _release_early(put: Put) -> None:
    real = Leases.done

    def done(self: Leases, held: Any, computed: Any, wait_s: float) -> None:
        real(self, held, computed, wait_s)
        for vector in computed.vectors:
            vector.memory.fill_(0xFF)

    put(Leases, "done", done)


@bug(
    "ignore-term", "a worker serves a coordinator of an older term than it has served", "two coordinators", "link reset"
)
def _ignore_term(put: Put) -> None:
    real = dialing.join

    async def join(link: Any, **kwargs: Any) -> Any:
        return await real(link, **{**kwargs, "terms": {}})

    put(dialing, "join", join)
