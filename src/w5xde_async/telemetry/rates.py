"""How fast a run goes, smoothed, without the time in which nothing could be computed."""

from __future__ import annotations

import math

_MEMORY_S = 10.0


class Rate:
    """Of something that is counted: how many a second, over about ``_MEMORY_S``, whatever the pace of ``update``."""

    def __init__(self) -> None:
        self.per_s: float | None = None
        self._seen: tuple[float, int] | None = None

    def update(self, now: float, count: int) -> None:
        """So many there are now."""
        if self._seen is not None:
            seconds = now - self._seen[0]
            if seconds <= 0:
                return
            weight = 1 - math.exp(-seconds / _MEMORY_S)
            rate = (count - self._seen[1]) / seconds
            self.per_s = rate if self.per_s is None else self.per_s + weight * (rate - self.per_s)
        self._seen = (now, count)

    def pause(self) -> None:
        """Leave the time until the next ``update`` out: nobody was there to work."""
        self._seen = None

    def seconds_for(self, left: int) -> float | None:
        """How long ``left`` more of them take; None where nothing is known yet."""
        if left <= 0:
            return 0.0
        return left / self.per_s if self.per_s else None
