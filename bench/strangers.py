"""100,000 bad connections to a coordinator that trains meanwhile: what they leave behind, and what they cost.

The bad ones come from one address, some fifty at a time (the coordinator closes at accept what is over 64), and are of
several kinds in turn: silent (connect, wait, go), patient (as silent, one in fifty of those waits to be sent away),
truncated (half of a HELLO), oversized (a header of 4 GiB announced), wrong proof (a whole handshake, its proof
invented), replayed (a whole handshake that was good once: recorded at the start by somebody with the secret), slow (a
byte at a time, then gone). With ``--tls`` all of that through TLS 1.3, and "no handshake" besides: silent before TLS
stands. Windows with and without them take turns. Two workers train over the same port.

Figures: ``connections``; ``met``: those that the coordinator's parsers saw, the others being closed at accept or gone
before (with TLS all of "no handshake" too); ``unhandled``: exceptions that reached the log;
``leaked_descriptors``, ``leaked_tasks``: what the coordinator holds when the last one's ten seconds are over, over what
it held before the first;
``undisturbed``: steps a second under attack over those without, with the attackers on the same two cores;
``answered_bytes``: most that any of them ever received (of the recorded handshake: what it received when it was good).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import json
import logging
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from models import Reply, Rig, make_job, serve, work
from report import Report, parser
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.net.link import Link
from w5xde_async.wire.frame import HANDSHAKE_CAPS, SESSION_CAPS, decode_header, encode, header_length
from w5xde_async.wire.handshake import prove
from w5xde_async.wire.messages import PROTOCOL_VERSION, Accepted, Challenge, Hello, Introduction, Proof, Welcome

TOKEN = "only for this bench"
WORKERS = ("worker-0", "worker-1")
AT_ONCE = 48
PATIENT = 50  # one silent connection in so many
HANDSHAKE_S = 10.0  # how long a stranger may stay


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--connections", type=int, default=0, help="in all (100000; 2500 with --quick)")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    flags.add_argument("--tls", action="store_true", help="the port speaks TLS 1.3")
    args = flags.parse_args()
    if args.child:
        serve({"watch": watch, "work": work})
        return
    total = args.connections or (2500 if args.quick else 100_000)
    rounds = 2 if args.quick else 10
    names = [name for name in KINDS if args.tls or name != "no handshake"]
    report = Report({"connections": total, "rounds": rounds, "at_once": AT_ONCE, "tls": args.tls, "kinds": names})
    with Rig(__file__, ["coordinator", *WORKERS]) as rig:
        rig["coordinator"].tell("watch", tls=args.tls)
        told = rig["coordinator"].answer()
        port, join = told["port"], told["join"]
        for worker in WORKERS:
            rig[worker].tell("work", port=port, job="mlp", options={"steps": 1 << 30}, token=TOKEN, join=join)
        before = rig["coordinator"].answer()
        ratios = []
        target = uvloop.run(recorded(port, tls=args.tls))
        before["met"] = window(rig)["met"]
        print(f"a good handshake was recorded; it was answered with {target.answered} bytes", flush=True)
        kinds = itertools.cycle([KINDS[name] for name in names])
        most = 0
        for _ in range(rounds):
            seconds, received = uvloop.run(attack(target, total // rounds, kinds))
            most = max(most, received)
            attacked = window(rig)
            quiet = window(rig, wait_s=min(max(seconds, 2.0), 10.0))
            ratios.append(attacked["rate"] / max(quiet["rate"], 1e-9))
            print(f"{attacked['rate']:8.1f} steps/s under attack, {quiet['rate']:8.1f} without", flush=True)
        after = window(rig, wait_s=HANDSHAKE_S + 1.0)
        made, met = rounds * (total // rounds), after["met"] - before["met"]
        print(f"{met} of {made} connections were met by the coordinator's parsers", flush=True)
        report.add("connections", [made])
        report.add("met", [met])
        report.add("unhandled", [after["errors"]])
        report.add("leaked_descriptors", [after["descriptors"] - before["descriptors"]])
        report.add("leaked_tasks", [after["tasks"] - before["tasks"]])
        report.add("undisturbed", ratios)
        report.add("answered_bytes", [most])
    report.show()
    report.write(args.json)
    if after["errors"] or after["descriptors"] > before["descriptors"] or after["tasks"] > before["tasks"]:
        raise SystemExit("something was left behind")
    if most >= target.answered:
        raise SystemExit("somebody was let in")


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


class Counted(Coordinator):
    """Counts the links that it begins to read from."""

    met = 0

    async def _on_link(self, link: Link) -> None:
        self.met += 1
        await super()._on_link(link)


def watch(reply: Reply, *, tls: bool) -> None:
    """Train until the bench ends; on each line answer what has passed."""
    logging.disable(logging.WARNING)
    errors = Errors(logging.ERROR)
    logging.getLogger().addHandler(errors)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logging.error("unhandled %s", context))
        directory = tempfile.TemporaryDirectory()  # a join file is what asks for TLS on loopback
        config = CoordinatorConfig(
            port=0, resume="never", min_workers=2, evaluate=False, token=TOKEN, silence_s=60.0,
            join_file=Path(directory.name) / "join" if tls else None,
        )  # fmt: skip
        job = make_job("mlp", steps=1 << 30)
        async with Counted(job, config=config) as coordinator:
            reply(port=coordinator.port, join=coordinator.local_join)
            while coordinator.step < 50:  # noqa: ASYNC110 - it is not told of steps
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            lines = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(os.dup(0)))
            await asyncio.sleep(0)
            reply(met=coordinator.met, **held(errors))
            step, at = coordinator.step, loop.time()
            while line := await lines.readline():
                if wait_s := json.loads(line)["wait_s"]:
                    step, at = coordinator.step, loop.time()
                    await asyncio.sleep(wait_s)
                now, reached = loop.time(), coordinator.step
                reply(rate=(reached - step) / max(now - at, 1e-9), met=coordinator.met, **held(errors))
                step, at = reached, now

    uvloop.run(run())


def held(errors: Errors) -> dict[str, int]:
    gc.collect()
    return {"tasks": len(asyncio.all_tasks()), "descriptors": len(os.listdir("/proc/self/fd")), "errors": errors.count}


# -- the strangers


class Target(NamedTuple):
    """The coordinator, and a handshake with it that was good once (``answered``: with so many bytes)."""

    port: int
    context: ssl.SSLContext | None
    handshake: bytes
    answered: int


Kind = Callable[[Target], Coroutine[Any, Any, int]]


async def recorded(port: int, *, tls: bool) -> Target:
    """Join once with the secret, as a worker does, and go before READY."""
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    target = Target(port, context, b"", 0)
    reader, writer = await opened(target)
    binding = hashlib.sha256(writer.get_extra_info("ssl_object").getpeercert(True)).digest() if tls else b""
    writer.write(HELLO)
    header = await reader.readexactly(header_length(await reader.readexactly(4), HANDSHAKE_CAPS))
    challenge, _ = decode_header(header, HANDSHAKE_CAPS)
    assert isinstance(challenge, Challenge)
    proof = frame(Proof(prove(TOKEN.encode(), "worker", NONCE, challenge.nonce, binding)))
    introduction = frame(Introduction("stranger", "stranger", "0"))
    writer.write(proof + introduction)
    async with asyncio.timeout(10):
        accepted = await reader.readexactly(header_length(await reader.readexactly(4), HANDSHAKE_CAPS))
        assert isinstance(decode_header(accepted, HANDSHAKE_CAPS)[0], Accepted)
        prefix = await reader.readexactly(4)
        welcome = await reader.readexactly(header_length(prefix, SESSION_CAPS))
    message, specs = decode_header(welcome, SESSION_CAPS)
    assert isinstance(message, Welcome)
    writer.transport.abort()
    return Target(
        port,
        context,
        HELLO + proof + introduction,
        12 + len(header) + len(accepted) + len(welcome) + sum(spec.nbytes for spec in specs),
    )


async def attack(target: Target, count: int, kinds: Any) -> tuple[float, int]:
    """``count`` connections, AT_ONCE at a time: seconds, and the most bytes that one of them received."""
    loop = asyncio.get_running_loop()
    began, most = loop.time(), 0
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(kind: Kind) -> None:
        nonlocal most
        try:
            async with asyncio.timeout(20):
                most = max(most, await kind(target))
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


NONCE = bytes(32)
HELLO = frame(Hello(PROTOCOL_VERSION, NONCE, "stranger", "stranger", "0"))
INVENTED = frame(Proof(bytes(range(32))))


async def opened(target: Target, *, tls: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", target.port, ssl=target.context if tls else None)


async def until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    got = 0
    with suppress(OSError):
        while part := await reader.read(4096):
            got += len(part)
    writer.close()
    return got


async def silent(target: Target, *, tls: bool = True) -> int:
    reader, writer = await opened(target, tls=tls)
    wait_s = HANDSHAKE_S + 5.0 if next(SILENT) % PATIENT == 0 else 0.05
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            return len(await reader.read(1))
    writer.transport.abort()
    return 0


async def no_handshake(target: Target) -> int:
    return await silent(target, tls=False)


async def truncated(target: Target) -> int:
    reader, writer = await opened(target)
    writer.write(HELLO[: len(HELLO) // 2])
    if target.context is None:
        writer.write_eof()
        return await until_end(reader, writer)
    await asyncio.sleep(0.02)  # TLS has no end of one side
    writer.transport.abort()
    return 0


async def oversized(target: Target) -> int:
    reader, writer = await opened(target)
    writer.write(struct.pack(">I", 0xFFFFFFFF) + bytes(64))
    return await until_end(reader, writer)


async def wrong_proof(target: Target) -> int:
    reader, writer = await opened(target)
    writer.write(HELLO + INVENTED)
    return await until_end(reader, writer)


async def replayed(target: Target) -> int:
    reader, writer = await opened(target)
    writer.write(target.handshake)
    return await until_end(reader, writer)


async def slow(target: Target) -> int:
    _, writer = await opened(target)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
    for byte in HELLO[:6]:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)
    writer.transport.abort()
    return 0


SILENT = itertools.count(1)
KINDS: dict[str, Kind] = {
    "silent": silent, "truncated": truncated, "oversized": oversized, "wrong proof": wrong_proof, "replayed": replayed,
    "slow": slow, "no handshake": no_handshake,
}  # fmt: skip

if __name__ == "__main__":
    main()
