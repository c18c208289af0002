"""Guava's orchestrator: a model, a DataLoader, workers of this machine or of any.

A step is one DataLoader batch for each of ``config.num_workers`` workers; a leaf is one such batch. So the result is
the same whoever of them is there, and workers may come and go. Where a model is in pieces, the workers are an island,
which computes the same leaves.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from w5xde_async.cluster.worker_processes import may_be_islands
from w5xde_async.config import PATH, one_of
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.prediction import Prediction, predict
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import StoreError, UsageError, need
from w5xde_async.facade import arguments
from w5xde_async.facade.arguments import of_type, takes
from w5xde_async.facade.calling import LogMode, block_on, page_at, shown, token_of
from w5xde_async.facade.guava.config import WORDS, WORDS_IN_PIECES, WORDS_OF_PATH, DistributedConfig
from w5xde_async.facade.guava.loaders import Reading, check_validation, reading_of
from w5xde_async.facade.guava.local import local_workers
from w5xde_async.facade.neighbours import found_by_neighbours
from w5xde_async.facade.reading import BatchLoss, class_loss
from w5xde_async.job import Job, copied_model, lost_modes
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.store.rundir import export_model
from w5xde_async.telemetry.events import Bus, CheckpointFailed, CheckpointSaved, Event, StepCommitted
from w5xde_async.telemetry.memory import MemoryReport
from w5xde_async.telemetry.progress import Progress

logger = logging.getLogger(__name__)

Mode = Literal["local", "orchestrator"]


class Orchestrator:
    """Trains a registered model.

    ``mode`` ``local`` starts ``config.num_workers`` workers on this machine, one for each GPU; ``orchestrator`` waits
    for as many NetworkWorkers, wherever they are, and more may join. ``token`` is the secret that they prove
    (W5XDE_TOKEN, W5XDE_TOKEN_FILE, ~/.config/w5xde/token otherwise); off loopback one is made where none is given, and
    lies with address and certificate in the file ``join`` of ``config.checkpoint_dir``. ``seed`` is of shuffling and
    dropout, unless the DataLoader has a generator.

    Each ``start_training`` trains anew, from the registered model's weights; what an earlier run left in
    ``checkpoint_dir`` is kept aside, in ``{checkpoint_dir}.old-1``, ``-2`` and so on. With ``resume`` ``auto`` it goes
    on from what is there, with a checkpoint's path from that one. ``dashboard``: ``HOST`` or ``HOST:PORT`` of a page
    that shows the run (docs/dashboard.md); True: on loopback.
    """

    @takes(
        config=of_type(DistributedConfig, "a DistributedConfig"), mode=one_of("local", "orchestrator"),
        seed=arguments.SEED, resume=arguments.TEXT, dashboard=arguments.DASHBOARD,
    )  # fmt: skip
    @WORDS.said()
    def __init__(
        self,
        config: DistributedConfig,
        mode: Mode = "local",
        *,
        token: str = "",
        seed: int = 0,
        resume: str = "never",
        dashboard: str | bool = False,
    ) -> None:
        """Raises UsageError."""
        config.validate()
        config.require_possible()
        if mode == "local" and config.island:
            _check_devices(config.num_workers)
        self.config, self.mode = config, mode
        self.bus = Bus()  #: the run's events (telemetry.events), for those who want more than the screen
        self.port = config.master_port  #: where it listens; with port 0, the one that was picked once it listens
        self.listening = threading.Event()  #: set while workers can connect, and once training has failed
        token_of(token)  # it is looked for again when training starts
        self._token, self._seed, self._resume = token, seed, resume
        self._dashboard = page_at(dashboard)
        self._model: nn.Module | None = None
        self._criterion: Callable[[Any, Any], Tensor] = class_loss
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, Coordinator] | None = None
        self._awaited: list[_Waiting] = []
        self._memory: tuple[MemoryReport, Path] | None = None

    @takes(model=arguments.MODULE, criterion=arguments.CRITERION)
    def register_model(self, model: nn.Module, criterion: Callable[[Any, Any], Tensor] | None = None) -> None:
        """What to train, in place; ``criterion(output, target) -> mean loss``, default: cross entropy, with
        the class axis second, or last as language models have it.

        Raises UsageError for what is no module, and for a criterion that gives no mean.
        """
        if told := lost_modes(model):
            logger.warning("%s", told)
        self._model, self._criterion = model, criterion or class_loss

    @takes(num_epochs=arguments.COUNT, val_interval=arguments.COUNT)
    @WORDS.said()
    def start_training(
        self,
        dataloader: Any,
        num_epochs: int = 1,
        val_dataloader: Any = None,
        val_interval: int | None = None,
    ) -> RunResult:
        """Train for ``num_epochs``; blocks. ``dataloader`` may also be a list of batches, or a map-style dataset, which
        is then shuffled.

        ``val_dataloader``: its mean loss is ``val_loss`` among the result's metrics, every ``val_interval`` steps
        (default: every epoch) and at the end. Ctrl-C stops after the step under way, with a checkpoint, and returns.

        Raises UsageError (no model, batches that can be read only once), JobError, PortInUse, StoreError, and what
        ended the run where it failed.
        """
        config = self.config
        job, given = self._job_of(dataloader, num_epochs, val_dataloader, val_interval)
        token, code_free = token_of(self._token), self.mode == "orchestrator" or config.num_workers > 1
        settings = config.coordinator_config(
            token=token,
            resume=self._resume,
            loader_processes=given.processes,
            code_free=code_free,
            dashboard=self._dashboard,
            island=config.island_of_all if self.mode == "local" else None,
        )
        if self.mode == "local" and not config.island_of_all and not may_be_islands():
            settings = settings.with_own_workers()
        ended = block_on(
            lambda: self._train(job, settings), instead="w5xde_async.Coordinator", words=WORDS, serves=True
        )
        return WORDS.of_result(ended)

    @takes(num_epochs=arguments.COUNT)
    @WORDS.said()
    def predict(self, dataloader: Any, num_epochs: int = 1) -> Prediction:
        """What ``start_training`` of these will need: memory, bytes, time, with ``config.num_workers`` workers that are
        each like this machine; ``print`` it.

        Computes a few microbatches here with a copy of the model; nothing is written. Raises JobError, UsageError.
        """
        job, _ = self._job_of(dataloader, num_epochs, looks_ahead=True)
        need(
            not self.config.island,
            "predict is about workers that hold the whole model; w5xde memory says what each part of one takes "
            "(docs/islands.md)",
        )
        return predict(job, self.config.coordinator_config(), workers=max(self.config.num_workers, 1))

    @takes(reason=arguments.TEXT)
    def stop(self, reason: str = "stopped") -> None:
        """End after the step under way. Returns at once; from any thread. Nothing where nothing runs."""
        with self._lock:
            if self._running is not None:
                loop, coordinator = self._running
                loop.call_soon_threadsafe(coordinator.request_stop, reason)

    @takes(path=PATH)
    @WORDS.said()
    def save_checkpoint(self, path: Path | str | None = None) -> Path:
        """The model's weights in a safetensors file (default: ``model.safetensors`` in ``checkpoint_dir``); its path.

        While training runs (call it from another thread) the weights are those of the next commit, and a whole
        checkpoint, with the optimizer, is written too: without ``path`` that is what it returns.

        Raises StoreError where the disk does not take it; UsageError without a model, and in a callback of the run,
        which it would wait for.
        """
        if self._model is None:
            raise UsageError("no model is registered: call register_model(model) first")
        saved: Path | None = None
        waiting: _Waiting | None = None
        with self._lock:
            if self._running is not None:
                loop, coordinator = self._running
                if _runs_here(loop):
                    raise UsageError(
                        "save_checkpoint waits for the run: call it from another thread than its callbacks"
                    )
                waiting = _Waiting(coordinator.step)
                self._awaited.append(waiting)
                loop.call_soon_threadsafe(coordinator.request_checkpoint)
        if waiting is not None:
            saved = waiting.saved.result()
        if saved is not None and path is None:
            return saved
        target = Path(self.config.checkpoint_dir) / "model.safetensors" if path is None else Path(path)
        model = self._model
        if saved is not None:
            record = CheckpointStore(saved.parent).load(saved)
            model = copy.deepcopy(model)
            model.load_state_dict(record.groups["model"], strict=False)  # tied ones are stored once
        with (WORDS if path is None else WORDS_OF_PATH).said():
            export_model(model, target)
        return target

    @takes(directory=PATH)
    def enable_memory_profiling(self, directory: Path | str | None = None) -> None:
        """Note what allocates memory in this process while ``start_training`` trains; it leaves a report when it ends.

        A file in ``directory`` (default: ``checkpoint_dir``): JSON with resident memory and the lines of code that hold
        most; on CUDA, where this process computes there, what PyTorch's viewer opens. It costs time and memory.
        """
        if self._memory is None:
            alone = self.mode == "local" and self.config.num_workers <= 1 and torch.cuda.is_available()
            report = MemoryReport(torch.device("cuda", torch.cuda.current_device()) if alone else None)
            self._memory = report, Path(directory or self.config.checkpoint_dir)

    def memory_report(self) -> Path:
        """Write a report now, from any thread; its path. Raises UsageError where nothing is noted, OSError."""
        if self._memory is None:
            raise UsageError("no memory profile: call enable_memory_profiling() first")
        report, directory = self._memory
        return report.write(directory, "orchestrator")

    # -- the run -------------------------------------------------------------------------------------------

    def _job_of(
        self,
        dataloader: Any,
        num_epochs: int,
        val_dataloader: Any = None,
        val_interval: int | None = None,
        *,
        looks_ahead: bool = False,
    ) -> tuple[Job, Reading]:
        """Raises UsageError, JobError for what cannot be trained."""
        config = self.config
        config.validate()
        config.require_possible()
        if self._model is None:
            raise UsageError("no model is registered: call register_model(model) first")
        given = reading_of(dataloader, config, seed=self._seed, epochs=num_epochs, looks_ahead=looks_ahead)
        if val_dataloader is not None:
            check_validation(val_dataloader)
        elif val_interval is not None:
            logger.warning("val_interval=%s has no effect without a val_dataloader", val_interval)
        return self._job(self._model, given, num_epochs, val_dataloader, val_interval), given

    def _job(
        self, model: nn.Module, given: Reading, num_epochs: int, val_dataloader: Any, val_interval: int | None
    ) -> Job:
        config, step = self.config, BatchLoss(self._criterion)
        return Job(
            model=model,
            dataset=given.dataset,
            optimizer=lambda model: torch.optim.AdamW(
                model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
            ),
            step=step,
            collate=given.collate,
            batch_size=given.batch_size * config.batches_per_step,
            microbatch_size=given.batch_size,
            epochs=1 if given.steps_per_epoch else num_epochs,
            gradient_clip_val=config.max_grad_norm or None,
            precision="bf16" if config.use_amp else "fp32",
            seed=given.seed,
            shuffle=given.shuffle,
            drop_last=given.drop_last,
            evaluate=None if val_dataloader is None else lambda model: {"val_loss": _mean(step, model, val_dataloader)},
            evaluate_every=None if val_dataloader is None else val_interval or given.steps_per_epoch,
        )

    async def _train(self, job: Job, settings: CoordinatorConfig) -> RunResult:
        config = self.config
        assert self._model is not None
        template = copied_model(self._model)  # before it is trained in place
        name = type(template).__name__
        coordinator = Coordinator(job, run_dir=config.checkpoint_dir, name=name, config=settings, bus=self.bus)
        with self._lock:
            if self._running is not None:
                raise UsageError("this orchestrator trains already")
            self._running = (asyncio.get_running_loop(), coordinator)
            self.listening.clear()  # a run that failed left it set
        failed = True
        try:
            async with AsyncExitStack() as stack:
                mode: LogMode = "normal" if config.compact_log else "verbose"
                words = WORDS_IN_PIECES if config.island else WORDS
                join = partial(_how_to_join, coordinator, config)
                progress = stack.enter_context(
                    shown(self.bus, mode, join=join, words=words, resume=settings.resume)
                )  # fmt: skip
                stack.callback(self.bus.subscribe(self._on_event, prompt=False))
                if config.log_step_every:
                    stack.callback(self.bus.subscribe(_StepLog(progress, config.log_step_every), prompt=False))
                await coordinator.start()
                stack.push_async_callback(coordinator.aclose)
                if self._awaited:  # asked before there was anybody to ask
                    coordinator.request_checkpoint()
                if self._memory is not None:  # from here: tracing the model would fill it
                    stack.push_async_callback(asyncio.to_thread, self._end_profile)
                    self._memory[0].begin()
                await stack.enter_async_context(found_by_neighbours(coordinator))
                self.port = coordinator.port
                self.listening.set()
                try:
                    if self.mode == "local":
                        job = dataclasses.replace(job, model=lambda: copied_model(template))
                        await stack.enter_async_context(
                            local_workers(coordinator, job, settings.token, config.num_workers, config.island_of_all)
                        )
                    result = await coordinator.wait()
                except asyncio.CancelledError:  # Ctrl-C
                    coordinator.request_stop("Ctrl-C")
                    result = await coordinator.wait()
            failed = False
            return result
        finally:
            with self._lock:
                self._running = None
                awaited, self._awaited = self._awaited, []
            # Who waits for it in another thread would wait for ever for one that cannot listen.
            (self.listening.set if failed else self.listening.clear)()
            for waiting in awaited:
                waiting.saved.set_result(None)

    def _end_profile(self) -> None:
        assert self._memory is not None
        try:
            logger.warning("memory report: %s", self.memory_report())
        except OSError as error:  # what was trained counts for more
            logger.error("no memory report: %s: %s", error.filename or self._memory[1], error.strerror or error)
        finally:
            self._memory[0].end()

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, CheckpointSaved | CheckpointFailed):
            return
        with self._lock:
            answered = [waiting for waiting in self._awaited if event.step > waiting.step]
            self._awaited = [waiting for waiting in self._awaited if event.step <= waiting.step]
            if self._awaited and self._running is not None:  # it was of a save from before the call
                self._running[1].request_checkpoint()
        for waiting in answered:
            if isinstance(event, CheckpointSaved):
                waiting.saved.set_result(Path(event.path))
            else:
                reason = f"no checkpoint of step {event.step}: {event.reason}"
                waiting.saved.set_exception(StoreError(self.config.checkpoint_dir, reason))


class _Waiting:
    """Somebody who wants a checkpoint of a later step than ``step``. None: the run ended first."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.saved: Future[Path | None] = Future()


