"""The first gradients of a sum are copied to where they belong, not added to zeros.

A sum begins as zeros that gradients are added to: a pass over memory that fills it, and one that reads it again. Of a
large parameter both are saved: it has no gradient when backward begins, so that autograd leaves what it has computed,
and a hook copies that while it is in the cache. A sum's zeros are -0.0, so that the bits are the same.

Invariants: before backward and after it every parameter's gradient is the one that is summed, and what got none holds
-0.0; how often a gradient was written is counted as if it had been added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from w5xde_async.compute.block import GRADIENTS_CHANGED
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout

_LARGE = 1 << 18  # values, beyond which a pass over memory takes longer than what is called in its place


class FirstGradients:
    """Of one model on the CPU. ``parameters``: its trainable ones by entry.

    To be made before anybody else has hooks called when gradients have landed: where somebody has had some before,
    who may want to see the sum, parameters are left as they are.
    """

    def __init__(self, layout: Layout, parameters: Sequence[tuple[int, Any]]) -> None:
        self._large = [
            (at, parameter)
            for at, (_, parameter) in enumerate(parameters)
            if parameter.numel() > _LARGE and not parameter._post_accumulate_grad_hooks
        ]
        self._rest = _between(layout, [parameters[at][0] for at, _ in self._large])
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._landed, at)) for at, parameter in self._large
        ]
        self._gradients: Sequence[tuple[Any, Tensor]] = ()  # where each is to land
        self._fresh = False  # nothing has landed in the vector that was reset last
        self._awaited: set[int] = set()  # of those whose first gradient is to come, or was when a pass broke off

    def reset(self, vector: ResultVector) -> None:
        """Make ``vector`` the neutral element; of large parameters, by what lands first."""
        self._fresh = bool(self._large)
        vector.reset(self._rest if self._fresh else None)

    def begin(self, gradients: Sequence[tuple[Any, Tensor]]) -> None:
        """Backward begins: ``gradients`` holds parameters, and where theirs lands. Raises TypeError where one is
        another."""
        if not self._fresh:
            return
        self._fresh, self._gradients = False, gradients
        for at, parameter in self._large:
            if parameter.grad is not gradients[at][1]:
                raise TypeError(GRADIENTS_CHANGED)
            self._awaited.add(at)
            parameter.grad = None

    def _landed(self, at: int, parameter: Any) -> None:
        if at not in self._awaited:
            return
        self._awaited.discard(at)
        gradient, first = self._gradients[at][1], parameter.grad
        if first.layout is torch.strided:
            gradient.copy_(first)
        else:
            gradient.data.fill_(-0.0)
            gradient.add_(first)
        parameter.grad = gradient

    def end(self) -> None:
        """Backward has ended: what got no gradient is the neutral element."""
        while self._awaited:
            at = self._awaited.pop()
            parameter, gradient = self._gradients[at]
            gradient.data.fill_(-0.0)
            if parameter.grad is None:
                parameter.grad = gradient


def _between(layout: Layout, entries: Sequence[int]) -> list[tuple[int, int, int]]:
    """(group, begin, end) of what a result vector has beside these."""
    found: list[tuple[int, int, int]] = []
    for group in layout.groups:
        if group.role == "frozen":
            continue
        begin = 0
        for entry in sorted((layout.entries[i] for i in entries if layout.entries[i].group == group.index),
                            key=lambda entry: entry.offset):  # fmt: skip
            if entry.offset > begin:
                found.append((group.index, begin, entry.offset))
            begin = entry.offset + entry.numel
        if group.numel > begin:
            found.append((group.index, begin, group.numel))
    return found
