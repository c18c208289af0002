"""Which island devices and sizes ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from w5xde_async.plan.footprint import Need
from w5xde_async.plan.island_choice import ALONE, Devices, Option, choose, wanted

GIB = 1 << 30
#: What ranks need in GiB, as docs/islands.md has it of a model of a billion parameters.
NEEDS = {
    (ALONE, 1): [23.3], ("dp", 2): [23.3] * 2, ("fsdp", 2): [25.9] * 2, ("pp", 2): [24.9, 18.4],
    ("dp", 4): [23.3] * 4, ("fsdp", 4): [20.2] * 4, ("pp", 4): [21.4, 16.5, 13.6, 12.1],
    ("dp", 8): [23.3] * 8, ("fsdp", 8): [17.3] * 8, ("pp", 8): "the program can be cut into 4 parts at most, not 8",
}  # fmt: skip


def options(devices: Devices) -> list[Option]:
    found = []
    for mode, ranks in wanted(devices):
        each = NEEDS[mode, ranks]
        needs = each if isinstance(each, str) else [Need(parameters=int(gib * GIB)) for gib in each]
        found.append(Option(mode, ranks, needs))
    return found


@pytest.mark.parametrize(
    ("count", "gib", "mode"),
    [
        (1, 80, ALONE),
        (1, 26, ALONE),  # 23.4 of it may be needed
        (1, 25, None),
        (2, 26, "dp"),
        (2, 25.8, None),  # two of a kind save little, in any mode
        (4, 26, "dp"),
        (4, 24, "fsdp"),
        (4, 22, None),
        (8, 26, "dp"),
        (8, 20, "fsdp"),
        (8, 19, None),  # and a program that cannot be cut so often is not taken
    ],
)
def test_devices_of_their_own(count: int, gib: float, mode: str | None) -> None:
    devices = Devices(count, int(gib * GIB))
    found = choose(options(devices), devices)
    assert (found and (found.mode, found.ranks)) == (mode and (mode, 1 if mode == ALONE else count))


@pytest.mark.parametrize(("gib", "mode"), [(64, ALONE), (26, ALONE), (25, None), (52, ALONE)])
def test_processes_that_share_memory_are_no_more_than_one(gib: float, mode: str | None) -> None:
    devices = Devices(1, int(gib * GIB), shared=True)
    found = choose(options(devices), devices)
    assert (found and found.mode) == mode


def test_memory_is_divided_by_the_ranks_where_they_share_it() -> None:
    assert Devices(1, 100 * GIB, shared=True).usable(4) == int(0.9 * 25 * GIB)
    assert Devices(4, 100 * GIB).usable(4) == int(0.9 * 100 * GIB)
    half = Option("pp", 2, [Need(parameters=10), Need(parameters=10)])
    assert half.fits(Devices(1, 24, shared=True))
    assert not half.fits(Devices(1, 22, shared=True))
    assert not half.fits(Devices(1, 100))  # which is one device


def test_the_rank_that_needs_most_decides() -> None:
    assert Option("pp", 2, [Need(parameters=2), Need(activations=3, data=4)]).most == 7
    assert Option("pp", 2, "why not").most is None


def test_nothing_behind_what_fits_is_looked_at() -> None:
    """Arithmetic of stages takes seconds."""

    def lazily() -> Iterator[Option]:
        yield Option("dp", 2, [Need(parameters=1)] * 2)
        raise AssertionError("looked at")

    found = choose(lazily(), Devices(2, 10))
    assert found is not None
    assert found.mode == "dp"
