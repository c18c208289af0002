"""``metrics.jsonl`` as a picture: loss over steps, raw and smoothed, and what evaluations found.

A run of any length takes the same memory: the file is read once, into slices of as many steps each, and of each slice
the lowest and the highest loss are drawn, so no spike is lost. Metrics with "loss" in their name share the loss's axis,
others have their own on the right. Blocking: callers run it in an executor or after the run. matplotlib is an extra;
without it nothing is drawn.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from w5xde_async.errors import in_one_line
from w5xde_async.store.filesystem import regular
from w5xde_async.telemetry.records import UNREADABLE, mended, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

_MOST_SLICES = 2000
_SMOOTHING = 0.02  # of the run, on each side of a slice
_MARKED_POINTS = 40
_LOG_FROM_RATIO = 50.0
_MOST_METRICS, _MOST_NAMED, _MOST_CHARACTERS = 10, 4, 30  # more, and there is no room for the curves
_LOSS_COLOR, _INK, _GRID = "#1f5fa8", "#222222", "#e4e4e4"
_METRIC_COLORS = ("#c2571a", "#2f8f4e", "#8a4fa3", "#b08a00", "#c23b5e")

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Slice:
    """Some steps in a row. ``low`` and ``high`` are values with their steps; what is no number is not counted."""

    first: int
    last: int
    low: tuple[float, int]
    high: tuple[float, int]
    total: float
    count: int

    @classmethod
    def of(cls, step: int, value: float) -> _Slice:
        if not math.isfinite(value):
            return cls(step, step, (math.inf, step), (-math.inf, step), 0.0, 0)
        return cls(step, step, (value, step), (value, step), value, 1)

    def take(self, later: _Slice) -> None:
        self.last, self.low, self.high = later.last, min(self.low, later.low), max(self.high, later.high)
        self.total, self.count = self.total + later.total, self.count + later.count


class _Curve:
    """Values over steps, in a bounded number of slices; each step has its own while that is enough."""

    def __init__(self) -> None:
        self._slices = list[_Slice]()
        self._width = 1

    def __len__(self) -> int:
        return len(self._slices)

    def add(self, step: int, value: float) -> None:
        slices, one = self._slices, _Slice.of(step, value)
        while slices and slices[-1].first >= step:  # done again: it counts as it was done last
            slices.pop()
        self._append(slices, one)
        while len(self._slices) > _MOST_SLICES:
            self._width *= 2
            narrower, self._slices = self._slices, []
            for one in narrower:
                self._append(self._slices, one)

    def _append(self, slices: list[_Slice], one: _Slice) -> None:
        if slices and slices[-1].first // self._width == one.first // self._width:
            slices[-1].take(one)
        else:
            slices.append(one)

    def means(self) -> tuple[Floats, Floats, Floats]:
        """Of each slice its middle, the sum of its values and their number."""
        found = [((one.first + one.last) / 2, one.total, one.count) for one in self._slices]
        steps, totals, counts = np.array(found, dtype=np.float64).T
        return steps, totals, counts

    def extremes(self) -> tuple[Floats, Floats]:
        """Of each slice its lowest and its highest value, in their order; NaN where it has none."""
        points = list[tuple[int, float]]()
        for one in self._slices:
            values = {one.low, one.high} if one.count else {(math.nan, one.first)}
            points += sorted((step, value) for value, step in values)
        steps, found = np.array(points, dtype=np.float64).T
        return steps, found


@dataclass(slots=True)
class _History:
    losses: _Curve = field(default_factory=_Curve)
    metrics: dict[str, _Curve] = field(default_factory=dict)  # the first of them
    more_metrics: set[str] = field(default_factory=set)
    resumed: set[int] = field(default_factory=set)
    run_name: str = ""


class _Record(msgspec.Struct):
    """What is drawn of a line: to read all of it takes ten times as long."""

    event: Any = None
    step: Any = None
    loss: Any = None
    metrics: msgspec.Raw = msgspec.Raw()
    run_name: Any = ""
    resumed_step: Any = 0


_record = msgspec.json.Decoder(_Record)


def draw_loss(metrics_path: Path, plot_path: Path, given_up: Callable[[], bool] = lambda: False) -> bool:
    """Draw the run recorded in ``metrics_path`` to ``plot_path``, in one step; True when a picture was written.

    False, with one logged line that says why: matplotlib is not installed or fails, there is no step to draw, or a
    file cannot be read or written. Nothing is raised: what a run has come to does not depend on its picture. Once
    ``given_up`` it ends soon, False, and puts none there.
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
        history = _read(metrics_path, given_up)
        if given_up():
            return False
        if not history.losses:
            logger.warning("no plot: no step is recorded in %s", metrics_path)
            return False
        # Neither pyplot nor a global backend: this is a guest in the caller's process.
        figure = Figure(figsize=(9, 5), dpi=120, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, history)
        figure.savefig(temporary)
        if given_up():
            return False
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


