"""State dicts survive JSON and tensors bit for bit; what would not is refused with its place."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from w5xde_async.errors import CheckpointCorrupt, StoreError
from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.store.tensors import DTYPE_NAMES


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and bits, all the way down."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return not left.numel() or torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def through_json(tree: object) -> Any:
    skeleton, tensors = pack_state(tree)
    return unpack_state(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_any_plain_tree_comes_back_the_same(tree: object) -> None:
    assert same(through_json(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        2**53,
        2**53 + 1,
        -(2**64),
        10**5000,
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack(">d", bytes.fromhex("fff80000deadbeef"))[0],
        5e-324,
        "",
        "\udc80 \x00 é",
        (),
        ((),),
        {},
        {1: "int", "1": "str"},
        {"tensor": "not a tensor", "tuple": [1]},
        Counter({30: 1, 80: 2}),
    ],
    ids=lambda value: repr(value)[:20] if type(value) is not int or abs(value) < 10**30 else "big",
)
def test_values_json_does_not_keep(value: object) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [(np.float64(0.1), 0.1), (np.float32(0.1), float(np.float32(0.1))), (np.int64(2**62), 2**62), (np.bool_(1), True)],
)
def test_numpy_scalars_are_kept_as_plain_numbers(value: object, plain: object) -> None:
    """A LambdaLR whose factor is computed with numpy leaves such a learning rate."""
    assert same(through_json({"lr": [value]}), {"lr": [plain]})


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)
    assert same(through_json({"x": [tensor]}), {"x": [tensor]})


def test_a_tensor_in_several_places_is_stored_once_and_stays_one() -> None:
    weight = torch.ones(3)
    skeleton, tensors = pack_state({"a": weight, "b": {"c": weight.view(3)}, "d": weight[:2]})
    assert list(tensors) == ["a", "d"]
    tree = unpack_state(skeleton, tensors)
    assert tree["a"] is tree["b"]["c"]
    assert tree["a"] is not tree["d"]


def test_tensors_are_copied_only_where_they_must_be() -> None:
    flat = torch.arange(6.0)
    _, tensors = pack_state({"flat": flat, "turned": flat.reshape(2, 3).t()})
    assert tensors["flat"].data_ptr() == flat.data_ptr()
    assert tensors["turned"].is_contiguous()
    assert torch.equal(tensors["turned"], flat.reshape(2, 3).t())


def test_names_that_collide_are_told_apart() -> None:
    tree = {
        "a": {"b": torch.zeros(1)},
        "a.b": torch.ones(1),
        0: torch.full((1,), 2.0),
        "0": torch.full((1,), 3.0),
        "__metadata__": torch.full((1,), 4.0),
    }
    assert same(through_json(tree), tree)


class Odd:
    pass


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"state": {0: {"hook": Odd()}}}, "state.0.hook"),
        ({"lr": np.longdouble(0.1)}, "lr"),
        ({"when": np.datetime64("2026-01-01")}, "when"),
        ({"groups": [{"fn": len}]}, "groups.0.fn"),
        ({"keys": {True: 1}}, "keys.True"),
        ({"set": {1, 2}}, "set"),
        ({"raw": b"bytes"}, "raw"),
        ([torch.zeros(2, dtype=torch.complex128)], "0"),
        ([torch.zeros(2, device="meta")], "0"),
        ([torch.eye(2).to_sparse()], "0"),
        (Odd(), "value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_refused_by_place(tree: object, place: str) -> None:
    with pytest.raises(StoreError) as caught:
        pack_state(tree)
    assert caught.value.path == place


def test_a_tree_inside_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(StoreError, match="inside itself"):
        pack_state(tree)


@pytest.mark.parametrize(
    "skeleton",
    [{"tensor": "absent"}, {"code": "print()"}, {"int": "zz"}, {"float": "00"}, {}, {"dict": [[1]]}, {"dict": ["ab"]}],
    ids=str,
)
def test_a_foreign_skeleton_is_refused(skeleton: Any) -> None:
    with pytest.raises(CheckpointCorrupt):
        unpack_state(skeleton, {})


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        inputs = torch.randn(4, 3, generator=generator)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "radam": lambda p: torch.optim.RAdam(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(name: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        return model, OPTIMIZERS[name](model.parameters())

    model, optimizer = build()
    trained(optimizer, model)
    saved = through_json({"optimizer": optimizer.state_dict(), "model": model.state_dict()})
    assert same(saved["optimizer"], optimizer.state_dict())
    twin, twin_optimizer = build()
    weights = {key: value.clone() for key, value in saved["model"].items()}
    saved = {"optimizer": torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, saved["optimizer"])}
    twin.load_state_dict(weights)
    twin_optimizer.load_state_dict(saved["optimizer"])
    trained(optimizer, model)
    trained(twin_optimizer, twin)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


S = torch.optim.lr_scheduler
SCHEDULERS = {
    "step": lambda o: S.StepLR(o, 2),
    "multistep": lambda o: S.MultiStepLR(o, [2, 4]),
    "cosine": lambda o: S.CosineAnnealingLR(o, 10),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: S.OneCycleLR(o, 0.5, total_steps=10),
    "cyclic": lambda o: S.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "lambda": lambda o: S.LambdaLR(o, lambda step: 0.9**step),
    "linear": lambda o: S.LinearLR(o),
    "sequential": lambda o: S.SequentialLR(o, [S.ConstantLR(o), S.ExponentialLR(o, 0.9)], [2]),
    "plateau": lambda o: S.ReduceLROnPlateau(o),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler: Any = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*([1.0] if name == "plateau" else []))
    assert same(through_json(scheduler.state_dict()), scheduler.state_dict())
