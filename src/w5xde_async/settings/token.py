"""The shared secret: where it is looked for, and which files are refused.

In order: ``--token-file``, ``W5XDE_TOKEN``, the token file of the environment or the TOML file,
``~/.config/w5xde/token``. There is no ``--token``: every user of a machine can list the arguments of its processes.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from w5xde_async.errors import UsageError

__all__ = ["TOKEN", "find_token"]

TOKEN = "W5XDE_TOKEN"


def find_token(token_file: Path | None, *, given_as_argument: bool, environment: Mapping[str, str]) -> str:
    """The token, or "" where there is none. Raises UsageError for a file that is missing, empty or open to others."""
    if token_file is not None and given_as_argument:
        return _read(token_file)
    token = environment.get(TOKEN, "").strip()
    if token:
        return token
    if token_file is not None:
        return _read(token_file)
    try:
        usual = Path.home() / ".config" / "w5xde" / "token"
        return _read(usual) if usual.is_file() else ""
    except (RuntimeError, PermissionError):  # no home, or one that is not ours
        return ""


def _read(path: Path) -> str:
    path = path.expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"token file {path} cannot be read: {reason}") from error
    if os.name != "nt" and stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"token file {path} can be read by others; run: chmod 600 {shlex.quote(str(path))}")
    if not text or len(text.splitlines()) != 1:
        raise UsageError(f"token file {path} does not hold one line with the token")
    return text
