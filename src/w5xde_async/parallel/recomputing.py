"""Activation checkpointing: a module computes its forward pass once more in backward, to the same bits.

Random numbers are drawn again from where the generators stood, torch's, ``random`` and numpy's. Buffers have had their
change in the first pass, and so have lists and dictionaries that the module was given: the second one works on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from w5xde_async.errors import UsageError
from w5xde_async.randomness import PythonGenerators

_WRITTEN = (
    "what {0} is called with is written into in place, and --checkpoint-activations computes {0} from it once more; "
    "write into a copy (inplace=False, x = x + y for x += y), or leave out --checkpoint-activations"
)
_Buffers = list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]]  # of each module, and what is in them


def checkpointed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` of ``module``, keeping only what it is given, and the buffers.

    Raises UsageError, here or in backward, where something has been written into what it is given: the second pass
    would begin with that, and backward be another function's.
    """
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, Tensor) and not value.is_inference()]
    versions = [tensor._version for tensor in tensors]

    recomputes = False

    def run(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if recomputes:
            given, named = tree_unflatten(leaves, structure)
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
    drawn_from = PythonGenerators()

    @contextmanager
    def again() -> Iterator[None]:
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                raise UsageError(_WRITTEN.format(type(module).__name__))
        with drawn_from.again(), _with(before):
            yield

    result = checkpoint(run, args, kwargs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))
    recomputes = True
    for number, tensor in enumerate(tensors):
        if tensor._version != versions[number]:
            if tensor._version != versions[number] + 1 or not _is_repeatable(tensor):
                raise UsageError(_WRITTEN.format(type(module).__name__))
            versions[number] = tensor._version
    return result


def _is_repeatable(written: Tensor) -> bool:
    """Whether what was last written into a tensor is what it would become once more, as of ``ReLU(inplace=True)``."""
    return type(written.grad_fn).__name__ in ("ReluBackward0", "HardtanhBackward0")


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
