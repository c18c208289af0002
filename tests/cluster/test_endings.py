"""Ends that are not the plain one: updates that raise, a last checkpoint that fails; and blocks on the loop."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import settings, train
from tests.support.proxy import FaultProxy
from tests.support.scripted import scripted, settle
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from w5xde_async.coordinator.durability import best
from w5xde_async.coordinator.durability.checkpointing import Checkpointing
from w5xde_async.coordinator.monitoring.status_sampler import StatusSampler
from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.coordinator.run import shutdown
from w5xde_async.coordinator.run.resume import KeptState
from w5xde_async.coordinator.run.run import gone
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import (
    JobError,
    LeafFailed,
    LinkLost,
    LocalError,
    RefusalCode,
    Refused,
    StoreError,
    Unreachable,
    UpdateFailed,
)
from w5xde_async.hub.members.roster import Roster
from w5xde_async.job import Job
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Bus, Event, RunFinished, StepCommitted, Warned, WorkerLeft
from w5xde_async.telemetry.recorder import Recorder
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Bye, ByeCode, Heartbeat, Refusal
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.connection import Connection
from w5xde_async.worker.service import Departure, RunFailed, Worker

WORKER = WorkerConfig(device="cpu", connect_timeout_s=5.0)


async def test_a_run_that_was_given_less_than_a_second_says_how_much() -> None:
    async with Coordinator(jobs.mlp_sgd(), config=settings(max_time_s=0.05)) as coordinator:
        result = await coordinator.wait()
    assert (result.outcome, result.reason) == ("stopped", "max_time of 0.05 s reached")


class Stumbling(torch.optim.SGD):
    """Raises in its fourth step, half done."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 4:
            self.param_groups[0]["params"][0].data.fill_(7.0)
            raise ArithmeticError("stumbled")
        super().step(*args, **kwargs)


async def test_a_finished_run_without_its_model_has_failed_and_the_next_start_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    events = list[Event]()
    with monkeypatch.context() as patch:
        patch.setattr("w5xde_async.coordinator.run.shutdown.export_model", full)
        with pytest.raises(StoreError, match=r"the model was not written: .* No space left .*the last checkpoint has"):
            await train(jobs.mlp_sgd, run_dir=tmp_path / "run", events=events)
    ends = [event for event in events if isinstance(event, RunFinished)]
    assert [(event.outcome, event.model_path) for event in ends] == [("finished", "")]
    async with Coordinator(jobs.mlp_sgd(), run_dir=tmp_path / "run", config=settings()) as coordinator:
        again = await coordinator.wait()
    assert (again.outcome, again.digest, again.loss) == ("finished", ends[0].digest, ends[0].loss)
    assert again.loss is not None
    assert again.model_path == tmp_path / "run" / "model.safetensors"
    assert again.model_path.is_file()


async def test_a_model_that_nothing_holds_is_not_said_to_lie_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise StoreError(str(tmp_path), "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("w5xde_async.coordinator.run.shutdown.export_model", full)
        patch.setattr(CheckpointStore, "save", full)
        async with Coordinator(jobs.mlp_sgd(), run_dir=tmp_path / "run", config=settings()) as coordinator:
            worker = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=WORKER).run())
            with pytest.raises(StoreError, match=r"the model was not written: .*disk is full.*; nor was a checkpoint"):
                await coordinator.wait()
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


