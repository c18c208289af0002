"""A batch as structure and tensors, and back; nothing hostile gets through."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import default_collate

from w5xde_async.compute.batch import flatten, joined, leaves_of, map_tensors, on_host, rows, unflatten
from w5xde_async.errors import MalformedFrame

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5)
leaf = plain | st.builds(torch.arange, st.integers(0, 4))
batches: st.SearchStrategy[Any] = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.parametrize("kind", [UserDict, OrderedDict, MappingProxyType])
def test_mappings_of_other_kinds_arrive_as_dicts(kind: Any) -> None:
    """UserDict is what transformers' collators give."""
    batch = {"ids": torch.arange(6).view(3, 2), "more": {"mask": torch.ones(3)}}
    given = kind({"ids": batch["ids"], "more": kind(batch["more"])})
    assert same(unflatten(*flatten(given)), batch)
    assert same(rows(given, 3, 0, 2), rows(batch, 3, 0, 2))
    assert same(map_tensors(given, lambda tensor: tensor + 1), map_tensors(batch, lambda tensor: tensor + 1))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    return bool(a == b)


class Wrapper(Tensor):
    """As a MaskedTensor, a DTensor: no memory of its own."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inside.shape)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@given(batches)
def test_there_and_back(batch: Any) -> None:
    assert same(unflatten(*flatten(batch)), batch)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": [1, (2, object())]}, r"batch\['x'\]\[1\]\[1\] is a object"),
        ({1: 2}, "keys that are not strings"),
        ([torch.eye(2).to_sparse()], r"batch\[0\] is a torch.sparse_coo tensor"),
        ({"x": Wrapper(torch.ones(2))}, r"batch\['x'\] is a Wrapper; give a dense one"),
        ({"ids": {3}}, r"batch\['ids'\] is a set"),
        (b"raw", "batch is a bytes"),
        ([0, 1 << 64], r"batch\[1\] is 18446744073709551616..., more than 64 bits"),
        ("\ud800", "not Unicode text"),
        (["x" * 300_000], "300012 bytes of numbers and strings outside of tensors"),
        ((torch.zeros(2, dtype=torch.float8_e8m0fnu),), r"batch\[0\] is of torch.float8_e8m0fnu"),
        (torch.zeros([1] * 17), "batch has 17 axes"),
        ([torch.zeros(1)] * 2049, "more than 2048 tensors"),
    ],
)
def test_what_cannot_travel_is_named(batch: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flatten(batch)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_several_lengths_are_named() -> None:
    with pytest.raises(TypeError, match=r"batch\[0\] is a nested tensor; give a dense one"):
        flatten([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])])


def test_depth_is_bounded() -> None:
    batch: Any = 1
    for _ in range(40):
        batch = [batch]
    with pytest.raises(TypeError, match="nested deeper"):
        flatten(batch)


def test_gradients_do_not_travel() -> None:
    assert not flatten(torch.zeros(2, requires_grad=True))[1][0].requires_grad


def deep() -> bytes:
    node: Any = ["t"]
    for _ in range(100):
        node = ["l", [node]]
    packed: bytes = msgpack.packb(node)
    return packed


@pytest.mark.parametrize(
    "structure",
    [b"", b"\xc1", b"\xff" * 9, b"\x91" * 5000, deep(), msgpack.packb(["x"]), msgpack.packb([]), msgpack.packb(5),
     msgpack.packb(["d", [["a"]]]), msgpack.packb(["d", [5]]), msgpack.packb(["u", 5]), msgpack.packb(["t", "t"]),
     msgpack.packb(["l", [["t"], ["t"]]]), msgpack.packb(["v", 1]), msgpack.packb(msgpack.ExtType(1, b"x"))],
)  # fmt: skip
def test_a_hostile_structure_is_a_malformed_frame(structure: bytes) -> None:
    with pytest.raises(MalformedFrame, match="batch"):
        unflatten(structure, [torch.zeros(1)])


@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_a_batch_or_a_malformed_frame(structure: bytes, packed: bool) -> None:
    for use in (lambda: unflatten(structure, []), lambda: list(leaves_of(structure, [torch.zeros(3)], [1, 2], packed))):
        try:
            use()
        except MalformedFrame:
            continue


def test_packed_rows_are_cut_by_leaf() -> None:
    x, y = torch.arange(14.0).reshape(7, 2), torch.arange(7)
    for batch in ((x, y), {"x": x, "y": [y]}):
        structure, tensors = flatten(batch)
        found = list(leaves_of(structure, tensors, [3, 3, 1], packed=True))
        assert [samples for samples, _ in found] == [3, 3, 1]
        for (samples, cut), begin in zip(found, (0, 3, 6), strict=True):
            assert same(cut, rows(batch, 7, begin, begin + samples))


def test_cut_rows_are_aligned_as_fresh_tensors_are() -> None:
    structure, tensors = flatten((torch.zeros(9, 3),))
    for _, (x,) in leaves_of(structure, tensors, [2] * 4 + [1], packed=True):
        assert x.data_ptr() % 64 == 0


def test_leaves_that_a_collate_has_cut_are_aligned_too() -> None:
    structure, tensors = flatten((torch.zeros(9)[1:],))
    ((_, (x,)),) = leaves_of(structure, tensors, [8], packed=False)
    assert x.data_ptr() % 64 == 0


@pytest.mark.parametrize("shape", [(4, 1, 5, 3), (1, 2, 5, 3), (4, 2, 1, 1), (1, 1), (0, 1)])
def test_what_is_sent_lies_as_a_fresh_tensor_does(shape: tuple[int, ...]) -> None:
    """By whoever it is read: kernels go by the strides of an axis of one element, too."""
    given = torch.rand(shape)
    images = [given.to(memory_format=torch.channels_last)] if len(shape) == 4 else []
    for tensor in (given, given.mT.contiguous().mT, *images):
        sent = on_host(tensor)
        assert sent.stride() == torch.empty(shape).stride()
        assert torch.equal(sent, given)


@pytest.mark.parametrize("samples", [[4], [2, 2]])
def test_gradients_that_a_step_asks_of_its_batch_are_not_asked_of_the_next(samples: list[int]) -> None:
    structure, tensors = flatten((torch.ones(4, 3),))
    for _, (x,) in leaves_of(structure, tensors, samples, packed=True):
        x.requires_grad_()
    assert not tensors[0].requires_grad


def test_leaf_after_leaf() -> None:
    leaves = [{"x": torch.full((n, 2), float(n)), "name": "a"} for n in (3, 1)]
    structure = flatten(leaves[0])[0]
    tensors = [tensor for leaf in leaves for tensor in flatten(leaf)[1]]
    assert all(
        same(batch, leaf) for (_, batch), leaf in zip(leaves_of(structure, tensors, [3, 1], False), leaves, strict=True)
    )


def test_leaves_with_structures_of_their_own() -> None:
    leaves: list[Any] = [{"x": torch.full((n, 2), float(n)), "name": f"{n}"} for n in (3, 1)] + [(torch.ones(1), "b")]
    flat = [flatten(leaf) for leaf in leaves]
    structure, tensors = joined([own for own, _ in flat]), [tensor for _, own in flat for tensor in own]
    found = list(leaves_of(structure, tensors, [3, 1, 1], False))
    assert [samples for samples, _ in found] == [3, 1, 1]
    assert all(same(batch, leaf) for (_, batch), leaf in zip(found, leaves, strict=True))
    assert joined([flat[0][0]] * 2) == flat[0][0]
    for wrong_tensors, wrong_samples in (
        (tensors[:2], [3, 1, 1]),
        (tensors, [3, 1]),
        ([*tensors, tensors[0]], [3, 1, 1]),
    ):
        with pytest.raises(MalformedFrame):
            list(leaves_of(structure, wrong_tensors, wrong_samples, False))


@pytest.mark.parametrize(
    ("tensors", "samples", "packed"),
    [
        ([torch.zeros(4)], [3], True),  # rows are not the samples
        ([torch.zeros(())], [1], True),
        ([], [1], True),
        ([torch.zeros(1)] * 3, [1, 1], False),  # do not divide
        ([torch.zeros(1)] * 4, [1, 1], False),  # two for one place
    ],
)
def test_tensors_that_do_not_fit_are_a_malformed_frame(tensors: list[Tensor], samples: list[int], packed: bool) -> None:
    with pytest.raises(MalformedFrame):
        list(leaves_of(msgpack.packb(["u", [["t"]]]), tensors, samples, packed))


def test_rows_cut_what_has_a_row_for_each_sample() -> None:
    batch = {
        "x": torch.arange(4), "mask": torch.zeros(2, 2), "name": ["a", "b", "c", "d"], "lr": 0.1,
        "pair": (torch.arange(4), torch.tensor(1.0)), "two": ["p", "q"],
    }  # fmt: skip
    cut = rows(batch, 4, 1, 3)
    assert cut["x"].tolist() == [1, 2]
    assert cut["mask"].shape == (2, 2)
    assert (cut["name"], cut["lr"], cut["two"]) == (["b", "c"], 0.1, ["p", "q"])
    assert (cut["pair"][0].tolist(), float(cut["pair"][1])) == ([1, 2], 1.0)


@pytest.mark.parametrize("samples", [2, 3, 5])
@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (str(i), torch.full((3,), i)),
        lambda i: {"name": str(i), "x": torch.full((3,), i), "y": i, "z": float(i)},
        lambda i: (torch.full((2, 2), i), {"names": (str(i), bytes([i]))}, i),
        lambda i: [(str(i), i), (float(i), str(-i))],
    ],
    ids=["text and rows", "dict", "nested", "pairs"],
)
def test_rows_of_what_torch_collates_are_what_it_collates_of_those_samples(sample: Any, samples: int) -> None:
    made = [sample(index) for index in range(samples)]
    whole = default_collate(made)
    for begin in range(samples):
        for end in range(begin + 1, samples + 1):
            assert same(rows(whole, samples, begin, end), default_collate(made[begin:end]))


def test_map_tensors_keeps_everything_else() -> None:
    batch = {"x": torch.ones(2), "rest": [1, ("a", None, torch.ones(1))]}
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert same(doubled, {"x": torch.full((2,), 2.0), "rest": [1, ("a", None, torch.full((1,), 2.0))]})
