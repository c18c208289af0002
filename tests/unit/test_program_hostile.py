"""What a hostile coordinator may send: every program here is refused, and nothing of it is computed with memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.programs import (
    CONSTANT,
    FIRST_NODE,
    FROZEN,
    SEEN,
    B,
    W,
    X,
    Y,
    document,
    listed,
    load,
    tiny_layout,
    tree,
    v,
)
from tests.support.resident import forget_peak, peak_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from w5xde_async.compute.block import autocast
from w5xde_async.compute.program import program_job
from w5xde_async.compute.program.form import LIMITS, Document, Node, Ref, parse
from w5xde_async.compute.program.interpreter import _KEEP_NOTHING, measure
from w5xde_async.compute.program.operators import NAMES, SCALARS, find
from w5xde_async.errors import ProgramRefused
from w5xde_async.params.layout import Layout

N = FIRST_NODE
HUGE = 1 << 62

Make = Callable[[], Document]


def one(operator: str, *arguments: Any, **named: Any) -> Make:
    """A good program with this call before it."""
    return lambda: document((operator, list(arguments), [[name, value] for name, value in named.items()]))


def whole(**parts: Any) -> Make:
    return lambda: document(**parts)


def whole_of(*calls: Any) -> Make:
    return lambda: document(*calls)


def changed(change: Callable[[list[Any]], object]) -> Make:
    """A good program of which ``change`` changed something in place."""

    def make() -> Document:
        made = tree()
        change(made)
        return Document(msgpack.packb(made), (torch.ones(3),))

    return make


def so_many(count: int) -> Document:
    """Such a node so many times before those that a program has anyway."""
    made = tree(("relu.default", [v(X)]))
    first, *others = map(msgpack.packb, nodes_of(made))
    before, _, after = msgpack.packb(made).partition(msgpack.packb(nodes_of(made)))
    announced = b"\xdd" + (count + len(others)).to_bytes(4, "big")
    return Document(before + announced + first * count + b"".join(others) + after, (torch.ones(3),))


def nodes_of(made: list[Any]) -> list[Any]:
    found: list[Any] = made[7][0][1]
    return found


def deep(depth: int) -> Document:
    inside: Any = 1
    for _ in range(depth):
        inside = [5, [inside]]
    return document(("view.default", [v(X), inside]))


def views_of_everything(num_views: int) -> Document:
    """Each node may be a view of every tensor of the batch and of every constant."""
    made = tree()
    num = LIMITS.constants
    made[5], made[6] = ["einsum.default", "alias.default"], [["float32", [1]]] * num
    everything = listed(*map(v, range(FROZEN, 4 + 2 * num)))
    first = 4 + 2 * num
    nodes = [[0, ["i->i", everything], []], *([1, [v(first + i)], []] for i in range(num_views))]
    made[7] = [[[["float32", [1]]] * num, nodes, [first, []]]]
    return Document(msgpack.packb(made), (torch.ones(1),) * num)


def zeros(*sizes: tuple[int, ...]) -> list[tuple[str, list[Any]]]:
    return [("zeros.default", [listed(*size)]) for size in sizes]


def recurrent(
    name: str, gates: int, *, rows: int | None = None, bias: Any = None, layers: int = 1, steps: int = 5
) -> Document:
    """One layer over some steps of 2 samples of 3 numbers, 4 hidden ones."""
    rows = 4 * gates if rows is None else rows
    made = zeros((steps, 2, 3), (1, 2, 4), (rows, 3), (rows, 4))
    made.append(("zeros.default", [bias or listed(4 * gates)]))
    states = listed(v(N + 1), v(N + 1)) if gates == 4 else v(N + 1)
    weights = listed(v(N + 2), v(N + 3), v(N + 4), v(N + 4))
    return document(*made, (name, [v(N), states, weights, True, layers, 0.0, True, False, False]))


#: name -> (program, what the refusal says)
HOSTILE: dict[str, tuple[Make, str]] = {
    "a length beyond 64 bits": (one("arange.start_step", 0, 1, 1e-30), "a number of more than 64 bits"),
    "a median of one element again and again": (
        whole_of(*zeros((1,)), ("expand.default", [v(N), listed(9)]), ("median.dim", [v(N + 1), 0])),
        "a median along an axis that repeats one element",
    ),
    "attention to more values than keys": (
        whole_of(
            *zeros((1, 1, 1, 8), (1, 1, 64, 8)),
            ("scaled_dot_product_attention.default", [v(N), v(N), v(N + 1)]),
        ),
        "1 keys and 64 values",
    ),
    "attention to no heads": (
        whole_of(
            *zeros((4, 3, 8), (0, 6, 8)),
            ("scaled_dot_product_attention.default", [v(N), v(N + 1), v(N + 1), None, 0.0, False],
             [["enable_gqa", True]]),
        ),
        "keys without heads",
    ),
    # names
    "torch.load": (one("torch.load", "x"), "not on the list"),
    "load": (one("load", "x"), "not on the list"),
    "os.system": (one("os.system", "touch owned"), "not on the list"),
    "os through torch": (one("torch.os.system", "touch owned"), "not on the list"),
    "os through aten": (one("_os.system", "touch owned"), "not on the list"),
    "attribute chain": (one("__class__.__base__.__subclasses__", v(X)), "not on the list"),
    "dunder": (one("__class__.default", v(X)), "not on the list"),
    "dunder overload": (one("add.__class__", v(X)), "not on the list"),
    "globals": (one("add.Tensor.__globals__", v(X)), "not on the list"),
    "_operator.attrgetter": (one("_operator.attrgetter", "system"), "not on the list"),
    "operator.methodcaller": (one("methodcaller", "system"), "not on the list"),
    "builtins.eval": (one("eval", "1"), "not on the list"),
    "prim": (one("prim.device", v(X)), "not on the list"),
    "qualified": (one("aten::add.Tensor", v(X), v(X)), "not on the list"),
    "other namespace": (one("mylib.add.Tensor", v(X), v(X)), "not on the list"),
    "quantized": (one("quantize_per_tensor.default", v(X), 1.0, 0, [1, "float32"]), "not on the list"),
    "callback": (one("map.default", v(X)), "not on the list"),
    "empty name": (one("", v(X)), "not on the list"),
    # operators that touch what they must not
    "from_file": (one("from_file.default", "/etc/passwd", False, 100), "not on the list"),
    "set_": (one("set_.source_Tensor", v(SEEN), v(X)), "not on the list"),
    "set_ storage": (one("set_.source_Storage_storage_offset", v(SEEN), 0, 0, listed(99)), "not on the list"),
    "resize_": (one("resize_.default", v(SEEN), listed(1 << 40)), "not on the list"),
    "as_strided": (one("as_strided.default", v(X), listed(1000), listed(1), 1 << 30), "not on the list"),
    "memory that was not written": (one("empty.memory_format", listed(1 << 20)), "not on the list"),
    "new_empty": (one("new_empty.default", v(X), listed(1 << 20)), "not on the list"),
    "out variant": (one("add.out", v(X), v(X), out=v(SEEN)), "not on the list"),
    "out argument": (one("add.Tensor", v(X), v(X), out=v(SEEN)), "no argument 'out'"),
    "data pointer": (one("data_ptr.default", v(X)), "not on the list"),
    "record_stream": (one("record_stream.default", v(X), 0), "not on the list"),
    "nonzero": (one("nonzero.default", v(X)), "not on the list"),
    "item": (one("item.default", v(X)), "not on the list"),
    "generator": (one("normal_.default", v(SEEN), 0.0, 1.0, generator=1), "generator"),
    "pinned memory": (one("zeros.default", listed(3), pin_memory=True), "pin_memory"),
    # writing where nothing may be written
    "writes a parameter": (one("zero_.default", v(W)), "writes into 'head.weight'"),
    "writes a frozen parameter": (one("copy_.default", v(FROZEN), v(B)), "writes into 'still'"),
    "writes the batch": (one("mul_.Scalar", v(X), 2.0), "writes into the batch"),
    "writes a constant": (one("add_.Scalar", v(CONSTANT), 1.0), "writes into the batch or a constant"),
    "writes a view of a parameter": (
        lambda: document(("view.default", [v(W), listed(12)]), ("zero_.default", [v(N)])),
        "writes into 'head.weight'",
    ),
    "writes a part of a split parameter": (
        lambda: document(
            ("split.Tensor", [v(W), 1]), ("item", [v(N), 0]), ("transpose.int", [v(N + 1), 0, 1]),
            ("zero_.default", [v(N + 2)]),
        ),
        "writes into 'head.weight'",
    ),
    "batch norm's statistics are a parameter": (
        one("batch_norm.default", v(X), None, None, v(B), v(FROZEN), True, 0.1, 1e-5, False), "writes into 'head.bias'",
    ),
    "writes a number": (one("add_.Tensor", 1.0, v(X)), "self"),
    "writes a parameter of the same type": (
        lambda: document(("set_grad", [False]), ("type_as.default", [v(W), v(W)]), ("zero_.default", [v(N + 1)])),
        "writes into 'head.weight'",
    ),
    "writes a shuffled parameter": (
        lambda: document(
            ("view.default", [v(W), listed(1, 1, 3, 4)]), ("pixel_shuffle.default", [v(N), 1]),
            ("zero_.default", [v(N + 1)]),
        ),
        "writes into 'head.weight'",
    ),
    # tensors that torch makes of numbers, on the CPU, while everything is measured without memory
    "a tensor of numbers": (
        lambda: document(("mul.Tensor", [1.0, 1.0]), ("new_zeros.default", [v(N), listed(1 << 20)])), "is a tensor",
    ),
    "a tensor of computed numbers": (
        lambda: document(("size", [v(X), 0]), ("mul.Tensor", [v(N), v(N)]), ("repeat.default", [v(N + 1), listed(9)])),
        "is a tensor",
    ),
    "a list of numbers": (one("stack.default", listed(1.0, 1.0)), "is a tensor"),
    "a number among tensors": (one("expand_as.default", 1.0, v(X)), "self is no tensor"),
    "a number among viewed tensors": (one("broadcast_tensors.default", listed(1.0, v(X))), "tensors is no tensor"),
    # values
    "forward reference": (one("relu.default", v(N + 1)), "not there yet"),
    "itself": (one("relu.default", v(N)), "not there yet"),
    "cycle": (
        lambda: document(("relu.default", [v(N + 1)]), ("relu.default", [v(N)])), "not there yet",
    ),
    "negative value": (one("relu.default", v(-1)), "not there yet"),
    "value by a float": (one("relu.default", [0, 1.0]), "not there yet"),
    "value by a bool": (one("relu.default", [0, True]), "not there yet"),
    "value far away": (one("relu.default", v(HUGE)), "not there yet"),
    "result out of range": (
        lambda: document(("var_mean.default", [v(X)]), ("item", [v(N), 2])), "result 2 of 2",
    ),
    "negative result": (lambda: document(("chunk.default", [v(X), 2]), ("item", [v(N), -1])), "index"),
    "part that is not there": (lambda: document(("chunk.default", [v(X), 2]), ("item", [v(N), 7])), "result 7"),
    "part of a tensor": (one("item", v(X), 0), "operand0"),
    "loss is a number": (lambda: document(("size", [v(X), 0]), loss=N), "the loss"),
    "loss is a matrix": (whole(loss=N), "the loss"),
    "loss is nothing": (lambda: document(("set_grad", [True]), loss=N), "the loss"),
    # arguments
    "too many arguments": (one("relu.default", v(X), v(X)), "2 arguments in place of 1"),
    "too few arguments": (one("linear.default", v(X)), "weight is missing"),
    "argument twice": (one("relu.default", v(X), self=v(X)), "comes twice"),
    "unknown argument": (one("relu.default", v(X), __class__=1), "no argument '__class__'"),
    "string for a number": (one("add.Tensor", v(X), "1"), "other"),
    "unknown string": (one("gelu.default", v(X), approximate="os.system"), "approximate"),
    "equation with code": (one("einsum.default", "__import__('os')", listed(v(X))), "equation"),
    "huge literal": (one("full.default", listed(3), 1 << 63), "not msgpack|fill_value"),
    "bytes": (one("add.Tensor", v(X), b"x"), "other"),
    "complex dtype": (one("to.dtype", v(X), [1, "complex64"]), "dtype"),
    "unknown dtype": (one("to.dtype", v(X), [1, "os"]), "dtype"),
    "dtype as a number": (one("to.dtype", v(X), 6), "dtype"),
    "dtype of a device": (one("to.dtype", v(X), [4, 0]), "dtype"),
    "sparse layout": (one("zeros.default", listed(3), layout=[2, "sparse_coo"]), "layout"),
    "unknown memory format": (one("contiguous.default", v(X), memory_format=[3, "x"]), "memory_format"),
    "device by name": (one("zeros.default", listed(3), device="cuda:7"), "device"),
    "unknown tag": (one("relu.default", [9, 1]), "self"),
    "list without a tag": (one("view.default", v(X), [1, 2, 3]), "without a tag"),
    "list in a list": (lambda: deep(2), "size"),
    "deep nesting": (lambda: deep(400), "size|msgpack"),
    "a map": (one("add.Tensor", v(X), {}), "msgpack|other"),
    "an extension type": (
        changed(lambda made: made.__setitem__(3, [msgpack.ExtType(5, b"x")])), "msgpack",
    ),
    # sizes
    "terabytes": (one("zeros.default", listed(1 << 40)), "more than"),
    "sizes that overflow": (one("zeros.default", listed(1 << 32, 1 << 32)), "."),
    "repeated": (one("repeat.default", v(X), listed(1 << 20, 1 << 20)), "."),
    "expanded without end": (one("expand.default", v(SEEN), listed(HUGE, 3)), "."),
    "many that are small": (
        lambda: document(*[("zeros.default", [listed(1 << 16)]) for _ in range(8000)]), "more than",
    ),
    "one hot of a billion": (one("one_hot.default", v(Y), 1 << 40), "."),
    "padded": (one("constant_pad_nd.default", v(X), listed(0, 1 << 40)), "."),
    "computed size": (
        lambda: document(("size", [v(X), 0]), ("mul", [v(N), 1 << 40]), ("zeros.default", [listed(v(N + 1))])), ".",
    ),
    "numbers without end": (
        lambda: document(
            ("size", [v(X), 0]), *[("mul", [v(N + i), v(N + i)]) for i in range(40)],
        ),
        "a size of",
    ),
    "division by zero": (lambda: document(("size", [v(X), 0]), ("floordiv", [v(N), 0])), "."),
    "condition that does not hold": (
        lambda: document(("size", [v(X), 0]), ("lt", [v(N), 0]), ("require", [v(N + 1)])), "does not hold",
    ),
    "shapes that do not fit": (one("mm.default", v(X), v(X)), "."),
    # what meta functions let through and kernels die of, or read and write beside their tensors for
    "upsampled by next to nothing": (
        lambda: document(
            ("unsqueeze.default", [v(X), 0]), ("upsample_nearest1d.default", [v(N), listed(9), 1e-30]),
        ),
        "a scale of 1e-30",
    ),
    "upsampled by less than it says": (
        lambda: document(
            ("unsqueeze.default", [v(X), 0]), ("upsample_linear1d.default", [v(N), listed(9), False, 0.001]),
        ),
        "scales is 0.001 from 4 to 9",
    ),
    "upsampled in two axes by no number": (
        lambda: document(
            ("view.default", [v(X), listed(1, 1, -1, 4)]),
            ("upsample_bicubic2d.default", [v(N), listed(9, 9), False, float("nan"), 2.0]),
        ),
        "a scale of nan",
    ),
    "an LSTM's biases are broadcast": (lambda: recurrent("lstm.input", 4, bias=listed(1)), r"a weight of \[1\]"),
    "a GRU's biases are broadcast": (lambda: recurrent("gru.input", 3, bias=listed(1)), r"a weight of \[1\]"),
    "an LSTM with too few gates": (lambda: recurrent("lstm.input", 4, rows=15), r"a weight of \[15, 3\]"),
    "a GRU with too few gates": (lambda: recurrent("gru.input", 3, rows=11), r"a weight of \[11, 3\]"),
    "an LSTM of more layers than weights": (lambda: recurrent("lstm.input", 4, layers=1 << 62), "layers"),
    "an LSTM of two layers and one's weights": (lambda: recurrent("lstm.input", 4, layers=2), "states of"),
    # what would be repeated for so long that the check itself would not end
    "an LSTM over a hundred thousand steps": (lambda: recurrent("lstm.input", 4, steps=1 << 17), "131072 steps"),
    "a network over a hundred thousand steps": (lambda: recurrent("rnn_tanh.input", 1, steps=1 << 17), "131072 steps"),
    "differences of differences": (
        lambda: document(*zeros((1 << 20,)), ("diff.default", [v(N), 1 << 20])), "differences taken 1048576 times",
    ),
    "a cell's biases are broadcast": (
        lambda: document(
            *zeros((2, 3), (2, 4), (12, 3), (12, 4), (1,)),
            ("gru_cell.default", [v(N), v(N + 1), v(N + 2), v(N + 3), v(N + 4), v(N + 4)]),
        ),
        r"a weight of \[1\]",
    ),
    "whole numbers divided by tensors": (one("div.Tensor_mode", v(Y), v(Y), rounding_mode="trunc"), "by a tensor"),
    "whole numbers divided by -1": (one("floor_divide.default", v(Y), -1), "divided by -1"),
    "the rest of a division by 0": (one("remainder.Scalar", v(Y), 0), "divided by 0"),
    "the rest of a division by -1": (one("fmod.Scalar", v(Y), -1), "divided by -1"),
    **{
        f"whole numbers of 32 bits divided by what is -1 in them: {name}": (
            lambda name=name, named=named: document(
                ("_to_copy.default", [v(Y)], [["dtype", [1, "int32"]]]), (name, [v(N), (1 << 32) - 1], named),
            ),
            "divided by 4294967295",
        )
        for name, named in (
            ("div.Scalar_mode", [["rounding_mode", "trunc"]]), ("div_.Scalar_mode", [["rounding_mode", "trunc"]]),
            ("div.Tensor_mode", [["rounding_mode", "trunc"]]), ("floor_divide.Scalar", []), ("fmod.Scalar", []),
        )
    },
    "whole numbers of 8 bits divided by what is 0 in them": (
        lambda: document(("to.dtype", [v(Y), [1, "uint8"]]), ("remainder.Scalar", [v(N), 1 << 8])), "divided by 256",
    ),
    "whole numbers pooled and divided by -1": (
        lambda: document(
            ("view.default", [v(Y), listed(1, 1, 1, -1)]),
            ("avg_pool2d.default", [v(N), listed(1, 1), listed(1, 1), listed(0, 0), False, True, -1]),
        ),
        "divided by -1",
    ),
    "a reduction that is none": (
        lambda: document(("mse_loss.default", [v(X), v(X), 7])), "reduction is 7",
    ),
    # what is small and becomes many, or big, in the check itself
    "a million views": (
        lambda: document(("expand.default", [v(SEEN), listed(1 << 20, 3)]), ("unbind.int", [v(N), 0])), "results",
    ),
    "a million pieces": (
        lambda: document(("expand.default", [v(SEEN), listed(1 << 20, 3)]), ("split.Tensor", [v(N), 1, 0])), "results",
    ),
    "views of views without end": (
        lambda: document(
            ("expand.default", [v(SEEN), listed(1 << 15, 3)]), *[("unbind.int", [v(N), 0])] * 9,
        ),
        "tensors",
    ),
    "expanded and then copied inside": (
        lambda: document(("expand.default", [v(SEEN), listed(1 << 30, 3)]), ("sum.default", [v(N)])), "elements",
    ),
    "expanded and then viewed in part, whose gradient is whole": (
        lambda: document(("expand.default", [v(SEEN), listed(1 << 30, 3)]), ("slice.Tensor", [v(N), 0, 0, 1])),
        "what is viewed in part has",
    ),
    "expanded and then taken apart": (
        lambda: document(("expand.default", [v(SEEN), listed(2, 1 << 30, 3)]), ("select.int", [v(N), 1, 0])),
        "elements",
    ),
    # the whole
    "a million nodes": (lambda: so_many(1_000_000), "bytes, more than"),
    "more nodes than allowed": (
        changed(lambda made: nodes_of(made).extend([[0, [], []]] * 40_000)), "nodes|msgpack",
    ),
    "views of everything": (lambda: views_of_everything(1000), "."),
    "a million empty nodes": (changed(lambda made: nodes_of(made).extend([[]] * 1_000_000)), "nodes|msgpack"),
    "a long text": (lambda: Document(bytes(LIMITS.text_bytes + 1), ()), "bytes, more than"),
    "no text": (lambda: Document(b"", ()), "msgpack"),
    "half a text": (lambda: Document(document().text[:-9], (torch.ones(3),)), "msgpack"),
    "more after it": (lambda: Document(document().text + b"\x00", (torch.ones(3),)), "msgpack"),
    "a number": (lambda: Document(b"\x07", ()), "Expected `array`"),
    "a pickle": (lambda: Document(b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x02os.", ()), "."),
    "another form": (whole(form=3), "form 3"),
    "another model": (whole(fingerprint=bytes(32)), "another model"),
    "no graph": (whole(graphs=[]), r"length >= 1 - at `\$\[7\]`"),
    "a constant that did not come": (whole(constants=[["float32", [3]], ["float32", [3]]]), "constants"),
    **{
        f"a constant of {dtype}": (
            lambda dtype=dtype: Document(document().text, (torch.zeros(3, dtype=dtype),)), "of a dtype that no program",
        )
        for dtype in (torch.complex64, torch.uint16, torch.float8_e5m2)
    },
    "written over and over, of which autograd keeps each": (
        lambda: document(*zeros((4 << 20,)), *[("square_.default", [v(N)])] * 80), "results need more than",
    ),
    "a constant of another shape": (whole(constants=[["float32", [1 << 40]]]), "constants"),
    "statistics that are parameters": (whole(statistics=[W]), "statistics"),
    "statistics out of range": (whole(statistics=[99]), "statistics"),
    "operators that are no names": (whole(operators=[1, 2]), r"Expected `str`.*\$\[5\]"),
    "operator out of range": (changed(lambda made: nodes_of(made)[0].__setitem__(0, 99)), "program's list"),
    # regions
    "a region of none": (one("recompute", 0, True, False), "0 calls of the 2 that follow"),
    "a region of fewer than none": (one("recompute", -1, True, False), "-1 calls of the 2 that follow"),
    "a region beyond the end": (one("recompute", 3, True, False), "3 calls of the 2 that follow"),
    "a region of a huge number": (one("recompute", HUGE, True, False), "of the 2 that follow"),
    "a region beyond the one around it": (
        whole_of(("recompute", [1, True, False]), ("recompute", [1, True, False])), "1 calls of the 0 that follow",
    ),
    "a region whose length is a value": (
        whole_of(("size", [v(X), 0]), ("recompute", [v(N), True, False])), "calls of the 2 that follow",
    ),
    "a region by names": (
        whole_of(("recompute", [1], [["operand1", True], ["operand2", False]])), "None calls of the 2 that follow",
    ),
    "many regions in one another": (
        lambda: document(*[("recompute", [40 - number, True, False]) for number in range(40)]), "more than 16 regions",
    ),
    "the result of a region's beginning": (
        whole_of(("recompute", [1, True, False]), ("relu.default", [v(N)])), "argument self is not what it has to be",
    ),
    "input of an unknown dtype": (
        changed(lambda made: made[7][0][0][0].__setitem__(0, "complex128")), "unknown dtype",
    ),
    "input of a huge size": (changed(lambda made: made[7][0][0][0].__setitem__(1, [HUGE])), "odd size"),
    "input of a negative size": (changed(lambda made: made[7][0][0][0].__setitem__(1, [-1])), "odd size"),
    "input with too many axes": (
        changed(lambda made: made[7][0][0][0].__setitem__(1, [1] * 99)), r"length <= 16 - at `\$\[7\]",
    ),
}  # fmt: skip


class NoMemory(TorchDispatchMode):
    """Fails on anything that is computed with memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                assert tensor.device.type == "meta", f"{func} was computed"
        return result