async def test_an_optimizer_that_raises_ends_the_run_and_nothing_half_updated_is_saved(tmp_path: Path) -> None:
    job = replace(jobs.metrics(), optimizer=lambda model: Stumbling(model.parameters(), lr=0.1))
    coordinator = Coordinator(job, run_dir=tmp_path / "run", config=settings(checkpoint_every=2))
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=jobs.metrics(), config=WORKER).run())
        with pytest.raises(UpdateFailed, match=r"step 3 raised ArithmeticError: stumbled[\s\S]*test_endings"):
            await coordinator.wait()
        with pytest.raises(RunFailed):
            await worker
    record, skipped = await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").latest)
    assert record is not None
    assert record.step == 2
    assert not skipped
    assert not any(bool((tensor == 7.0).all()) for tensor in record.groups["model"].values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


class Misnamed(Dataset[tuple[Tensor, Tensor]]):
    """One of its samples is in a file whose name is no UTF-8. It cannot be read, which is found after a commit."""

    committed = threading.Event()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 20:
            assert self.committed.wait(60)
            raise ValueError(f"cannot read {os.fsdecode(bytes([0x63, 0xE9]))}.txt")
        return torch.ones(2), torch.ones(1)


@pytest.mark.slow
@pytest.mark.parametrize("mute", [False, True])
async def test_commits_are_saved_whatever_the_error_says_and_whether_or_not_it_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mute: bool
) -> None:
    events: list[Event] = []
    dataset = Misnamed()
    monkeypatch.setattr(dataset, "committed", threading.Event())
    job = Job(
        model=lambda: nn.Linear(2, 1), dataset=dataset, shuffle=False, batch_size=4, microbatch_size=2, epochs=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss,
    )  # fmt: skip

    def heard(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepCommitted):
            dataset.committed.set()

    coordinator = Coordinator(job, run_dir=tmp_path / "run", config=settings(checkpoint_every=500), callbacks=[heard])
    async with coordinator:
        if mute:
            monkeypatch.setattr(Roster, "say_goodbye", Mock(side_effect=OSError("no line")))
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=WORKER).run())
        with pytest.raises(LeafFailed, match=r"step 5, leaf 0: ValueError: cannot read c\?\.txt .*sample 20"):
            await coordinator.wait()
        if mute:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        else:
            with pytest.raises(RunFailed, match=r"cannot read c\?\.txt"):
                await worker
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    assert finished.outcome == "failed"
    assert "cannot read c?.txt" in finished.reason
    record, _ = await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").latest)
    assert record is not None
    assert record.step == finished.step > 0
    assert (tmp_path / "run" / "model.safetensors").exists()
    unheard = [event for event in events if isinstance(event, Warned) and "could not be told" in event.text]
    assert len(unheard) == mute


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("never foreseen"), "^a fault of the coordinator itself: RuntimeError: never foreseen"),
        (LinkLost("w", "gone"), "^a fault of the coordinator itself: LinkLost: connection to w lost: gone"),
        (LocalError("no process can be had"), "^no process can be had"),
    ],
)
async def test_a_fault_of_a_task_beside_the_training_is_said_and_the_last_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """One that nobody has foreseen: the group of tasks would have been cancelled, with all that a run's end saves."""
    events, real, left = list[Event](), Checkpointing._save, [1]

    async def save(checkpointing: Checkpointing, *args: Any, **options: Any) -> None:
        if left and left.pop():
            raise error
        await real(checkpointing, *args, **options)

    monkeypatch.setattr(Checkpointing, "_save", save)
    job = replace(jobs.mlp_sgd(), max_steps=400, epochs=None)
    with pytest.raises(LocalError, match=words):
        await train(lambda: job, run_dir=tmp_path / "run", events=events, checkpoint_every=2)
    last = max(event.step for event in events if isinstance(event, StepCommitted))
    assert max(await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").steps)) == last


class Hoarding(torch.optim.SGD):
    """Makes state in its fourth step that no file can hold."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        super().step(*args, **kwargs)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 4:
            self.state[self.param_groups[0]["params"][0]]["made by"] = object()


@pytest.mark.parametrize("every", [3, 500])
async def test_state_that_cannot_be_kept_ends_the_run_and_everybody_is_told(tmp_path: Path, every: int) -> None:
    """Whether a checkpoint on the way meets it or the last one: the job is at fault, no disk."""
    job = replace(jobs.metrics(), optimizer=lambda model: Hoarding(model.parameters(), lr=0.1))
    coordinator = Coordinator(job, run_dir=tmp_path / "run", config=settings(checkpoint_every=every))
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=jobs.metrics(), config=WORKER).run())
        with pytest.raises(JobError, match=r"after step \d+ its state cannot be kept: .*made by.* builtins.object"):
            await coordinator.wait()
        with pytest.raises(RunFailed, match="cannot be kept"):
            await worker
    record, skipped = await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").latest)
    assert (None if record is None else record.step) == (3 if every == 3 else None)
    assert not skipped


@pytest.mark.parametrize("fails", ["snapshot", "copy", "save", "best", "look", "export"])
async def test_whatever_fails_beside_the_training_a_run_ends_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The workers are told, the last checkpoint is written, and the end is announced."""
    events, left = list[Event](), [1]
    job = replace(
        jobs.mlp_sgd(), evaluate=lambda model: {"one": 1.0}, evaluate_every=2, keep_best="min:one", max_steps=6,
        epochs=None,
    )  # fmt: skip

    def once(real: Any) -> Any:
        def failing(*args: Any, **options: Any) -> Any:
            if left and left.pop():
                raise MemoryError("no room")
            return real(*args, **options)

        return failing

    if fails == "snapshot":
        monkeypatch.setattr(ParameterOwner, "snapshot", once(ParameterOwner.snapshot))
    elif fails == "copy":
        monkeypatch.setattr(KeptState, "record", once(KeptState.record))
    elif fails == "save":
        monkeypatch.setattr(CheckpointStore, "save", once(CheckpointStore.save))
    elif fails == "best":
        monkeypatch.setattr(best, "export_tensors", once(best.export_tensors))
    elif fails == "look":
        monkeypatch.setattr(StatusSampler, "look", once(StatusSampler.look))
    else:
        monkeypatch.setattr(shutdown, "export_model", once(shutdown.export_model))
    running = train(lambda: job, run_dir=tmp_path / "run", events=events, checkpoint_every=3)
    if fails == "export":  # as where the model has a state_dict of its own
        with pytest.raises(StoreError, match="the model was not written: MemoryError: no room"):
            await running
    else:
        await running
    (end,) = [event for event in events if isinstance(event, RunFinished)]
    assert (end.outcome, end.step) == ("finished", 6)
    assert max(await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").steps)) == 6
    assert (tmp_path / "run" / "best.safetensors").exists()
    said = [str(event) for event in events if "no room" in str(event)]
    assert len(said) == (fails != "export")


class Unclosable(IterableDataset[Any]):
    """Its iterator raises when it is closed, once the run is over."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def __iter__(self) -> Iterator[Any]:
        samples = jobs.mlp_sgd().dataset
        try:
            yield from itertools.cycle(samples[index] for index in range(len(samples)))
        finally:
            if any(isinstance(event, RunFinished) for event in self._events):
                raise OSError(errno.EIO, "Input/output error")


async def test_what_cannot_be_closed_is_said_and_fails_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep the run directory from the next start."""
    close = Recorder.close

    def unclosable(recorder: Recorder) -> None:
        close(recorder)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Recorder, "close", unclosable)
    for steps in (2, 4):
        events = list[Event]()
        job = replace(jobs.mlp_sgd(), dataset=Unclosable(events), epochs=None, max_steps=steps)
        result = await train(lambda job=job: job, run_dir=tmp_path / "run", events=events)
        assert (result.outcome, result.step) == ("finished", steps)
        said = [event.text for event in events if isinstance(event, Warned) and "could not be closed" in event.text]
        assert [text.partition(":")[0] for text in said] == [
            "the dataset could not be closed", "metrics.jsonl could not be closed",
        ]  # fmt: skip
        assert all("OSError: [Errno 5] Input/output error" in text for text in said)


async def test_a_learning_rate_computed_with_numpy_is_kept(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.9) ** step if step else 1.0)

    result = await train(lambda: replace(jobs.metrics(), scheduler=scheduler), run_dir=tmp_path / "run")
    record, _ = await asyncio.to_thread(CheckpointStore(tmp_path / "run" / "checkpoints").latest)
    assert record is not None
    assert record.step == result.step


