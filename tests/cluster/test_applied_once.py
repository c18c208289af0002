"""How often each sample was applied, read from the model itself (``support.oracle``): once, whatever happens."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.oracle import BATCH, PLAIN, applied, job, listening
from torch import Tensor

from w5xde_async.coordinator.outer.local_step_schedule import LocalStepSchedule
from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.parameters.outer_aggregator import OuterAggregator, Submission
from w5xde_async.coordinator.run.resume import KeptState
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import CheckpointSaved, Event, RunFinished, Warned
from w5xde_async.updates.norm_gate import NormGate
from w5xde_async.updates.outer import OuterRule
from w5xde_async.worker.service import Worker

SAMPLES = 256
STEPS = SAMPLES // BATCH
ONCE = [[1.0] * SAMPLES] * 2
LOCAL = ["local", "streaming", "async-local"]


async def run(rule: str, workers: int, path: Path | None = None, **kwargs: Any) -> tuple[RunResult, list[Event]]:
    events: list[Event] = []
    result = await train(job, workers=workers, run_dir=path, events=events, update=PLAIN[rule], **kwargs)
    return result, events


@pytest.mark.parametrize("rule", PLAIN)
async def test_one_worker(rule: str, tmp_path: Path) -> None:
    """With every default of the coordinator, its norm gate too; the last piece is shorter than the others."""
    result, events = await run(rule, 1, tmp_path / "run")
    assert result.model_path is not None
    assert applied(result.model_path) == ONCE
    (ended,) = [event for event in events if isinstance(event, RunFinished)]
    assert (ended.samples, ended.leaves_in_vain) == (SAMPLES, 0)


@pytest.mark.parametrize("rule", ["local", "async-local"])
async def test_the_short_last_piece_of_a_worker(rule: str, tmp_path: Path) -> None:
    """One step after rounds of 24: it is not over the gate's bound for so few samples."""
    samples, events = (9 * 24 + 1) * BATCH, list[Event]()
    update, path = replace(PLAIN[rule], inner_steps=24), tmp_path / "run"
    result = await train(lambda: job(samples), run_dir=path, events=events, update=update, max_time_s=60.0)
    assert result.model_path is not None
    assert applied(result.model_path, samples) == [[1.0] * samples] * 2
    (ended,) = [event for event in events if isinstance(event, RunFinished)]
    assert (ended.samples, ended.leaves_in_vain) == (samples, 0)


@pytest.mark.parametrize("rule", ["async", "local", "async-local"])
async def test_three_workers(rule: str) -> None:
    with listening() as heard:
        await run(rule, 3)
    assert heard.times() == ONCE


