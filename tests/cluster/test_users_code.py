"""Code of the user's that raises what would end a thread, a task or the program: it fails, and nothing else does."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from w5xde_async.compute.program.tracing import NotTraceable, trace_job
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.training import NonFinite, ParametersNotFinite
from w5xde_async.errors import ExitCode, JobError, LeafFailed, UpdateFailed, W5xdeError
from w5xde_async.job import Job, build_model
from w5xde_async.params.layout import Layout
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Bus, Event, RunFinished, Warned
from w5xde_async.telemetry.wording import plain, summary
from w5xde_async.updates.config import RULES, UpdateConfig
from w5xde_async.updates.sync import SyncRule
from w5xde_async.worker.service import RunFailed, Worker

ESCAPES = [SystemExit(3), GeneratorExit(), asyncio.CancelledError("by hand"), KeyboardInterrupt(), StopIteration()]
SOME = [SystemExit(3), asyncio.CancelledError()]
escaping = pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: type(escape).__name__)


def raising(error: BaseException) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


async def failing(job: Job, *, joins: bool = True, **kwargs: Any) -> W5xdeError:
    """What the run of ``job`` fails with; its worker is told, unless it fails before one ``joins``."""
    async with Coordinator(job, config=settings(code_free=False, max_time_s=40.0, **kwargs)) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        with pytest.raises(W5xdeError) as failed:
            await asyncio.wait_for(coordinator.wait(), 50)
        if joins:
            with pytest.raises(RunFailed):
                await asyncio.wait_for(worker, 50)
        else:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
    return failed.value


@escaping
async def test_an_evaluation_that_raises_is_reported_and_the_run_goes_on(escape: BaseException):
    events: list[Event] = []
    result = await train(lambda: replace(jobs.metrics(), max_steps=2, evaluate=raising(escape)), events=events)
    assert (result.outcome, result.step) == ("finished", 2)
    (told,) = {event.text for event in events if isinstance(event, Warned)}
    assert told.startswith("evaluate raised ")
    assert type(escape).__name__ in told


@escaping
async def test_a_step_that_raises_is_a_failed_leaf(escape: BaseException):
    failed = await failing(replace(jobs.metrics(), step=raising(escape)))
    assert isinstance(failed, LeafFailed)
    assert (failed.step, failed.leaf, len(failed.indices)) == (0, 0, 7)
    assert type(escape).__name__ in str(failed).splitlines()[0]
    assert "test_users_code" in failed.traceback


class Escaping(Dataset[Any]):
    """Raises in the last of ten steps: the first are read before any worker has joined."""

    def __init__(self, escape: BaseException) -> None:
        self.escape = escape

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> Any:
        if index == 636:
            raise self.escape
        return torch.zeros(10), torch.tensor(0)


@escaping
@pytest.mark.parametrize("where", ["dataset", "collate"])
async def test_a_dataset_or_collate_that_raises_is_a_failed_leaf(escape: BaseException, where: str):
    job = replace(
        jobs.metrics(),
        dataset=Escaping(escape),
        batch_size=64,
        microbatch_size=8,
        shuffle=False,
        max_steps=10,
        epochs=None,
    )
    if where == "collate":
        job = replace(jobs.metrics(), collate=raising(escape))
    failed = await failing(job, joins=where == "dataset", prefetch_leaves=8)
    assert isinstance(failed, LeafFailed)
    assert type(escape).__name__ in str(failed).splitlines()[0]
    assert failed.leaf == (7 if where == "dataset" else 0)


@pytest.mark.parametrize("escape", SOME, ids=["exit", "cancelled"])
@pytest.mark.parametrize(
    ("update", "where"),
    [
        ("sync", "optimizer"),
        ("sync", "scheduler"),
        ("async", "optimizer"),
        ("async", "scheduler"),
        ("local", "scheduler"),
    ],
)
async def test_an_update_that_raises_ends_the_run_with_its_error(escape: BaseException, update: str, where: str):
    class Stepping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if where == "optimizer" and self.param_groups[0]["params"][0].grad is not None:
                raise escape
            return super().step(closure)

    class Scheduling(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            if where == "scheduler" and getattr(self, "last_epoch", -1) >= 0:
                raise escape
            super().step(epoch)

    optimizer = torch.optim.SGD if update == "local" else Stepping  # workers make the optimizers that they know
    job = replace(
        jobs.metrics(), optimizer=lambda model: optimizer(model.parameters(), lr=0.1),
        scheduler=lambda optimizer: Scheduling(optimizer, lambda step: 1.0),
    )  # fmt: skip
    failed = await failing(job, update=UpdateConfig(rule=update))
    assert isinstance(failed, UpdateFailed), failed
    assert type(escape).__name__ in str(failed)


@pytest.mark.parametrize("escape", SOME, ids=["exit", "cancelled"])
async def test_state_that_raises_when_it_is_saved_ends_the_run_with_its_error(escape: BaseException, tmp_path: Any):
    class Keeping(torch.optim.SGD):
        calls = 0

        def state_dict(self) -> Any:
            self.calls += 1
            if self.calls > 1:  # the first time it is seen whether the state can be kept
                raise escape
            return super().state_dict()

    job = replace(jobs.metrics(), optimizer=lambda model: Keeping(model.parameters(), lr=0.1))
    coordinator = Coordinator(job, config=settings(code_free=False, checkpoint_every=1), run_dir=tmp_path / "run")
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        with pytest.raises(JobError, match=f"cannot be kept.*{type(escape).__name__}"):
            await asyncio.wait_for(coordinator.wait(), 50)
        await asyncio.gather(worker, return_exceptions=True)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "it returned NoneType, not a dict of numbers by name"),
        (torch.ones(2), r"it returned a tensor of shape \[2\], not a dict .*; write return \{'accuracy': \.\.\.\}"),
        ({"accuracy": "high"}, "metric 'accuracy' is str; it must be a number"),
        ({"accuracy": torch.ones(2)}, r"metric 'accuracy' is a tensor of shape \[2\]; it must be a number"),
    ],
)
async def test_an_evaluation_that_returns_something_else_is_told_what(returned: Any, says: str):
    events: list[Event] = []
    await train(lambda: replace(jobs.metrics(), max_steps=1, evaluate=lambda _: returned), events=events)
    assert any(re.search(says, event.text) for event in events if isinstance(event, Warned))


@pytest.mark.parametrize("escape", SOME, ids=["exit", "cancelled"])
async def test_a_subscriber_that_raises_is_dropped_and_the_run_goes_on(escape: BaseException):
    bus = Bus()
    bus.subscribe(raising(escape))
    job = replace(jobs.metrics(), max_steps=2)
    async with Coordinator(job, config=settings(), bus=bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=job, config=QUICK_WORKER).run())
        assert (await coordinator.wait()).outcome == "finished"
        await worker


@pytest.mark.parametrize("where", ["samples", "collate"])
async def test_float64_data_is_told_where_to_convert_it(where: str):
    numbers, labels = torch.zeros(64, 10, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    job = replace(jobs.metrics(), dataset=TensorDataset(numbers, labels), microbatch_size=1)
    if where == "collate":
        job = replace(job, dataset=list(zip(numbers, labels, strict=True)), collate=default_collate)
    line = str(await failing(job)).splitlines()[0]
    assert line.startswith("step 0, leaf 0: RuntimeError: ")
    assert "the batch is float64: convert it with .float() in the dataset or in collate (" in line


# -- what makes the run's parts


class Slots:
    """torch would save its ``__dict__``."""

    __slots__ = ()

    def __call__(self, step: int) -> float:
        return 1.0


def _zero() -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": _zero}, r"^job model: the function raised ZeroDivisionError: division by zero \(test_users"),
        ({"model": nn.Linear}, r"^job model: .*TypeError: .*write model=lambda: torch\.nn\.Linear\(\.\.\.\)$"),
        ({"model": raising(SystemExit("no"))}, "^job model: the function raised SystemExit: no"),
        (
            {"optimizer": torch.optim.SGD},
            r"^job optimizer: .*write optimizer=lambda model: torch\.optim\.SGD\(model\.parameters\(\), lr=\.\.\.\)$",
        ),
        ({"optimizer": torch.optim.AdamW}, r"write optimizer=lambda model: torch\.optim\.AdamW\(model\.parameters"),
        ({"optimizer": lambda model: _zero()}, r"^job optimizer: the function raised ZeroDivisionError: [^;]*$"),
        (
            {"optimizer": lambda model: torch.optim.SGD([])},
            r"the function raised ValueError: .* empty parameter l[^;]*$",
        ),
        (
            {"optimizer": lambda model: torch.optim.Muon(model.parameters(), foreach=True)},
            r"the function raised TypeError: .*unexpected keyword argument 'foreach'[^;]*$",
        ),
        ({"optimizer": lambda: None}, r"^job optimizer: .*; write optimizer=lambda model: torch\.optim\.SGD\(model"),
        ({"optimizer": lambda made: torch.optim.Adam(made)}, r"^job optimizer: .*; write optimizer=lambda model: "),
        ({"scheduler": lambda made: _zero()}, r"^job scheduler: the function raised ZeroDivisionError: [^;]*$"),
        ({"scheduler": lambda: None}, r"^job scheduler: .*; write scheduler=lambda optimizer: torch"),
        ({"optimizer": raising(SystemExit(3))}, "^job optimizer: the function raised SystemExit: 3"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            r"write scheduler=lambda optimizer: torch\.optim\.lr_scheduler\.StepLR\(optimizer, \.\.\.\)$",
        ),
        (
            {"scheduler": lambda made: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)},
            "^job scheduler: it schedules another optimizer than the one that its function was given; write scheduler=",
        ),
        (
            {"scheduler": lambda made: torch.optim.lr_scheduler.LambdaLR(made, Slots())},
            "^job optimizer: its state, or its scheduler's, cannot be kept: AttributeError: .*; have state_dict",
        ),
        ({"scheduler": raising(asyncio.CancelledError())}, "^job scheduler: the function raised CancelledError"),
    ],
)
async def test_what_cannot_be_made_is_a_wrong_job_in_one_line(changes: dict[str, Any], says: str):
    coordinator = Coordinator(replace(jobs.metrics(), **changes), config=settings())
    with pytest.raises(JobError, match=says) as failed:
        await coordinator.start()
    assert len(str(failed.value).splitlines()) == 1


class NothingToTrain(nn.Module):
    """All that requires a gradient has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.empty = nn.Linear(8, 4).requires_grad_(False), nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.empty.sum()


