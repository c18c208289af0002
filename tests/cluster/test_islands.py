"""Workers of several ranks: the same bits as single workers, whatever becomes of a rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import jobs, reference
from tests.support.circle import Circle
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from torch import Tensor, nn

from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import IslandBroken, LeafFailed, LinkLost, RefusalCode, Refused, W5xdeError
from w5xde_async.job import Job
from w5xde_async.plan.shares import Share
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Audited, Bus, Event, Warned, WorkerJoined, WorkerLeft
from w5xde_async.worker.connection import connection
from w5xde_async.worker.connection.connection import Departure, RunFailed
from w5xde_async.worker.service import Worker

EVERY = [(Share.BLOCK, 2), (Share.TURNS, 3), (Share.ALL, 2), (Share.BLOCK, 4)]


def start(address: str, circle: Circle, make_job: Callable[[], Job] | None, **kwargs: Any) -> list[Worker]:
    return [
        Worker(address, job=None if make_job is None else make_job(), config=QUICK_WORKER,
               rank=circle.rank(number, **kwargs))
        for number in range(circle.ranks)
    ]  # fmt: skip


async def run(
    make_job: Callable[[], Job], circles: Sequence[Circle], *, singles: int = 0, events: list[Event] | None = None,
    **config: Any,
) -> tuple[RunResult, list[Departure]]:  # fmt: skip
    bus = Bus()
    if events is not None:
        bus.subscribe(events.append)
    config.setdefault("min_workers", len(circles) + singles)
    async with Coordinator(make_job(), config=settings(**config), bus=bus) as coordinator:
        workers = [
            one
            for circle in circles
            for one in start(coordinator.address, circle, None if config.get("code_free") else make_job)
        ]
        workers += [Worker(coordinator.address, job=make_job(), config=QUICK_WORKER) for _ in range(singles)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            result, *departures = await asyncio.gather(coordinator.wait(), *running)
            return result, departures
        finally:
            for circle in circles:
                circle.end()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_job", "share", "ranks"),
    [(jobs.mlp_sgd, *EVERY[0]), (jobs.cnn_adamw, *EVERY[1]), (jobs.cnn_adamw, *EVERY[3])]
    + [(jobs.gpt_adamw, *each) for each in EVERY],
)
async def test_an_island_has_the_bits_of_a_single_worker(make_job: Callable[[], Job], share: Share, ranks: int) -> None:
    expected = await train(make_job)
    events: list[Event] = []
    result, departures = await run(make_job, [Circle(ranks, share, seed=ranks)], events=events)
    assert (result.digest, result.loss) == (expected.digest, expected.loss)
    assert departures == [Departure.FINISHED] * ranks
    (joined,) = [event for event in events if isinstance(event, WorkerJoined)]
    assert joined.device == f"cpu test={ranks}"


@pytest.mark.slow
async def test_islands_and_single_workers_in_one_run() -> None:
    expected = await train(jobs.cnn_adamw)
    circles = [Circle(2, Share.BLOCK, seed=1), Circle(3, Share.TURNS, seed=2)]
    result, departures = await run(jobs.cnn_adamw, circles, singles=1, audit_fraction=0.3)
    assert result.digest == expected.digest
    assert departures == [Departure.FINISHED] * 6
    assert len(result.shares) == 3


@pytest.mark.slow
async def test_an_island_without_code() -> None:
    def make() -> Job:
        return replace(jobs.mlp_sgd(), loss=nn.CrossEntropyLoss())

    expected = await train(make)
    result, _ = await run(make, [Circle(2, Share.BLOCK)], code_free=True)
    assert result.digest == expected.digest


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("checked", [True, False])
async def test_a_lost_rank_is_a_lost_island(lost: int, checked: bool) -> None:
    expected = await train(jobs.cnn_adamw)
    commits, events = Commits(), list[Event]()
    bus = commits.bus
    bus.subscribe(events.append)
    checks: dict[str, Any] = {} if checked else {"audit_fraction": 0.0, "norm_gate": 0.0}
    async with Coordinator(jobs.cnn_adamw(), config=settings(min_workers=2, **checks), bus=bus) as coordinator:
        circle = Circle(2, Share.BLOCK)
        ranks = start(coordinator.address, circle, jobs.cnn_adamw)
        single = asyncio.create_task(Worker(coordinator.address, job=jobs.cnn_adamw(), config=QUICK_WORKER).run())
        running = [asyncio.create_task(rank.run()) for rank in ranks]
        await commits.reach(2)
        assert ranks[lost]._connection is not None
        ranks[lost]._connection.link.abort()
        ended = await asyncio.gather(*running, return_exceptions=True)
        circle.end()
        assert all(isinstance(error, W5xdeError) for error in ended)
        result = await coordinator.wait()
        assert await single is Departure.FINISHED
    assert result.digest == expected.digest
    (left,) = [event for event in events if isinstance(event, WorkerLeft) and not event.clean]
    assert f"rank {lost}" in left.reason


async def test_a_leaf_that_fails_on_an_island_is_tried_elsewhere() -> None:
    expected = await train(jobs.mlp_sgd)
    circle, failed = Circle(2, Share.BLOCK), list[int]()

    def fails(task: Any, rank: int) -> bool:
        if rank == 1 and task.step == 3 and len(failed) < 2:
            failed.append(task.start)
            return True
        return False

    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=2)) as coordinator:
        running = [asyncio.create_task(one.run()) for one in start(coordinator.address, circle, jobs.mlp_sgd,
                                                                   fails=fails)]  # fmt: skip
        single = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await asyncio.gather(*running, single) == [Departure.FINISHED] * 3
    assert failed
    assert result.digest == expected.digest


@pytest.mark.parametrize("share", [Share.TURNS, Share.ALL], ids=lambda share: share.name)
async def test_a_leaf_that_breaks_islands_ends_the_run_with_the_jobs_own_error(
    share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that begins anew is one attempt, as another worker; the last one hears of the end."""

    def refuses(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("a bug of the job")

    make, ends = lambda: replace(jobs.mlp_sgd(), loss=refuses), list[list[Any]]()
    async with Coordinator(make(), config=settings(max_leaf_failures=3)) as coordinator:
        for attempt in range(3):
            monkeypatch.setattr(connection, "_WORD_S", 0.0 if attempt < 2 else 30.0)
            circle = Circle(2, share, seed=attempt)
            running = [asyncio.create_task(rank.run()) for rank in start(coordinator.address, circle, make)]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            circle.end()
            ends.append(await asyncio.gather(*running, return_exceptions=True))
        with pytest.raises(LeafFailed, match=r"leaf 0: ValueError: a bug of the job") as failed:
            await coordinator.wait()
    assert failed.value.attempts == 3
    assert all(isinstance(error, IslandBroken | LinkLost) for ended in ends[:2] for error in ended)
    assert all("leaf 0: " in str(error) for ended in ends[:2] for error in ended if isinstance(error, IslandBroken))
    assert [type(error) for error in ends[2]] == [RunFailed, RunFailed]


async def test_a_rank_that_does_not_come_keeps_nobody_waiting() -> None:
    expected = await train(jobs.mlp_sgd)
    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=1, join_s=1.0)) as coordinator:
        circle = Circle(2, Share.BLOCK)
        alone = asyncio.create_task(start(coordinator.address, circle, jobs.mlp_sgd)[0].run())
        single = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await single is Departure.FINISHED
        (error,) = await asyncio.gather(alone, return_exceptions=True)
    assert isinstance(error, LinkLost | Departure)
    assert result.digest == expected.digest


