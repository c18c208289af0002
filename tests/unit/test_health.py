"""A container's health check, on dashboards that speak plainly and by TLS, and the Dockerfile that names it."""

from __future__ import annotations

import json
import re
import socket
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from w5xde_async.launch import health
from w5xde_async.telemetry.links import LINK_FILE, DashboardLink

ROOT = Path(__file__).parents[2]


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" and not getattr(self.server, "ill", False) else 500)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


def of_coordinator(folder: Path, *options: str) -> Path:
    first = folder / "cmdline"
    words = ("/opt/w5xde/bin/python", "/opt/w5xde/bin/w5xde", "coordinator", "train.py:job", *options)
    first.write_bytes(b"".join(word.encode() + b"\0" for word in words))
    return first


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("ill", [False, True])
def test_a_coordinator_is_well_while_its_dashboard_answers(secure: bool, ill: bool, tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        server.ill = ill  # type: ignore[attr-defined]
        if secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            trustme.CA().issue_cert("elsewhere.example").configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            first = of_coordinator(tmp_path, "--dashboard-address", f"0.0.0.0:{server.server_address[1]}")
            assert health.main(first, {}) == int(ill)
            first, variable = of_coordinator(tmp_path), f"127.0.0.1:{server.server_address[1]}"
            assert health.main(first, {"W5XDE_DASHBOARD_ADDRESS": variable}) == int(ill)
        finally:
            server.shutdown()
            serving.join()


def test_a_coordinator_without_an_answer_and_a_worker_without_a_dashboard(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        at = ("--dashboard-address", f"127.0.0.1:{port}")
        assert health.main(of_coordinator(tmp_path, *at), {}) == 1
        assert health.main(of_coordinator(tmp_path, *at, "--no-dashboard"), {}) == 0
        assert health.main(of_coordinator(tmp_path, "--dashboard-address", "127.0.0.1:0"), {}) == 0
        (tmp_path / "cmdline").write_bytes(b"w5xde\0worker\0")
        assert health.main(tmp_path / "cmdline") == 0


@pytest.mark.parametrize(
    "words",
    [
        ("w5xde", "coordinator"),
        ("python", "/opt/w5xde/bin/w5xde", "coordinator"),
        ("/usr/bin/tini", "--", "w5xde", "coordinator"),
        ("sudo", "-u", "w5xde", "w5xde", "coordinator"),
        ("python", "-m", "w5xde_async", "coordinator"),
        ("python", "-m", "w5xde_async.coordinator"),
    ],
)
def test_a_coordinator_is_known_however_it_was_started(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(health, "answers", lambda port, host: asked.append((host, port)))
    first = tmp_path / "cmdline"
    given = (*words, "train.py:job", "--dashboard-address", "127.0.0.1:77")
    first.write_bytes(b"".join(word.encode() + b"\0" for word in given))
    assert health.main(first, {}) == 1
    assert asked == [("127.0.0.1", 77)]


@pytest.mark.parametrize("program", [("/opt/w5xde/bin/w5xde",), ("-m", "w5xde_async")])
@pytest.mark.parametrize(
    "words", [("--server", "coordinator", "--job", "w5xde"), ("--name", "coordinator", "--join-file", "join")]
)
def test_a_worker_may_have_a_word_of_the_coordinators(
    program: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "answers", lambda *_: False)
    first = tmp_path / "cmdline"
    for role, code in (("worker", 0), ("coordinator", 1)):
        first.write_bytes("\0".join(("/usr/bin/python", *program, role, *words, "")).encode())
        assert health.main(first, {}) == code


def test_a_dashboard_is_asked_where_it_is_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port was another program's, or any would do."""
    asked: list[tuple[int, str]] = []

    def answers(port: int, host: str) -> bool:
        asked.append((port, host))
        return port == 4711

    monkeypatch.setattr(health, "answers", answers)
    options = ("--run-dir", str(tmp_path / "run"), "--dashboard-address")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LINK_FILE).write_text(DashboardLink("https://10.0.0.7:4711/?token=x", bytes(32)).line())
    for address in ("0.0.0.0:5556", "0.0.0.0:0"):
        assert health.main(of_coordinator(tmp_path, *options, address), {}) == 0
    assert asked == [(4711, "127.0.0.1")] * 2
    (tmp_path / "run" / LINK_FILE).write_text("no link")
    assert health.main(of_coordinator(tmp_path, *options, "0.0.0.0:5556"), {}) == 1
    assert asked[-1] == (5556, "127.0.0.1")


def test_a_coordinator_that_can_have_no_dashboard_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "answers", lambda *_: False)
    monkeypatch.setitem(sys.modules, "w5xde_async.telemetry.dashboard.server", None)
    assert health.main(of_coordinator(tmp_path), {}) == 0


def test_the_dockerfile_says_what_the_documents_say_of_it() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    said = dict(re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE))
    assert said["USER"] == "1000:1000"
    assert json.loads(said["ENTRYPOINT"]) == ["w5xde"]  # without a shell, which would keep SIGTERM for itself
    assert said["HEALTHCHECK"].endswith('CMD ["python", "-m", "w5xde_async.launch.health"]')
    assert said["STOPSIGNAL"] == "SIGTERM"
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name
