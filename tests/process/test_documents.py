"""Commands of the documents that need other machines, played on this one: every process that the page starts, for real.

Blocks ```` ```sh ```` that are not marked ``run`` (those: tests/meta/test_docs_commands.py) are taken in order. What
names another machine names this one here, ports are free ones, ``scp`` copies, and the job is a small one; the rest is
what stands there. A coordinator without workers of its own goes on in the background, as do workers and services, and
everything has to end with 0.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from tests.meta.test_docs import ROOT, environment, write_files
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(150)]

_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
JOB = ROOT / "docs" / "resume.md"  # its train.py has 80 steps of a linear model
PATIENCE_S = 100.0


class Stage:
    """One directory for all machines of a page."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.page_port = folder, free_port(), free_port()
        self.behind: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.environment = environment()

    def start(self, command: str) -> subprocess.Popen[bytes]:
        out = (self.folder / f"out-{len(self.behind)}").open("wb")
        process = subprocess.Popen(
            shlex.split(command), cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        out.close()
        self.behind.append((command, process))
        return process

    def finish(self, number: int) -> None:
        command, process = self.behind[number]
        assert process.wait(PATIENCE_S) == 0, f"{command}\n{(self.folder / f'out-{number}').read_text()[-3000:]}"

    def finish_all(self) -> None:
        for number in range(len(self.behind)):
            self.finish(number)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not holds():
            outputs = "\n".join((self.folder / f"out-{n}").read_text()[-2000:] for n in range(len(self.behind)))
            assert time.monotonic() < limit, f"{what}\n{outputs}"
            time.sleep(0.05)

    def play(self, page: str) -> None:
        """Every command of the page's blocks."""
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        blocks = "".join(_BLOCK.findall(text))
        assert blocks, f"{page} has no such block"
        local = {"train.example.org:5555": f"127.0.0.1:{self.port}", "train.example.org": "127.0.0.1"}
        for there, here in local.items():
            blocks = blocks.replace(there, here)
        for line in blocks.strip().splitlines():
            self._command(line)
        self.finish_all()

    def _command(self, line: str) -> None:
        words = shlex.split(line)
        if words[0] == "scp":
            source = self.folder / words[1].partition(":")[2]
            self.until(lambda: source.is_file() and source.stat().st_size > 0, f"{source} is not there")
            shutil.copy(source, self.folder / words[2])
        elif words[0] == "chmod":
            subprocess.run(words, cwd=self.folder, check=True)
        elif words[:3] == ["python", "-m", "w5xde_async.coordinator"]:
            if "--port" not in words:
                line += f" --port {self.port}"
            self.start(line)
            if "--workers" in words:
                self.finish(len(self.behind) - 1)
        elif words[:2] == ["w5xde", "predict"]:
            self.start(line.replace("w5xde predict", "python -m w5xde_async.predict"))
            self.finish(len(self.behind) - 1)
        else:
            assert words[:3] == ["python", "-m", "w5xde_async.worker"], line
            if "--join-file" in words:
                path = self.folder / words[words.index("--join-file") + 1]
                self.until(lambda: path.is_file() and path.stat().st_size > 0, f"{path} is not there")
            self.start(line)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    write_files(JOB, tmp_path)
    made = Stage(tmp_path)
    yield made
    for _, process in made.behind:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_own_model(stage: Stage) -> None:
    stage.play("own-model.md")


def test_operations(stage: Stage) -> None:
    stage.play("operations.md")


def test_several_machines(stage: Stage) -> None:
    stage.play("several-machines.md")


def test_spot_machines(stage: Stage) -> None:
    """The page tells of workers first: the coordinator that they join is the page's last command, started before."""
    text = (ROOT / "docs" / "spot-machines.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -m w5xde_async\.coordinator .*$", text, re.MULTILINE)
    coordinator = stage.start(f"{command} --port {stage.port} --min-workers 2")
    path = stage.folder / "runs" / "train" / "join"
    stage.until(lambda: path.is_file() and path.stat().st_size > 0, "no join file")
    shutil.copy(path, stage.folder / "join")
    for line in re.findall(r"^python -m w5xde_async\.worker .*$", text, re.MULTILINE):
        stage.start(line)
    stage.finish_all()
    assert coordinator.returncode == 0


def test_resume(stage: Stage) -> None:
    stage.start("python -m w5xde_async.coordinator train.py:job --workers 1 --port 0 --checkpoint-every 40")
    stage.finish(0)
    stage.play("resume.md")


def test_secure(stage: Stage) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(stage.folder / "ca.pem"))
    server.private_key_pem.write_to_path(str(stage.folder / "key.pem"))
    for number, part in enumerate(server.cert_chain_pems):
        part.write_to_path(str(stage.folder / "cert.pem"), append=number > 0)
    (stage.folder / "key.pem").chmod(0o600)
    (stage.folder / "token").write_text("a long and random one of this test\n")
    (stage.folder / "token").chmod(0o600)
    stage.play("secure.md")


def test_dashboard(stage: Stage) -> None:
    """The table of a run that goes on."""
    coordinator = stage.start(
        f"python -m w5xde_async.coordinator train.py:job --workers 1 --port {stage.port} --epochs 1000000 --dashboard-"
        "address 127.0.0.1:0"
    )
    (line,) = "".join(_BLOCK.findall((ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8"))).strip().splitlines()
    stage.until(lambda: re.search(r"step [1-9]\d*/", (stage.folder / "out-0").read_text()) is not None, "no step")
    shown = subprocess.run(
        shlex.split(line),
        cwd=stage.folder,
        env=stage.environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "local-0" in shown.stdout
    coordinator.send_signal(signal.SIGINT)
    coordinator.wait(PATIENCE_S)


def test_fastapi(stage: Stage) -> None:
    write_files(ROOT / "docs" / "fastapi.md", stage.folder)
    service = stage.folder / "app.py"
    text = service.read_text(encoding="utf-8")
    assert "port=5555" in text
    service.write_text(text.replace("port=5555", "port=0"), encoding="utf-8")
    (line,) = "".join(_BLOCK.findall((ROOT / "docs" / "fastapi.md").read_text(encoding="utf-8"))).strip().splitlines()
    assert "--port 8000" in line
    process = stage.start(line.replace("--port 8000", f"--port {stage.page_port}"))
    link = f"http://127.0.0.1:{stage.page_port}/training"
    answers: list[dict[str, int]] = []

    def stepped() -> bool:  # before the first step there is nothing to save
        with contextlib.suppress(OSError), urllib.request.urlopen(link) as page:
            answers.append(json.load(page))
        return bool(answers) and answers[-1]["step"] > 0

    stage.until(stepped, "the service does not answer")
    assert set(answers[-1]) == {"step", "workers"}
    with urllib.request.urlopen(f"{link}/stop", data=b"") as page:
        assert json.load(page)["step"] >= answers[-1]["step"]
    assert (stage.folder / "runs" / "served" / "checkpoints").is_dir()
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)
