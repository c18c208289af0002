"""Islands under every rule and codec: the same bits as one worker wherever one worker has bits to promise, each step
once, whatever becomes of a rank."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.test_autotuning import over_a_poor_line
from tests.cluster.test_islands import run, start
from tests.support import jobs
from tests.support.circle import Circle, Gone
from tests.support.cluster import QUICK_WORKER, Commits, settings, train

from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run.strategy_chooser import StrategyChooser
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import LinkLost, W5xdeError
from w5xde_async.job import Job
from w5xde_async.params.layout import Layout
from w5xde_async.plan.shares import Share
from w5xde_async.telemetry.events import Bus, Event, StepCommitted
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.connection.connection import Departure
from w5xde_async.worker.service import Worker

LOCAL: dict[str, Any] = {"rule": "local", "inner_steps": 3}
RULES: dict[str, dict[str, Any]] = {
    "async": {"rule": "async", "results_per_step": 2, "codec": "int8", "downlink": "raw"},
    "local": {**LOCAL, "codec": "topk:0.1"},
    "streaming": {"rule": "streaming", "inner_steps": 4, "fragments": 2, "codec": "int4"},
    "async-local": {"rule": "async-local", "inner_steps": 3, "codec": "sparseloco"},
}


def cnn_adamw() -> Job:
    """Its gradients are not clipped: the norm is added in another order where shards are."""
    return replace(jobs.cnn_adamw(), gradient_clip_val=None)


def gpt_adamw() -> Job:
    return replace(jobs.gpt_adamw(), gradient_clip_val=None)


@pytest.mark.slow
@pytest.mark.parametrize("share", [Share.BLOCK, Share.ALL], ids=lambda share: share.name)
@pytest.mark.parametrize(
    "make_job", [jobs.mlp_sgd, cnn_adamw, gpt_adamw], ids=lambda make: make.__name__
)  # fmt: skip
async def test_inner_steps_on_shards_have_the_bits_of_one_worker(make_job: Callable[[], Job], share: Share) -> None:
    update = UpdateConfig(**LOCAL)
    expected = await train(make_job, update=update)
    result, departures = await run(make_job, [Circle(2, share, seed=3)], update=update)
    assert (result.digest, result.loss) == (expected.digest, expected.loss)
    assert departures == [Departure.FINISHED] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "update",
    [{"codec": "lz4"}, {"codec": "lz4-shuffle"}, {**LOCAL, "downlink": "lz4"}, {"downlink": "int4"},
     {**LOCAL, "downlink": "int8"}],
    ids=str,
)  # fmt: skip
async def test_a_lossless_codec_keeps_the_bits_and_any_downlink_is_alike_for_all(update: dict[str, Any]) -> None:
    expected = await train(cnn_adamw, update=UpdateConfig(**update))
    result, _ = await run(cnn_adamw, [Circle(3, Share.TURNS, seed=5)], update=UpdateConfig(**update))
    assert (result.digest, result.loss) == (expected.digest, expected.loss)


@pytest.mark.slow
async def test_clipping_sees_the_whole_gradient() -> None:
    update = UpdateConfig(**LOCAL)
    free = await train(cnn_adamw, update=update)
    expected = await train(jobs.cnn_adamw, update=update)
    result, _ = await run(jobs.cnn_adamw, [Circle(3, Share.TURNS, seed=1)], update=update)
    assert abs(free.loss - expected.loss) > 1e-3
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(codec, marks=pytest.mark.slow) for codec in ("int4", "topk:0.1"))]
)
async def test_a_lossy_codec_under_the_synchronous_rule(codec: str) -> None:
    events: list[Event] = []
    result, departures = await run(
        jobs.mlp_sgd, [Circle(2, Share.BLOCK)], singles=1, events=events, update=UpdateConfig(codec=codec)
    )  # fmt: skip
    losses = [event.loss for event in events if isinstance(event, StepCommitted)]
    assert len(losses) == result.step == len(losses)
    assert losses[-1] < 0.9 * losses[0]
    assert departures == [Departure.FINISHED] * 3


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
async def test_every_step_counts_once(update: dict[str, Any]) -> None:
    events: list[Event] = []
    circles = [Circle(2, Share.BLOCK, seed=1), Circle(3, Share.ALL, seed=2)]
    result, departures = await run(jobs.mlp_sgd, circles, singles=1, events=events, update=UpdateConfig(**update))
    steps = [event for event in events if isinstance(event, StepCommitted)]
    assert result.outcome == "finished"
    assert steps[-1].step == jobs.mlp_sgd().max_steps
    job = jobs.mlp_sgd()
    assert job.max_steps is not None
    epochs, rest = divmod(job.max_steps, -(-len(job.dataset) // job.batch_size))
    assert sum(step.samples for step in steps) == epochs * len(job.dataset) + rest * job.batch_size
    # Held against a guess among ten: how far a run's first round comes, which has a loss too, depends on the machine.
    mean = sum(step.loss * step.samples for step in steps) / sum(step.samples for step in steps)
    assert mean < math.log(10)
    assert departures == [Departure.FINISHED] * 6


@asynccontextmanager
async def island_and_single(
    update: dict[str, Any],
) -> AsyncIterator[tuple[Coordinator, Circle, list[Worker], list[asyncio.Task[Departure]]]]:
    """In the third step of a run, which then finishes: its ranks, and their tasks."""
    commits, make = Commits(), jobs.mlp_sgd
    config = settings(update=UpdateConfig(**update), min_workers=2)
    async with Coordinator(make(), config=config, bus=commits.bus) as coordinator:
        circle = Circle(2, Share.BLOCK)
        ranks = start(coordinator.address, circle, make)
        single = asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run())
        running = [asyncio.create_task(rank.run()) for rank in ranks]
        await commits.reach(3)
        yield coordinator, circle, ranks, running
        result = await coordinator.wait()
        assert await single is Departure.FINISHED
    assert result.outcome == "finished"


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
async def test_the_steps_of_a_lost_island_are_done_by_others(update: dict[str, Any], lost: int) -> None:
    async with island_and_single(update) as (coordinator, circle, ranks, running):
        training = coordinator._training
        assert isinstance(training, OuterTraining)
        assert ranks[lost]._connection is not None
        ranks[lost]._connection.link.abort()
        circle.end()  # as collectives end where a rank is gone
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(error, W5xdeError | Gone) for error in ended)
        training.ledger.validate()
        another = Circle(2, Share.ALL, seed=7)
        late = [asyncio.create_task(rank.run()) for rank in start(coordinator.address, another, jobs.mlp_sgd)]
        await coordinator.wait()
        training.ledger.validate()
        assert not training.intake.pool.num_out
        another.end()
        for rank in late:
            rank.cancel()  # they may come when all is done, and would look for a while
        await asyncio.gather(*late, return_exceptions=True)


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
async def test_an_island_that_drains_leaves_nothing_undone(update: dict[str, Any]) -> None:
    async with island_and_single(update) as (_, _, ranks, running):
        ranks[1].drain()
        assert await asyncio.gather(*running) == [Departure.DRAINED] * 2


@pytest.mark.slow
async def test_a_run_goes_on_with_whatever_workers(tmp_path: Path) -> None:
    """A checkpoint knows nothing of islands: they and single workers in turn have the bits of single workers."""
    digests = set()
    for first, second in ((1, 1), (2, 1), (1, 2)):
        for ranks, steps in ((first, 9), (second, 18)):
            make = partial(lambda steps: replace(jobs.cnn_sgd(), max_steps=steps), steps)
            bus = Bus()
            config = settings(update=UpdateConfig(**LOCAL), checkpoint_every=3, norm_gate=0.0)
            path = tmp_path / f"{first}{second}"
            async with Coordinator(make(), run_dir=path, config=config, bus=bus) as coordinator:
                circle = Circle(ranks, Share.TURNS, seed=ranks)
                workers = (
                    start(coordinator.address, circle, make)
                    if ranks > 1
                    else [Worker(coordinator.address, job=make(), config=QUICK_WORKER)]
                )
                running = [asyncio.create_task(worker.run()) for worker in workers]
                result = await coordinator.wait()
                await asyncio.gather(*running)
            assert result.step == steps
        digests.add(result.digest)
    assert len(digests) == 1


async def test_auto_takes_a_rule_that_the_run_has_not_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The island begins anew, as another worker: whoever starts its ranks starts them again."""
    monkeypatch.setattr(StrategyChooser, "situation", over_a_poor_line)
    make = lambda: replace(jobs.mlp_sgd(), max_steps=60, epochs=None)  # noqa: E731
    async with Coordinator(make(), config=settings(auto=True, min_workers=1)) as coordinator:
        departures: list[Any] = []
        for seed in range(2):
            circle = Circle(2, Share.BLOCK, seed=seed)
            running = [asyncio.create_task(rank.run()) for rank in start(coordinator.address, circle, make)]
            departures.append(await asyncio.gather(*running, return_exceptions=True))
            circle.end()
        result = await coordinator.wait()
        assert coordinator._run is not None
        assert coordinator._run.config.update.rule == "streaming"
    assert all(isinstance(error, LinkLost) for error in departures[0])
    assert departures[1] == [Departure.FINISHED] * 2
    assert result.outcome == "finished"


async def test_each_rank_keeps_what_its_codec_left_out(tmp_path: Path) -> None:
    make = lambda: replace(jobs.mlp_sgd(), max_steps=96, epochs=None)  # noqa: E731
    config = settings(update=UpdateConfig(**LOCAL, codec="topk:0.1"), min_workers=2)
    async with Coordinator(make(), config=config) as coordinator:
        single = asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run())
        circle, kept = Circle(2, Share.BLOCK), replace(QUICK_WORKER, data_dir=tmp_path)
        ranks = [Worker(coordinator.address, job=make(), config=kept, rank=circle.rank(n)) for n in range(2)]
        running = [asyncio.create_task(rank.run()) for rank in ranks]
        while not ((link := ranks[1]._connection) and link.leases and link.leases.num_applied):  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # a count has no event
        ranks[0].drain()
        assert await asyncio.gather(*running) == [Departure.DRAINED] * 2
        assert await single is Departure.FINISHED
    layout = Layout.of(make().model(), bucket_bytes=config.bucket_bytes)
    assert {name.split("-")[1].split(".")[1] for name in os.listdir(tmp_path)} == {
        shard.digest for shard in circle.deal(layout)
    }
