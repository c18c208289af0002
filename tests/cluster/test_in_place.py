"""Runs whose steps are too short to be sent: the coordinator computes them, and the bits are those of one process."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from w5xde_async.coordinator.durability.checkpointing import Checkpointing
from w5xde_async.coordinator.parameters import aggregator
from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.coordinator.run import run
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.coordinator.sync import in_place, training
from w5xde_async.coordinator.sync.in_place import InPlace
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.coordinator.sync.verification import FinishedBlock
from w5xde_async.data.loader import Loader
from w5xde_async.errors import LeafFailed, UpdateFailed
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Bus, Evaluated, Event, StepCommitted, Warned, WorkerQuarantined, WorkerShare
from w5xde_async.worker.executors.executor import Computed, HeldLease, Send
from w5xde_async.worker.executors.in_place import InPlaceExecutor
from w5xde_async.worker.service import Departure, Worker

STEPS = 60
SHORT = PacingConfig(short_steps="here", whole_step_s=5.0)  # on whatever machine


class _NoLimit(nullcontext[None]):
    """In place of ``time_limit``, whose signal the tests' own time limits have."""

    def __init__(self, seconds: float, **_: Any) -> None:
        super().__init__()

    @staticmethod
    def is_free() -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def the_signal_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "time_limit", _NoLimit)
    monkeypatch.setattr(in_place, "time_limit", _NoLimit)


@pytest.fixture(autouse=True)
def workers_of_this_process_draw_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no others do: these are waited for."""
    monkeypatch.setattr(in_place, "_MOMENT_S", 5.0)


@pytest.fixture(autouse=True)
def it_is_soon_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps vary."""
    monkeypatch.setattr(in_place, "_VARIED", in_place._SETTLED)


@pytest.fixture(autouse=True)
def it_is_always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, whatever else the machine does."""
    took = InPlace.took
    monkeypatch.setattr(InPlace, "took", lambda self, seconds, *_: took(self, 0.0 if self._computed else 1.0))


async def trained(
    made: Job, *, workers: int = 1, pacing: PacingConfig = SHORT, run_dir: Path | None = None,
    events: list[Event] | None = None, prompt: bool = True, **config: Any,
) -> RunResult:  # fmt: skip
    given, bus = settings(min_workers=workers, pacing=pacing, **config), Bus()
    if events is not None:
        bus.subscribe(events.append, prompt=prompt)
    async with Coordinator(made, run_dir=run_dir, config=given, bus=bus) as coordinator:
        running = [
            asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
            for _ in range(workers)
        ]
        try:
            return await coordinator.wait()
        finally:
            await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
def steps_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short they are, and however long: the coordinator takes a worker's place beside others."""
    monkeypatch.setattr(Pacing, "takes_whole", lambda *_: False)
    monkeypatch.setattr(training, "_MOST_SHARED_S", math.inf)


def own_share(result: RunResult) -> WorkerShare | None:
    return next((share for share in result.shares if share.name == "coordinator"), None)


