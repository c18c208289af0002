"""Many seeds: their outcomes added up, and planted bugs hunted until a seed catches them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.simulator.bugs import BUGS, planted
from tests.simulator.cluster import Violation
from tests.simulator.faults import schedule
from tests.simulator.world import Outcome, simulate

__all__ = ["catch", "mode_of", "noticed", "one", "report", "run_planted", "run_seeds", "say", "unplanted"]

TABLE = Path(__file__).parents[2] / "docs" / "planted-bugs.md"
_HEAD = """# Planted bugs

What the simulator's checks are worth: each of these bugs was put into the real code at run time, and seeds were run
until one failed, with the faults that could bring it out. Made by `python -m tests.simulator --planted --write`; a seed
is replayed with `python -m tests.simulator --mode MODE --seed SEED --bug NAME -v`.

Checks: `lost`, `twice` and `bits` compare parameters, ledger and losses with a plain loop after every commit; `stuck`
is a run that does not end in bounded virtual time after its faults have stopped; `durability`, that a resume begins no
earlier than what was reported safe; `versions` and `term`, that no version is made twice in the history that survives,
and none by a coordinator that has been superseded; `deadline`, that no lease is kept beyond its deadline; `ledger`,
`memory` and `tasks`, the invariants, bounds and left-overs; `unexpected`, an error that no fault explains.

"""


def one(seed: int, mode: str, bug: str = "", *, kind: str = "", verbose: bool = False) -> Outcome:
    if not bug:
        return simulate(seed, mode, schedule, kind=kind, verbose=verbose)
    with planted(bug):
        return simulate(seed, mode, schedule, focus=BUGS[bug].faults, kind=BUGS[bug].kind, verbose=verbose)


def unplanted(seed: int, mode: str, bug: str) -> Outcome:
    """The same run without the bug: what fails in it is not the bug's doing."""
    return simulate(seed, mode, schedule, focus=BUGS[bug].faults, kind=BUGS[bug].kind)


def _prepare() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # loop and compute threads take turns: on one core the turn passes sooner
        cores = sorted(os.sched_getaffinity(0))
        number = multiprocessing.current_process()._identity
        os.sched_setaffinity(0, {cores[(number[0] if number else 0) % len(cores)]})


def _chunk(task: tuple[list[int], str, str, bool]) -> list[Outcome]:
    seeds, mode, bug, kind = task
    outcomes = []
    gc.disable()
    for seed in seeds:
        outcomes.append(one(seed, mode_of(seed, mode), bug, kind=kind))
        if seed % 16 == 0:
            gc.collect()
    gc.enable()
    return outcomes


def mode_of(seed: int, mode: str) -> str:
    """``both`` is liveness for even seeds and safety for odd ones."""
    return mode if mode != "both" else "safety" if seed % 2 else "liveness"


def _all(seeds: list[int], mode: str, bug: str, kind: str, jobs: int) -> Iterator[Outcome]:
    tasks = [(seeds[at : at + 50], mode, bug, kind) for at in range(0, len(seeds), 50)]
    if jobs == 1:
        for task in tasks:
            yield from _chunk(task)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare) as pool:
        for outcomes in pool.imap(_chunk, tasks):
            yield from outcomes


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(outcome: Outcome, bug: str, kind: str = "") -> None:
    for violation in outcome.violations:
        say(f"seed {outcome.seed} {outcome.mode} at {violation.at_s:.3f} s: {violation.kind}: {violation.text}")
    more = f" --bug {bug!r}" if bug else f" --kind {kind}" if kind else ""
    say(f"  replay: python -m tests.simulator --mode {outcome.mode} --seed {outcome.seed}{more} -v")


def run_seeds(seeds: list[int], mode: str, bug: str, kind: str, jobs: int) -> int:
    began = time.perf_counter()
    faults: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failed = steps = finished = recomputed = 0
    for outcome in _all(seeds, mode, bug, kind, jobs):
        faults += outcome.faults
        runs.update(outcome.faults.keys())
        steps += outcome.steps
        recomputed += outcome.recomputed
        finished += outcome.finished
        if outcome.violations:
            failed += 1
            kinds.update({violation.kind for violation in outcome.violations})
            report(outcome, bug, kind)
    seconds = time.perf_counter() - began
    say(f"{len(seeds)} seeds ({mode}) in {seconds:.0f} s, {seconds / len(seeds) * 1000:.0f} ms each with {jobs} jobs")
    say(f"lost {kinds['lost']}, twice {kinds['twice']}, stuck {kinds['stuck']}; seeds that failed {failed}")
    if failed:
        say(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    say(f"{finished} runs complete, {steps} steps survive, {recomputed} were computed again after a restart")
    say("faults that had their effect, and runs that met them:")
    for name, count in sorted(faults.items(), key=lambda item: -item[1]):
        say(f"  {count:7d} {runs[name]:6d}  {name}")
    return 1 if failed else 0


def noticed(outcome: Outcome) -> list[Violation]:
    """What a planted bug did: nothing, where an error says that the planting itself does not fit the code any more."""
    misfit = any(name in v.text for v in outcome.violations for name in ("TypeError", "AttributeError"))
    return [] if misfit else outcome.violations


def catch(bug: str, most: int) -> tuple[int, Outcome | None]:
    """Seeds run until the bug was noticed, and the outcome that noticed it."""
    for seed in range(most):
        outcome = one(seed, mode_of(seed, "both"), bug)
        if noticed(outcome):
            return seed + 1, outcome
    return most, None


def _catch(task: tuple[str, int]) -> tuple[str, int, Outcome | None]:
    return (task[0], *catch(*task))


def run_planted(most: int, jobs: int, write: bool) -> int:
    rows, missed = [], 0
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare) as pool:
        for name, needed, outcome in pool.imap(_catch, [(name, most) for name in BUGS]):
            if outcome is None:
                missed += 1
                rows.append(f"| {name} | {BUGS[name].text} | **not caught** in {needed} | | |")
            else:
                found = noticed(outcome)[0]
                rows.append(f"| {name} | {BUGS[name].text} | {found.kind} | {outcome.mode} {outcome.seed} | {needed} |")
            say(rows[-1])
    table = ["| bug | what it does | caught by | seed | seeds needed |", "|---|---|---|---|---|", *rows]
    say(f"{len(BUGS) - missed} of {len(BUGS)} caught")
    if write:
        TABLE.write_text(_HEAD + "\n".join(table) + f"\n\n{len(BUGS) - missed} of {len(BUGS)} caught.\n")
    return 1 if missed else 0
