"""Where a result is received."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Place"]


class Place(NamedTuple):
    """Where a result goes: ``view``, or scratch for None; ``authorized`` when a lease accounts for it."""

    view: memoryview | None
    authorized: bool