def short(make: Callable[[], Job], **changes: Any) -> Job:
    return replace(make(), max_steps=STEPS, epochs=None, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [jobs.mlp_adamw, jobs.cnn_sgd, jobs.odd, jobs.accumulated, jobs.fp16, jobs.words, jobs.metrics, jobs.noisy]
)
async def test_the_bits_are_those_of_one_process(make: Callable[[], Job]) -> None:
    """Frozen and unused parameters, buffers, other dtypes, a loss scale, batches that are collated, metrics."""
    result = await trained(short(make))
    share = own_share(result)
    assert share is not None
    assert share.leaves > sum(one.leaves for one in result.shares) / 3
    assert result.step == STEPS
    assert result.digest == named_digest(reference.train(short(make), STEPS)[0])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were made in each turn of the event loop that made some."""
    made: list[int] = []
    several = SyncTraining._make_several

    async def count(self: SyncTraining, here: InPlace) -> bool:
        before = self.version
        took = await several(self, here)
        assert not self.context.bus._pending  # whoever is told of steps later is told of them now
        if self.version > before:
            made.append(self.version - before)
            assert here._engine is not None
            assert not here._engine._transfer.host_pool.num_out  # what it was summed in is free again
        return took

    monkeypatch.setattr(SyncTraining, "_make_several", count)
    monkeypatch.setattr(training, "_TURN_S", 60.0)  # however long they take
    monkeypatch.setattr(aggregator, "_INLINE_UPDATE_S", 60.0)
    return made


def like_a_plain_loop(made: Job, result: RunResult, events: list[Event]) -> None:
    """To the bit, and each step was told of once, with its own numbers."""
    model, losses = reference.train(made, STEPS)
    assert result.digest == named_digest(model)
    told = [event for event in events if isinstance(event, StepCommitted)]
    assert [event.step for event in told] == list(range(1, STEPS + 1))
    assert [event.loss for event in told] == pytest.approx(losses, rel=1e-5)
    assert sum(share.samples for share in result.shares) == sum(event.samples for event in told)


@pytest.mark.parametrize(
    "make",
    [jobs.mlp_adamw, jobs.odd, jobs.fp16, jobs.metrics,
     *(pytest.param(make, marks=pytest.mark.slow) for make in (jobs.cnn_sgd, jobs.accumulated))],
)  # fmt: skip
@pytest.mark.parametrize("prompt", [True, False], ids=["each is told of", "all are told of"])
async def test_steps_in_a_row_are_each_what_it_is_by_itself(
    make: Callable[[], Job], prompt: bool, rows: list[int]
) -> None:
    events: list[Event] = []
    made = short(make)
    like_a_plain_loop(made, await trained(made, events=events, prompt=prompt), events)
    assert max(rows) > 8
    waited = [
        event.phases_s["data"] for event in events if isinstance(event, StepCommitted) and "data" in event.phases_s
    ]
    assert waited != sorted(waited)  # each step's own


class Draws(nn.Module):
    """From sources of the process, in every step or in some."""

    def __init__(self, sources: str, seldom: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.sources, self.seldom = sources, seldom

    def forward(self, images: Tensor) -> Tensor:
        noise = 0.0
        if not self.seldom or float(images.sum()) % 1.0 < 0.2:
            noise += float(torch.rand(())) if "torch" in self.sources else 0.0
            noise += random.random() + random.gauss(0, 1) if "python" in self.sources else 0.0
            noise += np.random.rand() + np.random.randn() if "numpy" in self.sources else 0.0
        out: Tensor = self.inner(images + 0.1 * noise)
        return out


@pytest.mark.parametrize("seldom", [False, True])
@pytest.mark.parametrize("sources", ["torch", "python", "numpy", "torch python numpy"])
async def test_what_steps_in_a_row_draw_is_theirs_and_nobody_elses(sources: str, seldom: bool, rows: list[int]) -> None:
    """Numbers that the rest of the program draws between them are those that it would draw without them."""
    made = short(jobs.mlp_adamw, model=lambda: Draws(sources, seldom))
    events: list[Event] = []
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    result = await trained(made, events=events, prompt=False)
    assert random.getstate() == before[0]
    assert all(np.array_equal(now, was) for now, was in zip(np.random.get_state()[1:3], before[1][1:3], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])
    like_a_plain_loop(made, result, events)
    assert max(rows) > 8


async def test_who_is_told_of_each_step_in_a_row_draws_other_numbers_each_time(rows: list[int]) -> None:
    drawn: list[tuple[float, ...]] = []
    events = Heard(lambda event: drawn.append((random.random(), float(torch.rand(())), np.random.rand())))
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    await trained(short(jobs.mlp_adamw), events=events)
    assert max(rows) > 8
    assert len(drawn) == STEPS
    for source in zip(*drawn, strict=True):
        assert len(set(source)) == STEPS


class Heard(list[Event]):
    """Events, of which each step is given to ``see``, too."""

    def __init__(self, see: Callable[[StepCommitted], object]) -> None:
        super().__init__()
        self.see = see

    def append(self, event: Event) -> None:
        super().append(event)
        if isinstance(event, StepCommitted):
            self.see(event)


async def test_steps_in_a_row_are_told_of_in_the_order_of_all_that_happens(rows: list[int]) -> None:
    """Whatever else is told meanwhile comes after the steps before it."""
    events: list[Event] = []
    made = short(jobs.mlp_adamw, evaluate=lambda model: {"one": 1.0}, evaluate_every=11)
    await trained(made, events=events, prompt=False)
    at = 0
    for event in events:
        if isinstance(event, StepCommitted):
            assert event.step == at + 1
            at = event.step
        elif isinstance(event, Evaluated):
            assert event.step <= at
    assert at == STEPS
    assert max(rows) > 8


@pytest.mark.parametrize("workers", [1, 2])
async def test_steps_in_a_row_may_write_into_their_batch(workers: int, rows: list[int]) -> None:
    """Which is read anew in the next epoch, and by whoever else computes the step."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        assert not batch[0].requires_grad
        features = batch[0].mul_(1.5).sub_(batch[0].mean())
        return nn.functional.cross_entropy(model(features.requires_grad_()), batch[1])

    events: list[Event] = []
    made = short(jobs.mlp_adamw, loss=None, step=step, shuffle=False)  # the same rows come together again
    assert made.batch_size * STEPS > 2 * len(made.dataset)
    like_a_plain_loop(made, await trained(made, workers=workers, events=events), events)
    assert max(rows) > 8


