"""The forward pass of a unit of ``fully_shard``, which has its parameters whole only while it runs.

What it returns may not lie in their memory, which is given up after it. And a pass without gradients leaves no weights
in autocast's cache: a later pass that has gradients would use them, and backward bring its gradients to where the first
pass was, after it has left the unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from w5xde_async.errors import UsageError


def keep_apart(unit: nn.Module, name: str, whole: Mapping[str, Tensor], *, is_step: bool = False) -> None:
    """Have a unit return nothing that lies in the memory of its parameters, ``whole`` by their names, and leave no
    casts of a pass without gradients. ``is_step``: it is all of the step, and nothing is computed from what it returns.

    Raises UsageError, when it is called, for what cannot be copied so that gradients keep their bits.
    """
    places = {_place(parameter): (told, None if is_step else parameter) for told, parameter in whole.items()}
    forward, compiler = unit.forward, cast(Any, torch.compiler)
    # A compiled unit compiles what it computes, but nothing of this, as with the hooks of ``fully_shard``.
    leave = compiler.disable(_leave)

    @wraps(forward)
    def computed(*args: Any, **kwargs: Any) -> Any:
        caches = torch.is_autocast_cache_enabled() and not torch.is_grad_enabled()
        if caches:
            torch.set_autocast_cache_enabled(False)
        try:
            result = forward(*args, **kwargs)
        finally:
            if caches:
                torch.set_autocast_cache_enabled(True)
        return leave(name, places, result)

    unit.forward = compiler.disable(computed, recursive=False)


def late_gradient(name: str, unit: str) -> str:
    """What to say of a gradient that came after its unit's were exchanged."""
    return (
        f"the gradient of {name!r} came after backward had left {unit!r}, and would be lost: {unit!r} runs more than "
        "once in a forward pass; put what needs no gradients under torch.no_grad(), or use dp"
    )


_Places = Mapping[int, tuple[str, Tensor | None]]


def _leave(unit: str, places: _Places, result: Any) -> Any:
    """What a unit returns, as it may."""
    found: list[Tensor] = []
    for one in tree_leaves(result):
        if isinstance(one, Tensor):
            if _place(one) in places:
                found.append(one)
        elif hasattr(one, "__dict__") and not isinstance(one, nn.Module | type):
            for held in _held_by(one):
                if (place := _place(held)) in places:
                    raise UsageError(_IN_AN_OBJECT.format(name=places[place][0], unit=unit, kind=type(one).__name__))
    return tree_map(partial(_copied, unit, places, _Copies(found)), result) if found else result


_MOST_LOOKED_AT = 100  # in one container, and of containers: an object may carry a vocabulary, or hold itself


def _held_by(one: Any) -> Iterator[Tensor]:
    """The tensors among an object's attributes, and in containers there; not all, where there are very many."""
    containers: list[Any] = [vars(one)]
    seen = {id(containers[0])}
    for container in containers:  # which grow on the way
        for held in islice(container.values() if isinstance(container, dict) else container, _MOST_LOOKED_AT):
            if isinstance(held, Tensor):
                yield held
            elif (
                isinstance(held, dict | list | tuple | deque)
                and id(held) not in seen
                and len(containers) < _MOST_LOOKED_AT
            ):
                seen.add(id(held))
                containers.append(held)


_IN_AN_OBJECT = (
    "{unit!r} returns its parameter {name!r}, or a view of it, in an object ({kind}), and a rank of an fsdp island has "
    "it only while that module is called: return a copy (.clone()), or tensors, tuples and dicts; or use dp"
)
_CAST_ONCE = (
    "{unit!r} returns its parameter {name!r}, which one process would cast to half precision once for all that use it; "
    "an fsdp island cannot: return a copy (.clone()), or use fp32 or dp"
)


def _copied(unit: str, places: _Places, copies: _Copies, one: Any) -> Any:
    """In other memory, where it lies in a parameter's."""
    if not isinstance(one, Tensor) or (place := _place(one)) not in places:
        return one
    name, parameter = places[place]
    if one is parameter and one.requires_grad and torch.is_autocast_enabled(one.device.type):
        raise UsageError(_CAST_ONCE.format(unit=unit, name=name))
    return cast(Any, _Copied).apply(one, *copies.of(one)) if _has_span(one) else one.clone()


_ALIGNMENT = 256  # bytes: kernels go by how far an address is from a multiple of up to as many


@dataclass(slots=True)
class _Span:
    """Bytes of a parameter's memory that views reach, and their copy."""

    start: int
    end: int
    copy: torch.UntypedStorage | None = None


class _Copies:
    """Copies of what ``tensors`` reach of their memory. Those that overlap have one copy, as they have one memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._spans: dict[int, list[_Span]] = {}
        for place, (start, end) in sorted((_place(one), _reach(one)) for one in tensors if _has_span(one)):
            spans = self._spans.setdefault(place, [])
            if spans and start < spans[-1].end:
                spans[-1].end = max(end, spans[-1].end)
            else:
                spans.append(_Span(start, end))

    def of(self, tensor: Tensor) -> tuple[torch.UntypedStorage, int]:
        """The memory that a tensor's values are copied to, and which byte of theirs is its first."""
        start, end = _reach(tensor)
        span = next(span for span in self._spans[_place(tensor)] if span.start <= start and end <= span.end)
        if span.copy is None:
            span.copy = cast(Any, tensor.untyped_storage()[span.start : span.end]).clone()
        return cast(Any, span.copy), span.start


def _reach(tensor: Tensor) -> tuple[int, int]:
    """From where, aligned, to where in its memory a tensor's values lie, in bytes."""
    first, size = int(tensor.storage_offset()), tensor.element_size()
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = 1 + int(steps) if tensor.numel() else 0
    return first * size // _ALIGNMENT * _ALIGNMENT, (first + count) * size


def _has_span(tensor: Tensor) -> bool:
    """Whether its values are what lies in its memory, by its strides."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_conj() or tensor.is_neg() or _is_wrapped(tensor))


class _Copied(torch.autograd.Function):
    """A tensor with the same values in a copy of its memory, from byte ``start``. Its strides are the same, by which
    kernels go, and its gradient."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, memory: torch.UntypedStorage, start: int) -> Tensor:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = tensor.storage_offset() - start // tensor.element_size()
        return empty.set_(memory, offset, tensor.shape, tensor.stride())

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient, None, None


def _is_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _place(tensor: Tensor) -> int:
    """What of two tensors is equal where they lie in the same memory; 0 where there is none to lie in."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0
