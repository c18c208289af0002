"""Status in the terminal: found by address or run directory, and clear about what is wrong."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.events import FINISHED, STARTED, committed, joined, left, reported, run_reported

from w5xde_async import status
from w5xde_async.errors import ExitCode
from w5xde_async.net.tls import certificate_hash, own_certificate, server_context
from w5xde_async.telemetry.dashboard.server import Dashboard
from w5xde_async.telemetry.dashboard.view import View
from w5xde_async.telemetry.links import DashboardLink
from w5xde_async.telemetry.metrics import Metrics


@asynccontextmanager
async def served(**kwargs: object) -> AsyncIterator[tuple[Dashboard, View]]:
    view = View()
    for event in (
        STARTED, joined("a"), joined("b"), run_reported(leaves=8, leaves_in_vain=2), reported("a", 1.0, rtt_s=0.002),
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
        for part in ("digits: running, step 2 of 100 (2 %)", "20.0 % in vain", "name-a", "2 ms", "lost", "killed"):
            assert part in shown, part
        assert await run("--server", dashboard.address, "--json") == ExitCode.OK
        assert json.loads(capsys.readouterr().out)["run"]["run_name"] == "digits"


async def test_without_rich_it_is_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "rich.console", None)
    async with served() as (dashboard, _):
        assert await run("--server", f"127.0.0.1:{dashboard.port}") == ExitCode.OK
    out, err = capsys.readouterr()
    assert "name-a" in out
    assert "w5xde-async[dashboard]" in err


async def test_watching_ends_with_the_run(capsys: pytest.CaptureFixture[str]):
    async with served() as (dashboard, view):
        view(FINISHED)
        assert await run("--server", dashboard.address, "--watch", "--interval", "0.1") == ExitCode.OK
    assert "finished" in capsys.readouterr().out


async def test_the_run_directory_names_token_and_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def prepare() -> tuple[ssl.SSLContext, bytes]:
        files = own_certificate(tmp_path / "tls", "digits")
        assert files.cert is not None
        return server_context(files), certificate_hash(files.cert)

    context, certificate = await asyncio.get_running_loop().run_in_executor(None, prepare)
    async with served(token="hush", ssl=context) as (dashboard, _):
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
        (["--interval", "0"], ExitCode.USAGE, "--interval"),
        (["--quux"], ExitCode.USAGE, "--quux"),
    ):
        assert await run(*arguments) == code, arguments
        said = capsys.readouterr().err
        assert part in said
        assert len(said.splitlines()) == 1
