"""Every module of torch's own test database, trained by a run and by the plain loop: the same bits.

Of each module all of the database's inputs for training are taken, one leaf each: a model holds one module an input, so
that every leaf touches other parameters and buffers than its neighbours. Inputs that require a gradient are multiplied
by a parameter, so that modules without parameters have something to train too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support import reference
from tests.support.cluster import train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.job import Job
from w5xde_async.params.flat import digest, named_digest
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.telemetry.events import Event, StepCommitted

if TYPE_CHECKING:
    from torch.testing._internal.common_modules import ModuleInfo

STEPS = 2
MOST_INPUTS = 5  # of one module, spread over the database's; ``--all-differential`` takes them all
PARTS = 11  # of the database, a test each
#: Functions of positive numbers: the database's inputs give them NaN for a gradient, in plain PyTorch too.
POSITIVE = {"nn.LPPool1d", "nn.LPPool2d", "nn.LPPool3d", "nn.KLDivLoss", "nn.PoissonNLLLoss"}

#: What does not apply, and why. ``test_what_is_excluded_does_not_pass`` fails for an entry that would pass.
EXCLUDED: dict[str, str] = {}


@cache
def database() -> dict[str, ModuleInfo]:
    """Its import takes longer than most tests, in every process that collects them: only here."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def inputs_of(name: str, dtype: torch.dtype, most: int) -> list[Any]:
    info = database()[name]
    seed_all(0)
    found = list(info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True))
    return found[:: max(1, len(found) // most)][:most]


class Cases(nn.Module):
    """One module and one gain for each of the database's inputs."""

    def __init__(self, name: str, dtype: torch.dtype, most: int) -> None:
        super().__init__()
        info, self.cases = database()[name], nn.ModuleList()
        self.calls: list[tuple[Any, Any]] = []
        for case in inputs_of(name, dtype, most):
            given = case.constructor_input
            module = info.module_cls(*given.args, **given.kwargs).to(dtype)
            args, kwargs = case.forward_input.args, case.forward_input.kwargs
            if info.is_lazy:
                with torch.no_grad():
                    module(*args, **kwargs)  # as the error says that refuses a lazy one
            positive = name in POSITIVE
            self.calls.append((_marked(args, positive), _marked(kwargs, positive)))
            self.cases.append(module)
        self.gains = nn.Parameter(torch.ones(len(self.cases), dtype=dtype))

    def forward(self, case: int, factor: Tensor) -> Tensor:
        args, kwargs = self.calls[case]
        gain = self.gains[case] * factor.to(self.gains.dtype)
        output = self.cases[case](*_times(args, gain), **_times(kwargs, gain))
        weights = [torch.cos(torch.arange(piece.numel()).view(piece.shape) * 1.0) for piece in _floats(output)]
        terms = [(piece.float() * weight).sum() for piece, weight in zip(_floats(output), weights, strict=True)]
        return torch.stack(terms).sum() / max(1, sum(weight.numel() for weight in weights))


class Collection(nn.Module):
    """The cases of several modules, by number."""

    def __init__(self, names: Sequence[str], dtype: torch.dtype, most: int) -> None:
        super().__init__()
        self.modules_of = nn.ModuleDict({name.replace(".", "_"): Cases(name, dtype, most) for name in names})
        self.places = [(key, case) for key, held in self.modules_of.items() for case in range(len(held.cases))]

    def forward(self, number: int, factor: Tensor) -> Tensor:
        key, case = self.places[number]
        loss: Tensor = self.modules_of[key](case, factor)
        return loss


@dataclasses.dataclass(frozen=True)
class Trained:
    """An input that the database gives a gradient."""

    value: Tensor


def _marked(value: Any, positive: bool) -> Any:
    if isinstance(value, Tensor):
        held = value.detach()
        if positive and held.is_floating_point():
            held = held.abs().nan_to_num(1.0) + 0.1
        return Trained(held) if value.requires_grad and value.is_floating_point() else held
    if type(value) in (tuple, list):
        return type(value)(_marked(item, positive) for item in value)
    if type(value) is dict:
        return {key: _marked(item, positive) for key, item in value.items()}
    return value


def _times(value: Any, gain: Tensor) -> Any:
    if isinstance(value, Trained):
        return value.value * gain
    if type(value) in (tuple, list):
        return type(value)(_times(item, gain) for item in value)
    if type(value) is dict:
        return {key: _times(item, gain) for key, item in value.items()}
    return value


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floats(item)


def _step(model: nn.Module, batch: Any) -> Tensor:
    number, factor = batch
    loss: Tensor = model(int(number[0]), factor[0])
    return loss


def job(
    names: Sequence[str], made: list[nn.Module], *, dtype: torch.dtype = torch.float32, most: int = MOST_INPUTS
) -> Job:
    """A step has every input of the modules once, in the order of the seed. ``made`` gets the models."""

    def model() -> nn.Module:
        made.append(Collection(names, dtype, most))
        return made[-1]

    with random_state():
        count = sum(len(inputs_of(name, dtype, most)) for name in names)
    return Job(
        model=model, step=_step, dataset=TensorDataset(torch.arange(count), torch.linspace(0.8, 1.0, count)),
        batch_size=count, microbatch_size=1, max_steps=STEPS, seed=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )  # fmt: skip


async def differing(names: Sequence[str], **changes: Any) -> list[str]:
    """Tensors of a run with two workers that are not the plain loop's, to the last bit."""
    plain, ours = list[nn.Module](), list[nn.Module]()
    expected, losses = reference.train(job(names, plain, **changes))
    events: list[Event] = []
    result = await train(lambda: job(names, ours, **changes), workers=2, events=events, code_free=False,
                         max_time_s=100.0)  # fmt: skip
    assert result.outcome == "finished"
    mine = ours[0].state_dict()  # the coordinator's, which it trains in place
    wrong = [name for name, value in expected.state_dict().items() if digest([value]) != digest([mine[name]])]
    assert [event.loss for event in events if isinstance(event, StepCommitted)] == pytest.approx(
        losses, rel=1e-5, nan_ok=True
    )
    assert wrong or result.digest == named_digest(expected)
    return wrong


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's of itself
@pytest.mark.parametrize("part", range(PARTS))
async def test_a_run_has_the_bits_of_the_plain_loop(part: int, request: pytest.FixtureRequest) -> None:
    whole = request.config.getoption("--all-differential")
    names = [name for name in database() if name not in EXCLUDED][part::PARTS]
    assert await differing(names, most=1 << 20 if whole else MOST_INPUTS) == []
    if whole:
        for dtype in (torch.bfloat16, torch.float16):
            for name in names:
                if _plain_trains(name, dtype):
                    assert await differing([name], dtype=dtype) == [], (name, dtype)


def _plain_trains(name: str, dtype: torch.dtype) -> bool:
    """Whether plain PyTorch has kernels for it, and finite gradients."""
    try:
        reference.train(job([name], [], dtype=dtype))
    except (RuntimeError, NotImplementedError, AssertionError):
        return False
    return True


async def test_what_is_excluded_does_not_pass() -> None:
    for name in EXCLUDED:
        with pytest.raises(Exception):  # noqa: B017, PT011
            assert await differing([name]) == []
