"""A module computed once more in backward: with what it was given, or not at all."""

from __future__ import annotations

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
