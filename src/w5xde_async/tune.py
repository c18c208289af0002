"""``w5xde tune``: which ``microbatch_size`` trains fastest on this machine.

For each size a run is started as ``w5xde coordinator JOB --workers N`` starts it, without files, and is measured with
one worker and, where there are more, with all. Beside it stands what a plain loop does with the same cores. Nothing is
kept.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from w5xde_async.errors import ExitCode, LeafFailed, LocalError, in_one_line, need
from w5xde_async.process import exit_code_of, launch, note, signals, tell

if TYPE_CHECKING:
    from w5xde_async.coordinator.config import CoordinatorConfig
    from w5xde_async.job import Job
    from w5xde_async.settings.programs import TuningSettings

_LEAVES = (1, 2, 4, 8)  # of a step, for each worker
_WARM_STEPS = 3  # a worker's first: it traces, compiles, and is given little
_PATIENCE_S = 120.0  # until a worker has computed those; for one more step, too
_CLEAR = 1.05  # times faster than the job's own size: less is chance
_TURNS = 3  # in which a size has to be faster than the job's own

#: What a measured run has of the settings: how it computes, checks and sends. Nothing else: a file or an address would
#: be another run's, a limit would end the measuring. ``tls``: local workers are told of it by the same environment.
_KEPT = (
    "token", "tls", "max_workers", "heartbeat_s", "silence_s", "handshake_s", "bucket_bytes", "bulk_threads",
    "credit_bytes", "numerics", "quarantine", "code_free", "pacing", "update", "auto", "update_device",
    "loader_threads", "loader_processes", "prefetch_leaves", "max_bad_samples", "norm_gate", "audit_fraction",
    "audit_tolerance", "max_leaf_failures",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A size measured. Samples a second with one worker and with all; ``worker_bytes``: resident memory of one."""

    microbatch: int
    leaves: int
    alone: float
    together: float
    worker_bytes: int