def refused(found: Document) -> ProgramRefused:
    tiny_layout()
    with pytest.raises(ProgramRefused) as caught:
        load(found)
    return caught.value


#: Programs that take most of a second to check.
BIG = ("many that are small",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in BIG else n for n in HOSTILE])
def test_it_is_refused_without_being_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = HOSTILE[name]
    found, layout = make(), tiny_layout()
    monkeypatch.setattr("tests.support.programs.tiny_layout", lambda: layout)
    with NoMemory(), pytest.raises(ProgramRefused, match=words) as caught:
        load(found)
    assert len(str(caught.value)) < 700


def test_there_are_enough() -> None:
    assert len(HOSTILE) >= 40


def grown_bytes() -> list[int]:
    """By how much memory grows, at most, while all programs are refused, and while they are once more."""
    found, grown = [make() for make, _ in HOSTILE.values()], []
    for _ in range(2):
        before = forget_peak()
        for program in found:
            refused(program)
        grown.append(peak_bytes() - before)
    return grown


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    """In a process of its own: what others have left on a heap decides whether memory that was freed stays with it."""
    script = "from tests.unit.test_program_hostile import grown_bytes; print(grown_bytes())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    grown = json.loads(done.stdout.splitlines()[-1])
    # As many tensors as a program may make are 150 MB, which the process keeps.
    for nbytes, allowed_mb in zip(grown, (256, 64), strict=True):
        assert nbytes < allowed_mb << 20, f"{nbytes >> 20} MiB more"


