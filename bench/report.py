"""What every bench shares: its flags, medians, a table, and the JSON that a later run is compared with.

``{"figures": {name: number}, "config", "versions", "commit", "samples"}``; written only where ``--json`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["Report", "commit", "median", "parser"]

_PACKAGES = ("w5xde-async", "torch", "numpy", "uvloop", "msgspec")

median = statistics.median


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that all benches have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer repetitions, under a minute")
    made.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    return made


class Report:
    """Collects figures with the samples they are medians of, prints them, writes them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.figures: dict[str, float] = {}
        self.samples: dict[str, list[float]] = {}

    def add(self, name: str, samples: Sequence[float]) -> float:
        """The figure ``name`` is the median of ``samples``."""
        self.samples[name] = list(samples)
        self.figures[name] = median(samples)
        return self.figures[name]

    def show(self) -> None:
        width = max(map(len, self.figures), default=0)
        for name, value in self.figures.items():
            samples = self.samples[name]
            print(f"{name:<{width}}  {value:>12.4g}   {min(samples):.4g} .. {max(samples):.4g}  n={len(samples)}")

    def write(self, path: Path | None) -> None:
        if path is None:
            return
        content = {
            "figures": self.figures,
            "config": self.config,
            "versions": _versions(),
            "commit": commit(),
            "samples": self.samples,
        }
        path.write_text(json.dumps(content, indent=2) + "\n")
        print(f"wrote {path}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """What is checked out, `-dirty` where files differ from it, apart from the rows that benches keep."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        name, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (
                ["describe", "--always", "--abbrev=12"],
                ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"],
            )
        )
        return f"{name}-dirty" if changed else name
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no commit: {error}", file=sys.stderr)
        return "unknown"