@pytest.mark.parametrize("update", RULES)
async def test_a_model_whose_trainable_parameters_have_no_elements_is_refused(update: str):
    made = replace(jobs.mlp_adamw(), model=NothingToTrain)
    with pytest.raises(JobError, match=r"^job model: it has no trainable parameter with elements; set requires_grad"):
        await Coordinator(made, config=settings(update=UpdateConfig(rule=update))).start()


@pytest.mark.parametrize("escape", SOME, ids=["exit", "cancelled"])
@pytest.mark.parametrize("where", ["step", "collate"])
def test_what_cannot_be_traced_says_what_was_raised(where: str, escape: BaseException):
    job = replace(jobs.metrics(), **{where: raising(escape)})
    model = build_model(job)
    with pytest.raises(NotTraceable, match=type(escape).__name__):
        trace_job(job, model, Layout.of(model, bucket_bytes=1 << 20))


def test_a_model_that_raises_in_a_worker_names_the_function():
    def model() -> nn.Module:
        raise SystemExit(4)

    with pytest.raises(JobError, match="SystemExit: 4"):
        build_model(replace(jobs.metrics(), model=model))


# -- runs that learn nothing


@pytest.mark.parametrize("update", ["sync", "async", "local"])
async def test_a_step_that_computes_with_another_model_is_told_once(update: str):
    """And one in which a single parameter gets a gradient is as in a plain loop."""

    def job(alone: bool) -> Job:
        made = jobs.mlp_sgd()
        other = made.model()  # type: ignore[operator]

        def step(model: nn.Module, batch: Any) -> Any:
            loss = nn.functional.cross_entropy(other(batch[0]), batch[1])
            return loss if alone else loss + next(model.parameters()).sum()

        return replace(made, loss=None, step=step, max_steps=3)

    for alone in (True, False):
        events: list[Event] = []
        await train(lambda alone=alone: job(alone), events=events, update=UpdateConfig(rule=update))
        told = [event.text for event in events if isinstance(event, Warned) and "got a gradient" in event.text]
        assert [text[:55] for text in told] == ["no parameter of the model got a gradient in step 1, whi"] * alone


