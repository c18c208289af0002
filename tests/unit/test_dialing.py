"""Looking for the coordinator: join files that come late and change, several addresses, what is said meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulator.loop import VirtualLoop

from w5xde_async.errors import (
    ExitCode,
    FrameTooLarge,
    LinkLost,
    MalformedFrame,
    RefusalCode,
    Refused,
    Unreachable,
    UsageError,
)
from w5xde_async.net.endpoint import connect, listen
from w5xde_async.net.join import Invitation, write_private_line
from w5xde_async.net.link import Link
from w5xde_async.net.tls import TlsFiles, client_context, own_certificate, server_context
from w5xde_async.runtime import Runtime
from w5xde_async.wire.messages import Volunteer
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection import dialing
from w5xde_async.worker.connection import target as target_module
from w5xde_async.worker.connection.dialing import Dialer
from w5xde_async.worker.connection.handshake import RefusedUnproved, prove_each_other
from w5xde_async.worker.service import Worker

_SECRET = "a secret that is long enough: 9f8e7d6c"


def _elsewhere(function: Callable[[], Any]) -> Any:
    """What another thread or process does: it may block."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function()
    finally:
        asyncio._set_running_loop(loop)


class Found(Exception):
    """The test's end: this address was tried."""


@dataclass
class World:
    """A network in which nobody answers but at ``answers``, on virtual time; what was tried, and when."""

    loop: VirtualLoop
    answers: set[tuple[str, int]] = field(default_factory=set)
    silent: set[tuple[str, int]] = field(default_factory=set)
    refuses: set[tuple[str, int]] = field(default_factory=set)
    tried: list[tuple[tuple[str, int], float]] = field(default_factory=list)

    async def connect(self, host: str, port: int, *, timeout_s: float, **_: Any) -> Link:
        address = host, port
        self.tried.append((address, self.loop.time()))
        if address in self.answers:
            raise Found(host)
        if address in self.silent:
            await asyncio.sleep(timeout_s)
        if address in self.refuses:
            raise Refused(RefusalCode.AUTHENTICATION, "not it")
        raise Unreachable(f"{host}:{port}", "no answer" if address in self.silent else "Connection refused", timeout_s)

    def later(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_later(seconds, _elsewhere, partial(act, *arguments))

    def dialer(self, server: str = "", *, join_file: Path | None = None, limit_s: float = 300.0) -> Dialer:
        runtime = Runtime(clock=self.loop.time, connect=self.connect)
        return Dialer(server, WorkerConfig(connect_timeout_s=limit_s, device="cpu"), runtime, join_file=join_file)


def _invitation(*addresses: tuple[str, int]) -> str:
    (host, port), *also = addresses
    return Invitation(
        host=host, port=port, certificate=hashlib.sha256(Quiet.certificate).digest(), secret=_SECRET, also=tuple(also)
    ).reveal()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[World], Awaitable[None]]], World]:
    async def at_once(key: object, function: Callable[[], Any]) -> Any:
        return _elsewhere(function)

    monkeypatch.setattr(target_module, "in_daemon_thread", at_once)

    def runs(main: Callable[[World], Awaitable[None]]) -> World:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            world = World(loop)

            async def body() -> None:
                await main(world)

            runner.run(body())
        return world

    return runs


