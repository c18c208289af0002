"""Frames one way between two processes: the project's link beside blocking sockets, in the same run.

Both do the same work for each frame: the same header is encoded and decoded, the payload lands in the same pooled
buffer, the sockets have the same options. They take turns (A B A B), a figure is the median of the pairs' ratios,
so that whatever else the machine does weighs on both. The receiver returns a checksum of the last frame of every
round and, in rounds of their own outside the timing, of every frame.

Each process stays on a core of its own where the system lets us choose: left alone, the kernel puts both on one core
for some rounds and not for others, which changes a rate by half and says nothing about either side.

``shared`` is what workers on the coordinator's machine do: the frame says where in shared memory the payload lies, and
the receiver copies it from there into the buffer.

Figures: ``over_blocking_4k``, ``_256k``, ``_4m``, ``_64m`` (plain TCP), ``shared_over_blocking_*``,
``tls_over_blocking_4m``, ``bulk_over_*`` with the copies in an executor, the rates of the link and of shared memory in
GB/s, and ``extra_rss_bytes_64m``: how far the receiving process grew over what it held with its one 64 MB buffer.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from report import Report, parser
from w5xde_async.net.endpoint import connect, listen
from w5xde_async.net.link import Link
from w5xde_async.net.tuning import tune, tune_listener
from w5xde_async.segments import Opened, Segment
from w5xde_async.wire.frame import SESSION_CAPS, Buffer, BufferSpec, decode_header, encode, header_length
from w5xde_async.wire.messages import Heartbeat, Message, Result

SIZES = {"4k": 4 << 10, "256k": 256 << 10, "4m": 4 << 20, "64m": 64 << 20}
#: Short rounds, many pairs: a machine's moods last longer than a pair, so they weigh on both of its halves.
ROUND_BYTES = {"4k": 64 << 20, "256k": 192 << 20, "4m": 256 << 20, "64m": 512 << 20}
KINDS = ("link", "bulk", "blocking", "shared", "tls", "tls_blocking")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=0, help="pairs of rounds a size (41; 15 with --quick)")
    flags.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="only these")
    flags.add_argument("--receive", metavar="DIR", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.receive:
        Receiver(Path(args.receive)).serve()
        return
    pairs = args.pairs or (15 if args.quick else 41)
    report = Report({"pairs": pairs, "round_bytes": ROUND_BYTES, "loop": "uvloop", "cores": CORES[:2]})
    with tempfile.TemporaryDirectory() as folder:
        certificate(Path(folder))
        sender = Sender(Path(folder))
        try:
            for size in args.sizes:
                count = max(2, ROUND_BYTES[size] // SIZES[size])
                compare(report, sender, size, count, pairs, "link", "blocking", "over_blocking", "link_gb_s")
                compare(report, sender, size, count, pairs, "shared", "blocking", "shared_over_blocking", "shared_gb_s")
                if SIZES[size] >= 4 << 20:
                    compare(report, sender, size, count, pairs, "bulk", "blocking", "bulk_over_blocking", "bulk_gb_s")
                if size == "4m":
                    names = ("tls_over_blocking", "tls_gb_s")
                    compare(report, sender, size, count // 2, pairs, "tls", "tls_blocking", *names)
                if size == "64m":
                    report.add("extra_rss_bytes_64m", [sender.extra_rss(SIZES[size]) for _ in range(3)])
        finally:
            sender.close()
    report.show()
    report.write(args.json)


def compare(
    report: Report, sender: Sender, size: str, count: int, pairs: int, ours: str, theirs: str, ratio: str, rate: str
) -> None:
    """Rounds of both kinds in turn; each pair gives one ratio."""
    nbytes = SIZES[size]
    for kind in (ours, theirs):  # untimed: every frame is checked, and everything is warm
        sender.run(kind, nbytes, min(count, 5), check_all=True)
    ratios, rates = [], []
    for pair in range(pairs):
        order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
        seconds = {kind: sender.run(kind, nbytes, count) for kind in order}
        ratios.append(seconds[theirs] / seconds[ours])
        rates.append(count * nbytes / seconds[ours] / 1e9)
    report.add(f"{ratio}_{size}", ratios)
    report.add(f"{rate}_{size}", rates)


# -- the two processes, told what to do next over a pipe


class Sender:
    """Drives the receiver, sends the frames and keeps the time."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--receive", str(folder)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pin(0)  # after the other process took over the choice of cores
        ports = dict(zip(KINDS, map(int, self._answer().split()), strict=True))
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._pool = ThreadPoolExecutor(2)
        tls = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        self._links: dict[str, Link] = {}
        self._socks: dict[str, socket.socket] = {}
        for kind, port in ports.items():
            context = tls if "tls" in kind else None
            if "blocking" in kind:
                sock = socket.create_connection(("127.0.0.1", port))
                tune(sock)
                sock = context.wrap_socket(sock, server_hostname="localhost") if context else sock
                self._socks[kind] = sock
            else:
                bulk = self._pool if kind == "bulk" else None
                dial = connect("127.0.0.1" if not context else "localhost", port, timeout_s=5, ssl=context, bulk=bulk)
                self._links[kind] = self._runner.run(dial)
                self._links[kind].caps = SESSION_CAPS
        self._payloads: dict[int, list[bytearray]] = {}
        self._segment = Segment("bench", 0, b"bench")

    def run(self, kind: str, nbytes: int, count: int, *, check_all: bool = False) -> float:
        """Seconds for ``count`` frames, until the receiver says that it has them all."""
        if nbytes not in self._payloads:
            self._payloads = {nbytes: [bytearray(os.urandom(nbytes)) for _ in range(2)]}
            self._segment.close()
            self._segment = Segment("bench", 2 * nbytes, b"bench")
            for number, payload in enumerate(self._payloads[nbytes]):
                at = number * nbytes
                self._segment.payload[at : at + nbytes] = torch.frombuffer(payload, dtype=torch.uint8)
        payloads = self._payloads[nbytes]
        self._tell(f"{kind} {nbytes} {count} {int(check_all)} {' '.join(map(str, self._segment.told))}")
        if kind == "shared":
            seconds = self._runner.run(send_shared(self._links[kind], count))
        elif kind in self._links:
            seconds = self._runner.run(send_link(self._links[kind], payloads, count))
        else:
            seconds = send_blocking(self._socks[kind], payloads, count)
        expected = [zlib.crc32(payloads[i % 2]) for i in (range(count) if check_all else [count - 1])]
        if list(map(int, self._answer().split())) != expected:
            raise SystemExit(f"{kind}: frames of {nbytes} bytes arrived changed")
        return seconds

    def extra_rss(self, nbytes: int) -> float:
        self._tell("mark 0 0 0 0 0 0")
        self._answer()
        self.run("link", nbytes, 4)
        self._tell("peak 0 0 0 0 0 0")
        return float(self._answer())

    def close(self) -> None:
        for link in self._links.values():
            link.abort()
        for sock in self._socks.values():
            sock.close()
        self._runner.close()
        self._pool.shutdown()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(10)

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()


