"""Activation checkpointing: a module computes its forward pass once more in backward, to the same bits.

Random numbers are drawn again from where the generator stood. Buffers have had their change in the first pass: the
second one works on copies, made before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_Buffers = list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]]  # of each module, and what is in them


def checkpointed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` of ``module``, keeping only what it is given, and the buffers."""

    def run(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return forward(*given, **named)

    copies: dict[int, Tensor] = {}
    before: _Buffers = [
        (
            of._buffers,
            {
                name: None if buffer is None else copies.setdefault(id(buffer), buffer.detach().clone())
                for name, buffer in of._buffers.items()
            },
        )
        for of in module.modules()
        if of._buffers
    ]
    return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=lambda: (nullcontext(), _with(before)))


def checkpoint_units(units: Iterable[nn.Module]) -> None:
    """Have these modules compute their forward pass once more in backward."""
    for unit in units:
        unit.forward = partial(checkpointed, unit, unit.forward)


@contextmanager
def _with(before: _Buffers) -> Iterator[None]:
    own = [dict(buffers) for buffers, _ in before]
    for buffers, copies in before:
        buffers.update(copies)
    try:
        yield
    finally:
        for (buffers, _), held in zip(before, own, strict=True):
            buffers.update(held)
