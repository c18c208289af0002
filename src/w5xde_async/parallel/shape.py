"""How an island divides a model among its ranks, as a user writes it: ``dp=2``, ``fsdp=4``, ``pp=2``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from w5xde_async.errors import UsageError
from w5xde_async.wire.messages import MOST_RANKS

#: What each divides: leaves, parameters, layers.
MODES = {"dp": "data parallel", "fsdp": "fully sharded", "pp": "pipeline"}
#: In the environment of a rank 0: the file number of a socket that listens where the ranks meet. Without it the rank
#: listens there itself, as torchrun's do.
STORE_FD = "ISLAND_STORE_FD"
_PART = re.compile(r"([a-z]+)=([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class IslandShape:
    """``mode`` is one of MODES; ``ranks`` are 2 or more."""

    mode: str
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises UsageError for anything else than one of MODES, ``=``, and a number of ranks."""
        known = ", ".join(f"{mode}=N ({meaning})" for mode, meaning in MODES.items())
        parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
        if not all(parts):
            raise UsageError(f"--island is {text!r}; give one of {known}")
        found = {part[1]: int(part[2]) for part in parts if part is not None}
        for mode in found:
            if mode not in MODES:
                raise UsageError(f"--island {text}: {mode} is none of {known}")
        if len(parts) > 1:
            raise UsageError(f"--island {text}: an island has one mode so far; give one of {known}")
        ((mode, ranks),) = found.items()
        if not 2 <= ranks <= MOST_RANKS:
            raise UsageError(f"--island {text}: an island has 2 to {MOST_RANKS} ranks; one device is a plain worker")
        return cls(mode, ranks)

    def __str__(self) -> str:
        return f"{self.mode}={self.ranks}"
