"""The parameters on their way out: what each worker is sent, and that it holds the bits of ``published`` by it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from w5xde_async.codecs.registry import codec
from w5xde_async.coordinator.parameters.delta_publisher import CatchUp, DeltaPublisher
from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.coordinator.parameters.publisher import Piece
from w5xde_async.coordinator.training import Lifecycle
from w5xde_async.errors import FrameTooLarge
from w5xde_async.hub.members.session import Session
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.wire.frame import SESSION_CAPS, BufferSpec, decode_header
from w5xde_async.wire.messages import Params
from w5xde_async.worker.connection.inbox import Inbox
from w5xde_async.worker.executors.executor import Version
from w5xde_async.worker.executors.published import DeltaReceiver, Published

LAYOUT = Layout.of(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), bucket_bytes=4096)
TRAINED = [bucket.index for bucket in LAYOUT.buckets if LAYOUT.groups[bucket.group].role == "grad"]
WHOLE_BYTES = sum(LAYOUT.state_nbytes(bucket) for bucket in LAYOUT.buckets)


@dataclass(eq=False)
class Worker:
    """A session whose outbox lets a frame go when a test says so, and the inbox at the other end."""

    codec: str = "int4"
    unsent: set[int] = field(default_factory=set)
    current_version: int = -1
    island: Any = None
    shard: Any = None

    def __post_init__(self) -> None:
        self.outbox = self
        self.waiting: deque[tuple[list[Any], Callable[[], None], int]] = deque()
        self.receiver = DeltaReceiver(LAYOUT, codec(self.codec))
        self.inbox = Inbox(self.receiver, 1 << 20, exact=False)
        self.published = Published(LAYOUT)

    @property
    def session(self) -> Session:
        return cast(Session, self)

    def post(self, chunks: list[Any], *, sent: Callable[[], None], version: int) -> None:
        self.waiting.append((chunks, sent, version))

    def pass_frames(self, count: int) -> None:
        """So many frames leave, and are read at the other end."""
        for _ in range(count):
            chunks, sent, _ = self.waiting.popleft()
            message, specs = decode_header(memoryview(chunks[0])[4:], SESSION_CAPS)
            assert isinstance(message, Params)
            for spec, data in zip(specs, chunks[1:], strict=True):
                (view,) = self.receiver.place(message, (spec,))
                view[:] = memoryview(data).cast("B")
            whole = self.inbox.params(message)
            if whole is not None:
                self.published.apply(whole)
            sent()

    def pass_frames_away(self) -> None:
        """All leave, and nobody reads them."""
        while self.waiting:
            self.waiting.popleft()[1]()

    def pass_all(self) -> None:
        self.pass_frames(len(self.waiting))

    @property
    def kinds(self) -> list[int]:
        return [version for _, _, version in self.waiting]


class Isle:
    """An island of two ranks, each with every second piece of 100 values; the head's is the session."""

    def __init__(self, name: str) -> None:
        dealt: list[list[tuple[int, int, int]]] = [[], []]
        for group in LAYOUT.groups:
            for number, begin in enumerate(range(0, group.numel, 100)):
                dealt[number % 2].append((group.index, begin, min(begin + 100, group.numel)))
        self.shards = [Shard.of(LAYOUT, runs) for runs in dealt]
        self.ranks = [Worker(name), Worker(name)]
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            rank.island, rank.shard = SimpleNamespace(ranks=2, sessions=self.ranks), shard
            rank.receiver = DeltaReceiver(LAYOUT, codec(name), shard)
            rank.inbox, rank.published = Inbox(rank.receiver, 1 << 20, exact=False), Published(shard.own)

    def pass_version(self) -> None:
        """All frames of the next version leave, and each rank has what came to the others."""
        versions = []
        for rank in self.ranks:
            version = None
            while version is None:
                chunks, sent, _ = rank.waiting.popleft()
                message, specs = decode_header(memoryview(chunks[0])[4:], SESSION_CAPS)
                assert isinstance(message, Params)
                views = rank.receiver.place(message, specs) if specs else []
                for view, data in zip(views, chunks[1:], strict=True):
                    view[:] = memoryview(data).cast("B")
                version = rank.inbox.params(message)
                sent()
            versions.append(version)
        assert len({version.number for version in versions}) == 1
        buckets = tuple({bucket for version in versions for bucket in version.buckets})
        coded = [update for version in versions for update in version.updates if update.codec is not None]
        for rank, version in zip(self.ranks, versions, strict=True):
            own = [update for update in version.updates if update.codec is None]
            own += [update for update in map(rank.receiver.own, coded) if update is not None]
            rank.published.apply(Version(version.number, 1.0, buckets, tuple(own)))

    def check(self, run: Run) -> None:
        """Each holds its part of what was published."""
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            for run_, mine in zip(shard.runs, self._cut(rank, shard), strict=True):
                wanted = run.bits[rank.published.version][run_.group][run_.begin : run_.end]
                assert torch.equal(mine, wanted)

    def _cut(self, rank: Worker, shard: Shard) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for group in LAYOUT.groups:
            sizes = [run.end - run.begin for run in shard.runs if run.group == group.index]
            found += torch.split(rank.published.state.groups[group.index], sizes) if sizes else []
        return found


