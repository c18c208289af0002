"""Status in the terminal: found by address or run directory, and clear about what is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import ssl
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.events import FINISHED, STARTED, committed, joined, left, reported, run_reported

from w5xde_async import status
from w5xde_async.errors import ExitCode, Unreachable, UsageError
from w5xde_async.net.tls import certificate_hash, own_certificate, server_context
from w5xde_async.telemetry.dashboard.server import Dashboard
from w5xde_async.telemetry.dashboard.view import View
from w5xde_async.telemetry.links import DashboardLink
from w5xde_async.telemetry.metrics import Metrics


@asynccontextmanager
async def served(**kwargs: object) -> AsyncIterator[tuple[Dashboard, View]]:
    view = View()
    for event in (
        STARTED, joined("a"), joined("b"), run_reported(leaves=8, leaves_in_vain=2, bad_samples=3, sample_bytes=2000),
        reported("a", 1.0, rtt_s=0.002, data_from="itself"),
        reported("b", 1.0, waits_for="step 3: name-a computes the last 2 leaves"), committed(2), left("b"),
    ):  # fmt: skip
        view(event)
    dashboard = Dashboard(view, Metrics(), host="127.0.0.1", port=0, **kwargs)  # type: ignore[arg-type]
    await dashboard.start()
    try:
        yield dashboard, view
    finally:
        await dashboard.aclose()


async def run(*arguments: str) -> int:
    return await asyncio.get_running_loop().run_in_executor(None, status.main, list(arguments))


async def test_the_run_as_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    async with served() as (dashboard, _):
        assert await run("--server", f"127.0.0.1:{dashboard.port}") == ExitCode.OK
        shown = capsys.readouterr().out
        for part in (
            "digits: running, step 2 of 100 (2 %)",
            "20.0 % wasted",
            "3 bad samples left out",
            "2 kB a sample",
            "itself",
            "name-a",
            "2 ms",
            "lost",
            "killed",
        ):
            assert part in shown, part
        assert await run("--server", dashboard.address, "--json") == ExitCode.OK
        assert json.loads(capsys.readouterr().out)["run"]["run_name"] == "digits"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
async def test_a_narrow_terminal_shows_fewer_columns_and_every_one_whole(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(status, "_WIDE", width)
    async with served() as (dashboard, _):
        assert await run("--server", f"127.0.0.1:{dashboard.port}") == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.lstrip().startswith("worker"))
    assert "…" not in "".join(lines)
    assert all(len(line) <= width for line in lines)
    for name in ("state", "busy", "leaves/s"):
        assert name in head
    missing = [name for name in status._COLUMNS if name not in head]
    assert (width < 160) == bool(missing)
    if missing:
        assert " ".join(lines[-2:]).replace("  ", " ").strip().endswith(", ".join(missing)) or width < 60


async def test_without_rich_it_is_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    async with served() as (dashboard, _):
        assert await run("--server", f"127.0.0.1:{dashboard.port}") == ExitCode.OK
    out, err = capsys.readouterr()
    assert "name-a" in out
    assert "w5xde-async[dashboard]" in err


async def test_a_terminal_that_can_replace_nothing_shows_one_after_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for kind, live in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", kind)
        assert status._Screen().live == live


@pytest.mark.parametrize("plain", [False, True])
async def test_what_the_terminals_encoding_has_not_is_replaced(plain: bool, monkeypatch: pytest.MonkeyPatch):
    if plain:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    async with served() as (dashboard, view):
        view(joined("c", name="工人-1"))
        assert await run("--server", dashboard.address) == ExitCode.OK
    sys.stdout.flush()
    assert b"??-1" in shown.getvalue()


async def followed(view: View) -> None:
    """Whoever followed the run goes, as nobody does in a program that ends: it is over."""
    view(FINISHED)
    for thread in threading.enumerate():
        if isinstance(thread, status._Following):
            await asyncio.to_thread(thread.join)


@pytest.mark.parametrize("how", [("--json",), (), ("--watch",)])
@pytest.mark.parametrize("plain", [False, True])
async def test_who_has_read_enough_is_no_fault(how: tuple[str, ...], plain: bool, monkeypatch: pytest.MonkeyPatch):
    if plain:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        async with served() as (dashboard, view):
            assert await run("--server", dashboard.address, *how) == ExitCode.OK
            await followed(view)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("how", [("--json",), (), ("--watch",)])
async def test_output_without_room_is_one_line(
    how: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    async with served() as (dashboard, view):
        with open("/dev/full", "w") as full:  # noqa: ASYNC230 - it is no file
            monkeypatch.setattr("sys.stdout", full)
            assert await run("--server", dashboard.address, *how) == ExitCode.ERROR
        await followed(view)
    assert capsys.readouterr().err.splitlines() == [
        "python -m w5xde_async.status: standard output cannot be written: No space left on device"
    ]


async def test_a_dashboard_that_many_look_at_says_so(capsys: pytest.CaptureFixture[str]):
    async with served() as (dashboard, _):
        dashboard.feed._max_viewers = 0
        assert await run("--server", dashboard.address, "--watch") == ExitCode.UNREACHABLE
    assert "(the dashboard says: too many viewers)" in capsys.readouterr().err


async def test_watching_ends_with_the_run(capsys: pytest.CaptureFixture[str]):
    async with served() as (dashboard, view):
        view(FINISHED)
        assert await run("--server", dashboard.address, "--watch", "--interval", "0.1") == ExitCode.OK
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize("outcome", ["finished", "stopped", "failed"])
async def test_watching_sees_the_end_of_a_dashboard_that_closes_at_once(
    outcome: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As a coordinator does it: milliseconds after the end of the run nobody answers any more."""
    monkeypatch.setattr(status, "_PATIENCE_S", 0.1)
    monkeypatch.setenv("COLUMNS", "200")
    async with served(token="hush") as (dashboard, view):
        monkeypatch.setenv("W5XDE_DASHBOARD_LINK", dashboard.link)
        watching = asyncio.create_task(run("--watch", "--interval", "1h"))
        while not dashboard.feed.num_viewers:
            assert await asyncio.wait_for(_healthy(dashboard), 5)
        view(joined("late"))
        dashboard.feed.flush()
        view(left("late"))
        view(replace(FINISHED, outcome=outcome))
        await dashboard.aclose()
        assert await watching == ExitCode.OK, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert f"digits: {outcome}, step 2 of 100" in shown
    assert "name-late" in shown