@pytest.mark.slow
async def test_a_last_checkpoint_that_fails_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: CheckpointStore, record: object) -> None:
        raise StoreError("disk", "it is full")

    monkeypatch.setattr(CheckpointStore, "save", full)
    async with Coordinator(jobs.metrics(), run_dir=tmp_path / "run", config=settings()) as coordinator:
        config = replace(WORKER, connect_timeout_s=1.0)
        worker = asyncio.create_task(Worker(coordinator.address, job=jobs.metrics(), config=config).run())
        with pytest.raises(StoreError, match="it is full"):
            await coordinator.wait()
        with pytest.raises(Unreachable):  # it was not told of an end, and waits for whoever does the last steps again
            await worker


@pytest.mark.both_loops
@pytest.mark.parametrize("name", ["metrics", "cnn_adamw", "odd"])
async def test_blocks_computed_on_the_loop_give_the_same_bits(name: str) -> None:
    config = replace(WORKER, inline_block_s=0.1)
    async with Coordinator(jobs.ALL[name](), config=settings(min_workers=2)) as coordinator:
        workers = [Worker(coordinator.address, job=jobs.ALL[name](), config=config).run() for _ in range(2)]
        await asyncio.gather(*workers)
        result = await coordinator.wait()
    assert result.digest == reference.digest(jobs.ALL[name]())


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
async def test_a_worker_of_several_threads_computes_nothing_on_the_loop(threads: int) -> None:
    """OpenMP would have helpers for both threads, more than cores, and put them to sleep at every operation."""
    computed_by: set[int] = set()

    def step(model: nn.Module, batch: Any) -> Tensor:
        computed_by.add(threading.get_ident())
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    job = replace(jobs.mlp_sgd(), step=step, loss=None)
    async with Coordinator(job, config=settings()) as coordinator:
        await Worker(coordinator.address, job=job, config=replace(WORKER, inline_block_s=0.1, threads=threads)).run()
        await coordinator.wait()
    assert (threading.get_ident() in computed_by) == (threads == 1)


