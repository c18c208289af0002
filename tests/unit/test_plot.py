"""A picture comes of any run, long or short, and of none an explanation."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from w5xde_async.telemetry import plot
from w5xde_async.telemetry.plot import draw_loss

pytestmark = pytest.mark.allow_leaks  # matplotlib keeps the font files of its first picture open for good

PNG = b"\x89PNG\r\n\x1a\n"


def line(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, **fields}) + "\n"


def run(num_steps: int, *, evaluate: tuple[str, ...] = (), resumed: int = 0) -> str:
    text = line("run_started", run_name="digits", resumed_step=0)
    for step in range(1, num_steps + 1):
        text += line("step_committed", step=step, loss=2.3 * math.exp(-step / num_steps))
        if evaluate and step % max(1, num_steps // 5) == 0:
            text += line("evaluated", step=step, metrics={name: step / num_steps for name in evaluate})
        if step == resumed:
            text += line("run_started", run_name="digits", resumed_step=step)
    return text


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Draws a text of records; gives the figure that was saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)

    def draw(text: str) -> Figure:
        (tmp_path / "metrics.jsonl").write_text(text)
        assert draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]
        return figures[-1]

    return draw


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_short_run(drawn: Any) -> None:
    figure = drawn(run(10))
    (axes,) = figure.axes
    assert labels(figure) == ["loss"]
    assert axes.get_xlabel() == "step"
    assert axes.get_ylabel() == "loss"
    assert len(axes.lines[0].get_xdata()) == 10
    assert drawn(run(1)).axes[0].get_xlim() == (0, 2)


def test_loss_and_metrics_have_their_axes(drawn: Any) -> None:
    figure = drawn(run(200, evaluate=("accuracy", "val_loss"), resumed=100))
    left, right = figure.axes
    assert right.get_ylabel() == "accuracy"
    assert [entry.get_label() for entry in right.lines] == ["accuracy, evaluated"]
    shown = ["loss, each step", "loss, smoothed", "resumed", "val_loss, evaluated", "accuracy, evaluated"]
    assert labels(figure) == shown
    assert [entry.get_label() for entry in left.lines] == shown[:4]


@pytest.mark.parametrize("names", [300, 11, 2], ids=str)
def test_many_metrics_and_long_names_leave_room_for_the_curves(names: int, drawn: Any) -> None:
    """Warnings are errors here: matplotlib's that axes have collapsed is one."""
    figure = drawn(run(20, evaluate=tuple(f"{'very-' * 20}long-{number}" for number in range(names))))
    (_, right) = figure.axes
    assert len(right.lines) == min(names, 10)
    assert ("metrics.jsonl" in right.get_ylabel()) == (names > 10)
    assert max(map(len, labels(figure))) < 50


def test_a_step_done_again_counts_once_as_it_was_last(drawn: Any) -> None:
    figure = drawn(run(10) + line("step_committed", step=10, loss=7.0))
    assert list(figure.axes[0].lines[0].get_ydata())[-1] == 7.0
    assert len(figure.axes[0].lines[0].get_ydata()) == 10


def test_a_wide_range_is_logarithmic(drawn: Any) -> None:
    wide = "".join(line("step_committed", step=step, loss=10.0 ** (-step / 10)) for step in range(1, 41))
    assert drawn(wide).axes[0].get_yscale() == "log"
    assert drawn(run(10)).axes[0].get_yscale() == "linear"


def test_odd_records_and_names_are_passed_over(drawn: Any) -> None:
    text = line("run_started", run_name="a $\\frac{ b_", resumed_step="x") + "[1]\nnot json\n"
    text += "[" * 100_000 + '\n{"event": ' + "[" * 100_000 + "\n"
    text += line("step_committed", step="x", loss=1) + line("step_committed", step=2, loss="nan")
    text += line("step_committed", step=3, loss=None) + line("step_committed", step=4, loss=1.0)
    text += line("evaluated", step=4, metrics=[1]) + line("evaluated", step=4) + line("evaluated", step=4, metrics=None)
    text += line("evaluated", step=4, metrics={"_$x^": 1.0, "inf": "inf"}) + '{"event": "step_comm'
    assert "$x^, evaluated".replace("$", r"\$") in labels(drawn(text))
    drawn(line("step_committed", step=1, loss="nan"))


def curve(values: Iterable[float]) -> plot._Curve:
    made = plot._Curve()
    for step, value in enumerate(values, 1):
        made.add(step, value)
    return made


