"""100,000 bad connections to a coordinator that trains meanwhile: what they leave behind, and what they cost.

The bad ones come from one address, hundreds at a time, and are of five kinds in turn: silent (connect, wait, go),
truncated (half of a HELLO), oversized (a header of 4 GiB announced), replayed (a whole handshake that once was good),
slow (a byte at a time, then gone). Windows with and without them take turns. Two workers train over the same port.

Figures: ``connections``; ``unhandled``: exceptions that reached the log; ``leaked_descriptors``, ``leaked_tasks``: what
the coordinator holds when the last one's ten seconds are over, over what it held before the first; ``undisturbed``:
steps a second under attack over those without, with the attackers on the same two cores; ``answered_bytes``: most that
any of them ever received.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import uvloop

from models import Reply, Rig, make_job, serve, work
from report import Report, parser
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import PROTOCOL_VERSION, Hello, Proof

TOKEN = "only for this bench"
WORKERS = ("worker-0", "worker-1")
AT_ONCE = 200
HANDSHAKE_S = 10.0  # how long a stranger may stay


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--connections", type=int, default=0, help="in all (100000; 5000 with --quick)")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"watch": watch, "work": work})
        return
    total = args.connections or (5000 if args.quick else 100_000)
    rounds = 2 if args.quick else 10
    report = Report({"connections": total, "rounds": rounds, "at_once": AT_ONCE, "kinds": list(KINDS)})
    with Rig(__file__, ["coordinator", *WORKERS]) as rig:
        rig["coordinator"].tell("watch")
        port = rig["coordinator"].answer()["port"]
        for worker in WORKERS:
            rig[worker].tell("work", port=port, job="mlp", options={"steps": 1 << 30}, token=TOKEN)
        before = rig["coordinator"].answer()
        ratios = []
        kinds = itertools.cycle(KINDS.values())
        most = 0
        for _ in range(rounds):
            seconds, received = uvloop.run(attack(port, total // rounds, kinds))
            most = max(most, received)
            attacked = window(rig)
            quiet = window(rig, wait_s=max(seconds, 2.0))
            ratios.append(attacked["rate"] / quiet["rate"])
            print(f"{attacked['rate']:8.1f} steps/s under attack, {quiet['rate']:8.1f} without", flush=True)
        after = window(rig, wait_s=HANDSHAKE_S + 1.0)
        report.add("connections", [rounds * (total // rounds)])
        report.add("unhandled", [after["errors"]])
        report.add("leaked_descriptors", [after["descriptors"] - before["descriptors"]])
        report.add("leaked_tasks", [after["tasks"] - before["tasks"]])
        report.add("undisturbed", ratios)
        report.add("answered_bytes", [most])
    report.show()
    report.write(args.json)
    if after["errors"] or after["descriptors"] > before["descriptors"] or after["tasks"] > before["tasks"]:
        raise SystemExit("something was left behind")


def window(rig: Rig, wait_s: float = 0.0) -> dict[str, Any]:
    """What has passed since the last one, ``wait_s`` from now."""
    rig["coordinator"].tell("", wait_s=wait_s)
    return rig["coordinator"].answer()


# -- the coordinator


class Errors(logging.Handler):
    """Counts what is logged with a traceback or as an error."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def watch(reply: Reply) -> None:
    """Train until the bench ends; on each line answer what has passed."""
    logging.disable(logging.WARNING)
    errors = Errors(logging.ERROR)
    logging.getLogger().addHandler(errors)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logging.error("unhandled %s", context))
        config = CoordinatorConfig(port=0, resume="never", min_workers=2, evaluate=False, token=TOKEN, silence_s=60.0)
        job = make_job("mlp", steps=1 << 30)
        async with Coordinator(job, config=config) as coordinator:
            reply(port=coordinator.port)
            while coordinator.step < 50:  # noqa: ASYNC110 - it is not told of steps
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            lines = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(os.dup(0)))
            await asyncio.sleep(0)
            reply(**held(errors))
            step, at = coordinator.step, loop.time()
            while line := await lines.readline():
                if wait_s := json.loads(line)["wait_s"]:
                    step, at = coordinator.step, loop.time()
                    await asyncio.sleep(wait_s)
                now, reached = loop.time(), coordinator.step
                reply(rate=(reached - step) / max(now - at, 1e-9), **held(errors))
                step, at = reached, now

    uvloop.run(run())


def held(errors: Errors) -> dict[str, int]:
    gc.collect()
    return {"tasks": len(asyncio.all_tasks()), "descriptors": len(os.listdir("/proc/self/fd")), "errors": errors.count}


# -- the strangers


async def attack(port: int, count: int, kinds: Any) -> tuple[float, int]:
    """``count`` connections, AT_ONCE at a time: seconds, and the most bytes that one of them received."""
    loop = asyncio.get_running_loop()
    began, most = loop.time(), 0
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(kind: Callable[[int], Coroutine[Any, Any, int]]) -> None:
        nonlocal most
        try:
            async with asyncio.timeout(20):
                most = max(most, await kind(port))
        except (OSError, RuntimeError):  # turned away; uvloop has its own word for it
            pass
        finally:
            gate.release()

    tasks: set[asyncio.Task[None]] = set()
    for _ in range(count):
        await gate.acquire()
        task = asyncio.create_task(one(next(kinds)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return loop.time() - began, most


def frame(*messages: Any) -> bytes:
    return b"".join(bytes(chunk) for message in messages for chunk in encode(message))


HELLO = frame(Hello(PROTOCOL_VERSION, bytes(32), "stranger", "stranger", "0"))
REPLAYED = HELLO + frame(Proof(bytes(range(32))))


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    got = 0
    with suppress(OSError):
        while part := await reader.read(4096):
            got += len(part)
    writer.close()
    return got


async def silent(port: int) -> int:
    reader, writer = await opened(port)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            return len(await reader.read(1))
    writer.transport.abort()
    return 0


async def truncated(port: int) -> int:
    reader, writer = await opened(port)
    writer.write(HELLO[: len(HELLO) // 2])
    writer.write_eof()
    return await until_end(reader, writer)


async def oversized(port: int) -> int:
    reader, writer = await opened(port)
    writer.write(struct.pack(">I", 0xFFFFFFFF) + bytes(64))
    return await until_end(reader, writer)


async def replayed(port: int) -> int:
    reader, writer = await opened(port)
    writer.write(REPLAYED)
    return await until_end(reader, writer)


async def slow(port: int) -> int:
    _, writer = await opened(port)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
    for byte in HELLO[:6]:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)
    writer.transport.abort()
    return 0


KINDS = {"silent": silent, "truncated": truncated, "oversized": oversized, "replayed": replayed, "slow": slow}

if __name__ == "__main__":
    main()