async def test_a_row_of_steps_ends_where_an_evaluation_begins(rows: list[int]) -> None:
    """Which sees the parameters of its step."""

    def size(model: nn.Module) -> dict[str, float]:
        return {"size": sum(float(parameter.detach().double().sum()) for parameter in model.parameters())}

    events: list[Event] = []
    made = short(jobs.mlp_adamw, evaluate=size, evaluate_every=7, stop_when=lambda evaluations: False)
    result = await trained(made, events=events)
    like_a_plain_loop(made, result, events)
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert len(evaluated) >= STEPS // 7
    sizes = dict[int, dict[str, float]]()
    reference.train(made, STEPS, after=lambda step, model: sizes.update({step: size(model)}))
    assert [event.metrics for event in evaluated] == [sizes[event.step] for event in evaluated]
    assert 1 < max(rows) <= 7


async def test_a_row_of_steps_ends_where_the_run_is_stopped(rows: list[int], tmp_path: Path) -> None:
    made, seen = short(jobs.mlp_adamw), Commits()
    async with Coordinator(made, run_dir=tmp_path, config=settings(pacing=SHORT), bus=seen.bus) as coordinator:
        seen.bus.subscribe(lambda event: coordinator.request_stop() if getattr(event, "step", 0) == 47 else None)
        worker = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        assert (await coordinator.wait()).step == 47
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    assert max(rows) > 8
    assert (await trained(made, run_dir=tmp_path)).digest == named_digest(reference.train(made, STEPS)[0])


