"""Events as flat JSON objects, one line each: the shape of ``metrics.jsonl`` and of ``--log-format json``.

``{"event": "step_committed", ...fields}``. JSON has no NaN and no infinity: they are the strings ``"nan"``,
``"inf"`` and ``"-inf"``, everywhere, and ``number()`` (or ``float()``) reads them back.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass

from w5xde_async.telemetry.events import Event

__all__ = ["event_name", "number", "plain_value", "to_line", "to_record"]

_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")
_names: dict[type, str] = {}


def event_name(kind: type[Event]) -> str:
    """``StepCommitted`` -> ``step_committed``."""
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = _WORD_START.sub("_", kind.__name__).lower()
    return name


def to_record(event: Event, *, omit: Collection[str] = ()) -> dict[str, object]:
    """The event's name and its fields, less ``omit``, as plain JSON values."""
    record: dict[str, object] = {"event": event_name(type(event))}
    for entry in fields(event):
        if entry.name not in omit:
            record[entry.name] = plain_value(getattr(event, entry.name))
    return record


def to_line(record: Mapping[str, object]) -> str:
    """One line of JSON with its line end."""
    return json.dumps(record, allow_nan=False, default=str) + "\n"


def number(value: object) -> float:
    """A recorded number as a float; NaN for what is none."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def plain_value(value: object) -> object:
    """``value`` as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain_value(getattr(value, entry.name)) for entry in fields(value)}
    return value
