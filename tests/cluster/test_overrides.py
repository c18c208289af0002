"""Settings of optimizer and scheduler that a person changes in the middle of a run."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings
from torch.optim import lr_scheduler

from w5xde_async.coordinator.run.overrides import override, settings_of
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import UpdateFailed, UsageError
from w5xde_async.job import Job, build_model
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Event, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Departure, Worker

Scheduler = Callable[[torch.optim.Optimizer], Any]


def job(scheduler: Scheduler | None = None, *, lr: float = 0.5) -> Job:
    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)

    return replace(jobs.metrics(), optimizer=optimizer, scheduler=scheduler, max_steps=6, epochs=None)


async def run(made: Job, directory: Path, **config: Any) -> tuple[RunResult, str]:
    """The result, and what was said to a person."""
    said: list[Event] = []
    coordinator = Coordinator(made, run_dir=directory, config=settings(**config), callbacks=[said.append])
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        result = await coordinator.wait()
        assert await worker is Departure.FINISHED
    return result, "\n".join(event.text for event in said if isinstance(event, Warned))


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def halved_and_quartered(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step * (1 if step < 2 else 0.25))


def quartered(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step < 2 else 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
@pytest.mark.parametrize(
    ("scheduler", "same_as"), [(None, quartered), (halved, halved_and_quartered)], ids=["constant", "scheduled"]
)
async def test_a_learning_rate_counts_from_where_it_was_changed(
    tmp_path: Path, scheduler: Scheduler | None, same_as: Scheduler, durability: str
) -> None:
    """The same bits as a schedule that has the change in it; kept by later starts, and told by the checkpoint."""
    wanted, _ = await run(job(same_as), tmp_path / "wanted")
    directory = tmp_path / "run"
    await run(job(scheduler), directory, max_steps=2, durability=durability)
    change: dict[str, Any] = {"override": "optimizer.lr=0.125", "durability": durability}
    _, said = await run(job(scheduler), directory, max_steps=4, **change)
    assert "from step 2 on optimizer.lr is 0.125, was 0.5" in said
    _, said = await run(job(scheduler), directory, max_steps=5, **change)  # the same command again changes nothing
    assert "optimizer.lr" not in said  # nor does it advise to give what is given
    result, _ = await run(job(scheduler), directory, durability=durability)
    assert (result.step, result.digest) == (6, wanted.digest)
    record, _ = await asyncio.to_thread(CheckpointStore(directory / "checkpoints").latest)
    assert record is not None
    assert record.meta["overrides"] == [[2, "optimizer.lr is 0.125, was 0.5"]]


@pytest.mark.slow
async def test_a_job_whose_settings_were_changed_is_told_that_the_checkpoint_counts(tmp_path: Path) -> None:
    await run(job(halved), tmp_path / "run", max_steps=2)

    def other(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)

    change = "optimizer.momentum=0, scheduler.step_size=1"  # as they are
    _, said = await run(job(other, lr=0.25), tmp_path / "run", max_steps=4, override=change)
    assert "initial_lr=0.5 counts, not the job's 0.25" in said
    assert "step_size" not in said
    _, said = await run(job(other, lr=0.25), tmp_path / "run", max_steps=4)
    lr = "the checkpoint's optimizer setting group 0: initial_lr=0.5 counts, not the job's 0.25"
    assert f"{lr}; give --override optimizer.lr=X to change it" in said
    assert "the checkpoint's scheduler setting step_size=1 counts, not the job's 3" in said

    def another(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    _, said = await run(job(another), tmp_path / "run", max_steps=6)
    assert "step_size" not in said  # which it has not
    assert "the scheduler was StepLR and is ExponentialLR now: it goes on from the rates" in said
    _, said = await run(job(halved), tmp_path / "run")
    assert "counts, not" not in said


class Own(lr_scheduler.LRScheduler):
    """Counts, and moves what torch's schedulers do not."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: list[int], *, per: float = 2.0) -> None:
        self.every, self.per, self.calls, self.seen = every, per, 0, [0]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.calls += 1
        self.seen.append(self.calls)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * self.calls
        return [group["initial_lr"] / self.per**self.calls for group in self.optimizer.param_groups]


def cycled(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=12)


def milestones(*steps: int) -> Scheduler:
    return lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [*steps])


