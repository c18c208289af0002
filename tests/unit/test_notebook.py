"""What a notebook shows of a cluster, a coordinator and a result; starting without ``async with``."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async import Coordinator, CoordinatorConfig, Job, LocalCluster, RunResult
from w5xde_async.errors import UsageError
from w5xde_async.telemetry.notebook import html_table


def job(max_steps: int = 5) -> Job:
    return Job(
        model=lambda: nn.Linear(2, 1),
        dataset=TensorDataset(torch.ones(8, 2), torch.zeros(8, 1)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.functional.mse_loss,
        batch_size=4,
        max_steps=max_steps,
    )


class Cells(HTMLParser):
    """The text of every cell, and every tag that was seen."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def rows(html: str) -> dict[str, str]:
    cells = Cells(html).cells[1:]
    return dict(zip(cells[::2], cells[1::2], strict=True))


def test_a_table_escapes_links_and_leaves_out_what_is_not_there() -> None:
    html = html_table("<Run>", {"a": "<script>", "b": None, "c": "", "d": 0.123456789, "e": "http://h/?t=1&u=2"})
    seen = Cells(html)
    assert seen.cells == ["<Run>", "a", "<script>", "d", "0.123457", "e", "http://h/?t=1&u=2"]
    assert "script" not in seen.tags
    assert seen.tags.count("a") == 1


async def test_a_cluster_shows_how_it_stands_and_starts_without_a_block() -> None:
    cluster = LocalCluster(job(10**9), 1)
    assert rows(cluster._repr_html_())["state"] == "not started"
    try:
        assert await cluster.start() is cluster
        await cluster.wait_for_workers(1, 10)
        shown = rows(cluster._repr_html_())
        assert (shown["state"], shown["workers"], shown["address"]) == ("running", "1", cluster.address)
        with pytest.raises(UsageError, match="make a new LocalCluster"):
            await cluster.start()
    finally:
        await cluster.aclose()
    shown = rows(cluster._repr_html_())
    assert (shown["state"], shown["workers"]) == ("not running", "0")
    assert shown["step"] == str(cluster.coordinator.step)


async def test_a_clusters_dashboard_is_shown_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    async with LocalCluster(job(10**9), 0, dashboard="127.0.0.1:0") as cluster:
        assert cluster.dashboard_link.startswith("http://127.0.0.1:")
        assert rows(cluster._repr_html_())["dashboard"] == cluster.dashboard_link
        with monkeypatch.context() as patched:
            patched.setattr(Coordinator, "dashboard_link", "http://h:1/?token=hush")
            for shown in (cluster, cluster.coordinator):
                assert rows(shown._repr_html_())["dashboard"] == "http://h:1/"
    async with LocalCluster(job(), 0) as cluster:
        assert cluster.dashboard_link == ""
        assert "dashboard" not in rows(cluster._repr_html_())


async def test_a_coordinator_shows_how_it_stands(tmp_path: Path) -> None:
    coordinator = Coordinator(job(), run_dir=tmp_path / "named", config=CoordinatorConfig(port=0))
    assert rows(coordinator._repr_html_())["state"] == "not running"
    async with coordinator:
        html = coordinator._repr_html_()
        assert "Coordinator named" in html
        assert rows(html)["state"] == "running"
        assert rows(html)["address"] == coordinator.address
    assert rows(coordinator._repr_html_())["state"] == "not running"


def test_a_result_shows_its_end() -> None:
    result = RunResult(outcome="stopped", reason="asked to", step=7, loss=0.5, metrics={"acc": 0.25}, digest="ab" * 20)
    shown = rows(result._repr_html_())
    assert shown == {"outcome": "stopped: asked to", "step": "7", "loss": "0.5", "acc": "0.25", "seconds": "0",
                     "digest": "ab" * 6}  # fmt: skip
