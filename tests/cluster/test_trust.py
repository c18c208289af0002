"""Who gets in, over real TLS on loopback; and what one who does not get in ever sees."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.jobs import mlp_sgd
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import RefusalCode, Refused, Unreachable, UsageError, W5xdeError
from w5xde_async.hub.members import roster
from w5xde_async.job import Job
from w5xde_async.net.endpoint import listen
from w5xde_async.net.join import Invitation
from w5xde_async.net.link import Link
from w5xde_async.net.tls import TlsFiles, own_certificate, server_context
from w5xde_async.telemetry.events import Event, Warned, WorkerJoined, WorkerLeft
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import PROTOCOL_VERSION, Hello, Proof, Refusal
from w5xde_async.worker.service import Departure, Worker


@asynccontextmanager
async def running(tmp_path: Path, commits: Commits | None = None, **config: Any) -> AsyncIterator[Coordinator]:
    """A coordinator over TLS, on loopback because a join file was asked for."""
    config.setdefault("join_file", tmp_path / "join")
    made = settings(**{"max_steps": 10_000, **config})
    bus = None if commits is None else commits.bus
    async with Coordinator(mlp_sgd(), run_dir=tmp_path / "run", config=made, bus=bus) as coordinator:
        yield coordinator


def worker(where: str, **config: Any) -> Worker:
    return Worker(where, job=mlp_sgd(), config=replace(QUICK_WORKER, **config))


def revealed(told: Invitation | None) -> str:
    assert told is not None
    return told.reveal()


async def refusal(made: Worker) -> str:
    with pytest.raises(Refused) as caught:
        await made.run()
    assert caught.value.code == RefusalCode.AUTHENTICATION
    return str(caught.value)


@pytest.mark.both_loops
async def test_the_same_bits_over_tls_with_a_join_file(tmp_path: Path):
    plain = await train(mlp_sgd, workers=2, max_steps=6)
    made = settings(max_steps=6, min_workers=2, join_file=tmp_path / "join")
    async with Coordinator(mlp_sgd(), config=made) as coordinator:
        told = (tmp_path / "join").read_text().strip()
        running = [asyncio.create_task(worker(told).run()) for _ in range(2)]
        result = await coordinator.wait()
        assert await asyncio.gather(*running) == [Departure.FINISHED] * 2
    assert result.digest == plain.digest


async def test_that_another_runs_join_file_was_written_over_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for name in ("one", "one", "two"):
        made = settings(max_steps=1, port=0, join_file=tmp_path / "join", resume="auto")
        caplog.clear()
        async with Coordinator(mlp_sgd(), run_dir=tmp_path / name, config=made) as coordinator:
            assert (tmp_path / "join").read_text().strip() == revealed(coordinator.invitation)
        said.append(caplog.text.count("named another run's coordinator"))
    assert said == [0, 0, 1]


async def test_a_join_string_outlives_a_restart(tmp_path: Path):
    async with running(tmp_path, port=0) as coordinator:
        first = coordinator.invitation
    async with running(tmp_path, port=0) as coordinator:
        second = coordinator.invitation
    assert first is not None
    assert second is not None
    assert (first.secret, first.certificate) == (second.secret, second.certificate)


async def test_another_certificate_than_the_join_strings_is_refused(tmp_path: Path):
    async with running(tmp_path) as coordinator:
        told = coordinator.invitation
        assert told is not None
        text = await refusal(worker(replace(told, certificate=bytes(32)).reveal()))
        assert "certificate is not the one" in text


async def test_a_wrong_secret_is_refused_over_tls(tmp_path: Path):
    async with running(tmp_path) as coordinator:
        told = coordinator.invitation
        assert told is not None
        assert "token" in await refusal(worker(replace(told, secret="wrong").reveal()))


async def test_who_is_refused_leaves_a_trace_and_no_flood(monkeypatch: pytest.MonkeyPatch):
    """Before it has said who it is, too: by its address, in one line a minute for each code."""
    told: list[str] = []
    commits = Commits()
    commits.bus.subscribe(lambda event: told.append(event.text) if isinstance(event, Warned) else None)
    async with Coordinator(mlp_sgd(), config=settings(max_steps=10_000, token="x"), bus=commits.bus) as coordinator:
        for _ in range(3):
            await refusal(worker(coordinator.address, token="wrong"))

        async def says(message: Hello | Proof) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", coordinator.port)
            writer.writelines(encode(message))
            await reader.read()
            writer.close()
            await writer.wait_closed()

        for _ in range(3):
            await says(Proof(b"no greeting"))
        later = PROTOCOL_VERSION + 1
        await says(Hello(later, bytes(32), "", "", ""))
        assert [re.sub(r"127.0.0.1:\d+", "PEER", text) for text in told] == [
            "PEER did not join: the token is missing or wrong",
            "PEER did not join: broke the protocol: Proof is not allowed in state greeting",
            f"PEER did not join: this coordinator speaks protocol {PROTOCOL_VERSION}, the worker {later}",
        ]
        monkeypatch.setattr(roster, "_REFUSALS_SAID_S", 0.0)
        await refusal(worker(coordinator.address, token="wrong"))
        assert told[3].endswith(
            "the token is missing or wrong (2 more were refused for such a reason since that was told last)"
        )
        assert coordinator._run is not None
        assert coordinator._run.training.roster.contributions.links_refused == 8


async def test_one_who_sits_between_with_his_own_certificate_passes_no_proof_on(tmp_path: Path):
    """The worker knows the secret but not the certificate. The man in the middle opens both TLS links and copies."""
    async with running(tmp_path) as coordinator:
        told = coordinator.invitation
        assert told is not None
        own = await asyncio.to_thread(own_certificate, tmp_path / "mallory", "mallory")
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert own.cert is not None
        server.load_cert_chain(own.cert, own.key)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        copied = bytearray()

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                copied.extend(data)
                writer.write(data)
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner = await asyncio.open_connection("127.0.0.1", coordinator.port, ssl=client)
            await asyncio.gather(copy(reader, inner[1]), copy(inner[0], writer), return_exceptions=True)

        mallory = await asyncio.start_server(between, "127.0.0.1", 0, ssl=server)
        port = mallory.sockets[0].getsockname()[1]
        made = worker(f"127.0.0.1:{port}", token=told.secret, tls=TlsFiles(own.cert, own.key))
        assert "the token is missing or wrong" in await refusal(made)  # the coordinator: his is another certificate
        assert copied  # he did see the handshake
        assert told.secret.encode() not in copied
        mallory.close()
        await mallory.wait_closed()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("code", RefusalCode)
async def test_who_has_only_a_certificate_of_his_own_ends_no_worker_and_tells_it_nothing(
    tmp_path: Path, code: RefusalCode
) -> None:
    """The worker knows the secret alone: whoever answers has to prove that it knows it before it is believed."""
    own = await asyncio.to_thread(own_certificate, tmp_path / "mallory", "mallory")

    async def refuse(link: Link) -> None:
        await link.recv()
        await link.send(encode(Refusal(code, "the run is finished", "thank you")))
        await link.aclose()

    mallory = await listen("127.0.0.1", 0, refuse, ssl=server_context(own))
    made = worker(f"127.0.0.1:{mallory.port}", token="x", tls=TlsFiles(own.cert, own.key), connect_timeout_s=0.5)
    with pytest.raises((Refused, Unreachable)) as caught:
        await made.run()
    assert isinstance(caught.value, Refused) == (code.name in ("PROTOCOL_VERSION", "AUTHENTICATION", "PROTOCOL_ERROR"))
    assert "finished" not in str(caught.value)
    assert "thank you" not in str(caught.value)
    await mallory.aclose()


async def test_both_sides_must_agree_about_tls(tmp_path: Path):
    async with running(tmp_path) as coordinator:
        with pytest.raises(W5xdeError, match="TLS"):
            await worker(coordinator.address, token="x", connect_timeout_s=0.5).run()
    async with Coordinator(mlp_sgd(), config=settings(max_steps=10_000, token="x")) as plain:
        made = worker(f"w5xde://x@{plain.address}?cert=sha256:{'0' * 64}")
        assert "TLS" in await refusal(made)


@pytest.mark.slow
async def test_a_coordinator_that_wants_certificates_of_its_workers(tmp_path: Path):
    authority = trustme.CA()
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(str(ca))
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(key))
    key.chmod(0o600)
    issued.cert_chain_pems[0].write_to_path(str(cert))
    commits = Commits()
    async with running(tmp_path, commits, tls=TlsFiles(cert, key, ca)) as coordinator:
        told = coordinator.invitation
        assert told is not None
        where = f"localhost:{told.port}"
        text = await refusal(worker(where, token=told.secret, tls=TlsFiles(ca=ca)))
        assert "--tls-cert" in text or "certificate" in text
        good = asyncio.create_task(worker(where, token=told.secret, tls=TlsFiles(cert, key, ca)).run())
        await commits.reach(2)
        coordinator.request_stop()
        await coordinator.wait()
        good.cancel()
        await asyncio.gather(good, return_exceptions=True)


async def test_a_revoked_worker_is_dropped_and_stays_out_and_the_others_go_on(tmp_path: Path):
    commits, events = Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    async with running(tmp_path, commits) as coordinator:
        alice = asyncio.create_task(worker(revealed(coordinator.invite("alice"))).run())
        bob = asyncio.create_task(worker(revealed(coordinator.invite("bob"))).run())
        while coordinator.num_workers < 2:
            await commits.reach(commits.step + 1)
        coordinator.revoke("alice")
        with pytest.raises(Refused, match="revoked"):
            await alice
        assert any(isinstance(event, WorkerLeft) and "revoked" in event.reason for event in events)
        await commits.reach(commits.step + 3)
        assert not bob.done()
        told = coordinator.invite("bob")
        assert told is not None
        assert "token" in await refusal(worker(replace(told, identity="alice").reveal()))  # bob's secret, alice's name
        bob.cancel()
        await asyncio.gather(bob, return_exceptions=True)


async def test_a_rotated_secret_opens_the_run_and_the_old_one_no_more(tmp_path: Path):
    commits = Commits()
    async with running(tmp_path, commits) as coordinator:
        old = coordinator.invitation
        assert old is not None
        inside = asyncio.create_task(worker(old.reveal()).run())
        await commits.reach(1)
        await coordinator.rotate_secret("another secret, long enough")
        await commits.reach(commits.step + 2)  # who is in stays in
        assert "token" in await refusal(worker(old.reveal()))
        newcomer = asyncio.create_task(worker((tmp_path / "join").read_text().strip()).run())
        while coordinator.num_workers < 2:
            await commits.reach(commits.step + 1)
        for task in (inside, newcomer):
            task.cancel()
        await asyncio.gather(inside, newcomer, return_exceptions=True)


async def test_secret_and_revoked_workers_are_read_again(tmp_path: Path):
    commits = Commits()
    async with running(tmp_path, commits) as coordinator:
        alice = asyncio.create_task(worker(revealed(coordinator.invite("alice"))).run())
        await commits.reach(1)
        (tmp_path / "run" / "revoked").write_text("# left the group\nalice\n")
        await coordinator.reload_access()
        with pytest.raises(Refused, match="revoked"):
            await alice
        before = coordinator.invitation
        (tmp_path / "run" / "secret").write_text("a new one\n")
        await coordinator.reload_access()
        assert before is not None
        assert before.reveal() != (tmp_path / "join").read_text().strip()


@pytest.mark.parametrize("secret", ["gone", "changed"])
async def test_who_is_revoked_leaves_whatever_the_secret_comes_to(tmp_path: Path, secret: str):
    commits = Commits()
    async with running(tmp_path, commits) as coordinator:
        alice = asyncio.create_task(worker(revealed(coordinator.invite("alice"))).run())
        await commits.reach(1)
        (tmp_path / "run" / "revoked").write_text("alice\n")
        if secret == "gone":
            (tmp_path / "run" / "secret").unlink()
        else:
            (tmp_path / "run" / "secret").write_text("a new one\n")
            (tmp_path / "join").unlink()
            (tmp_path / "join").mkdir()
        with pytest.raises(UsageError, match="is gone" if secret == "gone" else "cannot write the join file"):
            await coordinator.reload_access()
        with pytest.raises(Refused, match="authentication"):
            await asyncio.wait_for(alice, 30)


async def test_a_name_that_is_a_workers_own_word_locks_nobody_out_and_that_is_said(tmp_path: Path):
    commits, events = Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    async with running(tmp_path, commits) as coordinator:
        joined = asyncio.create_task(worker(revealed(coordinator.invitation), name="ann").run())
        await commits.reach(1)
        (found,) = [event for event in events if isinstance(event, WorkerJoined)]
        revoked = tmp_path / "run" / "revoked"
        await asyncio.to_thread(revoked.write_text, f"{found.name}\n")
        await coordinator.reload_access()
        (said,) = [event.text for event in events if isinstance(event, Warned) and "stays" in event.text]
        assert said.startswith(f"{found.name} stays: it has joined with the run's secret")
        assert f"write {found.worker_id} into revoked" in said
        await asyncio.to_thread(revoked.write_text, f"{found.worker_id}\n")
        await coordinator.reload_access()
        with pytest.raises(Refused, match="revoked"):
            await joined


async def test_a_rotated_secret_and_a_revocation_outlive_a_reload_and_a_restart(tmp_path: Path):
    secret, revoked = tmp_path / "run" / "secret", tmp_path / "run" / "revoked"
    async with running(tmp_path) as coordinator:
        before, alice = revealed(coordinator.invitation), revealed(coordinator.invite("alice"))
        await asyncio.to_thread(revoked.write_text, "carol")  # by hand, and no end of line
        await coordinator.rotate_secret("another secret, long enough")
        alice = revealed(coordinator.invite("alice"))
        coordinator.revoke("alice")
        coordinator.revoke("alice")
        await coordinator.reload_access()
        assert (await asyncio.to_thread(secret.read_text)).strip() == "another secret, long enough"
        assert secret.stat().st_mode & 0o777 == 0o600
        assert "token" in await refusal(worker(before))
        assert "revoked" in await refusal(worker(alice))
    assert await asyncio.to_thread(revoked.read_text) == "carol\nalice\n"
    async with running(tmp_path) as coordinator:
        now = coordinator.invitation
        assert now is not None
        assert now.secret == "another secret, long enough"
        assert "revoked" in await refusal(worker(replace(Invitation.parse(alice, place=""), port=now.port).reveal()))
        with pytest.raises(UsageError, match="one line"):
            await coordinator.rotate_secret("two\nlines")


async def test_a_given_token_goes_before_the_directorys_secret(tmp_path: Path):
    async with running(tmp_path):
        pass  # leaves a secret there
    kept = await asyncio.to_thread((tmp_path / "run" / "secret").read_text)
    commits, events = Commits(), list[Event]()
    commits.bus.subscribe(events.append)
    async with running(tmp_path, commits, token="the operator's") as coordinator:
        await coordinator.reload_access()
        assert coordinator.invitation is not None
        assert coordinator.invitation.secret == "the operator's"
        await coordinator.rotate_secret("for now")
        await coordinator.reload_access()
        assert coordinator.invitation.secret == "for now"
    assert any(isinstance(event, Warned) and "give it to the next one too" in event.text for event in events)
    assert await asyncio.to_thread((tmp_path / "run" / "secret").read_text) == kept


async def test_who_is_locked_out_under_a_name_that_is_no_line_stays_out(tmp_path: Path):
    async with running(tmp_path) as coordinator:
        security = coordinator._access
        assert security is not None
        coordinator.revoke("al#ice")
        security.lock_out("bo\nb", "it lied")
        await coordinator.reload_access()
        assert security.credentials.revoked("al#ice")
        assert security.credentials.quarantined("bo\nb") == "it lied"
    assert not (tmp_path / "run" / "revoked").exists()


async def test_what_is_revoked_by_the_file_reaches_workers_that_build_their_model(tmp_path: Path):
    async with running(tmp_path) as coordinator:
        joining, released = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def build() -> nn.Module:
            loop.call_soon_threadsafe(joining.set)
            released.wait(60)
            return nn.Linear(1, 1)

        job = replace(mlp_sgd(), model=build)
        told = revealed(coordinator.invite("alice"))
        made = asyncio.create_task(Worker(told, job=job, config=QUICK_WORKER).run())
        try:
            await joining.wait()
            training = coordinator._training
            assert training is not None
            assert len(training.roster.joining) == 1
            await asyncio.to_thread((tmp_path / "run" / "revoked").write_text, "alice\n")
            await coordinator.reload_access()
            async with asyncio.timeout(5):
                while training.roster.joining:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        finally:
            released.set()
        with pytest.raises(W5xdeError):
            await made


@pytest.mark.slow
async def test_strangers_of_one_address_are_few_and_workers_still_get_in(tmp_path: Path):
    commits = Commits()
    async with Coordinator(mlp_sgd(), config=settings(max_steps=10_000, token="x"), bus=commits.bus) as coordinator:
        silent = [await asyncio.open_connection("127.0.0.1", coordinator.port) for _ in range(80)]
        closed = 0
        for reader, _ in silent:
            try:
                async with asyncio.timeout(0.05):
                    closed += await reader.read(1) == b""
            except TimeoutError:
                pass
        assert closed == 16  # 64 may wait at once
        made = asyncio.create_task(worker(coordinator.address, token="x").run())
        await commits.reach(1)
        made.cancel()
        await asyncio.gather(made, return_exceptions=True)
        for _, writer in silent:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


CANARY = b"canary-7f3a-"  # 12 bytes: three float32 values, all of them finite


class Marked(nn.Module):
    """The canary is in its parameters, in a constant of its program and in the names of both."""

    def __init__(self) -> None:
        super().__init__()
        marked = torch.frombuffer(bytearray(CANARY * 16), dtype=torch.float32)
        self.canary_7f3a = nn.Linear(48, 10)
        with torch.no_grad():
            self.canary_7f3a.weight.copy_(marked.repeat(10, 1))
        self.register_buffer("shift", marked.clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.canary_7f3a(x * 1e-20 + self.shift)
        return out


def marked() -> Job:
    rows = torch.frombuffer(bytearray(CANARY * 16), dtype=torch.float32).repeat(64, 1)
    return Job(
        model=Marked, dataset=TensorDataset(rows, torch.zeros(64, dtype=torch.int64)),
        loss=nn.functional.cross_entropy, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        batch_size=16, microbatch_size=4, max_steps=10_000,
    )  # fmt: skip


def every_message() -> list[list[Any]]:
    """One frame of each kind that there is, as somebody might send it without having proved anything."""
    golden = Path(__file__).parents[1] / "golden" / "frames"
    return [[path.read_bytes()] for path in sorted(golden.glob("[0-9]*.bin"))]


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
async def test_a_stranger_sees_nothing_of_the_run(tls: bool, tmp_path: Path):
    """Everything that one without the secret ever receives, in every state that he can reach, is searched, while a
    worker is at work: parameters, data, program, names, the secret."""
    config: dict[str, Any] = {"max_steps": 1_000_000, "token": "the secret", "code_free": True, "max_time_s": 30.0,
                              "max_nonfinite_steps": 1_000_000}  # fmt: skip
    config |= {"join_file": tmp_path / "join"} if tls else {}
    seen, commits = bytearray(), Commits()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def try_with(port: int, *frames: Any) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context if tls else None)
        certificate = writer.get_extra_info("ssl_object").getpeercert(True) if tls else b""
        seen.extend(certificate)
        try:
            for frame in frames:
                writer.writelines(frame)
            if not tls:
                writer.write_eof()
            async with asyncio.timeout(0.2 if tls else 5.0):
                while data := await reader.read(1 << 16):
                    seen.extend(data)
        except (ConnectionError, TimeoutError):
            pass  # turned away, or told nothing more
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    made = settings(**config)
    name = CANARY.decode()
    async with Coordinator(
        marked(), run_dir=tmp_path / name, name=name, config=made, bus=commits.bus, job_reference=""
    ) as coordinator:
        where = (tmp_path / "join").read_text().strip() if tls else coordinator.address
        working = asyncio.create_task(
            Worker(where, job=None, config=replace(QUICK_WORKER, token="" if tls else "the secret")).run()
        )
        await commits.reach(2)
        hello = encode(Hello(PROTOCOL_VERSION, bytes(32), "stranger", "stranger", "0"))
        wrong = encode(Proof(bytes(32)))
        await try_with(coordinator.port)
        await try_with(coordinator.port, [b"GET / HTTP/1.1\r\n\r\n"])
        await try_with(coordinator.port, hello, encode(Proof(b"")))
        messages = every_message() if not tls else every_message()[:6]  # the same code behind another stream
        for message in messages:
            await try_with(coordinator.port, message)
            await try_with(coordinator.port, hello, message)
            await try_with(coordinator.port, hello, wrong, message)
        prepared = coordinator._prepared
        assert prepared is not None
        fingerprint, text = (
            prepared.spec.layout.fingerprint,
            prepared.spec.program.text if prepared.spec.program else b"",
        )
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert len(seen) > 200
    assert len(text) > 200  # there was a program to see
    program = [text[at : at + 16] for at in range(0, len(text) - 16, 16)]
    for secret in (CANARY, b"canary", b"7f3a", b"the secret", fingerprint, b"weight", b"aten", *program):
        assert secret not in seen