def test_what_may_be_a_view_of_much_takes_little_memory_to_check() -> None:
    found, layout = views_of_everything(1000), tiny_layout()
    tracemalloc.start()
    try:
        parse(found, layout)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes"


def test_nothing_is_measured_with_memory_even_if_the_form_let_it_through() -> None:
    layout = tiny_layout()
    program = parse(document(("relu.default", [v(X)])), layout)
    graph = program.graphs[0]
    made, zeros = find("mul.Tensor"), find("new_zeros.default")
    assert made is not None
    assert zeros is not None
    first, second = graph.nodes[0], Node(zeros, (Ref(N), (1 << 20,)), ())
    graph = replace(graph, nodes=(first._replace(operator=made, arguments=(1.0, 1.0)), second, *graph.nodes[1:]))
    batch = [(torch.float32, (8, 4)), (torch.int64, (8,))]
    with pytest.raises(ProgramRefused, match="has memory") as caught:
        measure(program, graph, [(e.dtype, e.shape) for e in layout.entries], batch, memory_bytes=1 << 30)
    assert caught.value.node == 0


BATCH = (torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))


def stepped(step: program_job.ProgramStep) -> None:
    step(program_job.skeleton(tiny_layout()), BATCH)


def test_what_a_kernel_gives_otherwise_than_the_check_saw_is_refused_before_the_next_call() -> None:
    """Over no axes at all nansum keeps all of them in the check, and none in a run: 1 number there, 1 << 28 here."""
    found = document(
        *zeros((2,)), ("nansum.default", [v(N), listed()]), ("numel", [v(N + 1)]), ("sub", [2, v(N + 2)]),
        ("mul", [v(N + 3), 1 << 28]), ("add", [1, v(N + 4)]), ("zeros.default", [listed(v(N + 5))]),
    )  # fmt: skip
    step = load(found, memory_bytes=1 << 20)
    for _ in range(2):  # what was refused is not known
        with pytest.raises(ProgramRefused, match=r"it gives float32\[\] where the check saw float32\[2\]") as caught:
            stepped(step)
        assert (caught.value.node, caught.value.operator) == (1, "nansum.default")


