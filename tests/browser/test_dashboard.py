"""The dashboard in a real browser: on a real run, where somebody joins late and watches a worker go and come back, and
on values that are out of the common."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.events import STARTED, committed
from tests.support.processes import Program, programs

from w5xde_async.telemetry.dashboard.server import Dashboard
from w5xde_async.telemetry.dashboard.view import View
from w5xde_async.telemetry.metrics import Metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"

#: WCAG contrast of every visible text against what lies behind it; those below 4.5 (3 for large text).
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const linear = (v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map(linear);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length && (color.length < 4 || color[3] > 0.99)) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.offsetParent || node.closest(".hidden, [hidden]")) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(parse(style.color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), large = parseFloat(style.fontSize) >= 24;
    const named = `${node.tagName} ${node.textContent.trim().slice(0, 30)}`;
    if (ratio < (large ? 3 : 4.5)) poor.push(`${named} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
#: Controls and pictures without a name.
NAMELESS = """() => [...document.querySelectorAll("button, a, input, canvas, meter, progress, [role=img]")]
  .filter((node) => !node.matches("[role=img] canvas"))
  .filter((node) => !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length))
  .map((node) => node.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not os.path.exists(CHROMIUM):
        excused = os.environ.get("NO_CHROMIUM", "")  # .ci/run's: why it could not be installed
        if os.environ.get("CI") and not excused:
            pytest.fail("chromium is not installed (apt-get install chromium), and NO_CHROMIUM does not say why")
        pytest.skip(excused or "chromium is not installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


PROGRAM = "tests/support/jobs.py:mlp_sgd"


@pytest.mark.allow_leaks  # the browser's driver
def test_late_viewer_sees_a_worker_leave_and_come_back(browser: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    with programs() as start:
        coordinator: Program = start(
            "w5xde_async.coordinator", PROGRAM, "--run-dir", str(tmp_path / "run"), "--port", "0",
            "--dashboard", "--dashboard-address", "127.0.0.1:0", "--max-steps", "100000", "--log-format", "json",
            "--min-workers", "2", "--silence", "4", "--heartbeat", "1",
        )  # fmt: skip
        started = coordinator.wait_for("run_started")

        def worker(name: str) -> Program:
            found: Program = start(
                "w5xde_async.worker", "--server", started["address"], "--job", PROGRAM, "--name", name,
                "--threads", "1", leaf_s=0.02,
            )  # fmt: skip
            return found

        first = worker("first")
        second = worker("second")
        coordinator.wait_for("step_committed", step=10)

        trouble: list[str] = []
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.on(
            "console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(started["dashboard"])  # late: ten steps have been
        expect(page.locator("#state")).to_have_text("running")
        loss = page.locator("#tiles div", has_text="Loss").first.locator("dd")
        before = re.compile(re.escape(loss.inner_text()))
        expect(loss).not_to_have_text(before)
        assert page.locator("#chart-loss canvas").count() == 1

        page.keyboard.press("2")
        row = page.locator("#workers tbody tr", has_text="second")
        expect(page.locator("#workers .badge.good")).to_have_count(2)
        second.signal(signal.SIGKILL)
        row.locator(".badge", has_text="lost").wait_for(timeout=20_000)
        assert page.locator("#workers .badge.good").count() == 1
        worker("second")
        row.locator(".badge.good").wait_for(timeout=40_000)
        expect(row).to_have_count(1)  # the same row; another may wait for it for a moment, and name it

        page.keyboard.press("3")
        expect(page.locator("#timeline canvas")).to_have_count(2)
        assert "computing" in page.locator("#timeline canvas").first.get_attribute("aria-label")

        for theme in ("light", "dark"):
            page.evaluate(
                "theme => document.documentElement.dataset.theme !== theme && document.querySelector('#theme').click()",
                theme,
            )
            for name in ("status", "workers", "timeline", "checkpoints", "config", "logs"):
                page.evaluate("name => { location.hash = name }", name)
                expect(page.locator(f"#page-{name}")).to_be_visible()
                page.wait_for_timeout(100)
                assert page.evaluate(CONTRAST) == [], (theme, name)
                assert page.evaluate(NAMELESS) == [], (theme, name)
        page.set_viewport_size({"width": 390, "height": 844})
        for name in ("status", "workers", "logs"):
            page.evaluate("name => { location.hash = name }", name)
            page.wait_for_timeout(100)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than a phone"
        page.reload()
        expect(page.locator("#state")).to_have_text("running")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        assert trouble == []

        coordinator.signal(signal.SIGTERM)
        expect(page.locator("#live")).to_have_text(re.compile("ended|not connected"), timeout=20_000)
        assert coordinator.finish() == 0
        first.signal(signal.SIGTERM)
        page.close()


@contextmanager
def shown(view: View) -> Iterator[str]:
    """A dashboard of ``view`` in a thread of its own; its address."""
    serving: Future[str] = Future()
    over: list[Callable[[], object]] = []

    async def serve() -> None:
        ends, dashboard = asyncio.Event(), Dashboard(view, Metrics(), host="127.0.0.1", port=0)
        await dashboard.start()
        over.append(partial(asyncio.get_running_loop().call_soon_threadsafe, ends.set))
        serving.set_result(dashboard.address)
        await ends.wait()
        await dashboard.aclose()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield serving.result(20.0)
    finally:
        over[0]()
        thread.join()


#: Whether the canvas of a chart has its line, which is of a color that the style sheet names.
HAS_LINE = """([id, name]) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  probe.fillRect(0, 0, 1, 1);
  const wanted = probe.getImageData(0, 0, 1, 1).data.join();
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) if (data.slice(at, at + 4).join() === wanted) return true;
  return false;
}"""
#: Keeps what is written on canvases.
KEEP_WRITTEN = """
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.written.push(text);
    return write.call(this, text, ...rest);
  };"""


@pytest.mark.allow_leaks
def test_odd_values_are_shown(browser: Any) -> None:
    """Of a long run with many workers, on a machine whose clock was set back, and whose loss has gone to nothing."""
    from playwright.sync_api import expect

    clock, wall = [0.0], [1.8e9]
    view = View(wall=lambda: wall[0], clock=lambda: clock[0])
    view(replace(STARTED, total_steps=10**9, resumed_step=999_000_000))
    for step in range(1, 61):
        clock[0] += 1.0
        wall[0] += 1.0 if step != 30 else -3600.0
        loss = 10.0 ** -(step / 1.5) if step < 60 else math.nan
        view(committed(999_000_000 + step, loss=loss, metrics={"far": math.inf}, num_workers=3000 + step))
        view.update()
    trouble: list[str] = []
    with shown(view) as address:
        page = browser.new_page(viewport={"width": 1200, "height": 1100})
        page.add_init_script(KEEP_WRITTEN)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(address)
        expect(page.locator("#progress-text")).to_contain_text("about 11 d")
        expect(page.locator("#tiles div", has_text="Loss").first.locator("dd")).to_contain_text("nan")
        expect(page.locator("#tiles div", has_text="far").first.locator("dd")).to_contain_text("inf")
        for chart, color in (("chart-rate", "compute"), ("chart-workers", "network"), ("chart-loss", "accent")):
            assert page.evaluate(HAS_LINE, [chart, color]), chart
        written = page.evaluate("written")
        assert {"999,000,020", "999,000,040", "3k"} <= set(written)
        page.evaluate("written.length = 0")
        page.click("#log-scale")
        page.wait_for_function("written.includes('1e-20')")
        assert page.evaluate(HAS_LINE, ["chart-loss", "accent"])
        page.close()
    assert trouble == []