#: By a size that seemed faster than the job's own: both, as they were measured one after the other.
Turns = Mapping[int, Sequence[tuple[Row, Row]]]


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.tune") -> int:
    """Measure, and print the table; the result is the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_kind, given, prog=prog, prepare=partial(_prepare, prog=prog))


def _kind() -> type[TuningSettings]:
    from w5xde_async.settings.programs import TuningSettings

    return TuningSettings


def _prepare(
    settings: TuningSettings, token: str, *, prog: str = "w5xde tune"
) -> Callable[[], Coroutine[Any, Any, int]]:
    config = settings.coordinator_config(token)
    assert settings.job is not None
    workers, threads = max(settings.workers, 1), settings.worker_threads or 1

    from w5xde_async.compute.leaf_size import with_leaf_size
    from w5xde_async.job import build_model, load_job

    job = load_job(settings.job)
    grows = config.target_batch is not None
    job = with_leaf_size(job, build_model(job, replica=True), grows=grows).job

    tried = sizes(job, workers, grows=grows)
    rows: list[Row] = []
    refused: list[int] = []
    turns: dict[int, list[tuple[Row, Row]]] = {}

    async def run(size: int) -> Row:
        return await measured(
            job, size, settings.job or "", config, workers=workers, threads=threads, seconds=settings.seconds
        )

    async def measure() -> float:
        for size in tried:
            note(f"measuring microbatch_size={size} ...")
            try:
                rows.append(await run(size))
            except LeafFailed as error:  # batch norm refuses single samples; larger ones may do
                if size == _own_size(job):
                    raise
                note(f"microbatch_size={size} cannot be computed: {str(error).splitlines()[0]}")
                refused.append(size)
        own = _own(job, rows)
        while faster := [row for row in _fastest(job, rows, turns) if row is not own and row.microbatch not in turns]:
            other = faster[0]
            seems = f"microbatch_size={other.microbatch} seems faster than {own.microbatch}"
            note(f"{seems}: measuring both again, in turn ...")
            turns[other.microbatch] = []  # without the pair by which it was chosen
            while len(turns[other.microbatch]) < _TURNS:
                turns[other.microbatch].append((await run(own.microbatch), await run(other.microbatch)))
        loop, stopped = asyncio.get_running_loop(), threading.Event()
        plain = partial(plain_loop, job, workers * threads, settings.seconds / 2, stopped)
        try:
            return await loop.run_in_executor(None, plain)
        except Exception as error:  # of the job's code: a whole batch may be too large for it
            note(f"a plain loop of whole batches cannot be measured: {in_one_line(error)}")
            return 0.0
        finally:
            stopped.set()

    async def tuned() -> int:
        measuring, stopped_by, plain = asyncio.ensure_future(measure()), "", None

        def stop(reason: str) -> None:
            nonlocal stopped_by
            stopped_by = reason
            measuring.cancel()

        with signals(stop):
            try:
                plain = await measuring
            except asyncio.CancelledError:
                if not stopped_by:
                    raise
        said = report(job, rows, turns, plain, workers=workers, threads=threads) if rows else ""
        code = tell(prog, said) if rows else ExitCode.OK
        if plain is not None:
            return code
        left = ", ".join(map(str, tried[len(rows) + len(refused) :])) or "the plain loop"
        if any(len(both) < _TURNS for both in turns.values()):
            left = "whether that is more than chance, the plain loop"
        note(f"{stopped_by}: {len(rows)} of {len(tried)} sizes measured; not measured: {left}")
        return exit_code_of(stopped_by, settings.exit_on_drain)

    return tuned


def sizes(job: Job, workers: int, *, grows: bool = False) -> list[int]:
    """Sizes to try, the largest first: a whole step, those that give every worker one leaf of it, two, four and eight,
    and the job's own. ``grows``: of the others only those that a batch which grows can have, two whole leaves at least.
    Raises UsageError where a step has no leaf for each worker."""
    each = _step_samples(job) // job.accumulate_grad_batches
    fewer = "fewer --workers, or " if each else ""
    need(
        each >= workers,
        f"a step of {_step_samples(job)} samples has no leaf for each of {workers} workers; give {fewer}a larger "
        "batch_size, or a dataset of more samples",
    )
    tried = {each, *(-(-each // (workers * leaves)) for leaves in _LEAVES)}
    if grows:
        leaf_samples = {size: size * job.accumulate_grad_batches for size in tried}
        tried = {size for size, n in leaf_samples.items() if n < job.batch_size and not job.batch_size % n}
    return sorted({*tried, _own_size(job)}, reverse=True)


def _step_samples(job: Job) -> int:
    """Of the largest step: a dataset may have fewer than a batch."""
    return min(job.batch_size, job.num_samples or job.batch_size)


def _own_size(job: Job) -> int:
    """The job's microbatch size; what is larger than a step makes the same one leaf of it."""
    return min(job.microbatch_samples, _step_samples(job))