class Run:
    """Versions, one after the other, each of which moves some buckets of the parameters."""

    def __init__(self, name: str) -> None:
        self.state = FlatState(LAYOUT)
        for group in self.state.groups:
            group.copy_(torch.arange(group.numel()))
        self.woken = 0
        self.publisher = DeltaPublisher(LAYOUT, self.state, codec(name), wake=self._wake)
        self.version = 0
        self.bits: dict[int, list[torch.Tensor]] = {}
        self._keep()

    def _wake(self) -> None:
        self.woken += 1

    def _keep(self) -> None:
        self.bits[self.version] = [group.clone() for group in self.publisher._published.groups]

    def advance(self, changed: list[int]) -> list[Piece]:
        torch.manual_seed(self.version)
        for number in changed:
            piece = self.state.bucket(LAYOUT.buckets[number])
            piece.add_(torch.randn(piece.numel()))
        pieces = self.publisher.advance(changed)
        self.version += 1
        self._keep()
        return pieces

    def commit(self, *workers: Worker, changed: list[int] | None = None) -> None:
        pieces = self.advance(TRAINED if changed is None else changed)
        self.publisher.send([worker.session for worker in workers], self.version, pieces)

    def join(self, *workers: Worker) -> None:
        for worker in workers:
            self.publisher.join(worker.session)
        self.send_lacking()

    def send_lacking(self) -> list[Session]:
        due = self.publisher.due
        self.publisher.send_lacking(due, self.publisher.whole(self.publisher.lacks(due)))
        return due

    def check(self, worker: Worker) -> None:
        """What the worker holds is what was published, at the version that it was told."""
        held = worker.published
        for mine, theirs in zip(held.state.groups, self.bits[held.version], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["raw", "lz4", "int4"])
def test_the_ranks_of_an_island_together_hold_every_version(name: str) -> None:
    run, isle = Run(name), Isle(name)
    head, other = isle.ranks
    run.join(head)
    isle.pass_version()
    isle.check(run)
    for changed in (TRAINED, TRAINED[:1], [], TRAINED[::2]):
        run.commit(head, changed=changed)
        assert head.unsent == set(changed)
        if name == "int4" and len(changed) > 1:  # what was encoded goes to one of them, and not to both
            told = [sum(len(chunks) > 1 for chunks, _, _ in rank.waiting) for rank in isle.ranks]
            assert sum(told) == len(changed)
            assert max(told) - min(told) <= 1
        isle.pass_version()
        assert (head.unsent, head.published.version) == (set(), run.version)
        isle.check(run)
    run.commit(head)
    head.pass_frames_away()
    assert head.unsent  # the other rank's have not left
    assert not run.publisher.has_left(head.session, run.version)
    other.pass_frames_away()
    assert not head.unsent
    assert run.publisher.has_left(head.session, run.version)


