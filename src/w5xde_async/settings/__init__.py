"""What the programs are told: arguments > environment (``W5XDE_PORT``) > TOML > defaults, as one frozen object.

Invariants: only this package and the ``__main__`` modules read the environment; a secret is never a field, so it
never reaches a help text, ``--print-config`` or ``config.toml``; whatever is wrong is one line that says which flag,
variable or TOML key, its value and what is accepted. torch is not imported here: ``--help`` answers at once.
"""

from __future__ import annotations

from w5xde_async.config import Answer
from w5xde_async.settings.flags import flag_names, read, to_mapping
from w5xde_async.settings.programs import PROGRAMS, CoordinatorSettings, WorkerSettings, misspelt_variables, variables

__all__ = [
    "PROGRAMS",
    "Answer",
    "CoordinatorSettings",
    "WorkerSettings",
    "flag_names",
    "misspelt_variables",
    "read",
    "to_mapping",
    "variables",
]