async def _healthy(dashboard: Dashboard) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
    writer.write(f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{dashboard.port}\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return b"ok" in answer


async def test_watching_a_coordinator_that_is_killed_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(status, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(status, "_AGAIN_S", 0.01)
    async with served() as (dashboard, _):
        watching = asyncio.create_task(run("--server", dashboard.address, "--watch", "--interval", "0.1"))
        while not dashboard.feed.num_viewers:
            assert await asyncio.wait_for(_healthy(dashboard), 5)
        await dashboard.aclose()
        assert await watching == ExitCode.UNREACHABLE
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_watching_says_how_long_it_has_tried(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]

    def events() -> Iterator[tuple[str, dict[str, object]]]:
        if now[0] == 100.0:
            yield "snapshot", {"run": {}, "status": {}, "workers": []}
        now[0] += 1.5
        raise Unreachable("127.0.0.1:5556", "Connection refused", 5.0)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    following = status._Following(SimpleNamespace(events=events))  # type: ignore[arg-type]
    following.run()
    assert str(following.error).startswith(
        "no coordinator reachable at 127.0.0.1:5556 within 16 s (Connection refused)"
    )


@pytest.mark.parametrize("how", [(), ("--json",), ("--watch", "--interval", "0.1")])
async def test_another_run_at_the_address_of_one_that_was_killed(
    how: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A kill leaves the file that names the dashboard, and the port is free for the next run."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "killed"
    directory.mkdir(parents=True)
    async with served() as (dashboard, view):
        (directory / "dashboard").write_text(DashboardLink(dashboard.link).line() + "\n")
        view(FINISHED)
        for where in (("--run-dir", str(directory)), ()):
            (directory / "run.json").write_text('{"run_id": "another", "term": 1}\n')
            assert await run(*where, *how) == ExitCode.UNREACHABLE
            out, err = capsys.readouterr()
            assert out == ""
            assert "killed is not running: another run, digits, answers at its address" in err
            assert len(err.splitlines()) == 1
            (directory / "run.json").write_text('{"run_id": "r1", "term": 7}\n')
            assert await run(*where, *how) == ExitCode.OK
            found = await asyncio.to_thread(status._of_run, directory)
            found._run_id = "before"  # the run there has begun anew meanwhile
            assert (await asyncio.to_thread(found.read))["run"]["run_id"] == "r1"
            (directory / "run.json").write_text("[" * 100_000)  # nothing to compare with
            assert await run(*where, *how) == ExitCode.OK
            (directory / "run.json").unlink()
            assert await run(*where, *how) == ExitCode.OK
            capsys.readouterr()


@pytest.mark.parametrize("written", ["nonsense", "http://", "http://bad_host-:x/", "ftp://127.0.0.1:1"])
def test_a_damaged_link_of_a_run_is_named_by_its_file(written: str, tmp_path: Path):
    (tmp_path / "dashboard").write_text(written + "\n")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "dashboard"))) as caught:
        status._of_run(tmp_path)
    assert "--server" not in str(caught.value)


