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

from w5xde_async.codecs.codec import BytePool, Codec, Encoded, Form, Matrix, as_tensor, as_view, pieces
from w5xde_async.codecs.names import NAMES as HELP_NAMES
from w5xde_async.codecs.registry import codec
from w5xde_async.errors import FrameTooLarge, MalformedFrame

NAMES = [
    "raw", "bf16", "fp16", "int8", "int4", "sign", "topk:0.01", "topk:0.5", "sparseloco", "powersgd:2", "lz4",
    "lz4-shuffle", "lz4:int8", "lz4:topk:0.5", "lz4-shuffle:bf16",
]  # fmt: skip
SIZES = [0, 1, 2, 7, 255, 256, 257, 1023, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 65536 + 4096 + 300]


def form_of(numel: int) -> Form:
    """A bucket with a matrix in it, where there is room for one."""
    return Form(numel, (Matrix(16, 16, 15),)) if numel > 256 else Form(numel)


def gradient(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.rand(numel, generator=generator).pow(4)
    return torch.randn(numel, generator=generator) * magnitude


def repetitive(numel: int) -> Tensor:
    """What lz4 shrinks, under every codec."""
    return gradient(64).repeat(numel // 64 + 1)[:numel].contiguous()


def encoded(name: str, values: Tensor, pool: BytePool | None = None) -> Encoded:
    return codec(name).encoder(form_of(values.numel())).encode(values, pool or BytePool())


def decoded(what: Encoded) -> Tensor:
    out = torch.full((what.form.numel,), 77.0)
    what.codec.decode(what.data, what.form, out)
    return out


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# The sizes are in a loop, here and below: a test of each would take longer than what it tests.
def test_the_bytes_are_as_many_as_the_codec_says(name: str) -> None:
    for numel in SIZES:
        for values in (gradient(numel), repetitive(numel), torch.zeros(numel)):
            what = encoded(name, values)
            most = what.codec.encoded_nbytes(what.form)
            assert what.codec.name in {c.name for c in codec(name).alternatives}, numel
            assert what.data.numel() <= most if what.codec.variable else what.data.numel() == most, numel
            assert len(what.view) == what.data.numel(), numel
            what.codec.check_nbytes(what.form, what.data.numel())
            assert decoded(what).shape == (numel,)


@pytest.mark.parametrize("alpha", [1.0, -1.0])
def test_adding_gives_the_bits_of_decoding_and_adding(name: str, alpha: float) -> None:
    for numel in SIZES:
        what = encoded(name, gradient(numel) if numel % 2 else repetitive(numel))
        start = gradient(numel, seed=1)
        expected = start.clone().add_(decoded(what), alpha=alpha)
        what.codec.add_to(what.data, what.form, start, alpha)
        assert torch.equal(bits(start), bits(expected)), numel


@pytest.mark.parametrize("threads", [1, 2])
def test_same_input_same_bytes_whatever_ran_before(name: str, threads: int) -> None:
    values = gradient(3 * 65536 + 17)
    reference = bytes(encoded(name, values).view)
    pool = BytePool()
    for _ in range(2):  # the second time in memory that has been used
        try:
            torch.set_num_threads(1 if name.startswith("powersgd") else threads)
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
    zeros = decoded(encoded(name, torch.zeros(70_000)))
    assert not zeros.any()
    if codec(name).exact:
        values = torch.cat((gradient(5000), torch.tensor([-0.0, math.nan, math.inf, 1e-42])))
        assert torch.equal(bits(decoded(encoded(name, values))), bits(values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    for numel, where in product((1, 300, 70_000), (0.0, 0.37, 1.0)):
        values = gradient(numel)
        values[int(where * (numel - 1))] = bad
        encoder = codec(name).encoder(form_of(numel))
        what = encoder.encode(values, BytePool())
        assert not bool(decoded(what).isfinite().all()), (numel, where)
        after = encoder.encode(gradient(numel, seed=2), BytePool())  # nothing of it is left in the encoder
        assert bool(decoded(after).isfinite().all()), (numel, where)


def test_more_bad_values_than_are_sent(name: str) -> None:
    assert not bool(decoded(encoded(name, torch.full((5000,), math.nan))).isfinite().all())
    half = torch.where(torch.arange(5000) % 2 == 0, math.inf, 1.0)
    assert not bool(decoded(encoded(name, half)).isfinite().all())


@pytest.mark.parametrize("scale", [3e38, 1e30, 1e-30, 1e-38, 1e-44])
def test_finite_values_stay_finite(name: str, scale: float) -> None:
    values = gradient(5000).clamp_(-1, 1).mul_(scale)
    # powersgd's products overflow, which its docstring says: then it shows, and the step is skipped.
    if not (name.startswith("powersgd") and scale > 1e18):
        assert bool(decoded(encoded(name, values)).isfinite().all())
    elif scale > 1e38:
        assert not bool(decoded(encoded(name, values)).isfinite().all())


def test_what_a_target_must_be(name: str) -> None:
    what = encoded(name, gradient(600))
    for wrong in (torch.zeros(599), torch.zeros(600, dtype=torch.float64), torch.zeros(2, 300), torch.zeros(1200)[::2]):
        with pytest.raises(ValueError, match=r"bucket has|flat contiguous float32"):
            what.codec.decode(what.data, what.form, wrong)
        with pytest.raises(ValueError, match=r"bucket has|flat contiguous float32"):
            what.codec.encoder(what.form).encode(wrong, BytePool())
    with pytest.raises(ValueError, match="flat uint8"):
        what.codec.decode(what.data.to(torch.int16), what.form, torch.zeros(600))


# -- malformed


class Fenced:
    """A target between fences: what is written outside of it is seen."""

    def __init__(self, numel: int) -> None:
        self.whole = torch.full((numel + 200,), 4242.0)
        self.target = self.whole[100 : numel + 100]

    def intact(self) -> bool:
        return bool((self.whole[:100] == 4242.0).all() and (self.whole[-100:] == 4242.0).all())


def read(what: Codec, data: bytes, form: Form) -> bool:
    """Decode and add; True where both took it. They agree, and never raise anything but what a bad peer earns."""
    results = []
    for act in (what.decode, what.add_to):
        fenced = Fenced(form.numel)
        try:
            act(as_tensor(bytearray(data)), form, fenced.target)
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
    form = form_of(numel)
    what = codec(name)
    most = what.encoded_nbytes(form)
    nbytes = data.draw(st.one_of(st.just(most), st.integers(0, most + 9)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    read(what, np.random.default_rng(seed).bytes(nbytes), form)


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
    read(what.codec, bytes(altered[: len(altered) - cut]), what.form)


def test_a_wrong_length_is_refused_before_it_is_read(name: str) -> None:
    form = form_of(5000)
    what = codec(name)
    most = what.encoded_nbytes(form)
    with pytest.raises(FrameTooLarge):
        what.check_nbytes(form, most + 1)
    if not what.variable:
        with pytest.raises(MalformedFrame):
            what.check_nbytes(form, most - 1)
    assert not read(what, bytes(most + 1), form)


# -- forms and pools


def test_a_form_reads_matrices_off_the_layout() -> None:
    form = Form.of(1000, [(-30, (10, 10)), (70, (5,)), (80, (3, 4, 5)), (960, (7, 10)), (140, (3, 0))])
    assert form.matrices == (Matrix(0, 7, 10), Matrix(80, 3, 20), Matrix(960, 4, 10))
    assert Form.of(50, [(-5, (2, 30))]).matrices == ()  # one half row at either end
    assert Form.of(50, [(-5, (3, 20))]).matrices == (Matrix(15, 1, 20),)


@pytest.mark.parametrize(
    "matrices", [(Matrix(0, 5, 5), Matrix(24, 1, 1)), (Matrix(90, 2, 6),), (Matrix(-1, 1, 1),), (Matrix(0, 0, 1),)]
)
def test_matrices_lie_apart_within_the_bucket(matrices: tuple[Matrix, ...]) -> None:
    with pytest.raises(ValueError, match=r"overlaps|leaves"):
        Form(100, matrices)


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
    buffer = bytearray(b"abc")
    tensor = as_tensor(buffer)
    tensor[0] = 65
    assert buffer == b"Abc"
    assert as_view(tensor).tobytes() == b"Abc"
    assert len(as_view(as_tensor(bytearray()))) == 0


def test_pieces_cover_everything_once() -> None:
    def ends(numel: int, device: str) -> Iterator[tuple[int, int]]:
        return ((piece.start, piece.stop) for piece in pieces(numel, torch.device(device)))

    assert list(ends(0, "cpu")) == []
    assert list(ends(65537, "cpu")) == [(0, 65536), (65536, 65537)]
    assert list(ends(65537, "cuda")) == [(0, 65537)]


def test_bytes_at_odd_places_are_read(name: str) -> None:
    what = encoded(name, gradient(700))
    shifted = torch.empty(what.data.numel() + 3, dtype=torch.uint8)[3:].copy_(what.data)
    out = torch.zeros(700)
    what.codec.decode(shifted, what.form, out)
    assert torch.equal(bits(out), bits(decoded(what)))


@pytest.mark.parametrize("form", HELP_NAMES)
def test_every_name_in_the_help_is_a_codec(form: str) -> None:
    name = form.replace("FRACTION", "0.1").replace("RANK", "2")
    for text in {name.replace("[:CODEC]", ""), name.replace("[:CODEC]", ":bf16")}:
        assert codec(text).name.partition(":")[0].startswith(text.partition(":")[0].partition("-")[0])