def in_turn(step: int, factor: float = 0.5) -> Scheduler:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.ConstantLR(optimizer, 1.0, 1), lr_scheduler.ConstantLR(optimizer, factor, 9)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[step])

    return scheduler


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (Own, None, []),
        (cycled, None, []),
        (lambda made: Own(made, [1, 2]), lambda made: Own(made, [1, 3], per=4.0),
         ["scheduler setting every=[1, 2] counts, not the job's [1, 3]",
          "scheduler setting per=2.0 counts, not the job's 4.0"]),
        (milestones(9), milestones(2), ["scheduler setting milestones=[9] counts, not the job's [2]"]),
        (in_turn(9), in_turn(2), ["scheduler setting milestones=[9] counts, not the job's [2]"]),
        (in_turn(9), in_turn(9, 0.25),
         ["scheduler setting part 2: factor=0.5 counts, not the job's 0.25"]),
        (halved, "momentum", ["optimizer setting group 0: momentum=0.5 counts, not the job's 0.25"]),
        (None, "momentum", ["optimizer setting group 0: momentum=0.5 counts, not the job's 0.25"]),
    ],
    ids=["own", "cycle", "own changed", "milestones", "in turn", "part", "momentum", "without a schedule"],
)  # fmt: skip
async def test_only_a_job_that_was_changed_is_told_so(
    tmp_path: Path, before: Scheduler | None, after: Scheduler | str | None, told: list[str]
) -> None:
    """Whatever its scheduler moves and counts; at each start, until the job is again what the run began with."""
    if before is Own:
        before = partial(Own, every=[1])
    began = changed = job(before)
    if after == "momentum":
        changed = replace(began, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.25))
    elif after is not None:
        assert not isinstance(after, str)
        changed = replace(began, scheduler=after)
    await run(began, tmp_path, max_steps=2)
    for steps in (3, 4):
        _, said = await run(changed, tmp_path, max_steps=steps)
        assert re.findall("the checkpoint's (.*counts, not the job's .*)", said) == told
    _, said = await run(began, tmp_path, max_steps=5)
    assert "counts, not" not in said


async def test_a_scheduler_that_counts_anything_begins_as_fast_as_others(tmp_path: Path) -> None:
    class Counts(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen = Counter({"a": 1 << 40, 2: 3, 1: 1})
            super().__init__(optimizer)

        def get_lr(self) -> Any:
            return list(self.base_lrs)

    result, _ = await run(job(Counts), tmp_path, max_steps=2)
    assert result.step == 2


async def test_a_schedule_that_is_over_is_made_longer(tmp_path: Path) -> None:
    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=3, cycle_momentum=False)

    changes = "what its scheduler was made with is kept with the run: --override scheduler.total_steps=N changes it"
    with pytest.raises(
        UpdateFailed, match=f"^the update after step 4 raised ValueError: Tried .*; {changes}\n"
    ) as caught:
        await run(job(cycle), tmp_path / "run")
    assert caught.value.step == 4
    result, said = await run(job(cycle), tmp_path / "run", override="scheduler.total_steps=7")
    assert (result.outcome, result.step) == ("finished", 6)
    assert "from step 4 on scheduler.total_steps is 7, was 3" in said


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, step_size_up=3, cycle_momentum=False),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=12, cycle_momentum=False),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    ],
)
def test_all_rates_of_a_schedule_change_in_proportion(schedule: Scheduler) -> None:
    def rates(factor: float) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        scheduler, found = schedule(optimizer), []
        for step in range(10):
            if step == 4:
                override(f"optimizer.lr={optimizer.param_groups[0]['initial_lr'] * factor!r}", optimizer, scheduler)
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    plain = rates(1.0)
    assert rates(3.0) == pytest.approx(plain[:4] + [3.0 * rate for rate in plain[4:]])


class Two(torch.optim.Optimizer):
    """Makes its steps by two others, and has no setting itself."""

    def __init__(self, *made: torch.optim.Optimizer) -> None:
        super().__init__([p for one in made for group in one.param_groups for p in group["params"]], {})
        self.made = list(made)


