"""Real coordinator and worker processes, their events as they come, and a gate that lets a worker in late."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import forking

ROOT = Path(__file__).resolve().parents[2]
LEAF_DELAY = "W5XDE_TEST_LEAF_S"  # tests/support/jobs.py: seconds that every leaf takes longer
HURRY = "W5XDE_TEST_HURRY"  # the file whose presence ends that

Event = dict[str, Any]


class Program:
    """One of our programs as a process; its stderr is JSON lines."""

    def __init__(
        self, *arguments: str, leaf_s: float = 0.0, cwd: Path = ROOT, code_free: bool = False, fresh: bool = False,
        **environment: str,
    ) -> None:  # fmt: skip
        """``code_free``: the coordinator traces the job for workers without it, which takes seconds of a core.

        ``fresh``: an interpreter of its own, as people start it, also where there is a server that forks (forking.py).
        """
        env = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")}
        env.pop("OMP_NUM_THREADS", None)  # thread counts come from the flags, as they do for people
        env |= {"PYTHONPATH": forking.SEARCHED, LEAF_DELAY: str(leaf_s), "W5XDE_CODE_FREE": str(code_free).lower()}
        env |= {"W5XDE_DASHBOARD": "false"} | environment
        self.arguments = (*arguments, *(f"{key}={value}" for key, value in environment.items()))
        self.process: subprocess.Popen[str] | forking.Forked
        if forking.running is None or fresh:
            self.process = subprocess.Popen(
                [forking.PYTHON, "-m", *arguments], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        else:
            self.process = forking.running.start(*arguments, cwd=cwd, env=env)
        self.events: list[Event] = []
        self.text: list[str] = []
        self._new: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.text.append(line)
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if isinstance(event, dict):
                    self._new.put(event)
        self._new.put(None)

    def wait_for(self, kind: str, timeout_s: float = 60.0, **at_least: float) -> Event:
        """The next event of a kind whose numbers are at least these."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._new.get(timeout=max(0.01, deadline - time.monotonic()))
            assert event is not None, f"the program ended before {kind}: {''.join(self.text[-20:])}"
            self.events.append(event)
            if event.get("event") == kind and all(event[key] >= value for key, value in at_least.items()):
                return event

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 60.0) -> int:
        """Wait for the end; the exit code. All events are in ``events``."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        while not self._new.empty():
            event = self._new.get()
            if event is not None:
                self.events.append(event)
        return code

    def last(self, kind: str) -> Event:
        return next(event for event in reversed(self.events) if event.get("event") == kind)

    def close(self) -> None:
        """End the process whatever it does, and free its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if isinstance(self.process, forking.Forked):
            self.process.close()


@contextlib.contextmanager
def programs() -> Iterator[Any]:
    """``start(...)`` makes a Program; all of them are ended at the end. Who fails is told what each said last."""
    started: list[Program] = []

    def start(*arguments: str, **kwargs: Any) -> Program:
        started.append(Program(*arguments, **kwargs))
        return started[-1]

    try:
        yield start
    except Exception as error:
        for program in started:
            state = f"process {program.process.pid}, exit code {program.process.poll()}"
            error.add_note(f"--- {state}: {' '.join(program.arguments)}\n{''.join(program.text[-20:])}")
        raise
    finally:
        for program in started:
            program.close()


class Gate:
    """Accepts one connection at once and carries it to ``target`` only when it is opened."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.knocked = threading.Event()
        self._open = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            inside, _ = self._listener.accept()
            self._sockets.append(inside)
            self.knocked.set()
            self._open.wait(60)
            outside = socket.create_connection(self._target)
            self._sockets.append(outside)
            for source, sink in ((inside, outside), (outside, inside)):
                thread = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
