"""The inner optimizer by name and numbers: the same bits as the one described, and nothing else built."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from tests.support import jobs
from torch import nn
from torch.optim import lr_scheduler as schedules

from w5xde_async.compute.inner import INNER_OPTIMIZERS, Schedule, build_inner, describe_inner, has_memory, set_scheduled
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.resume import KeptState, _restore
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.run.strategy import change_strategy
from w5xde_async.errors import JobError, MalformedFrame
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule

O = torch.optim  # noqa: E741


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    model[4].bias.requires_grad_(False)
    return model


def two_groups(make: Callable[..., O.Optimizer], **options: Any) -> Callable[[nn.Module], O.Optimizer]:
    """Decay on matrices, none on vectors, another learning rate: in an order that is not the layout's."""

    def optimizer(model: nn.Module) -> O.Optimizer:
        trainable = [p for p in model.parameters() if p.requires_grad]
        vectors = {"params": [p for p in trainable if p.ndim < 2], "lr": 0.02, "name": "vectors"}
        return make([vectors, {"params": [p for p in trainable if p.ndim >= 2]}], **options)

    return optimizer


MAKERS: dict[str, Callable[[nn.Module], O.Optimizer]] = {
    "SGD": two_groups(O.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": two_groups(O.Adam, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "Adam foreach": two_groups(O.Adam, lr=0.01, foreach=True, maximize=True),
    "Adam fused": two_groups(O.Adam, lr=0.01, fused=True),
    "AdamW": two_groups(O.AdamW, lr=0.01, weight_decay=0.1, eps=1e-6),
    "NAdam": two_groups(O.NAdam, lr=0.01, momentum_decay=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": two_groups(O.RAdam, lr=0.01, weight_decay=0.1),
    "Adamax": two_groups(O.Adamax, lr=0.01),
    "RMSprop": two_groups(O.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": two_groups(O.Adagrad, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.01),
    "Adadelta": two_groups(O.Adadelta, lr=0.5, rho=0.8),
    "ASGD": two_groups(O.ASGD, lr=0.05, t0=3, weight_decay=0.01),
    "Rprop": two_groups(O.Rprop, lr=0.01, etas=(0.4, 1.3)),
}


def sent(description: dict[str, Any]) -> Any:
    return msgpack.unpackb(msgpack.packb(description))


def train(model: nn.Module, optimizer: O.Optimizer, before: Callable[[int], None], after: Callable[[], None]) -> bytes:
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        x, y = torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)
        before(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        after()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def nothing(*_: Any) -> None: ...


def test_every_optimizer_on_the_list_is_tried() -> None:
    assert {name.split()[0] for name in MAKERS} == set(INNER_OPTIMIZERS)


@pytest.mark.parametrize("name", MAKERS)
def test_same_bits_as_the_described(name: str) -> None:
    mine, theirs = model_of(), model_of()
    layout = Layout.of(mine)
    description = sent(describe_inner(MAKERS[name](mine), layout, mine))
    built = build_inner(description, list(state_of(theirs, layout)))
    expected = train(mine, MAKERS[name](mine), nothing, nothing)
    assert train(theirs, built, nothing, nothing) == expected
    assert expected != train(model_of(), O.SGD(model_of().parameters(), lr=0.0), nothing, nothing)


@pytest.mark.parametrize("name", MAKERS)
def test_pieces_of_parameters_go_where_the_whole_goes(name: str) -> None:
    """An island's ranks run it on what each holds: what looks at a whole tensor has no place on the list."""
    model, made = model_of(), torch.Generator().manual_seed(2)
    layout = Layout.of(model)
    description = sent(describe_inner(MAKERS[name](model), layout, model))
    whole = list(state_of(model, layout))

    def cut(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flat[: max(1, len(flat) // 3)].clone(), flat[max(1, len(flat) // 3) :].clone()

    pieces = [cut(tensor.detach().flatten()) for tensor in whole]
    parts = [
        [nn.Parameter(piece, requires_grad=tensor.requires_grad) if tensor.is_floating_point() else tensor
         for piece, tensor in zip(some, whole, strict=True)]
        for some in zip(*pieces, strict=True)
    ]  # fmt: skip
    optimizers = [build_inner(description, tensors) for tensors in (whole, *parts)]
    for _ in range(5):
        for index in layout.trainable:
            gradient = torch.randn(whole[index].numel(), generator=made)
            whole[index].grad = gradient.view(whole[index].shape)
            parts[0][index].grad, parts[1][index].grad = cut(gradient)
        for optimizer in optimizers:
            optimizer.step()
    for index in layout.trainable:
        together, expected = torch.cat([part[index].detach() for part in parts]), whole[index].detach().flatten()
        if name.endswith("fused"):  # whose kernels round the last values of a tensor in another way
            torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(together, expected), layout.entries[index].name


SCHEDULERS: dict[str, Callable[[O.Optimizer], Any] | None] = {
    "none": None,
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step]),
    "warm-up, cosine": lambda optimizer: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.CosineAnnealingLR(optimizer, 6)]
    ),
    "steps": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 4], 0.5),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "one cycle, later": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [
            schedules.LinearLR(optimizer, 0.1, total_iters=2),
            schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
        ],
        [2],
    ),
    "below zero": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 - step / 3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_same_bits_with_a_schedule(name: str, optimizer: str) -> None:
    make, scheduler_of = MAKERS[optimizer], SCHEDULERS[name]
    mine, theirs, described = model_of(), model_of(), model_of()
    layout = Layout.of(mine)

    source = make(described)
    schedule = Schedule(source, scheduler_of(source) if scheduler_of else None)
    assert schedule.scheduled[1:] == (
        () if not name.startswith("one cycle") else ("momentum",) if optimizer == "SGD" else ("betas",)
    )
    description = sent(describe_inner(source, layout, described, scheduled=schedule.scheduled))
    late = sent({"rows": schedule.rows(4, 2)})["rows"]  # in any order: a lease may come back
    rows = [*schedule.rows(0, 4), *late]
    built = build_inner(description, list(state_of(theirs, layout)))
    assert all(torch.equal(a, b) for a, b in zip(described.parameters(), model_of().parameters(), strict=True))

    own = make(mine)
    scheduler = scheduler_of(own) if scheduler_of else None
    expected = train(mine, own, nothing, scheduler.step if scheduler else nothing)
    found = train(theirs, built, lambda step: set_scheduled(built, description["scheduled"], rows[step]), nothing)
    assert found == expected


