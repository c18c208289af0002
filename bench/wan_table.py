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
    """The lowest of exact sync, over its learning rates, without a network; DDP's where there is none."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["network"] == "none" and row["codec"] == "raw":
            found.setdefault(row["rule"], []).append(row["loss"])
    return min(found.get("sync") or found.get("ddp") or [], default=None)


def table(rows: Sequence[dict[str, Any]], exact: float | None) -> list[str]:
    columns = (
        "network|rule|codec|start s|wall s|tokens/s|utilization|s a leaf|MB up|MB down|loss|over sync|steps measured"
    )
    lines = ["| " + columns.replace("|", " | ") + " |", "|---" * 13 + "|"]
    for row in rows:
        rule = _rule(row)
        down = row["settings"].get("downlink")
        codec = f"{row['codec']} / {down}" if down else row["codec"]
        loss, over = "", ""
        if row["loss"] is not None:
            loss = f"{row['loss']:.3f}"
            over = f"{row['loss'] / exact:.3f}" if exact else ""
        elif row["codec"] == "raw" or row["rule"] == "ddp":
            loss = "as without"
        fields = (
            row["network"], rule, codec, "" if row["start_s"] is None else f"{row['start_s']:,.0f}",
            f"{row['wall_s']:,.0f}", f"{row['tokens_s']:,.0f}",
            _pair(row["utilization"], ".2f"), _pair(row["leaf_s"], ".2f"), _pair(row["sent_mb"], ",.0f"),
            _pair(row["received_mb"], ",.0f"), loss, over, f"{row['steps_measured']} of {row['steps']}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(fields)} |")
    return lines


def _rule(row: dict[str, Any]) -> str:
    settings, parts = row["settings"], [row["rule"]]
    if "inner_steps" in settings:
        parts.append(f"H {settings['inner_steps']}")
    if "overlap" in settings:
        parts.append(f"overlap {settings['overlap']}")
    if "rank" in settings:
        parts.append(f"rank {settings['rank']}")
    if row["windows"] != 4:
        parts.append(f"steps of {row['windows']}")
    elif row["rate"] != 1e-3:
        parts.append(f"at {row['rate']:g}")
    if row["ahead"]:
        parts.append(f"{row['ahead']} leases ahead")
    return ", ".join(parts)


def _pair(values: Sequence[float], form: str) -> str:
    texts = [format(value, form) for value in values]
    return " / ".join(texts if len(set(texts)) > 1 else texts[:1])


def best(rows: Sequence[dict[str, Any]], network: str, exact: float, *, ours: bool) -> dict[str, Any] | None:
    """Of the whole runs on a network, ours or DDP's, the quickest of those within 1 % of exact sync's loss.

    Where none is that close: of those within 1 % of the lowest.
    """
    rows = [
        row
        for row in rows
        if row["network"] == network and row["rule"].startswith("ddp") != ours and row["loss"] is not None
    ]
    limit = 1.01 * max(exact, min((row["loss"] for row in rows), default=exact))
    return min((row for row in rows if row["loss"] <= limit), key=_waited_s, default=None)


def _waited_s(row: dict[str, Any]) -> float:
    return float((row["start_s"] or 0.0) + row["wall_s"])


def add_figures(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    exact = exact_loss(rows)
    if exact is None:
        return
    for network, name in (("100/40", "100_40"), ("20/100", "20_100")):
        row = best(rows, network, exact, ours=True)
        if row is None:
            continue
        print(f"{network}: {row['rule']} {row['codec']} {row['settings']}")
        report.add(f"utilization_{name}", [min(row["utilization"])])
        report.add(f"loss_over_sync_{name}", [row["loss"] / exact])
        plain = next((one for one in rows if one["network"] == network and _is_plain(one)), None)
        remedy = best(rows, network, exact, ours=False)
        for peer, other in (("ddp", plain), ("remedy", remedy)):
            if other is None:
                continue
            if peer == "remedy":
                print(f"{network}: DDP's best is {_rule(other)} {other['codec']}")
                report.add(f"remedy_loss_over_sync_{name}", [other["loss"] / exact])
            moved = [sum(map(sum, (one["sent_mb"], one["received_mb"]))) for one in (other, row)]
            report.add(f"bytes_over_{peer}_{name}", [moved[0] / moved[1]])
            report.add(f"wall_over_{peer}_{name}", [_waited_s(other) / _waited_s(row)])
    for row in rows:
        report.samples[f"step_s {row['key']}"] = row["samples_s"]


def _is_plain(row: dict[str, Any]) -> bool:
    return bool(row["rule"] == "ddp" and row["codec"] == "raw")


def draw(rows: Sequence[dict[str, Any]], network: str, folder: Path) -> None:
    """Loss of the training text against wall time and against bytes of both workers, on one network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    still = next((row for row in rows if row["network"] == "none" and _is_plain(row)), None)
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4.8), sharey=True)
    for row in rows:
        if row["network"] != network:
            continue
        curve = row["curve"]
        if row["steps_measured"] < row["steps"]:  # its losses are those of the same work without a network
            if not _is_plain(row) or still is None:
                continue
            megabytes = sum(row["sent_mb"]) + sum(row["received_mb"])
            parts = [(number + 1) / row["steps"] for number in range(len(still["curve"]))]
            curve = [(part * row["wall_s"], part * megabytes, point[2])
                     for part, point in zip(parts, still["curve"], strict=True)]  # fmt: skip
        few = max(1, len(curve) // 12)
        losses = [sum(point[2] for point in curve[at : at + few]) / few for at in range(len(curve) - few + 1)]
        for axis, at in zip(both, (0, 1), strict=True):
            places = [point[at] for point in curve[few - 1 :]]
            axis.plot(places, losses, label=_label(row))
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


def _label(row: dict[str, Any]) -> str:
    if not row["rule"].startswith("ddp"):
        return f"{_rule(row)}: {row['codec']}"
    return "PyTorch DDP" if _is_plain(row) else f"PyTorch {_rule(row)}: {row['codec']}"


def put_table(path: Path, lines: Sequence[str]) -> None:
    """Replace the table between the marks of a document."""
    text = path.read_text()
    before, mark, rest = text.partition("<!-- wan.py: table -->\n")
    _, end, after = rest.partition("<!-- wan.py: end -->")
    if not mark or not end:
        raise SystemExit(f"{path} has no marks for the table")
    path.write_text(before + mark + "\n".join(lines) + "\n" + end + after)
