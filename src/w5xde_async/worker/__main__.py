"""``python -m w5xde_async.worker``: one worker as a process.

The job is loaded as this machine finds it: file names are relative to the current directory.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from w5xde_async.cluster.words import WORD_FD, WordWriter
from w5xde_async.cluster.worker_processes import PRESTARTED
from w5xde_async.compute.machine import usable_cores
from w5xde_async.errors import DeviceLost, ExitCode, RefusalCode, Refused, Unreachable, UsageError, W5xdeError
from w5xde_async.openmp import keep_to, spin_briefly
from w5xde_async.process import (
    CTRL_C,
    attach,
    end_without_threads,
    exit_code_of,
    keeping_objects,
    launch,
    memory_reports,
    signals,
    use_batch_scheduling,
)
from w5xde_async.users_code import take_stdout

if TYPE_CHECKING:
    from w5xde_async.job import Job
    from w5xde_async.parallel.shape import IslandShape
    from w5xde_async.settings import WorkerSettings
    from w5xde_async.wire.messages import Rendezvous, Volunteer
    from w5xde_async.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_loaded: tuple[str, Job] | None = None  # by ``_prestarted``: from where, and the job
_words: WordWriter | None = None  # to who has started this process, where that listens
_PARTING_S = 1.0  # for the last message to be sent
_WARNINGS = ("SIGUSR1",)  # Slurm and LSF send it some time before the end
_PR_SET_PDEATHSIG = 1
_LEVELS = {"silent": logging.WARNING, "normal": logging.INFO, "verbose": logging.DEBUG}


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.worker") -> int:
    """Work until the run is finished; the result is the exit code."""
    global _words
    spin_briefly()
    given = sys.argv[1:] if arguments is None else arguments
    if WORD_FD in os.environ:
        _words = WordWriter(int(os.environ.pop(WORD_FD)))
    if list(given[-2:-1]) == [PRESTARTED]:
        _words = WordWriter(take_stdout())
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the coordinator says what came of it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        given = _prestarted(given[:-2])
    try:
        code = launch(
            _kind, given, prog=prog, prepare=partial(_prepare, given), ends=_WARNINGS, exit_on_drain=ExitCode.DRAINED
        )
    except Exception:
        _tell_end()
        raise
    _tell_end()
    return code


def _prestarted(given: Sequence[str]) -> list[str]:
    """A coordinator of this machine has started us while it starts itself: do meanwhile what takes long.

    Its first line on standard input says that it has loaded the job: what that fetches once, it has. The second says
    where it is. The whole command line comes of it; secrets go into the environment, which nobody else reads.
    """
    with keeping_objects():
        import w5xde_async.settings
        import w5xde_async.worker.service  # noqa: F401

        _line()
        with suppress(Exception):  # whatever it is, it comes again where it can be told
            _load_early(given)
    told = json.loads(_line())
    os.environ.update(told["environment"])
    return [*given, *told["arguments"]]


def _load_early(given: Sequence[str]) -> None:
    global _loaded
    if "--job" in given:
        from w5xde_async.job import load_job

        reference = given[given.index("--job") + 1]
        _loaded = reference, load_job(reference)


def _line() -> bytes:
    """The next line of standard input, and not a byte more. Ends with it."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            os._exit(ExitCode.ERROR)
        line += more
    return line


def _kind() -> type[WorkerSettings]:
    from w5xde_async.settings import WorkerSettings

    return WorkerSettings


def _prepare(arguments: Sequence[str], settings: WorkerSettings, token: str) -> Callable[[], Coroutine[Any, Any, int]]:
    from w5xde_async.store.failpoints import arm
    from w5xde_async.worker.config import WorkerConfig

    config = settings.make(WorkerConfig, token=token)
    arm(os.environ.get("W5XDE_FAILPOINTS", ""))
    server = settings.where()
    _show_log(settings)
    shape = None
    if settings.island == "auto":
        if "RANK" in os.environ:
            raise UsageError("--island auto says how many ranks to start, and these are started: give their shape")
    elif (text := settings.island or settings.island_member) is not None:
        from w5xde_async.parallel.shape import IslandShape

        shape = IslandShape.parse(text)
        if "RANK" not in os.environ:
            return _supervise(arguments, settings, config, server, shape)
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        use_batch_scheduling()  # in the main thread: those that it starts inherit it
    if settings.island == "auto":
        return _choose(arguments, settings, config, server)
    return _work(settings, config, server, shape)