def test_memory_that_the_check_took_for_a_view_counts() -> None:
    """Batch norm's meta function keeps the order of the axes, its kernel does not: what is a view of one is a copy of
    the other."""
    many = 16
    normed = document(
        *zeros((64, 16, 8)), ("transpose.int", [v(N), 1, 2]),
        ("batch_norm.default", [v(N + 1), None, None, None, None, True, 0.1, 1e-5, False]),
        ("transpose.int", [v(N + 2), 1, 2]),
        *[("reshape.default", [v(N + 3), listed(64 * 16 * 8)])] * many,
    )  # fmt: skip
    layout = tiny_layout()
    program = parse(normed, layout)
    shapes = [(e.dtype, e.shape) for e in layout.entries]
    batch = [(tensor.dtype, tuple(tensor.shape)) for tensor in BATCH]
    needed = measure(program, program.graphs[0], shapes, batch, memory_bytes=1 << 30).total
    stepped(load(normed, memory_bytes=needed + many * (64 * 16 * 8 * 4)))
    with pytest.raises(ProgramRefused, match="need more") as caught:
        stepped(load(normed, memory_bytes=needed + (many - 1) * (64 * 16 * 8 * 4)))
    assert caught.value.operator == "reshape.default"


def test_autocast_may_take_another_floating_point_dtype_than_in_the_check() -> None:
    layout = tiny_layout()
    program = parse(document(("mul.Tensor", [v(X), 1.0])), layout)
    batch = [(tensor.dtype, tuple(tensor.shape)) for tensor in BATCH]
    shapes = [(e.dtype, e.shape) for e in layout.entries]
    measured = measure(program, program.graphs[0], shapes, batch, memory_bytes=1 << 20)
    operator = program.graphs[0].nodes[0].operator
    for wrong in (torch.ones(8, 5), torch.ones(8, 4, dtype=torch.int32)):
        other = replace(operator, call=lambda *_, wrong=wrong: wrong)
        with pytest.raises(ProgramRefused, match=re.escape("the check saw float32[8, 4]")):
            measured.held(0, other)(*BATCH[:1], 1.0)
    half = replace(operator, call=lambda *_: torch.ones(8, 4, dtype=torch.bfloat16))
    assert measured.held(0, half)(*BATCH[:1], 1.0).dtype == torch.bfloat16


