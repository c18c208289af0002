"""Activation checkpointing: a module computes its forward pass once more in backward, to the same bits.

Random numbers are drawn again from where the generators stood, torch's, ``random`` and numpy's. Buffers have had their
change in the first pass, and so have lists and dictionaries that the module was given: the second one works on copies.
Whatever else a module may change or find changed, the second pass gives what the first one gave, or is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from w5xde_async.errors import UsageError
from w5xde_async.params.flat import fingerprints
from w5xde_async.randomness import PythonGenerators

logger = logging.getLogger(__name__)

_WRITTEN = (
    "what {0} is called with is written into in place, and --checkpoint-activations computes {0} from it once more; "
    "write into a copy (inplace=False, x = x + y for x += y), or leave out --checkpoint-activations"
)
#: Of a module that gives something else the second time.
DIFFERS = (
    "{0} does not compute the same a second time, as --checkpoint-activations has it do in backward. What it changes "
    "of what it is called with is changed by then (a cache, an iterator, a torch.Generator of the model's own, an "
    "object that holds a state), or the step has set an attribute or frozen a part of it since: call models of "
    "transformers with use_cache=False, draw from torch's own generators, give and return values; or leave out "
    "--checkpoint-activations. Where it is kernels that add in any order (index_put, scatter_add), --deterministic "
    "takes others"
)
_Buffers = list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]]  # of each module, and what is in them


def checkpointed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` of ``module``, keeping only what it is given, and the buffers.

    Raises UsageError, here or in backward, where something has been written into what it is given, or where the second
    pass gives something else than the first: backward would be another function's.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, Tensor) and not value.is_inference()]
    versions = [tensor._version for tensor in tensors]

    first: _Marks | None = None

    def run(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal first
        if first is None:
            result = forward(*given, **named)
            first = _Marks.of(result)
            return result
        given, named = tree_unflatten(leaves, structure)
        try:
            result = forward(*given, **named)
        except CheckpointError as error:  # more is kept than was
            raise UsageError(DIFFERS.format(_kind(module))) from error
        _require_same(module, first, _Marks.of(result))
        return result

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
    def recomputing() -> Iterator[None]:
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                raise UsageError(_WRITTEN.format(_kind(module)))
        with drawn_from.again(), _with(before):
            yield

    result = checkpoint(  # to the end, and not only to the last thing that is needed: its outputs are compared
        run, args, kwargs, use_reentrant=False, early_stop=False,
        context_fn=lambda: (nullcontext(), _Again(recomputing)),
    )  # fmt: skip
    for number, tensor in enumerate(tensors):
        if tensor._version != versions[number]:
            if tensor._version != versions[number] + 1 or not _is_repeatable(tensor):
                raise UsageError(_WRITTEN.format(_kind(module)))
            versions[number] = tensor._version
    return result


class _Again:
    """What torch makes once and enters at each recomputation; several backward passes may make some."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        entered = self._make()
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


def _kind(module: nn.Module) -> str:
    """Its class, as the job names it: ``fully_shard`` has put one of its own before it."""
    return next(
        kind.__name__
        for kind in type(module).__mro__
        if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule)
    )


class _Marks(NamedTuple):
    """What tells one output of a module from another: bits, by device, which nothing waits for; and shapes."""

    bits: dict[torch.device, Tensor]
    kinds: list[tuple[torch.dtype, torch.Size]]

    @classmethod
    def of(cls, result: Any) -> _Marks:
        found: dict[torch.device, list[Tensor]] = {}
        kinds = []
        for one in tree_leaves(result):
            if isinstance(one, DTensor):
                one = one._local_tensor
            if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided and not one.is_meta:
                kinds.append((one.dtype, one.shape))
                found.setdefault(one.device, []).append(one.detach().resolve_conj().resolve_neg())
        # Views of parameters may be among them, whose memory ``fully_shard`` resizes.
        return cls({at: fingerprints(tensors, at, resized=True) for at, tensors in found.items()}, kinds)

    def is_same(self, other: _Marks) -> bool:
        return self.kinds == other.kinds and all(
            torch.equal(marks, other.bits[device]) for device, marks in self.bits.items()
        )


def _require_same(module: nn.Module, first: _Marks, second: _Marks) -> None:
    """Raises UsageError where they differ; of what a GPU computes at the end of backward, for which it waits then.

    Where its kernels may give other bits each time it is told of.
    """

    def compare() -> None:
        if first.is_same(second):
            return
        text = DIFFERS.format(_kind(module))
        if is_on_host or torch.are_deterministic_algorithms_enabled() or first.kinds != second.kinds:
            raise UsageError(text)
        if type(module) not in _told_of:
            _told_of.add(type(module))
            logger.warning("%s", text)

    is_on_host = all(device.type == "cpu" for device in first.bits)
    if is_on_host or torch._C._current_graph_task_id() < 0:
        compare()
    else:
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(compare)


_told_of: set[type[nn.Module]] = set()


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