def _job_of(settings: WorkerSettings) -> Job | None:
    from w5xde_async.job import load_job

    if settings.job is None:
        return None
    return _loaded[1] if _loaded is not None and _loaded[0] == settings.job else load_job(settings.job)


def _show_log(settings: WorkerSettings) -> None:
    from w5xde_async.telemetry.progress import Progress, ProgressConfig

    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    handler = Progress(settings.make(ProgressConfig, color=color)).handler()
    level = _LEVELS[settings.values["log"]]
    if level == logging.INFO and os.environ.get("RANK", "0") != "0":
        level = logging.WARNING  # an island's head says it for all
    handler.setLevel(level)
    attach(handler, level)


def _work(
    settings: WorkerSettings, config: WorkerConfig, server: str, shape: IslandShape | None, job: Job | None = None
) -> Callable[[], Coroutine[Any, Any, int]]:
    """One worker, or one rank of an island. ``job``: where it is loaded already."""
    import torch

    from w5xde_async.compute.engine import choose_device
    from w5xde_async.net.endpoint import format_address
    from w5xde_async.worker.connection.connection import Departure, RunFailed
    from w5xde_async.worker.service import Worker

    if config.threads is None:
        keep_to(usable_cores())
    job = _job_of(settings) if job is None else job
    rank = None
    if shape is not None:
        from w5xde_async.worker.island_rank import join_group

        device = config.device
        if device == "auto" and torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        config = replace(config, device=device)
        _go_on_when_orphaned()
        meeting = partial(
            join_group, shape, choose_device(device), os.environ, settings.island_interface or "",
            schedule=settings.pp_schedule, stages_at=[name.strip() for name in settings.pp_stages.split(",") if name],
            checkpoint_activations=settings.checkpoint_activations, compiles=config.compile,
        )  # fmt: skip
        try:
            rank = _interruptibly(meeting, settings.exit_on_drain)
        except RuntimeError as error:
            from w5xde_async.parallel.group import is_rank_gone

            if not is_rank_gone(error):
                raise
            _tell_why(f"the ranks did not meet: {str(error).partition(chr(10))[0]}")
            _end_without_threads(ExitCode.ISLAND_LOST)  # one may still wait for a rank that is gone

    async def work() -> int:
        worker = Worker(
            server, job=job, config=config, join_file=settings.join_file, rank=rank, reference=settings.job or ""
        )
        if rank is None or rank.rank == 0:
            _tell_id(worker.worker_id)
        try:
            code = await serve(worker)
        except W5xdeError as error:
            if not worker.abandoned or rank is not None:
                raise
            logger.error("%s", str(error).partition("\n")[0])
            code = error.exit_code
        if worker.abandoned and rank is None:
            for reader in multiprocessing.active_children():
                reader.kill()
            _end_without_threads(code)
        return code

    async def serve(worker: Worker) -> int:
        told = ""

        def leave(reason: str) -> None:
            nonlocal told
            told = told or reason
            if not settings.exit_with_stdin:  # else the coordinator of this machine says it
                logger.warning(
                    "%s: the lease under way is finished (at most %.0f s), others are given back%s",
                    reason, config.grace_s, "; again: ends at once" if reason in (CTRL_C, "SIGTERM") else "",
                )  # fmt: skip
            worker.drain(reason)

        def left() -> int:
            """The exit code of a worker that has left before the run's end."""
            return exit_code_of(told, settings.exit_on_drain) if told else ExitCode.OK

        async with AsyncExitStack() as stack:
            await stack.enter_async_context(_asked(leave, settings.watch_preemption))
            device = choose_device(config.device)
            stack.enter_context(memory_reports(settings.profile_memory, worker.name, device))
            if server:
                address = format_address(worker.host, worker.port)
                said = "" if f":{worker.port}" in server else " (the default port)"
                logger.info("connecting server=%s%s name=%s", address, said, worker.name)
            else:
                logger.info("waiting for the join file path=%s name=%s", settings.join_file, worker.name)
            try:
                running = asyncio.create_task(worker.run(), name="worker")
                parting = asyncio.create_task(worker.parted.wait(), name="parting")
                try:
                    await asyncio.wait((running, parting), return_when=asyncio.FIRST_COMPLETED)
                    if not running.done():
                        await asyncio.wait((running,), timeout=_PARTING_S)
                    if not running.done():
                        # A thread computes and cannot be stopped; its lease has been given back, or nobody needs it.
                        worker.abandoned = True
                        if worker.error is not None:
                            raise worker.error
                        why = "it was to leave" if worker.was_asked_to_leave else "the run is finished"
                        logger.warning("left in the middle of what was under way: %s", why)
                        return left()
                    departure = running.result()
                finally:
                    parting.cancel()
            except RunFailed:
                if settings.exit_with_stdin and rank is None:  # the parent is that coordinator and tells it itself
                    return ExitCode.OK
                raise
        logger.info(
            "left reason=%s leases_done=%d leases_stale=%d", departure.value, worker.leases_done, worker.leases_stale
        )
        if departure is not Departure.DRAINED:
            return ExitCode.OK
        if rank is not None and not worker.was_asked_to_leave:
            return ExitCode.ISLAND_LOST  # another rank was
        return left()

    async def work_as_rank() -> int:
        from w5xde_async.parallel.group import is_rank_gone

        code: int = ExitCode.ISLAND_LOST
        try:
            code = await work()
        except (RunFailed, Unreachable, Refused, UsageError, DeviceLost) as error:
            code = error.exit_code
            logger.error("rank %s leaves: %s", os.environ["RANK"], error)
        except Exception as error:  # a link or another rank is gone: nothing of this group can go on
            _tell_why("another rank is gone" if is_rank_gone(error) else str(error).partition("\n")[0])
        _end_without_threads(code)  # one may wait for a rank that is gone

    return work if rank is None else work_as_rank


