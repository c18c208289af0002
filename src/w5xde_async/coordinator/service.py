"""The coordinator: one run, from its directory to its last checkpoint.

A guest in the caller's event loop: it installs no signal handler and no loop policy. Its tasks live in one TaskGroup
inside one task; everything that blocks runs in executors. Shutting down is a ladder: stop accepting, stop leasing,
finish the step or give it up, checkpoint, say goodbye, close.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import nn

import w5xde_async
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.journal_writer import JournalWriter
from w5xde_async.coordinator.memory_bound import EXTRA_LINKS, memory_bound_bytes
from w5xde_async.coordinator.monitoring.outputs import Outputs
from w5xde_async.coordinator.run.run import Run, RunEnvironment, RunHooks
from w5xde_async.coordinator.run.shutdown import LEAST_S, Shutdown, ShutdownDeadline, deadline_s
from w5xde_async.coordinator.run.spec import Prepared
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.run.tasks import RunTasks
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.coordinator.training import Training, ending
from w5xde_async.errors import (
    DiskHangs,
    StoreError,
    UsageError,
    W5xdeError,
    in_one_line,
)
from w5xde_async.hub.members.access import Access
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job, require_job, shown_end
from w5xde_async.net.endpoint import format_address
from w5xde_async.net.join import Invitation
from w5xde_async.net.link import Link
from w5xde_async.net.own_addresses import advertised
from w5xde_async.net.tls import is_loopback, out_of_date
from w5xde_async.openmp import release_helpers
from w5xde_async.runtime import Listening, Runtime
from w5xde_async.telemetry.events import Best, Bus, RunStarted, Subscriber, Warned
from w5xde_async.telemetry.memory import host_bytes
from w5xde_async.telemetry.notebook import html_table
from w5xde_async.telemetry.recorder import Recorder
from w5xde_async.telemetry.wording import size
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.messages import ByeCode

#: Tables of so much with sparse gradients: to update all of it takes longer than the rest of a small step.
_MANY_ROWS_BYTES = 1 << 20
#: After so long a start says what it does: whoever waits cannot tell a large model from a disk that hangs.
_SLOW_START_S = 30.0
_SLOW_START = (
    "the run has been in preparation for {seconds:.0f} s: its model is built, the order of its samples is computed, "
    "and what the run directory holds is read"
)
_LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def _prepared(*given: Any) -> Prepared:
    try:
        return prepare(*given)
    finally:
        release_helpers()  # else what the event loop computes with several threads takes three times as long


async def _let_go(preparing: asyncio.Future[Prepared]) -> None:
    """A start that nobody waits for any more comes to its end, and then holds nothing."""
    await asyncio.wait([preparing])  # a thread cannot be cancelled, and it may come to hold the directory
    if preparing.exception() is None:
        await asyncio.get_running_loop().run_in_executor(None, preparing.result().spec.close)


class Coordinator:
    """Trains ``job`` on the workers that connect.

    >>> async with Coordinator(job, run_dir="runs/digits") as coordinator:
    ...     result = await coordinator.wait()
    """

    def __init__(
        self,
        job: Job,
        *,
        run_dir: Path | str | None = None,
        name: str = "",
        config: CoordinatorConfig | None = None,
        bus: Bus | None = None,
        job_reference: str = "",
        settings: Mapping[str, object] | None = None,
        callbacks: Sequence[Subscriber] = (),
        record: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        """``run_dir`` None keeps nothing on disk. ``settings`` is what ``config.toml`` will hold (no secrets). Without
        ``bus`` what a person should read goes to the log.

        ``callbacks`` are given every event (``telemetry.events``); one that raises is left out, the run goes on.
        ``record`` False: no ``metrics.jsonl`` and no plot in the run directory. ``runtime``: where clock, threads,
        links, files and random bytes come from, if not from this machine.
        """
        require_job(job, "Coordinator")
        self.job, self.config = job, config or CoordinatorConfig()
        self.bus = bus or Bus(log_warnings=True)
        self._record, self._runtime = record, runtime or Runtime()
        self.name = name or (Path(run_dir).name if run_dir is not None else type(job.dataset).__name__.lower())
        self._run_path = None if run_dir is None else Path(run_dir)
        with suppress(FileNotFoundError):  # the directory of this process has been removed
            # The job's own code may go to another one.
            self._run_path = self._run_path and self._run_path.absolute()
        self._reference, self._settings = job_reference, settings
        self._outputs = Outputs(
            self.config,
            self.bus,
            self._run_path,
            insecure=self.config.insecure,
            advertise=self.config.advertise,
        )
        for callback in callbacks:
            self.bus.subscribe(callback)
        self._prepared: Prepared | None = None
        self._run: Run | None = None
        self._listener: Listening | None = None
        self._recorder: Recorder | None = None
        self._bulk: Executor | None = None
        self._journal: JournalWriter | None = None
        self._starting = False
        self._freeing: asyncio.Task[None] | None = None
        self._main: asyncio.Task[RunResult] | None = None
        self._access: Access | None = None
        self._join_file: Path | None = None
        self._incarnations = 0
        self._began = 0.0
        self._open_to_links = asyncio.Event()  # the run is recorded and announced: whoever joins comes after that
        self._stop_reason = ""
        self._workers_failed = ""  # why none of the workers that were started for this run is left
        self._stopped = asyncio.Event()
        self._stop_at = math.inf  # a step that is under way then is given up
        self._patience: asyncio.Timeout | None = None  # with the training, while it goes on
        self._deadline = ShutdownDeadline(deadline_s(self.config.grace_s, 0), self._overdue)

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Prepare the run, listen, begin. Raises JobError, StoreError, PortInUse, UsageError; then nothing is left."""
        if self._main is not None or self._starting:
            raise UsageError("this coordinator was started before; make a new Coordinator for another run")
        self._starting = True
        try:
            await self._start()
        finally:
            self._starting = False

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        preparing = loop.run_in_executor(
            None, _prepared, self.job, self.config, self._run_path, lambda: self._runtime.random_bytes(8).hex(),
            not self._reference, self._runtime.filesystem,
        )  # fmt: skip
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            waited, first = (preparing, stopping), asyncio.FIRST_COMPLETED
            if not (await asyncio.wait(waited, timeout=_SLOW_START_S, return_when=first))[0]:
                self.bus.publish(Warned(text=_SLOW_START.format(seconds=_SLOW_START_S)))
                await asyncio.wait(waited, return_when=first)
            if not preparing.done() and await self._deadline.wait(asyncio.shield(preparing), "the start") is None:
                assert self._deadline.error is not None
                self._freeing = asyncio.create_task(_let_go(preparing))
                raise self._deadline.error
            self._prepared = prepared = preparing.result()
        except asyncio.CancelledError:
            await self._free(_let_go(preparing))
            raise
        finally:
            stopping.cancel()
        try:
            await self._open(prepared)
        except (Exception, asyncio.CancelledError):
            await self._free(self._close())
            raise
        self._main = asyncio.create_task(self._conduct(), name=f"coordinator {self.name}")
        if self._stopped.is_set():  # while there was nothing yet to stop
            self._stop_at = math.inf
            self.request_stop()

    async def _free(self, freeing: Coroutine[Any, Any, None]) -> None:
        """To its end, however often whoever waits for it is cancelled."""
        self._freeing = asyncio.create_task(freeing, name="free what the start has made")
        await asyncio.shield(self._freeing)

    async def wait(self) -> RunResult:
        """The run's end. Cancelling leaves it running.

        Raises what ended it where it failed (LeafFailed, NonFinite, UpdateFailed), StoreError where the last
        checkpoint could not be written, and W5xdeError where it was stopped because its workers had failed. Raises
        UsageError before the start.
        """
        if self._main is None:
            raise UsageError("the coordinator has not been started; use async with, or await start() first")
        result = await asyncio.shield(self._main)
        if self._workers_failed and result.reason == self._workers_failed:
            raise W5xdeError(self._workers_failed)
        return result

    async def serve_forever(self) -> RunResult:
        """``start``, unless that was done, ``wait`` and ``aclose`` in one; cancelled, it stops the run in good order
        first."""
        if self._main is None:
            await self.start()
        try:
            return await self.wait()
        finally:
            await self.aclose()

    def request_stop(self, reason: str = "asked to stop") -> None:
        """End in good order, with a checkpoint: after the step under way or ``grace_s``. Returns at once."""
        self._stop_reason = self._stop_reason or reason
        self._stopped.set()
        self._stop_at = min(self._stop_at, self._runtime.clock() + self.config.grace_s)
        if self._run is not None:
            self._run.stop()

    def workers_failed(self, reason: str) -> None:
        """The workers that were started for this run have failed for good: it stops as soon as no other is there."""
        self._workers_failed = reason
        if not self.num_workers:
            self.request_stop(reason)

    def worker_failed(self, worker: str, reason: str, left: int, *, asked: bool) -> None:
        """One of the workers that were started for this run has failed for good; ``left`` of them are there yet.

        Where the first step waits for more than those, it does not any longer, unless somebody has ``asked`` for that
        number: then a person is told what it takes.
        """
        run, enough = self._run, max(left, 1)
        if run is None or self._stopped.is_set() or run.config.min_workers <= enough:
            return
        wanted, begun = run.config.min_workers, run.training.phase.begun
        if not asked:
            run.begin_with(enough)
        if begun:
            return
        if asked:
            said = (
                f"--min-workers {wanted} can be met by workers from elsewhere only: start {wanted - left} there, or "
                f"begin anew with --min-workers {enough}"
            )
        else:
            said = f"the run does not wait for it, and begins with {enough} worker{'s' * (enough > 1)}"
        self.bus.publish(Warned(text=f"worker {worker} {reason}: {said}"))

    def request_checkpoint(self) -> None:
        """Write a checkpoint after the next commit."""
        if self._run is not None:
            self._run.checkpointing.request()

    @property
    def invitation(self) -> Invitation | None:
        """The join string of the run; None without TLS. ``str`` hides the secret, ``reveal()`` shows it."""
        return None if self._access is None else self._access.invitation(self.port)

    @property
    def local_join(self) -> str:
        """For workers on this machine, secret and all; "" without TLS, where ``address`` will do."""
        told = self.invitation
        host = _LOCAL.get(self.host, self.host)
        return "" if told is None else replace(told, host=host, port=self.port, also=()).reveal()

    def invite(self, worker: str) -> Invitation | None:
        """A join string that opens the run to one worker of that name, whose access ``revoke`` can end."""
        return None if self._access is None else self._access.invitation(self.port, worker)

    async def rotate_secret(self, secret: str) -> None:
        """From now on workers join with another secret; the join file is written anew. Who is in stays in.

        It is kept in the run directory, unless a token was given: then the next start is with that token. Raises
        UsageError, StoreError: then nothing has changed, unless it names the join file: the secret is another, and
        the next ``reload_access`` writes that file.
        """
        if self._access is None:
            raise UsageError("the coordinator has not been started; use async with, or await start() first")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._access.rotate, secret)
        await loop.run_in_executor(None, self._access.write_join_file, self.port)
        if not self._access.lasting:
            self.bus.publish(
                Warned(text="the secret was changed until the coordinator ends: give it to the next one too")
            )

    def revoke(self, worker: str, reason: str = "its access was revoked") -> None:
        """Drop a worker, by its own name or its id, and let it in no more: its name is added to ``revoked``.

        Raises UsageError before the start.
        """
        if self._access is None or self._training is None:
            raise UsageError("the coordinator has not been started; use async with, or await start() first")
        self._access.lock_out(worker)
        self._keep_revoked()
        self._training.roster.drop(worker, reason)

    def _keep_out(self, name: str, reason: str) -> None:
        """A worker was quarantined: it stays out until ``revoked`` does not name it any more."""
        assert self._access is not None
        self._access.lock_out(name, reason)
        self._keep_revoked()

    def _fail(self, error: BaseException) -> None:
        if self._training is not None:
            self._training.phase.lifecycle.fail(error)

    def _write_records(self) -> None:
        """Blocks: what was told stays told, whatever ends this process."""
        if self._recorder is not None:
            self._recorder.flush()

    def _sync_records(self) -> None:
        """Blocks: a checkpoint counts only when the lines of its steps are on the disk."""
        if self._recorder is not None:
            self._recorder.sync()

    def _keep_revoked(self) -> None:
        assert self._access is not None
        keeping = asyncio.get_running_loop().run_in_executor(None, self._access.keep)
        keeping.add_done_callback(self._kept)

    def _kept(self, keeping: asyncio.Future[None]) -> None:
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            self.bus.publish(Warned(text=str(error)))

    def _made_anew(self) -> None:
        """The run directory was deleted or moved, and is there again: so is what a start after a kill needs."""
        self.request_checkpoint()
        keeping = asyncio.get_running_loop().run_in_executor(None, self._write_access_anew)
        keeping.add_done_callback(self._kept)

    def _write_access_anew(self) -> None:
        assert self._access is not None
        self._access.write_anew()
        self._access.write_join_file(self.port)

    async def reload_access(self) -> None:
        """Take up what the run directory's ``secret`` and ``revoked`` say now. Raises UsageError, StoreError."""
        if self._access is None or self._training is None:
            raise UsageError("the coordinator has not been started; use async with, or await start() first")
        loop = asyncio.get_running_loop()
        try:
            if await loop.run_in_executor(None, self._access.reload):
                await loop.run_in_executor(None, self._access.write_join_file, self.port)
                self.bus.publish(Warned(text="the secret was changed: workers join with the new join file from now on"))
        finally:
            self._drop_revoked(self._access, self._training)

    def _drop_revoked(self, access: Access, training: Training) -> None:
        for session in (*training.roster.sessions.values(), *training.roster.joining):
            if access.credentials.revoked(session.identity, session.worker_id):
                session.abort("its access was revoked")
            elif not session.identity and access.credentials.revoked(session.name):
                self.bus.publish(
                    Warned(
                        text=f"{session.name} stays: it has joined with the run's secret, with which anybody takes any "
                        f"name. To put this process out, write {session.worker_id} into revoked; to keep its owner "
                        "out, change the secret"
                    )
                )

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a worker over a connection that the application has accepted, until it ends; then it is closed.

        Fits ``asyncio.start_server`` and ``asyncio.start_unix_server``. For such a connection holds what holds for
        those of the port: the limits on links that are not let in, the handshake with its deadline, and
        the proof of the token. Encryption is the application's matter: what protects the bytes is a Unix socket's
        file mode, a tunnel, or TLS of the application's own server. Over TLS the proof is bound to the coordinator's
        certificate, so the server must show that one (``TlsFiles``). A coordinator without a token takes workers from
        this machine alone. Whatever the peer does ends this connection and raises nothing; cancelled, it is cut off.

        Raises UsageError before ``start``, and for a peer elsewhere where no token is asked.
        """
        address = writer.get_extra_info("peername")
        host = str(address[0]).removeprefix("::ffff:") if isinstance(address, tuple) else ""
        try:
            listening = self._listening
            if host and not is_loopback(host) and self._access is not None and not self._access.credentials.required:
                raise UsageError(f"{host} is another machine, and this coordinator asks for no token: give it one")
        except UsageError:
            writer.close()
            raise
        await listening.serve(reader, writer)

    async def aclose(self) -> None:
        """Stop in good order and free everything. May be called twice; a failure of the run is not raised again."""
        if self._main is None:
            return
        self.request_stop("closed")
        with suppress(W5xdeError):
            await asyncio.shield(self._main)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def host(self) -> str:
        host: str = self._listening.host
        return host

    @property
    def port(self) -> int:
        """The port it listens on (the one that was picked, for port 0)."""
        port: int = self._listening.port
        return port

    @property
    def has_short_leaves(self) -> bool:
        """Whether a microbatch is so little arithmetic that a second thread costs more than it computes."""
        return self._prepared is not None and self._prepared.spec.has_short_leaves

    @property
    def address(self) -> str:
        """``host:port``, for workers on this machine."""
        return format_address(_LOCAL.get(self.host, self.host), self.port)

    @property
    def dashboard_link(self) -> str:
        """Where to watch the run, token and all; empty without a dashboard."""
        return self._outputs.link

    @property
    def num_workers(self) -> int:
        """Workers that have joined."""
        return 0 if self._training is None else len(self._training.roster.sessions)

    @property
    def step(self) -> int:
        """Commits so far."""
        return 0 if self._training is None else self._training.progress

    @property
    def model(self) -> nn.Module:
        """The model that is trained, in train mode. While the run goes on its parameters change: take it at the end.

        Raises UsageError before the start.
        """
        if self._prepared is None:
            raise UsageError("the coordinator has not been started; use async with, or await start() first")
        return self._prepared.spec.model

    @property
    def best(self) -> Best | None:
        """The best state so far by the job's ``keep_best``: its ``path``, ``step`` and ``value``. None: none yet."""
        return None if self._run is None else self._run.best

    @property
    def running(self) -> bool:
        """True from ``start`` until the run has ended and everything is closed."""
        return self._main is not None and not self._main.done()

    def _repr_html_(self) -> str:
        rows = {"state": "running" if self.running else "not running", "step": self.step, "workers": self.num_workers,
                "address": self.address if self._listener is not None else "", "files": self._run_path,
                "dashboard": self.dashboard_link.partition("?")[0]}  # fmt: skip
        return html_table(f"Coordinator {self.name}", rows)

    @property
    def _listening(self) -> Listening:
        if self._listener is None:
            raise UsageError("the coordinator does not listen; use async with, or await start() first")
        return self._listener

    @property
    def _training(self) -> Training | None:
        return None if self._run is None else self._run.training

    # -- the run -------------------------------------------------------------------------------------------

    async def _open(self, prepared: Prepared) -> None:
        config, (spec, _, resume), files = self.config, prepared, prepared.spec.files
        self._deadline.left_s = deadline_s(config.grace_s, spec.layout.vector_bytes)
        if config.bulk_threads:
            self._bulk = self._runtime.executor(config.bulk_threads, "w5xde-bulk")
        loop = asyncio.get_running_loop()
        self._access = access = await loop.run_in_executor(None, Access, config, self._run_path)
        self._listener = await self._runtime.listen(
            config.host, config.port, self._on_link, ssl=access.context, bulk=self._bulk,
            max_strangers=config.max_workers + EXTRA_LINKS,  # all may come at once
        )  # fmt: skip
        overwrites = await loop.run_in_executor(None, access.overwrites, self.port)
        self._join_file = await loop.run_in_executor(None, access.write_join_file, self.port)
        if files is not None:

            def made_anew() -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._made_anew)

            files.directory.on_made_anew = made_anew
        if files is not None and files.journal is not None:
            self._journal = JournalWriter(
                files.journal, spec.layout, self.bus, step=resume.step, clock=self._runtime.clock,
                wall=self._runtime.wall, executor=self._runtime.executor(1, "w5xde-journal"), on_error=self._fail,
            )  # fmt: skip
        environment = RunEnvironment(
            name=self.name, reference=self._reference, bus=self.bus, runtime=self._runtime
        )  # fmt: skip
        hooks = RunHooks(
            record=self._write_records, before_save=self._sync_records, on_change=self._outputs.began,
            on_quarantine=self._keep_out,
        )  # fmt: skip
        self._run = run = Run(prepared, config, environment, journal=self._journal, hooks=hooks)
        self._deadline.culprit = run.hangs
        if files is not None:
            await loop.run_in_executor(None, files.directory.write_config, self._settings or {"name": self.name})
        if files is not None and self._record:
            path, filesystem, wall = files.directory.metrics_path, files.directory.filesystem, self._runtime.wall
            self._recorder = Recorder(
                path, resumed_step=resume.step, replayed=resume.replayed, wall=wall, filesystem=filesystem
            )
            self.bus.subscribe(self._recorder, prompt=False)
        await self._outputs.open(access, self._settings or config.shown(), resume.step)
        self._began = self._runtime.clock()
        self.bus.publish(self._started(prepared))
        self._outputs.began(run.training)
        cert, told = config.tls.cert, list(resume.notes)
        if cert is not None:
            now = datetime.fromtimestamp(self._runtime.wall(), UTC)
            told += filter(None, [await loop.run_in_executor(None, out_of_date, cert, now)])
        told += [overwrites] if overwrites else []
        for note in (*told, *_lagging(prepared.strategy.update), *_looked_up(prepared)):
            self.bus.publish(Warned(text=note))
        self._open_to_links.set()

    def _started(self, prepared: Prepared) -> RunStarted:
        job, (spec, strategy, resume) = self.job, prepared
        config = replace(self.config, update=strategy.update)  # which auto may have chosen before
        host, port = config.host if config.host not in ("", "0.0.0.0", "::") else "HOST", self.port
        if config.advertise:
            host, port = advertised(config.advertise, port)[0]
        where = f"--server {format_address(host, port)}"
        if self._join_file is not None:
            where = f"--join-file {shlex.quote(str(self._join_file))}"
        elif config.insecure and not is_loopback(host):
            where += " --insecure"
        given = "" if config.code_free else f" --job {shlex.quote(self._reference or 'train.py:job')}"
        assert self._access is not None
        told = None if self._join_file is None else self.invitation
        steps, growing = spec.steps, spec.growing
        expected = max(config.min_workers, 1)

        def bound(workers: int) -> int:
            layout, leaves = spec.layout, spec.step_leaves if growing is None else growing.most_leaves
            of_these = replace(config, max_workers=workers)
            return memory_bound_bytes(layout.vector_bytes, layout.state_bytes, leaves, of_these)

        return RunStarted(
            version=w5xde_async.__version__,
            run_name=self.name,
            run_dir="" if self._run_path is None else str(self._run_path),
            run_id=spec.run_id,
            term=spec.term,
            model=type(spec.model).__name__,
            num_parameters=spec.layout.num_parameters,
            fingerprint=spec.layout.fingerprint.hex()[:12],
            dataset=type(job.dataset).__name__,
            num_samples=job.num_samples or 0,
            batch_size=steps.batch_size,
            leaves_per_step=spec.step_leaves,
            leaves_by=spec.leaves_by,
            update_rule=strategy.rule.name,
            codec=config.update.codec,
            precision=job.precision,
            address=format_address(self.host, self.port),
            worker_command=f"python -m w5xde_async.worker {where}{given}",
            security=self._access.words,
            join_addresses="" if told is None else ", ".join(format_address(*one) for one in told.addresses),
            resumed_step=resume.step,
            durability=config.durability,
            dashboard=self._outputs.address,
            dashboard_link=self._outputs.link,
            total_steps=shown_end(spec.total_steps),
            steps_per_epoch=0 if job.num_samples is None else steps.steps_per_epoch,
            host_bytes=host_bytes(),
            memory_bound_bytes=bound(config.max_workers),
            max_workers=config.max_workers,
            expected_bytes=bound(expected),
            expected_workers=expected,
        )

    async def _conduct(self) -> RunResult:
        run, prepared = self._run, self._prepared
        assert run is not None
        assert prepared is not None
        failure: BaseException | None = None
        result: RunResult | None = None
        ends = False

        def fell(error: Exception) -> None:
            if ends:
                self.bus.publish(Warned(text=f"while the run ended: {in_one_line(error)}"))
            else:
                self._fail(ending(error))

        try:
            async with RunTasks(fell) as tasks:
                ticking = tasks.create_task(self._tick(run), name="tick")

                told = ByeCode.STOPPING

                async def say_goodbye(code: ByeCode, reason: str) -> None:
                    nonlocal told
                    told = code
                    run.training.roster.say_goodbye(code, reason)
                    ticking.cancel()  # not before: a last checkpoint may take longer than a worker bears silence
                    if self._listener is not None and code is ByeCode.STOPPING:
                        await self._listener.stop_accepting()  # else who comes now is told that it is over

                try:
                    await self._train(run, tasks)
                    training = run.training
                    if self._deadline.error is not None:
                        pass  # which is raised
                    elif training.total_steps <= training.progress <= training.roster.contributions.steps_skipped:
                        failure = training.phase.nonfinite(training.progress, training.progress)  # nothing was learned
                    else:
                        failure = training.phase.lifecycle.failure
                except Exception as error:  # the workers are told and the last commit is saved, whatever it was
                    failure = error
                ends = True
                shutdown = Shutdown(
                    prepared, run, self.bus, self._deadline, self._recorder,
                    elapsed=lambda: self._runtime.clock() - self._began, stopped=self._stopped,
                    look=lambda: self._outputs.look(self._runtime.clock()),
                )  # fmt: skip
                try:
                    result = await shutdown.finish(failure, self._stop_reason, say_goodbye=say_goodbye)
                except Exception as error:
                    if failure is not None:  # which is raised
                        self.bus.publish(Warned(text=f"the end of the run failed, too: {in_one_line(error)}"))
                    failure = failure or error
                failure = failure or shutdown.export_error
                ticking.cancel()
                if told is not ByeCode.STOPPING:
                    await run.training.roster.wait_for_lost(self._stopped.is_set)
        finally:
            await self._close()
        failure = failure or self._deadline.error or run.checkpointing.save_error
        if failure is not None:
            raise failure
        assert result is not None
        return result

    async def _train(self, run: Run, tasks: asyncio.TaskGroup) -> None:
        """To the end, a stop or a failure (which is raised); a stop waits only so long for the job's code."""
        try:
            async with asyncio.timeout(None) as self._patience:
                await run.run(tasks)
                await run.check_parameters()
        except TimeoutError:
            if self._patience is not None:  # it is the job's own
                raise
            run.training.aggregator.abandon()
        finally:
            self._patience = None

    def _give_up(self, run: Run) -> None:
        """A stop has waited long enough for the disk and, a moment later, for the job's code that holds up the step."""
        hangs = run.hangs()
        if run.abandon():
            self._deadline.give_up("what the step under way has to write")
        if hangs and self._patience is not None:
            self._deadline.give_up(hangs, "the job")
            self._patience.reschedule(asyncio.get_running_loop().time() + LEAST_S)
            self._patience = None

    async def _tick(self, run: Run) -> None:
        config = self.config
        ends = math.inf if config.max_time_s is None else self._began + config.max_time_s
        while True:
            left_s = ends - self._runtime.clock()
            await asyncio.sleep(min(config.heartbeat_s, 1.0, left_s if left_s > 0 else math.inf))
            now = self._runtime.clock()
            try:
                run.tick(now)
            except Exception as error:  # of the job's scheduler, or of ours: it ends the run, in good order
                self._fail(ending(error))
            self._outputs.tick(now)
            if self._workers_failed and not self.num_workers:
                self.request_stop(self._workers_failed)
            if now >= ends:
                self.request_stop(f"max_time of {config.max_time_s:.10g} s reached")
            if now >= self._stop_at + self._deadline.left_s:
                self._give_up(run)

    async def _on_link(self, link: Link) -> None:
        await self._open_to_links.wait()
        training, access = self._training, self._access
        assert training is not None
        assert access is not None
        self._incarnations += 1
        session = Session(
            link, training.roster, training, token=access.credentials, handshake_s=self.config.handshake_s,
            incarnation=self._incarnations, clock=self._runtime.clock, wall=self._runtime.wall,
        )  # fmt: skip
        try:
            await session.run()
        except Exception as error:
            # Whatever a peer does ends its session and raises nothing. This is a fault of ours, perhaps halfway through
            # a member's result: better no run than a wrong one.
            if not session.admitted_at:
                raise
            training.phase.lifecycle.fail(ending(error))

    # -- the end -------------------------------------------------------------------------------------------

    def _overdue(self, error: DiskHangs) -> None:
        self.bus.publish(Warned(text=f"the run ends without waiting longer: {error}"))

    async def _close(self) -> None:
        """Free everything that ``start`` made, in the order of who uses whom.

        What cannot be closed is said, and holds up nothing else, the run directory's lock least of all: what the run
        has come to is saved by then.
        """
        wait, block = self._deadline.wait, partial(asyncio.get_running_loop().run_in_executor, None)
        spec = None if self._prepared is None else self._prepared.spec
        files = None if spec is None else spec.files
        try:
            if spec is not None and spec.segment is not None:
                with self._closing("the shared memory"):
                    spec.segment.close()
            if self._listener is not None:
                with self._closing("the port"):
                    await self._listener.aclose()
            if self._access is not None:
                with self._closing("the list of revoked workers"), suppress(StoreError):  # said when it was tried first
                    await wait(block(self._access.keep), "the list of revoked workers")
            with self._closing("the dashboard, or a tracker,"):
                await self._outputs.aclose()
            if self._run is not None:
                with self._closing("the dataset"):
                    await wait(self._run.aclose(), "a read of the dataset", "the job")
            elif spec is not None and spec.stream is not None:
                with self._closing("the dataset"):
                    await wait(block(spec.stream.close), "a read of the dataset", "the job")
            if self._journal is not None:
                with self._closing("the journal"):
                    await wait(self._journal.aclose(), "the journal")
            elif files is not None and files.journal is not None:
                with self._closing("the journal"):
                    await wait(block(files.journal.close), "the journal")
            if self._bulk is not None:
                await block(self._bulk.shutdown)
            if self._recorder is not None:
                with self._closing("metrics.jsonl"):
                    await wait(block(self._recorder.close), "metrics.jsonl")
        finally:
            if files is not None:
                with self._closing("the run directory's lock"):
                    await wait(block(files.directory.close), "the run directory's lock")

    @contextmanager
    def _closing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.bus.publish(Warned(text=f"{what} could not be closed: {in_one_line(error)}"))


