"""What looking costs: samples/s of a 2-worker run that 50 browsers watch, and of one that tells everything it does.

Coordinator and workers are processes of one thread on loopback, on the digits MLP, whose steps take milliseconds: the
worst case for whatever is paid per step. The viewers are 50 connections to ``/events`` in a process of their own on the
same machine. A figure is the median of ratios of samples/s between neighbours in time.

  ``with_50_viewers``       one run, 50 viewers come and go in turns: with them over without (aim: 0.98)
  ``with_dashboard``        dashboard on, nobody watching, over none; runs in turns, as the next
  ``verbose_over_silent``   ``--log verbose``, written to a file, over ``--log silent`` (aim: 0.98)
  ``silent_samples_per_s``  of A, to tell a slow machine from a slow program
  ``ARM_cpu_us``            processor time of the coordinator's process for each step (Linux), which other programs on
                            the machine disturb less than its speed
  ``step_NAME_us``          what one step's event costs in dashboard and metrics, and in verbose and silent progress,
                            called in a loop: no neighbour disturbs that much
  ``update_50_viewers_ms``  processor time of one update to 50 viewers; there are at most two a second
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from report import Report, parser

ROOT = Path(__file__).resolve().parents[1]
JOB = "examples/digits.py:job"
VIEWERS = 50
WARM_S = 2.0  # after the first commit: kernels, caches, lease sizes
ARMS = {
    "silent": ("--log", "silent", "--no-dashboard"),
    "dashboard": ("--log", "silent", "--dashboard-address", "127.0.0.1:0"),
    "verbose": ("--log", "verbose", "--no-dashboard"),
}


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--rounds", type=int, default=0, help="of the three arms (5; 1 with --quick)")
    flags.add_argument("--seconds", type=float, default=0.0, help="that each arm is measured for (9; 4 with --quick)")
    flags.add_argument("--turns", type=int, default=0, help="of the viewers (12; 3 with --quick)")
    flags.add_argument("--job", default=JOB)
    flags.add_argument("--view", metavar="URL", help="be the viewers of that dashboard (used by the bench itself)")
    args = flags.parse_args()
    if args.view:
        asyncio.run(view(args.view))
        return
    rounds = args.rounds or (1 if args.quick else 5)
    seconds = args.seconds or (4.0 if args.quick else 9.0)
    report = Report({"job": args.job, "viewers": VIEWERS, "rounds": rounds, "seconds": seconds, "workers": 2})
    turns = args.turns or (3 if args.quick else 12)
    folder = Path(tempfile.mkdtemp(prefix="observed-"))
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    costs: dict[str, list[float]] = {arm: [] for arm in ARMS}
    try:
        watched = watched_over_not(folder / "watched", args.job, turns)
        for number in range(rounds):
            for arm in ARMS:
                rate, cpu_us = measure(folder / f"{arm}-{number}", args.job, arm, seconds)
                rates[arm].append(rate)
                costs[arm].append(cpu_us)
                print(f"round {number + 1}, {arm}: {rate:.0f} samples/s, {cpu_us:.0f} us of CPU a step", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.add("with_50_viewers", watched)
    for name, arm in (("with_dashboard", "dashboard"), ("verbose_over_silent", "verbose")):
        report.add(name, [rate / base for rate, base in zip(rates[arm], rates["silent"], strict=True)])
    report.add("silent_samples_per_s", rates["silent"])
    for arm, cost in costs.items():
        report.add(f"{arm}_cpu_us", cost)
    for name, cost_us in per_step().items():
        report.add(f"step_{name}_us", cost_us)
    report.add("update_50_viewers_ms", [asyncio.run(per_update()) for _ in range(3)])
    print()
    report.show()
    report.write(args.json)


class Run:
    """A coordinator and its two workers, as ``arm`` has it."""

    def __init__(self, folder: Path, job: str, arm: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("W5XDE_")}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.folder = folder
        self._log = (folder.parent / f"{folder.name}.log").open("w")
        command = [
            sys.executable, "-m", "w5xde_async.coordinator", job, "--run-dir", str(folder), "--port", "0", "--workers",
            "2", "--worker-threads", "1", "--threads", "1", "--epochs", "100000", "--no-evaluate", "--no-code-free",
            "--checkpoint-every", "1000000", *ARMS[arm],
        ]  # fmt: skip
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Run:
        while not self.commits():
            if self._process.poll() is not None:
                raise RuntimeError(f"the run ended before its first step; see {self.folder}.log")
            time.sleep(0.2)
        time.sleep(WARM_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def commits(self) -> list[tuple[float, int]]:
        """When each step was committed, and its samples, as far as that is on the disk."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [(event["time"], event["samples"]) for event in events if event["event"] == "step_committed"]

    def measure(self, seconds: float) -> tuple[float, float, float]:
        """Let it run; when that began and ended, and the coordinator's processor time meanwhile."""
        before_s, begin = cpu_s(self._process.pid), time.time()
        time.sleep(seconds)
        return begin, time.time(), cpu_s(self._process.pid) - before_s


def rate_of(commits: list[tuple[float, int]], begin: float, end: float) -> tuple[float, int]:
    """Samples/s between two times, and how many steps there were."""
    found = [samples for at, samples in commits if begin <= at < end]
    return sum(found) / (end - begin), len(found)


