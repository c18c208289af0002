"""Plain settings as TOML that a person can read and ``tomllib`` reads back.

Mappings become tables, lists and tuples arrays, paths strings, dates and times what they are, None a comment (TOML has
no null, and a key that is shown but unset tells more than one that is absent). Nothing else is taken.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from pathlib import PurePath

from w5xde_async.errors import StoreError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(settings: Mapping[str, object]) -> str:
    """``settings`` as a TOML document.

    Raises:
        StoreError: a value TOML cannot express; ``path`` is its dotted key.
    """
    lines: list[str] = []
    _table(settings, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, object], place: tuple[str, ...], lines: list[str]) -> None:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if place and (len(nested) < len(table) or not table):
        lines += ["", f"[{'.'.join(map(_key, place))}]"]
    for key, value in table.items():
        if value is None:
            lines.append(f"# {_key(key)} is not set")
        elif key not in nested:
            lines.append(f"{_key(key)} = {toml_value(value, (*place, key))}")
    # Tables come last: a key after a table's heading would belong to that table.
    for key, value in nested.items():
        _table(value, (*place, key), lines)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: object, place: tuple[str, ...] = ()) -> str:
    """``value`` as it stands behind a key; ``place`` is that key. Raises StoreError."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise StoreError(".".join(place), "holds a character that cannot be written as UTF-8") from error
        return _string(str(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, PurePath):
        return toml_value(str(value), place)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else ("nan" if value != value else f"{value:+}"[:4])
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item, (*place, str(index))) for index, item in enumerate(value)) + "]"
    if isinstance(value, Mapping):  # only inside a list; elsewhere it is a table of its own
        pairs = (f"{_key(key)} = {toml_value(item, (*place, key))}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    raise StoreError(".".join(place), f"a {type(value).__qualname__} cannot be written as TOML")
