"""The run on stderr: a bar on a terminal, lines elsewhere, JSON where a machine reads.

What happens is shown when it happens (joins, leaves, evaluations, warnings); steps are not, they only move the bar,
at most every ``refresh_s``. Off a terminal a line stands in for the bar, at most every 5 to 60 seconds (the longer
the run, the rarer) or ten per cent. A step that is not shown costs a few hundred nanoseconds. Lines never tear the
bar, and nobody waits for whoever reads: everything goes by the stream's one ``Writer``, ``handler()`` included, from
any thread.

Events are to come from one thread. The environment is not read here: ``config.color`` is where NO_COLOR ends up.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TextIO

from tqdm import tqdm
from tqdm.utils import disp_len

from w5xde_async.config import TIME, Config, one_of, setting
from w5xde_async.telemetry import events, wording
from w5xde_async.telemetry.events import Event, RunFinished, RunStarted, StepCommitted
from w5xde_async.telemetry.rates import Rate
from w5xde_async.telemetry.records import to_line, to_record
from w5xde_async.telemetry.writer import left_out, writer_for

#: What is shown in silent mode too, as is a run that fails.
_ALWAYS = (events.Warned, events.CheckpointFailed, events.JournalFailed, events.WorkerQuarantined, events.SampleLeftOut)
_MOST_METRICS = 3  # of the job's step, in a line
_ROWS = 20  # as tqdm takes it to have where it does not ask; some terminals say 0
_BAR, _SHARE = 16, 7  # columns that a bar takes, and the share alone
#: What stands beside the bar, the first that there is room for: how terse, with how many metrics of the job's step, and
#: the columns that are left.
_FORMS = ((0, 0, _BAR), (1, 0, _BAR), (2, 0, _BAR), (3, 0, _BAR))
_FORMS_OF_METRICS = (
    (0, _MOST_METRICS, _BAR), (1, _MOST_METRICS, _BAR), (0, 1, _BAR), (1, 1, _BAR), (2, 1, _BAR), (2, 1, _SHARE),
    *_FORMS,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProgressConfig(Config):
    """How much is shown, and as what.

    silent shows warnings and failures alone, verbose adds checkpoints and where each step's time went.
    """

    mode: Literal["silent", "normal", "verbose"] = setting(
        "normal", "silent, normal or verbose", one_of("silent", "normal", "verbose"), "program", flag="log"
    )
    log_format: Literal["text", "json"] = setting(
        "text", "text, or json: an object per line", one_of("text", "json"), "program"
    )
    #: False where NO_COLOR is set; colours appear on terminals alone in any case.
    color: bool = True
    #: Shortest time between two paintings of the bar.
    refresh_s: float = setting(0.1, "", TIME)
    #: Shortest time between two lines about steps in verbose mode.
    phases_s: float = setting(0.3, "", TIME)


class Progress:
    """A subscriber of the event bus that shows the run. ``close()`` leaves the terminal clean; it may come twice."""

    def __init__(
        self,
        config: ProgressConfig | None = None,
        *,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        columns: Callable[[], int] | None = None,
        words: Callable[[str], str] = str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``terminal`` None asks the stream; ``clock`` paces, ``wall`` only dates JSON lines. ``words`` puts what the
        start advises in the words of an interface without flags.
        """
        self._config = config or ProgressConfig()
        stream = stream or sys.stderr
        self._terminal = stream.isatty() if terminal is None else terminal
        self._json = self._config.log_format == "json"
        self._screen = _Screen(stream, columns or (lambda: _columns(stream)))
        self._paint = wording.colored if self._terminal and self._config.color and not self._json else wording.plain
        self._words, self._clock, self._wall = words, clock, wall
        if self._json:
            self._screen.writer.left_out = self._left_out
        self._interval_s = self._config.refresh_s
        self._next_at = -math.inf
        self._next_step = 0
        self._phases_at = -math.inf
        self._began = 0.0
        self._first_step = self._total_steps = self._num_workers = 0
        self._waiting, self._unsaved = "", False
        self._last: StepCommitted | None = None
        self._shown: StepCommitted | None = None
        self._samples = 0
        self._steps_rate, self._samples_rate = Rate(), Rate()

    def __call__(self, event: Event) -> None:
        if type(event) is StepCommitted:  # the one that comes a thousand times a second
            self._step(event)
            return
        match event:
            case RunStarted():
                self._began = self._clock()
                self._first_step, self._total_steps = event.resumed_step, event.total_steps
                self._next_step = 0
                self._steps_rate, self._samples_rate = Rate(), Rate()
            case RunFinished():
                self.close()
            case events.BatchGrown():
                self._total_steps = event.total_steps
                self._screen.set_total(event.total_steps)
            case events.WorkerJoined() | events.WorkerLeft():
                self._num_workers = event.num_workers
        failed = isinstance(event, RunFinished) and event.outcome == "failed"
        if self._config.mode == "silent" and not failed and not isinstance(event, _ALWAYS):
            return
        if self._json:
            self._screen.write(self._dated(event))
        else:
            self._as_text(event)

    def handler(self) -> logging.Handler:
        """A logging handler that writes above the bar: warnings, and in verbose mode information too."""
        handler = _ScreenHandler(self._screen, self._paint, self._wall if self._json else None)
        handler.setLevel(logging.INFO if self._config.mode == "verbose" else logging.WARNING)
        return handler

    def tell(self, text: str, command: str) -> None:
        """``text``, and below it a command to be copied whole. For people alone."""
        if not self._json and self._config.mode != "silent":
            self._screen.write(f"{text}\n\n    {self._paint('accent', wording.clean(command, limit=10_000))}\n")

    def close(self) -> None:
        """Show the last step and let go of the bar; lines can still be written."""
        if self._last is not None and self._last is not self._shown and self._config.mode != "silent":
            self._show_step(self._last, self._clock())
        self._screen.close_bar()

    # --- steps

    def _step(self, event: StepCommitted) -> None:
        self._last = event
        self._samples += event.samples
        if self._config.mode == "silent":
            return
        now = self._clock()
        if self._config.mode == "verbose" and now >= self._phases_at:
            self._phases_at = now + self._config.phases_s
            self._screen.write(self._dated(event) if self._json else wording.phases(event, self._paint))
        if now >= self._next_at or event.step >= self._next_step:
            self._show_step(event, now)

    def _show_step(self, event: StepCommitted, now: float) -> None:
        self._num_workers = event.num_workers
        self._waiting = ""
        self._shown = event
        bar = self._terminal and not self._json
        if bar:
            self._next_at, self._next_step = now + self._config.refresh_s, sys.maxsize
        else:
            self._next_at = now + min(max((now - self._began) / 20, 5.0), 60.0)
            tenth = (self._total_steps - self._first_step) // 10 if self._total_steps else sys.maxsize
            self._next_step = event.step + max(1, tenth)
        self._steps_rate.update(now, event.step)
        self._samples_rate.update(now, self._samples)
        if bar:
            self._draw()
        elif not self._json:
            share = f" ({100 * event.step // self._total_steps} %)" if self._total_steps else ""
            self._screen.write(f"step {self._done(event.step)}{share} · {self._status(0, _MOST_METRICS)}")
        elif self._config.mode != "verbose":
            self._screen.write(self._dated(event))

    def _draw(self) -> None:
        event = self._last
        step = event.step if event else self._first_step
        done = self._done(step)
        if event is None:
            self._screen.draw(step, [(self._idle(done), _BAR)])
            return
        forms = _FORMS_OF_METRICS if event.metrics else _FORMS
        self._screen.draw(step, [(f"{done} · {self._status(*form)}", room) for *form, room in forms])

    def _done(self, step: int) -> str:
        return f"{step:,}/{self._total_steps:,}" if self._total_steps else f"{step:,}"

    def _idle(self, done: str) -> str:
        return f"{done} · waiting: {wording.clean(self._waiting, limit=60)}" if self._waiting else done

    def _status(self, terse: int, metrics: int) -> str:
        assert self._last is not None
        return wording.status(
            self._last,
            samples_per_s=self._samples_rate.per_s,
            eta_s=self._steps_rate.seconds_for(self._total_steps - self._last.step),
            waiting=self._waiting,
            num_workers=self._num_workers,
            terse=terse,
            metrics=metrics,
        )

    # --- everything else

    def _as_text(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._screen.write("\n".join(wording.header(event, self._paint, self._words)))
                if self._terminal:
                    self._screen.open_bar(event.total_steps, event.resumed_step, color=self._config.color)
                    self._draw()
            case RunFinished():
                whole = self._config.mode == "verbose"
                lines = wording.summary(event, first_step=self._first_step, paint=self._paint, whole=whole)
                self._screen.write("\n".join(lines))
            case events.Warned():
                self._screen.write(f"{self._paint('warn', '!')} {wording.clean(event.text)}")
            case events.Waiting():
                self._wait(event.reason)
            case events.CheckpointSaved() if self._config.mode != "verbose" and not self._unsaved:
                pass
            case _:
                if isinstance(event, events.CheckpointFailed | events.CheckpointSaved):
                    self._unsaved = isinstance(
                        event, events.CheckpointFailed
                    )  # until then: one that is told is good news
                if (text := wording.line(event, self._paint)) is not None:
                    self._screen.write(text)

    def _wait(self, reason: str) -> None:
        if reason == self._waiting:
            return
        self._waiting = reason
        self._steps_rate.pause()
        self._samples_rate.pause()
        if self._terminal:
            self._draw()
        else:
            self._screen.write(f"waiting: {wording.clean(reason)}")

    def _dated(self, event: Event) -> str:
        # JSON is read by machines and kept; the link is in the run directory's file.
        return to_line({"time": round(self._wall(), 3), **to_record(event, omit=("dashboard_link",))}).rstrip("\n")

    def _left_out(self, count: int, why: str) -> str:
        return _logged(self._wall(), "warning", __name__, left_out(count, why))


def _logged(now: float, level: str, logger: str, message: str) -> str:
    where = {"event": "log", "level": level, "logger": logger, "message": message}
    return to_line({"time": round(now, 3), **where}).rstrip("\n")


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80  # a fresh pseudo-terminal says 0
    except (OSError, ValueError):
        return 80


class _Bar(tqdm):  # type: ignore[type-arg]  # at run time it takes none
    monitor_interval = 0  # no watching thread: the pace is ours


def _set_lock() -> None:
    _Bar.set_lock(threading.RLock())  # tqdm's own would also make a semaphore for other processes


_set_lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_set_lock)


