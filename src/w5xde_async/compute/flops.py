"""How much arithmetic a call does, by the shapes of its operators.

Counts what torch's own formulas know (matrix products, convolutions, attention), forward and backward, while the call
runs as ever: every operator is passed on unchanged, so the bits are the same. Nothing is counted inside what
``torch.compile`` has made. ``torch.utils.flop_counter.FlopCounterMode`` does more than is wanted here: it hooks every
module of the process, other threads' too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_T = TypeVar("_T")


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it would import it: two seconds

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += self._counted(formula(*args, **kwargs, out_val=result), args)
        return result

    def _counted(self, flops: int, args: Sequence[Any]) -> int:
        return flops


class _CountingStep(_Counting):  # type: ignore[no-untyped-call]
    """Counts backward too, which need not run: a product is there two more products, one for each of its factors that
    has a gradient."""

    def _counted(self, flops: int, args: Sequence[Any]) -> int:
        factors = [one for one in args if isinstance(one, Tensor) and one.ndim > 1]  # not the bias
        return flops * (1 + min(2, sum(factor.requires_grad for factor in factors)))


def counting_flops(call: Callable[[], _T]) -> tuple[_T, int]:
    """``call``'s result and the floating-point operations it took; a multiply and an add are two."""
    with _Counting() as counting:
        result = call()
    return result, counting.flops


def count_step(forward: Callable[[], object]) -> int:
    """Floating-point operations of a forward pass, which is run, and its backward pass, which is not."""
    with torch.enable_grad(), _CountingStep() as counting:
        forward()
    return int(counting.flops)
