"""Workers that join over a link on which the whole model takes longer than several commits: they get in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, Commits, settings
from torch import nn

from w5xde_async.coordinator.parameters.delta_publisher import DeltaPublisher
from w5xde_async.coordinator.parameters.outer_aggregator import OuterAggregator, Submission
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.hub.members.roster import Roster
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.net import outbox
from w5xde_async.params.flat import FlatState, bytes_of
from w5xde_async.telemetry.events import Event, StepCommitted
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.executors.executor import Version
from w5xde_async.worker.executors.published import Published
from w5xde_async.worker.service import Worker

COMMITS_A_MODEL = 5

UPDATES: dict[str, dict[str, Any]] = {
    # A link that carries no version while the next is made has but old ones: they are to count all the same.
    "async raw": {"rule": "async", "max_staleness": 1000},
    "async int4": {"rule": "async", "downlink": "int4"},
    "local raw": {"rule": "local", "max_staleness": 1000},
    "local int4": {"rule": "local", "downlink": "int4"},
    "streaming raw": {"rule": "streaming", "max_staleness": 1000},
    "streaming int4": {"rule": "streaming", "downlink": "int4"},
    "async-local raw": {"rule": "async-local"},
    "sync int4": {"rule": "sync", "downlink": "int4"},
}


def job() -> Job:
    """Five buckets; the batches are small beside them."""
    made = jobs.mlp_sgd()
    return replace(
        made, model=lambda: nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10)), max_steps=100_000,
        batch_size=8, microbatch_size=2,
    )  # fmt: skip


def digest(state: FlatState) -> bytes:
    hashed = sha256()
    for group in state.groups:
        hashed.update(bytes_of(group))
    return hashed.digest()


class Throttle:
    """Lets so many bytes pass with every commit; stands in for the link of one outbox."""

    def __init__(self, bytes_a_commit: int) -> None:
        self._each = self._credit = bytes_a_commit
        self._open = False
        self._changed = asyncio.Condition()

    def see(self, event: Event) -> None:
        if isinstance(event, StepCommitted):
            self._credit = min(self._credit, 0) + self._each  # what was not used is gone
            asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def open(self) -> None:
        self._open = True
        await self._tell()

    def of(self, link: Any) -> Any:
        throttle = self

        class Slow:
            def send_now(self, chunks: Any) -> None: ...

            async def send(self, chunks: Any) -> None:
                async with throttle._changed:
                    await throttle._changed.wait_for(lambda: throttle._open or throttle._credit > 0)
                throttle._credit -= sum(map(len, chunks))
                await link.send(chunks)

        return Slow()


class Watch:
    """Which bits were published at each version, which each worker came to hold, and whose results counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: dict[int, bytes] = {}
        self.held: list[tuple[int, bytes]] = []
        self.counted: set[str] = set()
        send, send_lacking, apply, offer = (
            DeltaPublisher.send,
            DeltaPublisher.send_lacking,
            Published.apply,
            OuterAggregator.offer,
        )

        def sent(publisher: DeltaPublisher, sessions: Any, version: int, pieces: Any, **idle: Any) -> None:
            self.published[version] = digest(publisher._published)
            send(publisher, sessions, version, pieces, **idle)

        def sent_lacking(publisher: DeltaPublisher, sessions: Any, pieces: Any) -> None:
            if publisher._version not in self.published:  # else the next one may be in the making, in its thread
                self.published[publisher._version] = digest(publisher._published)
            send_lacking(publisher, sessions, pieces)

        def applied(published: Published, version: Version) -> None:
            apply(published, version)
            self.held.append((version.number, digest(published.state)))

        async def offered(aggregator: OuterAggregator, given: Submission, counted: int, vouched: float) -> Outcome:
            outcome = await offer(aggregator, given, counted, vouched)
            if outcome.accepted:
                self.counted.add(given.worker)
            return outcome

        monkeypatch.setattr(DeltaPublisher, "send", sent)
        monkeypatch.setattr(DeltaPublisher, "send_lacking", sent_lacking)
        monkeypatch.setattr(Published, "apply", applied)
        monkeypatch.setattr(OuterAggregator, "offer", offered)

    def check(self) -> None:
        for version, bits in self.held:
            assert bits == self.published[version], f"version {version}"


@asynccontextmanager
async def run_with_a_slow_joiner(
    update: UpdateConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Coordinator, Commits, Worker]]:
    """Two workers commit steps; a third joins them over a link that carries a fifth of the model a commit."""
    commits = Commits()
    monkeypatch.setattr(outbox, "_SEND_BYTES", 1)  # frame by frame
    config = settings(update=update, min_workers=2)
    async with Coordinator(job(), config=config, bus=commits.bus) as coordinator:
        assert coordinator._prepared is not None
        layout = coordinator._prepared.spec.layout
        whole_bytes = sum(layout.state_nbytes(bucket) for bucket in layout.buckets)
        throttle = Throttle(whole_bytes // COMMITS_A_MODEL)
        commits.bus.subscribe(throttle.see)
        joined = Roster.joined

        def slowed(roster: Roster, session: Session, ready: Any) -> Any:
            if session.name == "slow":
                session.outbox._link = throttle.of(session.link)
            return joined(roster, session, ready)

        monkeypatch.setattr(Roster, "joined", slowed)
        quick = [Worker(coordinator.address, job=job(), config=QUICK_WORKER) for _ in range(2)]
        slow = Worker(coordinator.address, job=job(), config=replace(QUICK_WORKER, name="slow"))
        tasks = [asyncio.create_task(worker.run()) for worker in quick]
        await commits.reach(3)
        tasks.append(asyncio.create_task(slow.run()))
        try:
            yield coordinator, commits, slow
        finally:
            await throttle.open()
            for worker in (*quick, slow):
                worker.drain()
            coordinator.request_stop("test")
            async with asyncio.timeout(10):
                await coordinator.wait()
                await asyncio.gather(*tasks)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
async def test_who_joins_over_a_slow_link_takes_part(update: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    config = UpdateConfig(**{"inner_steps": 4, "fragments": 2, "outer_lr": 0.1, **update})
    async with run_with_a_slow_joiner(config, monkeypatch) as (coordinator, commits, slow):
        training = coordinator._training
        assert training is not None
        for _ in range(400):
            async with asyncio.timeout(10):
                await commits.reach(commits.step + 1)
            member = training.roster.membership.members.get(slow.worker_id)
            if slow.worker_id in watch.counted or (config.rule == "sync" and member is not None and member.leaves):
                break
        else:
            pytest.fail("nothing of the slow worker's counted in 400 commits")
        assert slow.worker_id in training.roster.sessions
    assert len(watch.held) > COMMITS_A_MODEL
    watch.check()
