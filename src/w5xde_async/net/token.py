"""The shared secret: where it is looked for, and which files are refused.

In order: ``--token-file``, ``W5XDE_TOKEN``, the token file of the environment or the TOML file,
``~/.config/w5xde/token``. There is no ``--token``: every user of a machine can list the arguments of its processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from w5xde_async.net.join import read_secret_file

#: Of the environment: what says where a coordinator is, or holds its secret, or says where that is.
JOINING = ("W5XDE_SERVER", "W5XDE_TOKEN", "W5XDE_TOKEN_FILE", "W5XDE_JOIN", "W5XDE_JOIN_FILE")


def find_token(token_file: Path | None, *, given_as_argument: bool, environment: Mapping[str, str]) -> str:
    """The token, or "" where there is none. Raises UsageError for a file that is missing, empty or open to others."""
    if token_file is not None and given_as_argument:
        return read_secret_file(token_file, kind="token file")
    token = environment.get("W5XDE_TOKEN", "").strip()
    if token:
        return token
    if token_file is not None:
        return read_secret_file(token_file, kind="token file")
    try:
        usual = Path.home() / ".config" / "w5xde" / "token"
        return read_secret_file(usual, kind="token file") if usual.is_file() else ""
    except (RuntimeError, PermissionError):  # no home, or one that is not ours
        return ""
