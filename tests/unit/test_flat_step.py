"""Steps over stretches of the flat vector beside the optimizer's own over its parameters: the same bits, in state too.

The optimizers and their settings are those of torch's own test database.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from w5xde_async import openmp
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.updates import flat_step
from w5xde_async.updates.flat_step import FlatStep
from w5xde_async.updates.fused_step import FusedStep
from w5xde_async.updates.sync import _ELEMENTWISE, SyncRule

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SHAPES = ((37,), (3, 5), (), (64,), (200, 3), (1,), (16, 16), (0, 4), (130,))  # with and without zeros behind


def settings_of(optimizer: type[torch.optim.Optimizer], *, whole: bool) -> Iterator[dict[str, Any]]:
    """The database's, in every way: the one that says most, or where ``whole`` all."""
    from torch.testing._internal.common_optimizers import optim_db  # seconds, for whoever collects the tests

    (info,) = (info for info in optim_db if info.optim_cls is optimizer)
    given = [dict(case.kwargs) for case in info.optim_inputs_func(device="cpu", dtype=torch.float32)]
    for kwargs in given if whole else [max(given, key=len)]:
        for way in ("", *(way for way in info.supported_impls if way in ("foreach", "fused"))):
            if isinstance(kwargs.get("lr"), Tensor) and way == "foreach":
                continue  # torch refuses it
            yield {**kwargs, **({way: True} if way else {})}


def _own(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in kwargs.items()}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


