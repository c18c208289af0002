"""Which island a machine's devices and a model's size ask for: arithmetic on what ``plan.footprint`` says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from w5xde_async.plan.footprint import Need

#: Of a device's memory, what may be needed by arithmetic: the rest is for what that does not count.
USABLE = 0.9


#: The mode of one that is no island.
ALONE = "alone"


class Devices(NamedTuple):
    """``number`` of ``nbytes`` each; ``shared``: all of them have that memory together, as processes on a CPU do."""

    number: int
    nbytes: int
    shared: bool = False

    def usable(self, ranks: int) -> int:
        """Bytes that each of so many ranks may need."""
        return int(USABLE * (self.nbytes // ranks if self.shared else self.nbytes))


class Option(NamedTuple):
    """A way to compute: ``mode`` of an island of ``ranks``, or of a worker alone (``ALONE``, 1).

    ``needs`` of each rank, or why it cannot be.
    """

    mode: str
    ranks: int
    needs: Sequence[Need] | str

    @property
    def name(self) -> str:
        """As a user writes it."""
        return "a worker alone" if self.mode == ALONE else f"{self.mode}={self.ranks}"

    @property
    def most(self) -> int | None:
        """Bytes of the rank that needs the most; None where it cannot be."""
        return None if isinstance(self.needs, str) else max(need.together for need in self.needs)

    def fits(self, devices: Devices) -> bool:
        """Whether every rank has a device, and room on it."""
        ranks_fit = self.ranks <= devices.number or devices.shared
        return ranks_fit and self.most is not None and self.most <= devices.usable(self.ranks)


def wanted(devices: Devices) -> list[tuple[str, int]]:
    """Modes and ranks, the best first: all devices with as little exchange as can be. Ranks that share their memory
    gain none by being many, so they are the last resort there."""
    if devices.shared:
        return [(ALONE, 1), ("fsdp", 2), ("pp", 2)]
    if devices.number == 1:
        return [(ALONE, 1)]
    return [*((mode, devices.number) for mode in ("dp", "fsdp", "pp")), (ALONE, 1)]


def choose(options: Iterable[Option], devices: Devices) -> Option | None:
    """The first of the options, best first, that fits; None where none does. Those behind it are not looked at."""
    return next((option for option in options if option.fits(devices)), None)
