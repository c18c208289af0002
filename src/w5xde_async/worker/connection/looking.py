"""What a run computes, asked of its coordinator without working for it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.program.form import Program, parse
from w5xde_async.errors import LinkLost
from w5xde_async.net.outbox import Outbox
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Bye, ByeCode, Heartbeat
from w5xde_async.worker.connection.dialing import Dialer
from w5xde_async.worker.connection.handshake import fetch_program
from w5xde_async.worker.executors.in_place import is_plain


class Seen(NamedTuple):
    """A run, and its program, checked."""

    layout: Layout
    program: Program
    spec: LeafSpec
    takes_islands: bool


async def look(dialer: Dialer) -> Seen:
    """Join as a worker does, have the program, and leave.

    Raises Refused (NO_PROGRAM where the run's step is the job's code), ProgramRefused, Unreachable, LinkLost,
    RemoteError.
    """
    link, welcome, layout, *_ = await dialer.join()
    outbox, loop = Outbox(link), asyncio.get_running_loop()
    patience = asyncio.timeout(welcome.silence_s)

    async def beat() -> None:
        while True:
            outbox.post(encode(Heartbeat("looks at the run")))
            await asyncio.sleep(welcome.heartbeat_s)
            if link.heard(welcome.heartbeat_s, welcome.silence_s):
                patience.reschedule(loop.time() + welcome.silence_s)

    tasks: list[asyncio.Task[object]] = [asyncio.create_task(outbox.run(), name="look, send")]
    try:
        async with patience:
            tasks.append(asyncio.create_task(beat(), name="look, beat"))
            _, document = await fetch_program(link.recv, outbox, b"")
            assert document is not None
            gone = asyncio.Event()
            outbox.post(encode(Bye(ByeCode.LEAVING, "it has seen the program")), sent=gone.set)
            tasks.append(asyncio.create_task(gone.wait(), name="look, leave"))
            await asyncio.wait((tasks[0], tasks[-1]), return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise LinkLost(link.peer, f"the coordinator was silent for {welcome.silence_s:.0f} s") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await link.aclose()
    spec = LeafSpec(welcome.seed, welcome.precision, welcome.microbatch_size, welcome.accumulate)
    return Seen(layout, await asyncio.to_thread(parse, document, layout), spec, is_plain(welcome))