async def test_an_island_that_is_asked_to_leave_goes_in_good_order() -> None:
    expected = await train(jobs.mlp_sgd)
    commits, events = Commits(), list[Event]()
    bus = commits.bus
    bus.subscribe(events.append)
    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=2), bus=bus) as coordinator:
        ranks = start(coordinator.address, Circle(2, Share.BLOCK), jobs.mlp_sgd)
        single = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        running = [asyncio.create_task(rank.run()) for rank in ranks]
        await commits.reach(2)
        for rank in ranks:
            rank.drain("enough")
        assert await asyncio.gather(*running) == [Departure.DRAINED] * 2
        result = await coordinator.wait()
        assert await single is Departure.FINISHED
    assert result.digest == expected.digest
    assert all(event.clean for event in events if isinstance(event, WorkerLeft))


TP = "tp=2 1f2e3d4c"


async def test_who_makes_sums_in_another_way_than_the_first_worker_is_refused() -> None:
    commits = Commits()
    async with Coordinator(jobs.mlp_sgd(), config=settings(max_steps=100_000), bus=commits.bus) as coordinator:

        def single() -> asyncio.Task[Departure]:
            worker = Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER)
            return asyncio.create_task(worker.run())

        singles = [single()]
        await commits.reach(1)
        circle = Circle(2, Share.ALL, numerics=TP)
        ended = await asyncio.gather(*[rank.run() for rank in start(coordinator.address, circle, jobs.mlp_sgd)],
                                     return_exceptions=True)  # fmt: skip
        circle.end()
        singles.append(single())
        coordinator.request_stop()
        result = await coordinator.wait()
        for one in singles:  # they would wait for a coordinator that goes on
            one.cancel()
        await asyncio.gather(*singles, return_exceptions=True)
    refused = [error for error in ended if isinstance(error, Refused) and error.code is RefusalCode.NUMERICS]
    assert refused
    assert all(words in str(refused[0]) for words in (TP, "exact", "--numerics any"))
    assert result.digest == reference.digest(jobs.mlp_sgd(), result.step)


