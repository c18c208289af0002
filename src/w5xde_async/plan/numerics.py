"""In which way sums are made, and whose may be in one run. Pure.

A leaf computed by one process, or by an island that is exact, has one set of bits: ``EXACT``. An island that splits
products (tensor parallelism) adds in another order: its bits are those of every island of the same **numerics**, a name
such as ``tp=2 1f2e3d4c``, in which the second word stands for how the model is split. Both are right. They differ in
the last bits, and are never compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterable

EXACT = "exact"  #: as one process computes
_MOST_KNOWN = 64  # that are remembered by name
FIRST, ANY = "first", "any"  #: settings: as the first worker of the run, and all


class RunNumerics:
    """Those of one run. ``past``: what had computed before this coordinator started, and what has since; ``devices``:
    on what, with how many threads."""

    def __init__(self) -> None:
        self.past: list[str] = []
        self.devices: list[str] = []
        self._agreed = ""
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

    def asked(self, wanted: str) -> str:
        """What a new worker is asked for by the setting ``wanted``; empty: nothing."""
        if wanted == ANY:
            return ""
        return self._agreed or ("" if wanted == FIRST else wanted)

    def note(self, numerics: str) -> str:
        """Somebody computes in this way: a new member, or the coordinator itself. What a person is to be told where it
        is the first that differs from others; else empty."""
        another = bool(self.past) and numerics not in self.past
        if numerics not in self.past and len(self.past) < _MOST_KNOWN:
            self.past.append(numerics)
        self._agreed = self._agreed or numerics
        if self._mixed or (self._agreed == numerics and not another):
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


def fits(numerics: str, asked: str) -> bool:
    """Whether a worker computes as it is asked to. A setting may name the first word alone: ``tp=2``."""
    return asked in ("", numerics, numerics.partition(" ")[0])


def refusal(numerics: str, asked: str) -> tuple[str, str]:
    """Reason and hint for one that does not."""
    return (
        f"this worker's results have other last bits ({numerics}) than the run's ({asked})",
        "start workers of the same shape, or the coordinator with --numerics any, which takes all kinds",
    )