async def test_a_fault_of_ours_while_a_member_is_served_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may be half noted by then: going on could end well with wrong parameters."""

    def broken(*_: object) -> None:
        raise AttributeError("planted")

    monkeypatch.setattr(Roster, "answered", broken)
    async with Coordinator(jobs.mlp_sgd(), config=settings()) as coordinator:
        working = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=WORKER).run())
        with pytest.raises(LocalError, match="AttributeError: planted"):
            await coordinator.wait()
        await asyncio.gather(working, return_exceptions=True)


@pytest.mark.parametrize("called", ["order is there", "later", "given back"])
async def test_a_fault_of_ours_where_the_event_loop_calls_ends_the_run(called: str) -> None:
    """It would be logged by the loop, and the run go on without what was to be done."""

    def broken(*_: object) -> None:
        raise AttributeError("planted")

    async with scripted() as run:
        training: Any = run.training
        training.schedule = broken
        if called == "order is there":
            training._ordering._on_ready()
        elif called == "later":
            training._look_again_at(run.now, run.now)
        elif called == "given back":
            training.scheduler.gave_back = lambda: True
            training._lease_anew()
        async with asyncio.timeout(5):
            while training.lifecycle.failure is None:  # noqa: ASYNC110 - a failure has no event of its own
                await asyncio.sleep(0.001)
        assert isinstance(training.lifecycle.failure, LocalError)
        assert "AttributeError: planted" in str(training.lifecycle.failure)


@pytest.mark.parametrize("alone", [True, False])
async def test_a_fault_of_ours_in_sending_ends_that_link_at_once(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would leave any more, and the worker be thought silent some time."""

    def broken() -> None:
        raise AttributeError("planted")

    # The log would keep what was raised, and that the run's memory.
    monkeypatch.setattr("w5xde_async.hub.members.session.logger.exception", lambda *_: None)
    async with scripted() as run:
        worker = await run.worker("a")
        worker.session.outbox.post(encode(Bye(ByeCode.STOPPING, "")), sent=broken)
        if not alone:
            worker.session.outbox.post(encode(Bye(ByeCode.STOPPING, "x" * (1 << 19))))
        await asyncio.wait_for(worker.session.ended.wait(), 5)
        assert run.training.lifecycle.failure is None
        (left,) = [event for event in run.events if isinstance(event, WorkerLeft)]
        assert "by a bug of its own (AttributeError" in left.reason