class Receiver:
    """The other process: one connection of each kind, one pooled buffer."""

    def __init__(self, folder: Path) -> None:
        pin(1)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._pool = ThreadPoolExecutor(2)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(folder / "cert.pem")
        self._links: dict[str, Link] = {}
        self._socks: dict[str, socket.socket] = {}
        self._runner.run(self._connect(tls))
        self._buffer = memoryview(bytearray(0))
        self._marked = 0

    async def _connect(self, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        listeners, ports = [], []
        self._open = asyncio.Event()
        for kind in KINDS:
            if "blocking" in kind:
                sock = socket.socket()
                tune_listener(sock)
                sock.bind(("127.0.0.1", 0))
                sock.listen(1)
                ports.append(sock.getsockname()[1])
                listeners.append((kind, sock))
                continue
            bulk = self._pool if kind == "bulk" else None
            context = tls if kind == "tls" else None
            listener = await listen("127.0.0.1", 0, self._keep(kind), ssl=context, bulk=bulk)
            ports.append(listener.port)
        print(*ports, flush=True)
        for kind, listening in listeners:
            sock, _ = await loop.run_in_executor(None, listening.accept)
            listening.close()
            tune(sock)
            if kind == "tls_blocking":
                sock = await loop.run_in_executor(None, lambda sock=sock: tls.wrap_socket(sock, server_side=True))
            self._socks[kind] = sock
        while len(self._links) + len(self._socks) < len(KINDS):
            self._open.clear()
            await self._open.wait()

    def _keep(self, kind: str) -> Any:
        async def on_link(link: Link) -> None:
            link.caps = SESSION_CAPS
            self._links[kind] = link
            self._open.set()
            await asyncio.Event().wait()

        return on_link

    def serve(self) -> None:
        for line in sys.stdin:
            kind, nbytes, count, check_all, *told = line.split()
            if kind == "mark":
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
                self._marked = status("VmRSS")
                print("marked", flush=True)
                continue
            if kind == "peak":
                print(status("VmHWM") - self._marked, flush=True)
                continue
            if len(self._buffer) != int(nbytes):
                self._buffer = memoryview(bytearray(os.urandom(int(nbytes))))
                self._shared = Opened([*map(int, told)], 2 * int(nbytes)).map()
            sums: list[int] = []
            if kind == "shared":
                receiving = receive_shared(
                    self._links[kind], self._shared, self._buffer, int(count), check_all == "1", sums
                )
                self._runner.run(receiving)
            elif kind in self._links:
                self._runner.run(receive_link(self._links[kind], self._buffer, int(count), check_all == "1", sums))
            else:
                receive_blocking(self._socks[kind], self._buffer, int(count), check_all == "1", sums)
            print(*sums, flush=True)
        os._exit(0)  # connections and loops end with the process


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(index: int) -> None:
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[index]})


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024


