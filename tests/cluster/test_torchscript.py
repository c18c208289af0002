"""Models in TorchScript, whole or in part, given as they are or made by a function: the bits of those in Python.

Of larger parts than these the JIT changes last bits itself, once it has seen a few calls of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.support import jobs, reference
from tests.support.cluster import train
from torch import Tensor, nn

from w5xde_async.updates.config import UpdateConfig

# It is deprecated, and used.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _traced(module: nn.Module) -> nn.Module:
    begun = copy.deepcopy(module.state_dict())
    traced = torch.jit.trace(module, torch.zeros(2, 64), check_trace=False)
    module.load_state_dict(begun)  # batch norm has counted
    return traced  # type: ignore[no-any-return]


class Net(nn.Module):
    """A weight that two layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.b(self.a(x))))  # type: ignore[no-any-return]


class Parts(nn.Module):
    """Parts that are compiled, each by itself, and have a weight that another part has, too, and a list."""

    def __init__(self, compiled: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        second.weight = first.weight
        self.first, self.second = compiled(first), compiled(second)
        self.norm, self.head = compiled(nn.BatchNorm1d(64)), nn.Linear(64, 10)
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x))) @ self.weights[0])  # type: ignore[no-any-return]


def _whole(compiled: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return compiled(Net())


def _parts(compiled: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return Parts(compiled)


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize("compiled", [torch.jit.script, _traced], ids=["scripted", "traced"])
@pytest.mark.parametrize("make", [_whole, _parts], ids=["whole", "parts"])
async def test_a_run_has_the_bits_of_the_model_in_python(
    make: Callable[[Callable[[nn.Module], nn.Module]], nn.Module],
    compiled: Callable[[nn.Module], nn.Module],
    given: bool,
) -> None:
    job = replace(jobs.mlp_sgd(), max_steps=3)

    def made() -> nn.Module:
        return make(compiled)

    expected = reference.digest(replace(job, model=lambda: make(_as_it_is)))
    result = await train(lambda: replace(job, model=made() if given else made), workers=2)
    assert result.digest == expected


@pytest.mark.parametrize("rule", ["async", "local"])
async def test_a_model_that_is_given_is_trained_under_every_rule(rule: str) -> None:
    job = replace(jobs.mlp_sgd(), max_steps=4)
    model = _parts(torch.jit.script)
    begun = [parameter.detach().clone() for parameter in model.parameters()]
    await train(lambda: replace(job, model=model), update=UpdateConfig(rule=rule))
    assert not any(map(torch.equal, begun, model.parameters()))