def measure(folder: Path, job: str, arm: str, seconds: float) -> tuple[float, float]:
    """Samples/s of one run, and microseconds of the coordinator's processor time a step."""
    with Run(folder, job, arm) as run:
        begin, end, spent_s = run.measure(seconds)
    rate, steps = rate_of(run.commits(), begin, end)
    return rate, 1e6 * spent_s / max(steps, 1)


def watched_over_not(folder: Path, job: str, turns: int, *, seconds: float = 3.0) -> list[float]:
    """Samples/s of one run while 50 watch it, over the mean of before and after."""
    spans: list[tuple[bool, float, float]] = []
    with Run(folder, job, "dashboard") as run:
        link = (folder / "dashboard").read_text().split()[0]
        for turn in range(2 * turns + 1):
            watching = turn % 2 == 1
            viewers = subprocess.Popen([sys.executable, __file__, "--view", link], cwd=ROOT) if watching else None
            time.sleep(1.5)  # to come, or to be gone
            spans.append((watching, *run.measure(seconds)[:2]))
            if viewers is not None:
                if viewers.poll() is not None:
                    raise RuntimeError("the viewers have ended")
                viewers.terminate()
                viewers.wait()
        time.sleep(1.5)  # the last steps are written
    commits = run.commits()
    rates = [rate_of(commits, begin, end)[0] for _, begin, end in spans]
    for (watching, *_), rate in zip(spans, rates, strict=True):
        print(f"{VIEWERS if watching else 0} viewers: {rate:.0f} samples/s", flush=True)
    if not min(rates):
        raise RuntimeError("the run stood still for seconds: nothing can be compared")
    return [2 * rates[at] / (rates[at - 1] + rates[at + 1]) for at in range(1, len(rates), 2)]


def per_step() -> dict[str, list[float]]:
    """Microseconds that a subscriber takes for a step, five times."""
    from w5xde_async.telemetry.dashboard.view import View
    from w5xde_async.telemetry.events import StepCommitted, Subscriber
    from w5xde_async.telemetry.metrics import Metrics
    from w5xde_async.telemetry.progress import Progress, ProgressConfig

    event = StepCommitted(
        step=1, epoch=0, loss=0.5, metrics={}, samples=64, leaves=8, learning_rate=0.1, gradient_norm=1.0,
        loss_scale=1.0, skipped=False, seconds=0.01, num_workers=2, bytes_sent=1, bytes_received=1,
        phases_s={"wait": 0.008, "reduce": 0.001, "apply": 0.001, "publish": 0.0001},
    )  # fmt: skip
    found: dict[str, list[float]] = {}
    with open(os.devnull, "w") as nowhere:
        for _ in range(5):
            view, metrics = View(), Metrics()
            subscribers: dict[str, list[Subscriber]] = {
                "dashboard": [view, metrics],
                "verbose": [Progress(ProgressConfig(mode="verbose"), stream=nowhere)],
                "silent": [Progress(ProgressConfig(mode="silent"), stream=nowhere)],
            }
            for name, called in subscribers.items():
                began = time.process_time()
                for number in range(20_000):
                    for subscriber in called:
                        subscriber(event)
                    if number % 200 == 0:
                        view.update()
                found.setdefault(name, []).append(1e6 * (time.process_time() - began) / 20_000)
    return found


async def per_update() -> float:
    """Milliseconds of processor time that an update to all viewers takes the server's process."""
    from w5xde_async.telemetry.dashboard.server import Dashboard
    from w5xde_async.telemetry.dashboard.view import View
    from w5xde_async.telemetry.events import WorkerJoined
    from w5xde_async.telemetry.metrics import Metrics

    view = View()
    dashboard = Dashboard(view, Metrics(), host="127.0.0.1", port=0)
    await dashboard.start()
    viewers = await asyncio.create_subprocess_exec(sys.executable, __file__, "--view", dashboard.address)
    try:
        while dashboard.feed.num_viewers < VIEWERS:  # noqa: ASYNC110 - they do not say when they are here
            await asyncio.sleep(0.05)
        began, updates = time.process_time(), 60
        for number in range(updates):
            view(WorkerJoined(worker_id="a", name="a", peer="", device="cpu", threads=1, num_workers=number))
            dashboard.feed.flush()
            await asyncio.sleep(0.02)  # they leave while others are made
        return 1e3 * (time.process_time() - began) / updates
    finally:
        viewers.terminate()
        await viewers.wait()
        await dashboard.aclose()


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, NaN where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def view(link: str) -> None:
    """Fifty browsers, as far as the server can tell: they read and forget."""
    where = urlsplit(link)
    request = f"GET /events HTTP/1.1\r\nhost: {where.netloc}\r\naccept: text/event-stream\r\n\r\n".encode()

    async def one() -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
        writer.write(request)
        if b" 200 " not in await reader.readline():
            raise RuntimeError("the dashboard does not let the viewers in")
        while await reader.read(1 << 16):
            pass

    await asyncio.gather(*(one() for _ in range(VIEWERS)))


if __name__ == "__main__":
    main()