def _how_to_join(coordinator: Coordinator, config: DistributedConfig) -> str:
    if not coordinator.config.code_free:
        return ""  # one local worker, which has the code
    told = coordinator.invitation
    host, port = (config.master_ip, coordinator.port) if told is None else (told.host, told.port)
    joined = "" if told is None else f"W5XDE_JOIN_FILE={Path(config.checkpoint_dir) / 'join'} "
    return f"{joined}python -m w5xde_async.facade.guava --master-ip {host} --master-port {port}"


class _StepLog:
    """A line of log every so many steps, above the bar."""

    def __init__(self, progress: Progress, every: int) -> None:
        self._handler, self._every = progress.handler(), every

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepCommitted) and event.step % self._every == 0:
            rate = "" if event.learning_rate is None else f" lr {event.learning_rate:.3g}"
            text = f"step {event.step} loss {event.loss:.4f}{rate} workers {event.num_workers}"
            self._handler.emit(logging.LogRecord(__name__, logging.INFO, __file__, 0, text, None, None))


def _check_devices(ranks: int) -> None:
    """Raises UsageError where this machine has GPUs, but not one for each part of a model."""
    count = torch.cuda.device_count()
    need(
        not 0 < count < ranks,
        f"num_workers={ranks} parts of a model and {count} GPUs: give num_workers={count}, "
        'or mode="orchestrator" and NetworkWorkers of several machines',
    )


# -- evaluation and threads ----------------------------------------------------------------------------------


def _mean(step: BatchLoss, model: nn.Module, loader: Any) -> float:
    """The mean loss over the samples of ``loader``'s batches. Raises ValueError where it gives none."""
    total, count = 0.0, 0
    for batch in loader:
        samples = _num_samples(batch) or 1  # of what has no tensor, each batch counts alike
        total += float(step(model, batch)) * samples
        count += samples
    if not count:
        raise ValueError("val_dataloader gives no batch")
    return total / count


def _num_samples(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ():
        if found := _num_samples(part):
            return found
    return 0


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
