"""What of a box lies in a run of flat elements."""

from __future__ import annotations

import random

import torch

from w5xde_async.params.boxes import extents, rectangles, whole


def _positions(shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> list[int]:
    flat = torch.arange(torch.Size(shape).numel()).view(shape)
    return [int(one) for one in flat[tuple(slice(*axis) for axis in box)].reshape(-1)]


def test_rectangles_hold_what_of_a_box_lies_in_a_run_in_order() -> None:
    source = random.Random(3)
    for _ in range(2000):
        shape = tuple(source.randrange(1, 5) for _ in range(source.randrange(0, 5)))
        box = tuple(tuple(sorted((source.randrange(n + 1), source.randrange(n + 1)))) for n in shape)
        numel = torch.Size(shape).numel()
        begin, end = sorted((source.randrange(numel + 1), source.randrange(numel + 1)))
        found = list(rectangles(shape, begin, end, box))  # type: ignore[arg-type]
        expected = [at for at in _positions(shape, box) if begin <= at < end]  # type: ignore[arg-type]
        assert [at for one in found for at in _positions(shape, one)] == expected
        assert len(found) <= 2 * len(shape) + 1


def test_columns_of_whole_rows_are_one_rectangle() -> None:
    assert list(rectangles((4096, 512), 1024 * 512, 4096 * 512, ((0, 4096), (256, 512)))) == [
        ((1024, 4096), (256, 512))
    ]
    assert extents(whole((3, 2))) == (3, 2)
    assert list(rectangles((), 0, 1, ())) == [()]
