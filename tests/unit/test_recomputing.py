"""A module computed once more in backward: with what it was given, or not at all."""

from __future__ import annotations

import dataclasses
import itertools
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
        return x, [torch.tanh(self.layer(x) * self._taken(given) * self.scale)]


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


@dataclasses.dataclass
class Result:
    """torch does not look into one."""

    hidden: Tensor


class Masked(nn.Module):
    """By its own generator, in the last thing that it does, for ``leave`` to leave somewhere."""

    aux: Tensor

    def __init__(self, leave: Callable[[Masked, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.own, self._leave = nn.Linear(4, 4), torch.Generator().manual_seed(3), leave

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        return self._leave(self, out * torch.rand(out.shape, generator=self.own).round())


def _as_attribute(module: Masked, made: Tensor) -> Tensor:
    module.aux = made
    return made.new_ones(())


@pytest.mark.parametrize(
    ("leave", "found"),
    [
        (lambda module, made: made, lambda module, result: result),
        (lambda module, made: Result(made), lambda module, result: result.hidden),
        (lambda module, made: (made.new_ones(()), Result(made)), lambda module, result: result[1].hidden),
        (_as_attribute, lambda module, result: module.aux),
    ],
)
def test_what_a_module_computes_is_compared_wherever_it_leaves_it(leave: Any, found: Any) -> None:
    module = Masked(leave)
    out = found(module, checkpointed(module, module.forward, torch.randn(3, 4)))
    with pytest.raises(UsageError, match="Masked does not compute the same a second time"):
        out.sum().backward()


def test_what_backward_does_not_need_may_be_another_the_second_time() -> None:
    """A number, of which backward has the first; a sum, which has the same gradient whatever it is added to."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.layer(x)) * self.calls + torch.ones(4) * self.calls

    data, found = torch.randn(3, 4), list[Tensor]()
    module = Counting()
    for forward in (module, lambda x: checkpointed(module, module.forward, x)):
        module.calls = 0
        module.zero_grad()
        forward(data).sum().backward()
        assert module.layer.weight.grad is not None
        found.append(module.layer.weight.grad.clone())
    assert module.calls == 2
    assert torch.equal(*found)


def test_memory_that_a_kernel_keeps_and_does_not_fill_is_not_compared() -> None:
    """An LSTM's on the CPU."""
    module = nn.LSTM(4, 4)

    fills = itertools.count()

    def forward(x: Tensor) -> Tensor:
        # What is given next had other bytes.
        for tensor in [torch.empty(size, dtype=torch.uint8) for size in range(256, 40_000, 256)]:
            tensor.fill_(next(fills) % 251)
        del tensor
        out: Tensor = module(x)[0]
        return out

    found, data = list[Tensor](), torch.randn(5, 3, 4)
    for compute in (forward, lambda x: checkpointed(module, forward, x)):
        module.zero_grad()
        compute(data).sum().backward()
        assert module.weight_ih_l0.grad is not None
        found.append(module.weight_ih_l0.grad.clone())
    assert torch.equal(*found)


def test_a_module_that_takes_another_of_its_layers_the_second_time_is_refused() -> None:
    class Turns(nn.ModuleList):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self[self.calls % 2](x)
            return out

    module = Turns(nn.Linear(4, 4, bias=False) for _ in range(2))
    out = checkpointed(module, module.forward, torch.randn(3, 4, requires_grad=True))
    with pytest.raises(UsageError, match="Turns does not compute the same a second time"):
        out.sum().backward()


def test_a_module_that_overwrites_what_backward_needs_of_it_is_refused_as_without() -> None:
    """Its second pass does so, too: both leave the same, which is not what the gradient is of."""

    class Doubling(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x).exp().mul_(2)

    module = Doubling(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(torch.randn(3, 4)).sum().backward()
    out = checkpointed(module, module.forward, torch.randn(3, 4))
    with pytest.raises(UsageError, match="Doubling writes in place into what backward needs of it"):
        out.sum().backward()


@pytest.mark.parametrize("drawn", [False, True])
def test_what_is_packed_may_lie_otherwise_or_be_no_plain_tensor(drawn: bool) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.own = nn.Linear(4, 4), torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            waves, rows = torch.fft.fft(out).conj(), out.t()[1:]
            noise = torch.randn(3, 4, generator=self.own) if drawn else torch.ones(3, 4)
            sparse = noise.to_sparse()
            return (
                (waves * waves).real.sum() + rows.exp().sum() + (out.sum().expand(3, 5) ** 2).sum()
                + (out.bfloat16()[:, ::2] ** 2).sum() + torch.sparse.mm(sparse, out.t()).sum()
                + (out.new_empty(0, 4) * out[:0]).sum()
            )  # fmt: skip

    data, found = torch.randn(3, 4), list[Tensor]()
    module = Odd()
    for forward in (module, lambda x: checkpointed(module, module.forward, x)):
        module.zero_grad()
        out = forward(data)
        if drawn and forward is not module:
            with pytest.raises(UsageError, match="Odd does not compute the same a second time"):
                out.backward()
            return
        out.backward()
        assert module.layer.weight.grad is not None
        found.append(module.layer.weight.grad.clone())
    assert torch.equal(*found)


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