@pytest.mark.parametrize("update", ["sync", "async", "local"])
async def test_a_run_whose_every_step_was_skipped_has_failed(update: str):
    """And one with a good step says how many were skipped."""

    def job(bad: int) -> Job:
        def step(model: nn.Module, batch: Any) -> Any:
            x, y = batch
            return nn.functional.cross_entropy(model(x), y) * (float("nan") if y[0] < bad else 1.0)

        dataset = TensorDataset(torch.ones(24, 10), torch.arange(24) // 8)
        return Job(
            model=lambda: nn.Linear(10, 4), dataset=dataset, step=step, batch_size=8, max_steps=3, shuffle=False,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip

    failed = await failing(job(3), update=UpdateConfig(rule=update))
    assert isinstance(failed, NonFinite)
    assert (failed.step, failed.count, failed.exit_code) == (3, 3, ExitCode.ERROR)
    events: list[Event] = []
    result = await train(lambda: job(2), events=events, update=UpdateConfig(rule=update))
    assert (result.outcome, result.step, result.steps_skipped) == ("finished", 3, 2)
    (ended,) = [event for event in events if isinstance(event, RunFinished)]
    assert "2 skipped" in "\n".join(summary(ended, first_step=0, paint=plain))


# -- optimizers


async def slowly_updated(optimizer: Any, monkeypatch: pytest.MonkeyPatch, *, slow_steps: int = 30) -> list[str]:
    """What is told of a run whose optimizer takes most of the time, by the coordinator's clock, in its first steps."""
    late, steps, step = 0.0, 0, SyncRule._step

    def take_time(rule: SyncRule, *arguments: Any) -> None:
        nonlocal late, steps
        steps += 1
        late += 0.2 if steps <= slow_steps else 0.0
        step(rule, *arguments)

    monkeypatch.setattr(SyncRule, "_step", take_time)
    share = "w5xde_async.coordinator.sync.training._SLOW_UPDATE"
    monkeypatch.setattr(share, 0.4)  # a real one is a tenth to a fifth
    job = replace(jobs.mlp_sgd(), optimizer=lambda model: optimizer(model.parameters()), max_steps=30)
    told: list[str] = []
    bus = Bus()
    bus.subscribe(lambda event: told.append(event.text) if isinstance(event, Warned) else None)
    runtime = Runtime(clock=lambda: time.monotonic() + late)
    async with Coordinator(job, config=settings(), bus=bus, runtime=runtime) as coordinator:
        await asyncio.gather(Worker(coordinator.address, job=job, config=QUICK_WORKER).run(), coordinator.wait())
    return [text for text in told if "optimizer" in text]


async def test_an_optimizer_that_takes_long_is_told_its_faster_form_once(monkeypatch: pytest.MonkeyPatch):
    (told,) = await slowly_updated(lambda parameters: torch.optim.AdamW(parameters), monkeypatch)
    assert re.match(r"the optimizer takes \d\d% of a step: AdamW\(\.\.\., fused=True\) makes", told)


async def test_what_a_few_steps_waited_for_is_not_told_of_the_optimizer(monkeypatch: pytest.MonkeyPatch):
    """Of the twenty that are watched: one in which flat steps are tried, others where the machine did other work."""
    assert await slowly_updated(lambda parameters: torch.optim.AdamW(parameters), monkeypatch, slow_steps=10) == []


class Own(torch.optim.SGD):
    """A subclass may do anything."""


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """It may be the hook that takes long."""
    made = torch.optim.AdamW(parameters)
    made.register_step_post_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, fused=False),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.RMSprop(parameters),
        lambda parameters: Own(parameters, lr=0.1),
        hooked,
    ],
)
async def test_one_that_was_chosen_or_has_no_such_form_is_not(optimizer: Any, monkeypatch: pytest.MonkeyPatch):
    assert await slowly_updated(optimizer, monkeypatch) == []