def _read(path: Path, given_up: Callable[[], bool]) -> _History:
    history = _History()
    with open(path, "rb", opener=regular) as file:
        for line in file:
            if given_up():
                break
            with suppress(*UNREADABLE):  # torn, or not ours
                try:
                    record = _record.decode(line)
                except UNREADABLE:
                    record = _record.decode(mended(line))
                _note(history, record)
    return history


def _note(history: _History, record: _Record) -> None:
    kind, step = record.event, record.step
    if kind == "step_committed" and isinstance(step, int):
        history.losses.add(step, number(record.loss))
    elif kind == "evaluated" and isinstance(step, int):
        for name, value in msgspec.json.decode(record.metrics, type=dict[str, Any]).items():
            if name in history.metrics or len(history.metrics) < _MOST_METRICS:
                history.metrics.setdefault(name, _Curve()).add(step, number(value))
            else:
                history.more_metrics.add(name)
    elif kind == "run_started":
        history.run_name = str(record.run_name)
        if isinstance(resumed := record.resumed_step, int) and resumed > 0:
            history.resumed.add(resumed)


def _draw(figure: Figure, history: _History) -> None:
    axes = figure.add_subplot()
    steps, totals, counts = history.losses.means()
    smooth = _smoothed(totals, counts)
    each = history.losses.extremes()
    marker = "o" if len(steps) <= _MARKED_POINTS else ""
    label = "loss"
    if _reach(len(steps)):
        axes.plot(*each, color=_LOSS_COLOR, alpha=0.3, linewidth=0.8, label="loss, each step")
        label = "loss, smoothed"
    axes.plot(steps, smooth, color=_LOSS_COLOR, linewidth=2, marker=marker, markersize=3, label=label)
    _dress(axes, "loss", shown="left")
    axes.set_xlabel("step", color=_INK)
    axes.set_title(_literal(history.run_name), loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    low, high = _range(smooth)
    if low > 0 and high / low > _LOG_FROM_RATIO and np.nanmin(each[1]) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    for index, step in enumerate(sorted(history.resumed)):
        axes.axvline(step, color=_INK, alpha=0.4, linewidth=1, linestyle=":", label="" if index else "resumed")
    right = _draw_metrics(axes, history.metrics, len(history.more_metrics))
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


def _draw_metrics(axes: Axes, metrics: dict[str, _Curve], left_out: int) -> Axes | None:
    """The evaluations; the result is the right-hand axis, if one was needed."""
    right: Axes | None = None
    others = [name for name in metrics if "loss" not in name.lower()]
    for index, (name, curve) in enumerate(metrics.items()):
        target = axes
        if name in others:
            right = right or axes.twinx()
            target = right
        steps, totals, counts = curve.means()
        found = np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)
        color = _METRIC_COLORS[index % len(_METRIC_COLORS)]
        marker = "o" if len(steps) <= _MARKED_POINTS else ""
        target.plot(
            steps, found, color=color, linewidth=1.6, marker=marker, markersize=4, label=f"{_short(name)}, evaluated"
        )
    if right is not None:
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


def _reach(num_slices: int) -> int:
    """How many slices on each side the smoothed loss takes in."""
    return int(num_slices * _SMOOTHING)


def _smoothed(totals: Floats, counts: Floats) -> Floats:
    """The mean of a window around each slice, narrower at the ends."""
    half = _reach(len(totals))
    sums = np.concatenate(([0.0], np.cumsum(totals)))
    nums = np.concatenate(([0.0], np.cumsum(counts)))
    # As wide to the left as to the right, so that the curve does not lean at the ends; a little it must, or the
    # first and the last value would stand there unsmoothed.
    index = np.arange(len(totals))
    reach = np.maximum(np.minimum(half, np.minimum(index, index[::-1])), half // 4)
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(totals))
    num = nums[high] - nums[low]
    mean: Floats = np.where(num > 0, (sums[high] - sums[low]) / np.maximum(num, 1), np.nan)
    return mean


def _range(values: Floats) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