@pytest.mark.parametrize("name", ["raw", "lz4", "int4"])
def test_who_follows_holds_every_version(name: str) -> None:
    run, worker = Run(name), Worker(name)
    run.join(worker)
    assert worker.unsent == set(range(len(LAYOUT.buckets)))
    worker.pass_all()
    run.check(worker)
    for changed in (TRAINED, TRAINED[:2], [], TRAINED[1:]):
        run.commit(worker, changed=changed)
        assert worker.unsent == set(changed)
        worker.pass_all()
        assert (worker.unsent, worker.published.version) == (set(), run.version)
        run.check(worker)
    assert run.publisher.due == []


def test_an_island_whose_head_is_gone_is_told_nothing_while_its_other_ranks_are_ending() -> None:
    """Its head is forgotten at once, and stays in the list of members until the last rank has ended."""
    run, worker, head = Run("int4"), Worker(), Worker()
    run.join(worker)
    run.join(head)
    run.publisher.forget(head.session)
    head.waiting.clear()
    run.commit(worker, head)
    worker.pass_all()
    run.check(worker)
    assert not head.waiting


class Copying:
    """The parameters' thread, which does what it was given when a test says so."""

    closed = False

    def __init__(self) -> None:
        self.asked: list[tuple[asyncio.Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((future, call))
        return future

    async def go_on(self) -> None:
        future, call = self.asked.pop(0)
        try:
            future.set_result(call())
        except ValueError as error:
            future.set_exception(error)
        await asyncio.sleep(0)


@pytest.mark.parametrize("awaited", [False, True])
async def test_an_island_whose_head_ends_while_what_it_lacks_is_copied_keeps_nothing_from_others(awaited: bool) -> None:
    run, worker, head, lifecycle, copying = Run("int4"), Worker(), Worker(), Lifecycle(float), Copying()
    catch_up = CatchUp(run.publisher, cast(ParameterOwner, copying), lifecycle)
    run.publisher.join(head.session)
    run.publisher.join(worker.session)
    sending = asyncio.ensure_future(catch_up.send(run.publisher.due)) if awaited else None
    if sending is None:
        catch_up.begin()
    await asyncio.sleep(0)
    run.publisher.forget(head.session)
    await copying.go_on()
    if sending is not None:
        assert await sending == ([worker], [worker])
    assert lifecycle.failure is None
    assert not head.waiting
    worker.pass_all()
    run.check(worker)


async def test_what_cannot_be_copied_for_those_that_are_behind_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run, worker, lifecycle, copying = Run("int4"), Worker(), Lifecycle(float), Copying()
    catch_up = CatchUp(run.publisher, cast(ParameterOwner, copying), lifecycle)
    run.publisher.join(worker.session)
    for broken in ("copy", "send_lacking"):  # in the thread, and on the loop
        lifecycle.failure = None
        with monkeypatch.context() as patch:
            patch.setattr(run.publisher, broken, lambda *_: int("none"))
            catch_up.begin()
            await copying.go_on()
        assert "ValueError" in str(lifecycle.failure)


def test_deltas_wait_behind_the_whole_and_nothing_is_taken_back() -> None:
    """Streaming: each version changes a part, and the whole takes longer than eight of them."""
    run, worker = Run("int4"), Worker()
    run.join(worker)
    num_frames = len(worker.waiting)
    for number in range(8):
        worker.pass_frames(num_frames // 9)
        run.commit(worker, changed=TRAINED[number % 2 :: 2])
    assert worker.kinds == sorted(worker.kinds)
    assert set(worker.kinds) == set(range(9))
    worker.pass_all()
    assert worker.published.version == 8
    assert run.woken == 1  # at joining: it was never behind
    run.check(worker)


@pytest.mark.parametrize("name", ["raw", "lz4"])
def test_versions_that_are_whole_do_not_wait_for_each_other(name: str) -> None:
    run, worker = Run(name), Worker(name)
    run.join(worker)
    for _ in range(7):
        worker.pass_frames(1)
        run.commit(worker)
    assert len(set(worker.kinds)) <= 2
    worker.pass_all()
    run.check(worker)  # it can work, at an older version
    assert 0 <= worker.published.version < 7
    assert run.publisher.due == [worker]
    run.send_lacking()
    assert worker.unsent == set(TRAINED)  # the others have not changed
    worker.pass_all()
    assert worker.published.version == 7
    run.check(worker)
    run.commit(worker, changed=TRAINED[:1])
    assert len(worker.waiting) == 1  # it follows again
    worker.pass_all()
    run.check(worker)


def test_deltas_that_wait_are_no_more_than_the_model() -> None:
    run, stalled, quick = Run("int4"), Worker(), Worker()
    run.join(stalled, quick)
    stalled.pass_all()
    for _ in range(40):
        run.commit(stalled, quick)
        quick.pass_all()
        run.check(quick)
        waiting = sum(len(chunk) for chunks, _, _ in stalled.waiting for chunk in chunks[1:])
        assert waiting <= WHOLE_BYTES
    assert 4 < len(set(stalled.kinds)) < 40
    assert run.publisher.due == []  # what it has been promised comes first
    stalled.pass_all()
    run.check(stalled)
    assert run.send_lacking() == [stalled]
    assert quick.waiting == deque()
    stalled.pass_all()
    assert stalled.published.version == 40
    run.check(stalled)


def test_versions_without_anything_in_them_do_not_pile_up() -> None:
    run, worker = Run("int4"), Worker()
    run.join(worker)
    worker.pass_all()
    for _ in range(1100):
        run.publisher.send([worker.session], run.version, [])
        run.version += 1
    assert len(worker.waiting) == 1024


def test_a_bucket_stays_unsent_while_an_older_value_of_it_leaves() -> None:
    run, worker = Run("raw"), Worker()
    run.join(worker)
    run.commit(worker, changed=TRAINED[:1])
    worker.pass_all()
    assert worker.unsent == set(TRAINED[:1])
    run.send_lacking()
    assert worker.unsent == set(TRAINED[:1])
    worker.pass_all()
    assert worker.unsent == set()


def test_who_is_not_told_lacks_it_until_it_asks() -> None:
    """Under ``async`` a worker is told when it has given something."""
    run, worker = Run("raw"), Worker()
    run.join(worker)
    worker.pass_all()
    run.commit(changed=TRAINED[:2])
    assert run.publisher.lacks([worker.session]) == TRAINED[:2]
    assert run.publisher.due == []
    run.commit(worker, changed=TRAINED[1:2])  # it lacks one more than this has
    assert run.publisher.due == [worker]
    run.send_lacking()
    worker.pass_all()
    run.check(worker)
    run.commit(changed=TRAINED[:2])
    run.publisher.catch_up(worker.session)
    assert run.send_lacking() == [worker]
    worker.pass_all()
    assert worker.published.version == run.version
    run.check(worker)


def test_what_left_for_one_that_is_gone_wakes_nobody() -> None:
    run, worker = Run("raw"), Worker()
    run.join(worker)
    run.commit(worker)
    run.publisher.forget(worker.session)
    woken = run.woken
    worker.pass_all()
    run.publisher.catch_up(worker.session)
    assert (run.woken, run.publisher.due) == (woken, [])


def test_what_overtaken_versions_brought_does_not_pile_up() -> None:
    """The synchronous rule sends the newest version from the start, however often it changes."""
    worker = Worker()
    inbox, receiver = worker.inbox, worker.receiver
    bucket = LAYOUT.buckets[0]
    spec = BufferSpec("", "float32", (bucket.numel,), "raw", 4 * bucket.numel)
    for version in range(101):
        message = Params(version, 0, 1 if version == 100 else 2, 1.0)
        receiver.place(message, (spec,))
        whole = inbox.params(message)
        assert (whole is None) == (version < 100)
    assert whole is not None
    assert len(whole.updates) == 1


def test_deltas_without_their_version_are_refused() -> None:
    worker, number = Worker(), TRAINED[0]
    inbox, receiver = worker.inbox, worker.receiver
    spec = Run("int4").advance([number])[0].spec
    for version in range(2):
        message = Params(version, number, 2, 1.0, True)
        receiver.place(message, (spec,))
        inbox.params(message)
    receiver.place(message, (spec,))
    with pytest.raises(FrameTooLarge, match="not whole"):
        inbox.params(message)
