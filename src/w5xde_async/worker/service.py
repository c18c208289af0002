"""The worker: joins a run, computes what it is leased, leaves in good order.

A guest in the caller's event loop: no signal handler, no loop policy. It owns the compute thread and the model; a
connection comes and goes. A lost coordinator is looked for again, with jitter, under the same worker id,
and the model stays where it is meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import platform
import random
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import stamina
import torch

from w5xde_async.codecs.registry import codec
from w5xde_async.compute.block import Computing
from w5xde_async.compute.engine import Engine, choose_device
from w5xde_async.compute.machine import machine_memory_bytes
from w5xde_async.compute.program.form import Document, Program, parse
from w5xde_async.compute.program.replica import Replica, device_memory_bytes
from w5xde_async.compute.program.sandbox import Sandbox, Sandboxed, unsupported
from w5xde_async.errors import (
    FrameTooLarge,
    LinkLost,
    LocalError,
    MalformedFrame,
    ProgramRefused,
    RefusalCode,
    Refused,
    RemoteError,
    Unreachable,
    UsageError,
    W5xdeError,
)
from w5xde_async.job import Job
from w5xde_async.net.endpoint import format_address, parse_address
from w5xde_async.net.join import Invitation, check_strength
from w5xde_async.net.link import FramedLink, Link
from w5xde_async.net.outbox import Outbox
from w5xde_async.net.tls import client_context, is_loopback
from w5xde_async.params.layout import Layout
from w5xde_async.runtime import Runtime
from w5xde_async.wire.handshake import member_id
from w5xde_async.wire.messages import Ready, Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.connection import Connection, Departure, RunFailed
from w5xde_async.worker.connection.handshake import Joined, fetch_program, join
from w5xde_async.worker.executors.coded import CodedExecutor
from w5xde_async.worker.executors.executor import LeaseExecutor
from w5xde_async.worker.executors.in_place import InPlaceExecutor
from w5xde_async.worker.uplink.residual_store import forget, keep, take_up
from w5xde_async.worker.uplink.result_encoder import ResultEncoder

__all__ = ["Departure", "RunFailed", "Worker"]

logger = logging.getLogger(__name__)

_TLS_ALERT = 0x1503  # how a TLS record that says "not understood" begins, read as the length of a header
_HUNG_UP = 3
#: Before it connects again after links that ended, one after the other, without a lease that was applied.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_TRY_AGAIN = (RefusalCode.SHUTTING_DOWN, RefusalCode.RUN_FULL, RefusalCode.TERM)


class _NotNow(W5xdeError):
    """The coordinator answered but cannot take us now."""


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
    ) -> None:
        """``server`` is ``host:port`` or a join string, whose secret and certificate then count; leave it out if you
        give ``run`` a connection.

        Without ``job`` it computes with the coordinator's program. ``runtime``: where clock, threads, links and random
        bytes come from, if not from this machine. Raises UsageError for a bad address, TLS files that
        cannot be used, or a device that is not there.
        """
        config, self._runtime = config or WorkerConfig(), runtime or Runtime()
        if server.startswith("w5xde://"):
            told = Invitation.parse(server, place="server")
            self.host, self.port = told.host, told.port
            config = replace(
                config, token=told.secret or config.token, identity=told.identity, certificate=told.certificate
            )
        else:
            self.host, self.port = parse_address(server) if server else ("", 0)
        self.config = config
        asked = config.certificate or config.tls.ca is not None or config.tls.cert is not None
        secure = bool(server) and not config.insecure and (asked or not is_loopback(self.host))
        if secure and not (config.certificate or config.tls.ca is not None or config.token):
            raise UsageError(
                f"nothing tells {self.host} from another machine that answers in its place: give the coordinator's "
                "join file (--join-file), its token (--token-file, W5XDE_TOKEN) or its authority (--tls-ca-file); "
                "--insecure goes without encryption, for a network that you trust"
            )
        if not config.certificate and config.tls.ca is None and not is_loopback(self.host):
            check_strength(config.token, "the token")  # whoever answers is given a proof of it
        self._tls = client_context(config.tls) if secure else None
        self._hung_up = 0  # TLS stood and the coordinator closed without a word, so many times in a row
        self._key = self._runtime.random_bytes(16).hex()
        self.worker_id = member_id(config.identity, self._key)
        self.name = self.config.name or f"{socket.gethostname()}-{os.getpid()}"
        self.leases_done = self.leases_stale = 0
        self.parted = asyncio.Event()  #: it has left, though the block under way is not finished
        self._job = job
        try:
            self._device = choose_device(self.config.device)
        except (ValueError, RuntimeError) as error:
            raise UsageError(str(error)) from error
        self._sandboxed = job is None and self._wants_sandbox()
        self._sandbox: Sandbox | None = None  # started ahead, for the next engine
        self._engine: Computing | None = None
        self._engine_key: tuple[object, ...] = ()
        self._program: Program | None = None
        self._document: Document | None = None  # a program for the sandbox
        self._program_digest = b""
        self._encoder: ResultEncoder | None = None
        self._kept_in: Path | None = None
        self._encoder_key: tuple[object, ...] = ()
        self._compute = self._runtime.executor(1, "w5xde-compute")
        self._connection: Connection | None = None
        self._drain = ""
        self._joining: asyncio.Task[Joined] | None = None
        self._terms: dict[str, int] = {}  # run -> the highest term served
        self._running = False
        self._heard = ""  # what the last coordinator said that it did
        self._in_vain = 0  # links in a row that ended without a goodbye and without a lease that was applied

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

        Raises Unreachable (nobody answered for ``connect_timeout_s``), Refused (with the reason), RunFailed, UsageError
        (no lease fits in its memory limit); over a given connection LinkLost and RemoteError too.
        """
        if (reader is None) != (writer is None):
            raise UsageError("a connection is a reader and a writer: give both or neither")
        if self._running:
            raise UsageError("this worker has run before; make a new Worker to run again")
        if reader is None or writer is None:
            if not self.host:
                raise UsageError("this worker has no address: give Worker one, or give run a connection")
            return await self._work(None)
        link = FramedLink(reader, writer)
        try:
            return await self._work(link)
        finally:
            link.abort()  # where it did not come to a goodbye

    async def _work(self, given: Link | None) -> Departure:
        self._running = True
        loop = asyncio.get_running_loop()
        if self._sandboxed:
            await loop.run_in_executor(self._compute, self._start_sandbox)
        lifetime: asyncio.TimerHandle | None = None
        if self.config.lifetime_s is not None:
            lifetime = loop.call_later(self.config.lifetime_s, self.drain, "its lifetime is over")
        try:
            await loop.run_in_executor(self._compute, self._set_threads)
            while True:
                departure = await self._one_connection(given)
                if departure is not None:
                    if departure is Departure.FINISHED and self._encoder is not None:
                        self._encoder = None  # nobody has a use for what was left out any more
                        await loop.run_in_executor(None, forget, self.config.data_dir, str(self._encoder_key[0]))
                    self._kept_in = self.config.data_dir
                    return departure
                if given is not None:
                    raise LinkLost(given.peer, "the coordinator stopped before the run was finished")
        finally:
            if lifetime is not None:
                lifetime.cancel()
            if self._encoder is not None:
                await loop.run_in_executor(None, partial(keep, self._encoder, self._kept_in, **self._whose()))
            if self._engine is not None:
                await loop.run_in_executor(self._compute, self._engine.close)
            if self._sandbox is not None:
                await loop.run_in_executor(self._compute, self._sandbox.end)
            await loop.run_in_executor(None, self._compute.shutdown)

    def _wants_sandbox(self) -> bool:
        """Raises UsageError where a sandbox is wanted and there is none."""
        config = self.config
        if config.sandbox == "off" or (config.sandbox == "auto" and is_loopback(self.host)):
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

    def _start_sandbox(self) -> None:
        """On the compute thread, whose number of threads the child is to have."""
        if self._sandbox is None:
            self._sandbox = Sandbox(self._device, threads=torch.get_num_threads(), memory_bytes=machine_memory_bytes())
            self._sandbox.start()

    def drain(self, reason: str = "asked to leave") -> None:
        """Leave in good order: finish the lease under way, give the others back. Returns at once."""
        self._drain = self._drain or reason
        if self._joining is not None:
            self._joining.cancel()
        if self._connection is not None:
            self._connection.drain(self._drain, self.config.grace_s)

    def _leaving(self) -> bool:
        return bool(self._drain)

    # -- connections ---------------------------------------------------------------------------------------

    async def _one_connection(self, given: Link | None) -> Departure | None:
        """From connecting to the end of that link; None: connect again. ``given``: the one link that there is."""
        if self._leaving():
            return Departure.DRAINED
        self._joining = asyncio.create_task(self._join(given), name="join")
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
        link, welcome = joined.link, joined.welcome
        logger.info("joined run=%s term=%d coordinator=%s", welcome.run_name, welcome.term, link.peer)
        if self._terms.get(welcome.run_id) != welcome.term:
            self._in_vain = 0  # another coordinator: the link to the last one ended with it, through no fault of ours
        self._terms[welcome.run_id] = welcome.term
        inline_s = self.config.inline_block_s if _is_plain(welcome) and not self._sandboxed else 0.0
        thread = ComputeThread(
            pool=self._compute, inline_s=inline_s, clock=self._runtime.clock, wait=self._runtime.wait
        )  # fmt: skip
        self._connection = connection = Connection(link, welcome, thread, parted=self.parted)
        if self._leaving():  # asked to while the result of joining was on its way here
            connection.drain(self._drain, self.config.grace_s)
        try:
            return await connection.run(partial(self._prepare, joined))
        except ProgramRefused:
            raise  # the next attempt would get the same one
        except Refused as error:
            return _last_word(error)
        except LinkLost as error:
            if self._leaving():
                return Departure.DRAINED
            if given is not None:
                raise
            logger.warning("coordinator lost, connecting again reason=%s was_at=%s", error.reason, connection.heard)
            self._in_vain += 1
            return None
        except RemoteError as error:
            if given is not None:
                raise
            logger.warning("coordinator broke the protocol, connecting again reason=%s", error)
            self._in_vain += 1
            return None
        finally:
            self._connection = None
            self._heard = connection.heard or self._heard
            if connection.leases is not None:
                if connection.leases.num_applied:
                    self._in_vain = 0
                self.leases_done += connection.leases.num_done
                self.leases_stale += connection.leases.num_stale
            await link.aclose()

    async def _join(self, given: Link | None) -> Joined:
        """Reach the coordinator and be let in; tried again with jitter until ``connect_timeout_s`` is over.

        With ``given`` it is tried once, over that link.
        """
        if given is not None:
            return await self._try_to_join(self.config.connect_timeout_s, given)
        if self._in_vain:
            await asyncio.sleep(_pause_s(self._in_vain))
        clock, limit = self._runtime.clock, self.config.connect_timeout_s
        began = clock()

        def goes_on(error: Exception) -> bool:
            return isinstance(error, LinkLost | _NotNow | RemoteError) and clock() - began < limit

        try:
            async for attempt in stamina.retry_context(
                on=goes_on, attempts=None, timeout=None, wait_initial=0.1, wait_max=2.0, wait_jitter=0.5,
            ):  # fmt: skip
                with attempt:
                    return await self._try_to_join(max(limit - (clock() - began), 0.5))
        except (LinkLost, _NotNow, RemoteError) as error:
            reason = error.reason if isinstance(error, LinkLost) else str(error)
            raise Unreachable(format_address(self.host, self.port), reason, limit, self._heard) from error
        raise LocalError("retrying ended without a result")

    async def _try_to_join(self, left_s: float, given: Link | None = None) -> Joined:
        link = given or await self._runtime.connect(self.host, self.port, timeout_s=min(left_s, 10.0), ssl=self._tls)
        try:
            self._check_certificate(link)
            async with asyncio.timeout(min(left_s, 20.0)):
                joined = await join(
                    link, key=self._key, name=self.name, token=self.config.token, terms=self._terms,
                    identity=self.config.identity,
                )  # fmt: skip
            self._hung_up = 0
            return joined
        except BaseException as error:
            link.abort()
            if given is None:
                self._explain(error, link)
            if isinstance(error, TimeoutError):
                raise LinkLost(link.peer, "it accepted the connection and then said nothing") from None
            if given is None and isinstance(error, Refused) and error.code in _TRY_AGAIN:
                raise _NotNow(error.reason) from None
            raise

    def _check_certificate(self, link: Link) -> None:
        expected = self.config.certificate
        if expected and not hmac.compare_digest(hashlib.sha256(link.certificate).digest(), expected):
            raise Refused(
                RefusalCode.AUTHENTICATION,
                "the coordinator's certificate is not the one of the join string",
                "take its present join string; if it has not changed, somebody sits between",
            )

    def _explain(self, error: BaseException, link: Link) -> None:
        """Raise Refused where an ended handshake means that both sides disagree about TLS."""
        if self._tls is None and isinstance(error, FrameTooLarge) and error.nbytes >> 16 == _TLS_ALERT:
            raise Refused(
                RefusalCode.AUTHENTICATION,
                "the coordinator speaks TLS and this worker does not",
                "use its join file, or leave out --insecure",
            ) from None
        if not isinstance(error, LinkLost) or self._terms or link.bytes_received:
            return
        if self._tls is None:
            reason = f"{error.reason} at the first words; it may want TLS: use its join file"
            raise LinkLost(link.peer, reason) from None
        self._hung_up += 1
        if self._hung_up >= _HUNG_UP:
            # TLS 1.3 tells a client that its certificate is missing or wrong only after the handshake.
            raise Refused(
                RefusalCode.AUTHENTICATION,
                f"the coordinator closed right after TLS began ({error.reason})",
                "it may want a certificate of this worker: --tls-cert and --tls-key",
            ) from None

    async def _encoder_for(self, welcome: Welcome, layout: Layout) -> ResultEncoder:
        """The encoder of this run: kept over its links, with what it has left out."""
        key = (welcome.run_id, welcome.update, welcome.feedback, layout.fingerprint)
        if self._encoder is not None and self._encoder_key == key:
            self._encoder.change(codec(welcome.codec))
            return self._encoder
        self._encoder_key = key
        self._encoder = encoder = ResultEncoder(
            layout, codec(welcome.codec), feedback=welcome.feedback, clock=self._runtime.clock
        )
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, partial(take_up, encoder, self.config.data_dir, **self._whose()))
        return encoder

    def _whose(self) -> dict[str, str]:
        return {"run_id": str(self._encoder_key[0]), "name": self.name, "worker_id": self.worker_id}

    # -- the model -----------------------------------------------------------------------------------------

    async def _prepare(self, joined: Joined, link: Link, outbox: Outbox) -> tuple[LeaseExecutor, Ready]:
        """Build the model (or keep it) and compare it with the coordinator's.

        Raises Refused (MODEL_MISMATCH, NO_PROGRAM), ProgramRefused.
        """
        welcome, theirs = joined.welcome, joined.layout
        if theirs.fingerprint != welcome.fingerprint:
            raise MalformedFrame("the layout that came with WELCOME has another fingerprint")
        if self._job is None:
            await self._fetch(link, outbox, theirs)
        key = (
            welcome.seed, welcome.precision, welcome.microbatch_size, welcome.accumulate, welcome.bucket_bytes,
            self._program_digest, self._sandboxed and _is_plain(welcome),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        if self._engine is None or self._engine_key != key:
            if self._engine is not None:
                await loop.run_in_executor(self._compute, self._engine.close)
                self._engine = None
            self._engine = await loop.run_in_executor(self._compute, self._build, welcome, theirs)
            self._engine_key = key
        engine = self._engine
        if engine.layout.fingerprint != welcome.fingerprint:
            difference = engine.layout.first_difference(theirs) or "the layouts differ"
            raise Refused(
                RefusalCode.MODEL_MISMATCH,
                f"this worker's model differs from the coordinator's: {difference}",
                "use the same job file on both sides",
            )
        threads = await loop.run_in_executor(self._compute, torch.get_num_threads)
        if self.config.inline_block_s and not self._sandboxed:
            # The count belongs to the thread, and another count gives other bits: blocks that are computed on the
            # loop must have the compute thread's.
            torch.set_num_threads(threads)
        limit = self.config.memory_limit_bytes
        awaited: tuple[int, ...] = ()
        executor: LeaseExecutor
        if _is_plain(welcome):
            executor = InPlaceExecutor(engine, capacity_bytes=limit)
        else:
            encoder = await self._encoder_for(welcome, theirs)
            # What left on the link before may have counted since: until the verdict is here nothing is known of it.
            awaited = encoder.awaited
            executor = CodedExecutor(engine, welcome, joined.inner, encoder, capacity_bytes=limit)
        return executor, Ready(
            engine.layout.fingerprint, str(self._device), _device_name(self._device), threads, torch.__version__,
            awaited,
        )  # fmt: skip

    async def _fetch(self, link: Link, outbox: Outbox, layout: Layout) -> None:
        """Have the coordinator's program, checked."""
        digest, document = await fetch_program(link, outbox, self._program_digest)
        if document is not None:
            loop = asyncio.get_running_loop()
            if self._sandboxed:
                self._document = document  # it is looked at behind closed doors
            else:
                self._program = await loop.run_in_executor(self._compute, parse, document, layout)
            self._program_digest = digest
            logger.info("program received bytes=%d constants=%d", len(document.text), len(document.constants))

    def _build(self, welcome: Welcome, layout: Layout) -> Computing:
        try:
            if self._sandboxed:
                return self._build_sandboxed(welcome, layout)
            source: Job | Replica | None = self._job
            if source is None:
                assert self._program is not None
                source = Replica.of(
                    self._program, layout, self._device, precision=welcome.precision,
                    memory_bytes=device_memory_bytes(self._device),
                )  # fmt: skip
            engine = Engine(
                source,
                device=self._device,
                seed=welcome.seed,
                precision=welcome.precision,
                microbatch_samples=welcome.microbatch_size,
                accumulate=welcome.accumulate,
                bucket_bytes=welcome.bucket_bytes,
                clock=self._runtime.clock,
            )
            if self.config.compile:
                engine.compile_step()
            return engine
        except W5xdeError:
            raise
        except Exception as error:
            raise UsageError(f"building the job's model raised {type(error).__name__}: {error}") from error

    def _build_sandboxed(self, welcome: Welcome, layout: Layout) -> Computing:
        assert self._document is not None
        self._start_sandbox()
        sandbox, self._sandbox = self._sandbox, None
        assert sandbox is not None
        try:
            return Sandboxed(
                sandbox, self._document, layout, seed=welcome.seed, precision=welcome.precision,
                microbatch_samples=welcome.microbatch_size, accumulate=welcome.accumulate,
                bucket_bytes=welcome.bucket_bytes, batch_bytes=self.config.memory_limit_bytes,
                memory_bytes=device_memory_bytes(self._device), copies=not _is_plain(welcome),
                clock=self._runtime.clock,
            )  # fmt: skip
        except BaseException:
            sandbox.end()
            raise

    def _set_threads(self) -> None:
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)


def _last_word(refused: Refused) -> Departure:
    """A worker that came after the end is told what the others heard in BYE. Raises RunFailed, and other refusals."""
    if refused.code is RefusalCode.RUN_FINISHED:
        return Departure.FINISHED
    if refused.code is RefusalCode.RUN_FAILED:
        raise RunFailed(refused.reason) from None
    raise refused


def _is_plain(welcome: Welcome) -> bool:
    """Whether results go out and parameters come in as they lie in memory, at every version."""
    return welcome.update == "sync" and welcome.codec == welcome.downlink == "raw"


def _pause_s(in_vain: int) -> float:
    """Twice as long after each link that was in vain, with jitter: no lease is to go round in milliseconds."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(in_vain - 1, 32), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