class Freezes(torch.optim.lr_scheduler.LRScheduler):
    """Sets ``requires_grad`` of a model's first parameter at its third step."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
        self.trains, self.parameter = trains, optimizer.frozen  # type: ignore[attr-defined]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch == 3:
            self.parameter.requires_grad_(self.trains)
        return list(self.base_lrs)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "parameter"}


def frees(made: torch.optim.Optimizer, *, trains: bool) -> Any:
    """The same in a function that one of torch's own schedulers is given."""

    def factor(step: int) -> float:
        if step == 3:
            made.frozen.requires_grad_(trains)  # type: ignore[attr-defined]
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(made, factor)


def freezing(*, trains: bool, scheduler: Any = Freezes) -> Job:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        made[1].weight.requires_grad_(not trains)
        return made

    def optimizer(made: nn.Module) -> torch.optim.Optimizer:
        built = torch.optim.SGD(made.parameters(), lr=0.1)
        built.frozen = made[1].weight  # type: ignore[attr-defined, index]
        return built

    return replace(
        jobs.mlp_sgd(), model=model, optimizer=optimizer, scheduler=lambda made: scheduler(made, trains=trains)
    )


@pytest.mark.parametrize("scheduler", [Freezes, frees])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "unfrozen"])
async def test_what_a_scheduler_freezes_or_unfreezes_ends_the_run_which_could_not_heed_it(trains: bool, scheduler: Any):
    error = await failing(freezing(trains=trains, scheduler=scheduler))
    assert isinstance(error, UpdateFailed)
    assert "parameter '1.weight' was" in str(error)
    assert error.step == 3