def test_numbers_of_numpy_are_numbers() -> None:
    """A user's own schedule comes by them, of which torch takes any."""
    model = nn.Linear(2, 1)
    layout = Layout.of(model)
    optimizer = O.AdamW(model.parameters(), lr=np.float32(0.5), betas=(np.float64(0.5), 0.75))  # type: ignore[arg-type]
    (group,) = describe_inner(optimizer, layout, model)["groups"]
    assert (type(group["lr"]), group["lr"]) == (float, 0.5)
    assert list(map(type, group["betas"])) == [float, float]
    cosine = schedules.LambdaLR(optimizer, lambda step: np.cos(np.pi * step / 4))
    rows = Schedule(optimizer, cosine).rows(0, 4)
    assert rows == [[pytest.approx(0.5 * math.cos(math.pi * step / 4))] for step in range(4)]
    assert all(type(number) is float for row in rows for number in row)


def test_how_far_a_step_goes_by_its_rates() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    groups = [{"params": model[0].parameters(), "lr": 0.4}, {"params": model[1].parameters(), "lr": 0.0}]
    optimizer = O.SGD(groups, momentum=0.5)
    constant = Schedule(optimizer, None)
    assert constant.rate(0) == constant.rate(7) == pytest.approx(0.4 * math.sqrt(9 / 12))
    cycled = Schedule(optimizer, O.lr_scheduler.OneCycleLR(optimizer, [0.4, 0.0001], total_steps=20))
    rates = [cycled.rate(step) for step in range(20)]
    assert max(rates) == pytest.approx(0.4 * math.sqrt(9 / 12), rel=1e-3)
    assert rates[0] < max(rates) / 20


def test_a_schedule_has_run_up_to_where_a_run_goes_on() -> None:
    """The first lease after a resume is not to wait for thousands of steps of a scheduler, nor the event loop."""
    config = CoordinatorConfig(update=UpdateConfig(rule="local"))
    (spec, strategy, _), other = (prepare(jobs.mlp_adamw(), config, None, lambda: "0" * 16) for _ in range(2))
    assert isinstance(strategy.rule, OuterRule)
    strategy.rule.begin_after(20, 0)
    record = KeptState(spec, strategy).record(20, 0)
    directory: Any = SimpleNamespace(path="here")
    assert _restore(other.spec, other.strategy, record, directory, []).step == 20
    changed = change_strategy(spec, config, strategy, config.update, 20, 0)
    for schedule in (changed.schedule, other.strategy.schedule):
        assert schedule is not None
        schedule._scheduler = None  # whatever it would be asked for now is there
        assert len(schedule._numbers) == 21 * schedule._width


class Own(O.SGD):
    pass


def hooked(model: nn.Module) -> O.Optimizer:
    optimizer = O.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def stepped(model: nn.Module) -> O.Optimizer:
    optimizer = O.Adam(model.parameters())
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: Own(model.parameters(), lr=0.1), "Own; take one of SGD"),
        (lambda model: O.LBFGS(model.parameters()), "LBFGS"),
        (lambda model: O.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False), "lr is tensor.*plain number"),
        (lambda model: O.Adam(model.parameters(), differentiable=True), "Adam with differentiable"),
        (hooked, "hooks"),
        (stepped, "steps already"),
        (lambda model: O.SGD([nn.Parameter(torch.ones(1))]), "not the model's"),
        pytest.param(
            lambda model: O.SGD([*model.parameters(), next(model.parameters())]),
            r"group 0 names \S+ twice, .*model.parameters\(\)",
            marks=pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters"),
        ),
    ],
)
def test_what_is_not_described(make: Callable[[nn.Module], O.Optimizer], said: str) -> None:
    model = model_of()
    with pytest.raises(JobError, match=said):
        describe_inner(make(model), Layout.of(model), model)


