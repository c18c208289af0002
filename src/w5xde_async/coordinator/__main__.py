"""``python -m w5xde_async.coordinator``: one run as a process, with local workers if asked for.

Local workers, and the readers of ``--loader-processes``, load the job from the current directory too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w5xde_async.compute.machine import usable_cores
from w5xde_async.errors import ExitCode, W5xdeError
from w5xde_async.openmp import keep_to, spare_this_thread, spin_briefly
from w5xde_async.process import (
    attach,
    exit_code_of,
    keeping_objects,
    launch,
    listening,
    memory_reports,
    signals,
    stop_came_early,
    use_short_slices,
)

if TYPE_CHECKING:
    from w5xde_async.coordinator.service import Coordinator
    from w5xde_async.job import Job
    from w5xde_async.settings import CoordinatorSettings


_STOPPING = (
    "{reason}: the step under way is finished (at most {grace_s:.0f} s), then a checkpoint is saved; again: ends at "
    "once, and loses what is not saved"
)
_NOT_BEGUN = "{reason}: the run is still being prepared, and ends as soon as it is; again: ends at once"
_ABANDONED = "ended at once, at step {step}: what was not saved is lost; the same command goes on from what was"


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.coordinator") -> int:
    """Train; the result is the exit code."""
    spin_briefly()
    given = sys.argv[1:] if arguments is None else arguments
    prepare = partial(_prepare, prog=prog, arguments=given)
    return launch(_kind, given, prog=prog, prepare=prepare, heeds=("SIGUSR1", "SIGHUP"))


def _kind() -> type[CoordinatorSettings]:
    from w5xde_async.settings import CoordinatorSettings

    return CoordinatorSettings


def _goes_on(
    prog: str, arguments: Sequence[str], resume: str, *, kept: bool, environment: Mapping[str, str]
) -> str:  # fmt: skip
    """The command that takes the run up again: this one but for a --resume, ``resume``, that would begin anew.

    ``environment``: settings that came from there, and may have stood before the command alone. "" where another
    program has started this one (``kept``): its command is the one that goes on.
    """
    if kept:
        return ""
    words = list(arguments)
    if resume != "auto":
        for at in reversed([at for at, word in enumerate(words) if word.partition("=")[0] == "--resume"]):
            del words[at : at + (1 if "=" in words[at] else 2)]
        end = words.index("--") if "--" in words else len(words)  # behind it stand no flags
        words[end:end] = ["--resume", "auto"]
    said = [f"{name}={shlex.quote(value)}" for name, value in environment.items() if name != "W5XDE_RESUME"]
    return " ".join([*said, prog, shlex.join(words)])


def _prepare(
    settings: CoordinatorSettings, token: str, *, prog: str, arguments: Sequence[str]
) -> Callable[[], Coroutine[Any, Any, int]]:
    from w5xde_async.settings import to_mapping
    from w5xde_async.store.failpoints import arm

    config = settings.coordinator_config(token)
    settings.require_certificates()
    arm(os.environ.get("W5XDE_FAILPOINTS", ""))
    assert settings.job is not None
    reference = settings.job

    from w5xde_async.cluster.worker_processes import LocalWorkers
    from w5xde_async.telemetry.events import Bus, Warned
    from w5xde_async.telemetry.progress import Progress, ProgressConfig
    from w5xde_async.telemetry.wording import started_in

    run_dir = settings.run_dir and Path(started_in(), settings.run_dir)  # the job's file may go elsewhere
    dumb = os.environ.get("TERM") == "dumb"
    color = not os.environ.get("NO_COLOR") and not dumb
    progress = Progress(settings.make(ProgressConfig, color=color), terminal=False if dumb else None)
    handler = progress.handler()
    attach(handler, handler.level)
    workers = LocalWorkers(
        settings.workers, reference=reference, devices=settings.worker_devices(),
        threads=settings.worker_threads or 1, token=token, insecure=config.insecure, config_path=settings.config,
        data_dir=settings.data_dir, grace_s=config.grace_s + 2.0,
    )  # fmt: skip

    async def train() -> int:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(workers.aclose)
            await workers.prestart()  # they import what they need while we do
            with keeping_objects():
                job = _loaded(settings, reference)
            workers.job_is_loaded()
            return await trained(job)

    async def trained(job: Job) -> int:
        from w5xde_async.coordinator.service import Coordinator
        from w5xde_async.store.rundir import Superseded

        bus = Bus()
        bus.subscribe(progress, prompt=False)
        bus.subscribe(workers.heard, prompt=False)
        coordinator = Coordinator(
            job, run_dir=run_dir, name=settings.name or "", config=config, bus=bus, job_reference=reference,
            settings=to_mapping(settings),
        )  # fmt: skip
        stop_reason, begun = "", False

        def stop(reason: str) -> None:
            nonlocal stop_reason
            stop_reason = reason
            bus.publish(Warned(text=(_STOPPING if begun else _NOT_BEGUN).format(reason=reason, grace_s=config.grace_s)))
            coordinator.request_stop(reason)

        def abandon() -> None:
            workers.kill()
            bus.publish(Warned(text=_ABANDONED.format(step=coordinator.step)))
            progress.close()

        async with AsyncExitStack() as stack:
            stack.callback(progress.close)
            stack.enter_context(signals(stop, abandon=abandon))
            stack.enter_context(memory_reports(settings.profile_memory, "coordinator"))
            with keeping_objects():
                await coordinator.start()
            begun = True
            if useless := settings.without_effect():
                bus.publish(Warned(text=useless))
            stack.push_async_callback(coordinator.aclose)
            reloading = Reloading(coordinator)
            stack.push_async_callback(reloading.aclose)
            stack.enter_context(listening("SIGUSR1", coordinator.request_checkpoint))
            stack.enter_context(listening("SIGHUP", reloading.begin))
            asked = "worker_threads" in settings.told or "OMP_NUM_THREADS" in os.environ
            short = coordinator.has_short_leaves and not asked
            workers.at(
                coordinator.address, join=coordinator.local_join, on_all_lost=coordinator.workers_failed,
                on_given_up=partial(coordinator.worker_failed, asked="min_workers" in settings.told),
                threads=1 if short else None,
            )  # fmt: skip
            await stack.enter_async_context(workers)
            unfinished, stopped = True, False
            try:
                unfinished = stopped = (await coordinator.wait()).outcome != "finished"
            except Superseded:
                unfinished = False  # another coordinator goes on
                raise
            finally:
                again = _goes_on(
                    prog, arguments, config.resume, kept=settings.exit_with_stdin, environment=settings.environment
                )
                if unfinished and again and (stopped or coordinator.step):
                    when = "To go on from here:" if stopped else "When that is mended, go on from here:"
                    progress.tell(when, again)
        return exit_code_of(stop_reason, settings.exit_on_drain) if unfinished and stop_reason else ExitCode.OK

    return train


class Reloading:
    """SIGHUP: the run directory's secret and revoked workers are read again."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._reload(), name="reload access")

    async def _reload(self) -> None:
        try:
            await self._coordinator.reload_access()
        except W5xdeError as error:
            logging.getLogger(__name__).error("access not reloaded reason=%s", error)

    async def aclose(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])


def _loaded(settings: CoordinatorSettings, reference: str) -> Job:
    """The job. It is loaded on this thread, as a script would run: nothing else is under way yet."""
    import torch

    from w5xde_async.job import load_job

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    else:
        keep_to(usable_cores())
    job = load_job(reference)
    if stop_came_early():
        raise KeyboardInterrupt
    spare_this_thread(torch.get_num_threads())
    use_short_slices()
    return job


if __name__ == "__main__":
    sys.exit(main())