def test_an_update_is_folded_into_what_was_known():
    view = View()
    for event in (STARTED, joined("a"), joined("b"), committed(1)):
        view(event)
    view.update()
    known = status._folded(None, "snapshot", view.snapshot())
    for event in (left("b"), joined("c", name="name-b"), reported("a", 1.0, leaves=9), committed(2)):
        view(event)
    update = view.update()
    assert update is not None
    known = status._folded(known, "update", update)
    assert known["status"]["step"] == 2
    assert known["run"]["run_name"] == "digits"
    assert [(worker["worker_id"], worker.get("leaves")) for worker in known["workers"]] == [("a", 9), ("c", None)]


def test_a_worker_that_was_forgotten_and_is_back_is_shown():
    view = View()
    view(STARTED)
    for name in "abcdefg":
        view(joined(name))
    view.update()
    known = status._folded(None, "snapshot", view.snapshot())
    for number in range(40):  # more than are remembered
        view(joined(str(number)))
        view(left(str(number)))
    view(left("a"))
    for number in range(40):
        view(joined(f"more {number}"))
        view(left(f"more {number}"))
    view(joined("a"))
    update = view.update()
    assert update is not None
    assert "a" in update["removed"]
    shown = {worker["worker_id"] for worker in status._folded(known, "update", update)["workers"]}
    assert shown == {worker["worker_id"] for worker in view.workers()}
    assert "a" in shown


def test_a_run_that_ends_just_now_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    there, ends = Path("runs/one/dashboard"), Path("runs/ends/dashboard")
    there.parent.mkdir(parents=True)
    there.write_text("http://127.0.0.1:1/\n")
    monkeypatch.setattr(Path, "glob", lambda place, pattern: iter([ends, there]))
    assert status._of_run(None)._run_dir == there.parent


@pytest.mark.parametrize("answer", [b"\x00\x00\x00\x40\x93\xc4\xff\x1b[2J\xe9\n" * 20, b""])
async def test_the_port_of_the_workers_is_no_dashboard(answer: bytes, capsys: pytest.CaptureFixture[str]):
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answering, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        code = await run("--server", f"127.0.0.1:{port}")
    said = capsys.readouterr().err
    assert "perhaps that is the workers' port" in said
    assert f"127.0.0.1:{port}" in said
    assert said.isascii()
    assert said.rstrip("\n").isprintable()
    assert code == (ExitCode.USAGE if answer else ExitCode.UNREACHABLE)


