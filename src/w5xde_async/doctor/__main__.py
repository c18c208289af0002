"""``w5xde doctor``: a worker's command with ``doctor`` in place of ``worker``; what is wrong between both machines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from w5xde_async.errors import UsageError
from w5xde_async.process import launch, say

if TYPE_CHECKING:
    from w5xde_async.settings import WorkerSettings


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.doctor") -> int:
    """Make the checks; 0 where all hold, else the exit code that a worker would end with."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_kind, given, prog=prog, prepare=_prepare)


def _kind() -> type[WorkerSettings]:
    from w5xde_async.settings.programs import DoctorSettings

    return DoctorSettings


def _prepare(settings: WorkerSettings, token: str) -> Callable[[], Coroutine[Any, Any, int]]:
    from w5xde_async.doctor.checks import Doctor, Finding
    from w5xde_async.telemetry.wording import clean
    from w5xde_async.worker.config import WorkerConfig
    from w5xde_async.worker.connection.target import Target

    server = settings.where()
    if not server:
        raise UsageError(
            f"join file {settings.join_file} is not there: the coordinator writes it (join in its run directory, or "
            "its --join-file); copy it here"
        )
    target = Target.of(server, settings.make(WorkerConfig, token=token))

    def told(finding: Finding) -> None:
        say(clean(str(finding)) + "\n")

    told(Finding("address", True, str(target)))
    return Doctor(target, told).examine


if __name__ == "__main__":
    sys.exit(main())