async def test_a_row_of_steps_ends_where_a_checkpoint_is_copied(
    rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the parameters' thread, which may come to it late."""
    submit = ParameterOwner.submit

    def late(self: ParameterOwner, call: Callable[[], Any]) -> asyncio.Future[Any]:
        turned = threading.Event()
        asyncio.get_running_loop().call_soon(turned.set)
        return submit(self, lambda: (turned.wait(), call())[1])

    several, on_commit, saving = SyncTraining._make_several, Checkpointing.on_commit, set[Checkpointing]()

    def note(self: Checkpointing, commit: Any, tasks: asyncio.TaskGroup) -> None:
        saving.add(self)
        on_commit(self, commit, tasks)

    async def when_saved(self: SyncTraining, here: InPlace) -> bool:
        for one in saving:  # however slow the disk is: none is copied while another is written
            await one.settle()
        return await several(self, here)

    monkeypatch.setattr(Checkpointing, "on_commit", note)
    monkeypatch.setattr(SyncTraining, "_make_several", when_saved)
    monkeypatch.setattr(ParameterOwner, "submit", late)
    made = short(jobs.mlp_adamw)
    await trained(made, run_dir=tmp_path, checkpoint_every=7, keep_checkpoints=STEPS)

    def saved() -> dict[int, dict[str, Tensor]]:
        store = CheckpointStore(tmp_path / "checkpoints")
        records = [store.load(path) for path in (tmp_path / "checkpoints").glob("step-*")]
        return {record.step: record.groups["model"] for record in records}

    states = await asyncio.to_thread(saved)
    seen = set[int]()

    def compare(step: int, model: nn.Module) -> None:
        if step in states:
            seen.add(step)
            assert all(torch.equal(states[step][name], value) for name, value in model.state_dict().items()), step

    reference.train(made, STEPS, after=compare)
    assert len(seen) == len(states) > 3
    assert max(rows) > 1


async def test_a_row_of_steps_ends_where_they_are_slower_here(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    took, here = InPlace.took, 0

    def slower(self: InPlace, *given: Any) -> None:
        nonlocal here
        here += self._computed
        took(self, *given)
        if self._computed is False and here == 11:
            self._by, self._settles = None, 1000

    monkeypatch.setattr(InPlace, "took", slower)
    events: list[Event] = []
    made = short(jobs.mlp_adamw)
    like_a_plain_loop(made, await trained(made, events=events), events)
    assert here == 11
    assert rows


async def test_a_row_of_steps_ends_before_one_that_somebody_has_begun(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leases may have been given ahead."""
    for_here, make, made_here, begun = SyncTraining._for_here, SyncTraining._make_here, list[int](), list[int]()

    def note(self: SyncTraining, here: InPlace, plan: StepPlan) -> Any:
        version = self.version
        applied = make(self, here, plan)
        made_here.extend(range(version, self.version))
        if applied is not None and not begun and self.version in self.ledger.open_steps:
            begun.append(self.version)
        return applied

    monkeypatch.setattr(SyncTraining, "_make_here", note)
    monkeypatch.setattr(
        SyncTraining, "_for_here", property(lambda self: None if self.version in begun else for_here.fget(self))
    )
    events: list[Event] = []
    made = short(jobs.mlp_adamw)
    like_a_plain_loop(made, await trained(made, events=events), events)
    assert begun[0] - 1 in made_here
    assert begun[0] not in made_here
    assert begun[0] + 1 in made_here


async def test_steps_whose_update_may_draw_are_made_one_by_one(rows: list[int]) -> None:
    """Each waits for whoever has the random state."""
    made = short(jobs.noisy)
    result = await trained(made)
    assert own_share(result) is not None
    assert result.digest == named_digest(reference.train(made, STEPS)[0])
    assert not rows


class FailsOnce(torch.optim.SGD):
    left = 47

    def step(self, closure: Any = None) -> Any:
        FailsOnce.left -= 1
        if not FailsOnce.left:
            raise RuntimeError("the update broke")
        return super().step(closure)


@pytest.mark.parametrize("prompt", [True, False])
async def test_an_update_that_fails_in_a_row_of_steps_names_its_own(prompt: bool, rows: list[int]) -> None:
    FailsOnce.left, events = 47, list[Event]()
    made = short(jobs.mlp_sgd, optimizer=lambda model: FailsOnce(model.parameters(), lr=0.1))
    with pytest.raises(UpdateFailed, match="the update broke") as raised:
        await trained(replace(made, max_steps=500), events=events, prompt=prompt)
    assert raised.value.step == 46
    assert max(event.step for event in events if isinstance(event, StepCommitted)) == 46


@pytest.mark.parametrize("gives_up", [False, True], ids=["tries again", "for good"])
async def test_workers_go_on_where_a_row_of_steps_ends(
    gives_up: bool, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the parameters of its last step, of which they have been told nothing."""
    compute, calls = InPlace._compute_alone, 0

    def fails(self: InPlace, plan: StepPlan, *given: Any) -> Any:
        nonlocal calls
        calls += self._by is not None
        if self._by is not None and calls % 11 == 0:
            self._over = self._over or gives_up
            if not gives_up:
                self._by, self._settles = None, 3  # as where steps are slower here
            return None
        return compute(self, plan, *given)

    monkeypatch.setattr(InPlace, "_compute_alone", fails)
    monkeypatch.setattr(in_place, "_PROOFS", 1)
    events: list[Event] = []
    made = short(jobs.mlp_adamw)
    result = await trained(made, events=events, workers=2)
    like_a_plain_loop(made, result, events)
    assert 0 < sum(rows) <= 10 if gives_up else sum(rows) > 10


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples of the digits one by one, read by Python. ``noise``: drawn for some of them."""

    def __init__(self, noise: float = 0.0) -> None:
        self.x, self.y = jobs.digits()
        self.noise, self.read = noise, 0

    def __len__(self) -> int:
        return 203  # the last step of an epoch is shorter

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        x = self.x[index]
        return (x + self.noise * torch.rand(()) if self.noise and index % 5 == 0 else x), self.y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.rows = Rows()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


@pytest.mark.parametrize("flips", [False, True], ids=["turns", "both ways"])
@pytest.mark.parametrize(
    "make", [Rows, pytest.param(lambda: Rows(0.5), marks=pytest.mark.slow), Stream], ids=["rows", "noisy", "stream"]
)
async def test_reading_takes_turns_with_steps_and_changes_no_bit(
    make: Callable[[], Any], flips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a resume, after which what had been read ahead is read again, and nothing beyond the run's end."""
    turns = 0
    read_in_turn = Loader._read_in_turn

    def count(self: Loader) -> None:
        nonlocal turns
        turns += 1
        read_in_turn(self)

    monkeypatch.setattr(Loader, "_read_in_turn", count)
    monkeypatch.setattr(in_place, "_VARIED", 4)
    monkeypatch.setattr(in_place, "_SETTLED", 4)
    monkeypatch.setattr(in_place._Ways, "took", lambda self, seconds: self.__dict__.update(way=not self.way) or True)
    if not flips:
        monkeypatch.setattr(in_place._Ways, "took", lambda self, seconds: False)
    made = replace(jobs.mlp_sgd(), dataset=make(), max_steps=STEPS // 2, epochs=None)
    if isinstance(made.dataset, Stream):
        made = replace(made, shuffle_buffer=32)
    half = await trained(made, run_dir=tmp_path)
    assert half.step == STEPS // 2
    rows = made.dataset if isinstance(made.dataset, Rows) else made.dataset.rows
    samples = sum(share.samples for share in half.shares)
    beyond = 0 if rows is made.dataset else 2 * 64  # a stream is read in windows, its first samples twice
    assert rows.read <= samples + beyond + 16
    made = replace(made, max_steps=STEPS)
    whole = await trained(made, run_dir=tmp_path)
    assert turns > 4
    assert own_share(whole) is not None
    assert whole.digest == named_digest(reference.train(made, STEPS)[0])


class Slowly(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.0005)
        return super().__getitem__(index)


async def phases_here(made: Job, workers: int) -> list[dict[str, float]]:
    """Of the steps in which the coordinator has computed."""
    events: list[Event] = []
    await trained(made, workers=workers, events=events)
    steps = [event for event in events if isinstance(event, StepCommitted)]
    for event in steps:
        assert min(event.phases_s.values()) >= 0
        assert sum(event.phases_s.values()) <= event.seconds + 0.05
    return [dict(event.phases_s) for event in steps if "compute" in event.phases_s]


async def test_what_a_step_waits_for_is_told_where_it_is_computed_here() -> None:
    """Data, which is read at half a millisecond a sample, and computing: neither is waiting for results."""
    here = await phases_here(replace(jobs.mlp_sgd(), dataset=Slowly(), max_steps=STEPS, epochs=None), workers=1)
    assert len(here) > STEPS / 3
    assert all(phases["compute"] > 0 for phases in here)
    assert sum(phases["data"] for phases in here) > sum(phases["wait"] for phases in here)


async def test_what_is_computed_beside_others_is_told_too(steps_are_shared_out: None) -> None:
    here = await phases_here(short(jobs.mlp_sgd), workers=2)
    assert len(here) > STEPS / 6
    assert all(phases["compute"] > 0 for phases in here)


@pytest.mark.parametrize(("pacing", "released"), [(SHORT, True), (PacingConfig(), False)])
async def test_the_thread_of_updates_keeps_no_helpers_where_leaves_are_computed_too(
    pacing: PacingConfig, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose update is too long for the event loop, and whose leaves are not."""
    calls: list[str] = []
    monkeypatch.setattr(aggregator, "release_helpers", lambda: calls.append(threading.current_thread().name))
    x = torch.rand(64, 1100, generator=torch.Generator().manual_seed(0))
    made = Job(
        model=lambda: nn.Linear(1100, 1000), dataset=TensorDataset(x, x[:, :1000]), loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batch_size=32, max_steps=4,
    )  # fmt: skip
    await trained(made, pacing=pacing)
    assert len(calls) == 4 * released
    assert all(name.startswith("w5xde-aggregate") for name in calls)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        self.steps += 1
        out: Tensor = self.inner(images)
        return out


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pacing", [SHORT, PacingConfig(short_steps="workers")], ids=["here", "workers"])
async def test_a_mode_that_a_step_switches_once_lasts_until_its_end(pacing: PacingConfig, workers: int) -> None:
    """Whoever computes it and what follows; what is switched in every step stays so."""

    def once(model: Any, batch: Any) -> Tensor:
        if int(model.steps) == 30:
            model.eval()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def every(model: Any, batch: Any) -> Tensor:
        model.train(int(model.steps) != 30)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    made = short(jobs.mlp_adamw, model=Drops, loss=None, step=once)
    events: list[Event] = []
    result = await trained(made, workers=workers, pacing=pacing, events=events)
    model, _ = reference.train(replace(made, step=every), STEPS)
    assert result.digest == named_digest(model)
    assert result.digest != named_digest(reference.train(made, STEPS)[0])
    assert not any(isinstance(event, WorkerQuarantined) for event in events)


async def test_with_two_workers_that_take_turns() -> None:
    result = await trained(short(jobs.mlp_sgd), workers=2)
    assert own_share(result) is not None
    assert result.digest == named_digest(reference.train(short(jobs.mlp_sgd), STEPS)[0])


@pytest.mark.parametrize("norm_gate", [0.0, 6.0])
async def test_whatever_is_verified(norm_gate: float) -> None:
    result = await trained(short(jobs.mlp_sgd), norm_gate=norm_gate)
    assert own_share(result) is not None
    assert result.digest == named_digest(reference.train(short(jobs.mlp_sgd), STEPS)[0])


@pytest.mark.parametrize(
    ("pacing", "config"),
    [
        (replace(SHORT, short_steps="workers"), {}),
        (replace(SHORT, whole_step_s=0.0), {}),  # no step is short
        (SHORT, {"target_batch": 512}),  # no lease spans both halves of a step
    ],
)
async def test_workers_compute_where_that_is_asked_for(pacing: PacingConfig, config: dict[str, Any]) -> None:
    assert own_share(await trained(short(jobs.mlp_sgd, batch_size=192), pacing=pacing, **config)) is None


@pytest.mark.slow
async def test_the_steps_of_a_resumed_run_and_of_a_journal(tmp_path: Path) -> None:
    whole = await trained(short(jobs.mlp_adamw), run_dir=tmp_path / "whole")
    first = await trained(replace(short(jobs.mlp_adamw), max_steps=40), run_dir=tmp_path / "parts")
    second = await trained(short(jobs.mlp_adamw), run_dir=tmp_path / "parts")
    journal = await trained(short(jobs.mlp_adamw), run_dir=tmp_path / "journal", durability="journal")
    assert all(own_share(one) for one in (whole, first, journal))
    assert second.digest == whole.digest == journal.digest


async def test_workers_that_go_and_come_back() -> None:
    """While none is there the run waits, as it does under any other pace."""
    made, seen = short(jobs.mlp_sgd, step=None), Commits()
    async with Coordinator(made, config=settings(pacing=SHORT), bus=seen.bus) as coordinator:
        first = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        await seen.reach(30)
        second = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        result = await coordinator.wait()
        assert await second is Departure.FINISHED
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.slow
async def test_who_comes_beside_a_lone_worker_has_a_part_of_steps_that_were_computed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were so because nobody was there to share them."""
    monkeypatch.setattr(Pacing, "whole_step_s", lambda self, *_: 5.0 if len(self._workers) == 1 else 0.0)
    monkeypatch.setattr(training, "_MOST_SHARED_S", math.inf)
    made, seen = replace(short(jobs.mlp_sgd, batch_size=32, microbatch_size=4), max_steps=200), Commits()
    async with Coordinator(made, config=settings(pacing=SHORT), bus=seen.bus) as coordinator:
        named = [replace(QUICK_WORKER, name=f"worker {number}") for number in range(2)]
        first, second = [Worker(coordinator.address, job=made, config=config) for config in named]
        running = [asyncio.create_task(first.run())]
        await seen.reach(40)
        assert coordinator._training is not None
        assert coordinator._training.computes_here
        running.append(asyncio.create_task(second.run()))
        result = await coordinator.wait()
        await asyncio.gather(*running)
    by = {share.name: share.leaves for share in result.shares}
    assert by["worker 1"] > 0
    assert by["coordinator"] > 0
    assert result.digest == named_digest(reference.train(made, 200)[0])


class Fails(nn.Linear):
    """From one call on, in whichever process."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Fails.calls += self.training
        if Fails.calls > 80:
            raise RuntimeError("it broke here")
        return super().forward(x)


async def test_a_step_that_fails_is_told_of_as_a_worker_tells_it() -> None:
    Fails.calls = 0
    made = short(jobs.mlp_sgd, model=lambda: nn.Sequential(nn.Flatten(), Fails(64, 10)), microbatch_size=None)
    with pytest.raises(LeafFailed, match="it broke here"):
        await trained(replace(made, max_steps=500))


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_what_the_coordinator_lacks_memory_for_has_no_other_bits(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halved microbatches have, of batch norm and dropout: a worker computes it."""
    if beside:
        monkeypatch.setattr(Pacing, "takes_whole", lambda *_: False)
        monkeypatch.setattr(training, "_MOST_SHARED_S", math.inf)
    alone, calls, here = InPlace._compute_alone, 0, False

    def compute(self: InPlace, *args: Any) -> Any:
        nonlocal calls, here
        calls, here = calls + 1, True
        try:
            return alone(self, *args)
        finally:
            here = False

    monkeypatch.setattr(InPlace, "_compute_alone", compute)
    given, lacked = short(jobs.cnn_sgd, batch_size=32, microbatch_size=4), False
    loss = given.loss

    def step(model: nn.Module, batch: Any) -> Any:
        nonlocal lacked
        if here and calls == 12 and not lacked:
            lacked = True
            raise MemoryError
        assert loss is not None
        return loss(model(batch[0]), batch[1])

    made, events = replace(given, loss=None, step=step), list[Event]()
    result = await trained(made, workers=1 + beside, events=events)
    assert lacked
    assert result.digest == named_digest(reference.train(given, STEPS)[0])
    said = [event.text for event in events if isinstance(event, Warned)]
    assert any("MemoryError: it lacks memory for a whole microbatch" in text for text in said)


async def test_other_bits_here_than_a_workers_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = InPlace.prove

    def other(self: InPlace, plan: StepPlan, pieces: list[Tensor]) -> None:
        prove(self, plan, [piece + 1 for piece in pieces])

    monkeypatch.setattr(InPlace, "prove", other)
    result = await trained(short(jobs.mlp_sgd))
    assert own_share(result) is None
    assert result.digest == named_digest(reference.train(short(jobs.mlp_sgd), STEPS)[0])


# -- in a worker's place, beside others


@pytest.mark.slow
@pytest.mark.usefixtures("steps_are_shared_out")
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "make", [jobs.mlp_adamw, jobs.cnn_sgd, jobs.odd, jobs.accumulated, jobs.fp16, jobs.words, jobs.metrics]
)
async def test_beside_others_the_bits_are_those_of_one_process(make: Callable[[], Job], workers: int) -> None:
    made = short(make, batch_size=32, microbatch_size=4)
    result = await trained(made, workers=workers)
    share = own_share(result)
    assert share is not None
    others = sum(one.leaves for one in result.shares) - share.leaves
    assert 0 < share.leaves < others + share.leaves
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.usefixtures("steps_are_shared_out")
@pytest.mark.parametrize(("leaf_s", "here"), [(0.007, True), (0.009, False)])
async def test_leaves_of_less_than_8_ms_are_computed_here_beside_others(
    leaf_s: float, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An LSTM's of 5 ms: 1.2 to 1.3 times the samples a second of two workers that compute both."""
    consider = SyncTraining._consider

    def takes(self: SyncTraining, finished: FinishedBlock) -> None:
        done = structs.replace(finished.done, compute_s=leaf_s * finished.grant.block.num_leaves)
        consider(self, replace(finished, done=done))

    monkeypatch.setattr(SyncTraining, "_consider", takes)
    made = short(jobs.mlp_sgd, batch_size=32, microbatch_size=4)
    result = await trained(made, workers=2, pacing=PacingConfig(short_steps="here"))
    assert (own_share(result) is not None) == here
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("steps_are_shared_out")
async def test_a_step_of_much_work_is_left_to_workers_however_short_its_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_MOST_SHARED_S", 0.0)
    made = short(jobs.mlp_sgd, batch_size=32, microbatch_size=4)
    result = await trained(made, workers=2)
    assert own_share(result) is None
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("steps_are_shared_out")
@pytest.mark.parametrize(
    "config",
    [{"norm_gate": 0.0}, {"norm_gate": 6.0}, {"audit_fraction": 1.0}, {"norm_gate": 0.0, "audit_fraction": 0.0}],
)
async def test_beside_others_whatever_is_verified(config: dict[str, Any]) -> None:
    made = short(jobs.mlp_sgd, batch_size=32, microbatch_size=4)
    result = await trained(made, workers=2, **config)
    assert own_share(result) is not None
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("steps_are_shared_out")
async def test_beside_others_over_resumes_and_with_a_journal(tmp_path: Path) -> None:
    made = short(jobs.mlp_adamw, batch_size=32, microbatch_size=4)
    first = await trained(replace(made, max_steps=40), workers=2, run_dir=tmp_path / "parts")
    second = await trained(made, workers=2, run_dir=tmp_path / "parts")
    journal = await trained(made, workers=2, run_dir=tmp_path / "journal", durability="journal")
    assert all(own_share(one) for one in (first, journal))
    assert second.digest == journal.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("steps_are_shared_out")
@pytest.mark.parametrize("how", ["vanishes", "drains"])
@pytest.mark.parametrize("which", [0, 1])
async def test_the_bits_stay_whoever_of_two_goes(how: str, which: int) -> None:
    """The one whose place is taken, or the one beside it."""
    made, seen = short(jobs.mlp_sgd, batch_size=32, microbatch_size=4), Commits()
    async with Coordinator(made, config=settings(pacing=SHORT, min_workers=2), bus=seen.bus) as coordinator:
        named = [replace(QUICK_WORKER, name=f"worker {number}") for number in range(2)]
        workers = [Worker(coordinator.address, job=made, config=config) for config in named]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        await seen.reach(30)
        training: Any = coordinator._training
        assert isinstance(training, SyncTraining)
        assert training._stood_for is not None
        name = training._stood_for.name
        chosen = next(n for n, worker in enumerate(workers) if (worker.name == name) == (which == 0))
        if how == "vanishes":
            running[chosen].cancel()
        else:
            workers[chosen].drain("it is asked to")
            assert await running[chosen] is Departure.DRAINED
        result = await coordinator.wait()
        await asyncio.gather(*running, return_exceptions=True)
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("steps_are_shared_out")
async def test_what_a_worker_beside_it_hangs_with_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, released, blocks = InPlaceExecutor.compute, threading.Event(), 0

    def hang(self: InPlaceExecutor, held: HeldLease, send: Send) -> Computed:
        nonlocal blocks
        blocks += 1
        if blocks > 120:  # by then the other one's are computed here
            released.wait(30)
        return compute(self, held, send)

    monkeypatch.setattr(InPlaceExecutor, "compute", hang)
    made, seen = short(jobs.mlp_sgd, batch_size=32, microbatch_size=4), Commits()
    async with Coordinator(made, config=settings(pacing=SHORT, min_workers=2), bus=seen.bus) as coordinator:
        workers = [Worker(coordinator.address, job=made, config=QUICK_WORKER) for _ in range(2)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        await seen.reach(STEPS - 1)
        released.set()
        result = await coordinator.wait()
        await asyncio.gather(*running, return_exceptions=True)
    assert blocks > 120
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("steps_are_shared_out")
async def test_a_backup_that_comes_too_late_here_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker beside it was slow, and is done before the coordinator begins."""
    compute, has_lease, blocks, kept = InPlaceExecutor.compute, SyncTraining._has_lease_here, 0, threading.Event()

    def slow(self: InPlaceExecutor, held: HeldLease, send: Send) -> Computed:
        nonlocal blocks
        blocks += 1
        if blocks > 120:
            kept.wait(20)  # until the coordinator has its backup
        return compute(self, held, send)

    def hold_backups(self: SyncTraining) -> bool:
        grants = [grant for grant in map(self.ledger.get, self._for_us) if grant is not None]
        backups = [grant for grant in grants if self.ledger._slot(grant).backup == grant.lease]
        if backups:
            kept.set()
        return has_lease(self) and not backups

    monkeypatch.setattr(InPlaceExecutor, "compute", slow)
    monkeypatch.setattr(SyncTraining, "_has_lease_here", hold_backups)
    made = short(jobs.mlp_sgd, batch_size=32, microbatch_size=4)
    result = await trained(made, workers=2)
    assert kept.is_set()
    assert own_share(result) is not None
    assert result.digest == named_digest(reference.train(made, STEPS)[0])


@pytest.mark.usefixtures("steps_are_shared_out")
async def test_beside_others_a_leaf_that_fails_is_told_of_as_a_worker_tells_it() -> None:
    Fails.calls = 0
    made = short(
        jobs.mlp_sgd, model=lambda: nn.Sequential(nn.Flatten(), Fails(64, 10)), batch_size=32, microbatch_size=4
    )
    with pytest.raises(LeafFailed, match="it broke here"):
        await trained(replace(made, max_steps=2000), workers=2)


@pytest.mark.usefixtures("steps_are_shared_out")
async def test_beside_others_other_bits_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = InPlace.watch_part
    monkeypatch.setattr(
        InPlace, "watch_part",
        lambda self, session, done, plan, block, pieces: watch(
            self, session, done, plan, block, [piece + 1 for piece in pieces]
        ),
    )  # fmt: skip
    made = short(jobs.mlp_sgd, batch_size=32, microbatch_size=4)
    result = await trained(made, workers=2)
    assert own_share(result) is None
    assert result.digest == named_digest(reference.train(made, STEPS)[0])
