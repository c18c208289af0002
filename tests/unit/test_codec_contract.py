"""What every codec promises: exact sizes, bounds, the same bits, malformed bytes, values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from w5xde_async.codecs import codec as codec_module
from w5xde_async.codecs.codec import BytePool, Codec, Encoded, as_view, pieces
from w5xde_async.codecs.names import NAMES as HELP_NAMES
from w5xde_async.codecs.registry import codec
from w5xde_async.errors import FrameTooLarge, MalformedFrame

NAMES = [
    "raw", "bf16", "fp16", "int8", "int4", "sign", "topk:0.01", "topk:0.5", "sparseloco", "lz4", "lz4-shuffle",
    "lz4:int8", "lz4:topk:0.5", "lz4-shuffle:bf16",
]  # fmt: skip
SIZES = [0, 1, 2, 7, 255, 256, 257, 1023, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 65536 + 4096 + 300]


def as_tensor(data: bytes) -> Tensor:
    """A flat uint8 tensor of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def gradient(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.rand(numel, generator=generator).pow(4)
    return torch.randn(numel, generator=generator) * magnitude


def repetitive(numel: int) -> Tensor:
    """What lz4 shrinks, under every codec."""
    return gradient(64).repeat(numel // 64 + 1)[:numel].contiguous()


def encoded(name: str, values: Tensor, pool: BytePool | None = None) -> Encoded:
    return codec(name).encode(values, pool or BytePool())


def decoded(what: Encoded, numel: int) -> Tensor:
    out = torch.full((numel,), 77.0)
    what.codec.decode(what.data, out)
    return out


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a quarter of a megabyte are worked on in several pieces."""
    monkeypatch.setattr(codec_module, "_CPU_CHUNK", 1 << 16)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# The sizes are in a loop, here and below: a test of each would take longer than what it tests.
def test_the_bytes_are_as_many_as_the_codec_says(name: str) -> None:
    for numel in SIZES:
        for values in (gradient(numel), repetitive(numel), torch.zeros(numel)):
            what = encoded(name, values)
            most = what.codec.encoded_nbytes(numel)
            assert what.codec.name in {c.name for c in codec(name).alternatives}, numel
            assert what.data.numel() <= most if what.codec.variable else what.data.numel() == most, numel
            assert len(what.view) == what.data.numel(), numel
            what.codec.check_nbytes(numel, what.data.numel())
            decoded(what, numel)


@pytest.mark.parametrize("alpha", [1.0, -1.0])
def test_adding_gives_the_bits_of_decoding_and_adding(name: str, alpha: float) -> None:
    for numel in SIZES:
        what = encoded(name, gradient(numel) if numel % 2 else repetitive(numel))
        start = gradient(numel, seed=1)
        expected = start.clone().add_(decoded(what, numel), alpha=alpha)
        what.codec.add_to(what.data, start, alpha)
        assert torch.equal(bits(start), bits(expected)), numel


@pytest.mark.parametrize("threads", [1, 2])
def test_same_input_same_bytes_whatever_ran_before(name: str, threads: int) -> None:
    values = gradient(3 * 65536 + 17)
    reference = bytes(encoded(name, values).view)
    pool = BytePool()
    for _ in range(2):  # the second time in memory that has been used
        try:
            torch.set_num_threads(threads)
            what = encoded(name, values, pool)
        finally:
            torch.set_num_threads(1)
        assert bytes(what.view) == reference
        what.data.fill_(255)
        pool.give(what.data)


def test_the_values_are_not_changed(name: str) -> None:
    values = gradient(5000)
    kept = values.clone()
    encoded(name, values)
    assert torch.equal(values, kept)


def test_encoding_again_gives_what_was_decoded(name: str) -> None:
    """Zeros stay zeros, and a codec that is exact gives back every bit."""
    zeros = decoded(encoded(name, torch.zeros(70_000)), 70_000)
    assert not zeros.any()
    if codec(name).exact:
        values = torch.cat((gradient(5000), torch.tensor([-0.0, math.nan, math.inf, 1e-42])))
        assert torch.equal(bits(decoded(encoded(name, values), values.numel())), bits(values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    for numel, where in product((1, 300, 70_000), (0.0, 0.37, 1.0)):
        values = gradient(numel)
        values[int(where * (numel - 1))] = bad
        assert not bool(decoded(encoded(name, values), numel).isfinite().all()), (numel, where)


def test_more_bad_values_than_are_sent(name: str) -> None:
    assert not bool(decoded(encoded(name, torch.full((5000,), math.nan)), 5000).isfinite().all())
    half = torch.where(torch.arange(5000) % 2 == 0, math.inf, 1.0)
    assert not bool(decoded(encoded(name, half), 5000).isfinite().all())


@pytest.mark.parametrize("scale", [3e38, 1e30, 1e-30, 1e-38, 1e-44])
def test_finite_values_stay_finite(name: str, scale: float) -> None:
    values = gradient(5000).clamp_(-1, 1).mul_(scale)
    assert bool(decoded(encoded(name, values), 5000).isfinite().all())


def test_what_a_target_must_be(name: str) -> None:
    what = encoded(name, gradient(600))
    for wrong in (torch.zeros(600, dtype=torch.float64), torch.zeros(2, 300), torch.zeros(1200)[::2]):
        with pytest.raises(ValueError, match="flat contiguous float32"):
            what.codec.decode(what.data, wrong)
        with pytest.raises(ValueError, match="flat contiguous float32"):
            what.codec.encode(wrong, BytePool())
    with pytest.raises(ValueError, match="flat uint8"):
        what.codec.decode(what.data.to(torch.int16), torch.zeros(600))


# -- malformed


class Fenced:
    """A target between fences: what is written outside of it is seen."""

    def __init__(self, numel: int) -> None:
        self.whole = torch.full((numel + 200,), 4242.0)
        self.target = self.whole[100 : numel + 100]

    def intact(self) -> bool:
        return bool((self.whole[:100] == 4242.0).all() and (self.whole[-100:] == 4242.0).all())


def read(what: Codec, data: bytes, numel: int) -> bool:
    """Decode and add; True where both took it. They agree, and never raise anything but what a bad peer earns."""
    results = []
    for act in (what.decode, what.add_to):
        fenced = Fenced(numel)
        try:
            act(as_tensor(data), fenced.target)
            results.append(True)
        except (MalformedFrame, FrameTooLarge):
            results.append(False)
        assert fenced.intact()
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_bytes_never_do_harm(name: str, data: st.DataObject) -> None:
    numel = data.draw(st.sampled_from([0, 1, 5, 257, 4097, 66_000]))
    what = codec(name)
    most = what.encoded_nbytes(numel)
    nbytes = data.draw(st.one_of(st.just(most), st.integers(0, most + 9)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    read(what, np.random.default_rng(seed).bytes(nbytes), numel)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_altered_bytes_never_do_harm(name: str, data: st.DataObject) -> None:
    numel = data.draw(st.sampled_from([1, 300, 4500, 66_000]))
    what = encoded(name, repetitive(numel))
    altered = bytearray(what.view)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(altered) - 1)) if data.draw(st.booleans()) else 0
        altered[at % len(altered)] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 3, 8]))
    read(what.codec, bytes(altered[: len(altered) - cut]), numel)


def test_a_wrong_length_is_refused_before_it_is_read(name: str) -> None:
    what = codec(name)
    most = what.encoded_nbytes(5000)
    with pytest.raises(FrameTooLarge):
        what.check_nbytes(5000, most + 1)
    if not what.variable:
        with pytest.raises(MalformedFrame):
            what.check_nbytes(5000, most - 1)
    assert not read(what, bytes(most + 1), 5000)


# -- pools


def test_a_pool_lends_the_same_memory_again() -> None:
    pool = BytePool(spare_bytes=8192)
    first, second = pool.take(5000), pool.take(5000)
    assert first.numel() == 5000
    assert pool.num_out == 2
    address = first.data_ptr()
    assert address % 64 == 0
    pool.give(first[:0])
    pool.give(second.view(torch.uint8))  # over its bound: let go
    assert pool.num_out == 0
    assert pool.take(8000).data_ptr() == address
    with pytest.raises(ValueError, match="not out"):
        pool.give(torch.zeros(3))
    assert pool.take_floats(3).dtype == torch.float32


def test_views_are_uncopied() -> None:
    tensor = as_tensor(b"abc")
    view = as_view(tensor)
    tensor[0] = 65
    assert view.tobytes() == b"Abc"
    assert len(as_view(as_tensor(b""))) == 0


def test_pieces_cover_everything_once() -> None:
    def ends(numel: int, device: str) -> Iterator[tuple[int, int]]:
        return ((piece.start, piece.stop) for piece in pieces(numel, torch.device(device)))

    assert list(ends(0, "cpu")) == []
    assert list(ends(65537, "cpu")) == [(0, 65536), (65536, 65537)]
    assert list(ends(65537, "cuda")) == [(0, 65537)]


def test_how_much_is_worked_on_at_once_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 3 * 65536 + 4096 + 301
    found = []
    for chunk in (1 << 12, 1 << 16, 1 << 20):
        monkeypatch.setattr(codec_module, "_CPU_CHUNK", chunk)
        what = encoded(name, gradient(numel))
        sums = gradient(numel, seed=1)
        what.codec.add_to(what.data, sums, alpha=-1.0)
        found.append((what.data, bits(decoded(what, numel)), bits(sums)))
    for other in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], other, strict=True))


def test_bytes_at_odd_places_are_read(name: str) -> None:
    what = encoded(name, gradient(700))
    shifted = torch.empty(what.data.numel() + 3, dtype=torch.uint8)[3:].copy_(what.data)
    out = torch.zeros(700)
    what.codec.decode(shifted, out)
    assert torch.equal(bits(out), bits(decoded(what, 700)))


@pytest.mark.parametrize("form", HELP_NAMES)
def test_every_name_in_the_help_is_a_codec(form: str) -> None:
    name, _, inner = form.replace("FRACTION", "0.1").partition("[:")
    inners = inner.removesuffix("]").replace("CODEC", "bf16").split("|")
    for text in [name, *(f"{name}:{one}" for one in inners if one)]:
        assert codec(text).name.partition(":")[0].startswith(text.partition(":")[0].partition("-")[0])
