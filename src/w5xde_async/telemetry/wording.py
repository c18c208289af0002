"""What a person reads about a run: pure functions from events to lines of text.

Text that came from elsewhere (names of workers, reasons, user code) loses its control characters here, so that no
peer can steer the terminal. ``paint(style, text)`` adds colour, or gives the text back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from itertools import islice
from operator import add

from w5xde_async.errors import users_frames
from w5xde_async.telemetry import events
from w5xde_async.telemetry.events import COORDINATOR, RunFinished, RunStarted, StepCommitted

Paint = Callable[[str, str], str]

_CODES = {"bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "31", "accent": "36"}
_LABEL = 11
_REASON = 12_000  # of a run's end, traceback included
_MOST_ROWS = 24  # workers in the table at the end; the rest are one row
_SEPARATOR = " · "
_SHORT_LEAF_S, _MANY_LEAVES = 0.005, 4  # of which the summary says that fewer of them may be faster


def plain(style: str, text: str) -> str:
    """The ``Paint`` that adds nothing."""
    return text


def colored(style: str, text: str) -> str:
    """The ``Paint`` of a terminal with colours."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text else text


def clean(text: str, *, limit: int = 2000) -> str:
    """``text`` with everything unprintable but line ends replaced, and its middle left out beyond ``limit``."""
    if len(text) > limit:
        head = limit // 2
        text = f"{text[:head]}…{text[len(text) - (limit - head) :]}"
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


@cache
def started_in() -> str:
    """Where the program was when this was asked first, with a separator: the job's own code may go elsewhere."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:  # it has been removed
        return ""


def place(path: str) -> str:
    """A path as its reader would type it where the program was started."""
    return clean(path.removeprefix(started_in()))


#: What the run itself tells by name, on the lines on which a job's metrics are told too.
_OWN_NUMBERS = frozenset(
    ("step", "steps", "loss", "lr", "|g|", "out", "in", "skipped", "samples", "samples/s", "worker", "workers", "w",
     "waiting", "waiting:", "eta", "time", "network", "update", "short steps", "leaves", "model", "metrics", "plot",
     "digest")
)  # fmt: skip


def _name(text: str) -> str:
    return clean(text.replace("\n", " "), limit=40)


# --- numbers


def plural(value: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def _scaled(value: float, units: Sequence[str]) -> str:
    """Three significant figures, of the unit of which there are fewer than a thousand."""
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{units[-1]}"


def short(value: float) -> str:
    """Three significant figures: 12.4k."""
    return _scaled(value, ("", "k", "M", "G", "T", "P", "E"))


def size(value: float) -> str:
    """Bytes in decimal units."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB", " PB", " EB"))