class _Screen:
    """A stream with at most one bar at its end; every method may be called from any thread.

    Bars are made, moved and painted by the stream's writer, in its turn. Of paintings that wait the last is made.
    """

    def __init__(self, stream: TextIO, columns: Callable[[], int]) -> None:
        self.writer = writer_for(stream)
        self._columns = columns
        self._bar: _Bar | None = None
        self._next: tuple[int, Sequence[tuple[str, int]]] = 0, ()
        self._waits = False  # to be painted

    def write(self, text: str) -> None:
        """A line, or several, above the bar."""
        self.writer.write(text)

    def open_bar(self, total: int, initial: int, *, color: bool) -> None:
        self.writer.call(partial(self._open, total, initial, color))

    def set_total(self, total: int) -> None:
        """The bar's end."""
        self.writer.call(partial(self._set_total, total))

    def draw(self, step: int, texts: Sequence[tuple[str, int]]) -> None:
        """Move the bar; the first of ``texts`` that leaves so many columns, or the last, stands beside it."""
        self._next = step, texts
        if not self._waits:
            self._waits = True
            self.writer.call(self._paint)

    def close_bar(self) -> None:
        self.writer.call(self._close)

    # --- called by the writer

    def _open(self, total: int, initial: int, color: bool) -> None:
        self._close()
        self._bar = _Bar(
            total=total or None,
            initial=initial,
            file=self.writer.canvas,
            ascii=not self.writer.unicode,
            colour="green" if color else None,
            bar_format="{desc}",
            mininterval=0,
            miniters=sys.maxsize,
            leave=True,
            gui=False,
            ncols=max(self._columns() - 1, 1),
            nrows=_ROWS,
        )
        self.writer.bars.append(self._bar)

    def _set_total(self, total: int) -> None:
        if self._bar is not None:
            self._bar.total = total or None

    def _paint(self) -> None:
        self._waits = False  # before it is looked what is next: whoever comes later has it painted again
        step, texts = self._next
        bar = self._bar
        if bar is None:
            return
        columns = max(self._columns() - 1, 1)  # a full last column makes some terminals wrap; to tqdm, 0 is no limit
        text, wide = "", 0
        for text, room in texts:
            text = self.writer.encodable(text)
            wide = disp_len(text)
            if wide + room <= columns:
                break
        width = min(columns - wide - 8, 40) if bar.total else 0  # nothing is a share of no end
        bar.n = step
        bar.ncols = columns
        share = ""
        if bar.total and wide + _SHARE <= columns:
            share = f"{100 if step >= bar.total else min(100 * step / bar.total, 99):3.0f}% |"
        form = f"{{bar:{width}}}|" if width >= 4 else ""
        bar.bar_format = f"{share}{form} {{desc}}" if share else "{desc}"
        bar.set_description_str(text, refresh=False)
        bar.refresh()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self.writer.bars.remove(self._bar)
            self._bar = None


class _ScreenHandler(logging.Handler):
    def __init__(self, screen: _Screen, paint: wording.Paint, wall: Callable[[], float] | None) -> None:
        super().__init__()
        self._screen, self._paint, self._wall = screen, paint, wall

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
            level = record.levelname.lower()
            if self._wall is not None:
                self._screen.write(_logged(self._wall(), level, record.name, message))
            else:
                warns, fails = record.levelno >= logging.WARNING, record.levelno >= logging.ERROR
                style = "bad" if fails else "warn" if warns else "dim"
                self._screen.write(f"{self._paint(style, level)} {wording.clean(message, limit=20000)}")
        except Exception:
            self.handleError(record)