# -- the same frames, both ways


def frame(payload: Buffer, index: int) -> list[Buffer]:
    spec = BufferSpec("bucket", "uint8", (len(payload),), "raw", len(payload))
    return encode(Result(index, 0), [(spec, payload)])


async def send_link(link: Link, payloads: list[bytearray], count: int) -> float:
    views = [memoryview(payload) for payload in payloads]
    start = time.perf_counter()
    for index in range(count):
        await link.send(frame(views[index % 2], index))
    await link.recv()
    return time.perf_counter() - start


async def send_shared(link: Link, count: int) -> float:
    start = time.perf_counter()
    for index in range(count):
        await link.send(encode(Result(index, 0, 1 + index % 2)))
    await link.recv()
    return time.perf_counter() - start


async def receive_shared(
    link: Link, shared: torch.Tensor, buffer: memoryview, count: int, check_all: bool, sums: list[int]
) -> None:
    size = len(buffer)
    for index in range(count):
        message, _, _ = await link.recv()
        assert isinstance(message, Result)
        assert message.lease == index
        # Read once, as the sum reads it.
        piece = shared[(message.slot - 1) * size : message.slot * size]
        np.copyto(np.frombuffer(buffer, dtype=np.uint8), piece.numpy())
        if check_all:
            sums.append(zlib.crc32(buffer))
    await link.send(encode(Heartbeat("have them")))
    if not check_all:
        sums.append(zlib.crc32(buffer))


async def receive_link(link: Link, buffer: memoryview, count: int, check_all: bool, sums: list[int]) -> None:
    pooled = [buffer]

    def accept(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
        assert specs[0].nbytes == len(buffer)
        return pooled

    for index in range(count):
        message, _, _ = await link.recv(accept)
        assert isinstance(message, Result)
        assert message.lease == index
        if check_all:
            sums.append(zlib.crc32(buffer))
    await link.send(encode(Heartbeat("have them")))
    if not check_all:
        sums.append(zlib.crc32(buffer))


def send_blocking(sock: socket.socket, payloads: list[bytearray], count: int) -> float:
    views = [memoryview(payload) for payload in payloads]
    tls = isinstance(sock, ssl.SSLSocket)
    start = time.perf_counter()
    for index in range(count):
        chunks = frame(views[index % 2], index)
        if tls:
            for chunk in chunks:
                sock.sendall(chunk)
            continue
        total = sum(map(len, chunks))
        sent = sock.sendmsg(chunks)
        if sent < total:
            sock.sendall(memoryview(chunks[1])[sent - len(chunks[0]) :])
    receive_blocking(sock, views[0], 1, False, [])
    return time.perf_counter() - start


def receive_blocking(sock: socket.socket, buffer: memoryview, count: int, check_all: bool, sums: list[int]) -> None:
    prefix = memoryview(bytearray(4))
    scratch = memoryview(bytearray(SESSION_CAPS.header_bytes))
    message: Message
    for index in range(count):
        fill(sock, prefix)
        header = scratch[: header_length(prefix, SESSION_CAPS)]
        fill(sock, header)
        message, specs = decode_header(header, SESSION_CAPS)
        if isinstance(message, Heartbeat):
            return
        assert isinstance(message, Result)
        assert message.lease == index
        assert specs[0].nbytes == len(buffer)
        fill(sock, buffer)
        if check_all:
            sums.append(zlib.crc32(buffer))
    sock.sendall(b"".join(encode(Heartbeat("have them"))))
    if not check_all:
        sums.append(zlib.crc32(buffer))


def fill(sock: socket.socket, view: memoryview) -> None:
    got = sock.recv_into(view)
    while got < len(view):
        part = sock.recv_into(view[got:])
        if not part:
            raise EOFError
        got += part


def certificate(folder: Path) -> None:
    """A self-signed certificate for localhost."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "cert.pem").write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))


if __name__ == "__main__":
    main()
