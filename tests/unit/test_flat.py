"""Flat memory with named views: a module's storage, a block's result, digests."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from w5xde_async.params.flat import (
    FlatState,
    ResultVector,
    _of_words,
    bytes_of,
    condensed,
    digest,
    fingerprints,
    l2_norm,
    named_digest,
    state_of,
)
from w5xde_async.params.layout import Layout


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("same", self.norm.running_mean)


def adopted() -> tuple[Model, FlatState]:
    torch.manual_seed(0)
    model = Model()
    state = FlatState(Layout.of(model, bucket_bytes=1 << 16))
    state.copy_from(model)
    state.adopt(model)
    return model, state


def test_adopting_keeps_the_values_and_shares_the_memory() -> None:
    torch.manual_seed(0)
    plain = Model()
    model, state = adopted()
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    for group in state.groups:
        group.fill_(2)
    for tensor in model.state_dict().values():
        assert bool((tensor == 2).all())
    assert model.tied.weight is model.first.weight
    assert model.same is model.norm.running_mean


def test_without_buffers_they_stay_the_modules_own() -> None:
    model = Model()
    state = FlatState(Layout.of(model))
    state.copy_from(model)
    state.adopt(model, buffers=False)
    state.groups[[group.role for group in state.layout.groups].index("mean")].fill_(7)
    assert not bool((model.norm.running_mean == 7).any())


def test_an_optimizer_made_before_goes_on_with_the_views() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = FlatState(Layout.of(model))
    state.copy_from(model)
    state.adopt(model)
    model.first.bias.grad = torch.ones(4)
    before = model.first.bias.detach().clone()
    optimizer.step()
    index = [entry.name for entry in state.layout.entries].index("first.bias")
    assert torch.equal(state.views[index], before - 1)


def test_the_digest_is_that_of_a_plain_module() -> None:
    torch.manual_seed(0)
    plain = Model()
    model, state = adopted()
    assert state.digest() == named_digest(plain) == named_digest(model)
    state.views[0].view(-1)[0] += 1
    assert state.digest() != named_digest(plain)


def test_the_digest_sees_single_bits() -> None:
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
    assert digest([torch.tensor([1.0, 2.0])]) != digest([torch.tensor([2.0, 1.0])])
    assert digest([torch.zeros(2, 3).t()]) == digest([torch.zeros(3, 2)])


def test_state_of_is_in_layout_order() -> None:
    model = Model()
    layout = Layout.of(model)
    tensors = model.state_dict(keep_vars=True)
    assert [
        tensors[entry.name] is tensor for entry, tensor in zip(layout.entries, state_of(model, layout), strict=True)
    ]


def test_buckets_are_the_memory_itself() -> None:
    _, state = adopted()
    for bucket, view in zip(state.layout.buckets, state.bucket_bytes, strict=True):
        assert view.nbytes == state.layout.state_nbytes(bucket)
        view[:] = bytes(len(view))
    assert all(not bool(group.any()) for group in state.groups)


def test_a_result_vector_begins_neutral() -> None:
    layout = Layout.of(Model())
    vector = ResultVector(layout)
    vector.memory.fill_(255)
    vector.reset()
    for group, piece in zip(layout.groups, vector.groups, strict=True):
        if group.role == "frozen":
            assert piece is None
        elif group.role == "max":
            assert bool((vector.group(group.index) == torch.iinfo(torch.int64).min).all())
        else:
            assert bool(vector.group(group.index).signbit().all())
            assert not bool(vector.group(group.index).any())
    assert math.copysign(1, -0.0 + -0.0) == -1  # why it is -0.0


def test_a_result_vector_is_aligned_and_its_views_do_not_overlap() -> None:
    layout = Layout.of(Model())
    vector = ResultVector(layout)
    vector.memory.zero_()
    assert [bytes_of(piece).nbytes for piece in vector.buckets] == [
        layout.result_nbytes(bucket) for bucket in layout.result_buckets
    ]
    assert all(offset % 64 == 0 for offset in layout.vector_offsets)
    for view in vector.bucket_bytes:
        assert not any(view)
        view[:] = b"\1" * len(view)
    views = [(e, view) for e, view in zip(layout.entries, vector.gradients, strict=True) if view is not None]
    assert [view.shape == torch.Size(entry.shape) for entry, view in views] == [True] * len(layout.trainable)
    assert {entry.name for entry, _ in views} == {layout.entries[index].name for index in layout.trainable}


def test_bytes_of() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    view = bytes_of(tensor)
    view[:2] = b"\x09\x00"
    assert (view.format, view.nbytes, int(tensor[0, 0])) == ("B", 8, 9)
    assert bytes_of(torch.empty(0)).nbytes == 0
    assert bytes(bytes_of(torch.tensor(1.5, dtype=torch.bfloat16))) == b"\xc0\x3f"


@pytest.mark.parametrize("numel", [1, 1000, (1 << 22) - 1, 1 << 22, (1 << 22) + 12345])
def test_a_norm_has_the_same_bits_with_any_number_of_threads_and_shows_what_is_not_finite(numel: int) -> None:
    values, threads = torch.randn(numel, generator=torch.Generator().manual_seed(1)), torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(l2_norm(values))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(torch.linalg.vector_norm(values.double())), rel=1e-4)
    for bad in (math.nan, math.inf, -math.inf):
        for at in (0, numel - 1):
            spoiled = values.clone()
            spoiled[at] = bad
            assert not math.isfinite(l2_norm(spoiled))
    large = values.sign() * 3e38
    assert l2_norm(large) == pytest.approx(3e38 * math.sqrt(numel), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_trained_is_finite_or_not(dtype: torch.dtype, bad: float) -> None:
    module = nn.Module()
    largest = torch.finfo(dtype).max
    module.weight = nn.Parameter(torch.full((5, 3), largest, dtype=dtype))  # whose sum is not finite
    module.frozen = nn.Parameter(torch.full((3,), bad, dtype=dtype), requires_grad=False)
    module.register_buffer("mask", torch.full((3,), bad))
    module.register_buffer("steps", torch.ones(2, dtype=torch.int64))
    module.empty = nn.Parameter(torch.empty(0, dtype=dtype))
    state = FlatState(Layout.of(module))
    state.copy_from(module)
    assert state.trains_finite
    view = next(v for v, e in zip(state.views, state.layout.entries, strict=True) if e.name == "weight")
    view[4, 1] = bad
    assert not state.trains_finite
    view.zero_()
    assert state.trains_finite


KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex128)


def of_bytes(tensor: Tensor) -> int:
    return int(fingerprints([tensor]))


def of_words(tensor: Tensor) -> int:
    """As on a GPU."""
    return int(_of_words(tensor))


def of_condensed(tensor: Tensor) -> int:
    """As of one among many."""
    return int(fingerprints([condensed(tensor)], resized=True))


@pytest.mark.parametrize("fingerprint", [of_bytes, of_words, of_condensed])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("numel", [1, 7, 1023, 1025, 50_003])
def test_a_fingerprint_tells_one_changed_value(
    fingerprint: Callable[[Tensor], int], dtype: torch.dtype, numel: int
) -> None:
    """Wherever it lies, and wherever the tensor begins in its memory."""
    for offset in (0, 1, 3):
        memory = torch.randn(numel + offset, generator=torch.Generator().manual_seed(0)).to(dtype)
        was = fingerprint(memory[offset:])
        assert fingerprint(memory[offset:]) == was
        for place in {0, numel // 2, numel - 1}:
            other = memory.clone()
            other.view(torch.uint8)[(offset + place) * dtype.itemsize] ^= 1
            assert fingerprint(other[offset:]) != was


@pytest.mark.parametrize("fingerprint", [of_bytes, of_words, of_condensed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("numel", [8, 1000, 200_000])
def test_a_fingerprint_tells_values_that_have_only_moved(
    fingerprint: Callable[[Tensor], int], dtype: torch.dtype, numel: int
) -> None:
    """Masks, signs and permutations, too, in which most bits are alike."""
    seeded = torch.Generator().manual_seed(0)
    mask = torch.arange(numel) == 3
    signs = torch.where(torch.rand(numel, generator=seeded) < 0.5, -1, 1)
    for values in (mask, signs, torch.arange(numel)):
        tensor = values.to(dtype)
        moved = [tensor.roll(1), tensor.flip(0), tensor[torch.randperm(numel, generator=seeded)]]
        if numel == 200_000:  # by whole columns, by whole rows
            per = 8 // dtype.itemsize
            moved.append(tensor.roll(per * 16))
            if fingerprint is not of_condensed:
                moved.append(tensor.roll(per * 1021))
        for other in moved:
            assert torch.equal(other, tensor) == (fingerprint(other) == fingerprint(tensor))


def test_there_are_fingerprints_of_nothing() -> None:
    assert fingerprints([]).tolist() == []
    assert fingerprints([torch.zeros(0, dtype=torch.bfloat16)]).tolist() == [0]