def duration(seconds: float) -> str:
    """1:02:03."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{rest:02}"
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"


def brief(seconds: float) -> str:
    """Seconds, milliseconds or microseconds, three figures; from 1000 s on as ``duration``."""
    if seconds >= 999.5:
        return duration(seconds)
    if 0 < seconds < 999.5e-6:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if 0 < seconds < 0.9995 else f"{seconds:.3g} s"


def _value(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def _metric(name: str) -> str:
    """The name of a job's number where the run's own stand beside it: it cannot be taken for one of those."""
    return f"metric {_name(name)}" if name.strip().casefold() in _OWN_NUMBERS else _name(name)


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{_name(name)} {_value(value)}" for name, value in metrics.items())


def _row(paint: Paint, width: int, label: str, *parts: str) -> str:
    return "  " + paint("dim", f"{label:<{width}}") + _SEPARATOR.join(part for part in parts if part)


# --- the start


def header(event: RunStarted, paint: Paint, words: Callable[[str], str] = str) -> list[str]:
    """What runs, on what, how others join: shown once. ``words``: as for ``Progress``."""
    row = partial(_row, paint, _LABEL)
    resumed = paint("good", f"resumed at step {event.resumed_step:,}") if event.resumed_step else ""
    batch = f"batch {event.batch_size:,}"
    if event.leaves_per_step > 1:
        batch += f" in {event.leaves_per_step} leaves"
    if event.leaves_by:
        batch += f" ({clean(event.leaves_by)})"
    epochs = f"{event.steps_per_epoch:,} per epoch" if event.steps_per_epoch else ""
    samples = plural(event.num_samples, "sample") if event.num_samples else "a stream"
    title = f"{paint('bold', 'w5xde-async')} {event.version}{_SEPARATOR}run {paint('bold', _name(event.run_name))}"
    parameters = f"{event.num_parameters:,} parameters"
    lines = [
        "",
        f"{title}{_SEPARATOR}{paint('dim', f'{event.run_id}, term {event.term}')}",
        "",
        row("model", _name(event.model), parameters, f"fingerprint {event.fingerprint[:16]}"),
        row("data", _name(event.dataset), samples, batch),
        row("update", event.update_rule, f"codec {event.codec}", event.precision),
        row("steps", f"to step {event.total_steps:,}" if event.total_steps else "until stopped", epochs, resumed),
        row("listening", paint("accent", event.address), clean(event.security)),
        row("memory", f"{size(event.host_bytes)} now", words(_memory(event))),
        row("files", place(event.run_dir), "a journal of every step" if event.durability == "journal" else ""),
        *([row("dashboard", paint("accent", clean(event.dashboard_link)))] if event.dashboard_link else []),
        "",
    ]
    if event.worker_command:
        # On a line of its own and undecorated, to be copied whole.
        command = paint("accent", clean(event.worker_command))
        lines += [f"  {words(_where_to_start(event))}:", "", f"    {command}", ""]
    return lines


def _memory(event: RunStarted) -> str:
    """What workers may add to it."""
    few = f"+{size(event.expected_bytes)} for {plural(event.expected_workers, 'worker')}"
    return f"{few}, +{size(event.memory_bound_bytes)} for --max-workers {event.max_workers:,}"


def _where_to_start(event: RunStarted) -> str:
    host = event.address.rpartition(":")[0]
    if host.startswith("127.") or host in ("localhost", "[::1]"):
        return "Start a worker on this machine (--host 0.0.0.0 lets others in)"
    if event.join_addresses:
        place = f"it calls {clean(event.join_addresses, limit=200)}; --advertise names another address"
        return f"Start a worker, here or where you have copied the join file ({place})"
    return "Start a worker, here or on another machine"


# --- on the way


def line(event: object, paint: Paint) -> str | None:
    """One line about an event that is shown when it happens; None for any other event."""
    match event:
        case events.WorkerJoined():
            machine = f"{_name(event.peer)}, {_name(event.device)}, {plural(event.threads, 'thread')}"
            machine += ", shared memory" if event.link == "shm" else ""
            text = f"{_name(event.name)} joined {paint('dim', f'({machine})')}"
            return f"{paint('good', '+')} {text}{_SEPARATOR}{plural(event.num_workers, 'worker')}"
        case events.WorkerLeft():
            returned = f", {plural(event.leases_returned, 'lease')} to redo" if event.leases_returned else ""
            sign = paint("dim", "-") if event.clean else paint("warn", "-")
            text = f"{sign} {_name(event.name)} left: {clean(event.reason, limit=200)}{returned}"
            return f"{text}{_SEPARATOR}{plural(event.num_workers, 'worker')}"
        case events.WorkerQuarantined():
            done = "quarantined" if event.put_out else "wrong, and kept"
            return f"{paint('bad', '!')} {_name(event.name)} {done}: {clean(event.reason, limit=300)}"
        case events.BatchGrown():
            text = f"the batch grows from {event.batch_size_before:,} to {event.batch_size:,} samples"
            why = f"noise scale {_scale(event.noise_scale)}; learning rate x {event.rate_factor:.3g}"
            ends = f"after step {event.after_step:,}"
            if event.total_steps:
                ends += f"; the run ends at step {event.total_steps:,}"
            return f"{paint('good', '*')} {text}: {why}; {ends}"
        case events.SampleLeftOut():
            text = f"sample {event.sample:,} is left out: {clean(event.error, limit=300)}"
            return f"{paint('warn', '!')} {text} {paint('dim', f'({event.bad_samples:,} of at most {event.most:,})')}"
        case events.Evaluated():
            took = paint("dim", f"({brief(event.seconds)})")
            best = paint("good", f"{_SEPARATOR}the best so far") if event.best else ""
            return f"{paint('accent', '*')} step {event.step:,} evaluated: {_metrics(event.metrics)} {took}{best}"
        case events.CheckpointSaved():
            cost = paint("dim", f"({size(event.nbytes)}, {brief(event.seconds)}, paused {brief(event.pause_s)})")
            return f"{paint('dim', '*')} step {event.step:,} saved: {place(event.path)} {cost}"
        case events.CheckpointFailed():
            text = f"no checkpoint of step {event.step:,}: {clean(event.reason)}"
            if event.safe_step is not None:
                text += f"; it is tried again, a crash before that goes back to step {event.safe_step:,}"
            return f"{paint('warn', '!')} {text}"
        case events.JournalFailed():
            since = f" for {duration(event.seconds)}" if event.seconds >= 1 else ""
            text = f"nothing is journalled{since} after step {event.step:,}: {clean(event.reason)}"
            safe = "the last checkpoint"
            if event.safe_step is not None:
                safe = f"step {event.safe_step:,} or later"
            return f"{paint('warn', '!')} {text}; the run goes on, a crash would go back to {safe}"
        case events.JournalRestored():
            text = f"the journal counts again from step {event.step:,}, after {duration(event.seconds)}"
            return f"{paint('good', '*')} {text}"
        case _:
            return None


def _scale(samples: float) -> str:
    return f"{short(samples)} samples" if math.isfinite(samples) else "beyond measure"


def status(
    event: StepCommitted,
    *,
    samples_per_s: float | None,
    eta_s: float | None,
    waiting: str,
    num_workers: int,
    terse: int,
    metrics: int = 0,
) -> str:
    """The figures beside the bar; each ``terse`` level above 0 is shorter and says less.

    ``metrics``: how many of those that the job's step returns are among them.
    """
    wide = terse == 0
    shown = dict(islice(event.metrics.items(), metrics))
    parts = [f"loss {_value(event.loss)}", *(f"{_metric(name)} {_value(value)}" for name, value in shown.items())]
    if waiting:
        return _SEPARATOR.join([*parts, f"waiting: {clean(waiting, limit=60)}"])
    rate = "-" if samples_per_s is None else short(samples_per_s)
    parts.append(f"{rate} samples/s" if wide else f"{rate}/s")
    if terse < 2:
        parts.append(plural(num_workers, "worker") if wide else f"{num_workers} w")
    if terse < 3 and eta_s != 0:
        parts.append(f"ETA {'-' if eta_s is None else duration(eta_s)}")
    return _SEPARATOR.join(parts)


def phases(event: StepCommitted, paint: Paint) -> str:
    """Where one step's time went, for ``verbose``."""
    spent = "  ".join(f"{name} {brief(seconds)}" for name, seconds in event.phases_s.items())
    rate = "" if event.learning_rate is None else f"  lr {event.learning_rate:.3g}"
    norm = "" if event.gradient_norm is None else f"  |g| {event.gradient_norm:.3g}"
    traffic = f"out {size(event.bytes_sent)}  in {size(event.bytes_received)}"
    skipped = f"  skipped (scale {event.loss_scale:g})" if event.skipped else ""
    metrics = "".join(f"  {_metric(name)} {_value(value)}" for name, value in event.metrics.items())
    text = f"step {event.step:,}  loss {_value(event.loss)}{metrics}{rate}{norm}"
    return paint("dim", f"{text}  {brief(event.seconds)}: {spent}  {traffic}{skipped}")


