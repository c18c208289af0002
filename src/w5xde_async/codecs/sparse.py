"""Codecs that send the largest values and leave the rest to error feedback.

| codec | bytes of n values |
|---|---|
| topk:f | at most 4 ceil(n / 65536) + 6 k, k = ceil(f n): 4 for each chunk, then 6 for each value sent |
| sparseloco | exactly 116 for each run of 4096; for a last one of r: 4 + ceil(1.5 k) + ceil(k / 4), k = ceil(r / 64) |

What is not sent decodes to -0.0, which leaves the bits of whatever it is added to.

``topk`` sends the k largest magnitudes of the bucket, exactly (of equal ones the first), as float32 with a 16-bit index
in a chunk of 65536; zeros are not sent. A sample of the bucket gives a threshold that a few more than k values pass,
and the k are chosen among those: the sample decides how long it takes, never what is sent.

``sparseloco`` sends the 64 largest of each run of 4096 with a 12-bit index and 2 bits: the sign, and whether the
magnitude is above 1.5 times the root mean square of the 64 (four bins over six sigma). Each of a run's two classes
decodes to its mean magnitude, a bfloat16 each.

NaN and infinity count as larger than any number, so they are sent. sparseloco: every value sent of a run with such a
value decodes to NaN.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from w5xde_async.codecs.blocks import pack, unpack
from w5xde_async.codecs.codec import Codec, pieces, scratch_for
from w5xde_async.errors import MalformedFrame

_INDEXED = 1 << 16  # values that a 16-bit index reaches
_MAGNITUDE = 0x7FFFFFFF  # of float32; as integers magnitudes keep their order, and NaN is above infinity
_SAMPLE_STRIDE = 61  # prime: no row length of a matrix is in step with it


class TopK(Codec):
    """The fraction of largest magnitudes, as they are."""

    variable = True
    needs_feedback = True

    def __init__(self, fraction: float) -> None:
        """Raises ValueError unless 0 < ``fraction`` <= 0.5: above it another codec has fewer bytes."""
        if not 0.0 < fraction <= 0.5:
            raise ValueError(f"a fraction above 0 and at most 0.5, not {fraction}")
        self.fraction = fraction
        self.name = f"topk:{fraction!r}"

    def kept(self, numel: int) -> int:
        """The most values that are sent of a bucket: ceil(fraction n)."""
        return math.ceil(self.fraction * numel)

    def encoded_nbytes(self, numel: int) -> int:
        """At most 4 ceil(n / 65536) + 6 ceil(fraction n)."""
        return 4 * -(-numel // _INDEXED) + 6 * self.kept(numel)

    def _write(self, values: Tensor, out: Tensor) -> int:
        chosen = _largest(values, self.kept(values.numel()))
        num_chunks, count = -(-values.numel() // _INDEXED), chosen.numel()
        counts = torch.bincount(chosen.bitwise_right_shift(16), minlength=num_chunks)
        out[: 4 * num_chunks].view(torch.int32).copy_(counts)
        split = 4 * num_chunks + 4 * count
        torch.index_select(values, 0, chosen, out=out[4 * num_chunks : split].view(torch.float32))
        out[split : split + 2 * count].view(torch.int16).copy_(chosen)  # the cast keeps the lowest 16 bits
        return split + 2 * count

    def _read(self, data: Tensor, target: Tensor, alpha: float | None) -> None:
        num_chunks = -(-target.numel() // _INDEXED)
        if data.numel() < 4 * num_chunks or (data.numel() - 4 * num_chunks) % 6:
            raise MalformedFrame(f"{self.name} bucket of {data.numel()} bytes")
        count = (data.numel() - 4 * num_chunks) // 6
        counts = data[: 4 * num_chunks].view(torch.int32).to(torch.int64)
        if bool((counts < 0).any()) or int(counts.sum()) != count:
            raise MalformedFrame(f"{self.name} bucket: its chunks do not add up to {count} values")
        split = 4 * num_chunks + 4 * count
        low = data[split:].view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
        chunk = torch.arange(num_chunks, device=data.device).mul_(_INDEXED).repeat_interleave(counts)
        _scatter(self.name, low.add_(chunk), data[4 * num_chunks : split].view(torch.float32), target, alpha)


def _scatter(name: str, where: Tensor, values: Tensor, target: Tensor, alpha: float | None) -> None:
    """Put or add values at ascending places. Raises MalformedFrame where they do not ascend or leave the bucket."""
    if where.numel() and (int(where[-1]) >= target.numel() or bool((where[1:] <= where[:-1]).any())):
        raise MalformedFrame(f"{name} bucket: indices do not ascend within {target.numel()}")
    if alpha is None:
        target.fill_(-0.0)[where] = values
    else:
        target.index_add_(0, where, values, alpha=alpha)


def _largest(values: Tensor, count: int) -> Tensor:
    """Ascending places of the ``count`` largest magnitudes that are not zero; of equal ones the first."""
    threshold = _sampled_threshold(values, count)
    found, magnitudes = _above(values, threshold)
    if found.numel() < count and threshold > 1:
        found, magnitudes = _above(values, 1)
    if found.numel() <= count:
        return found
    least = _kth_largest(magnitudes, count)
    keep = magnitudes > least
    equal = torch.nonzero(magnitudes == least).flatten()
    keep[equal[: count - int(keep.sum())]] = True
    return found[keep]


def _kth_largest(magnitudes: Tensor, count: int) -> int:
    if magnitudes.device.type == "cpu":  # ten times as fast as torch's
        bits = magnitudes.numpy()
        return int(np.partition(bits, bits.size - count)[bits.size - count])
    return int(torch.topk(magnitudes, count, sorted=False).values.amin())


def _sampled_threshold(values: Tensor, count: int) -> int:
    """A magnitude (as an integer, at least 1) that somewhat more than ``count`` values reach, most likely."""
    sample = values[:: _SAMPLE_STRIDE if values.numel() >= _INDEXED else 1]
    expected = count * sample.numel() / max(1, values.numel())
    place = math.ceil(expected + 3 * math.sqrt(expected) + 1)
    if place >= sample.numel():
        return 1
    return max(1, _kth_largest(sample.contiguous().view(torch.int32).bitwise_and(_MAGNITUDE), place))


def _above(values: Tensor, threshold: int) -> tuple[Tensor, Tensor]:
    """Places of the magnitudes that reach ``threshold``, and the magnitudes."""
    bits = values.view(torch.int32)
    scratch = scratch_for(values.numel(), values.device, torch.int32)
    places, magnitudes = [], []
    for piece in pieces(values.numel(), values.device):
        work = torch.bitwise_and(bits[piece], _MAGNITUDE, out=scratch[: piece.stop - piece.start])
        if work.device.type == "cpu":  # numpy compares and finds five times as fast as torch
            found = torch.from_numpy(np.flatnonzero(work.numpy() >= threshold))
        else:
            found = torch.nonzero(work >= threshold).flatten()
        magnitudes.append(work[found])
        places.append(found.add_(piece.start))
    if not places:
        return torch.empty(0, dtype=torch.int64, device=values.device), bits
    return torch.cat(places), torch.cat(magnitudes)


_RUN = 4096
_KEPT = 64


class SparseLoco(Codec):
    """64 of 4096 with two bits each (SparseLoCo); residuals decay by 0.95."""

    name = "sparseloco"
    needs_feedback = True
    residual_decay = 0.95

    def encoded_nbytes(self, numel: int) -> int:
        """Exactly 116 for each run of 4096, and the shorter last one."""
        rest = numel % _RUN
        return numel // _RUN * _run_nbytes(_RUN) + (_run_nbytes(rest) if rest else 0)

    def _write(self, values: Tensor, out: Tensor) -> int:
        at = 0
        for part in _parts(values.numel()):
            rows, width = _shape(part)
            x = values[part].view(rows, width)
            where = torch.cat([_largest_of_runs(x[some]) for some in _row_pieces(rows, x.device)])
            chosen = torch.gather(x, 1, where)
            large, levels = _two_levels(chosen.abs())
            coded = out[at : at + rows * _run_nbytes(width)].view(rows, -1)
            at += coded.numel()
            kept = where.shape[1]
            split = 4 + -(-3 * kept // 2)
            coded[:, :4] = levels.view(torch.uint8)
            coded[:, 4:split] = _pack_indices(where)
            codes = torch.zeros(rows, 4 * -(-kept // 4), dtype=torch.uint8, device=x.device)
            codes[:, :kept] = large.to(torch.uint8).mul_(2).add_(chosen < 0)
            pack(codes, 2, coded[:, split:])
        return at

    def _read(self, data: Tensor, target: Tensor, alpha: float | None) -> None:
        if alpha is None:
            target.fill_(-0.0)
        at = 0
        for part in _parts(target.numel()):
            rows, width = _shape(part)
            kept = -(-width // _KEPT)
            coded = data[at : at + rows * _run_nbytes(width)].view(rows, -1)
            at += coded.numel()
            split = 4 + -(-3 * kept // 2)
            where = _unpack_indices(coded[:, 4:split], kept)
            if bool((where[:, 1:] <= where[:, :-1]).any()) or bool((where[:, -1] >= width).any()):
                raise MalformedFrame(f"{self.name} bucket: indices do not ascend within {width}")
            codes = torch.empty(rows, 4 * -(-kept // 4), dtype=torch.uint8, device=data.device)
            unpack(coded[:, split:], 2, codes)
            codes = codes[:, :kept].to(torch.int64)
            levels = coded[:, :4].reshape(-1).view(torch.bfloat16).to(torch.float32).view(rows, 2)
            # Columns as the codes: small, -small, large, -large.
            signed = torch.stack((levels[:, 0], -levels[:, 0], levels[:, 1], -levels[:, 1]), dim=1)
            values = torch.gather(signed, 1, codes).flatten()
            first = torch.arange(rows, device=data.device).mul_(width)
            places = where.add_(first[:, None]).flatten()
            if alpha is None:
                target[part][places] = values
            else:
                target[part].index_add_(0, places, values, alpha=alpha)


def _parts(numel: int) -> list[slice]:
    """Slices of the whole runs, and of the shorter one that is left."""
    whole = numel // _RUN * _RUN
    return [part for part in (slice(0, whole), slice(whole, numel)) if part.stop > part.start]


def _row_pieces(rows: int, device: torch.device) -> list[slice]:
    """The runs that are searched at once."""
    return [slice(piece.start // _RUN, -(-piece.stop // _RUN)) for piece in pieces(rows * _RUN, device)]


def _largest_of_runs(x: Tensor) -> Tensor:
    """Ascending places [rows, kept] of each row's largest magnitudes; of equal ones the first."""
    rows, width = x.shape
    kept = -(-width // _KEPT)
    magnitudes = x.view(torch.int32).bitwise_and(_MAGNITUDE)
    if x.device.type != "cpu":
        order = magnitudes.sort(dim=1, descending=True, stable=True).indices
        return order[:, :kept].sort(dim=1).values
    bits = magnitudes.numpy()
    least = np.partition(bits, width - kept, axis=1)[:, width - kept, None]
    reach = bits >= least
    surplus = np.flatnonzero(np.count_nonzero(reach, axis=1) > kept)
    for row in surplus:  # several are equal to the least
        above = bits[row] > least[row]
        reach[row] = above
        reach[row, np.flatnonzero(bits[row] == least[row])[: kept - np.count_nonzero(above)]] = True
    return torch.from_numpy(np.nonzero(reach)[1].reshape(rows, kept))


def _shape(part: slice) -> tuple[int, int]:
    width = min(_RUN, part.stop - part.start)
    return (part.stop - part.start) // width, width


def _run_nbytes(width: int) -> int:
    kept = -(-width // _KEPT)
    return 4 + -(-3 * kept // 2) + -(-kept // 4)


def _two_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Which magnitudes are large, and the bfloat16 means [rows, 2] of the others and of those."""
    peak = magnitudes.amax(1, keepdim=True)
    scale = peak.clamp_min(torch.finfo(torch.float32).tiny)
    relative = magnitudes / scale  # at most 1, so that neither squares nor sums overflow
    large = relative > 1.5 * relative.square().mean(1, keepdim=True).sqrt()
    means = []
    for chosen in (~large, large):
        total = torch.where(chosen, relative, 0.0).sum(1, keepdim=True)
        means.append(total / chosen.sum(1, keepdim=True).clamp_min(1))
    levels = torch.cat(means, dim=1).mul_(scale)
    most = torch.finfo(torch.bfloat16).max
    return large, torch.where(levels.isfinite(), levels.clamp(-most, most), math.nan).to(torch.bfloat16)


def _pack_indices(where: Tensor) -> Tensor:
    """Rows of 12-bit numbers as bytes: two in three."""
    rows, kept = where.shape
    pairs = torch.zeros(rows, -(-kept // 2), 2, dtype=torch.int64, device=where.device)
    pairs.view(rows, -1)[:, :kept] = where
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    middle = low.bitwise_right_shift(8).bitwise_or_(high.bitwise_and(15).bitwise_left_shift_(4))
    triples = torch.stack((low.bitwise_and(255), middle, high.bitwise_right_shift(4)), dim=2)
    return triples.view(rows, -1)[:, : -(-3 * kept // 2)].to(torch.uint8)


def _unpack_indices(packed: Tensor, kept: int) -> Tensor:
    rows = packed.shape[0]
    triples = torch.zeros(rows, -(-kept // 2), 3, dtype=torch.int64, device=packed.device)
    triples.view(rows, -1)[:, : packed.shape[1]] = packed
    low = triples[:, :, 1].bitwise_and(15).bitwise_left_shift_(8).bitwise_or_(triples[:, :, 0])
    high = triples[:, :, 1].bitwise_right_shift(4).bitwise_or_(triples[:, :, 2].bitwise_left_shift(4))
    return torch.stack((low, high), dim=2).view(rows, -1)[:, :kept]