def test_what_an_optimizer_holds_is_changed() -> None:
    one, other = (torch.zeros(1, requires_grad=True) for _ in range(2))
    held = [torch.optim.SGD([one], lr=0.5, momentum=0.5), torch.optim.AdamW([other], lr=0.25, weight_decay=0.125)]
    told = override("optimizer.lr=0.0625,optimizer.weight_decay=0", Two(*held), None)
    assert told == ["optimizer.lr is 0.0625, was 0.5 and 0.25", "optimizer.weight_decay is 0, was 0 and 0.125"]
    assert [(each.param_groups[0]["lr"], each.param_groups[0]["weight_decay"]) for each in held] == [(0.0625, 0)] * 2
    with pytest.raises(UsageError, match=r"optimizer\.lr=-1: Invalid learning rate: -1\.0"):
        override("optimizer.lr=-1", Two(*held), None)
    with pytest.raises(UsageError, match=r"--override optimizer\.lr: Two has no number in its param_groups"):
        override("optimizer.lr=1", Two(torch.optim.Optimizer([one], {})), None)


def test_settings_of_an_optimizer_that_is_held_count_from_the_checkpoint_too() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    settings = settings_of(Two(torch.optim.SGD([parameter], lr=0.5, momentum=0.5)), None)
    assert settings["optimizer setting group 1: lr"] == "0.5"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("optimizer.rate=1", "--override optimizer.rate: SGD has dampening, lr, momentum, weight_decay"),
        ("scheduler.gamma=1", "--override scheduler.gamma: the job has no scheduler"),
        ("optimizer.lr=-1", "--override optimizer.lr=-1: Invalid learning rate: -1.0"),
    ],
)
async def test_a_name_that_is_none_is_refused(change: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        await Coordinator(job(), config=settings(override=change)).start()
    assert str(caught.value) == says


@pytest.mark.parametrize("change", ["lr=1", "optimizer.lr", "optimizer.lr=fast", "optimizer.lr=1,,", ""])
def test_what_is_no_change_is_refused(change: str) -> None:
    with pytest.raises(UsageError, match=r"give optimizer\.NAME=NUMBER or scheduler\.NAME=NUMBER"):
        settings(override=change)
    with pytest.raises(UsageError, match="--override changes an optimizer that steps at the coordinator"):
        settings(override="optimizer.lr=1", update=UpdateConfig(rule="local"))


async def killed_at_once(directory: Path, left: Path, **config: Any) -> None:
    """What a kill leaves of a start before it has saved anything by itself."""
    async with Coordinator(job(), run_dir=directory, config=settings(checkpoint_every=1000, **config)):
        await asyncio.to_thread(shutil.copytree, directory, left)


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
@pytest.mark.parametrize("before", [0, 3])
async def test_what_a_start_was_told_outlives_a_kill_before_its_first_checkpoint(
    durability: str, before: int, tmp_path: Path
) -> None:
    """The next start need not be told again, by --override as by --init-from."""
    told: dict[str, Any] = {"override": "optimizer.lr=0.05"}
    if not before:
        model = build_model(job())
        save_file({name: tensor.detach() + 0.5 for name, tensor in model.named_parameters()}, tmp_path / "weights")
        told["init_from"] = str(tmp_path / "weights")
    digests = []
    for number, kill in enumerate((False, True)):
        directory = tmp_path / f"run {number}"
        if before:
            await run(job(), directory, max_steps=before, durability=durability)
        if kill:
            await killed_at_once(directory, tmp_path / "left", durability=durability, **told)
            result, _ = await run(job(), tmp_path / "left", durability=durability)
        else:
            result, _ = await run(job(), directory, durability=durability, **told)
        digests.append(result.digest)
    assert result.step == 6
    assert digests[0] == digests[1]


async def test_every_group_takes_it_and_what_each_had_is_said(tmp_path: Path) -> None:
    """Also where the first has it already."""

    def grouped() -> Job:
        def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
            first, *others = model.parameters()
            return torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.5}])

        return replace(job(), optimizer=optimizer)

    await run(grouped(), tmp_path / "run", max_steps=3)
    changed, said = await run(grouped(), tmp_path / "run", override="optimizer.lr=0.05")
    assert "optimizer.lr is 0.05, was 0.05 and 0.5" in said
    await run(grouped(), tmp_path / "other", max_steps=3)
    unchanged, _ = await run(grouped(), tmp_path / "other")
    assert changed.digest != unchanged.digest