async def test_what_a_step_unfreezes_ends_the_run_which_would_not_train_it():
    def step(model: Any, batch: Any) -> Any:
        model[1].weight.requires_grad_(True)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    error = await failing(replace(freezing(trains=True), scheduler=None, step=step, loss=None))
    assert isinstance(error, LeafFailed)
    assert "parameter '1.weight' was frozen when the run began and is to be trained now" in str(error)


@pytest.mark.parametrize("draw", [random.random, lambda: float(torch.rand(()))], ids=["random", "torch"])
async def test_what_a_function_of_torchs_scheduler_draws_is_seeded_from_seed_and_step(draw: Any, tmp_path: Path):
    def job() -> Job:
        return replace(
            jobs.mlp_sgd(), max_steps=6, epochs=None,
            scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5 + draw()),
        )  # fmt: skip

    whole = await train(job, workers=2)
    run = tmp_path / "run"
    await train(job, run_dir=run, max_steps=3)
    assert (await train(job, run_dir=run)).digest == whole.digest != (await train(jobs.mlp_sgd)).digest


def overflowing(at: int, *, steps: int = 12, exploding: bool = True) -> Job:
    """The update of step ``at`` makes parameters infinite."""

    class Overflowing(torch.optim.SGD):
        updates = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.updates += 1
            if self.updates == at and exploding:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].mul_(1e30).mul_(1e30)

    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 10), torch.arange(64) % 4)
    return Job(
        model=lambda: nn.Linear(10, 4), dataset=dataset, loss=nn.functional.cross_entropy, batch_size=8,
        max_steps=steps, optimizer=lambda model: Overflowing(model.parameters(), lr=0.01),
    )  # fmt: skip


@pytest.mark.parametrize("at", [5, 12], ids=["in the middle", "at the end"])
@pytest.mark.parametrize("update", ["sync", "async"])
async def test_a_run_whose_parameters_an_update_made_infinite_has_failed_and_keeps_what_was_before(
    update: str, at: int, tmp_path: Path
) -> None:
    rules = UpdateConfig(rule=update)
    with pytest.raises(ParametersNotFinite, match=r"seen at step \d+; nothing") as caught:
        await train(lambda: overflowing(at), run_dir=tmp_path / "run", update=rules, checkpoint_every=4)
    assert isinstance(caught.value, NonFinite)
    assert caught.value.exit_code == ExitCode.ERROR
    kept = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept[-1] < at  # one that fell due while another was written was made a commit later
    assert update != "sync" or caught.value.step == min(at + 1, 12)
    result = await train(lambda: overflowing(at, exploding=False), run_dir=tmp_path / "run", update=rules)
    assert (result.outcome, result.step) == ("finished", 12)


