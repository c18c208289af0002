"""Where each tensor lies: roles, alignment, buckets; and texts from a network that describe a layout."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from w5xde_async.errors import MalformedFrame
from w5xde_async.params import layout as layout_module
from w5xde_async.params.layout import ALIGN_BYTES, Layout
from w5xde_async.store.tensors import DTYPE_NAMES
from w5xde_async.wire.frame import DTYPE_BYTES


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.body.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.narrow = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(7)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("passing", torch.zeros(100), persistent=False)


def test_roles_and_names() -> None:
    roles = {entry.names: entry.role for entry in Layout.of(Everything()).entries}
    assert roles == {
        ("narrow",): "grad",
        ("empty",): "grad",
        ("body.weight", "tied.weight"): "grad",
        ("body.bias",): "grad",
        ("frozen.weight",): "frozen",
        ("frozen.bias",): "frozen",
        ("norm.weight",): "grad",
        ("norm.bias",): "grad",
        ("flags",): "max",
        ("norm.running_mean",): "mean",
        ("norm.running_var",): "mean",
        ("norm.num_batches_tracked",): "max",
    }


def test_counts() -> None:
    layout = Layout.of(Everything())
    assert layout.num_parameters == 9 + 35 + 7 + 9 + 3 + 7 + 7  # tied once, frozen too
    assert [layout.entries[index].name for index in layout.trainable] == [
        "narrow", "empty", "body.weight", "body.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    assert [(group.role, group.dtype) for group in layout.groups] == [
        ("grad", torch.bfloat16), ("grad", torch.float32), ("mean", torch.float32), ("max", torch.bool),
        ("max", torch.int64), ("frozen", torch.float32),
    ]  # fmt: skip
    assert layout.state_bytes == sum(group.numel * group.dtype.itemsize for group in layout.groups)


shapes = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(64, 4000), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_buckets_cover_everything_once(
    shapes: list[list[int]], bucket_bytes: int, dtype: torch.dtype, frozen: bool
) -> None:
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape, dtype=dtype), not frozen))
        module.register_buffer(f"b{number}", torch.zeros(shape, dtype=torch.int32))
    layout = Layout.of(module, bucket_bytes=bucket_bytes)
    for entry in layout.entries:
        assert entry.offset * entry.dtype.itemsize % ALIGN_BYTES == 0
    for group in layout.groups:
        owner = [0] * group.numel
        buckets = [bucket for bucket in layout.buckets if bucket.group == group.index]
        at = 0
        for bucket in buckets:
            assert bucket.offset == at
            at += bucket.numel
            assert bucket.numel > 0
            if bucket.numel > 64:
                assert layout.result_nbytes(bucket) <= max(bucket_bytes, ALIGN_BYTES * group.result_dtype.itemsize)
            inside = range(bucket.offset, bucket.offset + bucket.numel)
            for index, entry in enumerate(layout.entries):
                held = range(entry.offset, entry.offset + entry.numel)
                overlap = range(max(held.start, inside.start), min(held.stop, inside.stop))
                if entry.group == group.index and entry.numel:
                    assert (index in bucket.entries) == bool(overlap)
        assert at == group.numel
        for index in group.entries:
            entry = layout.entries[index]
            for place in range(entry.offset, entry.offset + entry.numel):
                owner[place] += 1
        assert max(owner, default=0) <= 1
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    assert layout.buckets[: len(layout.result_buckets)] == layout.result_buckets  # results come first
    assert Layout.parse(layout.describe()) == layout


def test_small_tensors_are_not_cut() -> None:
    module = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(40)])
    layout = Layout.of(module, bucket_bytes=2048)
    for bucket in layout.buckets:
        assert all(layout.entries[index].offset >= bucket.offset for index in bucket.entries)
    assert len(layout.buckets) == 10


def test_equal_models_have_equal_fingerprints() -> None:
    assert Layout.of(Everything()).fingerprint == Layout.of(Everything()).fingerprint
    assert Layout.of(Everything(), bucket_bytes=1 << 16).fingerprint != Layout.of(Everything()).fingerprint


# -- differences


def changed(**changes: Any) -> Layout:
    module = nn.Module()
    kinds: dict[str, Any] = {"a": torch.zeros(2, 3), "b": torch.zeros(4)} | changes
    for name, tensor in kinds.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        elif tensor is not None:
            module.register_parameter(name, nn.Parameter(tensor))
    return Layout.of(module)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({}, ""),
        ({"a": torch.zeros(3, 2)}, "tensor 'a' has shape [3, 2] there and [2, 3] here"),
        ({"a": torch.zeros(2, 3).bfloat16()}, "tensor 'a' is bfloat16 there and float32 here"),
        (
            {"b": nn.Parameter(torch.zeros(4), False)},
            "tensor 'b' is a frozen parameter there and a trainable parameter",
        ),
        ({"c": torch.zeros(1)}, "tensor 'c' there is missing here"),
        ({"b": None}, "tensor 'b' here is missing there"),
        ({"b": None, "c": torch.zeros(4)}, "tensor 'c' there is 'b' here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_difference_in_words(theirs: dict[str, Any], words: str) -> None:
    mine, other = changed(), changed(**theirs)
    assert mine.first_difference(other).startswith(words)
    assert bool(words) == bool(mine.first_difference(other)) == (mine.fingerprint != other.fingerprint)


# -- what cannot be trained


def computed() -> nn.Module:
    module = nn.Linear(2, 2)
    module._parameters["weight"] = module.weight.clone()  # type: ignore[assignment]
    return module


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.LazyLinear(3)


def with_tensor(tensor: torch.Tensor, *, buffer: bool = False) -> nn.Module:
    module = nn.Module()
    if buffer:
        module.register_buffer("it", tensor)
    else:
        module.register_parameter("it", nn.Parameter(tensor))
    return module


def sharing(piece: slice) -> nn.Module:
    """A parameter, and a buffer that is a piece of the same memory."""
    memory, module = torch.zeros(12), nn.Module()
    module.first = nn.Parameter(memory[:6])
    module.register_buffer("second", memory[piece])
    return module


def test_pieces_of_one_memory_that_do_not_meet_are_fine() -> None:
    assert len(Layout.of(sharing(slice(6, 12))).entries) == 2


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("_MAX_ENTRIES", 3, "4 tensors, more than 3"), ("_MAX_NAME_PARTS", 7, "more than 7 parts"),
        ("_MAX_BUCKETS", 0, "more than 0 buckets"), ("MAX_LAYOUT_BYTES", 80, "names of its tensors"),
    ],
)  # fmt: skip
def test_what_the_other_side_would_refuse_is_refused_here(
    limit: str, most: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Layout.of(module)
    monkeypatch.setattr(layout_module, limit, most)
    with pytest.raises(ValueError, match=words):
        Layout.of(module)


def test_every_dtype_of_a_layout_travels_and_can_be_saved() -> None:
    for dtype in layout_module._DTYPES:
        assert str(dtype).removeprefix("torch.") in DTYPE_BYTES
        assert dtype in DTYPE_NAMES


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (with_tensor(torch.zeros(2, dtype=torch.float64)), "'it' is float64; sums are float32"),
        (with_tensor(torch.zeros(2, dtype=torch.complex64)), "'it' is complex64"),
        (with_tensor(torch.zeros(2, dtype=torch.complex64), buffer=True), "'it' is complex64"),
        (with_tensor(torch.eye(2).to_sparse(), buffer=True), "'it' is not dense"),
        (lazy(), "'weight' is lazy"),
        (with_tensor(torch.zeros(4, dtype=torch.float8_e8m0fnu), buffer=True), "'it' is float8_e8m0fnu"),
        (with_tensor(torch.zeros([1] * 65)), "'it' has 65 axes"),
        (computed(), "'weight' is the result of a computation, as in a copy.deepcopy of a model in TorchScript"),
        (sharing(slice(0, 6)), "'first' and 'second' share memory"),
        (sharing(slice(3, 9)), "'first' and 'second' share memory"),
    ],
    ids=[
        "float64",
        "complex parameter",
        "complex buffer",
        "sparse",
        "lazy",
        "float8_e8m0fnu",
        "axes",
        "computed",
        "alias",
        "overlap",
    ],
)
def test_what_cannot_be_trained_is_named(module: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout.of(module)


def test_float64_is_fine_where_it_is_not_trained() -> None:
    module = with_tensor(torch.zeros(2, dtype=torch.float64), buffer=True)
    module.register_parameter("p", nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False))
    assert [entry.role for entry in Layout.of(module).entries] == ["frozen", "mean"]


# -- texts


def text(*entries: Any, bucket_bytes: Any = 1 << 16) -> bytes:
    return json.dumps({"bucket_bytes": bucket_bytes, "entries": entries}).encode()


GOOD = [["w"], "grad", "float32", [2, 3]]


@pytest.mark.parametrize(
    "hostile",
    [
        b"", b"\xff", b"null", b"[]", b"{}", b"[" * 100_000, b'{"entries": []}', b'{"entries": 3, "bucket_bytes": 64}',
        text(GOOD, bucket_bytes=0), text(GOOD, bucket_bytes=-1), text(GOOD, bucket_bytes="64"),
        text(GOOD, bucket_bytes=True), text(GOOD, bucket_bytes=64.0), text(["w"]), text([[], "grad", "float32", []]),
        text([["w"], "boss", "float32", []]), text([["w"], "grad", "float33", []]), text([["w"], "grad", "nn", []]),
        text([["w"], "grad", "__doc__", []]), text([["w"], "grad", 5, []]), text([["w"], "grad", "float32", [-1]]),
        text([["w"], "grad", "float32", [1.5]]), text([["w"], "grad", "float32", 7]),
        text([["w"], "grad", "float32", [True]]), text([5, "grad", "float32", [1]]),
        text([["w"], "grad", "float32", [2**62]]), text([["w"], "grad", "float32", [2**40] * 40]),
        text([["w"], "grad", "float32", [2**24]], bucket_bytes=64), text([["w"], "grad", "int64", [2]]),
        text([["w"], "mean", "int64", [2]]), text([["w"], "max", "float32", [2]]), text([["w"], "grad", "half", [2]]),
        text([["w"], "frozen", "complex64", [2]]), text([["w"], "grad", ["float32"], [2]]),
    ],
    ids=lambda value: value[:60].decode(errors="replace"),
)  # fmt: skip
def test_a_hostile_text_is_a_malformed_frame(hostile: bytes) -> None:
    with pytest.raises(MalformedFrame, match="layout"):
        Layout.parse(hostile)


@pytest.mark.parametrize(
    ("limit", "most", "entries"),
    [
        ("_MAX_ENTRIES", 3, [GOOD] * 4), ("_MAX_NAME_PARTS", 4, [[["a.b.c", "d"], "grad", "float32", [1]], GOOD]),
        ("_MAX_AXES", 2, [[["w"], "grad", "float32", [1, 1, 1]]]),
        ("_MAX_EXTENT", 8, [[["w"], "grad", "float32", [0, 9]]]),
    ],
)  # fmt: skip
def test_a_text_has_its_limits(limit: str, most: int, entries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Layout.parse(text(*entries))
    monkeypatch.setattr(layout_module, limit, most)
    with pytest.raises(MalformedFrame, match="layout"):
        Layout.parse(text(*entries))


def test_a_text_of_very_many_objects_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "_MAX_ENTRIES", 1000)
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it was read"))
    with pytest.raises(MalformedFrame, match="more than 1000"):
        Layout.parse(b"[" + b"{}," * 20_000 + b"{}]")


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 2**70)
    | st.floats()
    | st.sampled_from(["grad", "float32", "w", "mean"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["entries", "bucket_bytes"]), inner),
    max_leaves=12,
)


@given(json_values | st.builds(lambda *entries: {"entries": entries, "bucket_bytes": 64}, json_values, json_values))
def test_any_text_is_a_layout_or_a_malformed_frame(document: Any) -> None:
    try:
        Layout.parse(json.dumps(document).encode())
    except MalformedFrame:
        return


def test_a_tie_in_words() -> None:
    shared = nn.Parameter(torch.zeros(2, 3))
    tied = changed(a=shared, b=None, c=shared)
    assert changed(b=None).first_difference(tied) == "tensor 'a' is tied: a = c there, a here"
