"""``metrics.jsonl`` as a picture: loss over steps, raw and smoothed, and what evaluations found.

Any length of run costs the same to draw: the raw loss is cut to the lowest and highest value of each slice of
steps, so no spike is lost. Metrics with "loss" in their name share the loss's axis, others have their own on the
right. Blocking: callers run it in an executor or after the run. matplotlib is an extra; without it nothing is drawn.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from w5xde_async.errors import in_one_line
from w5xde_async.telemetry.records import number, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

_MAX_SLICES = 1000
_SMOOTHING = 0.02  # of the run, on each side of a step
_MARKED_POINTS = 40
_LOG_FROM_RATIO = 50.0
_MOST_METRICS, _MOST_NAMED, _MOST_CHARACTERS = 10, 4, 30  # more, and there is no room for the curves
_LOSS_COLOR, _INK, _GRID = "#1f5fa8", "#222222", "#e4e4e4"
_METRIC_COLORS = ("#c2571a", "#2f8f4e", "#8a4fa3", "#b08a00", "#c23b5e")

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _History:
    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    resumed: set[int] = field(default_factory=set)
    run_name: str = ""


def draw_loss(metrics_path: Path, plot_path: Path) -> bool:
    """Draw the run recorded in ``metrics_path`` to ``plot_path``, in one step; True when a picture was written.

    False, with one logged line that says why: matplotlib is not installed or fails, there is no step to draw, or a
    file cannot be read or written. Nothing is raised: what a run has come to does not depend on its picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "matplotlib":
            logger.warning("no plot: matplotlib is not installed (pip install 'w5xde-async[plot]')")
        else:
            logger.warning("no plot: matplotlib cannot be imported: %s", in_one_line(error))
        return False
    except Exception as error:  # of what the environment says, for one: MPLBACKEND, matplotlibrc
        logger.warning("no plot: matplotlib cannot be imported: %s", in_one_line(error))
        return False
    # The temporary name keeps the suffix, which chooses the format.
    temporary = plot_path.with_name(f".tmp-{os.urandom(4).hex()}-{plot_path.name}")
    try:
        history = _read(metrics_path)
        if not history.losses:
            logger.warning("no plot: no step is recorded in %s", metrics_path)
            return False
        # Neither pyplot nor a global backend: this is a guest in the caller's process.
        figure = Figure(figsize=(9, 5), dpi=120, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, history)
        figure.savefig(temporary)
        os.replace(temporary, plot_path)
    except OSError as error:
        logger.warning("no plot: %s: %s", error.filename or plot_path, error.strerror or error)
        return False
    except Exception as error:
        logger.warning("no plot: matplotlib failed: %s", in_one_line(error))
        return False
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def _read(path: Path) -> _History:
    history = _History()
    for record in read_records(path):
        kind, step = record.get("event"), record.get("step")
        if kind == "step_committed" and isinstance(step, int):
            history.losses[step] = number(record.get("loss"))  # a step done again counts as it was done last
        elif kind == "evaluated" and isinstance(step, int):
            for name, value in (record.get("metrics") or {}).items():
                history.metrics.setdefault(name, {})[step] = number(value)
        elif kind == "run_started":
            history.run_name = str(record.get("run_name", ""))
            if isinstance(resumed := record.get("resumed_step"), int) and resumed > 0:
                history.resumed.add(resumed)
    return history


