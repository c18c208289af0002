"""Parameters and buffers that the job changes beside what its optimizer steps: target networks, averages, clipping.

With the update, in a hook of the optimizer, they are part of the step, as in a plain loop. In the step itself they
would be each worker's own, and lost.
"""

from __future__ import annotations

import copy
import itertools
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cluster import train
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

from w5xde_async.errors import CheckpointMismatch, LeafFailed, UpdateFailed
from w5xde_async.job import Job, build_model
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.events import Event, Warned
from w5xde_async.updates.config import UpdateConfig

STEPS, BATCH = 10, 16


class Learner(nn.Module):
    """Two networks, of which one follows the other; ``inside``: what forward does to it."""

    def __init__(self, inside: Callable[[Learner], None] | None = None) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 6)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("center", torch.zeros(6))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is not None:
            with torch.no_grad():
                self.inside(self)
        with torch.no_grad():
            told = self.target.eval()(x + 0.1) - self.center
        return nn.functional.mse_loss(self.head(self.online(x)), told)


def in_place(model: Learner) -> None:
    for mine, theirs in zip(model.target.parameters(), model.online.parameters(), strict=True):
        mine.lerp_(theirs, 0.1)


def by_data(model: Learner) -> None:
    for mine, theirs in zip(model.target.parameters(), model.online.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def other_memory(model: Learner) -> None:
    """As MoCo's own code does."""
    for mine, theirs in zip(model.target.parameters(), model.online.parameters(), strict=True):
        mine.data = 0.9 * mine.data + 0.1 * theirs.data


def all_of_it(model: Learner) -> None:
    """Statistics of batch norm too, and a buffer that is assigned."""
    in_place(model)
    for mine, theirs in zip(model.target.buffers(), model.online.buffers(), strict=True):
        mine.copy_(theirs)
    model.center = 0.9 * model.center + 0.1 * model.head.bias.detach()


def new_module(model: Learner) -> None:
    """As a hard update often is written."""
    model.target = copy.deepcopy(model.online).requires_grad_(False)


def new_parameters(model: Learner) -> None:
    old = model.target.state_dict()
    told = {name: value.lerp(old[name], 0.9) if value.is_floating_point() else value.clone()
            for name, value in model.online.state_dict().items()}  # fmt: skip
    model.target.load_state_dict(told, assign=True)
    model.target.requires_grad_(False)


def trained_too(model: Learner) -> None:
    """Clipped, in other memory: the optimizer goes on with what the model computes with."""
    in_place(model)
    for parameter in model.head.parameters():
        parameter.data = parameter.data.clamp(-0.05, 0.05)


def job(
    *, inside: Callable[[Learner], None] | None = None, hook: Callable[[Learner], None] | None = None,
    leaf: int = BATCH, backwards: bool = False,
) -> Job:  # fmt: skip
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))

    def optimizer(model: Any) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made = torch.optim.Adam(trained[::-1] if backwards else trained, lr=1e-2)
        if hook is not None:
            # With a graph, as a plain loop's hook would be called.
            made.register_step_post_hook(lambda *_: torch.no_grad()(hook)(model))
        return made

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0])
        return loss

    return Job(
        model=lambda: Learner(inside), dataset=TensorDataset(x), step=step, optimizer=optimizer, max_steps=STEPS,
        batch_size=BATCH, microbatch_size=leaf, shuffle=False,
    )  # fmt: skip


