"""A cloud's notice that it takes the machine back, from metadata services that speak as they are documented to."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.metadata import KINDS, NAME, Metadata, event, metadata

from w5xde_async.errors import UsageError
from w5xde_async.settings import WorkerSettings, read
from w5xde_async.worker import notices
from w5xde_async.worker.notices import Amazon, Azure, Google, service_of, watch


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_notice_is_told_once(kind: str) -> None:
    """And not before it is there."""
    with metadata(kind) as cloud:
        service = service_of(f"{kind}={cloud.url}")
        assert service is not None
        assert await asyncio.to_thread(service.look) == ""
        told: list[str] = []
        service.every_s /= 1000
        watching = asyncio.create_task(watch(service, told.append))
        begun = len(cloud.asked)
        while len(cloud.asked) < begun + (1 if kind == "gcp" else 3):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not told
        cloud.announce()
        await asyncio.wait_for(watching, 5)  # of what Google says nothing would be heard for a minute otherwise
        assert len(told) == 1
        assert told[0].startswith({"aws": "EC2", "gcp": "Google", "azure": "Azure"}[kind])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_notice_that_was_there_before(kind: str) -> None:
    with metadata(kind) as cloud:
        cloud.announce()
        service = service_of(f"{kind}={cloud.url}")
        assert service is not None
        told: list[str] = []
        await asyncio.wait_for(watch(service, told.append), 5)
        assert told


def test_a_session_of_amazons_that_has_run_out_is_begun_anew() -> None:
    with metadata("aws") as cloud:
        service = Amazon(cloud.url)
        assert service.look() == service.look() == ""
        assert cloud.asked.count("PUT /latest/api/token") == 1
        cloud.tokens.clear()
        assert service.look() == ""
        assert cloud.asked.count("PUT /latest/api/token") == 2


def test_what_azure_announces_of_others_or_does_not_end_the_machine() -> None:
    with metadata("azure") as cloud:
        service = Azure(cloud.url)
        cloud.events += [event("Preempt", "vm-1"), event("Freeze", NAME), event("Terminate")]
        assert service.look() == ""
        cloud.events.append(event("Terminate", "vm-1", NAME))
        assert "Terminate" in service.look()


class Odd(Metadata):
    """Answers with this."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__("odd")
        self.status, self.text = status, text

    def answer(self, method: str, target: str, headers: object) -> tuple[int, str, dict[str, str]]:
        return self.status, self.text, {}