def test_an_index_without_axes_has_the_sizes_of_those_beside_it() -> None:
    layout = tiny_layout()
    found = document(
        ("zeros.default", [listed(3, 5)], [["dtype", [1, "int64"]]]), ("select.int", [v(N), 0, 0]),
        ("select.int", [v(N + 1), 0, 0]), ("index.Tensor", [v(X), listed(v(N + 1), v(N + 2))]),
        ("size", [v(N + 3), 0]), ("eq", [v(N + 4), 5]), ("require", [v(N + 5)]),
    )  # fmt: skip
    for precision in ("fp32", "bf16"):
        program = parse(found, layout)
        step = program_job.ProgramStep(
            program, layout, torch.device("cpu"), memory_bytes=1 << 20, precision=precision
        )  # fmt: skip
        with (autocast(precision) or nullcontext)():
            stepped(step)


def test_a_model_of_very_many_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_job, "_MAX_MODULES", 3)
    names = [[f"{'a.' * depth}w" for depth in range(count)] for count in (4, 5)]
    layouts = [
        Layout.parse(json.dumps({"bucket_bytes": 64, "entries": [[n, "grad", "float32", [1]]]}).encode()) for n in names
    ]
    assert program_job.skeleton(layouts[0])
    with pytest.raises(ProgramRefused, match="3 modules"):
        program_job.skeleton(layouts[1])


