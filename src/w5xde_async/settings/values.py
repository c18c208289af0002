"""Durations and sizes as people write them: ``90``, ``90s``, ``5m``, ``1h30m``; ``4096``, ``512KiB``, ``1GB``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

__all__ = ["Duration", "Size", "WholeNumber", "duration_s", "size_bytes"]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_PLAIN = re.compile(r"\d+(?:\.\d+)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def duration_s(value: object) -> object:
    """Seconds. Raises ValueError for what is not a duration; anything but text and numbers passes through."""
    if isinstance(value, bool):
        raise ValueError("not a duration")
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if _PLAIN.fullmatch(text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("not a duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def size_bytes(value: object) -> object:
    """Bytes; k, M, G, T count thousands, Ki, Mi, Gi, Ti 1024s. Raises ValueError for what is not a size."""
    if isinstance(value, bool):
        raise ValueError("not a size")
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("not a size")
    number, unit, binary = found.groups()
    if binary and not unit:
        raise ValueError("not a size")
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


def _whole(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


Duration = Annotated[float, BeforeValidator(duration_s)]
Size = Annotated[int, BeforeValidator(size_bytes)]
WholeNumber = Annotated[int, BeforeValidator(_whole)]