def _draw(figure: Figure, history: _History) -> None:
    axes = figure.add_subplot()
    steps, losses = _series(history.losses)
    smooth = _smoothed(losses)
    marker = "o" if len(steps) <= _MARKED_POINTS else ""
    label = "loss"
    if _reach(len(steps)):
        axes.plot(*_thinned(steps, losses), color=_LOSS_COLOR, alpha=0.3, linewidth=0.8, label="loss, each step")
        label = "loss, smoothed"
    axes.plot(*_sampled(steps, smooth), color=_LOSS_COLOR, linewidth=2, marker=marker, markersize=3, label=label)
    _dress(axes, "loss", shown="left")
    axes.set_xlabel("step", color=_INK)
    axes.set_title(_literal(history.run_name), loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    low, high = _range(smooth)
    if low > 0 and high / low > _LOG_FROM_RATIO and np.nanmin(losses) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    for index, step in enumerate(sorted(history.resumed)):
        axes.axvline(step, color=_INK, alpha=0.4, linewidth=1, linestyle=":", label="" if index else "resumed")
    right = _draw_metrics(axes, history.metrics)
    handles, labels = axes.get_legend_handles_labels()
    if right is not None:
        more = right.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 5),
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
    )


def _draw_metrics(axes: Axes, metrics: dict[str, dict[int, float]]) -> Axes | None:
    """The evaluations; the result is the right-hand axis, if one was needed."""
    right: Axes | None = None
    drawn = list(metrics.items())[:_MOST_METRICS]
    others = [name for name, _ in drawn if "loss" not in name.lower()]
    for index, (name, values) in enumerate(drawn):
        target = axes
        if name in others:
            right = right or axes.twinx()
            target = right
        steps, found = _series(values)
        color = _METRIC_COLORS[index % len(_METRIC_COLORS)]
        marker = "o" if len(steps) <= _MARKED_POINTS else ""
        target.plot(
            steps, found, color=color, linewidth=1.6, marker=marker, markersize=4, label=f"{_short(name)}, evaluated"
        )
    if right is not None:
        left_out = len(metrics) - len(drawn)
        names = ", ".join(map(_short, others[:_MOST_NAMED])) + (", ..." if len(others) > _MOST_NAMED else "")
        _dress(right, names + (f" ({left_out} more in metrics.jsonl)" if left_out else ""), shown="right")
    return right


def _dress(axes: Axes, label: str, *, shown: str) -> None:
    axes.set_ylabel(label, color=_INK)
    axes.tick_params(colors=_INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("bottom", shown))
        spine.set_color("#999999")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", integer=True)


def _literal(text: str) -> str:
    """``text`` without what matplotlib would read as a formula, or as a label to hide."""
    return text.replace("$", r"\$").lstrip("_")


def _short(name: str) -> str:
    return _literal(name if len(name) <= _MOST_CHARACTERS else name[: _MOST_CHARACTERS - 3] + "...")


def _series(values: dict[int, float]) -> tuple[Floats, Floats]:
    steps = sorted(values)
    return np.array(steps, dtype=np.float64), np.array([values[step] for step in steps], dtype=np.float64)


def _reach(num_steps: int) -> int:
    """How many steps on each side the smoothed loss takes in."""
    return int(num_steps * _SMOOTHING)


def _smoothed(values: Floats) -> Floats:
    """The mean of a window around each value, narrower at the ends; values that are no number are left out."""
    half = _reach(len(values))
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    # As wide to the left as to the right, so that the curve does not lean at the ends; a little it must, or the
    # first and the last value would stand there unsmoothed.
    index = np.arange(len(values))
    reach = np.maximum(np.minimum(half, np.minimum(index, index[::-1])), half // 4)
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    num = counts[high] - counts[low]
    mean: Floats = np.where(num > 0, (sums[high] - sums[low]) / np.maximum(num, 1), np.nan)
    return mean


def _thinned(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Of each slice of steps its lowest and its highest value, in their order."""
    if len(steps) <= 2 * _MAX_SLICES:
        return steps, values
    kept = []
    for piece in np.array_split(np.arange(len(steps)), _MAX_SLICES):
        finite = piece[np.isfinite(values[piece])]
        if len(finite):
            kept += sorted({int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])})
    return steps[kept], values[kept]


def _sampled(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    index = np.unique(np.linspace(0, len(steps) - 1, _MAX_SLICES).round().astype(np.int64))
    return steps[index], values[index]


def _range(values: Floats) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