def _lagging(update: UpdateConfig) -> tuple[str, ...]:
    """What to know of a downlink that leaves values out."""
    if not update.downlink or not update.downlink_codec.needs_feedback:
        return ()
    return (
        f"--downlink {update.downlink} brings workers a part of each change: they compute with parameters that lag "
        "behind, and may learn little; int8 and int4 bring all of it",
    )


def _looked_up(prepared: Prepared) -> list[str]:
    """What to know of tables that are not trained as in a plain loop, or more slowly."""
    rule = prepared.strategy.rule
    tables = {
        id(module.weight): (f"embedding {name!r}", module)
        for name, module in prepared.spec.model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad
    }
    notes = list[str]()
    bounded = [name for name, module in tables.values() if module.max_norm is not None]
    if bounded and isinstance(rule, SyncRule) and not rule.has_own_code:  # which may do what is said here
        notes.append(
            f"{', '.join(bounded)[:200]}: max_norm holds while a batch is looked up; what is trained and saved may "
            "grow beyond it. To keep it there, renormalize it in a hook of the optimizer (register_step_post_hook)"
        )
    sparse = [(name, module.weight.nbytes) for name, module in tables.values() if module.sparse]
    nbytes = sum(nbytes for _, nbytes in sparse)
    if nbytes >= _MANY_ROWS_BYTES:
        notes.append(
            f"{', '.join(name for name, _ in sparse)[:200]}: sparse=True saves no work here. A step adds and updates "
            f"all {size(nbytes)} of it, where a plain loop changes the rows that a batch names"
        )
    return notes
