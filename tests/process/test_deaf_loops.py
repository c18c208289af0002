"""Signals where the event loop hears nothing, since what is called on it does not return."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from w5xde_async.errors import ExitCode

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, sys, threading, time
import uvloop
from w5xde_async.process import signals

async def main():
    with signals(lambda reason: print("told", reason, flush=True), abandon=lambda: print("abandoned", flush=True)):
        print("ready", flush=True)
        if sys.argv[1] == "sleeps":
            time.sleep(60)
        elif sys.argv[1] == "computes":
            while True:
                pass
        elif sys.argv[1] == "waits":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        await asyncio.sleep(60)

loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
with asyncio.Runner(loop_factory=loops[sys.argv[2]]) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_second_one_ends_a_program_that_did_not_hear_the_first(loop: str) -> None:
    does = {what: ["abandoned"] for what in ("sleeps", "computes", "waits")} | {
        "listens": ["told SIGTERM", "abandoned"]
    }
    running = {
        what: subprocess.Popen([sys.executable, "-c", PROGRAM, what, loop], stdout=subprocess.PIPE, text=True)
        for what in does
    }
    try:
        for process in running.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for seconds in (0.0, 0.3, 1.2):  # two within a second are one: a terminal's and a shell's
            time.sleep(seconds)
            for what, process in running.items():
                if what != "listens" or not seconds:
                    process.send_signal(signal.SIGTERM)
            if seconds < 1.0:
                assert {process.poll() for process in running.values()} == {None}
        running["listens"].send_signal(signal.SIGINT)
        for what, process in running.items():
            said, _ = process.communicate(timeout=10)
            assert (process.returncode, said.split("\n")[:-1]) == (ExitCode.INTERRUPTED_TWICE, does[what]), what
    finally:
        for process in running.values():
            process.kill()
