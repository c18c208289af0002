"""How much arithmetic a call does, by the shapes of its operators.

Counts what torch's own formulas know (matrix products, convolutions, attention) and what those below add to them,
forward and backward, while the call runs as ever: every operator is passed on unchanged, so the bits are the same.
What takes a few operations for each number that it reads (sums, norms, look-ups, interpolation) is not counted, nor is
anything inside what ``torch.compile`` has made. ``torch.utils.flop_counter.FlopCounterMode`` does more than is wanted
here: it hooks every module of the process, other threads' too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_T = TypeVar("_T")

_NATIVE = ("aten", "prim", "prims")  # operators of torch; others are somebody's own


def _recurrence(weights: Iterable[Tensor], rows: Tensor) -> int:
    """Each time step of each sequence (``rows`` has its features in its last dimension) goes through all matrices."""
    return 2 * rows.numel() // rows.shape[-1] * sum(weight.numel() for weight in weights if weight.ndim > 1)


def _attention(*given: Any) -> int:
    return int(sdpa_flop_count(*(one.shape for one in given[:3])))  # type: ignore[no-untyped-call]


def _attention_backward(*given: Any) -> int:
    return int(sdpa_backward_flop_count(*(one.shape for one in given[:4])))  # type: ignore[no-untyped-call]


def _trilinear(one: Tensor, two: Tensor, three: Tensor, *expanded: Sequence[int]) -> int:
    shapes = []
    for tensor, dims in zip((one, two, three), expanded, strict=False):
        shape = list(tensor.shape)
        for dim in dims:
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _groups(one: Tensor, two: Tensor, *_: Any) -> int:
    both = one.ndim == two.ndim == 3  # otherwise each row, or column, belongs to one of them
    return 2 * one.shape[-2] * one.shape[-1] * two.shape[-1] * (one.shape[0] if both else 1)


def _decomposition(matrix: Tensor, *_: Any) -> int:
    """As of a product: what it is times that, from a third of it to ten times it, depends on the kind."""
    return 2 * matrix.numel() * min(matrix.shape[-2:])


#: Of operators that torch's counter does not know: what they take, given their arguments by position.
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::mkldnn_rnn_layer": lambda rows, *rest: _recurrence(rest[:4], rows),
    "aten::mkldnn_rnn_layer_backward": lambda rows, *rest: 2 * _recurrence(rest[:4], rows),
    "aten::_cudnn_rnn": lambda rows, weights, *_: _recurrence(weights, rows),
    "aten::_cudnn_rnn_backward": lambda rows, weights, *_: 2 * _recurrence(weights, rows),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_trilinear": _trilinear,
    "aten::mv": lambda matrix, _: 2 * matrix.numel(),
    "aten::addmv": lambda _, matrix, *__: 2 * matrix.numel(),
    "aten::addbmm": lambda _, one, two: 2 * one.numel() * two.shape[-1],
    "aten::_euclidean_dist": lambda one, two: 2 * one.numel() * two.shape[-2],
    "aten::_cdist_forward": lambda one, two, *_: 2 * one.numel() * two.shape[-2],
    "aten::_grouped_mm": _groups,
    "aten::_sparse_addmm": lambda _, sparse, dense: 2 * sparse._nnz() * dense.shape[-1],
    **{
        f"aten::{name}": _decomposition
        for name in (
            "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "cholesky_inverse",
            "cholesky_solve", "linalg_cholesky_ex", "linalg_eig", "linalg_householder_product", "linalg_inv_ex",
            "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex", "linalg_matrix_exp", "linalg_qr",
            "linalg_solve_triangular",
        )
    },
}  # fmt: skip


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int = 0
        self.complete = True  # nothing was met that cannot be counted

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
        elif (own := _FORMULAS.get(func._schema.name)) is not None:
            self.flops += self._counted(own(*args), args)
        elif func.namespace not in _NATIVE:
            self.complete = self.complete and not any(isinstance(one, nn.Parameter) for one in args)
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


def count_step(forward: Callable[[], object]) -> int | None:
    """Floating-point operations of a forward pass, which is run, and its backward pass, which is not; None where an
    operator that is not torch's own has some of the model's weights."""
    with torch.enable_grad(), _CountingStep() as counting:
        forward()
    return int(counting.flops) if counting.complete else None
