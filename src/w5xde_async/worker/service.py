"""The worker: joins a run, computes what it is leased, leaves in good order.

A guest in the caller's event loop: no signal handler, no loop policy. It owns the compute thread, the model and what
codecs left out; a connection comes and goes. A lost coordinator is looked for again, with jitter, under the same worker
id, and the model stays where it is meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from w5xde_async.compute.engine import choose_device, device_name, use_deterministic_kernels
from w5xde_async.compute.program.sandbox import Computing, unsupported
from w5xde_async.data.config import ReadersConfig
from w5xde_async.errors import LinkLost, ProgramRefused, RefusalCode, Refused, RemoteError, UsageError, W5xdeError
from w5xde_async.job import Job, require_job
from w5xde_async.net.endpoint import is_no_address
from w5xde_async.net.link import Link
from w5xde_async.net.outbox import Outbox
from w5xde_async.openmp import compute_with, release_helpers
from w5xde_async.plan.numerics import EXACT, fits, refusal
from w5xde_async.runtime import Runtime
from w5xde_async.segments import Segment, Unshared
from w5xde_async.store.failpoints import failpoint
from w5xde_async.wire.messages import Ready, Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.connection import Connection, Departure, RunFailed
from w5xde_async.worker.connection.dialing import Dialer
from w5xde_async.worker.connection.handshake import Joined, Receive
from w5xde_async.worker.connection.own_data import OwnData
from w5xde_async.worker.engine_source import EngineSource
from w5xde_async.worker.executors.coded import CodedExecutor
from w5xde_async.worker.executors.executor import LeaseExecutor, Unsent
from w5xde_async.worker.executors.in_place import InPlaceExecutor, is_plain
from w5xde_async.worker.executors.island import IslandExecutor, PiecesExecutor, Rank, sum_across
from w5xde_async.worker.executors.shard_engine import ShardEngine
from w5xde_async.worker.hooks import WorkerHooks
from w5xde_async.worker.sharing import share, unshare
from w5xde_async.worker.uplink.uplink import Uplink

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_ISLAND_PATIENCE_S = 1.0  # with a block under way when a link has ended: another rank may be gone


class Worker:
    """One worker.

    >>> await Worker("host:5555", job=job).run()
    """

    def __init__(
        self,
        server: str = "",
        *,
        job: Job | None = None,
        config: WorkerConfig | None = None,
        runtime: Runtime | None = None,
        hooks: WorkerHooks | None = None,
        join_file: Path | None = None,
        rank: Rank | None = None,
        reference: str = "",
    ) -> None:
        """``server`` is ``host:port`` or a join string, whose secret and certificate then count; leave it out if you
        give ``run`` a connection.

        Without ``job`` it computes with the coordinator's program. ``runtime``: where clock, threads, links and random
        bytes come from, if not from this machine. ``hooks``: who hears of its work. ``join_file`` is read again
        whenever the coordinator is looked for: it may be there late, and change; give what it holds as ``server``, if
        it is there. ``rank``: this worker is one rank of an island, and its link ends for good when the island is lost.
        ``reference``: how other processes load the job (``train.py:job``), for those that read its own data.
        Raises UsageError for a bad
        address, TLS files that cannot be used, or a device that is not there.
        """
        if not isinstance(server, str):
            raise _no_server(server)
        if job is not None:
            require_job(job, "Worker")
        self._runtime, self._hooks = runtime or Runtime(), hooks or WorkerHooks()
        self._dialer = Dialer(
            server, config or WorkerConfig(), self._runtime, join_file=join_file, on_welcome=self._hooks.on_welcome,
            rank=rank,
        )  # fmt: skip
        self._rank = rank
        #: A thread may never end: an island's that waits for ranks that are gone, or one that reads from a dead disk.
        self.abandoned = False
        self.config = self._dialer.config
        self.name, self.worker_id = self._dialer.name, self._dialer.worker_id
        self.leases_done = self.leases_stale = 0
        self.parted = asyncio.Event()  #: it has left, though something under way (the block) has not ended
        try:
            self._device = choose_device(self.config.device)
        except (ValueError, RuntimeError) as error:
            raise UsageError(str(error)) from error
        of_program = job is None or (rank is not None and rank.traced)
        sandboxed = of_program and self._wants_sandbox()
        self._dialer.stays_here = of_program and not sandboxed and self.config.sandbox == "auto"
        self._compute = self._runtime.executor(1, "w5xde-compute")
        self._engines = EngineSource(
            job, self.config, self._device, sandboxed=sandboxed, pool=self._compute, clock=self._runtime.clock
        )
        if self.config.local_data and job is None:
            raise UsageError("--local-data needs --job, whose local_data opens it")
        if self.config.local_data and rank is not None:
            raise UsageError("--local-data is not for islands, which are sent their data")
        self._job, self._reference = job, reference
        self._own: OwnData | None = None
        self._uplink = Uplink(
            self.config.data_dir, name=self.name, worker_id=self.worker_id, device=self._device.type,
            pool=self._compute, clock=self._runtime.clock,
        )  # fmt: skip
        self._unsent: list[Unsent] = []  # what had not left when the last link ended
        self._unsent_of: tuple[str, int, bytes] | None = None  # of which run, term and model
        self._segment: Segment | None = None  # of the results of this link
        self._shared = False  # the engine may see memory of a coordinator's
        self._not_opened: tuple[str, int] | None = None  # run and term of the last that offered some in vain
        self._connection: Connection | None = None
        self._joining: asyncio.Task[Joined] | None = None
        self._drain = ""
        self._loop: asyncio.AbstractEventLoop | None = None  # of ``run``
        self._grace: asyncio.TimerHandle | None = None
        self._running = self._has_joined = self._expired = self._ends_with_coordinator = False
        self._threads = 1  # that the compute thread computes with

    def _open_own_data(self) -> OwnData:
        assert self._job is not None
        readers = ReadersConfig(
            loader_threads=self.config.loader_threads, loader_processes=self.config.loader_processes
        )  # fmt: skip
        return OwnData(
            self._job, self.config.local_data, readers, reference=self._reference, make_pool=self._runtime.executor
        )  # fmt: skip

    @property
    def host(self) -> str:
        """Of the coordinator, as far as it is known."""
        return self._dialer.address[0]

    @property
    def port(self) -> int:
        return self._dialer.address[1]

    @property
    def device(self) -> str:
        """What it computes on, as torch names it."""
        return str(self._device)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to coordinators that let it in, handshakes included (TLS adds its own to them)."""
        return self._dialer.traffic.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received from them."""
        return self._dialer.traffic.bytes_received

    async def run(
        self, reader: asyncio.StreamReader | None = None, writer: asyncio.StreamWriter | None = None
    ) -> Departure:
        """Work until the run is finished or ``drain`` was called.

        With ``reader`` and ``writer`` (both or neither: a connection to the coordinator that the application has, of
        ``asyncio.open_unix_connection``, say) it works over this connection and makes no other. It owns the
        connection from the call on and has closed it at the return. If the connection is lost or the coordinator
        stops, LinkLost is raised and the leases go to other workers; to go on, make a new Worker. The token is proved
        as everywhere, over TLS bound to the certificate that the other side shows. Encryption is the application's
        matter; nothing here checks for it.

        Raises Unreachable (nobody answered for ``connect_timeout_s``, or in its whole ``lifetime_s``, or who did broke
        the protocol for so long), Refused (with the reason), RunFailed, UsageError (no lease fits in its memory limit;
        the join file names another machine than this one, for which it has no sandbox), JobError (its own data cannot
        be opened); over a given connection LinkLost and RemoteError too.
        """
        if (reader is None) != (writer is None):
            raise UsageError("a connection is a reader and a writer: give both or neither")
        if reader is None or writer is None:
            if not self._dialer.is_known:
                raise UsageError("this worker has no address: give Worker one, or give run a connection")
            return await self._work(None)
        link = Link(reader, writer)
        try:
            return await self._work(link)
        finally:
            link.abort()  # where it did not come to a goodbye

    async def _work(self, given: Link | None) -> Departure:
        if self._running:
            raise UsageError("this worker has run before; make a new Worker to run again")
        self._running = True
        self._loop = loop = asyncio.get_running_loop()
        if self._drain:
            self._count_down()
        lifetime: asyncio.TimerHandle | None = None
        if self.config.lifetime_s is not None:
            lifetime = loop.call_later(self.config.lifetime_s, self._expire)
        departure: Departure | None = None
        current = asyncio.current_task()
        cancelled_before = current.cancelling() if current else 0
        try:
            release_helpers()  # what loaded the job may have computed
            # First: the sandbox's process gets them too.
            self._threads = await self._on_thread(self._begin_thread)
            await self._engines.start()
            if self.config.local_data:
                self._own = await loop.run_in_executor(None, self._open_own_data)
            while departure is None:
                departure = await self._one_connection(given)
                if departure is None and current and current.cancelling() > cancelled_before:
                    # A link that broke in the moment of the cancellation: a TaskGroup tells of its own error alone.
                    raise asyncio.CancelledError
                if departure is None and (given is not None or self._rank is not None):
                    peer = f"{self.host}:{self.port}" if given is None else given.peer
                    raise LinkLost(peer, "the coordinator stopped before the run was finished")
            if self._expired:
                raise self._dialer.unreachable(self.config.lifetime_s or 0.0)
            return departure
        finally:
            if lifetime is not None:
                lifetime.cancel()
            try:
                await self._uplink.close(
                    finished=departure is Departure.FINISHED, kept=departure is not None, abandoned=self.abandoned
                )
                if self.abandoned:
                    self._compute.shutdown(wait=False)
                else:
                    if endings := self._engines.end():
                        await asyncio.wait(endings)  # which a cancellation leaves alone
                        for ending in endings:
                            ending.result()
                    await loop.run_in_executor(None, self._compute.shutdown)
                if self._own is not None and not await self._own.aclose():
                    self.abandoned = True
            except BaseException:  # a second cancellation, or what failed to end: nothing is waited for any more
                if not self.abandoned:
                    with suppress(RuntimeError):  # the thread was told to end already
                        self._engines.end()
                self._compute.shutdown(wait=False)
                raise
            finally:
                self._loop = None
                if self._grace is not None:
                    self._grace.cancel()

    @property
    def error(self) -> W5xdeError | None:
        """Once it has parted: what ``run`` would raise if it had not to wait for what is under way."""
        if self._expired:
            return self._dialer.unreachable(self.config.lifetime_s or 0.0)
        return None if self._drain or self._connection is None else self._connection.error

    @property
    def was_asked_to_leave(self) -> bool:
        """By ``drain``, or since its lifetime is over."""
        return bool(self._drain)

    def drain(self, reason: str = "asked to leave") -> None:
        """Leave in good order: finish the lease under way, give the others back. Returns at once."""
        self._drain = self._drain or reason
        self._count_down()
        if self._joining is not None:
            self._joining.cancel()
        if self._connection is not None:
            self._drain_link(self._connection)

    def _drain_link(self, connection: Connection) -> None:
        if connection.holds_nothing:  # what it prepares, or waits for, is of no use any more
            self._hurry()
        else:
            connection.drain(self._drain, self.config.grace_s)

    def _count_down(self) -> None:
        if self._loop is not None and self._grace is None:
            self._grace = self._loop.call_later(self.config.grace_s, self._hurry)

    def _hurry(self) -> None:
        """The grace is over, or is of no use."""
        if self._connection is not None:
            self._connection.leave()
        self.parted.set()

    def end_with_coordinator(self) -> None:
        """From now on its coordinator's end is this worker's, whether the run is finished or not."""
        self._ends_with_coordinator = True
        if self._connection is not None:
            self._connection.ends_with_coordinator = True

    def _expire(self) -> None:
        self._expired = not self._has_joined  # a life in which it has reached nobody was no success
        self.drain("its lifetime is over")

    def _leaving(self) -> bool:
        return bool(self._drain)

    async def _one_connection(self, given: Link | None) -> Departure | None:
        """From connecting to the end of that link; None: connect again. ``given``: the one link that there is."""
        if self._leaving():
            return Departure.DRAINED
        self._joining = asyncio.create_task(self._dialer.join(given), name="join")
        try:
            joined = await self._joining
        except Refused as error:
            return _last_word(error)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._leaving() and not (current and current.cancelling()):
                return Departure.DRAINED
            self._joining.cancel()
            (ended,) = await asyncio.gather(self._joining, return_exceptions=True)
            if isinstance(ended, Joined):  # it was done already when we were cancelled
                ended.link.abort()
            raise
        finally:
            self._joining = None
        self._has_joined = True
        link, welcome = joined.link, joined.welcome
        level = logging.DEBUG if self._dialer.circles else logging.INFO
        logger.log(level, "joined run=%s term=%d coordinator=%s", welcome.run_name, welcome.term, link.peer)
        inline_s = self.config.inline_block_s
        if self._rank is not None or not is_plain(welcome) or self._engines.sandboxed or self._device.type != "cpu":
            inline_s = 0.0
        if self._threads_for(welcome) > 1:
            # GNU's OpenMP has helpers for each thread that computes with more than one. As soon as all of them are more
            # than the cores, they sleep at every operation, and steps of many small ones take five times as long.
            inline_s = 0.0
        thread = ComputeThread(
            pool=self._compute, inline_s=inline_s, clock=self._runtime.clock, wait=self._runtime.wait,
            patience_s=None if self._rank is None else _ISLAND_PATIENCE_S,
        )  # fmt: skip
        self._connection = connection = Connection(
            link,
            welcome,
            thread,
            hooks=self._hooks,
            gather=self.config.gather_frames,
            parted=self.parted,
            earlier=self._unsent,
            must_share=self.config.link == "shm",
            own=self._own,
            child_died=self._engines.child_died,
        )
        connection.ends_with_coordinator = self._ends_with_coordinator
        if self._leaving():  # asked to while the result of joining was on its way here
            self._drain_link(connection)
        failed, broke = False, ""
        try:
            return await connection.run(partial(self._prepare, joined))
        except ProgramRefused:
            raise  # the next attempt would get the same one
        except Refused as error:
            if error.code is RefusalCode.SHUTTING_DOWN:  # its goodbye was overtaken by the answer to our READY
                return Departure.DRAINED if self._ends_with_coordinator else None
            served = connection.leases is not None and connection.leases.num_applied > 0
            may_be_the_line = served and error.code is RefusalCode.PROTOCOL_ERROR
            if not may_be_the_line or given is not None or self._rank is not None:
                return _last_word(error)
            failed, broke = True, f"it has not understood what this worker said: {error.reason}"
            return None
        except _NotOpened as error:
            # Of a coordinator that has ended since, too; one that lets this worker in once more had not.
            coordinator = (welcome.run_id, welcome.term)
            if given is not None or coordinator == self._not_opened:
                raise
            self._not_opened = coordinator
            logger.info("connecting again reason=%s", str(error))
            return None
        except LinkLost as error:
            if self._leaving():
                return Departure.DRAINED
            if given is not None or self._rank is not None:
                raise
            logger.warning(
                "coordinator lost, connecting again; it was last heard of %s reason=%s",
                f"at {connection.heard}" if connection.heard else "when it let this worker in", error.reason,
            )  # fmt: skip
            failed = True
            return None
        except RemoteError as error:
            if given is not None or self._rank is not None:
                raise
            # Not the error: who keeps a record of it would keep its frames, and what this link had in memory.
            failed, broke = True, str(error)
            return None
        finally:
            self._connection = None
            leases = connection.leases
            self.abandoned = self._rank is not None and leases is not None and not leases.ended
            applied = leases is not None and leases.num_applied > 0
            self._dialer.link_ended(
                failed=failed, applied=applied, heard=connection.heard, served_s=connection.served_s, broke=broke
            )
            if leases is not None and self._rank is None and is_plain(welcome) and leases.whole_version >= 0:
                self._engines.held = (*_model(welcome), leases.whole_version)
            if leases is not None:
                self._unsent, self._unsent_of = connection.unsent, _model(welcome)
                self.leases_done += leases.num_done
                self.leases_stale += leases.num_stale
            try:
                await link.aclose()
            finally:  # cancelled, too
                await self._unshare()

    async def _prepare(self, joined: Joined, receive: Receive, outbox: Outbox) -> tuple[LeaseExecutor, Ready]:
        """Make an executor for this run. Raises as ``EngineSource.engine_for`` does."""
        welcome = joined.welcome
        if self._rank is not None:
            return await self._prepare_rank(self._rank, joined, receive, outbox)
        _fit(EXACT, welcome)
        if self._unsent_of != _model(welcome) or not is_plain(welcome):
            self._forget_unsent()
        threads = await self._on_thread(_compute_with, self._threads_for(welcome))
        engine = await self._engines.engine_for(welcome, joined.layout, receive, outbox, threads=threads)
        memory = await self._share(engine, joined)
        if self.config.inline_block_s and threads == 1 and not self._engines.sandboxed:
            # The count belongs to the thread, and another count gives other bits: blocks that are computed on the
            # loop must have the compute thread's.
            _compute_with(threads)
        limit = self.config.batch_bytes
        before, self._engines.held = self._engines.held, None  # from here on the engine's parameters may change
        held = (before[-1],) if not memory and before is not None and before[:-1] == _model(welcome) else ()
        unsent = tuple(one.lease.lease for one in self._unsent)
        if held:  # it may have come when nothing was loaded any more
            everything = range(len(joined.layout.buckets))
            await self._on_thread(engine.load, everything)
        awaited: tuple[int, ...] = ()
        executor: LeaseExecutor
        if is_plain(welcome):
            executor = InPlaceExecutor(engine, capacity_bytes=limit, shares=bool(memory))
        else:
            encoder = await self._uplink.encoder_for(welcome, joined.layout)
            # What left on the link before may have counted since: until the verdict is here nothing is known of it.
            awaited = encoder.awaited
            executor = await self._on_thread(
                CodedExecutor, engine, welcome, joined.inner, encoder, capacity_bytes=limit, held=bool(held)
            )
        device = str(self._device)
        return executor, Ready(
            engine.layout.fingerprint,
            device,
            device_name(self._device),
            threads,
            torch.__version__,
            awaited,
            held,
            unsent,
            memory=memory,
            shards=() if self._own is None else await self._own.shards(),
            code=b"" if self._job is None else self._job.source,
        )

    def _forget_unsent(self) -> None:
        """Nobody asks for it any more: its memory is free for the engine that there is, until there is another."""
        useless, self._unsent[:] = self._unsent[:], []
        engine = self._engines.engine
        if engine is not None:
            for vector in (vector for one in useless for vector in one.vectors):
                engine.release(vector)

    async def _share(self, engine: Computing, joined: Joined) -> tuple[int, ...]:
        """Have memory together with the coordinator: the segment of this worker's results, () where that cannot be.

        Raises UsageError where it has to be: _NotOpened, where some is offered.
        """
        link, welcome = self.config.link, joined.welcome
        if link == "tcp" or (link == "auto" and not welcome.memory):
            return ()
        self._shared = True  # or will be: who is cancelled here does not stop the thread
        try:
            self._segment = await self._on_thread(share, engine, welcome, joined.layout, joined.nonce)
        except Unshared as error:
            self._shared = False
            if link == "shm":
                raise (_NotOpened if welcome.memory else UsageError)(f"--link shm: {error.reason}") from None
            logger.info("link=tcp reason=%s", error.reason)
            return ()
        except BaseException:
            self._engines.held = None  # it will be zeros
            raise
        failpoint("shared.offer.after")
        return self._segment.told

    async def _unshare(self) -> None:
        """The link has ended. What was shared on it is not written again: the coordinator may be reading it still."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
        shared, self._shared = self._shared, False
        engine = self._engines.engine
        if shared and engine is not None:  # after ``share``, which may be under way there still
            await self._on_thread(unshare, engine)

    async def _prepare_rank(
        self, rank: Rank, joined: Joined, receive: Receive, outbox: Outbox
    ) -> tuple[LeaseExecutor, Ready]:
        welcome = joined.welcome
        if self.config.link == "shm":
            raise UsageError("--link shm: the ranks of an island share no memory with the coordinator")
        engine = await self._engines.island_for(rank, welcome, joined.layout, receive, outbox)
        _fit(engine.numerics, welcome)
        threads = await self._on_thread(torch.get_num_threads)
        own: LeaseExecutor
        limit = self.config.batch_bytes
        if is_plain(welcome):
            own = PiecesExecutor(engine, capacity_bytes=limit)
        else:
            encoder = await self._uplink.encoder_for(welcome, joined.layout, engine.shard)
            sharded = await self._on_thread(
                ShardEngine, engine, partial(sum_across, rank.lockstep), clock=self._runtime.clock
            )
            own = await self._on_thread(CodedExecutor, sharded, welcome, joined.inner, encoder, capacity_bytes=limit)
        executor = IslandExecutor(own, rank)
        return executor, Ready(
            engine.layout.fingerprint, str(self._device), device_name(self._device), threads, torch.__version__,
            shape=rank.shape, shard=engine.shard.packed, share=engine.share,
            together=engine.together, numerics=engine.numerics,
            code=b"" if self._job is None or rank.traced else self._job.source,
        )  # fmt: skip

    async def _on_thread(self, call: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
        """On the compute thread, to which model and codecs belong: what takes its time there holds up no heartbeat."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, partial(call, *arguments, **options))

    def _wants_sandbox(self) -> bool:
        """Raises UsageError where a sandbox is wanted and there is none."""
        config = self.config
        if config.sandbox == "off" or (config.sandbox == "auto" and self._dialer.is_here):
            return False
        lacking = unsupported(self._device)
        if lacking:
            raise UsageError(
                f"what a coordinator sends is run in a sandbox, which this machine has not: {lacking}; give --job to "
                "run your own code, or --sandbox off to run a coordinator's program that you trust unprotected"
            )
        if config.compile:
            raise UsageError(
                "--compile starts compilers, which a sandbox does not let a coordinator's program do; leave it out, "
                "or give --sandbox off where you trust the coordinator"
            )
        return True

    def _threads_for(self, welcome: Welcome) -> int:
        """As many as were asked for here, or as the machine has cores; fewer where more would slow this run's
        microbatches down. So machines with other numbers of cores compute the same bits of these."""
        asked = self.config.threads is not None or "OMP_NUM_THREADS" in os.environ
        return self._threads if asked or not welcome.threads else min(welcome.threads, self._threads)

    def _begin_thread(self) -> int:
        """On the compute thread: whatever names no device (pinned memory) would make a context on the first one. How
        many threads it computes with."""
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        if self.config.deterministic:
            use_deterministic_kernels()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        return torch.get_num_threads()


def _compute_with(threads: int) -> int:
    """This thread, from now on, with so many. How many there are."""
    compute_with(threads, torch.get_num_threads())
    return torch.get_num_threads()


class _NotOpened(UsageError):
    """The memory that a coordinator has offered cannot be opened, and has to be."""


def _no_server(given: object) -> UsageError:
    shown = repr(given)
    if is_no_address(shown):  # a secret, perhaps
        shown = f"of type {type(given).__name__}"
    return UsageError(f"the server is {shown[:200]}; give host:port or a join string")


def _last_word(refused: Refused) -> Departure:
    """A worker that came after the end is told what the others heard in BYE. Raises RunFailed, and other refusals."""
    if refused.code is RefusalCode.RUN_FINISHED:
        return Departure.FINISHED
    if refused.code is RefusalCode.RUN_FAILED:
        raise RunFailed(refused.reason) from None
    raise refused


def _fit(numerics: str, welcome: Welcome) -> None:
    """Raises Refused where the run asks for results that are computed in another way."""
    if not fits(numerics, welcome.numerics):
        raise Refused(RefusalCode.NUMERICS, *refusal(numerics, welcome.numerics))


def _model(welcome: Welcome) -> tuple[str, int, bytes]:
    """Whose versions they are: a coordinator that was started again may count the same ones anew."""
    return welcome.run_id, welcome.term, welcome.fingerprint
