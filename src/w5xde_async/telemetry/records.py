"""Events as flat JSON objects, one line each: the shape of ``metrics.jsonl`` and of ``--log-format json``.

``{"event": "step_committed", ...fields}``. JSON has no NaN and no infinity: they are the strings ``"nan"``,
``"inf"`` and ``"-inf"``, everywhere, and ``number()`` (or ``float()``) reads them back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from w5xde_async.errors import utf8
from w5xde_async.store.filesystem import regular
from w5xde_async.telemetry.events import Event, StepCommitted

#: Fields of events that may hold a secret: what is kept or passed on goes without them.
SECRETS = ("worker_command", "dashboard_link")
#: What reading a line raises that is none, or that nests too deeply.
UNREADABLE = (ValueError, RecursionError)


@cache
def _event_name(kind: str) -> str:
    """``StepCommitted`` -> ``step_committed``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def to_record(event: Event, *, omit: Collection[str] = ()) -> dict[str, object]:
    """The event's name and its fields, less ``omit``, as plain JSON values."""
    return {"event": _event_name(type(event).__name__), **plain_fields(event, omit=omit)}


def plain_fields(event: Event, *, omit: Collection[str] = ()) -> dict[str, object]:
    """The event's fields, less ``omit``, as plain JSON values."""
    # ``fields`` makes a tuple of them each time, which takes as long as all else here.
    return {name: plain_value(getattr(event, name)) for name in event.__dataclass_fields__ if name not in omit}


def dated_line(event: Event, when: float) -> str:
    """The event's record, less what is secret, with the time in seconds, as ``to_line`` has it."""
    when = round(when, 3)
    if type(event) is StepCommitted:  # its fields are as JSON has them, as long as its numbers are finite
        with suppress(OverflowError, ValueError, TypeError):
            data = msgspec.json.encode(event, enc_hook=str)
            absent = sum(value is None for value in (event.learning_rate, event.gradient_norm, event.staleness))
            if data.isascii() and data.count(b"null") == absent:
                name = _event_name("StepCommitted").encode()
                return _spaced(b'{"time":%s,"event":"%s",%s' % (msgspec.json.encode(when), name, data[1:]))
    return to_line({"time": when, **to_record(event, omit=SECRETS)})


def read_records(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Each record of ``metrics.jsonl``; lines that are torn or not ours are passed over. Blocking. Raises OSError.

    With ``last_bytes`` only that much of the file's end is read.
    """
    with open(path, "rb", opener=regular) as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        for line in file:
            with suppress(*UNREADABLE):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def mended(line: bytes) -> bytes:
    """A line that has half a character, as earlier versions wrote, without: msgspec takes none.

    Raises UNREADABLE.
    """
    record = plain_value(json.loads(line))
    if not isinstance(record, Mapping):
        raise ValueError("it is no record")
    return to_line(record).encode()


def to_line(record: Mapping[str, object]) -> str:
    """One line of JSON, in ASCII, with its line end."""
    with suppress(OverflowError, ValueError):  # a number of more than 64 bits; what is not text
        data = msgspec.json.encode(record, enc_hook=str)  # a fifth of the time: a run may have thousands a second
        if data.isascii():
            return _spaced(data)
    return json.dumps(record, allow_nan=False, default=str) + "\n"


def _spaced(data: bytes) -> str:
    return msgspec.json.format(data, indent=0).decode() + "\n"


def number(value: object) -> float:
    """A recorded number as a float; NaN for what is none."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def plain_value(value: object) -> object:
    """``value`` as JSON has it."""
    if type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        return {utf8(str(key)): plain_value(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain_value(getattr(value, entry.name)) for entry in fields(value)}
    return utf8(value) if isinstance(value, str) else value