@pytest.mark.parametrize(("scheme", "did"), [("http", "hung up"), ("https", "hung up"), ("https", "speak TLS")])
@pytest.mark.parametrize("how", [(), ("--watch",)])
async def test_a_reset_by_what_is_no_dashboard_is_no_matter_of_firewalls(
    scheme: str, did: str, how: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """As the workers' port gives it, when it has not read all that it was sent."""

    async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if did == "hung up":
            reset = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        else:
            writer.write(b"\x00\x00\x00\x40\x93\xc4")
        writer.close()

    server = await asyncio.start_server(resetting, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        code = await run("--server", f"{scheme}://127.0.0.1:{port}", *how)
    said = capsys.readouterr().err
    assert code == ExitCode.UNREACHABLE
    assert re.search(rf"what listens at 127.0.0.1:{port} .*{did}.* is no dashboard .* --run-dir DIR finds it", said)
    assert "firewall" not in said
    assert len(said.splitlines()) == 1


@asynccontextmanager
async def secured(tmp_path: Path) -> AsyncIterator[tuple[Dashboard, bytes]]:
    """A dashboard with a token and a certificate of its own, and its hash."""

    def prepare() -> tuple[ssl.SSLContext, bytes]:
        files = own_certificate(tmp_path / "tls", "digits")
        assert files.cert is not None
        return server_context(files), certificate_hash(files.cert)

    context, certificate = await asyncio.get_running_loop().run_in_executor(None, prepare)
    async with served(token="hush", ssl=context) as (dashboard, _):
        yield dashboard, certificate


async def test_the_run_directory_names_token_and_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async with secured(tmp_path) as (dashboard, certificate):
        file = tmp_path / "dashboard"
        file.write_text(DashboardLink(dashboard.link, certificate).line() + "\n")
        assert await run("--run-dir", str(tmp_path)) == ExitCode.OK, capsys.readouterr().err
        file.write_text(DashboardLink(dashboard.link, bytes(32)).line())
        assert await run("--run-dir", str(tmp_path)) == ExitCode.AUTHENTICATION  # somebody sits between
        file.write_text(DashboardLink(dashboard.address, certificate).line())
        assert await run("--run-dir", str(tmp_path)) == ExitCode.AUTHENTICATION
        file.write_text(DashboardLink(dashboard.link).line())
        assert await run("--run-dir", str(tmp_path)) == ExitCode.AUTHENTICATION  # self-signed, and not vouched for
    assert "hush" not in "".join(capsys.readouterr())


async def test_the_printed_link_is_all_that_another_machine_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    async with secured(tmp_path) as (dashboard, certificate):
        link, here = DashboardLink(dashboard.link, certificate).line(), f"127.0.0.1:{dashboard.port}"
        monkeypatch.setenv("W5XDE_DASHBOARD_LINK", link)
        assert await run() == ExitCode.OK, capsys.readouterr().err
        assert await run("--server", here) == ExitCode.OK, capsys.readouterr().err
        assert await run("--server", f"http://{here}/") == ExitCode.OK, capsys.readouterr().err
        monkeypatch.setenv("W5XDE_DASHBOARD_LINK", link.replace(str(dashboard.port), "1", 1))  # as the other end has it
        assert await run("--server", here) == ExitCode.OK, capsys.readouterr().err
        monkeypatch.setenv("W5XDE_DASHBOARD_LINK", DashboardLink(dashboard.link, bytes(32)).line())
        assert await run("--server", here) == ExitCode.AUTHENTICATION  # somebody sits between
        monkeypatch.setenv("W5XDE_DASHBOARD_LINK", dashboard.link)
        assert await run("--server", here) == ExitCode.AUTHENTICATION
        assert "W5XDE_DASHBOARD_LINK" in capsys.readouterr().err
        for wrong in (
            "x",
            f"{dashboard.link}&sha256=ab",
            f"{dashboard.link}&sha256=xy",
            f"{link} {link}",
            "http://[::1",
        ):
            monkeypatch.setenv("W5XDE_DASHBOARD_LINK", wrong)
            assert await run() == ExitCode.USAGE, wrong
            assert "W5XDE_DASHBOARD_LINK" in capsys.readouterr().err
        monkeypatch.delenv("W5XDE_DASHBOARD_LINK")
        assert await run("--server", here) == ExitCode.UNREACHABLE
        assert "or it speaks TLS: then set W5XDE_DASHBOARD_LINK" in capsys.readouterr().err


async def test_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
):
    monkeypatch.chdir(tmp_path)
    for arguments, code, part in (
        (["--server", f"127.0.0.1:{unused_tcp_port}"], ExitCode.UNREACHABLE, "127.0.0.1"),
        (["--server", "http://127.0.0.1:1/?token=x"], ExitCode.USAGE, "W5XDE_DASHBOARD_LINK"),
        (["--server", "ftp://x"], ExitCode.USAGE, "no address"),
        (["--run-dir", str(tmp_path)], ExitCode.USAGE, "no dashboard"),
        ([], ExitCode.USAGE, "--run-dir"),
        (["--run-dir", str(tmp_path / "nope")], ExitCode.USAGE, "there is no directory"),
        (["--interval", "0"], ExitCode.USAGE, "--interval: '0' will not do; give a time from 0.1s to 1h"),
        (["--interval"], ExitCode.USAGE, "status: --interval: expected one argument"),
        (["--json=yes"], ExitCode.USAGE, "--json takes no value"),
        (["--quux"], ExitCode.USAGE, "--quux"),
        (["--json", "--watch"], ExitCode.USAGE, "leave out --watch"),
    ):
        assert await run(*arguments) == code, arguments
        said = capsys.readouterr().err
        assert part in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "server", ["a..b", "x_y%z", "h" * 300, "1.2.3.4.5", "[::1", "http://[::1", "a:99999", "\u2100:1"]
)
def test_an_address_that_is_none_is_said_in_a_line(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--server", server]) == ExitCode.USAGE
    assert "--server" in capsys.readouterr().err


@asynccontextmanager
async def answering(answer: bytes, *, drip_s: float | None = None) -> AsyncIterator[int]:
    """A server of another kind, which says the same to everybody; the port. ``drip_s``: and then a byte now and then,
    without end."""

    over, handlers = asyncio.Event(), []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        try:
            while await reader.readline() != b"\r\n":
                pass
            writer.write(answer)
            await writer.drain()
            while drip_s is not None and not over.is_set():
                await asyncio.sleep(drip_s)
                writer.write(b" ")
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        over.set()
        await asyncio.gather(*handlers)


@pytest.mark.parametrize(
    "body",
    ["null", "[]", "{}", '"run"', "7", "<!doctype html><title>hello</title>", "[" * 100_000, "", "{"],
    ids=["null", "list", "empty", "text", "number", "html", "nested", "nothing", "half"],
)
@pytest.mark.parametrize("how", [[], ["--json"]], ids=["table", "json"])
async def test_an_answer_that_is_no_dashboards_is_said_in_a_line(
    body: str, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    async with answering(answer) as port:
        code = await run("--server", f"127.0.0.1:{port}", *how)
    out, err = capsys.readouterr()
    assert f"what listens at 127.0.0.1:{port} is no dashboard" in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert code == ExitCode.USAGE


@pytest.mark.parametrize(
    "found",
    [
        {"run": {}, "status": {}, "workers": []},
        {"run": [], "status": {"state": "running"}, "workers": []},
        {"run": {}, "status": {"state": "running"}, "workers": [{"name": "a"}]},
        {"run": {}, "status": {"state": "running"}, "workers": ["a"]},
        {"run": {}, "status": {"state": "running"}, "workers": [{"worker_id": ["a"]}]},
        {"run": {}, "status": {"state": "running", "step": "x"}, "workers": []},
        {"run": {}, "status": {"state": "running", "step": [1]}, "workers": []},
        {"run": {}, "status": {"state": "running", "loss": {}}, "workers": []},
        {"run": {}, "status": {"state": "running", "uptime_s": 10**400}, "workers": []},
        {"run": {}, "status": {"state": "running", "uptime_s": "nan"}, "workers": []},
        {"run": {}, "status": {"state": "running"}, "workers": [{"worker_id": "a", "busy": "much"}]},
        {"run": {}, "status": {"state": "running"}, "workers": [], "removed": 7},
    ],
)
def test_what_lacks_what_is_shown_is_no_dashboards(found: dict[str, object]) -> None:
    with pytest.raises(status._NoDashboard):
        status._checked(found)
    assert status._checked({"run": {}, "status": {"state": "running"}, "workers": [{"worker_id": "a"}]})
    odd = {"state": "running", "step": 1, "loss": "nan", "samples_per_s": None}
    assert status._checked({"run": {}, "status": odd, "workers": [{"worker_id": "a", "rtt_s": 0.5}], "removed": ["b"]})


async def test_a_watched_server_that_is_no_dashboard_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for data in ("null", '{"run": 1, "status": 2, "workers": 3}', "{}", "[" * 100_000):
        for kind in ("snapshot", "update"):
            head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
            async with answering(f"{head}event: {kind}\ndata: {data}\n\n".encode()) as port:
                assert await run("--server", f"127.0.0.1:{port}", "--watch") == ExitCode.USAGE
            err = capsys.readouterr().err
            assert "is no dashboard" in err
            assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "begun", ["HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"], ids=["head", "body"]
)
async def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for(
    begun: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_ANSWERED_S", 0.2)
    async with answering(begun.encode(), drip_s=0.02) as port:
        assert await run("--server", f"127.0.0.1:{port}") == ExitCode.UNREACHABLE
    assert "no whole answer" in capsys.readouterr().err


async def test_a_server_that_denies_without_a_word_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with answering(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n") as port:
        assert await run("--server", f"127.0.0.1:{port}") == ExitCode.AUTHENTICATION
    assert "the dashboard says: 401 Unauthorized" in capsys.readouterr().err