def test_a_scheduler_of_something_else() -> None:
    class Decay(schedules.LRScheduler):
        def get_lr(self) -> list[float]:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.5 / (1 + self.last_epoch)
            return [0.1 for _ in self.optimizer.param_groups]

    optimizer = O.SGD(model_of().parameters(), lr=0.1)
    with pytest.raises(JobError, match="more than learning rates"):
        Schedule(optimizer, Decay(optimizer)).rows(0, 3)


def test_a_rate_that_is_too_large_is_the_optimizers_where_no_scheduler_sets_it() -> None:
    optimizer = O.SGD(model_of().parameters(), lr=1e30)
    with pytest.raises(JobError, match=r"optimizer: it has lr of 1e\+30; give plain numbers of at most 1e\+12"):
        Schedule(optimizer, None)
    optimizer = O.AdamW(model_of().parameters(), lr=torch.tensor(0.1))
    scheduler = O.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    with pytest.raises(JobError, match=r"optimizer: it has tensor\(0\.1000\) as lr; give a plain number"):
        Schedule(optimizer, scheduler)
    optimizer = O.SGD(model_of().parameters(), lr=1.0)
    growing = O.lr_scheduler.LambdaLR(optimizer, lambda step: 1e13**step)
    with pytest.raises(JobError, match=r"scheduler: it sets lr to 10000000000000\.0"):
        Schedule(optimizer, growing).rows(0, 3)


def altered(path: list[Any], value: Any) -> Any:
    model = model_of()
    description = sent(describe_inner(O.Adam(model.parameters()), Layout.of(model), model))
    place: Any = description
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return description


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["name"], "LBFGS"), (["name"], "__class__"), (["name"], 3), (["name"], "SGD"), (["code"], "x"),
        (["groups"], []), (["groups"], [{"entries": []}] * 5000), (["groups", 0], 7),
        (["groups", 0, "lr"], -1.0), (["groups", 0, "lr"], float("nan")), (["groups", 0, "lr"], float("inf")),
        (["groups", 0, "lr"], "0.1"), (["groups", 0, "lr"], True), (["groups", 0, "lr"], 1 << 62),
        (["groups", 0, "betas"], [0.9]), (["groups", 0, "betas"], [1.5, 0.9]), (["groups", 0, "betas"], 0.9),
        (["groups", 0, "amsgrad"], 1), (["groups", 0, "foreach"], "yes"), (["groups", 0, "differentiable"], True),
        (["groups", 0, "params"], [0]), (["groups", 0, "entries"], [0, 0]), (["groups", 0, "entries"], [-1]),
        (["groups", 0, "entries"], [99]), (["groups", 0, "entries"], [True]), (["groups", 0, "entries"], ["weight"]),
        (["groups", 0, "entries"], list(range(10))), (["groups", 0, "entries"], None),
        (["scheduled"], ["lr", "eps"]), (["scheduled"], ["momentum"]), (["scheduled"], ["lr", "momentum"]),
        (["scheduled"], []), (["scheduled"], ["lr", "betas", "betas"]), (["scheduled"], "lr"),
    ],
)  # fmt: skip
def test_what_is_not_built(path: list[Any], value: Any) -> None:
    model = model_of()
    tensors = list(state_of(model, Layout.of(model)))
    with pytest.raises(MalformedFrame):
        build_inner(altered(path, value), tensors)
    build_inner(altered(["scheduled"], ["lr", "betas"]), tensors)  # and the unaltered one is


@pytest.mark.parametrize("description", [None, 3, [], "SGD", {}, {"name": "SGD"}])
def test_what_is_no_description(description: Any) -> None:
    with pytest.raises(MalformedFrame):
        build_inner(description, [])


@pytest.mark.parametrize("row", [[], [0.1, 0.2, 0.3], [float("nan")], ["x"], [1e300]])
def test_rows_that_do_not_fit(row: list[Any]) -> None:
    optimizer = O.SGD(model_of().parameters(), lr=0.1)
    with pytest.raises(MalformedFrame):
        set_scheduled(optimizer, ["lr"], row)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_all_but_sgd_without_momentum_have_a_memory() -> None:
    weights = [torch.zeros(2, requires_grad=True)]
    assert not has_memory(O.SGD(weights, lr=0.1))
    assert has_memory(O.SGD(weights, lr=0.1), ("lr", "momentum"))
    groups = [{"params": weights}, {"params": [torch.zeros(1, requires_grad=True)], "momentum": 0.9}]
    assert has_memory(O.SGD(groups, lr=0.1))
    for name, (kind, _) in INNER_OPTIMIZERS.items():
        assert has_memory(kind(weights, lr=0.1)) is (name != "SGD")