def test_a_join_file_may_come_late(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a shared disk; meanwhile it says every half minute what it waits for, and how long it will."""
    path = tmp_path / "join"

    async def main(world: World) -> None:
        dialer = world.dialer(join_file=path)
        assert dialer.address == ("", 0)
        world.answers.add(("10.0.0.1", 77))
        world.later(100, write_private_line, path, _invitation(("10.0.0.1", 77)))
        with caplog.at_level(logging.INFO), pytest.raises(Found):
            await dialer.join()
        assert dialer.address == ("10.0.0.1", 77)

    world = run(main)
    assert 100 < world.tried[0][1] < 104
    said = [record.getMessage() for record in caplog.records if "no coordinator yet" in record.getMessage()]
    assert len(said) == 3
    assert all("join file" in line and "not there yet" in line for line in said)
    left = [float(re.findall(r"gives_up_in_s=(\d+)", line)[0]) for line in said]
    assert left == pytest.approx([270, 240, 210], abs=8)


def test_where_it_is_may_be_waited_for_alone(run: Any, tmp_path: Path) -> None:
    """What a worker may do follows from it, as whether its program needs a sandbox."""
    path = tmp_path / "join"

    async def main(world: World) -> None:
        dialer = world.dialer(join_file=path)
        world.later(100, write_private_line, path, _invitation(("127.0.0.1", 77)))
        await dialer.find()
        assert dialer.is_here
        assert 100 < world.loop.time() < 104
        assert not world.tried
        with pytest.raises(Unreachable, match=r"join file .* is not there yet"):
            await world.dialer(join_file=tmp_path / "none", limit_s=20.0).find()

    run(main)


def test_it_draws_from_a_generator_of_its_own(run: Any) -> None:
    """The process's belongs to the block that another worker computes; and a fleet may be seeded alike."""

    async def main(world: World) -> None:
        dialer = world.dialer("127.0.0.1:77", limit_s=20.0)
        dialer.link_ended(failed=True, applied=False, heard="")
        with pytest.raises(Unreachable):
            await dialer.join()

    before, tried = random.getstate(), []
    try:
        for _ in range(2):
            random.seed(5)
            seeded = random.getstate()
            tried.append([when for _, when in run(main).tried])
            assert random.getstate() == seeded
    finally:
        random.setstate(before)
    assert not set(tried[0]) & set(tried[1])


def test_who_was_answered_does_not_say_that_nobody_did(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of an island is kept waiting for the others, for as long as its last attempt lasts."""

    async def talk(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(5.0)
        raise Refused(RefusalCode.RUN_FULL, "1 of 2 members are here", "start the others")

    async def connect(*_: Any, **__: Any) -> Any:
        return HungUp()

    monkeypatch.setattr("w5xde_async.worker.connection.dialing.meet", talk)

    async def main(world: World) -> None:
        runtime = Runtime(clock=world.loop.time, connect=connect)
        for limit_s in (13.0, 17.0, 20.0):
            config = WorkerConfig(connect_timeout_s=limit_s, device="cpu")
            with pytest.raises(Unreachable) as caught:
                await Dialer("127.0.0.1:77", config, runtime).meet(Volunteer("dp=2", 2, "", 1))
            assert str(caught.value) == (
                f"not taken in by the coordinator at 127.0.0.1:77 within {limit_s:.0f} s (1 of 2 members are here); "
                "start the others"
            )

    run(main)


@pytest.mark.parametrize(
    ("code", "hint", "advice"),
    [
        (RefusalCode.RUN_FULL, "raise its --max-workers", "raise its --max-workers"),
        (RefusalCode.SHUTTING_DOWN, "", "it may take workers in later; its log says more"),
    ],
)
def test_who_is_not_let_in_hears_what_the_coordinator_has_said(
    run: Any, code: RefusalCode, hint: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reached: neither the address nor the firewall is wrong."""

    async def talk(*_: Any, **__: Any) -> Any:
        raise Refused(code, "not now", hint)

    async def connect(*_: Any, **__: Any) -> Any:
        return HungUp()

    monkeypatch.setattr("w5xde_async.worker.connection.dialing.join", talk)

    async def main(world: World) -> None:
        runtime = Runtime(clock=world.loop.time, connect=connect)
        with pytest.raises(Unreachable) as caught:
            await Dialer("127.0.0.1:77", WorkerConfig(connect_timeout_s=9.0, device="cpu"), runtime).join()
        assert str(caught.value) == (
            f"not taken in by the coordinator at 127.0.0.1:77 within 9 s (not now); {advice}"
        )  # fmt: skip

    run(main)


class HungUp:
    """A link whose other side closes at the first words, as a port with TLS does."""

    peer, certificate, bytes_sent, bytes_received = "127.0.0.1:77", b"", 0, 0

    def abort(self) -> None:
        pass


class Quiet(HungUp):
    """The same, of a coordinator with the certificate of ``_invitation``."""

    certificate = b"its certificate"


def test_a_worker_without_tls_says_at_once_what_may_be_missing(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the first attempt: the person at this end can do something about it."""

    async def join(link: Any, **_: Any) -> Any:
        raise LinkLost(link.peer, "closed by peer")

    async def main(world: World) -> None:
        async def connect(*_: Any, **__: Any) -> Any:
            return HungUp()

        monkeypatch.setattr(dialing, "join", join)
        runtime = Runtime(clock=world.loop.time, connect=connect)
        dialer = Dialer("127.0.0.1:77", WorkerConfig(connect_timeout_s=20.0, device="cpu"), runtime)
        with pytest.raises(Unreachable, match="it may want TLS: use its join file"):
            await dialer.join()

    with caplog.at_level(logging.WARNING):
        run(main)
    (said,) = [record.getMessage() for record in caplog.records if record.name == dialing.__name__]
    assert "it may want TLS: use its join file gives_up_in_s=20" in said


@pytest.mark.parametrize(
    ("reason", "raised", "said"),
    [
        ("cut off: the peer, or whoever sits between, ended it without the goodbye of TLS", Unreachable, "cut off"),
        ("reset by peer", Unreachable, "reset by peer"),
        ("TLS: TLSV13_ALERT_CERTIFICATE_REQUIRED", Refused, "it may want a certificate of this worker"),
    ],
)
def test_a_certificate_is_at_fault_only_where_the_coordinator_says_so(
    run: Any, monkeypatch: pytest.MonkeyPatch, reason: str, raised: type[Exception], said: str
) -> None:
    """A line that cuts early connections says nothing of certificates: it may do better at the next one."""

    async def join(link: Any, **_: Any) -> Any:
        raise LinkLost(link.peer, reason)

    async def main(world: World) -> None:
        async def connect(*_: Any, **__: Any) -> Any:
            world.tried.append((("10.0.0.1", 77), world.loop.time()))
            return Quiet()

        monkeypatch.setattr(dialing, "join", join)
        runtime = Runtime(clock=world.loop.time, connect=connect)
        config = WorkerConfig(connect_timeout_s=20.0, device="cpu")
        dialer = Dialer(_invitation(("10.0.0.1", 77)), config, runtime)
        with pytest.raises(raised, match=said):
            await dialer.join()

    world = run(main)
    assert (len(world.tried) > 5) == (raised is Unreachable)


async def test_how_tls_says_that_a_certificate_is_missing(tmp_path: Path) -> None:
    """After the handshake, and by an alert: that is what the test above stands on."""
    files = await asyncio.get_running_loop().run_in_executor(None, own_certificate, tmp_path / "tls", "digits")
    context = server_context(files.with_ca(files.cert))
    trusting = client_context(TlsFiles(ca=files.cert))
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

    async def never(link: Link) -> None:
        raise AssertionError(link)

    listener = await listen("127.0.0.1", 0, never, ssl=context)
    link = await connect("127.0.0.1", listener.port, timeout_s=10.0, ssl=trusting)
    with pytest.raises(LinkLost, match=r"TLS: .*_ALERT_CERTIFICATE_REQUIRED"):
        await link.recv()
    await link.aclose()
    await listener.aclose()


def test_a_join_file_that_is_not_there_does_not_keep_from_an_address(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come, and then it counts; nothing is said of it before."""
    path = tmp_path / "join"

    async def main(world: World) -> None:
        dialer = world.dialer("127.0.0.1:77", join_file=path)
        world.answers.add(("127.0.0.2", 88))
        world.later(10, write_private_line, path, _invitation(("127.0.0.2", 88)))
        with pytest.raises(Found):
            await dialer.join()
        assert {address for address, _ in world.tried} == {("127.0.0.1", 77), ("127.0.0.2", 88)}

    with caplog.at_level(logging.WARNING):
        run(main)
    assert not [record for record in caplog.records if record.name == dialing.__name__]


def test_without_a_join_file_it_gives_up_in_time_and_names_it(run: Any, tmp_path: Path) -> None:
    async def main(world: World) -> None:
        with pytest.raises(Unreachable, match=r"join file .*/join within 20 s .*not there yet") as caught:
            await world.dialer(join_file=tmp_path / "join", limit_s=20.0).join()
        assert caught.value.exit_code is ExitCode.UNREACHABLE
        assert world.loop.time() < 25

    run(main)


def test_a_coordinator_on_another_port_is_found_by_its_join_file(run: Any, tmp_path: Path) -> None:
    path, old, new = tmp_path / "join", ("10.0.0.1", 77), ("10.0.0.2", 78)
    write_private_line(path, _invitation(old))

    async def main(world: World) -> None:
        dialer = world.dialer(_invitation(old), join_file=path)
        world.answers.add(new)
        world.later(10, write_private_line, path, _invitation(new))
        with pytest.raises(Found, match=new[0]):
            await dialer.join()

    world = run(main)
    assert [address for address, _ in world.tried[:-1]] == [old] * (len(world.tried) - 1)
    assert world.tried[-1][0] == new
    assert world.tried[-1][1] < 14


@pytest.mark.parametrize("broken", ["gone", "nonsense", "open to others"])
def test_a_join_file_that_breaks_does_not_count(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """What it said before does, and that is said once."""
    path, old = tmp_path / "join", ("10.0.0.1", 77)
    if broken == "nonsense":
        write_private_line(path, "nonsense")
    elif broken == "open to others":
        write_private_line(path, _invitation(("10.0.0.2", 78)))
        path.chmod(0o644)

    async def main(world: World) -> None:
        dialer = world.dialer(_invitation(old), join_file=path, limit_s=20.0)
        with pytest.raises(Unreachable, match=r"10\.0\.0\.1:77 within"):
            await dialer.join()

    world = run(main)
    assert {address for address, _ in world.tried} == {old}
    assert sum("not read again" in record.getMessage() for record in caplog.records) == 1
    assert _SECRET not in caplog.text


def test_of_several_addresses_the_first_that_answers_counts(run: Any) -> None:
    dead, wrong, good = ("10.0.0.1", 1), ("172.17.0.1", 2), ("192.168.0.1", 3)

    async def main(world: World) -> None:
        world.silent.add(dead)
        world.refuses.add(wrong)
        with pytest.raises(Unreachable, match=r"10\.0\.0\.1:1: no answer") as caught:
            await world.dialer(_invitation(dead, wrong), limit_s=15.0).join()
        assert "172" in str(caught.value)
        with pytest.raises(Refused, match="not it"):  # nobody else could be it
            await world.dialer(_invitation(wrong, wrong)).join()
        world.tried.clear()
        world.answers.add(good)
        with pytest.raises(Found):
            await world.dialer(_invitation(dead, wrong, good)).join()

    tried = run(main).tried
    assert [address for address, _ in tried] == [dead, wrong, good]
    assert tried[-1][1] - tried[0][1] < 1


@pytest.mark.parametrize("answer", ["not TLS", "another certificate", "TLS", "a refusal"])
@pytest.mark.parametrize("comes_back", [True, False])
def test_who_answers_for_a_coordinator_that_is_away_does_not_send_a_worker_of_its_away(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: str, comes_back: bool
) -> None:
    """A proxy, a captive portal, somebody in between: it was let in with these settings, so they are right. Where they
    are not any more, it says in the end what a new worker says at once."""
    stranger = [False]

    async def join(link: Any, **_: Any) -> Any:
        if stranger[0] and answer == "TLS":
            raise FrameTooLarge("header", 0x1503 << 16, 1 << 16)
        if stranger[0] and answer == "a refusal":
            raise RefusedUnproved(RefusalCode.AUTHENTICATION, "the token is missing or wrong")
        return SimpleNamespace(link=link, welcome=SimpleNamespace(run_id="0", term=1))

    async def main(world: World) -> None:
        async def connect(*_: Any, **__: Any) -> Any:
            world.tried.append((("10.0.0.1", 77), world.loop.time()))
            if stranger[0] and answer == "not TLS":
                raise Refused(RefusalCode.AUTHENTICATION, "TLS: WRONG_VERSION_NUMBER", "compare both sides")
            link = Quiet()
            if stranger[0] and answer == "another certificate":
                link.certificate = b"theirs"
            return link

        monkeypatch.setattr(dialing, "join", join)
        runtime = Runtime(clock=world.loop.time, connect=connect)
        config = WorkerConfig(connect_timeout_s=100.0, device="cpu")
        server = "127.0.0.1:77" if answer in ("TLS", "a refusal") else _invitation(("10.0.0.1", 77))
        stranger[0] = True
        with pytest.raises(Refused):
            await Dialer(server, config, runtime).join()
        assert len(world.tried) == 1
        stranger[0] = False
        dialer = Dialer(server, config, runtime)
        await dialer.join()
        dialer.link_ended(failed=True, applied=True, heard="")
        stranger[0] = True
        if comes_back:
            world.loop.call_later(60.0, stranger.__setitem__, 0, False)
            await dialer.join()
        else:
            with pytest.raises(Refused):
                await dialer.join()

    with caplog.at_level(logging.WARNING):
        world = run(main)
    assert world.tried[-1][1] >= (60.0 if comes_back else 90.0)
    (said,) = [record.getMessage() for record in caplog.records if record.name == dialing.__name__]
    assert "no coordinator yet" in said  # once, at once


@pytest.mark.parametrize(("server", "kind"), [
    (lambda: _invitation(("10.0.0.1", 77)), RefusedUnproved),  # whose certificate is the right one
    (lambda: "127.0.0.1:77", Refused),  # after the proofs
])  # fmt: skip
def test_a_refusal_of_the_coordinators_own_ends_a_worker_that_has_served(
    run: Any, monkeypatch: pytest.MonkeyPatch, server: Callable[[], str], kind: type[Refused]
) -> None:
    refuses = [False]

    async def join(link: Any, **_: Any) -> Any:
        if refuses[0]:
            raise kind(RefusalCode.AUTHENTICATION, "no more")
        return SimpleNamespace(link=link, welcome=SimpleNamespace(run_id="0", term=1))

    async def main(world: World) -> None:
        async def connect(*_: Any, **__: Any) -> Any:
            world.tried.append((("10.0.0.1", 77), world.loop.time()))
            return Quiet()

        monkeypatch.setattr(dialing, "join", join)
        dialer = Dialer(server(), WorkerConfig(device="cpu"), Runtime(clock=world.loop.time, connect=connect))
        await dialer.join()
        dialer.link_ended(failed=True, applied=True, heard="")
        refuses[0] = True
        with pytest.raises(Refused, match="no more"):
            await dialer.join()

    assert len(run(main).tried) == 2


def test_who_answers_in_another_protocol_is_said_to_be_no_coordinator(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def join(link: Any, **_: Any) -> Any:
        raise FrameTooLarge("header", int.from_bytes(b"HTTP"), 1 << 16)

    async def main(world: World) -> None:
        async def connect(*_: Any, **__: Any) -> Any:
            return Quiet()

        monkeypatch.setattr(dialing, "join", join)
        runtime = Runtime(clock=world.loop.time, connect=connect)
        dialer = Dialer("127.0.0.1:77", WorkerConfig(connect_timeout_s=5.0, device="cpu"), runtime)
        with pytest.raises(Unreachable, match=r"within 5 s \(what listens there may be no coordinator: header of"):
            await dialer.join()

    run(main)


def test_that_the_protocol_was_broken_is_said_at_once_and_in_the_last_line(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not that nobody listens there any more: the firewall is not to blame."""

    async def join(link: Any, **_: Any) -> Any:
        raise MalformedFrame("Welcome.heartbeat_s has a value of the wrong type or range")

    async def main(world: World) -> None:
        links = [Quiet(), Quiet()]

        async def connect(*_: Any, **__: Any) -> Any:
            if not links:
                raise LinkLost("127.0.0.1:77", "Connection refused")
            return links.pop()

        monkeypatch.setattr(dialing, "join", join)
        runtime = Runtime(clock=world.loop.time, connect=connect)
        dialer = Dialer("127.0.0.1:77", WorkerConfig(connect_timeout_s=9.0, device="cpu"), runtime)
        with pytest.raises(Unreachable) as caught:
            await dialer.join()
        assert str(caught.value) == (
            "no coordinator reachable at 127.0.0.1:77 within 9 s (Connection refused; before that it broke the "
            "protocol: malformed frame: Welcome.heartbeat_s has a value of the wrong type or range); see what listens "
            "there, and that both sides have the same version of w5xde-async"
        )
        dialer.link_ended(failed=True, applied=False, heard="", broke="1024 leases at once")
        assert "before that it broke the protocol: 1024 leases at once" in str(dialer.unreachable(9.0))

    with caplog.at_level(logging.WARNING):
        run(main)
    said, broke = [record.getMessage() for record in caplog.records if record.name == dialing.__name__]
    assert "what listens there may be no coordinator: malformed frame: Welcome.heartbeat_s has" in said
    assert broke == "coordinator broke the protocol, connecting again times=1 reason=1024 leases at once"


@dataclass
class Lets:
    """A worker that is let in at once, and whose links end as a test says."""

    world: World
    dialer: Dialer

    async def link(
        self, seconds: float, *, applied: bool = False, served_s: float = 0.0, broke: str = "junk", failed: bool = True
    ) -> None:
        await self.dialer.join()
        await asyncio.sleep(seconds)
        self.dialer.link_ended(failed=failed, applied=applied, heard="", served_s=served_s, broke=broke)


@pytest.fixture
def let_in(run: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Lets], Awaitable[None]]], World]:
    async def join(link: Any, **_: Any) -> Any:
        return SimpleNamespace(link=link, welcome=SimpleNamespace(run_id="0", term=1))

    def runs(main: Callable[[Lets], Awaitable[None]]) -> World:
        async def body(world: World) -> None:
            async def connect(*_: Any, **__: Any) -> Any:
                return Quiet()

            runtime = Runtime(clock=world.loop.time, connect=connect)
            config = WorkerConfig(connect_timeout_s=300.0, device="cpu")
            await main(Lets(world, Dialer("127.0.0.1:77", config, runtime)))

        monkeypatch.setattr(dialing, "join", join)
        return run(body)

    return runs


@pytest.mark.parametrize("lost_between", [False, True])
def test_a_coordinator_that_lets_in_and_then_breaks_the_protocol_is_given_up_in_time(
    let_in: Any, caplog: pytest.LogCaptureFixture, lost_between: bool
) -> None:
    async def links(lets: Lets) -> None:
        while True:
            await lets.link(0.5)
            if lost_between:
                await lets.link(0.5, broke="")

    async def main(lets: Lets) -> None:
        await lets.link(1000.0)  # until then all was well
        began = lets.world.loop.time()
        said = r"within 300 s \(it let this worker in and then broke the protocol, [0-9]+ times: junk\)"
        with pytest.raises(Unreachable, match=said) as given:
            await links(lets)
        assert given.value.exit_code is ExitCode.UNREACHABLE
        lasted = lets.world.loop.time() - began
        assert 299.0 < lasted < (620.0 if lost_between else 301.0)

    with caplog.at_level(logging.WARNING):
        let_in(main)
    said = [record.getMessage() for record in caplog.records if record.name == dialing.__name__]
    assert 2 < len(said) <= (22 if lost_between else 11)  # one each 30 s
    assert all("coordinator broke the protocol, connecting again times=" in line for line in said)


@pytest.mark.parametrize(
    "between",
    [
        {"seconds": 100.0, "applied": True},  # it works, on a line that changes bytes
        {"seconds": 100.0, "applied": True, "broke": ""},
        {"seconds": 4000.0, "served_s": 3999.0},  # the coordinator has nothing for it for an hour
        {"seconds": 4000.0, "served_s": 3999.0, "broke": ""},
        {"seconds": 10.0, "broke": "", "failed": False},  # it stops in good order, and comes back
    ],
)
def test_a_worker_of_use_or_without_work_leaves_for_no_broken_link(let_in: Any, between: dict[str, Any]) -> None:
    async def main(lets: Lets) -> None:
        for _ in range(20):
            await lets.link(100.0)
            await lets.link(**between)

    let_in(main)


def test_looking_for_a_coordinator_that_is_away_is_no_broken_protocol(let_in: Any) -> None:
    async def main(lets: Lets) -> None:
        for _ in range(8):
            await lets.link(1.0)
            await asyncio.sleep(280.0)  # nobody answers

    let_in(main)


def test_links_that_are_lost_are_not_taken_for_a_broken_protocol(let_in: Any) -> None:
    async def main(lets: Lets) -> None:
        for _ in range(100):
            await lets.link(100.0, broke="")

    let_in(main)


def test_a_coordinator_that_does_not_say_all_in_time_is_not_called_silent(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def join(link: Any, **_: Any) -> Any:
        link.bytes_received = 7
        await asyncio.sleep(60.0)

    async def main(world: World) -> None:
        async def connect(*_: Any, **__: Any) -> Any:
            return Quiet()

        monkeypatch.setattr(dialing, "join", join)
        runtime = Runtime(clock=world.loop.time, connect=connect)
        dialer = Dialer("127.0.0.1:77", WorkerConfig(connect_timeout_s=9.0, device="cpu"), runtime)
        with pytest.raises(Unreachable, match="accepted the connection and then did not say all in time"):
            await dialer.join()

    run(main)


def test_a_worker_without_a_sandbox_follows_no_join_file_to_another_machine(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "join"
    write_private_line(path, _invitation(("10.0.0.2", 78)))

    async def main(world: World) -> None:
        dialer = world.dialer(_invitation(("127.0.0.1", 77)), join_file=path)
        assert dialer.is_here
        dialer.stays_here = True
        with pytest.raises(UsageError, match="without a sandbox"):
            await dialer.join()
        assert not world.tried

    run(main)


async def test_a_lifetime_in_which_nobody_was_reached_is_no_success() -> None:
    async def nobody(*address: Any, **_: Any) -> Link:
        raise Unreachable("host:1", "Connection refused", 1.0)

    config = WorkerConfig(device="cpu", lifetime_s=0.05, connect_timeout_s=60.0)
    worker = Worker("127.0.0.1:1", config=config, runtime=Runtime(connect=nobody))
    with pytest.raises(Unreachable, match="Connection refused"):
        await worker.run()


async def test_why_a_certificate_was_refused_is_read_though_hello_could_not_be_sent() -> None:
    class Closed:
        certificate = b"theirs"

        async def send(self, *_: object) -> None:
            raise LinkLost("host:1", "cut off")

        async def recv(self) -> object:
            raise LinkLost("host:1", "TLSV13_ALERT_CERTIFICATE_REQUIRED")

    closed: Any = Closed()
    with pytest.raises(LinkLost, match="CERTIFICATE_REQUIRED"):
        await prove_each_other(closed, token="secret")


def test_one_broken_link_makes_those_that_are_lost_later_no_faster(let_in: Any) -> None:
    """The time for broken links is used up, and whoever is let in loses the line at once, again and again."""

    async def main(lets: Lets) -> None:
        await lets.link(0.5)
        for _ in range(60):
            await lets.link(0.2, broke="")
        began = lets.world.loop.time()
        for _ in range(20):
            await lets.link(0.2, broke="")
        assert lets.world.loop.time() - began > 20 * 10.0

    let_in(main)
