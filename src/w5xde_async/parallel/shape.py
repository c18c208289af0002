"""How an island divides a model among its ranks, as a user writes it: ``dp=2``, ``fsdp=4``, ``fsdp=2,tp=2``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from w5xde_async.errors import UsageError
from w5xde_async.wire.messages import MOST_RANKS

#: What each divides: leaves, parameters, layers, products. Ranks are numbered with the last as the innermost.
MODES = {"dp": "data parallel", "fsdp": "fully sharded", "pp": "pipeline", "tp": "tensor parallel"}
#: In the environment of a rank 0: the file number of a socket that listens where the ranks meet. Without it the rank
#: listens there itself, as torchrun's do.
STORE_FD = "ISLAND_STORE_FD"
_PART = re.compile(r"([a-z]+)=([1-9][0-9]{0,5})")
_KNOWN = ", ".join(f"{mode}=N ({meaning})" for mode, meaning in MODES.items())


@dataclass(frozen=True, slots=True)
class IslandShape:
    """``mode`` is one of MODES, or several, as in "fsdp,tp", in their order; then ``sizes`` has the ranks of each.

    ``ranks`` are 2 or more, in all.
    """

    mode: str
    ranks: int
    sizes: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises UsageError for anything else than MODES with their numbers of ranks, each once."""
        parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
        if not all(parts):
            raise UsageError(f"--island is {text!r}; give one of {_KNOWN}, or several: fsdp=2,tp=2")
        found = {part[1]: int(part[2]) for part in parts if part is not None}
        for mode in found:
            if mode not in MODES:
                raise UsageError(f"--island {text}: {mode} is none of {_KNOWN}")
        if len(found) < len(parts):
            raise UsageError(f"--island {text}: a mode is named twice")
        axes = {mode: found[mode] for mode in MODES if mode in found}
        ranks = math.prod(axes.values())
        if min(axes.values()) < 2 or ranks > MOST_RANKS:
            raise UsageError(f"--island {text}: an island has 2 to {MOST_RANKS} ranks; one device is a plain worker")
        return cls(",".join(axes), ranks, tuple(axes.values()) if len(axes) > 1 else ())

    @property
    def axes(self) -> dict[str, int]:
        """The ranks of each mode."""
        return dict(zip(self.mode.split(","), self.sizes or (self.ranks,), strict=True))

    def __str__(self) -> str:
        return ",".join(f"{mode}={ranks}" for mode, ranks in self.axes.items())