class Beside:
    """A rule over a flat model, and the same optimizer over tensors of its own."""

    def __init__(
        self, make: Make, groups: int = 1, shapes: tuple[tuple[int, ...], ...] = SHAPES, clip: float | None = None
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.model = nn.Module()
        for number, shape in enumerate(shapes):
            self.model.register_parameter(f"p{number:02}", nn.Parameter(torch.randn(shape, generator=generator)))
        self.layout = Layout.of(self.model, bucket_bytes=1 << 20)
        self.plain = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.state = FlatState(self.layout)
        self.state.copy_from(self.model)
        self.state.adopt(self.model)
        own = list(self.model.parameters())
        self.theirs, self.ours = (make(self.divided(of, groups)) for of in (self.plain, own))  # type: ignore[arg-type]
        self.rule, self.clip = SyncRule(own, self.layout, self.state, self.ours, clip=clip), clip
        self.generator = generator

    @staticmethod
    def divided(parameters: list[nn.Parameter], groups: int) -> Any:
        """Into runs of neighbours, alternately of ``groups`` groups."""
        if groups == 1:
            return parameters
        return [
            {
                "params": [p for place, p in enumerate(parameters) if place // 2 % groups == group],
                "lr": 0.03 * (1 + group),
            }
            for group in range(groups)
        ]

    @property
    def is_flat(self) -> bool:
        flat = self.rule._flat
        return flat is not None and flat._for is not None

    def step(
        self, untouched: frozenset[int] = frozenset(), *, rate_factor: float = 1.0,
        draw: Callable[[torch.Size], Tensor] | None = None,
    ) -> None:  # fmt: skip
        root = ResultVector(self.layout)
        root.reset()
        for index, (gradient, plain) in enumerate(zip(root.gradients, self.plain, strict=True)):
            assert gradient is not None
            drawn = torch.randn(plain.shape, generator=self.generator) if draw is None else draw(plain.shape)
            plain.grad = None if index in untouched else drawn
            if index not in untouched:
                gradient.copy_(drawn)
        present = [True] * len(self.layout.result_buckets)
        self.rule.apply(root, present, 1, set(untouched), rate_factor=rate_factor)
        stretches = self.rule._flat._stretches if isinstance(self.rule._flat, FlatStep) else []
        pieces = [piece for stretch in stretches for piece in stretch.pieces]
        assert all(parameter.grad is None for parameter in (*pieces, *self.model.parameters()))
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.plain, self.clip)
        rates = [group["lr"] for group in self.theirs.param_groups]
        for group in self.theirs.param_groups:
            group["lr"] = group["lr"] * rate_factor
        self.theirs.step()
        for group, rate in zip(self.theirs.param_groups, rates, strict=True):
            group["lr"] = rate

    def check(self) -> None:
        for mine, plain in zip(self.model.parameters(), self.plain, strict=True):
            assert_same(mine, plain)
        mine, plain = self.rule.state_dict()["optimizer"], self.theirs.state_dict()
        assert mine["state"].keys() == plain["state"].keys()
        for index, state in plain["state"].items():
            assert mine["state"][index].keys() == state.keys()
            for name, value in state.items():
                if value is not None:
                    assert_same(mine["state"][index][name], value)
        between = self.state.groups[0].clone()
        for entry in self.layout.entries:
            between[entry.offset : entry.offset + entry.numel] = 0
        assert not between.any()

    def resume(self) -> None:
        """As from a checkpoint."""
        self.rule.load_state_dict(copy.deepcopy(unpack_state(*pack_state(self.rule.state_dict()))))


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_step, "_PIECE", 128)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", _ELEMENTWISE, ids=lambda optimizer: optimizer.__name__)
def test_every_optimizers_bits_are_those_of_its_own_steps(
    optimizer: type[torch.optim.Optimizer], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, makes_state = torch.get_num_threads(), makes_state_as_it_steps(optimizer)
    for kwargs, groups in itertools.product(settings_of(optimizer, whole=whole), (1, 2)):
        print(kwargs, groups)  # noqa: T201 - said where it fails
        with monkeypatch.context() as patch:
            if groups == 2:
                apart(patch)
            beside = Beside(lambda of, kwargs=kwargs: optimizer(of, **_own(kwargs)), groups)  # type: ignore[misc]
            for step in range(12):
                beside.step(frozenset({3}) if step == 6 else frozenset(), rate_factor=1.5 if step == 3 else 1.0)
                beside.check()
                if step in (4, 8):  # while it steps over stretches, and while the optimizer steps itself
                    beside.resume()
            at_once = isinstance(beside.rule._flat, FusedStep) and not isinstance(kwargs.get("lr"), Tensor)
            assert beside.is_flat == (at_once or (makes_state and not beside.ours.defaults.get("fused")))
            if isinstance(beside.rule._flat, FlatStep):
                assert bool(beside.rule._flat._apart) == (beside.is_flat and groups == 2)
        torch.set_num_threads(threads)


def makes_state_as_it_steps(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Adagrad of older versions of torch makes it in its constructor alone."""
    parameter = nn.Parameter(torch.zeros(1))
    made = optimizer([parameter], lr=0.1)  # type: ignore[call-arg]
    made.state.clear()
    parameter.grad = torch.ones(1)
    try:
        made.step()
    except KeyError:
        return False
    return True


def test_one_whose_constructor_makes_the_state_makes_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In other memory it would find none."""
    steps = torch.optim.Adagrad.step

    def step(self: torch.optim.Adagrad, closure: Any = None) -> Any:
        assert all(self.state[p]["sum"] is not None for group in self.param_groups for p in group["params"])
        return steps(self)

    monkeypatch.setattr(torch.optim.Adagrad, "step", step)
    beside = Beside(lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    for _ in range(12):
        beside.step()
        beside.check()
    assert not beside.is_flat


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads step the pieces, which are small."""
    monkeypatch.setattr(flat_step, "_WORTH_APART", 0)
    monkeypatch.setattr(flat_step, "_OWN_PIECE", 48)
    monkeypatch.setattr(openmp, "_WORTH_A_THREAD", 1)
    torch.set_num_threads(3)


@pytest.mark.parametrize("schedule", [None, lambda made: torch.optim.lr_scheduler.OneCycleLR(made, 0.2, 20)])
def test_several_threads_make_a_step_that_nobody_else_makes_too(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler puts a step of its own in place of the optimizer's, which steps that."""
    apart(monkeypatch)
    beside = Beside(adamw, 2)
    if schedule is not None:
        beside.rule.scheduler, theirs = schedule(beside.ours), schedule(beside.theirs)
    calls, met, step = itertools.count(), threading.Barrier(2, timeout=30), torch.optim.AdamW.step

    def noted(self: torch.optim.AdamW, closure: Any = None) -> Any:
        if next(calls) < 2:
            met.wait()  # raises where there is one thread
        return step(self)

    for number in range(6):
        if number == 3:
            monkeypatch.setattr(torch.optim.AdamW, "step", noted)
        beside.step()
        if schedule is not None:
            theirs.step()
        beside.check()
    assert beside.is_flat
    assert next(calls) > 2
    pieces = [piece for _, groups in beside.rule._flat._apart for given in groups.values() for piece in given]  # type: ignore[union-attr]
    assert len(pieces) == len(set(pieces)) > 12
    assert all(1 <= piece.numel() <= 48 for piece in pieces)


def test_what_raises_in_another_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch)
    beside = Beside(adamw)
    for _ in range(3):
        beside.step()
    assert beside.is_flat
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        beside.step()


def test_the_optimizer_makes_its_state_itself() -> None:
    beside = Beside(adamw)
    for flat in (False, True, True):
        beside.step()
        assert beside.is_flat == flat
    assert len(beside.rule._flat._stretches) == 1  # type: ignore[union-attr]
    beside.step(frozenset({3}))
    assert not beside.is_flat
    beside.check()


def test_what_never_gets_a_gradient_is_left_out() -> None:
    beside = Beside(adamw)
    for _ in range(4):
        beside.step(frozenset({3, 8}))
    assert beside.is_flat
    beside.check()
    beside.step()
    assert not beside.is_flat  # the optimizer begins with those now
    for _ in range(8):
        beside.step()
        beside.check()
    assert beside.is_flat
    assert len(beside.rule._flat._stretches) > 1  # type: ignore[union-attr]


def test_gradients_that_come_and_go_do_not_have_it_built_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    own = FlatStep._build
    monkeypatch.setattr(FlatStep, "_build", lambda self, untouched: (built.append(1), own(self, untouched)))
    beside, draws = Beside(adamw), random.Random(0)
    for _ in range(300):
        beside.step(frozenset({3}) if draws.random() < 0.4 else frozenset())
    beside.check()
    assert len(built) < 12


def test_gradients_are_clipped_as_they_are_by_torch() -> None:
    beside = Beside(sgd, clip=0.5)
    for _ in range(4):
        beside.step()
        beside.check()
    assert beside.is_flat


def test_a_momentum_that_begins_later_is_in_the_state() -> None:
    beside = Beside(lambda of: torch.optim.SGD(of, lr=0.1))
    for momentum in (0.0, 0.0, 0.0, 0.9, 0.9, 0.8, 0.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9):
        for optimizer in (beside.ours, beside.theirs):
            optimizer.param_groups[0]["momentum"] = momentum
        beside.step()
        beside.check()
    assert beside.is_flat


def test_a_momentum_that_a_scheduler_begins_after_a_step_is_in_the_state() -> None:
    def cycled(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 60, max_momentum=0.0, base_momentum=0.9)

    beside = Beside(lambda of: torch.optim.SGD(of, lr=0.1))
    beside.rule.scheduler, theirs = cycled(beside.ours), cycled(beside.theirs)
    for step in range(8):
        beside.step()
        theirs.step()
        beside.check()
        if step == 4:
            beside.resume()
    assert beside.is_flat


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("optimizer", [sgd, adamw, lambda of: torch.optim.AdamW(of, lr=0.1, fused=True)])
def test_a_parameter_that_is_named_twice_is_stepped_twice(optimizer: Make) -> None:
    beside = Beside(lambda of: optimizer([*of, of[0]]))
    for step in range(6):
        beside.step()
        beside.check()
        if step == 3:
            beside.resume()


@pytest.mark.parametrize("several", [False, True])
def test_a_step_in_which_nothing_has_a_gradient(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if several:
        apart(monkeypatch)
    beside = Beside(adamw)
    for _ in range(4):
        beside.step(frozenset(range(len(SHAPES))))
        beside.check()
    assert beside.is_flat


@pytest.mark.parametrize("optimizer", [adamw, lambda of: torch.optim.AdamW(of, lr=0.1, fused=True)])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_hook_that_comes_later_is_called_once_a_step_with_what_the_optimizer_has(
    optimizer: Make, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch)
    beside, heard = Beside(optimizer), list[int]()
    for _ in range(steps):
        beside.step()

    def hear(made: torch.optim.Optimizer, *_: Any) -> None:
        heard.append(sum(parameter.numel() for group in made.param_groups for parameter in group["params"]))

    beside.ours.register_step_post_hook(hear)
    for _ in range(3):
        beside.step()
        beside.check()
    assert heard == [sum(parameter.numel() for parameter in beside.plain)] * 3


def test_a_skipped_step_changes_nothing_and_makes_no_state() -> None:
    beside = Beside(adamw)
    root = ResultVector(beside.layout)
    root.memory.fill_(0xFF)  # not a number
    for _ in range(3):
        assert beside.rule.apply(root, [True], 1, set()).skipped
    assert not beside.ours.state
    for _ in range(3):
        beside.step()
        beside.check()
    assert beside.is_flat
    assert beside.rule.apply(root, [True], 1, set()).skipped
    beside.check()


@pytest.mark.parametrize(
    "kernel",
    [
        lambda p, rate: p.numel() > 90 and p.add_(rate),  # other bits in larger tensors
        lambda p, rate: p.add_(rate),  # zeros between parameters do not stay zeros
    ],
)
def test_a_machine_whose_kernels_see_it_otherwise_steps_parameter_by_parameter(
    kernel: Callable[[Tensor, float], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.optim.SGD.step

    def other(self: torch.optim.SGD, closure: Any = None) -> None:
        own(self)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        kernel(parameter, group["lr"])

    monkeypatch.setattr(torch.optim.SGD, "step", other)
    beside = Beside(sgd)
    for rate in (0.0, 0.0, 0.0, 0.1, 0.1):  # as where it warms up
        for optimizer in (beside.ours, beside.theirs):
            optimizer.param_groups[0]["lr"] = rate
        beside.step()
        beside.check()
        assert not beside.is_flat


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda of: torch.optim.Adam(of, lr=0.1, eps=0.0),
        lambda of: torch.optim.Adagrad(of, lr=0.1, eps=0.0, initial_accumulator_value=0.1),
        lambda of: torch.optim.RAdam(of, lr=0.1, eps=1e-60),  # no number of float32
        lambda of: torch.optim.Adam(
            [{"params": of[:2]}, {"params": of[2:], "eps": 1e-60}], lr=0.1
        ),
    ],
    ids=["adam", "adagrad", "radam", "of one group"],
)  # fmt: skip
def test_without_an_eps_zeros_between_parameters_would_not_stay_zeros(optimizer: Make) -> None:
    beside = Beside(optimizer)
    for _ in range(9):
        beside.step()
        beside.check()
    assert not beside.is_flat
    assert beside.state.trains_finite


def drawn_optimizer(chance: random.Random) -> Make:
    """One of torch's, whose groups differ in what they are set to."""
    beta, eps, decay = lambda: chance.choice([0.0, 0.5, 0.9]), lambda: chance.choice([1e-8, 1e-45, 1e-60]), [0.0, 0.1]
    settings: dict[Any, Callable[[], dict[str, Any]]] = {
        torch.optim.Adam: lambda: {"betas": (beta(), 0.99), "eps": eps(), "amsgrad": chance.random() < 0.5},
        torch.optim.AdamW: lambda: {"betas": (beta(), 0.99), "eps": eps(), "maximize": chance.random() < 0.5},
        torch.optim.NAdam: lambda: {"betas": (beta(), 0.99), "eps": eps()},
        torch.optim.RAdam: lambda: {"betas": (beta(), chance.choice([0.9, 0.99])), "eps": eps()},
        torch.optim.Adamax: lambda: {"betas": (beta(), 0.99), "eps": eps()},
        torch.optim.Adagrad: lambda: {"initial_accumulator_value": chance.choice(decay), "eps": eps()},
        torch.optim.RMSprop: lambda: {"centered": chance.random() < 0.5, "momentum": beta()},
        torch.optim.Adadelta: lambda: {"rho": beta()},
        torch.optim.SGD: lambda: {"momentum": beta()},
    }
    optimizer = chance.choice(list(settings))
    groups = [{"weight_decay": chance.choice(decay), **settings[optimizer]()} for _ in range(chance.randint(1, 3))]

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        every = len(groups)
        made: torch.optim.Optimizer = optimizer(
            [{"params": parameters[number::every], **group} for number, group in enumerate(groups)], lr=0.1
        )
        return made

    return make


@pytest.mark.parametrize("seed", range(120))
def test_any_setting_with_any_gradients(seed: int) -> None:
    """Among them zeros of both signs, and what is next to zero."""
    chance = random.Random(seed)
    shapes = tuple((chance.choice([1, 2, 3, 5, 8, 17, 33]),) for _ in range(chance.randint(3, 9)))
    beside = Beside(drawn_optimizer(chance), shapes=shapes)
    for mine, plain in zip(beside.model.parameters(), beside.plain, strict=True):
        scale = chance.choice([1.0, 1.0, 0.0, -0.0, 1e-40])
        for parameter in (mine, plain):
            parameter.data.mul_(scale)
    for _ in range(10):
        beside.step(
            draw=lambda of: (
                torch.randn(of, generator=beside.generator) * chance.choice([1.0, 0.0, -0.0, 1e-39, 1e-20, 1e10])
            )
        )
        if not all(parameter.isfinite().all() for parameter in beside.plain):
            break  # a plain loop's are so too
        beside.check()
        assert beside.state.trains_finite


@pytest.mark.parametrize("in_first", [True, False])
def test_averages_of_a_last_gradient_alone_keep_the_signs_of_their_zeros(in_first: bool) -> None:
    """``betas=(0, ...)``, as generative adversarial networks have them: then torch's vectors and what is left of them
    have zeros of different signs. Of two groups the second may be the only such one."""
    betas = [(0.0, 0.9), (0.9, 0.9)] if in_first else [(0.9, 0.9), (0.0, 0.9)]

    def adam(of: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": of[:3], "betas": betas[0]}, {"params": of[3:], "betas": betas[1]}], lr=0.1
        )  # fmt: skip

    beside = Beside(adam, shapes=((3,),) * 6)
    signs = random.Random(0)
    for _ in range(12):
        beside.step(draw=lambda of: torch.zeros(of).mul_(signs.choice([1.0, -1.0])))
        beside.check()


@pytest.mark.parametrize("change", ["half", "transposed"])
def test_parameters_that_do_not_lie_in_one_vector_are_stepped_by_themselves(change: str) -> None:
    beside = Beside(sgd, shapes=((8, 8), (37,)))
    model = nn.Module()
    for number, parameter in enumerate(beside.plain):
        made = parameter.detach().clone().half() if change == "half" and number else parameter.detach().clone()
        model.register_parameter(
            f"p{number}", nn.Parameter(made.t() if change == "transposed" and not number else made)
        )
    layout = Layout.of(model)
    state = FlatState(layout)
    state.copy_from(model)
    if change == "half":
        state.adopt(model)
    flat = FlatStep(sgd(list(model.parameters())), layout, state, list(enumerate(model.parameters())))
    flat.ready(())
    flat.note_own_step()
    assert not flat.ready(())


def test_a_state_that_is_not_as_torchs_are_is_left_alone() -> None:
    beside = Beside(adamw)
    beside.step()
    beside.ours.state[next(iter(beside.model.parameters()))]["own"] = "something"
    before = copy.copy(beside.ours.state)
    beside.step()
    assert not beside.is_flat
    assert before == beside.ours.state


def test_the_state_is_held_once() -> None:
    beside = Beside(adamw)
    for _ in range(3):
        beside.step()
    storages = {
        value.untyped_storage().data_ptr()
        for state in beside.ours.state.values()
        for name, value in state.items()
        if name != "step" and value.numel()
    }
    assert len(storages) == 2
    beside.resume()
    beside.step()
    beside.step()
    beside.check()
    assert beside.is_flat
