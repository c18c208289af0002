"""What real lines do and loopback does not: a coordinator and two workers behind lines that fail, row by row.

    python bench/lines.py                     # all rows (root and Linux: netem.py), about five minutes
    python bench/lines.py --quick             # shorter steps, cuts and silences; under a minute
    python bench/lines.py --rows collapse     # rows whose name contains that
    python bench/lines.py --verbose           # what coordinator and workers log

Every row is a run of its own over its own emulated network; several run side by side (``--lanes``), as they mostly
wait. Exact sync of two leaves a step, one for each worker; a leaf sleeps (it uses no core). Lines are 50 Mbit/s and 40
ms unless the row says otherwise; the coordinator's is 1 Gbit/s. What happens, happens to worker-1 after a few
commits.

- ``recovered``: the run went on for as many commits as it should in the row's time, with both workers in it at the end
- ``step s``: median between two commits, from what happened on; ``gap s``: the longest
- ``back s``: from what happened until worker-1's result counts again (empty: nothing happened, or it never left)
- ``cuts``: links of workers that ended before the run did
- ``over needed``: bytes of IP packets at the workers' devices over those that must pass: a result up and the version
  it is computed on down, for each worker and step that it contributed to, 4 bytes a value

Figures, with their aims:

- ``recovered`` (1): part of the rows that recovered
- ``sync_bytes_over_needed`` (at most 1.1): the highest of the rows at 2, at 50, and at 2 beside 50 Mbit/s
- ``cuts_at_100_kbit`` (0): of a worker whose downlink carries 100 kbit/s, while bytes come
- ``step_over_backup_collapse`` (at most 1.5): once an uplink has collapsed, a step over one of a worker that is alone;
  ``gap_over_backup_collapse``: the longest step, in which the lease has to become late first
- ``auto_seconds_to_decide`` (at most 20): ``--update auto``, every line 20 Mbit/s and 100 ms, a million values; from
  the moment that both workers are in the run to the first choice that is said ("auto: ...")
- ``auto_changes_constant_link`` (0): choices that it says after that one
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch import Tensor, nn
from torch.nn import functional

import netem
from models import classes, sgd
from netem import Host, Line, Network
from report import Report, parser
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import W5xdeError
from w5xde_async.job import Job
from w5xde_async.telemetry.events import (
    Bus,
    Event,
    RunFinished,
    StepCommitted,
    Warned,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

PORT = 5555
TOKEN = "jQ3vX9mTbLwZ2pRsYdF4hJ6nGcA1eUkW"  # off loopback a weak one is refused
LEAF_SAMPLES, INPUTS, OUTPUTS = 8, 64, 10
WORKERS = ("worker-0", "worker-1")
HUB = Line(rate_mbit=1000)
HOME = Line(rate_mbit=50, round_trip_s=0.040)
FAR = Line(rate_mbit=20, round_trip_s=0.100)
YEARS_S = 2 * 365 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """``lines``: of the coordinator and the workers. ``act``: what happens once ``before`` commits are there; after it
    ``after`` commits more are waited for, and worker-1, at most ``limit_s``. ``back_after_s``: when ``undo`` is called.

    ``act_after_s``: how long after the last of them. ``values``: of the model. ``watch_s``: how long the run goes on at
    least, with ``auto`` from its choice on.
    """

    name: str
    lines: Sequence[Line] = (HUB, HOME, HOME)
    values: int = 100_000
    leaf_s: float = 0.2
    before: int = 4
    after: int = 8
    limit_s: float = 120.0
    act: Callable[[Network, Host], None] | None = None
    act_after_s: float = 0.0
    undo: Callable[[Network, Host], None] | None = None
    back_after_s: float = 0.0
    tls: bool = False
    clock_s: float = 0.0
    auto: bool = False
    watch_s: float = 0.0
    needs_both: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


def _set_away(away: bool) -> Callable[[Network, Host], None]:
    def act(network: Network, host: Host) -> None:
        host.away = away

    return act


def _set_line(line: Line) -> Callable[[Network, Host], None]:
    def act(network: Network, host: Host) -> None:
        host.line = line

    return act


def rows(quick: bool) -> list[Row]:
    """The table. ``quick``: smaller models, shorter cuts, and a silence that is as much shorter."""
    silence = {"heartbeat_s": 1.0, "silence_s": 4.0} if quick else {}
    made = Row(name="", settings=silence, after=5 if quick else 12, limit_s=40.0 if quick else 120.0)
    slow = 40_000 if quick else 250_000  # a megabyte: 4 s each way at 2 Mbit/s
    fast = 500_000 if quick else 1_500_000
    cut_s = 6.0 if quick else 20.0
    collapse = _set_line(replace(HOME, rate_mbit=0.05, down_mbit=50))
    collapsed = replace(made, values=200_000 if quick else 500_000, leaf_s=0.3, act=collapse, needs_both=False)
    a_way_s = collapsed.values * 4 * HOME.up_s_per_byte + HOME.round_trip_s / 2
    mid_s = collapsed.leaf_s + 1.5 * a_way_s  # after a commit: the version down, the leaf, half of the result up

    def lossy(share: float) -> Row:
        return replace(made, name=f"loss {share:.0%}", lines=(HUB, HOME, replace(HOME, loss=share)))

    def at(name: str, first: float, second: float, values: int) -> Row:
        lines = (HUB, replace(HOME, rate_mbit=first), replace(HOME, rate_mbit=second))
        return replace(made, name=name, lines=lines, values=values, needs_both=first == second, limit_s=240.0)

    return [
        replace(made, name="20/100, auto", lines=(FAR, FAR, FAR), auto=True, values=1_000_000, leaf_s=0.1,
                before=0, after=0,
                watch_s=8.0 if quick else 60.0, limit_s=48.0 if quick else 180.0),
        replace(made, name="100 kbit/s down", lines=(HUB, HOME, replace(HOME, down_mbit=0.1)),
                values=100_000 if quick else 400_000, needs_both=False, watch_s=20.0 if quick else 100.0),
        replace(collapsed, name="alone", lines=(HUB, HOME), act=None),
        replace(collapsed, name="uplink collapses"),
        replace(collapsed, name="uplink collapses in the middle of a result", act_after_s=mid_s),
        at("2 Mbit/s", 2, 2, slow),
        at("50 Mbit/s", 50, 50, fast),
        at("50 and 2 Mbit/s", 50, 2, slow),
        *map(lossy, (0.05,) if quick else (0.01, 0.02, 0.05)),
        replace(made, name="300 ms", lines=(HUB, *[replace(HOME, round_trip_s=0.6)] * 2)),  # the hub adds none
        replace(made, name="reordering", lines=(HUB, HOME, replace(HOME, jitter_s=0.02))),
        replace(made, name="NAT rebinding", act=lambda network, host: network.rebind(host)),
        replace(made, name="moving address", act=lambda network, host: network.move(host)),
        replace(made, name=f"cut of {cut_s:.0f} s", act=_set_away(True), undo=_set_away(False), back_after_s=cut_s),
        replace(made, name="half-open", act=lambda network, host: network.forget(host)),
        replace(made, name="wrong clock", tls=True, clock_s=YEARS_S),
    ]  # fmt: skip


# -- what children do


def job(values: int, leaf_s: float) -> Job:
    """Steps of two leaves, of a model with about so many values."""
    hidden = max(1, values // (INPUTS + 1 + OUTPUTS))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(leaf_s * len(target) / LEAF_SAMPLES)
        return functional.cross_entropy(output, target)

    return Job(
        model=lambda: nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, OUTPUTS)),
        dataset=classes(1 << 12, INPUTS), loss=loss, optimizer=sgd, batch_size=2 * LEAF_SAMPLES,
        microbatch_size=LEAF_SAMPLES, max_steps=1 << 30,
    )  # fmt: skip


def _begin(namespace: str, name: str, verbose: bool, talk: Connection) -> None:
    """In its namespace, with one thread, and gone when the bench is."""
    netem.enter(namespace)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    shown = logging.DEBUG if verbose else logging.CRITICAL
    logging.basicConfig(level=shown, format=f"%(asctime)s {name}: %(message)s", stream=sys.stderr, force=True)


def _run(main: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def coordinate(talk: Connection, namespace: str, host: str, row: Row, verbose: bool) -> None:
    """One run, until it is told to stop. Says (what, when, ...)."""
    _begin(namespace, f"{row.name}: coordinator", verbose, talk)

    def say(what: str, *more: Any) -> None:
        talk.send((what, time.monotonic(), *more))

    def on_event(event: Event) -> None:
        if isinstance(event, StepCommitted):
            say("commit", event.step)
        elif isinstance(event, WorkerJoined):
            say("joined", event.name)
        elif isinstance(event, WorkerLeft):
            say("left", event.name, event.reason)
        elif isinstance(event, WorkerReported):
            say("leaves", event.name, event.leaves)
        elif isinstance(event, Warned):
            say("warned", event.text)
        elif isinstance(event, RunFinished):
            say("leaves in all", {share.name: share.leaves for share in event.shares})

    async def run() -> None:
        bus = Bus()
        bus.subscribe(on_event, samples=True)
        settings = CoordinatorConfig(
            host=host, port=PORT, token=TOKEN, insecure=not row.tls, resume="never", min_workers=len(row.lines) - 1,
            evaluate=False, dashboard="", auto=row.auto, update=UpdateConfig(), **row.settings,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        async with Coordinator(job(row.values, row.leaf_s), config=settings, bus=bus) as coordinator:
            told = coordinator.invitation
            say("listens", f"{host}:{PORT}" if told is None else told.reveal())

            def wait() -> None:
                try:
                    talk.recv()
                except EOFError:
                    os._exit(0)
                loop.call_soon_threadsafe(coordinator.request_stop)

            threading.Thread(target=wait, daemon=True).start()
            await coordinator.wait()

    try:
        _run(run())
    except W5xdeError as error:
        say("failed", str(error))
    say("over")


def work(talk: Connection, namespace: str, name: str, server: str, row: Row, verbose: bool) -> None:
    """One worker, until the run is over or the bench is."""
    _begin(namespace, f"{row.name}: {name}", verbose, talk)
    if row.clock_s and name == WORKERS[1]:
        true = time.time
        time.time = lambda: true() + row.clock_s

    def end() -> None:
        try:
            talk.recv()
        except EOFError:
            pass
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()

    async def run() -> None:
        config = WorkerConfig(name=name, token=TOKEN, insecure=not row.tls, device="cpu", connect_timeout_s=600.0)
        await Worker(server, job=job(row.values, row.leaf_s), config=config).run()

    try:
        _run(run())
    except W5xdeError as error:
        print(f"{row.name}: {name}: {error}", file=sys.stderr)


# -- measuring


@dataclass
class Seen:
    """What a run has said so far."""

    commits: list[float] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)
    ready_at: float = 0.0  # both had joined
    left: list[tuple[float, str, str]] = field(default_factory=list)
    joined: list[tuple[float, str]] = field(default_factory=list)
    leaves: dict[str, int] = field(default_factory=dict)
    counted: list[tuple[float, str]] = field(default_factory=list)  # a worker's leaves were more, by a sample
    chosen: list[tuple[float, str]] = field(default_factory=list)
    failed: str = ""
    over: bool = False

    def take(self, what: str, at: float, *more: Any) -> None:
        if what == "commit":
            self.commits.append(at)
        elif what == "joined":
            self.inside.add(more[0])
            self.leaves[more[0]] = 0
            self.joined.append((at, more[0]))
            self.ready_at = self.ready_at or (at if len(self.inside) == len(WORKERS) else 0.0)
        elif what == "left":
            self.inside.discard(more[0])
            self.left.append((at, more[0], more[1]))
        elif what == "leaves":
            if more[1] > self.leaves.get(more[0], 0):
                self.counted.append((at, more[0]))
            self.leaves[more[0]] = more[1]
        elif what == "leaves in all":
            self.leaves.update(more[0])
        elif what == "warned" and more[0].startswith("auto:") and not more[0].startswith("auto: workers "):
            self.chosen.append((at, more[0]))
        elif what == "failed":
            self.failed = more[0]
        elif what == "over":
            self.over = True


@dataclass
class Found:
    """A row, measured."""

    row: Row
    seen: Seen
    recovered: bool
    wall_s: float
    step_s: float
    gap_s: float
    back_s: float | None
    over_needed: float
    happened_at: float

    @property
    def cuts(self) -> int:
        return len(self.seen.left)


def measure(row: Row, context: ForkServerContext, verbose: bool) -> Found:
    with Network(row.lines) as network:
        ours, theirs = context.Pipe()
        told = replace(row, act=None, undo=None)  # what happens, happens here
        hub, *hosts = network.hosts
        children = [
            context.Process(target=coordinate, args=(theirs, hub.namespace, hub.address, told, verbose), daemon=True)
        ]
        children[0].start()
        theirs.close()
        pipes = [ours]
        heard: queue.Queue[tuple[Any, ...]] = queue.Queue()
        threading.Thread(target=_listen, args=(ours, heard), daemon=True).start()
        try:
            _, _, server = heard.get(timeout=60)
            for name, host in zip(WORKERS, hosts, strict=False):
                mine, other = context.Pipe()
                pipes.append(mine)
                child = context.Process(
                    target=work, args=(other, host.namespace, name, server, told, verbose), daemon=True
                )
                children.append(child)
                child.start()
                other.close()
            return _conduct(row, network, heard, ours)
        finally:
            for child in children:
                child.kill()
                child.join()
            for pipe in pipes:
                pipe.close()


def _listen(talk: Connection, heard: queue.Queue[tuple[Any, ...]]) -> None:
    try:
        while True:
            heard.put(talk.recv())
    except (EOFError, OSError):
        heard.put(("over", time.monotonic()))


def _conduct(row: Row, network: Network, heard: queue.Queue[tuple[Any, ...]], talk: Connection) -> Found:
    seen, began = Seen(), time.monotonic()
    ends, host = began + row.limit_s, network.hosts[-1]
    moved = 0

    def until(holds: Callable[[], bool], ends: float) -> bool:
        nonlocal moved
        while not holds():
            left_s = ends - time.monotonic()
            if left_s <= 0 or seen.over:
                return False
            try:
                told = heard.get(timeout=left_s)
            except queue.Empty:
                return False
            seen.take(*told)
            if told[0] == "commit":
                moved = sum(one.sent_bytes + one.received_bytes for one in network.hosts[1:])
        return True

    begun = until(lambda: len(seen.commits) >= row.before and len(seen.inside) == len(network.hosts) - 1, ends)
    if row.act_after_s:
        until(lambda: False, seen.commits[-1] + row.act_after_s)
    happened, commits, back = time.monotonic(), len(seen.commits), True
    if row.act is not None:
        row.act(network, host)
    if row.undo is not None:
        until(lambda: False, happened + row.back_after_s)
        row.undo(network, host)
    if row.auto:
        begun = begun and until(lambda: bool(seen.chosen), ends)
    until(lambda: False, min(ends, time.monotonic() + row.watch_s))
    finished = until(lambda: len(seen.commits) >= commits + row.after, ends)
    if row.needs_both:
        back = until(lambda: len(seen.inside) == len(network.hosts) - 1, ends)
        if row.act is not None:
            last_left = max((at for at, name, _ in seen.left if name == WORKERS[1]), default=happened)
            back = back and until(
                lambda: any(at > last_left + 1 and name == WORKERS[1] for at, name in seen.counted), ends
            )
    stopped = len(seen.left)  # whoever leaves from here on was told to
    last, bytes_moved, all_commits = (seen.commits or [began])[-1], moved, len(seen.commits)
    talk.send("stop")
    until(lambda: seen.over, time.monotonic() + 20)
    del seen.left[stopped:]
    after = [at for at in seen.commits[:all_commits] if at >= happened]
    gaps = [b - a for a, b in pairwise([happened, *after] if row.act else seen.commits[:all_commits])] or [0.0]
    returned = [at - happened for at, name in seen.counted if name == WORKERS[1] and at > happened and seen.left
                and at > seen.left[-1][0]]  # fmt: skip
    # Of two leaves a step: where each worker has one, both contribute; a worker that has both is alone.
    shares = [seen.leaves.get(name, 0) for name in WORKERS[: len(row.lines) - 1]]
    contributions = all_commits + (min(*shares, all_commits) if len(shares) > 1 else 0)
    needed = 2 * 4 * contributions * sum(p.numel() for p in job(row.values, 0).model().parameters())
    return Found(
        row=row, seen=seen, recovered=begun and finished and back and not seen.failed, wall_s=last - began,
        step_s=statistics.median(gaps[2:] or gaps), gap_s=max(gaps),
        back_s=returned[0] if row.act is not None and returned else None,
        over_needed=bytes_moved / max(needed, 1), happened_at=happened,
    )  # fmt: skip


def line_of(found: Found) -> str:
    """A row of the table."""
    back = "" if found.back_s is None else f"{found.back_s:.1f}"
    over = "" if found.row.auto else f"{found.over_needed:.2f}"
    return (
        f"| {found.row.name} | {'yes' if found.recovered else 'NO'} | {found.wall_s:.0f} | {found.step_s:.2f} | "
        f"{found.gap_s:.1f} | {back} | {found.cuts} | {over} |"
    )


def add_figures(report: Report, found: Sequence[Found]) -> None:
    by_name = {one.row.name: one for one in found}
    report.add("recovered", [float(one.recovered) for one in found])
    report.figures["recovered"] = statistics.fmean(report.samples["recovered"])
    sync = [one.over_needed for name, one in by_name.items() if name.endswith("Mbit/s")]
    if sync:
        report.add("sync_bytes_over_needed", sync)
        report.figures["sync_bytes_over_needed"] = max(sync)
    if (one := by_name.get("100 kbit/s down")) is not None:
        report.add("cuts_at_100_kbit", [float(one.cuts)])
    collapsed = [one for name, one in by_name.items() if name.startswith("uplink collapses")]
    if collapsed and (alone := by_name.get("alone")) is not None:
        report.add("step_over_backup_collapse", [one.step_s / alone.step_s for one in collapsed])
        report.add("gap_over_backup_collapse", [one.gap_s / alone.step_s for one in collapsed])
        for name in ("step_over_backup_collapse", "gap_over_backup_collapse"):
            report.figures[name] = max(report.samples[name])
    if (one := by_name.get("20/100, auto")) is not None:
        chosen = one.seen.chosen
        report.add("auto_seconds_to_decide", [chosen[0][0] - one.seen.ready_at if chosen else float("inf")])
        report.add("auto_changes_constant_link", [float(max(0, len(chosen) - 1))])


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rows", nargs="+", default=[""], help="only rows whose name contains one of these")
    flags.add_argument("--lanes", type=int, default=8, help="rows that run side by side")
    flags.add_argument("--verbose", action="store_true", help="show what the processes log")
    args = flags.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or namespaces would be left behind
    if reason := netem.why_not():
        print(f"no emulated network here: {reason}", file=sys.stderr)
        raise SystemExit(0 if args.quick else 2)
    chosen = [row for row in rows(args.quick) if any(part in row.name for part in args.rows)]
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    context.set_forkserver_preload([Path(__file__).stem])  # or every child would import torch
    report = Report({"rows": [row.name for row in chosen], "quick": args.quick, "lanes": args.lanes})
    print("| line | recovered | wall s | step s | gap s | back s | cuts | over needed |")
    print("|---|---|---|---|---|---|---|---|", flush=True)

    def one(row: Row) -> Found:
        found = measure(row, context, args.verbose)
        said = [text for _, text in found.seen.chosen] + [f"{name}: {why}" for _, name, why in found.seen.left]
        print("\n".join([line_of(found), *(f"  {text}" for text in [*said, found.seen.failed] if text)]), flush=True)
        return found

    with ThreadPoolExecutor(args.lanes) as lanes:
        found = list(lanes.map(one, chosen))
    print()
    add_figures(report, found)
    report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
