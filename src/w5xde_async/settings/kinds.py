"""The kinds of values that settings have, and the words that say what they accept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from w5xde_async.settings.values import Duration, WholeNumber

__all__ = [
    "BYTES",
    "FROM_0",
    "FROM_1",
    "NAME",
    "SECONDS",
    "AtLeast0",
    "AtLeast1",
    "Average",
    "Durability",
    "Folder",
    "LogFormat",
    "LogMode",
    "LoopKind",
    "Name",
    "Part",
    "Rule",
    "Sandboxing",
    "Text",
    "Time",
]

FROM_0, FROM_1 = "a whole number >= 0", "a whole number >= 1"
SECONDS = "a time above 0, like 90, 90s, 5m or 2h"
BYTES = "a size like 512KiB, 4MiB or 1GB"
NAME = "a text of 1 to 100 characters without '/'"

AtLeast0 = Annotated[WholeNumber, Field(ge=0)]
AtLeast1 = Annotated[WholeNumber, Field(ge=1)]
Part = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Time = Annotated[Duration, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^/\x00-\x1f]+$")]


def _folder(path: Path) -> Path:
    """Raises ValueError where something else stands in a directory's place."""
    if next(known for known in (path, *path.parents, Path()) if known.exists()).is_dir():
        return path
    raise ValueError("not a directory")


Folder = Annotated[Path, AfterValidator(_folder)]
LogMode = Literal["silent", "normal", "verbose"]
LogFormat = Literal["text", "json"]
Sandboxing = Literal["auto", "on", "off"]
LoopKind = Literal["auto", "uvloop", "asyncio"]
Durability = Literal["checkpoint", "journal"]

Batch = AtLeast1 | Literal["auto"]
Rule = Literal["auto", "sync", "async", "local", "streaming", "async-local"]
Average = Literal["mean", "radial", "median", "trimmed", "clipping"]
