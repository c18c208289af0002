"""``w5xde predict``: a coordinator's command with ``predict`` in place of ``coordinator``; what the run will need.

The job is loaded and a few microbatches of it are computed here. Nothing is written, and nobody is connected to.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from w5xde_async.compute.machine import usable_cores
from w5xde_async.openmp import keep_to
from w5xde_async.process import launch, tell

if TYPE_CHECKING:
    from w5xde_async.settings import CoordinatorSettings


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.predict") -> int:
    """Print the prediction; the result is the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_kind, given, prog=prog, prepare=partial(_prepare, prog))


def _kind() -> type[CoordinatorSettings]:
    from w5xde_async.settings.programs import PredictionSettings

    return PredictionSettings


def _prepare(prog: str, settings: CoordinatorSettings, token: str) -> Callable[[], Coroutine[Any, Any, int]]:
    config = settings.coordinator_config(token)
    assert settings.job is not None

    import torch

    from w5xde_async.coordinator.run.prediction import predict
    from w5xde_async.job import load_job

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    else:
        keep_to(usable_cores())
    job = load_job(settings.job)

    async def estimated() -> int:
        estimate = partial(predict, job, config, workers=max(settings.workers, 1))
        prediction = await asyncio.get_running_loop().run_in_executor(None, estimate)
        return tell(prog, f"{prediction}\n")

    return estimated


if __name__ == "__main__":
    sys.exit(main())
