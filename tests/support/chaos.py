"""A run of real processes, and what is done to it: killed, stopped, drained, cut off, started again.

A :class:`Stage` is one coordinator and its workers, each a process of its own. Faults
are ``faults.Action`` values, each due at a step or at a time after the first commit.
``Stage.play`` performs them until the run ends. What is counted is what took effect: a process that was seen to end by
the signal, a worker that the kernel lists as stopped, a connection that was open when it was reset.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.faults import Action, Commit, Record, at_steps, per_minute
from tests.support.ports import free_port
from tests.support.processes import Event, Program
from tests.support.proxy import FaultProxy, ProxyThread

from w5xde_async.errors import ExitCode

__all__ = ["Process", "Stage", "at_steps", "per_minute", "rss_bytes", "show"]

COORDINATOR, WORKER = "tests.support.watched", "w5xde_async.worker"


class Process(Program):
    """A Program whose events carry when they were read (``read_at``, of time.monotonic), and which can be polled."""

    name = "coordinator"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            read_at = time.monotonic()
            self.text.append(line)
            del self.text[:-4000]
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if isinstance(event, dict):
                    self._new.put(event | {"read_at": read_at})
        self._new.put(None)

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Events since the last call; waits for one at most ``timeout_s``. None of them is kept in ``events``."""
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            event = self._new.get(timeout=timeout_s) if timeout_s else self._new.get_nowait()
            while True:
                if event is not None:
                    found.append(event)
                event = self._new.get_nowait()
        return found

    @property
    def state(self) -> str:
        """The kernel's letter: R, S, T (stopped), Z, or nothing where it is gone."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""


class Stage:
    """One run as processes. A context manager: nothing of it is left behind."""

    def __init__(
        self,
        job: str,
        run_dir: Path,
        *,
        workers: int,
        leaf_s: float = 0.0,
        seed: int = 0,
        flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
        proxied: int = 0,
        keep: Iterable[str] = ("worker_left", "log", "warned"),
        environment: Sequence[Mapping[str, str]] = (),
        coordinator_environment: Mapping[str, str] | None = None,
        keep_files: bool = False,
        fresh: bool = False,
    ) -> None:
        """The first ``proxied`` workers have a fault proxy each; ``environment[n]`` is more of worker n's.

        ``fresh``: every process starts an interpreter of its own, also where there is a server that forks.
        """
        self.job, self.run_dir, self.num_workers, self.leaf_s, self.seed = job, run_dir, workers, leaf_s, seed
        self.flags, self.worker_flags, self.num_proxied = flags, worker_flags, proxied
        self.keep, self.environment = frozenset(keep), environment
        self._coordinator_environment = coordinator_environment
        self.port = free_port()
        self.record = Record()
        self.workers: dict[int, Process] = {}  # live ones, by place
        self.coordinator: Process
        self.proxies: list[ProxyThread] = []  # by place
        self._all: list[Process] = []
        self._num_started = 0
        self._random = random.Random(f"{seed}:targets")
        self.step = 0  # of the coordinator that runs
        self._members: set[str] = set()
        self._later: list[tuple[float, Any]] = []  # (time, what to undo)
        self._stopped: set[int] = set()
        self.spared: frozenset[int] = frozenset()  # places whose workers no action is aimed at
        self._leaving: list[Process] = []
        self._keep_files, self._fresh = keep_files, fresh

    def __enter__(self) -> Stage:
        try:
            for place in range(self.num_proxied):
                self.proxies.append(ProxyThread(("127.0.0.1", self.port), seed=self.seed + place))
            self.start_coordinator()
            for place in range(self.num_workers):
                self.start_worker(place)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.close()
        for proxy in self.proxies:
            proxy.close()
        if not self._keep_files:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    # -- processes -----------------------------------------------------------------------------------------

    def start_coordinator(self, timeout_s: float = 60.0) -> Event:
        """Start it, or start it again with the same command; its run_started."""
        process = self._start(
            COORDINATOR, self.job, "--run-dir", str(self.run_dir), "--port", str(self.port), "--threads", "1",
            "--log-format", "json", "--log", "verbose", *self.flags, more=self._coordinator_environment,
        )  # fmt: skip
        self.coordinator = process
        started = process.wait_for("run_started", timeout_s)
        self.record.starts.append(started)
        return started

    def start_worker(self, place: int) -> Process:
        """A new worker at ``place``, through the proxy of that place if it has one."""
        port = self.proxies[place].port if place < len(self.proxies) else self.port
        more = self.environment[place] if place < len(self.environment) else {}
        self._num_started += 1
        name = f"worker-{self._num_started}"
        process = self._start(
            WORKER, "--server", f"127.0.0.1:{port}", "--job", self.job, "--threads", "1", "--name", name,
            "--log-format", "json", *self.worker_flags, leaf_s=self.leaf_s, more=more,
        )  # fmt: skip
        process.name = name
        self.workers[place] = process
        return process

    def _start(self, *arguments: str, leaf_s: float = 0.0, more: Mapping[str, str] | None = None) -> Process:
        process = Process(*arguments, leaf_s=leaf_s, fresh=self._fresh, **more or {})
        self._all.append(process)
        return process

    # -- the play ------------------------------------------------------------------------------------------

    def play(self, actions: Iterable[Action] = (), *, timeout_s: float = 120.0, for_s: float | None = None) -> Record:
        """Perform ``actions`` until the run has finished, or ``for_s`` after the first commit.

        AssertionError where the run does not end in ``timeout_s``, or a process ends that nobody ended.
        """
        record, waiting = self.record, list(actions)
        deadline, first = time.monotonic() + timeout_s, None
        while True:
            now = time.monotonic()
            assert now < deadline, f"no end within {timeout_s:.0f} s: {self.last_words()}"
            for event in self.coordinator.poll(0.02):
                self._note(event)
            if record.commits:
                first = first or record.commits[0].at
            if record.finished:
                return record
            if self.coordinator.process.poll() is not None:
                for event in self.coordinator.poll(0.2):
                    self._note(event)
                assert record.finished, f"the coordinator ended: {self.last_words()}"
                return record
            if first is not None and for_s is not None and now - first >= for_s:
                return record
            self._undo(now)
            self._look_after()
            for action in [action for action in waiting if self._due(action, first, now)]:
                if self.act(action):
                    waiting.remove(action)

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = 60.0) -> float:
        """Go on until ``holds()``; how many seconds that took. AssertionError where it takes ``timeout_s``."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < timeout_s, f"not within {timeout_s:.0f} s: {what}\n{self.last_words()}"
            for event in self.coordinator.poll(0.02):
                self._note(event)
            self._look_after()
        return time.monotonic() - began

    def kept(self, kind: str, *parts: str) -> list[Event]:
        """Events of a kind that were kept, whose text (all fields) has every one of ``parts``."""
        return [
            event
            for event in self.record.kept
            if event.get("event") == kind and all(part in json.dumps(event) for part in parts)
        ]

    def finish(self, timeout_s: float = 30.0) -> Record:
        """After the run's end: continue who is stopped, wait for everybody. AssertionError for a wrong exit code.

        Workers that came too late or lost the coordinator before the end look for it: SIGTERM ends that in good order.
        """
        for process in self.workers.values():
            process.signal(signal.SIGCONT)
        code = self.coordinator.finish(timeout_s)
        assert code == 0, f"the coordinator's exit code is {code}: {self.last_words()}"
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends and any(one.process.poll() is None for one in self.workers.values()):
            time.sleep(0.02)
        for process in self.workers.values():
            process.signal(signal.SIGTERM)
        for process in (*self.workers.values(), *self._leaving):
            code = process.finish(timeout_s)
            assert code in (0, ExitCode.DRAINED), f"a worker's exit code is {code}: {''.join(process.text[-10:])}"
            self._keep(process.events, process.name)
            process.events.clear()
        return self.record

    def stop_run(self) -> Record:
        """SIGTERM to the coordinator: it ends in good order, and says what was done."""
        self.coordinator.signal(signal.SIGTERM)
        self.until(lambda: self.record.finished, "the run stops")
        return self.record

    def act(self, action: Action) -> bool:
        """Do it now. False where there is nobody to do it to; ``record.fired`` counts what took effect."""
        if action.kind == "crash":
            self.crash()
            return True
        if action.kind in ("reset", "hold", "lag"):
            return self._disturb(action)
        places = [place for place in self.joined if place not in self._stopped | self.spared]
        if not places:
            return False
        do = {"kill": self.kill, "stop": self.stop, "drain": self.drain}[action.kind]
        do(self._random.choice(places), action.seconds)
        return True

    @property
    def joined(self) -> list[int]:
        """Places whose worker is a member of the run."""
        return [place for place, process in self.workers.items() if process.name in self._members]

    def crash(self) -> Event:
        """SIGKILL the coordinator and start it again."""
        self.coordinator.signal(signal.SIGKILL)
        assert self.coordinator.process.wait(10) == -signal.SIGKILL
        killed_at = time.monotonic()
        for event in self.coordinator.poll(0.2):
            self._note(event)
        self.record.crashed_at.append((killed_at, self.step))
        self._retire(self.coordinator)
        self._members.clear()
        self.record.fired["crash"] += 1
        started = self.start_coordinator()
        self.step = started["resumed_step"]
        return started

    def kill(self, place: int, _: float = 0.0) -> None:
        process = self.workers.pop(place)
        process.signal(signal.SIGKILL)
        code = process.process.wait(10)
        self._retire(process)
        self.record.fired["kill"] += code == -signal.SIGKILL
        self.start_worker(place)

    def drain(self, place: int, _: float = 0.0) -> None:
        process = self.workers.pop(place)
        process.signal(signal.SIGTERM)
        self._leaving.append(process)
        self.record.fired["drain"] += 1
        self.start_worker(place)

    def stop(self, place: int, seconds: float) -> None:
        process = self.workers[place]
        process.signal(signal.SIGSTOP)
        ends = time.monotonic() + 5.0
        while process.state != "T":
            assert time.monotonic() < ends, f"worker {place} does not stop: {process.state}"
            time.sleep(0.001)
        self._stopped.add(place)
        self.record.fired["stop"] += 1

        def go_on() -> None:
            self._stopped.discard(place)
            process.signal(signal.SIGCONT)

        self._later.append((time.monotonic() + seconds, go_on))

    def _disturb(self, action: Action) -> bool:
        connected = [proxy for proxy in self.proxies if proxy.call(lambda one: one.num_connections)]
        if not connected:
            return False
        proxy, up = self._random.choice(connected), self._random.random() < 0.5

        def begin(one: FaultProxy) -> None:
            if action.kind == "reset":
                one.reset()
            elif action.kind == "hold":
                (one.up if up else one.down).hold()
            else:
                one.up.delay_s = one.up.jitter_s = one.down.delay_s = one.down.jitter_s = 0.05

        proxy.call(begin)
        self.record.fired[action.kind] += 1
        if action.kind != "reset":
            self._later.append((time.monotonic() + action.seconds, lambda: proxy.call(FaultProxy.heal)))
        return True

    # -- inner ---------------------------------------------------------------------------------------------

    def _due(self, action: Action, first: float | None, now: float) -> bool:
        if action.at_step is not None:
            return self.step >= action.at_step
        return first is not None and action.at_s is not None and now - first >= action.at_s

    def _undo(self, now: float) -> None:
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()

    def _look_after(self) -> None:
        """Collect what workers say; one that ended by itself, and not because the run had, is a failure."""
        for place, process in tuple(self.workers.items()):
            self._keep(process.poll(), process.name)
            if (code := process.process.poll()) is not None:
                assert code == 0, f"worker {place} ended with {code}: {''.join(process.text[-10:])}"
        for process in tuple(self._leaving):
            if process.process.poll() is not None:
                code = process.process.returncode
                assert code in (0, ExitCode.DRAINED), f"a drained worker ended with {code}"
                self.record.fired["drained"] += 1
                self._leaving.remove(process)
                self._retire(process)

    def _note(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "commit":
            self.step = event["step"]
            self.record.commits.append(Commit(**{name: event[name] for name in Commit._fields}))
        elif kind == "run_finished":
            self.record.finished = event
        elif kind == "worker_joined":
            self._members.add(event["name"])
        elif kind == "worker_left":
            self._members.discard(event["name"])
        self._keep([event])

    def _keep(self, events: Iterable[Event], by: str = "coordinator") -> None:
        self.record.kept += [event | {"by": by} for event in events if event.get("event") in self.keep]

    def _retire(self, process: Process) -> None:
        self._keep(process.poll(0.1), process.name)
        process.close()
        self._all.remove(process)

    def last_words(self) -> str:
        """What everybody said last."""
        return "\n".join("".join(process.text[-8:]) for process in self._all)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def disk_bytes(folder: Path) -> int:
    """Of all files below it."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a checkpoint may be renamed or removed meanwhile
            total += path.stat().st_size
    return total


def show(figure: str) -> None:
    """A figure that a test has measured (``pytest -rA`` shows it)."""
    sys.stdout.write(figure + "\n")