async def test_a_worker_that_waits_for_its_program_when_the_run_ends_is_done() -> None:
    """It has been told that the run is finished: it does not look for the coordinator any more."""
    config = settings(code_free=True)
    async with Coordinator(jobs.mlp_sgd(), config=config, job_reference="nowhere.py:job") as coordinator:
        assert coordinator._training is not None
        coordinator._training.roster.programs.ask = lambda session, request: None  # type: ignore[method-assign]
        waiting = asyncio.create_task(Worker(coordinator.address, config=WORKER).run())
        while not coordinator._training.roster.joining:  # noqa: ASYNC110 - joining has no event
            await asyncio.sleep(0.001)
        working = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=WORKER).run())
        await coordinator.wait()
        assert await waiting is Departure.FINISHED
        assert await working is Departure.FINISHED


async def test_a_worker_that_builds_its_model_while_the_coordinator_stops_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads nothing meanwhile, and finds out that nobody takes its heartbeats any more."""
    built, broken, run, hear = threading.Event(), asyncio.Event(), Connection._write, Connection._hear_the_last
    waited: list[bool] = []

    def slowly() -> nn.Module:
        assert built.wait(30)
        return jobs.mlp_sgd().model()

    async def write(self: Connection) -> None:
        try:
            await run(self)
        finally:
            broken.set()

    async def hear_beside_another(self: Connection) -> None:
        """Whose model is built just then."""
        other = asyncio.create_task(self._next(lambda *_: ()))
        await settle()
        waited.append(not other.done())
        other.cancel()
        await hear(self)

    monkeypatch.setattr(Connection, "_write", write)
    monkeypatch.setattr(Connection, "_hear_the_last", hear_beside_another)
    config = replace(WORKER, connect_timeout_s=0.5)
    async with Coordinator(jobs.mlp_sgd(), config=settings(heartbeat_s=0.05)) as coordinator:
        assert coordinator._training is not None
        worker = Worker(coordinator.address, job=replace(jobs.mlp_sgd(), model=slowly), config=config)
        building = asyncio.create_task(worker.run())
        while not coordinator._training.roster.joining:  # noqa: ASYNC110 - joining has no event
            await asyncio.sleep(0.001)
        coordinator.request_stop("by hand")
        await coordinator.wait()
    try:
        await asyncio.wait_for(broken.wait(), 20)
    finally:
        built.set()
    with pytest.raises(Unreachable):
        await building
    said = [message.partition(" reason=")[2] for message in caplog.messages if "joining again" in message]
    assert said == ["by hand"]
    assert waited == [True], "two read from one link"
    assert not [message for message in caplog.messages if message.startswith("coordinator lost")]


@pytest.mark.parametrize("ends_with_it", [False, True])
async def test_a_worker_that_is_ready_as_the_coordinator_stops_waits_for_it_to_come_back(ends_with_it: bool) -> None:
    """The answer to its READY says so, and may overtake the goodbye."""
    async with Coordinator(jobs.mlp_sgd(), config=settings()) as coordinator:
        assert coordinator._training is not None
        roster = coordinator._training.roster
        join, answers = roster.joined, [Refusal(RefusalCode.SHUTTING_DOWN, "closed", "")]
        roster.joined = lambda session, ready: answers.pop() if answers else join(session, ready)  # type: ignore[method-assign]
        worker = Worker(coordinator.address, job=jobs.mlp_sgd(), config=WORKER)
        if ends_with_it:
            worker.end_with_coordinator()
        assert await worker.run() is (Departure.DRAINED if ends_with_it else Departure.FINISHED)
        assert not answers


async def test_a_worker_that_builds_its_model_is_sent_the_last_message_before_its_link_is_cut() -> None:
    async with scripted() as run:
        await run.worker("late", ready=False)
        (session,) = run.training.roster.joining
        ending = run.task(gone(run.training))
        await settle()
        assert not ending.done()
        run.training.roster.say_goodbye(ByeCode.STOPPING, "it is over")
        await asyncio.wait_for(ending, 5)
        assert session.told.is_set()


async def test_nobody_waits_for_a_worker_whose_link_ends_before_it_has_the_last_message() -> None:
    async with scripted() as run:
        await run.worker("late", ready=False)
        (session,) = run.training.roster.joining
        ending = run.task(gone(run.training))
        await settle()
        assert not ending.done()
        session.link.abort()
        await asyncio.wait_for(ending, 1)  # less than the longest wait


async def test_who_loses_its_link_right_before_the_end_hears_of_it() -> None:
    """Its link breaks between the last commit and the last message, and it comes back to a run that is finished."""

    def short() -> Job:
        return replace(jobs.mlp_sgd(), max_steps=3)

    bus = Bus()
    async with Coordinator(short(), config=settings(min_workers=2), bus=bus) as coordinator:
        proxy = FaultProxy((coordinator.host, coordinator.port))
        await proxy.start()
        broken = []

        def see(event: Event) -> None:
            if isinstance(event, StepCommitted) and event.step == 3:
                broken.append(proxy.reset())

        bus.subscribe(see)
        addresses = f"127.0.0.1:{proxy.port}", coordinator.address
        workers = [Worker(address, job=short(), config=WORKER) for address in addresses]
        working = [asyncio.create_task(worker.run()) for worker in workers]
        result = await coordinator.wait()
        assert await asyncio.gather(*working) == [Departure.FINISHED] * 2
        await proxy.aclose()
    assert (result.outcome, broken) == ("finished", [1])


@pytest.mark.parametrize(
    ("code", "heard"),
    [
        (ByeCode.FINISHED, RefusalCode.RUN_FINISHED),
        (ByeCode.FAILED, RefusalCode.RUN_FAILED),
        (ByeCode.STOPPING, RefusalCode.SHUTTING_DOWN),
    ],
)
async def test_who_comes_after_the_last_message_is_told_the_same(code: ByeCode, heard: RefusalCode) -> None:
    async with scripted() as run:
        lost, late = await run.worker("lost"), await run.worker("late", ready=False)
        lost.link.abort()
        await settle()
        run.training.roster.say_goodbye(code, "it is over")
        waiting = run.task(run.training.roster.wait_for_lost())
        await settle()
        assert not waiting.done()
        await late.ready()  # it had been let in before, and has built its model now
        assert [message.code for message in late.all(Refusal)] == [heard]
        with pytest.raises(Refused, match="it is over") as told:
            await run.worker("lost")
        assert told.value.code is heard
        await asyncio.wait_for(waiting, 5)
        assert not run.training.roster.sessions


@pytest.mark.parametrize("noticed", [True, False])
async def test_who_is_cut_off_at_the_end_may_come_back_later(noticed: bool) -> None:
    """A line that is cut says nothing: whether the coordinator has noticed before the end or not, it waits longer for
    such a worker than for one whose link was reset, until it is back or somebody hurries."""
    async with scripted(silence_s=12.0, heartbeat_s=3.0) as run:
        roster, hurry = run.training.roster, False
        await run.worker("cut")
        roster.tick(run.now, "")
        run.now += 13.0 if noticed else 7.0
        if noticed:
            roster.tick(run.now, "")
            await settle()
            assert not roster.sessions
        roster.say_goodbye(ByeCode.FINISHED, "it is over")
        waiting = run.task(roster.wait_for_lost(lambda: hurry))
        for _ in range(2):
            run.now += 8.0
            roster._returned.set()
            await settle()
            assert not waiting.done()
        if noticed:
            with pytest.raises(Refused, match="it is over"):
                await run.worker("cut")
        else:
            hurry = True
            roster._returned.set()
        await asyncio.wait_for(waiting, 5)


async def test_a_worker_whose_frames_do_not_end_counts_as_silent() -> None:
    """A length was damaged on its way: its heartbeats vanish in a frame that never ends, and with them its leases."""
    async with scripted(silence_s=12.0, heartbeat_s=3.0) as run:
        damaged, other = await run.worker("damaged"), await run.worker("other")
        await damaged.lease()
        beat = encode(Heartbeat("computing"))[0]
        await damaged.link.send([bytes([0, 4, *beat[2:]])])
        for _ in range(5):
            assert not damaged.ended()
            await run.pass_time(3.0)
            await other.beat()
            with suppress(LinkLost):
                await damaged.beat()
        assert damaged.ended()
        left = [event for event in run.events if isinstance(event, WorkerLeft)]
        assert [(event.name, event.reason, event.leases_returned) for event in left] == [
            ("damaged", "silent for 12 s", 1)
        ]


@pytest.mark.parametrize("served", [True, False])
async def test_a_worker_that_was_of_use_outlives_a_frame_that_the_line_has_changed(served: bool) -> None:
    config = settings(min_workers=1 if served else 2)
    async with Coordinator(replace(jobs.mlp_sgd(), max_steps=40), config=config) as coordinator:
        worker = Worker(coordinator.address, job=jobs.mlp_sgd(), config=WORKER)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            while worker._connection is None or worker._connection.leases is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            connection = worker._connection
            assert connection.leases is not None
            while connection.leases.num_applied < served:  # noqa: ASYNC110
                await asyncio.sleep(0)
        connection._outbox.post([b"\x00\x00\x00\x05noise"])
        if served:
            assert await running is Departure.FINISHED
            assert (await coordinator.wait()).outcome == "finished"
        else:
            with pytest.raises(Refused, match="malformed frame"):
                await running


async def test_a_long_frame_over_a_slow_line_is_a_sign_of_life() -> None:
    async with scripted(silence_s=12.0, heartbeat_s=3.0) as run:
        slow = await run.worker("slow")
        data = b"".join(slow.result(await slow.lease(), 0))
        for at in range(0, len(data), 8 << 10):  # 5.5 kbit/s
            await slow.link.send([data[at : at + (8 << 10)]])
            await run.pass_time(11.9)
        assert not slow.ended()


async def test_a_worker_that_is_gone_for_good_holds_the_end_up_for_half_a_minute_at_most() -> None:
    async with scripted(silence_s=12.0, heartbeat_s=3.0) as run:
        await run.worker("gone")
        run.training.roster.tick(run.now, "")
        run.now += 13.0
        run.training.roster.tick(run.now, "")
        await settle()
        run.training.roster.say_goodbye(ByeCode.FINISHED, "it is over")
        waiting = run.task(run.training.roster.wait_for_lost())
        await settle()
        run.now += 31.0
        run.training.roster._returned.set()
        await asyncio.wait_for(waiting, 5)


async def test_nobody_waits_for_those_who_left_in_good_order() -> None:
    async with scripted() as run:
        worker = await run.worker("one")
        await worker.link.send(encode(Bye(ByeCode.LEAVING, "")))
        await settle()
        await asyncio.wait_for(run.training.roster.wait_for_lost(), 0.1)


def test_a_worker_that_gives_up_says_what_it_heard_last() -> None:
    text = str(Unreachable("host:1", "Connection refused", 300.0, "step 998 of 1000"))
    assert "step 998 of 1000" in text
    assert "check the address" in str(Unreachable("host:1", "Connection refused", 300.0))


async def test_the_time_of_training_is_told_apart(tmp_path: Path) -> None:
    """From the first leases to the last commit: neither waiting for workers nor what is done at the end."""
    events: list[Event] = []
    await train(jobs.metrics, run_dir=tmp_path / "run", events=events)
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    steps = sum(event.seconds for event in events if isinstance(event, StepCommitted))
    assert 0 < finished.trained_s <= steps < finished.seconds
