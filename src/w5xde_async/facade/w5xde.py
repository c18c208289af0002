"""W5XDE's interface: ``CentralServer`` and ``TrainingNode``, blocking, from any thread or process.

    from w5xde_async.facade.w5xde import CentralServer, TrainingNode

Unlike the original the server trains: a batch is one step of its optimizer, its microbatches are shared among the
nodes, and the result has the same bits whatever the number of nodes (docs/migrating-from-w5xde.md has every argument).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import structs
from torch import Tensor, nn

from w5xde_async.compute.engine import choose_device
from w5xde_async.config import NAME, PATH, TIME, YES_OR_NO
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.prediction import Prediction, predict
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import RefusalCode, Refused, Unreachable, UsageError
from w5xde_async.facade import arguments
from w5xde_async.facade.arguments import or_none, takes
from w5xde_async.facade.calling import (
    LogMode,
    NodeLines,
    beats_for,
    block_on,
    page_at,
    shown,
    token_of,
    where_to_join,
    working,
)
from w5xde_async.facade.neighbours import found_by_neighbours
from w5xde_async.facade.reading import BatchLoss, class_loss
from w5xde_async.facade.words import ADVICE, Words
from w5xde_async.job import ENDLESS, Job, copied_model, lost_modes, made_by, made_model
from w5xde_async.net.endpoint import format_address
from w5xde_async.net.tls import is_loopback
from w5xde_async.telemetry.events import Bus
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.hooks import LeaseAnswered, LeaseFailed, WorkerHooks
from w5xde_async.worker.service import Worker

logger = logging.getLogger(__name__)

LossCallback = Callable[[float, str], object]
"""``(loss, batch_id)``: the mean loss of a piece of a batch, and ``"{step}_batch{first microbatch of the piece}"``."""

NetworkCallback = Callable[[int, int, float, float, int, int], object]
"""``(sent_bytes, received_bytes, comp_time, net_time, orig_size, comp_size)``: see ``TrainingNode.train``."""

_DEFAULT_ADDRESS = ("localhost", 5555)
_BY_TIME_ALONE = 1 << 53  # steps between checkpoints
_LOSSLESS = "lz4-shuffle"  # what servers accept, and nodes send where they were asked to: lz4 alone gains nothing
_OF_OPTIMIZER = "look at optimizer_class and optimizer_kwargs"
_WORDS = Words(
    {"run-dir": "checkpoint_dir", "resume": "resume", "host": "ip", "port": "port", "epochs": "num_epochs",
     "max-steps": "max_steps", "codec": "compression", "downlink": "compression", "target-batch": "adaptive_batch",
     "update sync": "asynchronous_updates=False", "update": "asynchronous_updates", "silence": "timeout_s",
     "heartbeat": "timeout_s", "dashboard-address": "dashboard"},
    {"codec": "compression", "feedback": "error_feedback", "target_batch": "adaptive_batch",
     "accumulate_grad_batches": "gradient_accumulation", "host": "ip", "prefetch_leaves": "queue_size",
     "epochs": "num_epochs", "connect_timeout_s": "timeout_s", "silence_s": "timeout_s", "heartbeat_s": "timeout_s"},
    {", and collate=loader.collate_fn and batch_size=... where they matter": " and its batch_size",
     "write optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=...)":
     _OF_OPTIMIZER,
     ADVICE: "choose another batch_size, which leaves no sample alone"},
)  # fmt: skip
_MOST_FAILED = 12  # leases in a row: several parts of batches, each tried as often as a server lets it fail
_OWN_CRITERION = ", criterion "  # in the run's name: nodes without one of their own need the server's


class CentralServer:
    """Holds the model, hands out batches, applies the gradients that come back.

    model                the module, trained in place; or a class or function that makes one
    dataset              map-style; samples are dicts with ``input_ids`` (and ``labels``, else ``input_ids`` are the
                         target; and what else the model's forward takes by name), dicts such as ``{"x", "y"}`` and
                         ``{"image", "label"}``, or tuples ``(x, y)``
    batch_size           samples of one step
    ip, port             where to listen; port 0 picks a free one
    checkpoint_dir       the run's directory (None: nothing is kept). Each start trains anew: what an earlier run left
                         there is kept aside, in ``{checkpoint_dir}.old-1``, ``-2`` and so on
    checkpoint_interval  minutes between checkpoints; one is always written at the end
    secure               TLS on loopback too. Off loopback there is always TLS, and nodes need the token or join file
    queue_size           microbatches that are read ahead, of this batch and the next
    criterion            ``criterion(output, target) -> mean loss``; by default cross entropy, with the class axis
                         second (batch, classes, ...) or last (batch, sequence, vocabulary). What is given here is sent
                         to nodes that have none of their own, as a program
    optimizer_class, optimizer_kwargs  ``optimizer_class(model.parameters(), **optimizer_kwargs)``
    compression          how gradients travel: a codec by its name (docs/codecs.md), most of them lossy; ``auto``
                         chooses codec and rule by the links. Default: lossless, from nodes with ``compress_gradients``
    error_feedback       a lossy codec adds what it has left out to the next gradient
    asynchronous_updates  a gradient counts when it comes, an older one less; no batch waits for another
    gradient_accumulation  batches that make one step; nodes sum as many microbatches before they send
    adaptive_batch       double ``batch_size`` as the gradient noise scale asks for it, up to so many samples;
                         ``auto``: up to the dataset
    num_epochs, max_steps  the end: whichever comes first; by default there is none but ``stop()`` and Ctrl-C
    seed                 of the order of samples, dropout and models that are made here
    token                the secret that nodes prove; else W5XDE_TOKEN, W5XDE_TOKEN_FILE, ~/.config/w5xde/token
    resume               ``auto`` goes on from what is in ``checkpoint_dir``, a checkpoint's path from that one
    log                  silent, normal or verbose: what is shown on stderr
    timeout_s            seconds of silence after which a node counts as gone and others do its work
    dashboard            ``HOST`` or ``HOST:PORT`` of a page that shows the run (docs/dashboard.md); True: on loopback
    """

    @takes(
        model=arguments.MODEL, batch_size=arguments.COUNT, ip=arguments.HOST, port=arguments.PORT_TO_LISTEN,
        checkpoint_dir=or_none(PATH), checkpoint_interval=arguments.MINUTES, secure=YES_OR_NO,
        queue_size=arguments.COUNT,
        criterion=arguments.CRITERION, optimizer_class=arguments.CALLABLE, optimizer_kwargs=arguments.SETTINGS,
        compression=arguments.CODEC, error_feedback=YES_OR_NO, asynchronous_updates=YES_OR_NO,
        gradient_accumulation=arguments.COUNT, num_epochs=arguments.COUNT, max_steps=arguments.COUNT,
        seed=arguments.SEED, resume=arguments.TEXT, log=arguments.LOG, timeout_s=arguments.SILENCE,
        dashboard=arguments.DASHBOARD,
    )  # fmt: skip
    @_WORDS.said()
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Any,
        batch_size: int = 16,
        ip: str = "localhost",
        port: int = 5555,
        checkpoint_dir: Path | str | None = "checkpoints",
        checkpoint_interval: float = 5,
        secure: bool = False,
        queue_size: int = 1000,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        *,
        optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        compression: str = "",
        error_feedback: bool = True,
        asynchronous_updates: bool = False,
        gradient_accumulation: int = 1,
        adaptive_batch: int | Literal["auto"] | None = None,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        seed: int = 0,
        token: str = "",
        resume: str = "never",
        log: LogMode = "normal",
        timeout_s: float = 12.0,
        dashboard: str | bool = False,
    ) -> None:
        """Raises UsageError, JobError for what cannot work; nothing is opened before ``start``."""
        if compression == "auto" and asynchronous_updates:
            raise UsageError('compression="auto" chooses the rule too: leave out asynchronous_updates')
        if secure and checkpoint_dir is None:
            raise UsageError("secure=True needs a checkpoint_dir: the join file and the certificate lie there")
        token = token_of(token)
        if checkpoint_dir is None and not token and not is_loopback(ip):
            raise UsageError(f"nodes cannot join ip={ip} without a secret: give a token or a checkpoint_dir")
        if not isinstance(model, nn.Module):
            model = made_model(model, seed)
        if told := lost_modes(model):
            logger.warning("%s", told)
        self.model, self.dataset = model, dataset
        self.port = port  #: where it listens; with port 0, the one that was picked once it listens
        self.listening = threading.Event()  #: set while nodes can connect, and once ``start`` has failed
        self._directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._log: LogMode = log
        kwargs = dict(optimizer_kwargs or {})
        microbatch = None
        # Its statistics are those of a whole batch, as a node there computed them.
        normalizes = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        if normalizes and _counts(batch_size):
            microbatch = batch_size
        if normalizes and adaptive_batch is not None and gradient_accumulation == 1:
            raise UsageError(
                "adaptive_batch: a batch grows by what the halves of a step differ, and batch normalisation computes "
                f"all {batch_size} samples of a batch together; give gradient_accumulation=2 or more"
            )
        accumulated = gradient_accumulation
        if gradient_accumulation != 1 and _counts(batch_size) and _counts(gradient_accumulation):
            microbatch, batch_size = microbatch or -(-batch_size // 8), batch_size * gradient_accumulation
            if normalizes and adaptive_batch is not None:
                accumulated = 1  # a batch that grows needs steps of several leaves: each of these batches is one
        drop_last = microbatch is not None and normalizes and _leaves_one_over(dataset, batch_size, microbatch)
        if drop_last:
            logger.warning(
                "the last batch of an epoch is left out: it would end with one sample alone, of which batch "
                "normalisation has no statistics"
            )
        self._job = Job(
            model=model,
            dataset=dataset,
            optimizer=lambda model: made_by(
                "optimizer", lambda: optimizer_class(model.parameters(), **kwargs), hint=_OF_OPTIMIZER
            ),
            step=BatchLoss(criterion or class_loss),
            batch_size=batch_size,
            microbatch_size=microbatch,
            accumulate_grad_batches=accumulated,
            drop_last=drop_last,
            epochs=num_epochs,
            max_steps=ENDLESS if num_epochs is None and max_steps is None else max_steps,
            seed=seed,
        )
        made = type(model).__name__
        described = type(criterion).__name__ if isinstance(criterion, nn.Module) else getattr(criterion, "__name__", "")
        self._name = made if criterion is None else f"{made}{_OWN_CRITERION}{described or 'of its own'}"
        self._config = CoordinatorConfig(
            host=ip,
            port=port,
            token=token,
            join_file=self._directory / "join" if secure and self._directory is not None else None,
            checkpoint_every=_BY_TIME_ALONE,
            checkpoint_time_s=60 * checkpoint_interval,
            prefetch_leaves=queue_size,
            code_free=criterion is not None,
            resume=resume,
            silence_s=timeout_s,
            heartbeat_s=beats_for(timeout_s),
            dashboard=page_at(dashboard),
            auto=compression == "auto",
            target_batch=adaptive_batch,
            update=UpdateConfig(
                rule="async" if asynchronous_updates else "sync",
                codec=compression if compression not in ("", "auto") else "raw" if compression else _LOSSLESS,
                downlink="" if compression else "raw",
                feedback=error_feedback,
            ),
        )
        self.bus = Bus()  #: the run's events (telemetry.events), for those who want more than the screen
        self._lock = threading.RLock()  # a signal's handler may call stop anywhere
        self._running: tuple[asyncio.AbstractEventLoop, Coordinator] | None = None
        self._stopped: str | None = ""  # why, where it is asked for before the run is there; None: the run has ended

    @property
    def running(self) -> bool:
        """True from ``start`` to its end. Setting it to False is ``stop()``, as it was."""
        return self._running is not None

    @running.setter
    def running(self, value: bool) -> None:
        """False stops. Raises UsageError for True."""
        if value:
            raise UsageError("a server is started by start()")
        self.stop()

    @property
    def address(self) -> str:
        """``host:port`` of this server."""
        return format_address(self._config.host, self.port)

    def start(self) -> RunResult:
        """Train until the end, ``stop()`` or Ctrl-C, each in good order with a checkpoint; how it ended.

        Raises PortInUse, StoreError, CheckpointMismatch (``resume``, and the run there is of another model or dataset),
        JobError, and what ended the run where it failed. Ctrl-C before it listens raises KeyboardInterrupt.
        """
        with self._lock:
            before, self._stopped = self._stopped, self._stopped or ""
        try:
            result = block_on(self._serve, instead="w5xde_async.Coordinator", words=_WORDS, serves=True)
        finally:
            with self._lock:
                if before is None and self._running is None:  # where no run could begin, too
                    self._stopped = None
        return _WORDS.of_result(result)

    @takes(nodes=arguments.COUNT)
    @_WORDS.said()
    def predict(self, nodes: int = 1) -> Prediction:
        """What a run with so many nodes, each like this machine, will need: memory, bytes, time; ``print`` it.

        Computes a few microbatches here with a copy of the model; nothing is written. Raises JobError, UsageError.
        """
        return predict(self._job, self._config, workers=nodes)

    @takes(reason=arguments.TEXT)
    def stop(self, reason: str = "stopped") -> None:
        """End after the batch under way; before the first ``start``, that one's run as it begins. Nothing where a run
        has ended. Returns at once; from any thread.
        """
        with self._lock:
            if self._running is not None:
                loop, coordinator = self._running
                loop.call_soon_threadsafe(coordinator.request_stop, reason)
            elif self._stopped is not None:
                self._stopped = reason

    async def _serve(self) -> RunResult:
        config, bus = self._config, self.bus
        coordinator = Coordinator(self._job, run_dir=self._directory, name=self._name, config=config, bus=bus)
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._running is not None:
                raise UsageError("this server runs already")
            self._running = (loop, coordinator)
            self.listening.clear()  # a run that failed left it set
            if self._stopped:
                coordinator.request_stop(self._stopped)
        failed = True
        try:
            join = partial(self._how_to_join, coordinator)
            async with AsyncExitStack() as stack:
                stack.enter_context(shown(self.bus, self._log, join=join, words=_WORDS, resume=config.resume))
                await coordinator.start()
                stack.push_async_callback(coordinator.aclose)
                await stack.enter_async_context(found_by_neighbours(coordinator))
                self.port = coordinator.port
                self.listening.set()
                try:
                    result = await coordinator.wait()
                except asyncio.CancelledError:  # Ctrl-C
                    coordinator.request_stop("Ctrl-C")
                    result = await coordinator.wait()
            failed = False
            return result
        finally:
            with self._lock:
                self._running = self._stopped = None
            # Who waits for it in another thread would wait for ever for a server that cannot listen.
            (self.listening.set if failed else self.listening.clear)()

    def _how_to_join(self, coordinator: Coordinator) -> str:
        told = coordinator.invitation
        host, port = (self._config.host, coordinator.port) if told is None else (told.host, told.port)
        joined = "" if told is None else f"W5XDE_JOIN_FILE={self._directory / 'join'}  " if self._directory else ""
        return f"{joined}TrainingNode(model, ('{host}', {port})).train()"


class TrainingNode:
    """Computes pieces of batches for a server.

    model               the server's model: a module (a copy of it is used: ``node.model``) or a class or function that
                        makes one. Its parameters come from the server
    server_address      ``(host, port)`` or ``"host:port"``; default: the join string's, else ``('localhost', 5555)``
    secure              TLS; on loopback that needs the server's join string. Off loopback there is always TLS
    collect_metrics     ``network_callback`` is called only with it
    compress_gradients  lossless lz4 for the gradients that are sent, where it saves 3 % of their bytes
    batch_gradients     gradients that are ready together share one write; False: each leaves by itself
    device              ``cpu``, ``cuda:0``, ``mps`` or a torch.device; default: the best there is
    criterion           ``criterion(output, target) -> mean loss``; default: the server's, which is CrossEntropyLoss
                        unless it was given another
    token, join_file    the server's secret; else W5XDE_JOIN_FILE, W5XDE_JOIN, what a server of this machine and user
                        leaves for its nodes, W5XDE_TOKEN, W5XDE_TOKEN_FILE, ~/.config/w5xde/token
    timeout_s           how long a server is looked for, at the start and when it was lost
    log                 normal, or silent: nothing but warnings on stderr
    """

    @takes(
        model=arguments.MODEL, secure=YES_OR_NO, collect_metrics=YES_OR_NO, compress_gradients=YES_OR_NO,
        batch_gradients=YES_OR_NO, device=arguments.DEVICE, criterion=arguments.CRITERION, join_file=PATH,
        timeout_s=TIME, name=NAME, log=arguments.LOG,
    )  # fmt: skip
    @_WORDS.said()
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        server_address: tuple[str, int] | str | None = None,
        secure: bool = False,
        collect_metrics: bool = False,
        compress_gradients: bool = False,
        batch_gradients: bool = True,
        device: torch.device | str | None = None,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        *,
        token: str = "",
        join_file: Path | str | None = None,
        timeout_s: float = 30.0,
        name: str = "",
        log: LogMode = "normal",
    ) -> None:
        """Raises UsageError: a bad address, join file, device or criterion."""
        self._log: LogMode = log
        self._place = where_to_join(server_address, _DEFAULT_ADDRESS, join_file=join_file, secure=secure)
        self.server_address = self._place.server  #: ``host:port`` or a join string
        self.collect_metrics, self.batch_gradients = collect_metrics, batch_gradients
        self.compress_gradients = compress_gradients
        self._config = WorkerConfig(
            name=name,
            token=token_of(token),
            device="auto" if device is None else str(device),
            connect_timeout_s=timeout_s,
        )
        self._given = model
        self._replica: nn.Module | None = None
        self._criterion = criterion
        self._traffic: tuple[int, int, Worker | None] = (0, 0, None)  # by earlier calls; the worker of this one
        self._training = threading.Lock()
        self._lock = threading.RLock()  # a signal's handler may call stop anywhere
        self._stopping: Callable[[], object] | None = None
        self._stopped: bool | None = False  # asked to; None: train has ended

    @property
    def model(self) -> nn.Module | Callable[[], nn.Module]:
        """This node's copy, with the newest parameters that it has computed with; what was given, before that."""
        return self._given if self._replica is None else self._replica

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to servers so far, handshakes and all (TLS adds its own to them)."""
        before, _, worker = self._traffic
        return before if worker is None else before + worker.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received from servers so far."""
        _, before, worker = self._traffic
        return before if worker is None else before + worker.bytes_received

    @takes(loss_callback=arguments.CALLABLE, network_callback=arguments.CALLABLE)
    def train(self, loss_callback: LossCallback | None = None, network_callback: NetworkCallback | None = None) -> None:
        """Work until the server has finished, or has gone and not come back within ``timeout_s``.

        Both callbacks come once for each piece of a batch that this node has computed and sent, ``network_callback``
        not where the server had its gradients already, from a node that was lost; they run between two messages and
        should return soon. ``network_callback`` gets, counted since the call before: bytes sent and
        received, seconds spent compressing, seconds spent sending and receiving, and bytes of the piece's gradients
        before and after compression. Ctrl-C finishes the piece under way, then raises KeyboardInterrupt.

        Raises Unreachable (no server in ``timeout_s``), Refused (another model, no secret, ...), RunFailed, and what a
        callback raises. Raises UsageError where the node trains already.
        """
        if network_callback is not None and not self.collect_metrics:
            logger.warning("network_callback is not called: give the node collect_metrics=True")
            network_callback = None
        if not self._training.acquire(blocking=False):
            raise UsageError("this node trains already")
        with self._lock:
            self._stopped = bool(self._stopped)
        report = _reporting(loss_callback, network_callback)
        try:
            self._block_on_work(report)
        except _NeedsProgram as needs:
            try:
                self._block_on_work(report, program=True)
            except Refused as error:
                if error.code is not RefusalCode.NO_PROGRAM:
                    raise
                hint = "give this node the same criterion="
                raise Refused(error.code, f"{needs}, and it cannot be sent: {error.reason}", hint) from None
        finally:
            with self._lock:
                self._stopped = None
            self._training.release()

    def stop(self) -> None:
        """Leave after the piece under way; before the first ``train``, as that one begins. Nothing where ``train`` has
        ended. Returns at once; from any thread.
        """
        with self._lock:
            if self._stopped is not None:
                self._stopped = True
            if self._stopping is not None:
                self._stopping()

    def _block_on_work(self, report: Callable[[LeaseAnswered], None] | None, *, program: bool = False) -> None:
        lines = NodeLines(self._log, _WORDS)
        needs_program = self._criterion is None and not program
        worker: Worker

        def on_welcome(welcome: Welcome) -> Welcome:
            name, found, criterion = welcome.run_name.partition(_OWN_CRITERION)
            if found and needs_program:
                raise _NeedsProgram(f"the server trains with its own criterion ({criterion})")
            lines.joined(worker, structs.replace(welcome, run_name=name))
            plain = welcome.codec == _LOSSLESS and not self.compress_gradients
            return structs.replace(welcome, codec="raw") if plain else welcome

        def on_answered(answer: LeaseAnswered) -> None:
            lines.answered(answer)
            if report is not None:
                report(answer)

        def on_failed(failed: LeaseFailed) -> None:
            # The server would compute everything that fails here itself, and both would seem to work.
            if failed.in_a_row >= _MOST_FAILED or not (failed.ever or self._criterion is None):
                own = "its model" if self._criterion is None else "its criterion= and model"
                raise UsageError(f"this node cannot compute what the server sends: {failed.error}; look at {own}")

        async def work() -> None:
            nonlocal worker
            worker = make()
            await self._work(worker, lines)

        hears = report is not None or self._log != "silent"  # else nothing need be counted
        hooks = WorkerHooks(on_welcome=on_welcome, on_answered=on_answered if hears else None, on_failed=on_failed)
        config = replace(self._config, gather_frames=self.batch_gradients)
        with lines.shown():
            lines.looking(self._place, self._config)
            make = self._place.worker(config, job=None if program else self._job(), hooks=hooks)
            block_on(work, instead="w5xde_async.Worker", words=_WORDS)

    async def _work(self, worker: Worker, lines: NodeLines) -> None:
        with self._lock:
            self._stopping = partial(asyncio.get_running_loop().call_soon_threadsafe, worker.drain, "stopped")
            if self._stopped:
                worker.drain("stopped")
        self._traffic = (*self._traffic[:2], worker)
        try:
            lines.ended((await working(worker)).value, worker)
        except Unreachable as error:
            if not worker.bytes_received:
                raise
            logger.warning("the server has gone reason=%s", str(error))
        finally:
            with self._lock:
                self._stopping = None
            self._traffic = (self.bytes_sent, self.bytes_received, None)

    def _job(self) -> Job:
        criterion: Callable[[Any, Any], Tensor] = self._criterion or class_loss
        if isinstance(criterion, nn.Module):  # it may have weights, which must lie where the outputs will
            criterion = copy.deepcopy(criterion).to(choose_device(self._config.device))
        return Job(
            model=self._make_replica,
            dataset=[0],  # a worker's job has model and step; the rest is the coordinator's
            optimizer=lambda model: torch.optim.SGD(model.parameters()),
            step=BatchLoss(criterion),
            batch_size=1,
            max_steps=1,
        )

    def _make_replica(self) -> nn.Module:
        given = self._given  # it may be the server's, which trains it in place in another thread
        self._replica = copied_model(given) if isinstance(given, nn.Module) else given()
        return self._replica


def _leaves_one_over(dataset: Any, batch_size: int, microbatch: int) -> bool:
    """Whether an epoch's last batch ends with a microbatch of one sample, and is not the only one."""
    samples = len(dataset) if hasattr(dataset, "__len__") else 0
    return microbatch > 1 and samples > batch_size and samples % batch_size % microbatch == 1


def _counts(value: object) -> bool:
    return type(value) is int and value > 0


class _NeedsProgram(UsageError):
    """The server has a criterion of its own, and this node none."""


def _reporting(
    loss_callback: LossCallback | None, network_callback: NetworkCallback | None
) -> Callable[[LeaseAnswered], None] | None:
    if loss_callback is None and network_callback is None:
        return None
    untold = (0, 0, 0.0, 0.0)

    def report(answered: LeaseAnswered) -> None:
        if loss_callback is not None:
            loss_callback(answered.loss, f"{answered.step}_batch{answered.start}")
        nonlocal untold
        sent, received, encode_s, network_s = untold
        sent, received = sent + answered.sent_bytes, received + answered.received_bytes
        untold = sent, received, encode_s + answered.encode_s, network_s + answered.network_s
        # A lost node's piece may have come but for its last words: then this one sends no gradients, and whoever
        # divides by their bytes would fail.
        if network_callback is not None and answered.encoded_bytes:
            told, untold = untold, (0, 0, 0.0, 0.0)
            network_callback(*told, answered.gradient_bytes, answered.encoded_bytes)

    return report
