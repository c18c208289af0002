"""What each codec makes of values: its formula, its error, its exact bytes. And the registry."""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
import torch
from tests.generated.scenario import CODECS as GENERATED
from tests.unit.test_codec_contract import NAMES as CONTRACT_NAMES
from tests.unit.test_codec_contract import as_tensor, bits, decoded, gradient, repetitive
from torch import Tensor

from w5xde_async.codecs import registry
from w5xde_async.codecs.codec import BytePool, Codec, Encoded
from w5xde_async.codecs.lossless import Lz4
from w5xde_async.codecs.names import is_codec
from w5xde_async.codecs.registry import NAMES, codec, refuse_divergence
from w5xde_async.codecs.sparse import SparseLoco, TopK
from w5xde_async.errors import FrameTooLarge, MalformedFrame, UsageError

_ROOT = Path(__file__).parents[2]
_BENCH = (_ROOT / "bench/codecs.py").read_text()
EDGES = [1, 255, 256, 257, 1024, 1025, 65537]


def through(name: str, values: Tensor) -> tuple[Encoded, Tensor]:
    what = codec(name).encode(values, BytePool())
    return what, decoded(what, values.numel())


def refused(what: Codec, numel: int, data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        what.decode(as_tensor(data), torch.zeros(numel))


# -- halves


def test_bf16_is_a_cast() -> None:
    values = gradient(70_000)
    what, back = through("bf16", values)
    assert torch.equal(back, values.to(torch.bfloat16).float())
    assert what.data.numel() == 140_000
    assert float(((back - values) / values).abs().max()) <= 2**-8


def test_fp16_is_a_cast_that_saturates() -> None:
    values = gradient(70_000).mul_(0.1)
    _, back = through("fp16", values)
    assert torch.equal(back, values.to(torch.float16).float())
    values[:6] = torch.tensor([65504.0, 65519.0, 70_000.0, -3e38, math.inf, math.nan])
    _, back = through("fp16", values)
    assert back[:5].tolist() == [65504.0, 65504.0, 65504.0, -65504.0, math.inf]
    assert math.isnan(back[5])
    assert torch.equal(back[6:], values[6:].to(torch.float16).float())


# -- blocks


@pytest.mark.parametrize("numel", EDGES)
def test_int8_is_off_by_half_a_step_of_its_block(numel: int) -> None:
    values = gradient(numel)
    _, back = through("int8", values)
    for start in range(0, numel, 256):
        block, found = values[start : start + 256], back[start : start + 256]
        peak = float(block.abs().max())
        assert float((found - block).abs().max()) <= peak / 254 * (1 + 1e-5)
        assert float(found.abs().max()) == pytest.approx(peak, rel=1e-6)


def test_int8s_bytes() -> None:
    what, _ = through("int8", torch.tensor([127.0, -64.4, 0.5, 1.5, -0.2]))
    assert bytes(what.view) == struct.pack("<f5b", 1.0, 127, -64, 0, 2, 0)


@pytest.mark.parametrize("numel", EDGES)
def test_int4_takes_the_nearest_power(numel: int) -> None:
    values = gradient(numel)
    _, back = through("int4", values)
    grid = np.array([0.0, *[2.0**-j for j in range(6, -1, -1)]])
    for start in range(0, numel, 256):
        block, found = values[start : start + 256].double().numpy(), back[start : start + 256].double().numpy()
        peak = np.abs(block).max()
        nearest = np.abs(np.abs(block)[:, None] / peak - grid).min(axis=1) * peak
        assert np.allclose(np.abs(found - block), nearest, rtol=1e-4, atol=peak * 1e-6)


def test_int4s_bytes() -> None:
    # Halves of the block beside each other: codes of 1.0 and -0.5, of 1/64 and 0, of 0.76 and nothing.
    what, back = through("int4", torch.tensor([1.0, 1 / 64, 0.76, -0.5, 0.007]))
    assert bytes(what.view) == struct.pack("<f3B", 1.0, 7 | (8 | 6) << 4, 1 | 0 << 4, 7)
    assert back.tolist() == [1.0, 1 / 64, 1.0, -0.5, 0.0]


@pytest.mark.parametrize("numel", EDGES)
def test_sign_times_the_mean_of_its_block(numel: int) -> None:
    values = gradient(numel)
    _, back = through("sign", values)
    for start in range(0, numel, 1024):
        block = values[start : start + 1024]
        expected = torch.where(block < 0, -1.0, 1.0) * block.abs().mean()
        assert torch.allclose(back[start : start + 1024], expected, rtol=1e-5)


def test_signs_bytes() -> None:
    what, _ = through("sign", torch.tensor([-1.0, 2.0, -3.0, 0.0, 1.0, 1.0, 1.0, 1.0, -2.0]))
    assert bytes(what.view)[4:] == bytes([0b101, 1])
    assert struct.unpack("<f", bytes(what.view)[:4])[0] == pytest.approx(12 / 9)


@pytest.mark.parametrize("name", ["int8", "int4", "sign"])
def test_a_bad_block_leaves_the_others_alone(name: str) -> None:
    values = gradient(3000)
    _, sound = through(name, values)
    block = 1024 if name == "sign" else 256
    values[block + 3] = math.nan
    _, back = through(name, values)
    assert bool(back[block : 2 * block].isfinite().logical_not().all())
    assert torch.equal(back[:block], sound[:block])
    assert torch.equal(back[2 * block :], sound[2 * block :])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blocks_of_almost_nothing(name: str) -> None:
    values = torch.zeros(1024)
    values[256:512] = 1e-40
    values[512:] = 2.0**-121
    what, back = through(name, values)
    assert not any(bytes(what.view)[16 : 16 + 256 * codec(name).encoded_nbytes(512) // 520])
    assert float((back - values).abs().max()) <= 2.0**-120 / (254 if name == "int8" else 4)


# -- sparse


def plain_top(values: Tensor, count: int) -> Tensor:
    """The largest magnitudes by a stable sort; everything else -0.0."""
    order = values.abs().sort(descending=True, stable=True).indices[:count]
    kept = torch.full_like(values, -0.0)
    kept[order] = values[order]
    return kept


@pytest.mark.parametrize("numel", [1, 10, 4097, 65536, 65537, 200_000])
@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_topk_sends_the_largest_exactly(numel: int, fraction: float) -> None:
    values = gradient(numel)
    count = math.ceil(fraction * numel)
    what, back = through(f"topk:{fraction}", values)
    assert torch.equal(back, plain_top(values, count))
    assert what.data.numel() == 4 * math.ceil(numel / 65536) + 6 * count


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(150_000),  # all equal: the first ones
        torch.ones(150_000).mul_((torch.arange(150_000) % 61 == 0) * 99.0 + 1),  # the sample sees large ones alone
        torch.where(torch.arange(150_000) % 61 == 0, 0.0, gradient(150_000)),  # the sample sees zeros alone
        torch.where(torch.arange(150_000) > 149_000, gradient(150_000), 0.0),  # all in one corner
    ],
    ids=["equal", "sample above", "sample below", "corner"],
)
def test_topk_does_not_depend_on_its_sample(values: Tensor) -> None:
    _, back = through("topk:0.05", values)
    assert torch.equal(back, plain_top(values, 7500))


def test_topk_sends_no_zeros() -> None:
    values = torch.zeros(1000)
    values[[3, 500]] = torch.tensor([1.0, -2.0])
    what, back = through("topk:0.1", values)
    assert bytes(what.view) == struct.pack("<I2f2H", 2, 1.0, -2.0, 3, 500)
    assert torch.equal(back, values)
    assert int(bits(back)[0]) == -(2**31)  # -0.0: adding it changes no bit


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\1\0\0", struct.pack("<I", 1), struct.pack("<IfH", 2, 1.0, 5), struct.pack("<IfH", 1, 1.0, 1000),
        struct.pack("<I2f2H", 2, 1.0, 2.0, 5, 5), struct.pack("<I2f2H", 2, 1.0, 2.0, 6, 5),
        struct.pack("<IfH", 2**32 - 1, 1.0, 5),
    ],
)  # fmt: skip
def test_topk_refuses(data: bytes) -> None:
    refused(TopK(0.1), 1000, data)


