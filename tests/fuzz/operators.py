"""Operators that programs may name against torch's own database of samples and errors, changed at random.

``python tests/fuzz/operators.py --cases 300`` captures what ``op_db`` calls, changes every call (numbers to extremes,
sizes, repeated rows, missing rows, empty tensors, indices out of range), and has each that the check lets through
computed, forward and backward, in a child whose tensors lie between pages that nobody may touch (guarded.c). A call
must be refused, raise, or give what the check said it would. Whatever ends the child is printed with its arguments.
``--precision bf16`` does it as workers of half precision do: the check on fake tensors, all of it under autocast.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from w5xde_async.compute.block import autocast
from w5xde_async.compute.program.interpreter import Scale
from w5xde_async.compute.program.operators import NAMES, Operator, find

__all__ = ["Call", "Case", "capture", "cases_of", "changed", "derived", "judge", "run_in_children", "warm"]

_MAX_NUMEL = 1 << 16
_DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class Call:
    """One call of an overload as ``op_db`` makes it. Tensors are the captured ones, other arguments literals."""

    name: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]


class _Capture(SchemaCheckMode):
    """Notes calls before autograd and decompositions, where traces note them too."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name in NAMES and len(self.calls) < 4096:
            self.calls.append(Call(name, tuple(_copied(list(args))), _copied(dict(kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> bool:
    """Whether a program could hold it: dense tensors of listed dtypes, literals."""
    if isinstance(value, Tensor):
        return (
            value.layout is torch.strided and value.device.type == "cpu" and value.numel() <= _MAX_NUMEL
            and not value.is_complex() and not value.is_quantized and value.dtype in _KNOWN
        )  # fmt: skip
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(
        value, (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    )


_KNOWN = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
}  # fmt: skip


def capture(
    *, per_name: int, per_op: int = 24, only: Callable[[str], bool] = lambda name: True
) -> dict[str, list[Call]]:
    """Distinct calls by overload, at most ``per_name`` each. ``only`` picks the database's operators by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, dict[str, Call]] = {}
    for info in op_db:
        if not only(info.name):
            continue
        for dtype in _DTYPES:
            if dtype not in info.dtypes:
                continue
            noted = _Capture()
            for sample in _samples(info, dtype, per_op):
                try:
                    with enable_python_dispatcher(), noted:
                        info.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:
                    continue
            for call in noted.calls:
                calls = found.setdefault(call.name, {})
                if len(calls) < per_name and _plain(list(call.arguments)) and _plain(call.named):
                    calls.setdefault(_form(call), call)
    return {name: list(calls.values()) for name, calls in sorted(found.items())}


def derived(corpus: dict[str, list[Call]]) -> dict[str, list[Call]]:
    """``corpus``, calls made by hand, and of overloads that have neither such that are made of their relatives'."""
    found = {**corpus, **{name: [*by_hand(name), *corpus.get(name, [])] for name in _BY_HAND}}
    for name in sorted(NAMES - set(found)):
        base, _, overload = name.partition(".")
        calls: list[Call] = []
        relatives = [other for other in corpus if other.partition(".")[0] in (base.rstrip("_"), base.strip("_"))]
        for other in relatives:
            for call in corpus[other]:
                arguments = list(call.arguments)
                if "Scalar" in overload and len(arguments) > 1 and isinstance(arguments[1], Tensor):
                    arguments[1] = 2 if not arguments[1].is_floating_point() else 1.5
                if "Scalar_Self" in overload or (base == "pow" and overload == "Scalar"):
                    arguments[0] = 1.5
                calls.append(Call(name, tuple(arguments), call.named))
        found[name] = calls
    return {name: calls for name, calls in sorted(found.items()) if calls}


def by_hand(name: str) -> list[Call]:
    named = {"rounding_mode": "trunc"} if name.endswith("_mode") else {}
    if name.startswith("norm.") and name.endswith("dtype"):
        named = {"dtype": torch.float64}
    return [Call(name, tuple(made), named) for made in _BY_HAND.get(name, [])]


def _gates(count: int, *, layers: int = 1, inputs: int = 3, hidden: int = 4) -> list[Tensor]:
    made = []
    for layer in range(layers):
        width = hidden if layer else inputs
        rows = count * hidden
        made += [torch.randn(rows, width), torch.randn(rows, hidden), torch.randn(rows), torch.randn(rows)]
    return made


def _recurrent(count: int) -> list[list[Any]]:
    given, state = torch.randn(5, 2, 3), torch.randn(1, 2, 4)
    states: Any = [state, state.clone()] if count == 4 else state
    return [
        [given, states, _gates(count), True, 1, 0.0, train, False, False] for train in (True, False)
    ] + [[given.transpose(0, 1).contiguous(), states, _gates(count), True, 1, 0.0, True, False, True]]  # fmt: skip


def _cell(count: int) -> list[list[Any]]:
    state = torch.randn(2, 4)
    states: Any = [state, state.clone()] if count == 4 else state
    return [[torch.randn(2, 3), states, *_gates(count)]]


def _resized(axes: int, *, linear: bool) -> list[list[Any]]:
    given = torch.randn(2, 3, *[4 + axis for axis in range(axes)])
    middle = [False] if linear else []
    return [[given, [7] * axes, *middle, *[scale] * axes] for scale in (None, 2.0, 1e-30, 0.5)]


#: Where the check sees other sizes or dtypes than are computed. The first run is held to the check: it is refused where
#: more than a floating-point dtype differs.
DIFFERENCES = {
    "nanmean.default": "over no axes at all its meta function keeps every axis",
    "nansum.default": "over no axes at all its meta function keeps every axis",
    "normal.Tensor_Tensor": "of unlike dtypes its meta function takes another",
    "normal.Tensor_float": "the kernel keeps the dtype of whole numbers where there are none",
    "native_dropout.default": "of no elements the kernel's mask is of the input's dtype",
    "pixel_unshuffle.default": "of no elements the kernel keeps the sizes",
    "binary_cross_entropy.default": "under autocast the kernel casts a weight of float64",
}
#: What of the database does not apply, by what is common to it.
NOT_APPLICABLE = {
    "operators that programs may not name": "refused by their name, whatever their arguments",
    "complex, quantized, sparse and nested tensors, tensors on other devices": "no program can hold them",
    f"tensors of more than {_MAX_NUMEL} elements": "the same kernels as for fewer, in more time",
    "error inputs that Python refuses": "an overload is never reached",
}

_WHOLE = torch.tensor([3, -7, 5, 0])
_LEAST = torch.full((4,), -(1 << 31), dtype=torch.int32)
_LABELS = torch.tensor([0, 2, 1, 1])
_BY_HAND: dict[str, list[list[Any]]] = {
    "lstm.input": _recurrent(4), "gru.input": _recurrent(3), "rnn_tanh.input": _recurrent(1),
    "rnn_relu.input": _recurrent(1), "lstm_cell.default": _cell(4), "gru_cell.default": _cell(3),
    "rnn_tanh_cell.default": _cell(1), "rnn_relu_cell.default": _cell(1),
    "upsample_nearest1d.default": _resized(1, linear=False), "upsample_nearest2d.default": _resized(2, linear=False),
    "upsample_nearest3d.default": _resized(3, linear=False), "upsample_linear1d.default": _resized(1, linear=True),
    "upsample_bilinear2d.default": _resized(2, linear=True), "upsample_bicubic2d.default": _resized(2, linear=True),
    "upsample_trilinear3d.default": _resized(3, linear=True),
    "nll_loss.default": [[torch.randn(4, 3), _LABELS, torch.rand(3), 1, -100], [torch.randn(4, 3), _LABELS]],
    "nll_loss2d.default": [[torch.randn(2, 3, 2, 2), torch.randint(3, (2, 2, 2)), torch.rand(3), 1, -100]],
    "convolution.default": [
        [torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(4), [1, 1], [1, 1], [1, 1], turned, [0, 0], 1]
        for turned in (False, True)
    ],
    **{
        f"__{name}__.{kind}": [[_WHOLE, _WHOLE if kind == "Tensor" else 3]]
        for name in ("and", "or", "xor") for kind in ("Tensor", "Scalar")
    },
    "norm.ScalarOpt_dtype": [[torch.randn(3, 4), 2]], "norm.ScalarOpt_dim_dtype": [[torch.randn(3, 4), 2, [1], False]],
    **{
        name: [[_WHOLE, 2], [_LEAST, (1 << 32) - 1], [_LEAST, 1 << 32]]
        for name in ("div.Tensor_mode", "div.Scalar_mode", "div_.Tensor_mode", "div_.Scalar_mode", "remainder.Scalar",
                     "fmod.Scalar", "floor_divide.default", "floor_divide.Scalar")
    },
    "avg_pool2d.default": [
        [torch.full((1, 1, 4, 4), -(1 << 63)), [1, 1], [1, 1], [0, 0], False, True, by] for by in (1, -1)
    ],
    "avg_pool3d.default": [
        [torch.full((1, 1, 4, 4, 4), -(1 << 63)), [1] * 3, [1] * 3, [0] * 3, False, True, by] for by in (1, -1)
    ],
    "median.dim": [[torch.randn(5, 7), 0], [torch.zeros(1).expand(9), 0]],
    "scaled_dot_product_attention.default": [
        [torch.randn(1, 2, 3, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, 5, 8)] for keys in (5, 1)
    ],
    "index.Tensor": [[torch.randn(3, 4), [_LABELS % 3, torch.tensor(1)]]],
    "unbind.int": [[torch.randn(3, 2), 0]],
    "split.Tensor": [[torch.randn(6, 2), 2, 0]], "chunk.default": [[torch.randn(6, 2), 2, 0]],
    "native_dropout.default": [[torch.randn(5, 5), 0.5, True]],
    "contiguous.default": [[torch.randn(3, 4)]], "clamp.default": [[torch.randn(5), 0, 1], [torch.arange(5), None, 3]],
    "bernoulli_.float": [[torch.randn(5), 0.5]], "bernoulli.p": [[torch.randn(5), 0.5]],
    "to.other": [[torch.randn(3), torch.arange(3)]], "type_as.default": [[torch.randn(3), torch.arange(3)]],
    "randperm.default": [[9]], "split.sizes": [[torch.randn(6, 2), [2, 4], 0]],
    "copy_.default": [[torch.randn(3, 4), torch.randn(4)]],
    "normal.float_Tensor": [[0.0, torch.rand(4)]],
    "adjoint.default": [[torch.randn(2, 3)]], "alias.default": [[torch.randn(3)]],
    "_softmax.default": [[torch.randn(3, 4), 1, False]], "_log_softmax.default": [[torch.randn(3, 4), 1, False]],
    "_to_copy.default": [[torch.randn(3)]], "concat.default": [[[torch.randn(2, 3), torch.randn(2, 3)], 0]],
    "lift_fresh_copy.default": [[torch.randn(3)]], "meshgrid.default": [[[torch.randn(3), torch.randn(2)]]],
    "moveaxis.int": [[torch.randn(2, 3, 4), 0, 1]], "moveaxis.intlist": [[torch.randn(2, 3, 4), [0, 1], [1, 2]]],
    "swapaxes.default": [[torch.randn(2, 3), 0, 1]], "swapdims.default": [[torch.randn(2, 3), 0, 1]],
    "col2im.default": [
        [torch.randn(2, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]],
        [torch.randn(12, 4), [5, 6], [2, 3], [2, 1], [1, 0], [3, 2]],
        [torch.randn(1, 4, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]],
    ],
    "rand_like.default": [[torch.randn(3)]], "norm.Scalar": [[torch.randn(3, 4), 2]],
    "norm.ScalarOpt_dim": [[torch.randn(3, 4), 2, [1], False]],
}  # fmt: skip


def _samples(info: Any, dtype: torch.dtype, most: int) -> Iterator[Any]:
    torch.manual_seed(0)
    try:
        for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=False)):
            if number >= most:
                break
            yield sample
        if info.error_inputs_func is not None and dtype is torch.float32:
            for number, error in enumerate(info.error_inputs("cpu")):
                if number >= most:
                    break
                yield error.sample_input
    except Exception:
        return  # this torch's own samples do not hold for this dtype


def _form(call: Call) -> str:
    def of(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype}{list(value.shape)}"
        if isinstance(value, list):
            return str([of(item) for item in value])
        return repr(value)

    return f"{[of(item) for item in call.arguments]} { {key: of(item) for key, item in call.named.items()} }"


# -- changes ---------------------------------------------------------------------------------------------------

_INTS = (
    0,
    1,
    -1,
    2,
    -2,
    3,
    7,
    1 << 20,
    1 << 31,
    -(1 << 31),
    (1 << 31) - 1,
    (1 << 8) - 1,
    1 << 32,  # 0 in 32 bits, and the one before -1
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 62,
)
_FLOATS = (0.0, -1.0, 1.0, 0.5, 1e-30, -1e-30, 1e30, -1e30, 1e300, 5e-324, math.inf, -math.inf, math.nan, 2.0**63)
_STRINGS = ("none", "tanh", "trunc", "floor", "valid", "same", "constant", "reflect", "replicate", "circular", "ij",
            "xy", "sum", "prod", "mean", "amax", "amin")  # fmt: skip


@dataclass
class Made:
    """A tensor of a changed call: a dense one and views over it, made anew on each device. One is ``fake``: the CPU
    without memory, within a FakeTensorMode."""

    base: Tensor
    views: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def on(self, device: str) -> Tensor:
        made = (
            self.base.clone()
            if device == "cpu"
            else torch.empty(self.base.shape, dtype=self.base.dtype, device="meta" if device == "meta" else "cpu")
        )
        for name, arguments in self.views:
            made = getattr(made, name)(*arguments)
        return made

    def __repr__(self) -> str:
        shown = f"{str(self.base.dtype).removeprefix('torch.')}{list(self.base.shape)}"
        values = f"={self.base.reshape(-1)[:6].tolist()}" if not self.base.is_floating_point() else ""
        return shown + values + "".join(f".{name}{arguments}" for name, arguments in self.views)


@dataclass
class Case:
    """A changed call."""

    name: str
    arguments: list[Any]
    named: dict[str, Any]

    def on(self, device: str, *, grad: bool = False) -> tuple[list[Any], dict[str, Any]]:
        def of(value: Any) -> Any:
            if isinstance(value, Made):
                made = value.on(device)
                return made.requires_grad_() if grad and made.is_leaf and made.is_floating_point() else made
            if isinstance(value, list):
                return [of(item) for item in value]
            return torch.device("meta" if device == "meta" else "cpu") if isinstance(value, torch.device) else value

        return [of(item) for item in self.arguments], {key: of(item) for key, item in self.named.items()}

    def __repr__(self) -> str:
        return f"{self.name}{self.arguments}{self.named or ''}"


def changed(call: Call, draw: random.Random, changes: int) -> Case:
    """``call`` with ``changes`` of its arguments changed."""
    operator = find(call.name)
    assert operator is not None

    def made(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Made(value.contiguous())
        return [made(item) for item in value] if isinstance(value, list) else value

    arguments = [made(item) for item in call.arguments]
    named = {key: made(item) for key, item in call.named.items()}
    optional = {parameter.name for parameter in operator.parameters if parameter.optional}
    kinds = {parameter.name: parameter.kind for parameter in operator.parameters}
    positional = [parameter for parameter in operator.parameters if not parameter.keyword]
    for _ in range(changes):
        places: list[Any] = [*range(len(arguments)), *named]
        if not places:
            break
        place = draw.choice(places)
        of = positional[place].name if isinstance(place, int) and place < len(positional) else str(place)
        store: Any = arguments if isinstance(place, int) else named
        if of in optional and draw.random() < 0.1:
            store[place] = None
        else:
            store[place] = _other(store[place], draw) if store[place] is not None else _some(kinds.get(of, ""), draw)
    if draw.random() < 0.2:  # an argument that the sample leaves at its default
        for parameter in operator.parameters[len(arguments) :]:
            if parameter.name not in named and draw.random() < 0.3:
                value = None if parameter.name == "pin_memory" else _some(parameter.kind, draw)
                if value is not None:
                    named[parameter.name] = value
    return Case(call.name, arguments, named)


def _some(kind: str, draw: random.Random) -> Any:
    """A value where there was none; None for kinds that have no plain ones."""
    if kind in ("float", "number"):
        return draw.choice(_FLOATS)
    if kind == "int":
        return draw.choice(_INTS)
    return draw.random() < 0.5 if kind == "bool" else None


def _other(value: Any, draw: random.Random) -> Any:
    if isinstance(value, Made):
        return _other_tensor(value, draw)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((*_INTS, value + 1, value - 1, -value))
    if isinstance(value, float):
        return draw.choice(_FLOATS)
    if isinstance(value, str):
        return draw.choice(_STRINGS) if value in _STRINGS else value
    if isinstance(value, torch.dtype):
        return draw.choice(sorted(_KNOWN, key=str))
    if isinstance(value, list):
        items = list(value)
        kind = draw.randrange(4)
        if kind == 0 and items:
            items.pop(draw.randrange(len(items)))
        elif kind == 1 and items:
            items.append(draw.choice(items))
        elif kind == 2:
            items.reverse()
        if items and (kind == 3 or draw.random() < 0.5):
            at = draw.randrange(len(items))
            items[at] = _other(items[at], draw)
        return items
    return value


def _other_tensor(made: Made, draw: random.Random) -> Made:
    base, views = made.base, list(made.views)
    shape = made.on("meta").shape
    axes = len(shape)
    axis = draw.randrange(axes) if axes else 0
    kind = draw.randrange(15)
    if kind == 0 and axes:  # repeated along an axis, without memory
        size = draw.choice((2, 3, 7, 64, 1 << 20))
        views += [("select", (axis, 0)), ("unsqueeze", (axis,))] if shape[axis] else []
        views.append(("expand", (*shape[:axis], size if shape[axis] else 0, *shape[axis + 1 :])))
    elif kind == 1 and axes and shape[axis]:
        views.append(("narrow", (axis, draw.randrange(2) if shape[axis] > 1 else 0, shape[axis] - 1)))
    elif kind == 2 and axes:
        views.append(("narrow", (axis, 0, 0)))
    elif kind == 3 and axes > 1:
        views.append(("transpose", (axis, draw.randrange(axes))))
    elif kind == 4:
        views.append(("unsqueeze", (axis,)))
    elif kind == 5 and axes and shape[axis]:
        views.append(("select", (axis, 0)))
    elif kind == 6 and not base.is_floating_point() and base.dtype != torch.bool:
        base = base.clone()
        info = torch.iinfo(base.dtype)
        values = [v for v in (*_INTS, info.min, info.max) if info.min <= v <= info.max]
        if base.numel():
            base.view(-1)[draw.randrange(base.numel())] = draw.choice(values)
    elif kind == 7 and not base.is_floating_point() and base.dtype != torch.bool:
        info = torch.iinfo(base.dtype)
        base = torch.full_like(
            base, draw.choice([v for v in (-1, 0, 1, info.min, info.max) if info.min <= v <= info.max])
        )
    elif kind == 8 and base.is_floating_point():
        base = torch.full_like(base, draw.choice((math.inf, math.nan, 0.0, -6e4, 6e4, 1e-7, -0.5)))
    elif kind == 9:
        base = base.to(draw.choice(sorted(_KNOWN, key=str)))
    elif kind == 10 and axes:
        views.append(("repeat_interleave", (2, axis)))
    elif kind == 11 and axes and shape[axis] == 1:
        views.append(("expand", (*shape[:axis], draw.choice((2, 5, 100)), *shape[axis + 1 :])))
    elif kind == 12 and axes:
        views.append(("flatten", ()))
    elif kind == 13 and axes and 0 not in shape:  # as large as before, of one element along an axis, or along all
        for one in range(axes) if draw.random() < 0.3 else [axis]:
            views += [("select", (one, 0)), ("unsqueeze", (one,))]
        views.append(("expand", tuple(shape)))
    elif kind == 14 and axes > 1:  # as large as before, its axes in another order in memory
        order = draw.sample(range(axes), axes)
        views += [("permute", tuple(order)), ("contiguous", ())]
        views.append(("permute", tuple(order.index(one) for one in range(axes))))
    return Made(base, views)


# -- judging ---------------------------------------------------------------------------------------------------

MEMORY_BYTES = 64 << 20


def judge(case: Case, precision: str = "fp32") -> str:
    """``refused`` by the check, ``raised`` by the kernel, ``equal``; or what differs from what the check saw."""
    operator = find(case.name)
    assert operator is not None
    half = autocast(precision)
    try:
        case.on("meta")
    except (RuntimeError, IndexError):
        return "impossible"
    try:
        with torch.no_grad(), FakeTensorMode() if half else nullcontext(), (half or nullcontext)():
            arguments, named = case.on("fake" if half else "meta")
            seen = Scale(MEMORY_BYTES).weighed(operator)(*arguments, **named)
    except Exception:
        return "refused"
    torch.manual_seed(0)
    try:
        arguments, named = case.on("cpu", grad=True)
        with (half or nullcontext)():
            got = _called(operator, arguments, named)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return "raised"
    expected, found = _shapes(seen), _shapes(got)
    try:
        losses = [t.float().sum() for t in _tensors(got) if t.grad_fn is not None and t.is_floating_point()]
        if losses:
            sum(losses).backward()  # type: ignore[union-attr]
    except (RuntimeError, IndexError):
        return "raised"
    return "equal" if expected == found else f"the check saw {expected}, computed was {found}"


def _called(operator: Operator, arguments: list[Any], named: dict[str, Any]) -> Any:
    if any(parameter.writes for parameter in operator.parameters):
        arguments = [a.detach().clone() if isinstance(a, Tensor) and a.requires_grad else a for a in arguments]
        with torch.no_grad():
            return operator.call(*arguments, **named)
    return operator.call(*arguments, **named)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _shapes(value: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in _tensors(value)]


# -- children --------------------------------------------------------------------------------------------------


@dataclass
class Verdicts:
    """What came of one operator's cases."""

    counts: dict[str, int] = field(default_factory=dict)
    deaths: list[tuple[str, str]] = field(default_factory=list)  # (how, case)
    differences: list[tuple[str, str]] = field(default_factory=list)


def cases_of(calls: list[Call], count: int, seed: str) -> list[Case]:
    draw = random.Random(seed)
    return [
        changed(calls[n % len(calls)], draw, 0 if n < len(calls) else 1 + min(int(draw.expovariate(1.2)), 4))
        for n in range(count)
    ]


def warm(corpus: dict[str, list[Call]], precision: str = "fp32") -> None:
    """Import what meta functions import at their first use, once for all children."""
    for name in ("add.Tensor", "convolution.default", "mm.default", "upsample_nearest1d.default"):
        for call in corpus.get(name, [])[:1]:
            judge(changed(call, random.Random(0), 0), precision)


def run_in_children(
    cases: list[Case], *, precision: str = "fp32", most_deaths: int = 4, seconds: float = 6.0
) -> Verdicts:
    """Judge cases in forked children, a new one behind each death. The caller has computed with one thread."""
    verdicts = Verdicts()
    at, shared = 0, mmap.mmap(-1, 8)
    while at < len(cases) and len(verdicts.deaths) < most_deaths:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _child(cases, at, shared, writer, seconds, precision)
        os.close(writer)
        with os.fdopen(reader, "r") as lines:
            for line in lines:
                verdict, said = json.loads(line)
                kind = verdict if verdict in ("equal", "refused", "raised", "impossible") else "different"
                verdicts.counts[kind] = verdicts.counts.get(kind, 0) + 1
                if kind == "different":
                    verdicts.differences.append((verdict, said))
        _, status = os.waitpid(child, 0)
        at = struct.unpack("q", shared[:8])[0]
        if os.WIFSIGNALED(status):
            verdicts.deaths.append((signal.Signals(os.WTERMSIG(status)).name, repr(cases[at])))
            at += 1
        else:
            assert at == len(cases), f"a child ended at {at} of {len(cases)}"
    return verdicts


def _child(cases: list[Case], start: int, shared: mmap.mmap, writer: int, seconds: float, precision: str) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # counts what it computes, not what others do
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        guard = getattr(ctypes.CDLL(None), "guarded_begin", None)
        if guard is not None:
            guard()
        with os.fdopen(writer, "w") as out:
            for number in range(start, len(cases)):
                shared[:8] = struct.pack("q", number)
                signal.setitimer(signal.ITIMER_PROF, seconds)
                verdict = judge(cases[number], precision)
                signal.setitimer(signal.ITIMER_PROF, 0)
                out.write(json.dumps([verdict, repr(cases[number]) if verdict.startswith("the") else ""]) + "\n")
                out.flush()
        shared[:8] = struct.pack("q", len(cases))
        code = 0
    finally:
        os._exit(code)


def guarded_library(folder: Path) -> Path | None:
    """The allocator with guard pages, compiled; None without a compiler."""
    source = Path(__file__).with_name("guarded.c")
    target = folder / "guarded.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(target), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return target


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--cases", type=int, default=100, help="of each overload")
    flags.add_argument("--per-name", type=int, default=12, help="distinct calls of each that are changed")
    flags.add_argument("--seed", default="0")
    flags.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    flags.add_argument("--by-hand", action="store_true", help="only overloads whose calls are made by hand: seconds")
    flags.add_argument("--only", default="", help="overloads whose name holds this, with commas between them")
    flags.add_argument("--op", default="", help="operators of the database whose name holds this")
    args = flags.parse_args()
    if "LD_PRELOAD" not in os.environ and sys.platform == "linux":
        with tempfile.TemporaryDirectory() as folder:
            library = guarded_library(Path(folder))
            if library is not None:
                raise SystemExit(
                    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.fuzz.operators", *sys.argv[1:]],
                                   env={**os.environ, "LD_PRELOAD": str(library)}, check=False).returncode
                )  # fmt: skip
            print("no C compiler: tensors lie beside each other, and what reads beside one may not be found")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    wanted = [part for part in args.only.split(",") if part]
    if args.by_hand:
        corpus = {name: by_hand(name) for name in sorted(_BY_HAND)}
    else:
        corpus = derived(capture(per_name=args.per_name, only=lambda name: args.op in name))
    print(
        f"{sum(map(len, corpus.values()))} calls of {len(corpus)} overloads in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    missing = sorted(NAMES - set(corpus))
    if not args.op and not args.by_hand:
        print("without a sample:", *missing)
    warm(corpus, args.precision)
    total: dict[str, int] = {}
    deaths = 0
    for name, calls in corpus.items():
        if wanted and not any(part in name for part in wanted):
            continue
        verdicts = run_in_children(cases_of(calls, args.cases, f"{args.seed}:{name}"), precision=args.precision)
        for kind, count in verdicts.counts.items():
            total[kind] = total.get(kind, 0) + count
        for how, case in verdicts.deaths:
            deaths += 1
            print(f"{how}: {case}", flush=True)
        for what, case in [] if name in DIFFERENCES else verdicts.differences[:2]:
            print(f"DIFFERENT {case}: {what[:300]}", flush=True)
    print(total, f"{deaths} deaths, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
