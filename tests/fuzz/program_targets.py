"""The same for the parser of programs: any text gives a program that is written and read to the same, or a refusal."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from tests.support.programs import SEEN, B, W, X, document, listed, tiny_layout, v

from w5xde_async.compute.program.form import LIMITS, Document, encode, parse
from w5xde_async.compute.program.operators import NAMES, find
from w5xde_async.errors import ProgramRefused

__all__ = ["SEEDS", "mutated", "program"]

LAYOUT = tiny_layout()
CONSTANTS = (torch.ones(3),)

#: Programs that are taken, with one of every kind of argument between them.
SEEDS = [
    document().text,
    document(("view.default", [v(X), listed(-1, 2, 2)]), ("add.Tensor", [v(7), 1.5], [["alpha", 2]])).text,
    document(("add_.Tensor", [v(SEEN), 0.5]), ("mul.Tensor", [v(W), v(W)]), ("sum.dim_IntList", [v(8), None])).text,
    document(("zeros.default", [listed(2, 3)], [["dtype", [1, "float32"]], ["device", [4, 0]]])).text,
    document(("split.Tensor", [v(X), 2, 1]), ("item", [v(7), 1]), ("dropout.default", [v(8), 0.5, True])).text,
    document(("clone.default", [v(B)], [["memory_format", [3, "contiguous"]]])).text,
]


def program(text: bytes) -> None:
    """Parse; what is taken is inside the limits, and is written and read to the same."""
    try:
        taken = parse(Document(text, CONSTANTS), LAYOUT)
    except ProgramRefused:
        return
    assert len(text) <= LIMITS.text_bytes
    assert sum(len(graph.nodes) for graph in taken.graphs) <= LIMITS.nodes
    assert all(find(node.operator.name) is node.operator for graph in taken.graphs for node in graph.nodes)
    written = encode(taken)
    assert encode(parse(written, LAYOUT)).text == written.text


def mutated(text: bytes, seed: int, otherwise: Callable[[bytes], bytes]) -> bytes:
    """One part of a program's tree replaced, removed, doubled or swapped; ``otherwise`` where it is no tree."""
    choose = random.Random(seed)
    if choose.random() < 0.3:
        return otherwise(text)
    try:
        tree = msgpack.unpackb(text, max_array_len=4096, max_map_len=0, max_ext_len=0)
    except (ValueError, RecursionError, msgpack.UnpackException):
        return otherwise(text)
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        place: Any = tree
        while isinstance(place, list) and place:
            index = choose.randrange(len(place))
            deeper = isinstance(place[index], list) and place[index]
            if not deeper or choose.random() < 0.15:
                _change(place, index, choose)
                break
            place = place[index]
    try:
        changed: bytes = msgpack.packb(tree)
    except (ValueError, OverflowError, RecursionError):
        return otherwise(text)
    return changed


def _change(place: list[Any], index: int, choose: random.Random) -> None:
    kind = choose.randrange(6)
    if kind == 0:
        del place[index]
    elif kind == 1:
        place.insert(index, place[choose.randrange(len(place))])
    elif kind == 2:
        other = choose.randrange(len(place))
        place[index], place[other] = place[other], place[index]
    elif kind == 3 and isinstance(place[index], str):
        place[index] = choose.choice(_NAMES)
    elif kind == 4 and type(place[index]) is int:
        place[index] += choose.choice((-1, 1, 7, 1 << 31, -(1 << 31)))
        place[index] = max(-(1 << 63), min(place[index], (1 << 64) - 1))
    else:
        place[index] = choose.choice(_VALUES)()


_NAMES = sorted(NAMES)
_VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: 0, lambda: -1, lambda: 1 << 62, lambda: 0.5, lambda: float("nan"), lambda: "",
    lambda: "x", lambda: b"x", list, lambda: v(0), lambda: v(7), lambda: v(8), lambda: v(1 << 40), lambda: [1, "int64"],
    lambda: [2, "strided"], lambda: [3, "contiguous"], lambda: [4, 0], lambda: listed(1, 2), lambda: listed(v(W)),
    lambda: [[0, 2, 9, 8], 4], lambda: ["dim", 0], lambda: [0, [v(X)], []], lambda: [1, [v(X), v(7)], [["alpha", 1]]],
]  # fmt: skip