def plain(made: Job) -> dict[str, Tensor]:
    """The loop that a user would write."""
    model = build_model(made)
    optimizer = made.optimizer(model)
    scheduler = None if made.scheduler is None else made.scheduler(optimizer)
    (x,) = made.dataset.tensors
    for number in range(STEPS):
        begin = number * BATCH % len(x)
        optimizer.zero_grad()
        model(x[begin : begin + BATCH]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model.state_dict()


@pytest.mark.parametrize("hook", [in_place, by_data, other_memory, all_of_it, new_module, new_parameters, trained_too])
async def test_a_hook_of_the_optimizer_changes_what_all_workers_compute_with(hook: Any, tmp_path: Path) -> None:
    make = lambda: job(hook=hook)  # noqa: E731
    told = plain(make())
    digests = set()
    for workers, pacing in (
        (1, PacingConfig(whole_step_s=0.0)),
        (2, PacingConfig(whole_step_s=0.0)),
        (1, PacingConfig()),
    ):
        run = tmp_path / f"{len(digests)}-{workers}-{pacing.whole_step_s}"
        digests.add((await train(make, workers=workers, run_dir=run, pacing=pacing)).digest)
        model = build_model(make())
        from safetensors.torch import load_file

        found = load_file(str(run / "model.safetensors"))
        for name in model.state_dict():
            torch.testing.assert_close(found[name], told[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert len(digests) == 1
    assert not torch.equal(told["target.0.weight"], build_model(make()).state_dict()["target.0.weight"])


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_what_a_hook_has_changed_is_there_after_a_resume(tmp_path: Path, durability: str) -> None:
    make = lambda: job(hook=all_of_it, leaf=8)  # noqa: E731
    whole = await train(make, run_dir=tmp_path / "whole", durability=durability)
    await train(make, run_dir=tmp_path / "run", durability=durability, max_steps=4)
    events: list[Event] = []
    again = await train(make, run_dir=tmp_path / "run", durability=durability, workers=2, events=events)
    assert again.digest == whole.digest
    assert any(isinstance(event, Warned) and "the optimizer has step hooks" in event.text for event in events)


def counting(model: Any) -> torch.optim.Optimizer:
    """Its step is another one than torch's, of the same class."""
    made = torch.optim.SGD(model.parameters(), lr=0.05)
    torchs, count = made.step, itertools.count()

    def step(self: Any, closure: None = None) -> None:
        next(count)
        torchs(closure)

    made.step = types.MethodType(step, made)  # type: ignore[method-assign]
    return made


class Counter:
    """A factor of torch's scheduler, whose attributes that saves."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int) -> float:
        self.count += 1
        return 0.9**self.count


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"optimizer": counting}, "the optimizer has functions (step) that do more than compute: what they keep"),
        (
            {"scheduler": lambda made: torch.optim.lr_scheduler.LambdaLR(made, Counter().__call__)},
            "the scheduler has functions (lr_lambdas) that do more than compute: what they keep",
        ),
        ({"scheduler": lambda made: torch.optim.lr_scheduler.LambdaLR(made, Counter())}, ""),
        ({"scheduler": lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step)}, ""),
    ],
)
async def test_what_functions_may_have_kept_is_told_after_a_resume(
    parts: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make = lambda: replace(job(), **parts)  # noqa: E731
    whole = await train(make)
    await train(make, run_dir=tmp_path / "run", max_steps=4)
    events: list[Event] = []
    again = await train(make, run_dir=tmp_path / "run", events=events)
    told = [event.text for event in events if isinstance(event, Warned) and "begins anew" in event.text]
    assert [says in text for text in told] == ([True] if says else [])
    assert again.digest == whole.digest or "scheduler" in says


class Following(torch.optim.SGD):
    """An optimizer of somebody's own that averages what it has made."""

    model: Any = None

    def step(self, closure: Any = None) -> Any:
        made = super().step(closure)
        with torch.no_grad():
            in_place(self.model)
        return made


OWN, HOOK = "an optimizer of its own", "a hook of all optimizers"
PATCHED, FACTOR = "a step in place of torch's", "a factor of torch's scheduler"


@pytest.mark.parametrize("how", [OWN, HOOK, PATCHED, FACTOR])
async def test_whoever_is_called_with_the_update_may_change_it(how: str, tmp_path: Path) -> None:
    models: list[Any] = []

    def optimizer(model: Any) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if how == OWN:
            own = Following(trained, lr=0.05)
            own.model = model
            return own
        models.append(model)
        made = torch.optim.SGD(trained, lr=0.05)
        if how == PATCHED:
            torchs = made.step

            def step(self: Any, closure: None = None) -> None:
                torchs(closure)
                torch.no_grad()(in_place)(model)

            made.step = types.MethodType(step, made)  # type: ignore[method-assign]
        return made

    def scheduler(made: torch.optim.Optimizer) -> Any:
        model = models[-1]

        def factor(step: int) -> float:
            if step:
                torch.no_grad()(in_place)(model)
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(made, factor)

    parts = {"optimizer": optimizer, **({"scheduler": scheduler} if how == FACTOR else {})}
    handle = None
    if how == HOOK:
        handle = register_optimizer_step_post_hook(lambda *_: torch.no_grad()(in_place)(models[-1]))
    try:
        told = plain(replace(job(), **parts))
        digests = set()
        for workers in (1, 2):
            result = await train(lambda: replace(job(), **parts), workers=workers, run_dir=tmp_path / f"{workers}")
            digests.add(result.digest)
    finally:
        if handle is not None:
            handle.remove()
    from safetensors.torch import load_file

    found = load_file(str(tmp_path / "1" / "model.safetensors"))
    assert len(digests) == 1
    for name in ("target.0.weight", "head.weight"):
        torch.testing.assert_close(found[name], told[name], rtol=1e-5, atol=1e-6)


async def test_another_tensor_in_place_of_one_that_is_trained_ends_the_run_by_name() -> None:
    """A plain loop's optimizer would go on with the old one."""

    def anew(model: Learner) -> None:
        model.head.weight = nn.Parameter(model.head.weight.clamp(-0.1, 0.1))

    with pytest.raises(UpdateFailed, match=r"has put another tensor in place of parameter 'head\.weight'"):
        await train(lambda: job(hook=anew))


async def test_under_async_workers_are_sent_it_too() -> None:
    result = await train(lambda: job(hook=in_place), update=UpdateConfig(rule="async"))
    assert result.step == STEPS


@pytest.mark.parametrize("inside", [in_place, by_data, other_memory])
@pytest.mark.parametrize("short_steps", ["workers", "anywhere"])
async def test_in_the_step_itself_it_is_refused_by_name(inside: Any, short_steps: str) -> None:
    pacing = PacingConfig(whole_step_s=0.0) if short_steps == "workers" else PacingConfig()
    with pytest.raises(LeafFailed, match=r"the step changes parameter 'target\.0\.weight' itself"):
        await train(lambda: job(inside=inside, leaf=8), pacing=pacing)


async def test_weights_that_are_clipped_in_the_step_are_refused_by_name() -> None:
    """As WGANs do."""

    def clip(model: Learner) -> None:
        for parameter in model.head.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    with pytest.raises(LeafFailed, match=r"the step changes parameter 'head\.weight' itself"):
        await train(lambda: job(inside=clip))
    result = await train(lambda: job(hook=clip))
    assert result.step == STEPS


async def test_what_begins_late_is_found_before_long() -> None:
    """A warm-up: nothing is written in the first calls."""
    calls = 0

    def late(model: Learner) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            in_place(model)

    with pytest.raises(LeafFailed, match=r"the step changes parameter 'target\.0\.weight' itself"):
        await train(lambda: replace(job(inside=late), max_steps=100), pacing=PacingConfig(whole_step_s=0.0))


async def test_an_optimizer_with_its_parameters_in_another_order_does_not_go_on(tmp_path: Path) -> None:
    """What it keeps of one parameter would be taken for another's, where they have the same shape."""
    await train(job, run_dir=tmp_path / "run", max_steps=4)
    with pytest.raises(CheckpointMismatch, match="the parameters of the optimizer's group 0, or their order"):
        await train(lambda: job(backwards=True), run_dir=tmp_path / "run")
    assert (await train(job, run_dir=tmp_path / "run")).step == STEPS


async def test_groups_that_a_hook_has_added_are_to_be_made_by_the_job(tmp_path: Path) -> None:
    def make() -> Job:
        def optimizer(model: Any) -> torch.optim.Optimizer:
            first, *others = (parameter for parameter in model.parameters() if parameter.requires_grad)
            made = torch.optim.SGD([first], lr=1e-2)

            def add(*_: object) -> None:
                if len(made.param_groups) == 1:
                    made.add_param_group({"params": others})

            made.register_step_post_hook(add)
            return made

        return replace(job(), optimizer=optimizer)

    await train(make, run_dir=tmp_path / "run", max_steps=4)
    said = (
        r"the optimizer had 2 groups when its checkpoint was written and has 1 now: .* those too that a hook adds later"
    )
    with pytest.raises(CheckpointMismatch, match=said):
        await train(make, run_dir=tmp_path / "run")