# --- the end


def summary(event: RunFinished, *, first_step: int, paint: Paint, whole: bool = False) -> list[str]:
    """The table at the end. ``whole``: with every frame of a traceback, not the user's alone."""
    row = partial(_row, paint, max([_LABEL, *(len(_metric(name)) + 2 for name in event.metrics)]))
    style = {"finished": "good", "failed": "bad"}.get(event.outcome, "warn")
    told = event.reason if whole else users_frames(event.reason)
    if told != event.reason:
        told = f"{told.rstrip()}\n(your own lines; all of them: --log verbose, and metrics.jsonl)"
    reason = f": {clean(told, limit=_REASON)}" if told else ""
    redone = f"{event.step - first_step:,} in this session" if first_step else ""
    timed = event.session_samples and event.trained_s > 0
    rate = f"{short(event.session_samples / event.trained_s)} samples/s" if timed else ""
    lines = ["", paint("bold", paint(style, event.outcome)) + reason, ""]
    of = f" of {event.total_steps:,}" if event.total_steps else ""
    skipped = f"{event.steps_skipped:,} skipped, without an update" if event.steps_skipped else ""
    lines.append(row("steps", f"{event.step:,}{of}", redone, skipped))
    left_out = f"{event.bad_samples:,} left out: cannot be read" if event.bad_samples else ""
    lines.append(row("samples", f"{event.samples:,}", rate, left_out))
    if event.loss is not None:
        lines.append(row("loss", _value(event.loss)))
    lines += [row(_metric(name), _value(value)) for name, value in event.metrics.items()]
    lines.append(row("time", duration(event.seconds), f"{duration(event.trained_s)} of it training" if timed else ""))
    lines.append(row("network", f"{size(event.bytes_sent)} sent", f"{size(event.bytes_received)} received"))
    if event.leaves_in_vain:
        share = event.leaves_in_vain / (event.leaves + event.leaves_in_vain)
        leases = f"{plural(event.leases_stale, 'late lease')}, {event.leases_duplicate:,} backed up"
        lines.append(row("wasted", f"{share:.1%} of the leaves", leases))
    if event.short_steps:
        lines.append(row("short", plural(event.short_steps, "step"), "computed by the coordinator, sooner than sent"))
    if tip := _short_leaves(event, event.step - first_step):
        lines.append(row("leaves", *tip))
    if event.best is not None:
        found = f"{_name(event.best.metric)} {_value(event.best.value)} at step {event.best.step:,}"
        lines.append(row("best", found, place(event.best.path)))
    places = {"model": event.model_path, "metrics": event.metrics_path, "plot": event.plot_path}
    lines += [row(label, place(path)) for label, path in places.items() if path]
    if event.digest:
        lines.append(row("digest", event.digest))
    if event.shares:
        lines += ["", *_shares(event, paint)]
    return [*lines, ""]


