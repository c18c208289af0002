"""What torch's kernels do not check themselves, or check too late: looked at before each call, on sizes alone.

A meta function says which sizes an operator gives; some accept what the kernel for the CPU then reads or writes beside
its tensors for. The rules here were found by tests/fuzz/operators.py. They see sizes, dtypes and numbers, never values
of tensors: those are for the process that a stranger's program runs in to survive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from w5xde_async.compute.program.operators import Operator

#: Tensors that one call may give: each takes memory of its own, even without elements.
MAX_RESULTS = 1 << 15

_Named = Mapping[str, Any]


def check(operator: Operator, arguments: Sequence[Any], named: _Named, *, memory_bytes: int) -> None:
    """Raises ValueError for a call that must not be made."""
    given = {parameter.name: value for parameter, value in zip(operator.parameters, arguments, strict=False)}
    given.update(named)
    if not operator.aliases:  # expanded ones are small until a kernel copies them
        _fits(given, memory_bytes)
    reduction = given.get("reduction", 1)
    _need(type(reduction) is not int or 0 <= reduction <= 2, f"reduction is {reduction}")  # kernels take others for one
    base = operator.base.rstrip("_")
    rule = _RULES.get(base) or (_resized if base.startswith("upsample_") else None)
    if rule is not None:
        rule(given)
    elif base in _GATES:
        _recurrent(base, given)


def check_view(arguments: Sequence[Any], named: _Named, result: Any, *, memory_bytes: int) -> None:
    """Raises ValueError for a view of a part of what is too large: backward makes a gradient of all of it."""
    views = [one for one in (result if isinstance(result, (list, tuple)) else (result,)) if isinstance(one, Tensor)]
    least = min([view.numel() for view in views], default=0)
    bases = [one for one in (*arguments, *named.values()) if isinstance(one, Tensor) and one.numel() > least]
    _fits({"what is viewed in part": bases}, memory_bytes)


def _fits(given: _Named, memory_bytes: int) -> None:
    for name, value in given.items():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and tensor.numel() * tensor.element_size() > memory_bytes:
                raise ValueError(f"{name} has {tensor.numel()} elements, more than {memory_bytes} bytes")


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)


def _few_results(count: int) -> None:
    _need(count <= MAX_RESULTS, f"{count} results, more than {MAX_RESULTS}")


def _size(given: _Named) -> int:
    tensor, dim = given["self"], given.get("dim", 0)
    _need(isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim(), f"there is no axis {dim}")
    return int(tensor.shape[dim])


def _unbind(given: _Named) -> None:
    _few_results(_size(given))


def _split(given: _Named) -> None:
    size = given.get("split_size", 0)
    if isinstance(size, int):
        _need(size > 0, f"split_size is {size}")
        _few_results(-(-_size(given) // size))


def _sections(given: _Named) -> None:
    _few_results(given.get("chunks", given.get("sections", 0)))


def _difference(given: _Named) -> None:
    times = given.get("n", 1)
    _need(times <= _MAX_DIFFERENCES, f"differences taken {times} times, more than {_MAX_DIFFERENCES}")


def _resized(given: _Named) -> None:
    """Kernels divide by a scale and take what comes of it for a place in the input."""
    scales = [value for name, value in given.items() if name.startswith("scale") and isinstance(value, (int, float))]
    scales += given.get("scale_factors") or []
    for scale in scales:
        _need(2.0**-20 <= scale <= 2.0**20, f"a scale of {scale}")
    tensor, size = given.get("self", given.get("input")), given.get("output_size")
    if not isinstance(tensor, Tensor) or size is None:
        return
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[len(size)]
    for before, after, name in zip(tensor.shape[2:], size, names, strict=False):
        by = given.get(name)
        _need(by is None or abs(before * by - after) < 2, f"{name} is {by} from {before} to {after}")


_GATES = {
    "lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1, "lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1,
    "rnn_relu_cell": 1,
}  # fmt: skip
_MAX_LAYERS = 1 << 10
_MAX_PASSES = 1 << 14  # of a recurrent operator: steps by layers and directions; each takes a millisecond to check
_MAX_DIFFERENCES = 1 << 10


def _recurrent(base: str, given: _Named) -> None:
    """Kernels read weights and biases as long as the hidden state says."""
    state = given.get("hx")
    states: list[Any] = list(state) if isinstance(state, (list, tuple)) else [state]
    gates, data = _GATES[base], given["input"]
    _need(len(states) == (2 if base.startswith("lstm") else 1), f"{len(states)} states")
    _need(
        all(isinstance(one, Tensor) and one.shape == states[0].shape for one in states),
        "states of unlike sizes, as of an LSTM with proj_size",
    )
    if base.endswith("_cell"):
        _need(data.dim() == 2 and states[0].dim() == 2 and data.shape[0] == states[0].shape[0], "a batch and its state")
        weights = [given.get(name) for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
        _weights(gates, data.shape[1], states[0].shape[1], weights)
        return
    layers, ways = given["num_layers"], 2 if given["bidirectional"] else 1
    _need(1 <= layers <= _MAX_LAYERS, f"{layers} layers")
    _need(0.0 <= given["dropout"] <= 1.0, f"dropout of {given['dropout']}")
    _need(data.dim() == 3 and states[0].dim() == 3, "a sequence and its states have three axes")
    batch, hidden = data.shape[0 if given["batch_first"] else 1], states[0].shape[2]
    passes = data.shape[1 if given["batch_first"] else 0] * layers * ways
    _need(passes <= _MAX_PASSES, f"{passes} steps of all layers, more than {_MAX_PASSES}")
    _need(tuple(states[0].shape) == (layers * ways, batch, hidden), f"states of {list(states[0].shape)}")
    params, per_layer = given["params"], 4 if given["has_biases"] else 2
    _need(len(params) == layers * ways * per_layer, f"{len(params)} weights for {layers} layers")
    for number in range(layers * ways):
        width = data.shape[2] if number < ways else hidden * ways
        one = list(params[number * per_layer : (number + 1) * per_layer])
        _weights(gates, width, hidden, one + [None] * (4 - per_layer))


def _weights(gates: int, inputs: int, hidden: int, weights: Sequence[Tensor | None]) -> None:
    rows = gates * hidden
    for tensor, wanted in zip(weights, ((rows, inputs), (rows, hidden), (rows,), (rows,)), strict=True):
        if tensor is None:
            _need(len(wanted) == 1, "a weight is missing")
            continue
        _need(tuple(tensor.shape) == wanted, f"a weight of {list(tensor.shape)} in place of {list(wanted)}")
        _need(tensor.is_contiguous(), "a weight that is not contiguous")


def _division(given: _Named) -> None:
    """Of whole numbers: a divisor of 0, or of -1 under the smallest number, ends the process."""
    divided, by = given["self"], given["other"]
    if any(_floating(value) for value in (divided, by)):
        return
    if isinstance(by, Tensor):
        _need(by.dtype in (torch.uint8, torch.bool), "a whole number divided by a tensor of signed ones")
    else:
        _need(_left(by, torch.result_type(divided, by)) not in (0, -1), f"a whole number divided by {by}")


def _left(number: int, dtype: torch.dtype) -> int:
    """What kernels that compute in ``dtype`` take ``number`` for: they keep its low bits."""
    if dtype == torch.bool:
        return int(bool(number))
    info = torch.iinfo(dtype)
    return (number - info.min) % (1 << info.bits) + info.min


def _median(given: _Named) -> None:
    """Along an axis that repeats one element the kernel reads memory beside it."""
    tensor = given["self"]
    if "dim" in given and tensor.dim() and _size(given) > 1:
        _need(tensor.stride(given["dim"]) != 0, "a median along an axis that repeats one element")


def _attention(given: _Named) -> None:
    """In half precision kernels take the values' length for that of the keys too, and say nothing."""
    key, value = given["key"], given["value"]
    _need(key.dim() > 1 and value.dim() > 1, "keys and values have a length and features")
    _need(key.shape[-2] == value.shape[-2], f"{key.shape[-2]} keys and {value.shape[-2]} values")
    if given.get("enable_gqa"):  # the queries' heads are divided by their numbers
        _need(key.dim() > 2 and value.dim() > 2 and key.shape[-3] > 0 and value.shape[-3] > 0, "keys without heads")


def _pooled(given: _Named) -> None:
    by = given.get("divisor_override")
    _need(by is None or _floating(given["self"]) or by not in (0, -1), f"a whole number divided by {by}")


def _true_division(given: _Named) -> None:
    if given.get("rounding_mode") is not None:  # without one it is done in floating point
        _division(given)


def _floating(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else type(value) is float


_RULES: Mapping[str, Callable[[_Named], None]] = {
    "unbind": _unbind, "split": _split, "chunk": _sections, "tensor_split": _sections, "diff": _difference,
    "floor_divide": _division, "remainder": _division, "fmod": _division, "div": _true_division,
    "median": _median, "scaled_dot_product_attention": _attention, "avg_pool2d": _pooled, "avg_pool3d": _pooled,
}  # fmt: skip
