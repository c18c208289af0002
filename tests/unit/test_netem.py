"""The emulated network of the benches: when packets arrive, without namespaces (tests send the packets themselves)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PACKET = 1000
_S = _PACKET * 8e-6  # on a line of 1 Mbit/s


@pytest.fixture(scope="module")
def netem() -> ModuleType:
    spec = importlib.util.spec_from_file_location("netem", Path(__file__).parents[2] / "bench" / "netem.py")
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules["netem"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _packet(source: Any, target: Any, *, source_port: int = 40000, target_port: int = 5555) -> bytes:
    """TCP over IPv4 with a right checksum, ``_PACKET`` bytes."""
    addresses = b"".join(bytes(map(int, host.address.split("."))) for host in (source, target))
    packet = bytearray(b"\x45" + bytes(8) + b"\x06" + bytes(2) + addresses)
    packet += source_port.to_bytes(2) + target_port.to_bytes(2) + bytes(12) + bytes(4)
    packet += bytes(index % 251 for index in range(_PACKET - len(packet)))
    packet[36:38] = (~_sum(packet) & 0xFFFF).to_bytes(2)
    return bytes(packet)


def _sum(packet: bytes) -> int:
    """Of the TCP part, in ones' complement; the pseudo header is the same for every packet here."""
    total = sum(int.from_bytes(packet[at : at + 2]) for at in range(20, len(packet), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _arrivals(network: Any, target: Any, *, until: float = 100.0, step: float = 0.001) -> list[tuple[float, bytes]]:
    """Of packets to ``target``, to the millisecond."""
    found = []
    for tick in range(int(until / step)):
        found += [(tick * step, packet) for host, packet in network.arrived(tick * step) if host is target]
    return found


def test_a_slow_sender_delays_nobody_else(netem: ModuleType) -> None:
    """The receiver's line is taken when a packet is there, not when it is sent."""
    network = netem.Network([netem.Line(rate_mbit=10), netem.Line(rate_mbit=0.1), netem.Line(rate_mbit=10)])
    receiver, slow, fast = network.hosts
    network.send(0.0, slow, _packet(slow, receiver, source_port=1))
    for _ in range(5):
        network.send(0.0, fast, _packet(fast, receiver, source_port=2))
    arrivals = _arrivals(network, receiver, until=1.0)
    assert len(arrivals) == 6
    assert [int.from_bytes(packet[20:22]) for _, packet in arrivals] == [2] * 5 + [1]
    assert arrivals[4][0] == pytest.approx(6 * _S / 10, abs=0.002)


def test_lines_hold_back_and_drop(netem: ModuleType) -> None:
    lines = [netem.Line(), netem.Line(rate_mbit=1, down_mbit=0.5, round_trip_s=0.2)]
    network = netem.Network(lines, queue_s=4.5 * _S)
    server, client = network.hosts
    for _ in range(10):
        network.send(0.0, client, _packet(client, server))
    assert (client.dropped, client.sent_bytes) == (5, 5 * _PACKET)
    assert [at for at, _ in _arrivals(network, server, until=1.0)] == pytest.approx(
        [(place + 1) * _S + 0.05 for place in range(5)], abs=0.002
    )
    for _ in range(10):
        network.send(1.0, server, _packet(server, client))
    assert [at - 1.0 for at, _ in _arrivals(network, client, until=2.0)] == pytest.approx(
        [(place + 1) * 2 * _S + 0.05 for place in range(3)], abs=0.002
    )


def test_packets_overtake_and_get_lost(netem: ModuleType) -> None:
    network = netem.Network([netem.Line(), netem.Line(jitter_s=0.1, loss=0.2)])
    server, client = network.hosts
    for port in range(1000):
        network.send(port / 1000, client, _packet(client, server, source_port=port))
    ports = [int.from_bytes(packet[20:22]) for _, packet in _arrivals(network, server, until=3.0)]
    assert 700 < len(ports) < 900
    assert ports != sorted(ports)


def test_who_is_away_sends_nothing_and_gets_nothing(netem: ModuleType) -> None:
    network = netem.Network([netem.Line(round_trip_s=0.1)] * 2)
    server, client = network.hosts
    network.send(0.0, client, _packet(client, server))
    server.away = True
    network.send(0.0, client, _packet(client, server))
    assert not _arrivals(network, server, until=1.0)
    server.away = False
    network.send(1.0, client, _packet(client, server))
    assert len(_arrivals(network, server, until=2.0)) == 1


def test_connections_that_stand_are_forgotten_and_new_ones_pass(netem: ModuleType) -> None:
    network = netem.Network([netem.Line()] * 2)
    server, client = network.hosts
    network.send(0.0, client, _packet(client, server))
    network.forget(client)
    network.send(0.0, client, _packet(client, server))
    network.send(0.0, server, _packet(server, client, source_port=5555, target_port=40000))
    network.send(0.0, client, _packet(client, server, source_port=40001))
    assert [int.from_bytes(packet[20:22]) for _, packet in _arrivals(network, server, until=0.1)] == [40000, 40001]
    assert not _arrivals(network, client, until=0.1)


def test_another_port_comes_with_its_checksum_and_the_answer_finds_back(netem: ModuleType) -> None:
    network = netem.Network([netem.Line()] * 2)
    server, client = network.hosts
    network.send(0.0, client, _packet(client, server))
    network.rebind(client)
    network.send(0.0, client, _packet(client, server))
    (_, before), (_, after) = _arrivals(network, server, until=0.1)
    outside = int.from_bytes(after[20:22])
    assert outside != 40000
    assert _sum(before) == _sum(after) == 0xFFFF
    assert after[22:36] == before[22:36]
    network.send(0.0, server, _packet(server, client, source_port=5555, target_port=outside))
    ((_, answer),) = _arrivals(network, client, until=0.1)
    assert int.from_bytes(answer[22:24]) == 40000
    assert _sum(answer) == 0xFFFF