@pytest.mark.parametrize("part", ["user-id", "café", "a b", "x" * 120])
def test_a_part_of_a_name_is_any_printable_text_without_a_dot(part: str) -> None:
    names = [f"heads.{part}.weight"]
    entry = [names, "grad", "float32", [1]]
    layout = Layout.parse(json.dumps({"bucket_bytes": 64, "entries": [entry]}).encode())
    assert [name for name, _ in program_job.skeleton(layout).named_parameters()] == names


@pytest.mark.parametrize("name", ["a..w", "", "a.\n", "a\x1b[2J.w", "x" * 121, "a." * 64 + "w", "\ud800.w"])
def test_other_names_are_refused(name: str) -> None:
    entry = [[name], "grad", "float32", [1]]
    layout = Layout.parse(json.dumps({"bucket_bytes": 64, "entries": [entry]}).encode())
    with pytest.raises(ProgramRefused, match="printable characters"):
        program_job.skeleton(layout)


def test_what_is_written_over_counts_where_autograd_keeps_it() -> None:
    first = ("zeros.default", [listed(1 << 20)])
    for again in (("relu_.default", [v(N)]), ("mul_.Tensor", [v(N), 0.9]), ("add_.Tensor", [v(N), v(N)])):
        load(document(first, *[again] * 8), memory_bytes=6 << 20)
    for again in (("square_.default", [v(N)]), ("mul_.Tensor", [v(N), v(N)])):
        with pytest.raises(ProgramRefused, match="results need more than"):
            load(document(first, *[again] * 8), memory_bytes=6 << 20)
        load(
            document(("set_grad", [False]), first, *[(again[0], [v(N + 1)] * len(again[1]))] * 8), memory_bytes=6 << 20
        )


