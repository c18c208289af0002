"""How much arithmetic a call does, by the shapes of its operators.

Counts what torch's own formulas know (matrix products, convolutions, attention), forward and backward, while the call
runs as ever: every operator is passed on unchanged, so the bits are the same. Nothing is counted inside what
``torch.compile`` has made. ``torch.utils.flop_counter.FlopCounterMode`` does more than is wanted here: it hooks every
module of the process, other threads' too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_T = TypeVar("_T")


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

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
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def counting_flops(call: Callable[[], _T]) -> tuple[_T, int]:
    """``call``'s result and the floating-point operations it took; a multiply and an add are two."""
    with _Counting() as counting:
        result = call()
    return result, counting.flops