def _short_leaves(event: RunFinished, steps: int) -> tuple[str, str] | None:
    """What to do where leaves are so short, and a step has so many, that their number may cost more than their work;
    or where nobody shares it, and products of whole batches take less time than those of their parts."""
    computed_s, leaves = sum(share.compute_s for share in event.shares), sum(share.leaves for share in event.shares)
    if not leaves or steps < 1:
        return None
    each = f"{brief(computed_s / leaves)} each, {leaves / steps:.0f} a step"
    if computed_s / leaves <= _SHORT_LEAF_S and leaves >= _MANY_LEAVES * steps:
        return each, f"fewer may be up to {leaves / steps / 2:.1f} times as fast: w5xde tune measures it"
    if len(event.shares) - any(share.name == COORDINATOR for share in event.shares) == 1 and leaves > 1.5 * steps:
        return each, "one worker alone may be faster with one: w5xde tune measures it"
    return None


def _shares(event: RunFinished, paint: Paint) -> list[str]:
    total = sum(share.leaves for share in event.shares) or 1
    shares = sorted(event.shares, key=lambda share: -share.leaves)
    if len(shares) > _MOST_ROWS:
        rest = shares[_MOST_ROWS - 1 :]
        shares[_MOST_ROWS - 1 :] = [replace(reduce(add, rest), name=f"{len(rest):,} others", device="")]
    rows = [("worker", "device", "share", "leaves", "samples", "computing", "sent", "received")]
    for share in shares:
        busy = share.compute_s + share.wait_s
        part = f"{100 * share.leaves / total:.0f} %"
        computing = f"{100 * share.compute_s / busy:.0f} %" if busy > 0 else "-"
        work = (_name(share.name), _name(share.device), part, f"{share.leaves:,}", f"{share.samples:,}", computing)
        rows.append((*work, size(share.bytes_sent), size(share.bytes_received)))
    head, *lines = table(rows, words=2)
    return ["  " + paint("dim", head), *("  " + line for line in lines)]


def table(rows: Sequence[Sequence[str]], *, words: int) -> list[str]:
    """A line for each row, the columns below each other: the first ``words`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:words], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[words:], widths[words:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    return lines
