"""Sums that are brought to an accelerator ahead of their step: only the very tensor that a step is given counts."""

from __future__ import annotations

import pytest
import torch
from tests.support import jobs
from torch import Tensor

from w5xde_async.job import build_model
from w5xde_async.params.flat import FlatState, l2_norm
from w5xde_async.params.layout import Layout
from w5xde_async.updates.on_device import OnDevice


def made() -> tuple[OnDevice, list[Tensor]]:
    """And the sums of one step."""
    model = build_model(jobs.mlp_sgd())
    layout = Layout.of(model, bucket_bytes=4 << 10)
    state = FlatState(layout)
    state.adopt(model)
    generator = torch.Generator().manual_seed(1)
    sums = [torch.randn(bucket.numel, generator=generator) for bucket in layout.result_buckets]
    return OnDevice(model, layout, state, torch.device("cpu")), sums


def test_what_was_brought_is_divided_as_it_was_then() -> None:
    device, sums = made()
    kept = [piece.clone() for piece in sums]
    for bucket, piece in enumerate(sums):
        device.bring(bucket, piece)
        piece.fill_(9.0)  # its worker writes there again
    assert device.norms(dict(enumerate(sums))) == {b: torch.linalg.vector_norm(p).item() for b, p in enumerate(kept)}
    device.divide(sums, [True] * len(sums), 4.0)
    assert all(torch.equal(device.vector.buckets[bucket], piece / 4.0) for bucket, piece in enumerate(kept))


def test_norms_of_what_has_no_squares_in_float32() -> None:
    device, sums = made()
    for bucket, piece in enumerate(sums):
        device.bring(bucket, piece.fill_(1e20))
    expected = {bucket: 1e20 * piece.numel() ** 0.5 for bucket, piece in enumerate(sums)}
    assert device.norms(dict(enumerate(sums))) == pytest.approx(expected)
    square = device.divide(sums, [True] * len(sums), 1.0)
    assert square**0.5 == pytest.approx(1e20 * sum(piece.numel() for piece in sums) ** 0.5)


def test_another_tensor_at_the_same_place_was_not_brought() -> None:
    """The same step's result of another worker, or the next step's."""
    device, sums = made()
    others = [2.0 * piece for piece in sums]
    for bucket, piece in enumerate(sums):
        device.bring(bucket, piece)
    assert device.norms(dict(enumerate(others))) == {}
    square = device.divide(others, [True] * len(sums), 1.0)
    assert all(torch.equal(device.vector.buckets[bucket], piece) for bucket, piece in enumerate(others))
    assert abs(square**0.5 / l2_norm(torch.cat(others)) - 1) < 1e-5
    device.divide(sums, [True] * len(sums), 1.0)  # what was brought is used once
    assert all(torch.equal(device.vector.buckets[bucket], piece) for bucket, piece in enumerate(sums))


def test_nothing_counts_as_brought_any_more() -> None:
    device, sums = made()
    device.bring(0, sums[0])
    sums[0].fill_(3.0)
    device.bring_nothing()
    assert device.norms({0: sums[0]}) == {}
    device.divide(sums, [True] * len(sums), 1.0)
    assert torch.equal(device.vector.buckets[0], sums[0])
