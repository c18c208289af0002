"""A module computed once more in backward: with what it was given, or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from w5xde_async.errors import UsageError
from w5xde_async.parallel.recomputing import checkpointed


def test_a_relu_that_writes_into_the_input_after_the_module_is_refused() -> None:
    """Its second pass would begin with what the ReLU has left."""
    module = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    out = checkpointed(module, module.forward, x) + torch.relu_(x)
    with pytest.raises(UsageError, match="what Sequential is called with is written into in place"):
        out.sum().backward()


def test_a_relu_that_begins_the_module_may_write_into_its_input() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    data = torch.randn(3, 4)
    gradients: list[Tensor] = []
    for forward in (module, lambda x: checkpointed(module, module.forward, x)):
        x = data.clone().requires_grad_()
        forward(x * 1.0).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_what_was_made_without_versions_may_be_given() -> None:
    with torch.inference_mode():
        mask = torch.ones(4)
    module = nn.Linear(4, 4)
    checkpointed(module, lambda x, given: module(x) + given, torch.randn(3, 4), mask).sum().backward()
    assert module.weight.grad is not None


def test_what_is_drawn_from_random_and_numpy_is_drawn_again() -> None:
    """And whoever draws next draws what he would have drawn."""

    def scaled(x: Tensor) -> Tensor:
        return torch.tanh(module(x) * random.random()) * float(np.random.rand())

    module, data = nn.Linear(4, 4), torch.randn(3, 4)
    found: list[tuple[Tensor, float, float]] = []
    for forward in (scaled, lambda x: checkpointed(module, scaled, x)):
        random.seed(3)
        np.random.seed(3)
        x = data.clone().requires_grad_()
        result = forward(x)
        after = random.random()
        result.sum().backward()
        assert x.grad is not None
        found.append((x.grad, after, random.random() + float(np.random.rand())))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_a_dictionary_that_the_module_takes_from_is_given_once_more() -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given: dict[str, Tensor], seen: list[int]) -> Tensor:
            seen.append(len(seen))
            return torch.tanh(self.layer(given.pop("x"))) * len(seen)

    module, data = Taking(), torch.randn(3, 4)
    gradients: list[Tensor] = []
    for forward in (module, lambda given, seen: checkpointed(module, module.forward, given, seen)):
        x, seen = data.clone().requires_grad_(), list[int]()
        given = {"x": x * 1.0}
        forward(given, seen).sum().backward()
        assert (given, seen) == ({}, [0])
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


class Scaled(nn.Module):
    """By what ``taken`` takes of what it is given."""

    scale = 1.0

    def __init__(self, taken: Callable[[Any], float | Tensor]) -> None:
        super().__init__()
        self.layer, self._taken = nn.Linear(4, 4), taken

    def forward(self, x: Tensor, given: Any) -> tuple[Tensor, list[Tensor]]:
        return x, [torch.tanh(self.layer(x)) * self._taken(given) * self.scale]


class Kept(list[float]):
    """torch does not look into one."""


def _appended(kept: Kept) -> int:
    kept.append(1.0)
    return len(kept)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (iter([1.0, 2.0, 3.0]), next),
        (Kept(), _appended),
        (torch.Generator().manual_seed(1), lambda generator: torch.rand((), generator=generator)),
    ],
)
def test_a_module_that_gives_something_else_the_second_time_is_refused(given: Any, taken: Any) -> None:
    """Backward would be another function's."""
    module = Scaled(taken)
    _, [out] = checkpointed(module, module.forward, torch.randn(3, 4), given)
    with pytest.raises(UsageError, match=r"^Scaled does not compute the same a second time.*use_cache=False"):
        out.sum().backward()


def test_a_module_whose_attribute_is_set_anew_before_its_second_pass_is_refused() -> None:
    module = Scaled(float)
    _, [out] = checkpointed(module, module.forward, torch.randn(3, 4), 2.0)
    module.scale = 3.0
    with pytest.raises(UsageError, match="or the step has set an attribute"):
        out.sum().backward()


def test_a_module_that_keeps_more_the_second_time_is_refused() -> None:
    """As one of which the step has frozen a part while it ran forward."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].requires_grad_(False)
    out = checkpointed(module, module.forward, torch.randn(3, 4))
    module[2].requires_grad_(True)
    with pytest.raises(UsageError, match="Sequential does not compute the same a second time"):
        out.sum().backward()


def test_outputs_that_lie_otherwise_or_are_no_plain_tensors_are_compared_as_far_as_they_are() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            out = torch.tanh(self.layer(x))
            waves = torch.fft.fft(out).conj()
            rest = (out.new_empty(0, 3), None, "word", out > 0)
            return {"t": out.t()[1:], "wide": out.sum().expand(3, 5), "waves": waves, "rest": rest,
                    "sparse": out.to_sparse(), "whole": torch.arange(3), "half": out.bfloat16()[:, ::2]}  # fmt: skip

    module = Odd()
    out = checkpointed(module, module.forward, torch.randn(3, 4))
    (out["t"].sum() + out["waves"].real.sum() + out["wide"].sum() + out["half"].float().sum()).backward()
    assert module.layer.weight.grad is not None


def test_several_backward_passes_compute_it_once_more_each() -> None:
    module, data, found = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4), list[Tensor]()
    for forward in (module, lambda x: checkpointed(module, module.forward, x)):
        module.zero_grad()
        out = forward(data)
        torch.autograd.grad(out.sum(), module[0].bias, retain_graph=True)
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1].sum().backward()
        assert module[0].weight.grad is not None
        found.append(module[0].weight.grad.clone())
    assert torch.equal(*found)


def test_a_unit_may_go_back_through_itself_before_it_has_ended() -> None:
    """As for a penalty of what it gives by what it is given."""

    class Slope(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(self[0](x).square().sum(), x, create_graph=True)
            return torch.tanh(slope)

    module, data, found = Slope(nn.Linear(4, 4)), torch.randn(3, 4), list[Tensor]()
    for forward in (module, lambda x: checkpointed(module, module.forward, x)):
        module.zero_grad()
        forward(data.clone().requires_grad_()).sum().backward()
        assert module[0].weight.grad is not None
        found.append(module[0].weight.grad.clone())
    assert torch.equal(*found)


def test_a_pass_without_gradients_is_made_once() -> None:
    calls = list[int]()

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return x

    with torch.no_grad():
        checkpointed(nn.Linear(4, 4), forward, torch.randn(3, 4))
    assert calls == [1]
