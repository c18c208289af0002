"""``python -m w5xde_async.facade.guava``: the worker's program, by a shorter name."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from w5xde_async.errors import ExitCode
from w5xde_async.process import CTRL_C, exit_code_of, note, signals, with_own_loop

_PROG = "python -m w5xde_async.facade.guava.workers.network_worker"
_WARNINGS = ("SIGUSR1",)  # as of every worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until the orchestrator has finished; the result is the exit code, of docs/exit-codes.md.

    SIGTERM leaves in good order as Ctrl-C does, and ends with 75: job engines start another.
    """
    return with_own_loop(_PROG, partial(_work, arguments), ends=_WARNINGS, exit_on_drain=ExitCode.DRAINED)


def _work(arguments: Sequence[str] | None) -> int:
    from w5xde_async.facade.calling import NodeLines
    from w5xde_async.facade.guava.config import WORDS, DistributedConfig
    from w5xde_async.facade.guava.workers import network_worker

    told = ""

    def stopped_by(cancel: Callable[[], object]) -> AbstractContextManager[None]:
        def leave(reason: str) -> None:
            nonlocal told
            again = "; again: ends at once" if reason in (CTRL_C, "SIGTERM") else ""
            if not told:
                cancel()
                note(f"{reason}: the piece of a batch under way is finished{again}")
            told = told or reason

        return signals(leave, warns=_WARNINGS)

    given = network_worker.parser().parse_args(arguments)
    with NodeLines("normal", WORDS).shown():  # what it warns of: Python's own way would wait for whoever reads
        worker = network_worker.NetworkWorker(
            given.gpu_id, DistributedConfig.from_env(), given.master_ip, given.master_port, sandbox=given.sandbox,
            interface=given.interface,
        )  # fmt: skip
    worker.stopped_by = stopped_by
    try:
        worker.connect_and_train()
    except asyncio.CancelledError:
        return exit_code_of(told, ExitCode.DRAINED)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