@pytest.mark.parametrize("steps", [29, 32])
async def test_two_turns_of_one_worker_are_two_rounds(
    steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both wait to be judged at once, at the end of the data: in one round each would count by its part of it."""
    offer, together = OuterAggregator.offer, 0

    async def wait_for_all_that_was_asked(aggregator: OuterAggregator, given: Submission, *rest: Any) -> Any:
        nonlocal together
        training = coordinator._training
        assert isinstance(training, OuterTraining)
        ledger, asked = training.ledger, training.local_steps.fragments_asked
        while not ledger.exhausted or ledger.num_steps_held(given.worker):  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.001)
        while len(training._inbox) < len(asked(given.worker)) - 1:  # noqa: ASYNC110 - what is judged is among them
            await asyncio.sleep(0.001)
        together += any(one.fragment != given.fragment for one in training._inbox)
        return await offer(aggregator, given, *rest)

    monkeypatch.setattr(OuterAggregator, "offer", wait_for_all_that_was_asked)
    made = job(steps * BATCH)
    async with Coordinator(made, run_dir=tmp_path / "run", config=settings(update=PLAIN["streaming"])) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        result = await coordinator.wait()
        await working
    assert result.model_path is not None
    assert together > 0
    assert applied(result.model_path, steps * BATCH) == [[1.0] * steps * BATCH] * 2


async def test_streaming_has_each_sample_at_most_once_in_each_fragment() -> None:
    """Nothing is kept of the local values, so that a Delta has nothing in it but its worker's own steps."""
    with listening() as heard:
        update = replace(PLAIN["streaming"], mixing=0.0)
        await train(job, workers=3, update=update)
    assert {count for copy in heard.times() for count in copy} <= {0.0, 1.0}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rule", ["async", *LOCAL])
async def test_refusals(rule: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is computed again by somebody, and by nobody twice (streaming: kept for the next one)."""
    judge, calls = NormGate.judge, Counter[str]()

    def refuse(gate: NormGate, *arguments: Any, **named: Any) -> float:
        calls["all"] += 1
        return 0.0 if calls["all"] in (2, 3, 5, 9) else judge(gate, *arguments, **named)

    monkeypatch.setattr(NormGate, "judge", refuse)
    with listening() as heard:
        _, events = await run(rule, workers)
    assert heard.refused == 4
    (ended,) = [event for event in events if isinstance(event, RunFinished)]
    assert ended.samples == SAMPLES
    if rule != "streaming":
        assert heard.times() == ONCE
    elif workers == 1:
        assert max(count for copy in heard.times() for count in copy) <= 1.01


async def test_a_step_that_two_workers_find_unusual_counts() -> None:
    """It is over the gate's bound whoever computes it: then nobody is at fault, and it counts, scaled down."""

    def unusual(output: Tensor, target: Tensor) -> Tensor:
        return -(output * (1 + 9 * (target // BATCH == 25))).mean()

    events: list[Event] = []
    await train(
        lambda: job(loss=unusual, shuffle=False), workers=2, min_workers=2, events=events, update=PLAIN["async"]
    )
    (ended,) = [event for event in events if isinstance(event, RunFinished)]
    assert (ended.samples, ended.leaves_in_vain) == (SAMPLES, 2)  # one of the two workers' in vain
    assert not [event for event in events if isinstance(event, Warned) and "left out" in event.text]


@pytest.mark.parametrize("rule", ["async", "local", "async-local"])
async def test_workers_that_drain_vanish_and_come(rule: str) -> None:
    commits = Commits()
    with listening() as heard:
        async with Coordinator(job(), config=settings(update=PLAIN[rule]), bus=commits.bus) as coordinator:
            workers: list[Worker] = []
            tasks: list[asyncio.Task[object]] = []

            def start() -> None:
                workers.append(Worker(coordinator.address, job=job(), config=QUICK_WORKER))
                tasks.append(asyncio.create_task(workers[-1].run()))

            start()
            start()
            for number in range(4):
                await commits.reach(min(2 + 4 * number, STEPS))
                if number % 2:
                    workers[number].drain("test")
                else:
                    tasks[number].cancel()
                start()
            assert (await coordinator.wait()).outcome == "finished"
            await asyncio.gather(*tasks, return_exceptions=True)
    assert heard.times() == ONCE


def told(path: Path) -> tuple[int, int]:
    """Samples of the steps that metrics.jsonl has, and the last step."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step_committed"]
    return sum(record["samples"] for record in steps), max((record["step"] for record in steps), default=0)


async def part(path: Path, rule: str, until: Callable[[Commits], Any] | None, **kwargs: Any) -> RunResult:
    """One coordinator and one worker, stopped when ``until`` returns."""
    commits = Commits()
    config = settings(update=PLAIN[rule], checkpoint_every=1, keep_checkpoints=100, **kwargs)
    async with Coordinator(job(), run_dir=path, config=config, bus=commits.bus) as coordinator:
        worker = Worker(coordinator.address, job=job(), config=QUICK_WORKER)
        task = asyncio.create_task(worker.run())
        if until is not None:
            await until(commits)
            coordinator.request_stop("test")
        result = await coordinator.wait()
        worker.drain()
        await task
    return result


@pytest.mark.slow
@pytest.mark.parametrize("rule", PLAIN)
async def test_stopped_and_resumed(rule: str, tmp_path: Path) -> None:
    """As Ctrl-C does it. What was accepted is in the parameters, the counts and the lines, and is not done again."""
    path, step = tmp_path / "run", 0
    for number in range(3):
        with listening() as heard:
            stopped = await part(path, rule, lambda commits, at=4 + 8 * number: commits.reach(at))
        assert stopped.model_path is not None
        done = applied(stopped.model_path)
        assert {count for copy in done for count in copy} <= {0.0, 1.0}
        assert [sum(copy) for copy in done] == [BATCH * stopped.step] * 2, "what was accepted is in the model"
        assert told(path) == (BATCH * stopped.step, stopped.step)
        if rule not in ("sync", "streaming"):
            assert sum(heard.times()[0]) == BATCH * (stopped.step - step), "nothing accepted is done again"
        step = stopped.step
    result = await part(path, rule, None)
    assert result.model_path is not None
    assert (result.outcome, applied(result.model_path)) == ("finished", ONCE)
    assert told(path) == (SAMPLES, STEPS)


@pytest.mark.parametrize("rule", PLAIN)
async def test_killed_and_resumed_from_a_checkpoint(rule: str, tmp_path: Path) -> None:
    await resume(rule, await kill(rule, tmp_path / "run"))


async def test_killed_while_the_round_of_another_fragment_is_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The checkpoint holds that round as a sum; the workers of the resumed run begin at the parameters."""
    closing = LocalStepSchedule.closing

    def close_none_alone(schedule: LocalStepSchedule, now: float) -> tuple[int | None, float | None]:
        all_close = all(quorum.decide(now).close for quorum in schedule.quorums)
        return closing(schedule, now) if all_close else (None, None)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStepSchedule, "closing", close_none_alone)
        for attempt in range(10):  # a run may come to its end without such a checkpoint
            (tmp_path / str(attempt)).mkdir()
            killed = await kill("streaming", tmp_path / str(attempt) / "run", open_round=True)
            if killed.pending:
                break
    assert killed.pending
    await resume("streaming", killed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rule", ["async", *LOCAL])
async def test_killed_where_judging_takes_its_time(
    rule: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Results wait for one another, rounds stay open, the last ones of the data come all at once."""
    random = Random(seed)

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        async def wait(aggregator: OuterAggregator, *given: Any) -> Any:
            await asyncio.sleep(random.choice((0.0, 0.0, 0.002, 0.01, 0.04)))
            return await call(aggregator, *given)

        return wait

    for name in ("offer", "commit"):
        monkeypatch.setattr(OuterAggregator, name, late(getattr(OuterAggregator, name)))
    await resume(rule, await kill(rule, tmp_path / "run"))


class Killed(NamedTuple):
    """What a kill leaves: the run directory, and what the oracle has heard of it."""

    path: Path
    accepted: list[list[float]]  # by the last checkpoint, by copy and sample
    pending: bool  # some of it was in an open round, not in the parameters
    largest: int  # samples of a pseudo-gradient


async def kill(rule: str, path: Path, *, open_round: bool = False) -> Killed:
    """The run directory as it was on the disk in the middle of the run is what a kill leaves. ``open_round``: as soon
    as a checkpoint holds one."""
    killed, record = path.with_name("killed"), KeptState.record
    accepted: dict[int, tuple[list[list[float]], bool]] = {}
    copied: dict[int, tuple[list[list[float]], bool]] = {}

    def see(kept: KeptState, step: int, samples: int) -> Any:
        made = kept.strategy.rule
        fragments = (0, 1) if rule == "streaming" else (0,)
        pending = isinstance(made, OuterRule) and any(map(made.pending, fragments))
        accepted[step] = heard.times(), pending
        return record(kept, step, samples)

    async def until(commits: Commits) -> None:
        saved = asyncio.Event()

        def see(event: Event) -> None:
            if isinstance(event, CheckpointSaved) and event.step >= STEPS // 3:
                if accepted[event.step][1] or not open_round:
                    saved.set()
            elif isinstance(event, RunFinished):
                saved.set()

        commits.bus.subscribe(see)
        await saved.wait()
        copied.update(accepted)  # where rounds are open, a later checkpoint may have the same step and more in it
        await asyncio.to_thread(shutil.copytree, path, killed, ignore=shutil.ignore_patterns(".tmp-*"))
        # The run went on meanwhile. Steps are told before a checkpoint has them: a kill never leaves fewer.
        await asyncio.to_thread(shutil.copy, path / "metrics.jsonl", killed / "metrics.jsonl")

    with pytest.MonkeyPatch.context() as patched, listening() as heard:
        patched.setattr(KeptState, "record", see)
        await part(path, rule, until)
    step = max(await asyncio.to_thread(lambda: CheckpointStore(killed / "checkpoints", keep=100).steps()))
    return Killed(killed, *(accepted | copied)[step], heard.largest)


async def resume(rule: str, killed: Killed) -> None:
    result = await part(killed.path, rule, None)
    assert result.model_path is not None
    counts = applied(result.model_path)
    assert result.outcome == "finished"
    if rule == "streaming":  # what counted in one fragment is not computed again for the other
        assert {count for copy in counts for count in copy} <= {0.0, 1.0}
        assert {max(pair) for pair in zip(*counts, strict=True)} == {1.0}
        for had, has in zip(killed.accepted, counts, strict=True):
            lost = [sample for sample in range(SAMPLES) if has[sample] < had[sample] - 0.01]
            assert not lost, "what was accepted counts"
        # Of one fragment is lost, at most, what the lost worker was about to submit: where nobody was killed, it did.
        assert sum(map(sum, counts)) >= 2 * SAMPLES - killed.largest
    else:
        assert counts == ONCE
    assert told(killed.path) == (SAMPLES, STEPS)


def test_the_oracle_tells_twice_from_once() -> None:
    made = job().model()
    optimizer = torch.optim.SGD(made.parameters(), lr=float(BATCH))
    for ids in (torch.arange(8), torch.arange(4, 12)):
        optimizer.zero_grad()
        job().loss(made(ids), ids).backward()
        optimizer.step()
    assert applied(made, 13)[0] == [1.0] * 4 + [2.0] * 4 + [1.0] * 4 + [0.0]
