"""Parameters that a worker has from an earlier link: not sent again where they are the newest, whole and to the bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.cluster.test_autotuning import over_a_poor_line
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, all_gone, settings
from torch import nn

from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run import strategy_chooser
from w5xde_async.coordinator.run.strategy_chooser import StrategyChooser
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.worker.service import Departure, Worker


def job() -> Job:
    """Several buckets of parameters, dropout."""
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10)
    )
    return replace(jobs.mlp_adamw(), model=model, batch_size=32, microbatch_size=4, max_steps=60, drop_last=True)


class Joined:
    """For each that has joined: its rule, the steps that were done, and how many buckets it was found to lack."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[str, int, int]] = []
        for training in (SyncTraining, OuterTraining):
            self._watch(monkeypatch, training, training.introduce)

    def _watch(
        self, monkeypatch: pytest.MonkeyPatch, training: type[Any], introduce: Callable[[Any, Session, Any], None]
    ) -> None:
        def introduced(self_: Any, session: Session, awaited: Sequence[int]) -> None:
            introduce(self_, session, awaited)
            self.rows.append((training.__name__, self_.progress, len(session.unsent)))

        monkeypatch.setattr(training, "introduce", introduced)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_who_comes_back_to_the_same_version_is_sent_nothing_and_the_bits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    joined, chance, made, commits = Joined(monkeypatch), random.Random(seed), job(), Commits()
    num_workers = 1 + seed % 2
    async with Coordinator(made, config=settings(code_free=True), bus=commits.bus) as coordinator:
        workers = [
            # Parameters that lie in shared memory are nobody's to keep.
            Worker(coordinator.address, job=made if number else None, config=replace(QUICK_WORKER, link="tcp"))
            for number in range(num_workers)
        ]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for step in range(5, 40, 5):
            await commits.reach(step)
            for _ in range(chance.randrange(20)):  # wherever the next steps are by then
                await asyncio.sleep(0)
            assert coordinator._training is not None
            sessions = list(coordinator._training.roster.sessions.values())
            for session in chance.sample(sessions, chance.randint(0, len(sessions))):
                session.link.abort()
        result = await coordinator.wait()
        await all_gone(workers, running)
    assert result.digest == named_digest(reference.train(job())[0])
    assert len(joined.rows) > num_workers
    if num_workers == 1:  # nothing is done while it is away
        assert joined.rows[0][2] > 0
        assert any(not lacking for _, _, lacking in joined.rows[1:])


@pytest.mark.slow
@pytest.mark.processes
async def test_a_change_of_the_rule_in_the_first_step_sends_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run is the one in which it is sent again."""
    monkeypatch.setattr(StrategyChooser, "situation", over_a_poor_line)
    monkeypatch.setattr(strategy_chooser, "_PROBE_S", 0.0)
    digests = set()
    for keeps, sandbox in ((True, "off"), (False, "off"), (True, "on")):
        with monkeypatch.context() as patch:
            joined = Joined(patch)
            if not keeps:
                patch.setattr("w5xde_async.worker.service._model", lambda welcome: (object(),))
            config = settings(auto=True, code_free=True, heartbeat_s=0.02)
            made = replace(job(), microbatch_size=1, batch_size=200, max_steps=8)  # a step takes a while
            async with Coordinator(made, config=config) as coordinator:
                worker = Worker(coordinator.address, config=replace(QUICK_WORKER, sandbox=sandbox, link="tcp"))
                running = asyncio.create_task(worker.run())
                digests.add((await coordinator.wait()).digest)
                assert await running is Departure.FINISHED
            (first, before, lacking), (second, after, lacking_then) = joined.rows
            assert (first, before, second, after) == ("SyncTraining", 0, "OuterTraining", 0)
            assert lacking > 0
            assert bool(lacking_then) is not keeps
    assert len(digests) == 1
