"""The program of a run: who asks for it gets it, or the reason why there is none.

A job that other processes can load is traced by a child: tracing changes the state of torch in its whole process,
takes seconds, and must not hold up the run, nor take a core from those that compute on this machine: it gives way as
soon as somebody computes. Until then all may be waiting for it. It begins when a worker asks, or when nobody has
computed for a while. A job that only this process knows was traced
before the run began (``coordinator.run.startup``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from w5xde_async.compute.program.carriage import Unloading, buffers_of, digest_of
from w5xde_async.compute.program.form import FORM, Document, parse
from w5xde_async.compute.program.taking import Taking
from w5xde_async.errors import LocalError, RefusalCode, W5xdeError
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.hub.members.session import Session
from w5xde_async.params.layout import Layout
from w5xde_async.runtime import start_process
from w5xde_async.telemetry.events import Bus, Warned
from w5xde_async.wire.frame import LENGTH_BYTES, SESSION_CAPS, Buffer, BufferSpec, decode_header, header_length
from w5xde_async.wire.messages import Message, Program, ProgramRequest, Refusal

logger = logging.getLogger(__name__)

_AFTER_S = 15.0  # before a child is started that nobody has asked for: local workers have come by then
_LOOK_S = 1.0  # between two looks at whether somebody computes while it traces
_NICE = 5  # of a child beside those that compute
_CUT_OFF = "the process that traces ended in the middle of what it says: it may have been killed, for want of memory"
_HINT = "start the worker with the coordinator's --job"


class ProgramServer:
    """One run's program. ``set`` once it is known what it is; until then those who ask wait."""

    def __init__(self, layout: Layout, config: NetworkConfig, bus: Bus) -> None:
        self._layout, self._config, self._bus = layout, config, bus
        self._waiting: dict[Session, ProgramRequest] = {}  # bounded: one each, of sessions that have not ended
        self._asked = asyncio.Event()
        self._known = False
        self._digest = b""
        self._buffers: list[tuple[BufferSpec, Buffer]] = []
        self._reason = "this coordinator makes none: its CoordinatorConfig has code_free=False"
        self.taking: Taking | None = None  #: which leaves workers without the job's code compute, once that is known

    def go_on_from(self, before: ProgramServer) -> None:
        """What another phase of the run has found out holds: nothing is traced twice."""
        self._known, self._reason = before._known, before._reason
        self._digest, self._buffers, self.taking = before._digest, before._buffers, before.taking

    @property
    def awaited_by(self) -> Collection[Session]:
        """Who waits for it to be made."""
        return [session for session in self._waiting if not session.ended.is_set()]

    def ask(self, session: Session, request: ProgramRequest) -> None:
        """A worker wants the program: answer it, or let it wait for the answer."""
        if self._known:
            self._answer(session, request)
        else:
            self._waiting = {known: asked for known, asked in self._waiting.items() if not known.ended.is_set()}
            self._waiting[session] = request
            self._asked.set()

    def set(self, document: Document | None, reason: str = "", taking: Taking | None = None) -> None:
        """There is a program, or there is none, for that reason."""
        self._known, self.taking = True, taking
        if document is not None:
            self._digest, self._buffers = digest_of(document), buffers_of(document)
            logger.info("the step is a program of %d bytes; workers need no --job", len(document.text))
        else:
            self._reason = reason or self._reason
            if reason:
                self._bus.publish(Warned(text=f"workers need --job: the step cannot be made a program: {reason}"))
        waiting, self._waiting = self._waiting, {}
        for session, request in waiting.items():
            self._answer(session, request)

    def _answer(self, session: Session, request: ProgramRequest) -> None:
        if not self._buffers:
            reason = f"the coordinator has no program of the job: {self._reason}"
            session.refuse(Refusal(RefusalCode.NO_PROGRAM, reason[:500], _HINT))
        elif request.form != FORM:
            reason = f"the coordinator's programs have form {FORM}, this worker knows form {request.form}"
            hint = "install the same version of w5xde-async on both sides"
            session.refuse(Refusal(RefusalCode.NO_PROGRAM, reason, hint))
        else:
            session.post(Program(self._digest), () if request.digest == self._digest else self._buffers)

    async def run(
        self, reference: str, microbatch: int, program: Document | None, untraceable: str = "", *,
        idle: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Find out what the program is.

        ``reference``: where other processes find the job, whose microbatches have ``microbatch`` samples; empty:
        nowhere, then ``program`` is what this process has traced, or ``untraceable`` says why it could not.
        ``idle``: whether nobody computes.
        """
        if self._known:
            return
        if self._config.code_free and reference:
            with suppress(TimeoutError):
                async with asyncio.timeout(_AFTER_S):
                    await self._asked.wait()
            if not idle():
                await self._asked.wait()
            await self._trace(reference, microbatch, idle)
        elif program is None:
            self.set(None, untraceable)
        else:
            loop = asyncio.get_running_loop()
            self.set(program, taking=await loop.run_in_executor(None, self._taking, program, microbatch))

    async def _trace(self, reference: str, microbatch: int, idle: Callable[[], bool]) -> None:
        try:
            child = await start_process(
                sys.executable, "-m", "w5xde_async.compute.program", reference,
                str(self._config.bucket_bytes), str(microbatch),
                stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
            )  # fmt: skip
        except (OSError, LocalError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self.set(None, f"no process could be started for it ({reason})")
            return
        reading = asyncio.create_task(_output(child))
        try:
            while idle() and not reading.done():
                await asyncio.wait([reading], timeout=_LOOK_S)
            if not reading.done():
                _give_way(child)
            output = await reading
        finally:
            reading.cancel()
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        loop = asyncio.get_running_loop()
        self.set(*await loop.run_in_executor(None, self._read, output, microbatch))

    def _taking(self, program: Document, microbatch: int) -> Taking:
        return Taking(parse(program, self._layout), microbatch)

    def _read(self, output: bytes, microbatch: int) -> tuple[Document | None, str, Taking | None]:
        """What the child has said, checked as a worker would."""
        unloading = Unloading()
        try:
            message, specs, rest = _frame(output)
            if isinstance(message, Refusal):
                return None, message.reason, None
            for view in unloading.place(specs):
                if len(rest) < len(view):
                    raise ValueError(_CUT_OFF)
                view[:], rest = rest[: len(view)], rest[len(view) :]
            taking = self._taking(unloading.document, microbatch)
        except (W5xdeError, ValueError) as error:
            return None, str(error), None
        return unloading.document, "", taking


def _give_way(child: Process) -> None:
    """Whoever trains on this machine comes first."""
    if hasattr(os, "setpriority"):
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, child.pid, os.getpriority(os.PRIO_PROCESS, child.pid) + _NICE)


async def _output(child: Process) -> bytes:
    assert child.stdout is not None
    return await child.stdout.read()


def _frame(output: bytes) -> tuple[Message, Sequence[BufferSpec], memoryview]:
    if len(output) < LENGTH_BYTES:
        raise ValueError("the process that traces ended without a word")
    end = LENGTH_BYTES + header_length(output[:LENGTH_BYTES], SESSION_CAPS)
    if len(output) < end:
        raise ValueError(_CUT_OFF)
    message, specs = decode_header(output[LENGTH_BYTES:end], SESSION_CAPS)
    return message, specs, memoryview(output)[end:]
