"""The doctor: what it finds between a worker and its coordinator, and that the run does not notice."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.doctor import checks
from w5xde_async.doctor.checks import Doctor, Finding
from w5xde_async.errors import ExitCode, LinkLost, RefusalCode, Refused, UnexpectedMessage
from w5xde_async.net import racing
from w5xde_async.net.endpoint import connect
from w5xde_async.net.join import Invitation
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Bus, Event, Warned, WorkerJoined, WorkerLeft
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Introduction, Probe, Probed, Refusal
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.handshake import prove_each_other
from w5xde_async.worker.connection.target import Target
from w5xde_async.worker.service import Departure, Worker

_ALL = ["route", "port", "certificate", "secret", "clock", "round trip", "rate up", "rate down", "auto"]
_PLAIN = WorkerConfig(device="cpu")


async def examined(server: str, config: WorkerConfig = _PLAIN) -> tuple[ExitCode, dict[str, Finding]]:
    found: list[Finding] = []
    code = await Doctor(Target.of(server, config), found.append).examine()
    return code, {finding.name: finding for finding in found}


async def test_where_all_is_well_it_says_so_and_the_run_does_not_notice(tmp_path: Path) -> None:
    bus, events = Bus(), list[Event]()
    bus.subscribe(events.append)
    config = settings(join_file=tmp_path / "join", min_workers=1)
    async with Coordinator(jobs.mlp_sgd(), run_dir=tmp_path / "run", config=config, bus=bus) as coordinator:
        began = time.monotonic()
        code, found = await examined(coordinator.local_join)
        assert time.monotonic() - began < 10
        assert code is ExitCode.OK
        assert list(found) == _ALL
        assert all(finding.ok for finding in found.values())
        assert "that of the join string" in found["certificate"].said
        assert "0.0 s" in found["clock"].said
        assert "Mbit/s" in found["rate up"].said
        assert "in 5 measurements" in found["rate up"].said
        assert "exact sync" in found["auto"].said
        assert "assumed" in found["auto"].said
        assert not [event for event in events if isinstance(event, WorkerJoined | WorkerLeft | Warned)]
        assert coordinator.num_workers == 0
        worker = Worker(coordinator.local_join, job=jobs.mlp_sgd(), config=QUICK_WORKER)
        assert await worker.run() is Departure.FINISHED
        await coordinator.wait()


async def test_a_wrong_certificate_and_a_wrong_secret_are_told_apart(tmp_path: Path) -> None:
    async with Coordinator(jobs.mlp_sgd(), config=settings(join_file=tmp_path / "join")) as coordinator:
        told = Invitation.parse(coordinator.local_join, place="here")
        code, found = await examined(replace(told, certificate=bytes(32)).reveal())
        assert (code, list(found)[-1]) == (ExitCode.AUTHENTICATION, "certificate")
        assert "copy the present join file" in str(found["certificate"])
        code, found = await examined(replace(told, secret="another one, and long enough").reveal())
        assert (code, list(found)[-1]) == (ExitCode.AUTHENTICATION, "secret")
        assert str(found["secret"]).startswith("FAILED")


async def test_no_name_and_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, found = await examined(f"127.0.0.1:{port}")
    assert (code, list(found)[-1]) == (ExitCode.UNREACHABLE, "port")
    assert "start the coordinator" in str(found["port"])

    async def unknown(*_: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(checks, "in_daemon_thread", unknown)
    code, found = await examined("no-such-host.invalid:1", replace(_PLAIN, insecure=True))
    assert (code, list(found)) == (ExitCode.UNREACHABLE, ["name"])
    assert "DNS" in str(found["name"])


async def test_one_address_that_is_none_holds_up_neither_doctor_nor_worker(tmp_path: Path) -> None:
    async with Coordinator(jobs.mlp_sgd(), config=settings(join_file=tmp_path / "join")) as coordinator:
        server = f"{coordinator.local_join}&also=train..example.org:5861"
        found = list[Finding]()
        code = await Doctor(Target.of(server, _PLAIN), found.append).examine()
        assert code is ExitCode.OK  # as of the worker below
        assert [finding.name for finding in found if not finding.ok] == ["name"]
        assert "no host name" in next(finding.said for finding in found if not finding.ok)
        assert found[-1].name == "auto"
        worker = Worker(server, job=jobs.mlp_sgd(), config=QUICK_WORKER)
        assert await worker.run() is Departure.FINISHED
        await coordinator.wait()


async def test_what_is_no_coordinator_is_none() -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        code, found = await examined(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert (code, list(found)[-1]) == (ExitCode.UNREACHABLE, "answer")
    assert "may be no coordinator" in str(found["answer"])


@pytest.mark.parametrize("tls", [True, False])
async def test_a_port_that_accepts_and_says_nothing_is_no_question_of_certificates(
    tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a coordinator that hangs or was stopped: the system accepts in its place."""
    monkeypatch.setattr(checks, "_TLS_S", 0.05)
    monkeypatch.setattr(checks, "_PROOF_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        told = Invitation(host="127.0.0.1", port=port, certificate=bytes(32), secret="long enough for this test 1234")
        code, found = await examined(told.reveal() if tls else f"127.0.0.1:{port}")
    assert (code, list(found)[-1]) == (ExitCode.UNREACHABLE, "answer")
    assert not found["answer"].ok
    assert "hangs" in str(found["answer"])
    assert "compare TLS" not in str(found["answer"])


async def test_addresses_that_hang_are_tried_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, eight of them took longer than the doctor may."""
    trying = asyncio.Barrier(8)

    async def hangs(*_: Any, **__: Any) -> Any:
        async with asyncio.timeout(5):
            await trying.wait()
        raise LinkLost("", "no answer")

    found = list[Finding]()
    doctor = Doctor(Target.of("127.0.0.1:1", _PLAIN), found.append)
    doctor._addresses = [("127.0.0.1", port) for port in range(1, 9)]
    monkeypatch.setattr(checks, "connect", hangs)
    monkeypatch.setattr(racing, "DELAY_S", 0.0)
    with pytest.raises(checks._Over):
        await doctor._certificate()
    assert [(one.name, one.said) for one in found] == [("answer", "no answer")]


async def test_a_slow_line_is_measured_no_longer_than_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exchange has its own limit, too; all of them took longer than the doctor may."""

    async def exchange(link: object, count: int, **_: object) -> list[Any]:
        if count > 1:  # a rate
            await asyncio.Event().wait()
        return [SimpleNamespace(wall=time.time())]

    monkeypatch.setattr(checks, "_exchange", exchange)
    monkeypatch.setattr(checks, "_RATE_S", 1e6)
    found = list[Finding]()
    doctor = Doctor(Target.of("127.0.0.1:1", _PLAIN), found.append)
    with pytest.raises(checks._Over):
        await doctor._measure(None, asyncio.get_running_loop().time() + 0.05)  # type: ignore[arg-type]
    assert [one.name for one in found] == ["clock", "round trip", "rate"]
    assert "no answer in time" in found[-1].said


@pytest.mark.parametrize(
    ("seconds_per_probe", "said"),
    [
        ([24e-6] * 5, "about 1,024 Mbit/s (1,024 to 1,024 in 5 measurements)"),
        ([24e-6, 24e-6, 1.2e-3, 30e-6, 27e-6], "(20 to 1,024 in 5 measurements); they differ much"),
        ([0.8] * 5, "about 0.031 Mbit/s"),
    ],
)
async def test_a_rate_is_several_measurements(
    seconds_per_probe: list[float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine one alone was wrong by 50 times, and nothing said so."""
    now, left = 100.0, list(seconds_per_probe)

    async def exchange(link: object, count: int, **_: object) -> None:
        nonlocal now
        full = count == checks._MOST_PROBES
        now += 0.001 + count * (left.pop(0) if full else seconds_per_probe[0])

    monkeypatch.setattr(checks, "_exchange", exchange)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: now))
    rates = await checks._bytes_per_s(None, 0.001, up=True)  # type: ignore[arg-type]
    assert said in checks._words(rates)
    assert ("differ" in checks._words(rates)) is ("differ" in said)


async def test_a_wrong_clock_is_found() -> None:
    runtime = Runtime(wall=lambda: time.time() + 3600.0)
    async with Coordinator(jobs.mlp_sgd(), config=settings(), runtime=runtime) as coordinator:
        code, found = await examined(coordinator.address)
    assert code is ExitCode.OK  # a worker does with it
    assert list(found) == _ALL
    assert [name for name, finding in found.items() if not finding.ok] == ["clock"]
    assert "3600.0 s ahead" in found["clock"].said
    assert "NTP" in str(found["clock"])


async def test_probes_are_bounded_and_come_before_the_introduction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w5xde_async.hub.members.session._MOST_PROBES", 3)
    async with Coordinator(jobs.mlp_sgd(), config=settings()) as coordinator:
        link = await connect(coordinator.host, coordinator.port, timeout_s=5)
        await prove_each_other(link, token="")
        for wanted in (0, 7):
            await link.send(encode(Probe(wanted, b"x")))
            answer = (await link.recv()).message
            assert isinstance(answer, Probed)
            assert len(answer.filler) == wanted
            assert answer.num_values > 0
            assert answer.update == "sync"
            assert answer.island == ""
        await link.send(encode(Introduction("key", "name", "0")))
        with pytest.raises(Exception, match="Welcome: buffer"):  # WELCOME, whose layout a doctor has no use for
            await link.recv()
        link.abort()
        link = await connect(coordinator.host, coordinator.port, timeout_s=5)
        await prove_each_other(link, token="")
        for _ in range(4):
            await link.send(encode(Probe(0, b"")))
        said = [(await link.recv()).message for _ in range(4)]
        assert [type(message) for message in said] == [Probed] * 3 + [Refusal]
        link.abort()


async def test_nobody_probes_without_the_secret(tmp_path: Path) -> None:
    async with Coordinator(jobs.mlp_sgd(), config=settings(token="a token that is long enough 1234")) as coordinator:
        link = await connect(coordinator.host, coordinator.port, timeout_s=5)
        with pytest.raises(Refused) as caught:
            await prove_each_other(link, token="another token, as long as that one")
        assert caught.value.code is RefusalCode.AUTHENTICATION
        link.abort()


async def test_a_worker_takes_no_answer_to_a_probe_for_its_welcome() -> None:
    from tests.support.memory_links import memory_pair

    from w5xde_async.wire.messages import PROTOCOL_VERSION, Accepted, Challenge
    from w5xde_async.worker.connection.handshake import join

    near, far = memory_pair()
    joining = asyncio.create_task(join(near, key="k", name="n", token="", terms={}))
    await far.send(encode(Challenge(PROTOCOL_VERSION, bytes(32), False, b"")))
    await far.send(encode(Accepted(b"")))
    await far.send(encode(Probed(0.0, 1, 0.0, "sync", b"")))
    with pytest.raises(UnexpectedMessage, match="Probed"):
        await joining
    for link in (near, far):
        link.abort()