@pytest.mark.parametrize("base", sorted(_KEEP_NOTHING))
def test_autograd_keeps_nothing_of_what_some_write_over(base: str) -> None:
    arguments: dict[str, list[Any]] = {
        "addcdiv_": [torch.ones(4), torch.ones(4)], "addcmul_": [torch.ones(4), torch.ones(4)],
        "index_add_": [0, torch.arange(4), torch.ones(4)], "index_copy_": [0, torch.arange(4), torch.ones(4)],
        "masked_fill_": [torch.ones(4, dtype=torch.bool), 0.5], "scatter_": [0, torch.arange(4), torch.ones(4)],
        "scatter_add_": [0, torch.arange(4), torch.ones(4)], "fill_": [0.5],
        **{name: [torch.ones(4)] for name in ("add_", "sub_", "copy_")},
    }  # fmt: skip
    shape = (2, 2) if base in ("tril_", "triu_") else (4,)
    written = torch.rand(shape, requires_grad=True) * 1.0
    given = [
        one.requires_grad_() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in arguments.get(base, [])
    ]
    known = {one.data_ptr() for one in (written, *given) if isinstance(one, torch.Tensor)}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        getattr(torch.Tensor, base, getattr(torch.nn.functional, base, None))(written, *given)
    assert all(tensor.data_ptr() in known for tensor in kept)


