"""The model of one worker: built of its job, or of the coordinator's program, and kept while links come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

import torch

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.machine import machine_memory_bytes
from w5xde_async.compute.program.form import Document, Program, parse
from w5xde_async.compute.program.program_job import ProgramJob, device_memory_bytes
from w5xde_async.compute.program.sandbox import Computing, Sandbox, Sandboxed
from w5xde_async.compute.program.switches import Switched
from w5xde_async.errors import (
    LACKS_MEMORY,
    LocalError,
    MalformedFrame,
    RefusalCode,
    Refused,
    UsageError,
    W5xdeError,
)
from w5xde_async.job import Job
from w5xde_async.net.outbox import Outbox
from w5xde_async.parallel.engine import IslandEngine, Traced
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.handshake import Receive, fetch_program
from w5xde_async.worker.executors.in_place import is_plain
from w5xde_async.worker.executors.island import Rank

logger = logging.getLogger(__name__)

_AT_ONCE_S = 1.0  # a program that there is has come by then


class EngineSource:
    """Belongs to the event loop. Models are built, and computed with, on the one thread of ``pool``, which alone says
    which one is there: whoever is cancelled while one is built leaves it to the next link, or to ``end``."""

    def __init__(
        self,
        job: Job | None,
        config: WorkerConfig,
        device: torch.device,
        *,
        sandboxed: bool,
        pool: Executor,
        clock: Callable[[], float],
    ) -> None:
        """Without ``job`` it computes with the coordinator's program; ``sandboxed``: in a process of its own."""
        self._job, self._config, self._device, self._pool, self._clock = job, config, device, pool, clock
        self.sandboxed = sandboxed
        self._sandbox: Sandbox | None = None  # started ahead, for the next engine
        self._engine: Computing | None = None
        self._engine_key: tuple[object, ...] = ()
        #: Run, term, model and version whose parameters the engine has; None where it may have others.
        self.held: tuple[str, int, bytes, int] | None = None
        self._island: IslandEngine | None = None
        self._program: Program | None = None
        self._document: Document | None = None  # a program for the sandbox
        self._program_digest = b""
        self._switched = Switched()

    @property
    def engine(self) -> Computing | None:
        """The one that is there."""
        return self._engine

    async def start(self) -> None:
        """Start the sandbox's process ahead of need, where there is one."""
        if self.sandboxed:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._start_sandbox)

    def end(self) -> list[asyncio.Future[None]]:
        """Free the model and its process, on the pool's thread, whether the futures are awaited or not."""
        loop = asyncio.get_running_loop()
        ends = (self._end_engine, self._end_island, self._end_sandbox, self._switched.close)
        return [loop.run_in_executor(self._pool, end) for end in ends]

    def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _end_island(self) -> None:
        island, self._island = self._island, None
        if island is not None:
            island.close()

    def _end_sandbox(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.end()

    async def child_died(self) -> None:
        """Raises ProgramKilled once the process that the model is in has died; where it is in none, returns at once."""
        if isinstance(self._engine, Sandboxed):
            await self._engine.died(self._pool)

    async def engine_for(
        self, welcome: Welcome, theirs: Layout, receive: Receive, outbox: Outbox, *, threads: int
    ) -> Computing:
        """Build the model (or keep it) and compare it with the coordinator's, whose layout is ``theirs``.

        ``threads``: of the pool's thread, which a sandbox's process gets when it builds the model.

        Raises Refused (MODEL_MISMATCH, NO_PROGRAM), ProgramRefused, UsageError (the job's model cannot be built).
        Raises MalformedFrame where the layout has not the fingerprint that came with it.
        """
        if theirs.fingerprint != welcome.fingerprint:
            raise MalformedFrame("the layout that came with WELCOME has another fingerprint")
        if self._job is None:
            await self._fetch(receive, outbox, theirs)
        spec = LeafSpec(welcome.seed, welcome.precision, welcome.microbatch_size, welcome.accumulate)
        built_by = (is_plain(welcome), threads) if self.sandboxed else ()
        key = (spec, welcome.bucket_bytes, self._program_digest, built_by)
        loop = asyncio.get_running_loop()
        engine = await loop.run_in_executor(self._pool, self._have, key, spec, welcome, theirs)
        self._check(engine.layout, theirs, welcome)
        return engine

    async def island_for(
        self, rank: Rank, welcome: Welcome, theirs: Layout, receive: Receive, outbox: Outbox
    ) -> IslandEngine:
        """Build this rank's part of the model. Raises as ``engine_for`` does."""
        if self.sandboxed:
            raise UsageError(
                "an island runs the coordinator's program without a sandbox: give --sandbox off where you trust the "
                "coordinator" + ("" if rank.traced else ", or --job to run your own code")
            )
        if theirs.fingerprint != welcome.fingerprint:
            raise MalformedFrame("the layout that came with WELCOME has another fingerprint")
        if self._job is None or rank.traced:
            try:
                await self._fetch(receive, outbox, theirs)
            except Refused as error:
                if not rank.traced or error.code is not RefusalCode.NO_PROGRAM:
                    raise
                others = "dp, fsdp and tp compute the job's code, with --job"
                raise Refused(
                    error.code, error.reason, f"--island {rank.shape} computes the program alone; {others}"
                ) from None
        spec = LeafSpec(welcome.seed, welcome.precision, welcome.microbatch_size, welcome.accumulate)

        def build() -> IslandEngine:
            try:
                source: Job | Traced | None = None if rank.traced else self._job
                if source is None:
                    assert self._program is not None
                    self._switched.say(self._program.said)
                    source = Traced(self._program, theirs, device_memory_bytes(self._device))
                self._island = rank.build(source, spec, welcome.bucket_bytes)
                return self._island
            except W5xdeError:
                raise
            except Exception as error:
                from w5xde_async.parallel.group import is_rank_gone  # a torch may lack what it imports

                if is_rank_gone(error):  # none of the model's doing: the island begins anew
                    raise
                raise UsageError(f"building the island's model raised {type(error).__name__}: {error}") from error

        engine = await asyncio.get_running_loop().run_in_executor(self._pool, build)
        self._check(engine.layout, theirs, welcome)
        return engine

    def _check(self, layout: Layout, theirs: Layout, welcome: Welcome) -> None:
        if layout.fingerprint != welcome.fingerprint:
            difference = layout.first_difference(theirs) or "the layouts differ"
            raise Refused(
                RefusalCode.MODEL_MISMATCH,
                f"this worker's model differs from the coordinator's: {difference}",
                "use the same job file on both sides",
            )

    def _source(self, spec: LeafSpec, layout: Layout) -> Job | ProgramJob:
        if self._job is not None:
            return self._job
        assert self._program is not None
        self._switched.say(self._program.said)
        memory_bytes = device_memory_bytes(self._device)
        return ProgramJob.of(self._program, layout, self._device, precision=spec.precision, memory_bytes=memory_bytes)

    def _start_sandbox(self) -> None:
        """On the compute thread, whose number of threads the child is to have."""
        if self._sandbox is None:
            self._sandbox = Sandbox(self._device, threads=torch.get_num_threads(), memory_bytes=machine_memory_bytes())
            self._sandbox.start()

    async def _fetch(self, receive: Receive, outbox: Outbox, layout: Layout) -> None:
        """Have the coordinator's program, checked."""
        waiting = asyncio.get_running_loop().call_later(
            _AT_ONCE_S, logger.info, "waiting for the coordinator to make the step a program (--job needs none)"
        )
        try:
            digest, document = await fetch_program(receive, outbox, self._program_digest)
        finally:
            waiting.cancel()
        if document is not None:
            loop = asyncio.get_running_loop()
            if self.sandboxed:
                self._document = document  # it is looked at behind closed doors
            else:
                self._program = await loop.run_in_executor(self._pool, parse, document, layout)
            self._program_digest = digest
            logger.info("program received bytes=%d constants=%d", len(document.text), len(document.constants))

    def _have(self, key: tuple[object, ...], spec: LeafSpec, welcome: Welcome, layout: Layout) -> Computing:
        """On the compute thread: the model that is there, or another."""
        if self._engine is None or self._engine_key != key:
            before, self._engine = self._engine, None
            self._engine = self._rebuild(before, spec, welcome, layout)
            self._engine_key = key
        return self._engine

    def _rebuild(self, before: Computing | None, spec: LeafSpec, welcome: Welcome, layout: Layout) -> Computing:
        """An engine in place of ``before``, whose parameters it goes on with where the model is the same."""
        held, self.held = self.held, None
        state: FlatState | None = None
        if before is not None:
            if before.layout.fingerprint == layout.fingerprint:
                state = FlatState(layout)
                state.copy_groups(before.incoming)
            before.close()
        engine = self._build(spec, welcome, layout)
        if state is not None and engine.layout.fingerprint == layout.fingerprint:
            engine.incoming.copy_groups(state)
            engine.load(range(len(layout.buckets)))
            self.held = held
        return engine

    def _build(self, spec: LeafSpec, welcome: Welcome, layout: Layout) -> Computing:
        try:
            if self.sandboxed:
                return self._build_sandboxed(spec, layout, copies=not is_plain(welcome))
            source = self._source(spec, layout)
            engine = Engine(source, spec, device=self._device, bucket_bytes=welcome.bucket_bytes, clock=self._clock)
            if self._config.compile:
                engine.compile_step()
            return engine
        except W5xdeError:
            raise
        except MemoryError as error:
            raise LocalError(f"building the job's model: {LACKS_MEMORY} ({error})") from error
        except Exception as error:
            raise UsageError(f"building the job's model raised {type(error).__name__}: {error}") from error

    def _build_sandboxed(self, spec: LeafSpec, layout: Layout, *, copies: bool) -> Computing:
        assert self._document is not None
        self._start_sandbox()
        sandbox, self._sandbox = self._sandbox, None
        assert sandbox is not None
        try:
            return Sandboxed(
                sandbox,
                self._document,
                layout,
                spec,
                batch_bytes=self._config.batch_bytes,
                memory_bytes=device_memory_bytes(self._device),
                copies=copies,
                clock=self._clock,
            )
        except BaseException:
            sandbox.end()
            raise
