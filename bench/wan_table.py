"""What ``wan.py`` shows of its rows: the table, the figures, the plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import Report

__all__ = ["add_figures", "draw", "exact_loss", "load", "put_table", "table"]


def load(path: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Rows of that budget by key, the newest of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["key"]: row for row in rows if row["steps"] == steps}


def exact_loss(rows: Sequence[dict[str, Any]]) -> float | None:
    """Of exact sync without a network; DDP's where there is none."""
    found = {row["rule"]: row["loss"] for row in rows if row["network"] == "none" and row["codec"] == "raw"}
    loss: float | None = found.get("sync") or found.get("ddp")
    return loss


def table(rows: Sequence[dict[str, Any]], exact: float | None) -> list[str]:
    columns = "network|rule|codec|wall s|tokens/s|utilization|s a leaf|MB up|MB down|loss|over sync|steps measured"
    lines = ["| " + columns.replace("|", " | ") + " |", "|---" * 12 + "|"]
    for row in rows:
        rule = _rule(row)
        down = row["settings"].get("downlink")
        codec = f"{row['codec']} / {down}" if down else row["codec"]
        loss, over = "", ""
        if row["loss"] is not None:
            loss = f"{row['loss']:.3f}"
            over = f"{row['loss'] / exact:.3f}" if exact else ""
        elif row["codec"] == "raw":
            loss = "as without"
        lines.append(
            f"| {row['network']} | {rule} | {codec} | {row['wall_s']:,.0f} | {row['tokens_s']:,.0f} | "
            f"{_pair(row['utilization'], '.2f')} | {_pair(row['leaf_s'], '.2f')} | {_pair(row['sent_mb'], ',.0f')} | "
            f"{_pair(row['received_mb'], ',.0f')} | {loss} | {over} | {row['steps_measured']} of {row['steps']} |"
        )
    return lines


def _rule(row: dict[str, Any]) -> str:
    settings, parts = row["settings"], [row["rule"]]
    if "inner_steps" in settings:
        parts.append(f"H {settings['inner_steps']}")
    if "overlap" in settings:
        parts.append(f"overlap {settings['overlap']}")
    if row["windows"] != 4:
        parts.append(f"steps of {row['windows']}")
    if row["ahead"]:
        parts.append(f"{row['ahead']} leases ahead")
    return ", ".join(parts)


def _pair(values: Sequence[float], form: str) -> str:
    texts = [format(value, form) for value in values]
    return " / ".join(texts if len(set(texts)) > 1 else texts[:1])


def best(rows: Sequence[dict[str, Any]], network: str, exact: float) -> dict[str, Any] | None:
    """Our whole runs: of those within 1 % of exact sync's loss, or of the lowest where that is higher, the one that
    keeps its workers busiest."""
    ours = [row for row in rows if row["network"] == network and row["rule"] != "ddp" and row["loss"] is not None]
    limit = 1.01 * max(exact, min((row["loss"] for row in ours), default=exact))
    close = [row for row in ours if row["loss"] <= limit]
    return max(close, key=lambda row: min(row["utilization"]), default=None)


def add_figures(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    exact = exact_loss(rows)
    if exact is None:
        return
    for network, name in (("100/40", "100_40"), ("20/100", "20_100")):
        row = best(rows, network, exact)
        ddp = next((row for row in rows if row["network"] == network and row["rule"] == "ddp"), None)
        if row is None:
            continue
        print(f"{network}: {row['rule']} {row['codec']} {row['settings']}")
        report.add(f"utilization_{name}", [min(row["utilization"])])
        report.add(f"loss_over_sync_{name}", [row["loss"] / exact])
        if ddp is not None:
            moved = [sum(map(sum, (one["sent_mb"], one["received_mb"]))) for one in (ddp, row)]
            report.add(f"bytes_over_ddp_{name}", [moved[0] / moved[1]])
            report.add(f"wall_over_ddp_{name}", [ddp["wall_s"] / row["wall_s"]])
    for row in rows:
        report.samples[f"step_s {row['key']}"] = row["samples_s"]


def draw(rows: Sequence[dict[str, Any]], network: str, folder: Path) -> None:
    """Loss of the training text against wall time and against bytes of both workers, on one network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    still = next((row for row in rows if row["network"] == "none" and row["rule"] == "ddp"), None)
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4.8), sharey=True)
    for row in rows:
        if row["network"] != network:
            continue
        curve = row["curve"]
        if row["steps_measured"] < row["steps"]:  # its losses are those of the same work without a network
            if row["rule"] != "ddp" or still is None:
                continue
            megabytes = sum(row["sent_mb"]) + sum(row["received_mb"])
            parts = [(number + 1) / row["steps"] for number in range(len(still["curve"]))]
            curve = [(part * row["wall_s"], part * megabytes, point[2])
                     for part, point in zip(parts, still["curve"], strict=True)]  # fmt: skip
        few = max(1, len(curve) // 12)
        losses = [sum(point[2] for point in curve[at : at + few]) / few for at in range(len(curve) - few + 1)]
        for axis, at in zip(both, (0, 1), strict=True):
            places = [point[at] for point in curve[few - 1 :]]
            axis.plot(places, losses, label=f"{_rule(row)}: {row['codec']}" if row["rule"] != "ddp" else "PyTorch DDP")
            axis.set_xscale("log")
            axis.grid(alpha=0.3)
    if not both[0].lines:
        pyplot.close(figure)
        return
    both[0].set_xlabel("seconds")
    both[1].set_xlabel("MB of both workers, start included")
    both[0].set_ylabel("loss of the training text")
    figure.suptitle(f"two workers at {network} (Mbit/s / ms)" if "/" in network else "two workers on unlike lines")
    labels = both[0].get_legend_handles_labels()
    figure.legend(*labels, loc="lower center", ncol=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.03 + 0.035 * ((len(labels[0]) + 1) // 2), 1, 1))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"wan-{network.replace('/', '-')}.svg", metadata={"Date": None})
    pyplot.close(figure)


def put_table(path: Path, lines: Sequence[str]) -> None:
    """Replace the table between the marks of a document."""
    text = path.read_text()
    before, mark, rest = text.partition("<!-- wan.py: table -->\n")
    _, end, after = rest.partition("<!-- wan.py: end -->")
    if not mark or not end:
        raise SystemExit(f"{path} has no marks for the table")
    path.write_text(before + mark + "\n".join(lines) + "\n" + end + after)