def test_topk_refuses_counts_that_cancel() -> None:
    refused(TopK(0.1), 70_000, struct.pack("<2ifH", 2, -1, 1.0, 5))


@pytest.mark.parametrize("numel", [1, 63, 65, 4096, 4097, 70_000])
def test_sparseloco_is_its_formula(numel: int) -> None:
    values = gradient(numel)
    _, back = through("sparseloco", values)
    for start in range(0, numel, 4096):
        run, found = values[start : start + 4096], back[start : start + 4096]
        kept = plain_top(run, math.ceil(run.numel() / 64))
        assert torch.equal(kept != 0, found != 0)
        chosen = kept[kept != 0]
        large = chosen.abs() > 1.5 * chosen.square().mean().sqrt()
        for part in (large, ~large):
            if part.any():
                mean = chosen[part].abs().mean().to(torch.bfloat16).float()
                assert torch.allclose(found[kept != 0][part], chosen[part].sign() * mean, rtol=2**-7)


def test_sparselocos_bytes() -> None:
    values = torch.zeros(130)  # three are kept: 12-bit indices 1, 66, 129 and codes 2, 1, 0
    values[[1, 66, 129]] = torch.tensor([16.0, -0.5, 0.5])
    what, _ = through("sparseloco", values)
    assert bytes(what.view)[4:] == bytes([1, 66 << 4 & 255, 66 >> 4, 129, 0, 2 | 1 << 2])
    assert what.data.numel() == SparseLoco().encoded_nbytes(130)
    assert SparseLoco().encoded_nbytes(4096) == 116


