"""Draw and run scenarios: ``python -m tests.generated --seeds 0:5000 [--jobs 2]``.

Each kind of failure is shown once, made small, as code to paste into a test; the exit code is 0 where there was none.
``--code 'Scenario(...)' -v`` runs one with its trace.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch
from tests.generated.runner import Report, run
from tests.generated.scenario import Fault, Scenario, drawn, known, lossy, smaller, storm

_BLOCK = 25  # scenarios that a process runs before it says what came of them


_Block = tuple[range, bool, str]  # seeds; also what meets a known fault; how they are drawn
_DRAWS = {"": drawn, "storm": storm, "lossy": lossy}


def made_small(report: Report, *, most_s: float = 60.0) -> Report:
    """The simplest scenario that was found to fail in the same way."""
    best, known, began = report, set[Scenario](), time.perf_counter()
    again = True
    while again:
        again = False
        for candidate in smaller(best.scenario):
            if time.perf_counter() - began > most_s:
                return best
            if candidate in known or candidate == best.scenario or not candidate.valid():
                continue
            known.add(candidate)
            tried = run(candidate)
            if set(tried.signature) & set(report.signature):
                best, again = tried, True
                break
    return best


def _block(task: _Block) -> list[Report]:
    seeds, open_too, draw = task
    torch.set_num_threads(1)
    reports = []
    for seed in seeds:
        scenario = _DRAWS[draw](seed)
        if known(scenario) and not open_too:
            continue
        report = run(scenario)
        report.trace.clear()
        reports.append(report)
    return reports


def _reports(blocks: list[_Block], jobs: int) -> Iterator[Report]:
    if jobs == 1:
        for block in blocks:
            yield from _block(block)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for reports in pool.imap_unordered(_block, blocks):
            yield from reports


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _show(report: Report) -> None:
    for violation in report.violations:
        _say(f"  {violation.kind} at {violation.at_s:.1f} s: {violation.text}")
    _say(f"    {report.scenario!r}\n")


def campaign(seeds: str, jobs: int, *, open_too: bool = False, draw: str = "", as_drawn: bool = False) -> int:
    """Run them and say what failed; the exit code."""
    began = time.perf_counter()
    first, _, last = seeds.partition(":")
    ends = range(int(first), int(last), _BLOCK)
    blocks = [(range(begin, min(begin + _BLOCK, int(last))), open_too, draw) for begin in ends]
    signatures: Counter[tuple[str, ...]] = Counter()
    hits: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    count = 0
    for report in _reports(blocks, jobs):
        count += 1
        hits.update(report.hits)
        rules[report.scenario.rule] += 1
        if report.refused:
            refused[report.refused[:100]] += 1
        if report.violations:
            signatures[report.signature] += 1
            if signatures[report.signature] == 1:
                _say(f"{'; '.join(report.signature)}")
                _show(report if as_drawn else made_small(report))
    seconds = time.perf_counter() - began
    _say(f"{count} scenarios in {seconds:.0f} s ({seconds / max(count, 1) * 1000:.0f} ms each): {dict(rules)}")
    for what, number in (*signatures.most_common(), *refused.most_common()):
        _say(f"  {number:5d}  {what if isinstance(what, str) else '; '.join(what)}")
    _say(f"faults that had their effect: {dict(sorted(hits.items()))}")
    return 1 if signatures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--seeds", default="0:200", metavar="FROM:TO")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--code", default="", help="run this one: Scenario(...)")
    parser.add_argument("--as-drawn", action="store_true", help="do not make failures small")
    parser.add_argument("--open", action="store_true", help="also what meets a fault that is known (scenario.OPEN)")
    parser.add_argument("--of", choices=_DRAWS, default="", help="runs of one kind, in place of any")
    parser.add_argument("-v", "--verbose", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.code:
        report = run(eval(asked.code, {"Scenario": Scenario, "Fault": Fault}), verbose=asked.verbose)
        for line in report.trace:
            _say(line)
        _say(report.refused or f"{len(report.violations)} violations in {report.virtual_s:.0f} s of virtual time")
        _show(report)
        return 1 if report.violations else 0
    return campaign(asked.seeds, asked.jobs, open_too=asked.open, draw=asked.of, as_drawn=asked.as_drawn)


if __name__ == "__main__":
    sys.exit(main())