async def test_what_was_infinite_when_it_began_ends_no_run(tmp_path: Path) -> None:
    def job(lr: float = 0.1) -> Job:
        def model() -> nn.Module:
            made = nn.Linear(10, 4)
            nn.init.constant_(made.bias[:1].detach(), -math.inf)  # a class that is never given
            return made

        dataset = TensorDataset(torch.ones(24, 10), torch.arange(24) // 8 + 1)
        return Job(
            model=model, dataset=dataset, loss=nn.functional.cross_entropy, batch_size=8, max_steps=3,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        )  # fmt: skip

    run = tmp_path / "run"
    assert (await train(job, run_dir=run, max_steps=2)).outcome == "finished"
    events: list[Event] = []
    assert (await train(job, run_dir=run, events=events)).outcome == "finished"
    said = " ".join(event.text for event in events if isinstance(event, Warned))
    assert "parameters are infinite or NaN at step 2 already; --resume PATH begins at an earlier one" in said


async def test_a_layer_that_forward_makes_ends_the_run_by_name() -> None:
    """It would be trained by nobody, and be in no file."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.extra = nn.Linear(10, 10), None

        def forward(self, x: Any) -> Any:
            if self.extra is None:
                self.extra = nn.Linear(10, 4)
            return self.extra(self.first(x))

    dataset = TensorDataset(torch.ones(24, 10), torch.arange(24) // 8)
    job = Job(
        model=Lazy, dataset=dataset, loss=nn.functional.cross_entropy, batch_size=8, microbatch_size=4, epochs=9,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    failed = await failing(job)
    assert isinstance(failed, LeafFailed)
    assert "parameter 'extra.weight' is another one than when the run began" in str(failed)


class _Counting(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.made = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.made += 1


def _clamped() -> nn.Module:
    model = jobs.mlp_sgd().model()
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient.clamp(-1, 1))
    model.get_parameter("0.bias").register_post_accumulate_grad_hook(lambda parameter: None)
    model.get_submodule("2").register_full_backward_hook(lambda module, came, goes: None)
    return model


async def test_what_a_plain_loop_does_otherwise_is_said() -> None:
    """Hooks see sums; what an optimizer keeps in attributes is in no checkpoint."""
    events: list[Event] = []
    made = replace(jobs.mlp_sgd(), max_steps=30, epochs=None)
    await train(lambda: made, events=events)
    assert not [
        event.text
        for event in events
        if isinstance(event, Warned) and ("hook" in event.text or "no checkpoint" in event.text)
    ]
    made = replace(made, model=_clamped, optimizer=lambda model: _Counting(model.parameters()), microbatch_size=4)
    await train(lambda: made, events=events)
    told = [event.text for event in events if isinstance(event, Warned)]
    assert (
        len([text for text in told if "0.weight, 0.bias, 2: its hook sees" in text and "its samples (4)" in text]) == 1
    )
    assert len([text for text in told if "the optimizer changes made with its steps" in text]) == 1


@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize("counts", [True, False])
async def test_a_checkpoint_tells_what_it_has_not_and_so_does_a_resume(
    counts: bool, update: Any, tmp_path: Path
) -> None:
    """However few steps a start has made."""
    optimizer = _Counting if counts else partial(torch.optim.SGD, lr=0.01)
    made = replace(jobs.mlp_sgd(), max_steps=8, epochs=None, optimizer=lambda model: optimizer(model.parameters()))
    for max_steps in (3, 8):
        events: list[Event] = []
        await train(
            lambda: made, run_dir=tmp_path, events=events, max_steps=max_steps, checkpoint_every=1,
            update=UpdateConfig(rule=update),
        )  # fmt: skip
        told = [event.text for event in events if isinstance(event, Warned)]
        assert [text for text in told if "the optimizer changes made with its steps, which" in text][1:] == []
        assert any("the optimizer changes made with its steps, which" in text for text in told) == counts
        begins = "the optimizer changes attributes of its own (made) with its steps: what they keep"
        assert any(begins in text for text in told) == (counts and max_steps == 8)


async def test_a_model_of_which_a_checkpoint_would_lack_something_is_refused_by_name() -> None:
    class Versioned(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    job = replace(jobs.mlp_sgd(), model=lambda: nn.Sequential(Versioned(2, 2)))
    with pytest.raises(JobError, match=r"state_dict\(\) has '0\._extra_state', dict, no tensor, .*keep it in a buffer"):
        await Coordinator(job, config=settings()).start()