async def test_a_run_that_an_island_began_refuses_single_workers() -> None:
    circle = Circle(2, Share.ALL, numerics=TP)
    commits = Commits()
    async with Coordinator(jobs.mlp_sgd(), config=settings(), bus=commits.bus) as coordinator:
        running = [asyncio.create_task(rank.run()) for rank in start(coordinator.address, circle, jobs.mlp_sgd)]
        await commits.reach(1)
        with pytest.raises(Refused, match=r"\(exact\) than the run's \(tp=2 1f2e3d4c\)"):
            await Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run()
        await coordinator.wait()
        assert await asyncio.gather(*running) == [Departure.FINISHED] * 2


async def test_the_coordinator_says_whose_results_count() -> None:
    async with Coordinator(jobs.mlp_sgd(), config=settings(numerics="tp=2")) as coordinator:
        circle = Circle(2, Share.ALL, numerics=TP)
        with pytest.raises(Refused, match=r"\(exact\) than the run's \(tp=2\)"):
            await Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run()
        ranks = start(coordinator.address, circle, jobs.mlp_sgd)
        assert await asyncio.gather(*[rank.run() for rank in ranks]) == [Departure.FINISHED] * 2


@pytest.mark.slow
async def test_all_kinds_are_taken_with_a_warning_and_never_compared_with_each_other() -> None:
    expected = await train(jobs.cnn_adamw)
    events: list[Event] = []
    circles = [Circle(2, Share.BLOCK, seed=1, numerics=TP), Circle(2, Share.TURNS, seed=2, numerics=TP)]
    result, _ = await run(jobs.cnn_adamw, circles, singles=1, audit_fraction=1.0, numerics="any", events=events)
    assert result.digest == expected.digest  # these islands only say that they differ
    islands = {event.worker_id for event in events if isinstance(event, WorkerJoined) and "test=2" in event.device}
    compared = [event for event in events if isinstance(event, Audited)]
    assert compared
    assert all({event.worker_id, event.second_id} == islands for event in compared)
    (warned,) = [event.text for event in events if isinstance(event, Warned) and "in several ways" in event.text]
    assert f"exact, {TP}" in warned


@pytest.mark.slow
async def test_what_the_coordinator_computes_itself_is_another_kind_and_is_told_once(tmp_path: Path) -> None:
    circle, events, bus = Circle(2, Share.BLOCK, numerics=TP), list[Event](), Bus()
    bus.subscribe(events.append)
    failed: set[int] = set()

    def fails(task: Any, rank: int) -> bool:
        if rank == 0 or task.step not in (3, 5) or task.step in failed:
            return False
        failed.add(task.step)
        return True

    config, path = settings(max_leaf_failures=1, checkpoint_every=1), tmp_path / "run"
    async with Coordinator(jobs.mlp_sgd(), run_dir=path, config=config, bus=bus) as coordinator:
        ranks = start(coordinator.address, circle, jobs.mlp_sgd, fails=fails)
        running = [asyncio.create_task(rank.run()) for rank in ranks]
        await coordinator.wait()
        assert await asyncio.gather(*running) == [Departure.FINISHED] * 2
    said = [event.text for event in events if isinstance(event, Warned)]
    assert sum("what the coordinator computed counts" in text for text in said) == 2
    (warned,) = [text for text in said if "in several ways" in text]
    assert f"exact, {TP}" in warned
    record, _ = await asyncio.to_thread(CheckpointStore(path / "checkpoints").latest)
    assert record is not None
    assert record.meta["numerics"] == [TP, "exact"]


@pytest.mark.slow
async def test_single_workers_go_on_where_an_island_left_off(tmp_path: Path) -> None:
    expected = await train(jobs.mlp_sgd)
    kept, path = settings(checkpoint_every=1), tmp_path / "run"
    circle, commits = Circle(2, Share.ALL, numerics=TP), Commits()
    async with Coordinator(jobs.mlp_sgd(), run_dir=path, config=kept, bus=commits.bus) as coordinator:
        running = [asyncio.create_task(rank.run()) for rank in start(coordinator.address, circle, jobs.mlp_sgd)]
        await commits.reach(3)
        coordinator.request_stop()
        await coordinator.wait()
        await asyncio.gather(*running, return_exceptions=True)
    events: list[Event] = []
    with pytest.raises(Refused, match=r"\(exact\) than the run's \(tp=2 1f2e3d4c\)"):
        await train(jobs.mlp_sgd, run_dir=path, max_time_s=5.0)
    result = await train(jobs.mlp_sgd, run_dir=path, events=events, numerics="exact")
    assert result.digest == expected.digest
    assert any(f"computed in these ways: {TP}" in event.text for event in events if isinstance(event, Warned))


async def test_an_island_that_takes_the_program_alone_is_told_so_where_there_is_none() -> None:
    """Giving it --job, as the coordinator tells other workers, would help nothing."""
    async with Coordinator(jobs.mlp_sgd(), config=settings()) as coordinator:
        rank = replace(Circle(2, Share.ALL).rank(0), traced=True, shape="pp=2")
        with pytest.raises(
            Refused,
            match="code_free=False; --island pp=2 computes the program alone; dp, fsdp and tp compute",
        ):
            await Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER, rank=rank).run()
