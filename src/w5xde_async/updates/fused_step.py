"""Fused steps of Adam and AdamW on the CPU: torch's own kernel, given its lists as they are.

A small model's fused step is one kernel of some microseconds. ``Optimizer.step`` takes several times as long around
it: for the profiler, for hooks, and to gather and group by device what is the same in every step. So the lists are
kept, and what the groups say (rates, weight decay) is read in every step. The bits are those of the optimizer's own
step, whose operations these are, and its state is always whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from w5xde_async.params.flat import ResultVector


@dataclass(slots=True)
class _Part:
    """What is stepped of one group: lists with an entry for each parameter."""

    indices: list[int] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    largest: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)


class FusedStep:
    """Makes an optimizer's steps once it has made one itself; in the thread that owns it."""

    def __init__(self, optimizer: torch.optim.Adam, parameters: Sequence[tuple[int, Tensor]]) -> None:
        """``parameters``: those that are trained, with their places in the layout."""
        self._optimizer, self._places = optimizer, {id(tensor): index for index, tensor in parameters}
        self._parts: list[_Part] = []
        self._for: tuple[frozenset[int], list[tuple[int, bool]]] | None = None  # steps that ``_parts`` are for
        self._next: frozenset[int] = frozenset()  # what is untouched in the step that ``ready`` was asked for
        self._last: frozenset[int] | None = None  # and in the optimizer's last own step, if it made one

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[int, Tensor]]) -> bool:
        """Whether these steps can be made so."""
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        return all(group["fused"] for group in optimizer.param_groups) and all(
            parameter.dtype is torch.float32 and parameter.device.type == "cpu" for _, parameter in parameters
        )

    def ready(self, untouched: Collection[int]) -> bool:
        """Whether the next step may be ``step``. Else it is to be the optimizer's own, which begins states."""
        now = frozenset(untouched), [(len(group["params"]), group["amsgrad"]) for group in self._optimizer.param_groups]
        self._next = now[0]
        if self._for != now:
            self._for = None
            if self._last != now[0] or not self._build(now[0]):
                return False
            self._for = now
        return all(group["fused"] and not isinstance(group["lr"], Tensor) for group in self._optimizer.param_groups)

    def note_own_step(self) -> None:
        """The optimizer has made the step itself that was not ``ready``, by way of which its state is there."""
        self._last = self._next

    @torch.no_grad()
    def step(self, gradients: ResultVector) -> None:
        """The optimizer's step, with these gradients."""
        of: Sequence[Any] = gradients.gradients
        for group, part in zip(self._optimizer.param_groups, self._parts, strict=True):
            if not part.indices:
                continue
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            beta1, beta2 = group["betas"]
            torch._foreach_add_(part.steps, 1)
            kernel(
                part.parameters, [of[index] for index in part.indices], part.averages, part.squares, part.largest,
                part.steps, amsgrad=group["amsgrad"], lr=float(group["lr"]), beta1=float(beta1), beta2=float(beta2),
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"], grad_scale=None,
                found_inf=None,
            )  # fmt: skip

    def settle(self) -> None:
        """The optimizer's own state is up to date."""

    def forget(self) -> None:
        """The next step is the optimizer's own: its state may be another then."""
        self._parts, self._for, self._last = [], None, None

    def _build(self, untouched: frozenset[int]) -> bool:
        """The lists. Whether all that they need is there."""
        self._parts = []
        for group in self._optimizer.param_groups:
            part = _Part()
            for parameter in group["params"]:
                index, state = self._places.get(id(parameter)), self._optimizer.state.get(parameter)
                if index is None or index in untouched:
                    continue
                if not state or (group["amsgrad"] and "max_exp_avg_sq" not in state):
                    return False
                part.indices.append(index)
                part.parameters.append(parameter)
                part.averages.append(state["exp_avg"])
                part.squares.append(state["exp_avg_sq"])
                part.steps.append(state["step"])
                if group["amsgrad"]:
                    part.largest.append(state["max_exp_avg_sq"])
            self._parts.append(part)
        return True