def test_only_so_many_sizes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_job, "_MAX_KNOWN", 3)
    step = load(document())
    model = program_job.skeleton(tiny_layout())
    for samples in range(2, 12):
        step(model, (torch.zeros(samples, 4), torch.zeros(samples, dtype=torch.int64)))
        assert len(step._known) <= 3


def test_a_refusal_names_the_node_and_the_operator() -> None:
    found = refused(document(("relu.default", [v(X)]), ("from_file.default", ["/etc/passwd"])))
    assert (found.node, found.operator) == (1, "from_file.default")
    assert "not on the list" in found.reason


def test_networks_whose_weights_fit_are_taken() -> None:
    assert load(recurrent("lstm.input", 4))
    assert load(recurrent("gru.input", 3))
    assert load(document(("unsqueeze.default", [v(X), 0]), ("upsample_nearest1d.default", [v(N), listed(8), 2.0])))
    assert load(document(("floor_divide.default", [v(Y), 2])))


def test_what_is_good_is_taken() -> None:
    step = load(document(("add_.Tensor", [v(SEEN), 1.0])))
    assert step is not None


def test_only_listed_operators_of_aten_are_reached() -> None:
    for name in NAMES:
        operator = find(name)
        assert operator is not None, f"{name}: this torch does not have it"
        assert isinstance(operator.call, torch._ops.OpOverload)
        assert operator.call.namespace == "aten"
        assert not any(parameter.name == "out" for parameter in operator.parameters), name
        for argument in operator.call._schema.arguments:
            assert str(argument.real_type) not in ("Storage", "Stream", "Any", "QScheme"), name
    assert not set(SCALARS) & NAMES


RICH = tree(
    ("size", [v(X), 0]),
    ("mul", [v(N), 4]),
    ("view.default", [v(X), listed(v(N + 1))]),
    ("zeros.default", [listed(v(N), 4)], [["dtype", [1, "float32"]], ["device", [4, 0]]]),
    ("cat.default", [listed(v(X), v(N + 3)), 1]),
    ("slice.Tensor", [v(N + 4), 1, 0, 4]),
    ("dropout.default", [v(N + 5), 0.1, True]),
    ("contiguous.default", [v(N + 6)], [["memory_format", [3, "contiguous"]]]),
    ("set_grad", [False]),
    ("mean.dim", [v(N + 7), listed(0)]),
    ("to.dtype", [v(N + 9), [1, "float32"]]),
    ("slice.Tensor", [v(N + 10), 0, 0, 3]),
    ("lerp_.Scalar", [v(SEEN), v(N + 11), 0.1]),
    ("set_grad", [True]),
    ("split.Tensor", [v(N + 7), 2, 1]),
    ("item", [v(N + 14), 0]),
    ("gelu.default", [v(N + 15)], [["approximate", "tanh"]]),
    ("einsum.default", ["ij,ij->i", listed(v(N + 16), v(N + 16))]),
    ("recompute", [3, True, False]),
    ("relu.default", [v(N + 17)]),
    ("recompute", [1, False, True]),
    ("relu.default", [v(N + 19)]),
)


def test_the_rich_program_is_good() -> None:
    assert load(Document(msgpack.packb(RICH), (torch.ones(3),)))


_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-2, 40), st.floats(),
    st.text(max_size=8), st.binary(max_size=8), st.sampled_from(sorted(NAMES)), st.sampled_from(sorted(SCALARS)),
    st.sampled_from(["float32", "int64", "contiguous", "strided", "tanh", "sum"]),
)  # fmt: skip
_values = st.recursive(_leaves, lambda inner: st.lists(inner, max_size=5), max_leaves=8)


def places(made: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    found = [path] if path else []
    if isinstance(made, list):
        for index, item in enumerate(made):
            found.extend(places(item, (*path, index)))
    return found


PLACES = places(RICH)


def mutated(made: Any, path: tuple[int, ...], value: Any) -> Any:
    if not path:
        return value
    copy = list(made)
    copy[path[0]] = mutated(made[path[0]], path[1:], value)
    return copy


def load_or_refuse(found: Document) -> None:
    try:
        load(found)
    except ProgramRefused:
        pass


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(PLACES), _values), min_size=1, max_size=3))
def test_a_program_with_changed_parts_is_taken_or_refused(changes: list[tuple[tuple[int, ...], Any]]) -> None:
    made: Any = RICH
    for path, value in changes:
        try:
            made = mutated(made, path, value)
        except (TypeError, IndexError):  # an earlier change took that place away
            continue
    load_or_refuse(Document(msgpack.packb(made), (torch.ones(3),)))


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_program_with_changed_bytes_is_taken_or_refused(data: st.DataObject) -> None:
    text = bytearray(msgpack.packb(RICH))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    load_or_refuse(Document(bytes(text[: data.draw(st.integers(0, len(text)))]) or bytes(text), (torch.ones(3),)))