async def measured(
    job: Job, size: int, reference: str, config: CoordinatorConfig, *, workers: int, threads: int, seconds: float
) -> Row:
    """Run with this ``microbatch_size``. Raises what ends the run, and LocalError for workers that do not begin."""
    from w5xde_async.cluster.task_workers import with_own_model
    from w5xde_async.cluster.worker_processes import LocalWorkers
    from w5xde_async.coordinator.service import Coordinator
    from w5xde_async.job import ENDLESS
    from w5xde_async.telemetry.events import Bus, Event, StepCommitted
    from w5xde_async.telemetry.memory import usage_of

    tried = replace(
        with_own_model(job), microbatch_size=size, max_steps=ENDLESS, epochs=None, scheduler=None, evaluate=None,
        stop_when=None, keep_best=None,
    )  # fmt: skip
    alone = _measuring(config)
    bus, samples, steps = Bus(), 0, 0
    committed = asyncio.Event()

    def see(event: Event) -> None:
        nonlocal samples, steps
        if isinstance(event, StepCommitted):
            samples, steps = samples + event.samples, steps + 1
            committed.set()

    bus.subscribe(see, prompt=False)

    @asynccontextmanager
    async def patience(coordinator: Coordinator, count: int) -> AsyncIterator[None]:
        begun = steps
        try:
            async with asyncio.timeout(_PATIENCE_S) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise LocalError(
                f"microbatch_size={size}: {coordinator.num_workers} of {count} workers have joined and computed "
                f"{steps - begun} steps in {_PATIENCE_S:.0f} s: they import the job, compile it, hang in it, or need "
                "so long for a step; start one with w5xde coordinator JOB --workers 1 to see which"
            ) from None

    async def rate(coordinator: Coordinator, count: int) -> float:
        async with patience(coordinator, count):
            while coordinator.num_workers < count:
                await _next(committed)
            warm = steps + _WARM_STEPS
            while steps < warm:
                await _next(committed)
        began, before = time.perf_counter(), samples
        await asyncio.sleep(seconds)
        async with patience(coordinator, count):
            while samples == before:  # a step takes longer
                await _next(committed)
        return (samples - before) / (time.perf_counter() - began)

    async def _next(event: asyncio.Event) -> None:
        event.clear()
        happens = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({happens, ended}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise LocalError(
                    f"microbatch_size={size}: the run ended while it was measured: {ended.result().reason}"
                )
        finally:
            happens.cancel()

    async with AsyncExitStack() as stack:
        coordinator = Coordinator(tried, config=alone, bus=bus, job_reference=reference)
        await coordinator.start()
        stack.push_async_callback(coordinator.aclose)
        ended = asyncio.ensure_future(coordinator.wait())
        local = await stack.enter_async_context(LocalWorkers(
            1, address=coordinator.address, reference=reference, threads=threads, token=alone.token,
            join=coordinator.local_join, on_all_lost=coordinator.workers_failed,
        ))  # fmt: skip
        one = await rate(coordinator, 1)
        used = max((usage_of(pid).host_bytes for pid in local.processes.values()), default=0)
        together = one
        if workers > 1:
            await local.scale(workers)
            together = await rate(coordinator, workers)
        coordinator.request_stop("measured")
        with suppress(asyncio.CancelledError):
            await ended
    leaves = -(-_step_samples(job) // (size * job.accumulate_grad_batches))
    return Row(microbatch=size, leaves=leaves, alone=one, together=together, worker_bytes=used)


def _measuring(config: CoordinatorConfig) -> CoordinatorConfig:
    from w5xde_async.job import ENDLESS

    kept = {name: getattr(config, name) for name in _KEPT}
    return type(config)(port=0, resume="never", checkpoint_every=ENDLESS, **kept)


def plain_loop(job: Job, threads: int, seconds: float, stopped: threading.Event) -> float:
    """Samples a second of forward, backward and update of whole batches in this process, batches read before; with one
    thread or ``threads``, whichever is faster: small steps take several times as long with many. 0 once ``stopped``."""
    return max(_rate(job, count, seconds, stopped) for count in sorted({1, threads}))


def _rate(job: Job, threads: int, seconds: float, stopped: threading.Event) -> float:
    import torch

    from w5xde_async.cluster.task_workers import with_own_model
    from w5xde_async.compute.block import autocast
    from w5xde_async.compute.program.tracing import probe_batches
    from w5xde_async.job import build_model, made_by, make_dense, step_function
    from w5xde_async.randomness import random_state, seed_all

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with random_state():
            model = build_model(with_own_model(job))
            seed_all(job.seed)
            samples = min(job.batch_size, job.num_samples or job.batch_size)
            (batch,) = made_by("dataset", lambda: probe_batches(job, [samples]))
            optimizer = made_by("optimizer", lambda: job.optimizer(model))
            step, precision = step_function(job), autocast(job.precision)
            count, began = -1, math.inf  # the first is not counted
            while count < 1 or time.perf_counter() - began < seconds:
                if stopped.is_set():
                    return 0.0
                optimizer.zero_grad()
                if precision is None:
                    loss, _ = step(model, batch)
                else:
                    with precision():
                        loss, _ = step(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                make_dense(model)
                optimizer.step()
                count += 1
                if not count:
                    began = time.perf_counter()
            return count * samples / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)


def _own(job: Job, rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row.microbatch == _own_size(job))


def _gains(turns: Sequence[tuple[Row, Row]], rate: str) -> list[float]:
    """How many times the rate of the job's own size the other's was, in each turn."""
    return [getattr(other, rate) / getattr(own, rate) for own, other in turns]


def _gained(turns: Sequence[tuple[Row, Row]], rate: str) -> float:
    return statistics.median(_gains(turns, rate))


def _is_clear(gains: Sequence[float]) -> bool:
    return min(gains) > 1.0 and statistics.median(gains) > _CLEAR


def _fastest(job: Job, rows: Sequence[Row], turns: Turns) -> tuple[Row, Row]:
    """With all workers, and with one: of the sizes that are clearly faster than the job's own as far as they have been
    measured, or else that."""
    own = _own(job, rows)
    found = []
    for rate in ("together", "alone"):
        faster = [
            row for row in rows
            if row is not own and _is_clear(_gains(turns.get(row.microbatch, [(own, row)]), rate))
        ]  # fmt: skip
        # Of those that have had their turns, the fastest in these.
        found.append(max(faster, key=lambda row: _gained(turns.get(row.microbatch, [(own, row)]), rate), default=own))
    return found[0], found[1]


def report(
    job: Job, rows: Sequence[Row], turns: Turns, plain: float | None, *, workers: int, threads: int
) -> str:  # fmt: skip
    """The table, and the line for the job. ``plain``: None, and sizes are missing, where the measuring was stopped; 0
    where a plain loop could not be measured."""
    from w5xde_async.telemetry import wording

    own, several = _own_size(job), workers > 1
    together = f"  {f'{workers} workers':>10}  {'scaling':>7}" if several else ""
    lines = [f"{'microbatch_size':>15}  {'leaves':>6}  {'1 worker':>10}{together}  memory"]
    for row in rows:
        mark = "  (the job's)" if row.microbatch == own else ""
        together = f"  {row.together:>10,.0f}  {row.together / row.alone:>7.2f}" if several else ""
        lines.append(
            f"{row.microbatch:>15}  {row.leaves:>6}  {row.alone:>10,.0f}{together}  "
            f"{wording.size(row.worker_bytes)}{mark}"
        )
    said = f"Samples a second; workers of {threads} thread{'s' * (threads != 1)}."
    if plain is None:
        return "\n".join([*lines, "", said]) + "\n"
    if plain:
        said += f" A plain loop on their {workers * threads} cores, one thread or all, whichever is faster, whole "
        said += f"batches that lie in memory: {plain:,.0f}."
    lines += ["", said]
    best, lone = _fastest(job, rows, turns)
    crew = f"{workers} worker{'s' * several}"
    if best.microbatch != own:
        shared = "" if best.leaves >= workers else f"; no step is shared out to {crew} then"
        gained = _told(turns[best.microbatch], "together")
        lines.append(
            f"microbatch_size={best.microbatch},  # {gained} as fast as {own} with {crew} here; batch norm and dropout "
            f"see a microbatch{shared}"
        )
    else:
        lines.append(f"microbatch_size={own} is as good as any here.")
    if lone.microbatch not in (best.microbatch, own):
        lines.append(f"One worker alone is {_told(turns[lone.microbatch], 'alone')} as fast with {lone.microbatch}.")
    lines += [
        f"With {size} it was {_told(both, 'together')} as fast as with {own}: this machine's other work matters more."
        for size, both in turns.items()
        if min(gains := _gains(both, "together")) < 1.0 and max(gains) > _CLEAR
    ]
    if plain > _CLEAR * best.together:
        lines.append("On this machine alone the plain loop is faster; other machines add to the workers' rate.")
    return "\n".join(lines) + "\n"


def _told(turns: Sequence[tuple[Row, Row]], rate: str) -> str:
    least, *_, most = sorted(_gains(turns, rate))
    return f"{_times(_gained(turns, rate))} times ({_times(least)} to {_times(most)} in {len(turns)} turns)"


def _times(gain: float) -> str:
    return f"{gain:.2f}" if gain < 1.5 else f"{gain:.1f}" if gain < 10 else f"{gain:.0f}"


if __name__ == "__main__":
    sys.exit(main())
