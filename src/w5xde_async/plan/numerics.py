"""In which way sums are made, and whose may be in one run. Pure.

A leaf computed by one process, or by an island that is exact, has one set of bits: ``EXACT``. An island that splits
products (tensor parallelism) adds in another order: its bits are those of every island of the same **numerics**, a name
such as ``tp=2 1f2e3d4c``, in which the second word stands for how the model is split. Both are right. They differ in
the last bits, and are never compared with each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

EXACT = "exact"  #: as one process computes
_MOST_KNOWN = 64  # that are remembered by name
FIRST, ANY = "first", "any"  #: settings: as the first result of the run that counts was, and all
_ISLANDS = re.compile(r"((?:fsdp|tp|pp)=[1-9][0-9]{0,5}(?:,(?:fsdp|tp|pp)=[1-9][0-9]{0,5})*)( [ -~]+)? [0-9a-f]{8}")


class RunNumerics:
    """Those of one run. ``past``: whose results counted before this coordinator started, and whose have since;
    ``devices``: on what is computed, with how many threads.

    What a worker only says of itself decides nothing: the first result that counts does, and where the run goes on,
    what its checkpoint or journal tells, if it tells of one kind.
    """

    def __init__(self) -> None:
        self.past: list[str] = []
        self.devices: list[str] = []
        self._agreed, self._decided = "", False
        self._recorded = 0, 0  # of ``past`` and ``devices``
        self._mixed = self._differ = False

    def unrecorded(self) -> dict[str, list[str]]:
        """What is new of ``past`` (as ``numerics``) and ``devices`` since the last call: for the journal."""
        numerics, devices = self._recorded
        self._recorded = len(self.past), len(self.devices)
        return {"numerics": self.past[numerics:], "devices": self.devices[devices:]}

    def restore(self, numerics: Iterable[str], devices: Iterable[str]) -> None:
        """What has computed before, beside what is known already."""
        for known, found in ((self.past, numerics), (self.devices, devices)):
            known.extend(name for name in dict.fromkeys(map(str, found)) if name not in known)
            del known[_MOST_KNOWN:]
        if not self._decided:
            self._agreed = self.past[0] if len(self.past) == 1 else ""

    def begin_from(self, numerics: Iterable[str], devices: Iterable[str]) -> None:
        """What a checkpoint tells, whatever a journal has told: that is set aside."""
        self.past.clear()
        self.devices.clear()
        self.restore(numerics, devices)

    def asked(self, wanted: str) -> str:
        """What a new worker is asked for by the setting ``wanted``; empty: nothing."""
        if wanted == ANY:
            return ""
        if wanted == FIRST or fits(self._agreed, wanted):
            return self._agreed
        return wanted

    def note(self, numerics: str, *, decides: bool = True) -> str:
        """A result that was made in this way counts: a worker's, the first of which decides, or the coordinator's own,
        where workers failed. What a person is to be told where it is the first that differs from others; else empty."""
        another = bool(self.past) and numerics not in self.past
        if numerics not in self.past and len(self.past) < _MOST_KNOWN:
            self.past.append(numerics)
        if decides and not self._decided:
            self._agreed, self._decided = numerics, True
        if self._mixed or (not another and numerics == (self._agreed or numerics)):
            return ""
        self._mixed = True
        return (
            f"sums are made in several ways ({', '.join(sorted(self.past))}): the run stays exact in what it counts, "
            "but its last bits depend on who computed what"
        )

    def note_device(self, name: str, threads: int) -> str:
        """A worker computes on such a device. As ``note``."""
        device = f"{name} with {threads} {'thread' if threads == 1 else 'threads'}"
        if device in self.devices or len(self.devices) >= _MOST_KNOWN:
            return ""
        self.devices.append(device)
        if len(self.devices) == 1 or self._differ:
            return ""
        self._differ = True
        return (
            f"workers differ ({' and '.join(sorted(self.devices))}): the run stays exact in what it counts, but its "
            "last bits may depend on which of them computed what; --threads (of local workers --worker-threads) makes "
            "them alike"
        )


def is_known(numerics: str, ranks: int) -> bool:
    """Whether a worker of so many ranks can make its sums so: as one process does, or as an island whose ranks come out
    even."""
    if numerics == EXACT:
        return True
    found = _ISLANDS.fullmatch(numerics)
    return found is not None and ranks > 1 and not ranks % math.prod(map(int, re.findall(r"=(\d+)", found[1])))


def fits(numerics: str, asked: str) -> bool:
    """Whether a worker computes as it is asked to. A setting may name an island's first word alone: ``tp=2``."""
    return asked in ("", numerics) or (asked != EXACT and numerics.partition(" ")[0] == asked)


def refusal(numerics: str, asked: str) -> tuple[str, str]:
    """Reason and hint for one that does not."""
    return (
        f"this worker's results have other last bits ({numerics}) than the run's ({asked})",
        "start workers of the same shape, or the coordinator with --numerics any, which takes all kinds",
    )