def test_sparseloco_takes_the_first_of_equals() -> None:
    _, back = through("sparseloco", torch.ones(4096))
    assert torch.nonzero(back).flatten().tolist() == list(range(64))


@pytest.mark.parametrize("body", [bytes([1, 0x20, 0, 0x01, 0, 0]), bytes([1, 0x20, 4, 0x03, 0, 0]), bytes(6)])
def test_sparseloco_refuses_indices(body: bytes) -> None:
    refused(SparseLoco(), 130, bytes(4) + body)


# -- lossless


def test_lz4_gives_way_where_it_does_not_pay() -> None:
    what, back = through("lz4", gradient(100_000))
    assert what.codec.name == "raw"
    assert torch.equal(back, gradient(100_000))
    what, back = through("lz4", repetitive(100_000))
    assert what.codec.name == "lz4"
    assert what.data.numel() < 0.1 * 400_000
    assert torch.equal(back, repetitive(100_000))


def test_shuffling_finds_what_lz4_alone_does_not() -> None:
    values = torch.arange(100_000, dtype=torch.float32) + gradient(100_000)
    assert through("lz4", values)[0].codec.name == "raw"
    assert through("lz4-shuffle", values)[0].codec.name == "lz4-shuffle"


def test_a_bucket_whose_middle_does_not_shrink() -> None:
    """The probes are taken in by its ends; the pieces in the middle are sent as they are."""
    values = torch.zeros(1_000_000)
    values[400_000:600_000] = gradient(200_000)
    what, back = through("lz4", values)
    assert what.codec.name == "lz4"
    assert torch.equal(back, values)


def smooth(numel: int) -> Tensor:
    """Magnitudes alike, as in a layer's gradient: the highest bytes shrink."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["lz4", "lz4-shuffle", "lz4-shuffle:bf16", "lz4:int8"])
@pytest.mark.parametrize("numel", [1 << 20, (1 << 20) + 12345])
def test_any_number_of_threads_gives_the_same_bytes(name: str, numel: int, torch_threads: Any) -> None:
    values = smooth(numel) if "shuffle" in name else repetitive(numel)
    written = set()
    for threads in (1, 2, 3, 64):
        torch_threads(threads)
        what, _ = through(name, values)
        written.add(bytes(what.view))
        assert what.codec.name == name
    assert len(written) == 1


def test_large_buckets_are_compressed_by_several_threads(torch_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once: each waits for the other. A bucket that is small, or one thread, is no reason to start another."""
    real, meeting, met = lz4.block.compress, threading.Barrier(2), []

    def compress(*args: Any, **kwargs: Any) -> Any:
        met.append(meeting.wait(20))
        return real(*args, **kwargs)

    values = smooth(1 << 20)
    alone = bytes(codec("lz4-shuffle").encode(values, BytePool()).view)
    torch_threads(2)
    before = threading.active_count()
    monkeypatch.setattr(Lz4, "_pays", lambda self, data: True)
    monkeypatch.setattr("lz4.block.compress", compress)
    assert bytes(codec("lz4-shuffle").encode(values, BytePool()).view) == alone
    assert len(met) == 16
    assert threading.active_count() == before
    monkeypatch.setattr("lz4.block.compress", real)
    monkeypatch.setattr("w5xde_async.codecs.lossless.ThreadPoolExecutor", None)
    codec("lz4-shuffle").encode(gradient(100_000), BytePool())
    torch_threads(1)
    codec("lz4-shuffle").encode(values, BytePool())