def test_lines_of_earlier_versions_with_half_a_character_are_drawn(drawn: Any) -> None:
    text = line("step_committed", step=1, loss=1.0, metrics={"a\udc80": 1.0})
    figure = drawn(text + line("step_committed", step=2, loss=0.5))
    assert len(figure.axes[0].lines[0].get_xdata()) == 2


def test_a_spike_in_a_long_run_is_still_seen() -> None:
    """And the run's length costs no memory: there are so many slices and no more."""
    losses = np.ones(100_000)
    losses[12_345], losses[65_432], losses[77_777] = 50.0, -3.0, np.nan
    made = curve(losses.tolist())
    assert 1000 <= len(made) <= 2000
    x, y = made.extremes()
    assert len(x) <= 4000
    assert (x[y.argmax()], y.max()) == (12_346, 50.0)
    assert (x[y.argmin()], y.min()) == (65_433, -3.0)
    assert (np.diff(x) > 0).all()
    steps, totals, counts = made.means()
    assert counts.sum() == 99_999
    assert (np.diff(steps) > 0).all()
    smooth = plot._smoothed(totals, counts)
    assert np.isfinite(smooth).all()
    assert 0.9 < smooth.min() <= smooth.max() < 1.1


@given(
    steps=st.sets(st.integers(1, 60), min_size=1), most=st.integers(1, 20), sparse=st.integers(1, 1000),
    again=st.integers(1, 60),
)  # fmt: skip
def test_slices_hold_what_the_steps_hold(steps: set[int], most: int, sparse: int, again: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plot, "_MOST_SLICES", most)
        made = plot._Curve()
        for step in sorted(steps):
            made.add(step * sparse, float(step % 7))
        assert len(made) <= most
        _, totals, counts = made.means()
        assert (totals.sum(), counts.sum()) == (sum(step % 7 for step in steps), len(steps))
        x, y = made.extremes()
        assert {*zip(x.tolist(), y.tolist(), strict=True)} <= {(step * sparse, step % 7) for step in steps}
        assert (y.min(), y.max()) == (min(step % 7 for step in steps), max(step % 7 for step in steps))
        made.add(again * sparse, 9.0)  # done again, with all after it
        x, y = made.extremes()
        assert made._width > 1 or (x[-1], y[-1]) == (again * sparse, 9.0)


def test_smoothing_leaves_a_straight_line_alone() -> None:
    line_ = np.arange(1000.0)
    smooth = plot._smoothed(line_, np.ones(1000))
    assert np.allclose(smooth[5:-5], line_[5:-5])
    assert np.abs(smooth - line_).max() < 5


def test_who_has_given_up_gets_no_picture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(run(3))
    for later in range(6):  # so many looks, and then
        looks = iter([False] * later)
        assert not draw_loss(metrics, tmp_path / "loss.png", lambda looks=looks: next(looks, True))  # type: ignore[misc]
    assert list(tmp_path.iterdir()) == [metrics]
    assert caplog.records == []
    assert draw_loss(metrics, tmp_path / "loss.png", lambda: False)


def test_without_matplotlib_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert not draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert [record.getMessage() for record in caplog.records] == [
        "no plot: matplotlib is not installed (pip install 'w5xde-async[plot]')"
    ]


@pytest.mark.parametrize("where", ["import", "drawing"])
def test_where_matplotlib_fails_the_run_goes_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does where the environment names a backend that it does not know."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line("step_committed", step=1, loss=2.0))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("Key backend: 'nonsense' is not a valid value for backend")

    if where == "import":
        for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setenv("MPLBACKEND", "nonsense")
    else:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    assert not draw_loss(metrics, tmp_path / "loss.png")
    (record,) = caplog.records
    assert re.match(r"no plot: matplotlib (cannot be imported|failed): ValueError: ", record.getMessage())
    assert "nonsense" in record.getMessage()
    assert list(tmp_path.iterdir()) == [metrics]


def test_nothing_to_draw_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    assert not draw_loss(metrics, picture)
    assert "No such file" in caplog.text
    metrics.write_text(line("run_started", run_name="x", resumed_step=0))
    assert not draw_loss(metrics, picture)
    assert "no step is recorded" in caplog.text
    metrics.write_text(run(3))
    assert not draw_loss(metrics, tmp_path / "absent" / "loss.png")
    assert len(caplog.records) == 3
    assert list(tmp_path.iterdir()) == [metrics]


def test_an_old_picture_stays_when_drawing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text(run(3))
    (tmp_path / "loss.png").write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    assert not draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
