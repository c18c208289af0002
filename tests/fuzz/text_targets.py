"""The same for what travels as a text of its own: WELCOME's layout and inner optimizer, the structure of a batch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from tests.support.programs import tiny_layout
from torch import nn

from w5xde_async.compute.batch import flatten, leaves_of
from w5xde_async.compute.inner import build_inner, describe_inner
from w5xde_async.errors import MalformedFrame
from w5xde_async.params.layout import Layout
from w5xde_async.worker.executors.replicas import _read_inner

__all__ = ["SEEDS", "mutated", "text"]

_MODEL = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
_LAYOUT = Layout.of(_MODEL)
_TENSORS = [torch.zeros(entry.shape, requires_grad=entry.role == "grad") for entry in _LAYOUT.entries]
_COLUMNS = [torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)]


def _inner(optimizer: torch.optim.Optimizer, scheduled: list[str], streaming: object) -> bytes:
    described = describe_inner(optimizer, _LAYOUT, _MODEL, scheduled=scheduled)
    return bytes(msgpack.packb(described | {"clip": 1.0, "streaming": streaming}))


_PARTS = [{"params": _MODEL[0].parameters(), "lr": 0.1}, {"params": _MODEL[1].parameters(), "weight_decay": 0.1}]
#: One of every kind; the first byte says which.
SEEDS = [
    b"\0" + _LAYOUT.describe(),
    b"\0" + tiny_layout().describe(),
    b"\1" + _inner(torch.optim.SGD(_PARTS, lr=0.01, momentum=0.9), ["lr", "momentum"], None),
    b"\1" + _inner(torch.optim.AdamW(_MODEL.parameters(), fused=True), ["lr", "betas"], [4, 2, 0.5]),
    b"\2" + flatten(tuple(_COLUMNS))[0],
    b"\3" + flatten({"x": _COLUMNS[0], "y": [_COLUMNS[1], 3, None, "name"]})[0],
]


def text(data: bytes) -> None:
    """Read it; what is taken is inside its limits, and is written and read to the same."""
    if not data:
        return
    kind, body = data[0] % 4, data[1:]
    try:
        if kind == 0:
            layout = Layout.parse(body)
            assert Layout.parse(layout.describe()).fingerprint == layout.fingerprint
        elif kind == 1:
            described, clip, streaming = _read_inner(body)
            optimizer = build_inner(described, _TENSORS)
            ours = {id(tensor) for tensor in _TENSORS if tensor.requires_grad}
            assert all(id(p) in ours for group in optimizer.param_groups for p in group["params"])
            assert clip is None or clip > 0
            assert streaming is None or streaming[0] >= 1
        else:
            leaves = list(leaves_of(body, _COLUMNS, (1, 3) if kind == 2 else (4,), packed=kind == 2))
            assert [count for count, _ in leaves] == ([1, 3] if kind == 2 else [4])
    except MalformedFrame:
        return


def mutated(data: bytes, seed: int, otherwise: Callable[[bytes], bytes]) -> bytes:
    """One part of a text's tree replaced, removed, doubled or renamed; ``otherwise`` where it is no tree."""
    choose = random.Random(seed)
    kind, body = data[:1], data[1:]
    if choose.random() < 0.3 or not kind:
        return otherwise(data)
    is_json = kind[0] % 4 == 0
    try:
        tree: Any = [json.loads(body) if is_json else msgpack.unpackb(body, strict_map_key=False, max_ext_len=0)]
        for _ in range(choose.choice((1, 1, 2, 4))):
            _change(tree, choose)
        return kind + (json.dumps(tree[0]).encode() if is_json else bytes(msgpack.packb(tree[0])))
    except (ValueError, OverflowError, RecursionError, TypeError, IndexError, msgpack.UnpackException):
        return otherwise(data)


def _change(tree: Any, choose: random.Random) -> None:
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = choose.choice(keys)
        if not (isinstance(place[key], list | dict) and place[key]) or choose.random() < 0.15:
            break
        place = place[key]
    action = choose.randrange(4)
    if action == 0 and place is not tree:
        del place[key]
    elif action == 1 and isinstance(place, list) and place is not tree:
        place.insert(key, place[choose.randrange(len(place))])
    elif action == 2 and isinstance(place, dict):
        place[choose.choice(_WORDS)] = place.pop(key)
    else:
        place[key] = choose.choice([*_WORDS, *_VALUES])


_WORDS = [
    "lr", "betas", "momentum", "weight_decay", "name", "groups", "entries", "scheduled", "clip", "streaming", "SGD",
    "AdamW", "Adam", "fused", "foreach", "grad", "frozen", "mean", "max", "float32", "float64", "int64", "load", "t",
    "u", "l", "d", "v", "bucket_bytes", "",
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, 0, 1, 2, 5, -1, 1 << 62, 0.5, -0.5, 1e308, float("inf"), float("nan"), [], {}, [0], [0, 1], ["lr"],
    [0.9, 0.99], ["t"], ["u", []], [["t"], ["t"]], ["v", 1], ["d", [["x", ["t"]]]], [4, 2, 0.5], [1, 1], {"lr": 0.1},
]  # fmt: skip