@pytest.mark.parametrize("kind", [Amazon, Google, Azure])
@pytest.mark.parametrize(("status", "text"), [(500, ""), (200, ""), (200, "[]"), (200, '{"Events": 3}'), (302, "x")])
def test_who_is_no_metadata_service_is_no_notice(
    kind: type[Amazon], status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.metadata.Metadata", lambda _: Odd(status, text))
    with metadata("odd") as cloud:
        try:
            assert kind(cloud.url).look() == ""
        except (ValueError, OSError):
            return
        assert (kind, json.loads(text)) == (Azure, {"Events": 3})


async def test_a_service_that_does_not_answer_is_said_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def briefly(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(notices.asyncio, "sleep", briefly)
    caplog.set_level(logging.WARNING)
    answers = [OSError("no route to host"), OSError("no route to host"), "", OSError("gone"), "it ends\x1b[2J"]

    class Faulty:
        every_s = 1.0

        def look(self) -> str:
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return answer

    told: list[str] = []
    await watch(Faulty(), told.append)
    assert told == ["it ends[2J"]
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition("=")[2] for line in said] == ["no route to host", "gone"]
    assert pauses == [5.0, 5.0, 1.0, 5.0]


NESTED = "[" * 100_000
ANSWERS = [
    "", "[]", "null", '"x"', "3", NESTED, "\x00\xff", '{"Events": null}', '{"Events": 3}', '{"Events": ["x"]}',
    '{"Events": [null]}', '{"Events": [{"EventType": ["Preempt"], "Resources": 5}]}',
    '{"Events": [{"EventType": "Preempt", "Resources": 5}]}',
    '{"Events": [{"EventType": "Preempt", "Resources": "vm"}]}',
    '{"action": []}', '{"action": null, "time": 7}', '{"time": "x"}', "<html>\n<h1>502</h1>\x1b[2J",
]  # fmt: skip


@pytest.mark.parametrize("kind", [Amazon, Google, Azure])
@pytest.mark.parametrize("text", ANSWERS)
async def test_a_strange_answer_is_no_notice_and_the_last_word_of_nobody(
    kind: type[Amazon], text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is answered once: the next answer is asked for, and heard."""
    caplog.set_level(logging.WARNING)
    answers = [(200, "name", {"metadata-flavor": "Google", "etag": "e"})] if kind is Azure else []
    answers += [(200, "token", {})] if kind is Amazon else []
    answers += [(200, text, {"metadata-flavor": "Google", "etag": "e"})] * 2
    notice = {Amazon: '{"action": "stop"}', Google: "TRUE", Azure: json.dumps({"Events": [event("Preempt", "name")]})}
    answers.append((200, notice[kind], {"metadata-flavor": "Google", "etag": "e"}))
    monkeypatch.setattr(notices, "_ask", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(notices, "_LEAST_S", 0.0)
    monkeypatch.setattr(notices, "_AGAIN_S", 0.0)
    service, told = kind(), list[str]()
    service.every_s = 0.0
    await asyncio.wait_for(watch(service, told.append), 5)
    assert len(told) == 1
    assert not answers
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_azure_does_not_say_of_whom() -> None:
    """Resources may be missing: who is asked is this machine's service."""
    with metadata("azure") as cloud:
        service = Azure(cloud.url)
        cloud.events.append({**event("Preempt"), "Resources": None})
        assert "Preempt" in service.look()


async def test_a_service_that_answers_at_once_is_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proxy does that knows nothing of ``wait_for_change``."""
    pauses, looks = list[float](), ["", "", "it ends"]

    async def briefly(seconds: float) -> None:
        pauses.append(seconds)

    class Quick:
        every_s = 0.0

        def look(self) -> str:
            return looks.pop(0)

    monkeypatch.setattr(notices.asyncio, "sleep", briefly)
    await watch(Quick(), list[str]().append)
    assert pauses == pytest.approx([1.0, 1.0], abs=0.2)


@pytest.mark.parametrize("where", ["head", "body"])
def test_an_answer_that_drips_has_an_end(where: str) -> None:
    """Each byte comes soon enough, and all of them never."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 99999\r\n\r\n" if where == "body" else b"X-")
                )
                while not stop.wait(0.01):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises((OSError, http.client.HTTPException)):
                notices._ask(f"http://127.0.0.1:{server.getsockname()[1]}", "/", headers={}, timeout_s=0.2)
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize(
    ("vendor", "tag", "kind"),
    [
        ("Amazon EC2", "", Amazon),
        ("Google", "", Google),
        ("Microsoft Corporation", "7783-7084-3265-9085-8269-3286-77", Azure),
        ("Microsoft Corporation", "Hyper-V at home", None),
        ("QEMU", "", None),
        (None, "", None),
    ],
)
def test_auto_asks_the_machine_whose_it_is(tmp_path: Path, vendor: str | None, tag: str, kind: type | None) -> None:
    if vendor is not None:
        (tmp_path / "sys_vendor").write_text(f"{vendor}\n")
        (tmp_path / "chassis_asset_tag").write_text(f"{tag}\n")
    found = service_of("auto", tmp_path)
    assert found is None if kind is None else type(found) is kind


@pytest.mark.parametrize(
    "told",
    [
        "off",
        "auto",
        "aws",
        "gcp=http://127.0.0.1:80",
        "oracle",
        "aws=",
        "auto=http://x",
        "gcp=http://h:99999",
        "aws=http://[::1",
    ],
)
def test_what_may_be_said(told: str) -> None:
    given = ["--server", "localhost", "--watch-preemption", told]
    if told not in ("off", "auto", "aws", "gcp=http://127.0.0.1:80"):
        with pytest.raises(UsageError, match="--watch-preemption"):
            read(WorkerSettings, given, prog="", environment={})
    else:
        assert read(WorkerSettings, given, prog="", environment={})[0].watch_preemption == told