def test_what_one_of_several_threads_raises_is_raised(torch_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_threads(2)
    monkeypatch.setattr(Lz4, "_pays", lambda self, data: True)
    calls = iter(range(100))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 9:
            raise MemoryError("no more")
        return b"short"

    monkeypatch.setattr("lz4.block.compress", fail)
    with pytest.raises(MemoryError, match="no more"):
        codec("lz4-shuffle").encode(gradient(1 << 20), BytePool())


def test_lz4_gives_its_buffers_back() -> None:
    pool = BytePool()
    for values in (gradient(100_000), repetitive(100_000)):
        what = codec("lz4:int8").encode(values, pool)
        assert pool.num_out == 1
        pool.give(what.data)


def test_lz4_refuses() -> None:
    what = Lz4()
    whole = bytes(through("lz4", repetitive(1000))[0].view)
    short = lz4.block.compress(bytes(3996), store_size=False)
    for data in (
        b"", whole[:7], whole[:11], whole[:-1], whole + b"x", struct.pack("<Q", 1 << 60),
        struct.pack("<QI", 4000, 4) + bytes(4), struct.pack("<QI", 4000, 2**32 - 1) + bytes(4),
        struct.pack("<QI", 4000, len(short)) + short, struct.pack("<QI", 3996, len(whole) - 12) + whole[12:],
    ):  # fmt: skip
        with pytest.raises((MalformedFrame, FrameTooLarge)):
            what.decode(as_tensor(data), torch.zeros(1000))


def test_lz4_allocates_nothing_for_an_inner_length_that_cannot_be() -> None:
    """Four bytes of a frame would otherwise buy a quarter of a MiB."""
    announced = struct.pack("<Q", 200 << 20) + bytes(4 * 800)
    with pytest.raises(FrameTooLarge, match="raw bucket of 209715200 bytes"):
        Lz4().decode(as_tensor(announced), torch.zeros(1000))


# -- registry


@pytest.mark.parametrize("name", ["raw", "bf16", "topk:0.01", "lz4", "lz4-shuffle", "lz4:topk:0.25"])
def test_names_are_what_they_were_made_from(name: str) -> None:
    assert codec(name).name == name
    assert is_codec(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gzip", "unknown codec 'gzip'; there are raw, bf16"), ("", "unknown codec"), ("int8:4", "takes no argument"),
        ("topk", "needs a number: topk:FRACTION"), ("topk:x", "could not convert"), ("topk:0", "above 0"),
        ("topk:nan", "above 0"), ("topk:0.6", "at most 0.5"), ("powersgd:4", "unknown codec"),
        ("lz4:lz4", "lz4 of lz4"), ("lz4-shuffle:int8", "nothing to shuffle"),
        ("lz4:", "unknown codec"), ("lz4:gzip", "unknown codec 'gzip'"), ("lz4:" * 30, "name of 120 characters"),
    ],
)  # fmt: skip
def test_wrong_names_are_explained(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        codec(name)
    assert not is_codec(name)


def _family(name: str) -> str:
    return re.split("[:[]", name)[0]


def test_every_family_is_listed() -> None:
    known = {*registry._PLAIN, *registry._WRAPPERS, "topk"}
    listed = {_family(name) for name in NAMES}
    assert listed == known, f"codecs/names.py and codecs/registry.py differ in {sorted(listed ^ known)}"
    for name in NAMES:
        made = name.replace("FRACTION", "0.01").partition("[")[0]
        assert codec(made).name.split(":")[0] == name.split(":")[0].split("[")[0]
        assert is_codec(made)
        for wrapper in ("lz4", "lz4-shuffle"):
            assert is_codec(f"{wrapper}:{made}") == _is_made(f"{wrapper}:{made}")


def _is_made(name: str) -> bool:
    try:
        return bool(codec(name))
    except UsageError:
        return False


def _rows(document: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", document.split("## What holds for all of them")[0], re.MULTILINE)


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("tests/unit/test_codec_contract.py: NAMES", lambda: CONTRACT_NAMES),
        ("tests/generated/scenario.py: CODECS", lambda: GENERATED),
        ("docs/codecs.md: the table of all codecs", lambda: _rows((_ROOT / "docs/codecs.md").read_text())),
        ("bench/codecs.py: CODECS", lambda: re.findall(r'[^",\s]+', _BENCH.split("CODECS = (")[1].split(")")[0])),
    ],
    ids=["contract", "generated", "document", "bench"],
)
def test_every_codec_is_where_all_codecs_are(place: str, names: Callable[[], Iterable[str]]) -> None:
    missing = {_family(name) for name in NAMES} - {_family(name) for name in names()}
    assert not missing, f"add {', '.join(sorted(missing))} to {place}"


@pytest.mark.parametrize("name", ["topk:0.01", "sign", "sparseloco", "lz4:sign"])
def test_what_does_not_converge_without_feedback_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"codec {name} leaves out most .* turn error feedback on"):
        refuse_divergence(codec(name), feedback=False)
    refuse_divergence(codec(name), feedback=True)


@pytest.mark.parametrize("name", ["raw", "lz4", "bf16", "fp16", "int8", "int4", "lz4:int8"])
def test_what_keeps_every_value_is_not(name: str) -> None:
    refuse_divergence(codec(name), feedback=False)
    assert codec(name).exact == (name in ("raw", "lz4"))
