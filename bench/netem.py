"""Hosts that are joined by an emulated wide-area network: for benches. Linux and root.

A star: each host is a network namespace whose only link is a TUN device, whose other end is held here. A packet waits
for its sender's line, then for the delay, then for its receiver's line, and may get lost; a line whose queue is longer
than ``queue_s`` drops what comes. It takes its place on the receiver's line when it is there, so that a slow sender
delays nobody else. Real TCP runs on top, so that congestion control, round trips and losses behave as they do, for any
program. What is not emulated: other traffic.

    with Network([Line(rate_mbit=100, round_trip_s=0.04)] * 3) as network:
        ...  # processes that entered ``network.hosts[i].namespace`` (``enter``) reach each other at ``.address``
        network.hosts[1].line = Line(rate_mbit=1)  # from now on
        network.hosts[1].away = True  # nothing passes, either way; so do ``forget``, ``rebind`` and ``move``

One thread carries the packets, at a high priority where that is allowed, since a late emulator is a slower network. It
is Python: about 15 us of one core for a packet of 9000 bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Host", "Line", "Network", "enter", "why_not"]

MTU_BYTES = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_EARLY_S = 0.0003  # a packet this early is not worth another wait
_TCP = 6
_PORTS, _CHECKSUM = 20, 36  # of TCP in a packet without IP options
_BURST = 64  # packets taken from one device before the others have their turn


def why_not() -> str:
    """Why there can be no emulated network on this machine; empty where there can."""
    if not os.path.exists("/dev/net/tun"):
        return "it needs Linux with /dev/net/tun"
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    return ""


def enter(namespace: str) -> None:
    """Move the calling thread, and the threads that it starts from now on, into ``namespace``. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering {namespace}")
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A host's line, each way: ``rate_mbit`` (0: as fast as it goes), half of ``round_trip_s`` as delay, ``loss``.

    Between two hosts the delay is the mean of theirs, so that equal lines have the round trip that they say.
    ``down_mbit``: towards the host, where that is another rate. ``loss``: of packets from the host, and of those to it.
    ``jitter_s``: what the host sends is late by up to that, each packet by its own time, so that packets overtake.
    """

    rate_mbit: float = 0.0
    round_trip_s: float = 0.0
    loss: float = 0.0
    down_mbit: float | None = None
    jitter_s: float = 0.0

    @property
    def up_s_per_byte(self) -> float:
        return 8e-6 / self.rate_mbit if self.rate_mbit else 0.0

    @property
    def down_s_per_byte(self) -> float:
        rate = self.rate_mbit if self.down_mbit is None else self.down_mbit
        return 8e-6 / rate if rate else 0.0


@dataclass(slots=True)
class Host:
    """One end of the star. Bytes are those of IP packets, headers included. ``line`` and ``away`` may change."""

    line: Line
    namespace: str
    device: str
    address: str
    descriptor: int = -1
    sent_bytes: int = 0
    received_bytes: int = 0
    dropped: int = 0
    away: bool = False  # nothing passes, either way
    _ports: set[int] = field(default_factory=set, repr=False)  # its own, of TCP
    _forgotten: set[int] = field(default_factory=set, repr=False)
    _outside: dict[int, int] = field(default_factory=dict, repr=False)  # own port -> the one that others see
    _inside: dict[int, int] = field(default_factory=dict, repr=False)
    _up_free: float = field(default=0.0, repr=False)  # when each direction of the line is next idle
    _down_free: float = field(default=0.0, repr=False)

    def open(self) -> None:
        """Make the namespace and its device."""
        self.descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", self.device.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(self.descriptor, _TUNSETIFF, request)
        _ip("netns", "add", self.namespace)
        _ip("link", "set", self.device, "netns", self.namespace)
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", self.device)
        _ip("-n", self.namespace, "link", "set", self.device, "mtu", str(MTU_BYTES), "txqueuelen", "2000", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.namespace)


class Network:
    """The hosts of ``lines``, at 10.88.0.1 and up, while it is open."""

    _number = itertools.count()

    def __init__(self, lines: Sequence[Line], *, queue_s: float = 0.2, seed: int = 0) -> None:
        tag = f"{os.getpid() % (1 << 20):x}-{next(self._number)}"
        self.hosts = [
            Host(line, f"netem{tag}-{index}", f"ne{tag}x{index}", f"10.88.0.{index + 1}")
            for index, line in enumerate(lines)
        ]
        self._queue_s = queue_s
        self._random = random.Random(seed)
        self._by_address = {_packed(host.address): host for host in self.hosts}
        # (when, in which order, whether it is past its receiver's line, to whom, what)
        self._due: list[tuple[float, int, bool, Host, bytes]] = []
        self._count = itertools.count()
        self._stop, self._stopped = -1, -1
        self._thread = threading.Thread(target=self._carry, name="netem", daemon=True)

    def __enter__(self) -> Self:
        if reason := why_not():
            raise SystemExit(f"no emulated network here: {reason}")
        try:
            for host in self.hosts:
                host.open()
        except BaseException:
            for host in self.hosts:
                host.close()
            raise
        self._stop, self._stopped = os.pipe()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        for host in self.hosts:
            host.close()

    # -- what happens to lines

    def forget(self, host: Host) -> None:
        """Its connections end without a word to either side, as behind a firewall that has lost its table."""
        host._forgotten |= host._ports

    def rebind(self, host: Host) -> None:
        """Its connections come from other ports, as from a NAT that has lost its table: the other side knows none."""
        for port in set(host._ports):
            host._outside[port] = (port - 32000) % (1 << 16)  # the kernel gives itself none of these
            host._inside[host._outside[port]] = port

    def move(self, host: Host) -> None:
        """It has another address, and the old one is nobody's."""
        del self._by_address[_packed(host.address)]
        old, host.address = host.address, f"10.88.0.{int(host.address.rpartition('.')[2]) + 100}"
        _ip("-n", host.namespace, "addr", "del", f"{old}/24", "dev", host.device)
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
        self._by_address[_packed(host.address)] = host

    # -- packets

    def send(self, now: float, source: Host, packet: bytes) -> None:
        """``source`` gives a packet to its line."""
        target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if target is None:
            return
        if packet[9] == _TCP:
            port = int.from_bytes(packet[_PORTS : _PORTS + 2])
            source._ports.add(port)
            if port in source._forgotten or int.from_bytes(packet[_PORTS + 2 : _PORTS + 4]) in target._forgotten:
                return
            if port in source._outside:
                packet = _with_port(packet, _PORTS, source._outside[port])
        up, down = source.line, target.line
        lost = self._lost(up.loss) or self._lost(down.loss)
        if lost or source.away or target.away or source._up_free - now > self._queue_s:
            source.dropped += 1
            return
        source._up_free = max(source._up_free, now) + len(packet) * up.up_s_per_byte
        source.sent_bytes += len(packet)
        late_s = self._random.random() * up.jitter_s if up.jitter_s else 0.0
        self._push(source._up_free + (up.round_trip_s + down.round_trip_s) / 4 + late_s, False, target, packet)

    def arrived(self, now: float) -> Iterator[tuple[Host, bytes]]:
        """What has come through its receiver's line, in that order."""
        while self._due and self._due[0][0] <= now:
            at, _, through, target, packet = heapq.heappop(self._due)
            if through:
                if packet[9] == _TCP and target._inside:
                    port = int.from_bytes(packet[_PORTS + 2 : _PORTS + 4])
                    packet = _with_port(packet, _PORTS + 2, target._inside.get(port, port))
                yield target, packet
            elif target.away or target._down_free - at > self._queue_s:
                target.dropped += 1
            else:
                target._down_free = max(target._down_free, at) + len(packet) * target.line.down_s_per_byte
                self._push(target._down_free, True, target, packet)

    def _push(self, at: float, through: bool, target: Host, packet: bytes) -> None:
        heapq.heappush(self._due, (at, next(self._count), through, target, packet))

    def _lost(self, share: float) -> bool:
        return share > 0 and self._random.random() < share

    def _carry(self) -> None:
        with suppress(OSError):  # of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        poll = select.epoll()
        by_descriptor = {host.descriptor: host for host in self.hosts}
        for descriptor in (*by_descriptor, self._stop):
            poll.register(descriptor, select.EPOLLIN)
        with poll:
            while True:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is None or wait_s > _EARLY_S:
                    ready = poll.poll(wait_s)
                else:
                    ready = poll.poll(0)
                for descriptor, _ in ready:
                    if descriptor == self._stop:
                        return
                    self._take(by_descriptor[descriptor])
                for target, packet in self.arrived(time.monotonic() + _EARLY_S):
                    try:
                        os.write(target.descriptor, packet)
                        target.received_bytes += len(packet)
                    except OSError:  # its queue is full, or the device goes down
                        target.dropped += 1

    def _take(self, source: Host) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(source.descriptor, 1 << 16)
            except BlockingIOError:
                return
            self.send(time.monotonic(), source, packet)


def _packed(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def _with_port(packet: bytes, at: int, port: int) -> bytes:
    """With another port at that place of its TCP header, and the checksum that goes with it (RFC 1624)."""
    was, total = int.from_bytes(packet[at : at + 2]), int.from_bytes(packet[_CHECKSUM : _CHECKSUM + 2])
    total = (~total & 0xFFFF) + (~was & 0xFFFF) + port
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    changed = bytearray(packet)
    changed[at : at + 2] = port.to_bytes(2)
    changed[_CHECKSUM : _CHECKSUM + 2] = (~total & 0xFFFF).to_bytes(2)
    return bytes(changed)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
