"""Take the pictures in docs/images from a live run: three workers, one of which is killed and comes back.

    python docs/screenshots.py

Needs chromium and playwright; takes about a minute. The pictures are committed: take them anew when a page changes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
JOB = "examples/digits.py:cnn"
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
DESKTOP, PHONE = (1280, 860), (390, 844)
#: file, page, size, colours
PICTURES = (
    ("dashboard-light.png", "status", DESKTOP, "light"),
    ("dashboard-dark.png", "status", DESKTOP, "dark"),
    ("dashboard-phone.png", "status", PHONE, "light"),
    ("workers-light.png", "workers", (1280, 480), "light"),
    ("timeline-dark.png", "timeline", (1280, 530), "dark"),
    ("workers-phone.png", "workers", PHONE, "dark"),
)


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("W5XDE_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


class Steps:
    """The steps that the coordinator tells, read by a thread of its own."""

    def __init__(self, stream: IO[str]) -> None:
        self.newest = 0
        self._stream = stream
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            self.newest = max(self.newest, json.loads(line).get("step", 0))

    def wait(self, step: int) -> None:
        """Until that step is done, but not for ever."""
        for _ in range(600):
            if self.newest >= step:
                return
            time.sleep(0.2)


def main() -> None:
    from playwright.sync_api import sync_playwright

    processes: list[subprocess.Popen[str]] = []
    folder = Path(tempfile.mkdtemp(prefix="screenshots-"))
    try:
        coordinator = start(
            "w5xde_async.coordinator", JOB, "--name", "digits-cnn", "--run-dir", str(folder / "digits-cnn"),
            "--port", "0", "--dashboard-address", "127.0.0.1:0", "--epochs", "2000", "--checkpoint-every", "40",
            "--min-workers", "3", "--silence", "4", "--heartbeat", "1", "--log-format", "json", "--log", "verbose",
            "--threads", "1",
        )  # fmt: skip
        processes.append(coordinator)
        assert coordinator.stderr is not None
        told: dict[str, Any] = {}
        while told.get("event") != "run_started":
            told = json.loads(coordinator.stderr.readline())
        steps = Steps(coordinator.stderr)

        def worker(name: str) -> subprocess.Popen[str]:
            found = start(
                "w5xde_async.worker", "--server", told["address"], "--job", JOB, "--name", name, "--threads", "1",
                "--log", "silent",
            )  # fmt: skip
            processes.append(found)
            return found

        for name in ("lab-1", "lab-2"):
            worker(name)
        laptop = worker("laptop")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(told["dashboard"] + "#workers")
            page.locator("#workers .badge.good").nth(2).wait_for(timeout=90_000)
            steps.wait(150)
            laptop.kill()
            page.locator("#workers tr", has_text="laptop").locator(".badge.bad").wait_for(timeout=60_000)
            steps.wait(steps.newest + 100)
            worker("laptop")
            page.locator("#workers tr", has_text="laptop").locator(".badge.good").wait_for(timeout=90_000)
            steps.wait(steps.newest + 150)
            page.close()
            IMAGES.mkdir(exist_ok=True)
            for file, name, (width, height), scheme in PICTURES:
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.goto(f"{told['dashboard']}#{name}")
                page.locator("#state", has_text="running").wait_for()
                time.sleep(1.5)
                page.screenshot(path=IMAGES / file)
                context.close()
                print(f"wrote {IMAGES / file}")
            browser.close()
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