@asynccontextmanager
async def _asked(leave: Callable[[str], None], cloud: str) -> AsyncIterator[None]:
    """Call ``leave(reason)`` for signals, and once ``cloud`` (--watch-preemption) announces the machine's end."""
    with signals(leave, warns=_WARNINGS):
        if cloud == "off":
            yield
            return
        from w5xde_async.worker.notices import service_of, watch

        service = await asyncio.to_thread(service_of, cloud)
        watching = None if service is None else asyncio.create_task(watch(service, leave), name="notices")
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()


def _go_on_when_orphaned() -> None:
    """On Linux, have this process go on where it is stopped (SIGSTOP) when its parent dies: it then reads the end of
    its standard input, and leaves. Called in the main thread, whose setting it is."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library of another kind
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


def _tell_id(worker_id: str) -> None:
    if _words is not None:
        _words.tell_id(worker_id)


def _tell_why(said: str) -> None:
    """Why this rank of an island ends: to who starts the island again, and says it; else in the log."""
    if _words is not None:
        _words.tell_why(said)
    else:
        logger.warning("rank %s leaves: %s", os.environ["RANK"], said)


def _tell_end() -> None:
    if _words is not None:
        _words.tell_end()


def _end_without_threads(code: int) -> NoReturn:
    _tell_end()
    end_without_threads(code)


def _interruptibly(call: Callable[[], _T], exit_on_drain: int) -> _T:
    """What ``call`` gives, which waits in C++ where no signal is heard."""
    found: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="w5xde-meet", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt as told:
        logger.info("stopped before the ranks had met")
        _end_without_threads(exit_code_of(str(told), exit_on_drain))
    if raised:
        raise raised[0]
    return found[0]


def _choose(
    arguments: Sequence[str], settings: WorkerSettings, config: WorkerConfig, server: str
) -> Callable[[], Coroutine[Any, Any, int]]:
    """Find what the machine's devices and the model's size ask for, say by which arithmetic, and do it."""
    from w5xde_async.memory import Measured, ProgramSurvey, Survey, fitting
    from w5xde_async.parallel.shape import IslandShape
    from w5xde_async.plan.island_choice import ALONE
    from w5xde_async.runtime import Runtime
    from w5xde_async.worker.connection.dialing import Dialer
    from w5xde_async.worker.connection.looking import look
    from w5xde_async.worker.devices import devices_of

    job = _job_of(settings)
    dialer = Dialer(server, config, Runtime(), join_file=settings.join_file)

    async def measured() -> tuple[Measured, bool]:
        """And whether the run takes islands, as far as is known."""
        if job is not None:
            return await asyncio.to_thread(Survey, job), True
        if config.sandbox == "auto":
            await dialer.find()
        if config.sandbox == "on" or (config.sandbox == "auto" and not dialer.is_here):
            raise UsageError(
                "--island auto measures the coordinator's program without a sandbox: give --sandbox off where you "
                "trust the coordinator, or --job, or the island's shape"
            )
        seen = await look(dialer)
        return await asyncio.to_thread(ProgramSurvey, seen.program, seen.layout, seen.spec), seen.takes_islands

    async def choose() -> int:
        try:
            survey, islands = await measured()
            found, said = await asyncio.to_thread(
                fitting, survey, devices_of(config.device), with_job=job is not None, islands=islands
            )
        except Refused as error:
            if error.code is not RefusalCode.RUN_FINISHED:
                raise
            logger.info("left reason=the run is finished")
            return ExitCode.OK
        if found is None:
            raise UsageError(f"--island auto: the model does not fit on this machine's devices\n{said}")
        for line in said.splitlines():
            logger.info("%s", line)
        if found.mode == ALONE:
            body = await asyncio.to_thread(_work, settings, config, server, None, job)
        else:
            shape = IslandShape(found.mode, found.ranks)
            given = [*arguments, "--island", str(shape)]
            body = await asyncio.to_thread(_supervise, given, settings, config, server, shape)
        return await body()

    return choose


def _supervise(
    arguments: Sequence[str], settings: WorkerSettings, config: WorkerConfig, server: str, shape: IslandShape
) -> Callable[[], Coroutine[Any, Any, int]]:
    """Start the ranks of an island that are on this machine, and keep them together."""
    from w5xde_async.cluster.island_processes import IslandProcesses
    from w5xde_async.net.interfaces import address_of
    from w5xde_async.runtime import Runtime
    from w5xde_async.worker.connection.dialing import Dialer

    member = settings.island is None
    interface = settings.island_interface
    host = "" if interface is None else address_of(interface)
    dialer = Dialer(server, config, Runtime(), join_file=settings.join_file)
    cores = usable_cores()

    async def meet(volunteer: Volunteer) -> Rendezvous:
        logger.info("waiting for the other members of an island shape=%s", shape)
        return await dialer.meet(volunteer)

    async def find() -> None:
        if not dialer.address[1]:
            logger.info("waiting for the join file path=%s", settings.join_file)
        await dialer.find()
        if member and interface is None and not dialer.is_here:
            raise UsageError(
                "the ranks of an island speak to each other without any protection: name the network interface that "
                "you trust with it (--island-interface)"
            )

    async def supervise() -> int:
        threads = cores if member else max(1, cores // shape.ranks)
        processes = IslandProcesses(
            shape, arguments, threads=threads, find=find, meet=meet if member else None, host=host,
            lifetime_s=config.lifetime_s, on_id=_tell_id,
        )  # fmt: skip
        async with _asked(processes.leave, settings.watch_preemption):
            code = await processes.run()
        if processes.was_in_vain:
            raise dialer.unreachable(config.lifetime_s or 0.0)
        return exit_code_of(processes.told, settings.exit_on_drain) if code == ExitCode.DRAINED else code

    return supervise


if __name__ == "__main__":
    sys.exit(main())
