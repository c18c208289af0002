"""Run seeds: ``python -m tests.simulator --seeds 0:10000 [--mode safety|liveness|both] [--jobs 2] [--bug NAME]``.

``--rules`` runs the same faults, and workers that hang, lie about time and share names, under every rule and codec.
``--seed N -v`` replays one run with its trace; ``--planted`` runs every planted bug until a seed catches it and, with
``--write``, puts the table into docs/planted-bugs.md. The exit code is 0 where nothing was lost, twice or stuck.
"""

from __future__ import annotations

import argparse
import sys

import torch
from tests.generated.__main__ import campaign
from tests.simulator.bugs import BUGS
from tests.simulator.campaign import mode_of, one, report, run_planted, run_seeds, say
from tests.simulator.world import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:200", metavar="FROM:TO")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--mode", choices=("safety", "liveness", "both"), default="both")
    parser.add_argument("--bug", choices=sorted(BUGS), default="", metavar="NAME", help=", ".join(sorted(BUGS)))
    parser.add_argument(
        "--kind", choices=KINDS, default="",
        help="islands: some workers have several ranks, each with a link; curses: a sample that no worker can compute",
    )  # fmt: skip
    parser.add_argument("--planted", action="store_true", help="run every planted bug until it is caught")
    parser.add_argument("--write", action="store_true", help="with --planted: write docs/planted-bugs.md")
    parser.add_argument("--most", type=int, default=400, help="with --planted: seeds for each bug")
    parser.add_argument("--rules", action="store_true", help="every rule and codec, on jobs of tests.generated")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("-v", "--verbose", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.planted:
        return run_planted(given.most, given.jobs, given.write)
    if given.rules:
        return campaign(given.seeds, given.jobs, draw="storm")
    if given.seed is not None:
        outcome = one(given.seed, mode_of(given.seed, given.mode), given.bug, kind=given.kind, verbose=given.verbose)
        for line in outcome.trace:
            say(line)
        report(outcome, given.bug, given.kind) if outcome.violations else say("no violation")
        say(f"trace {outcome.trace_hash}, {outcome.steps} steps, {outcome.virtual_s:.1f} s of virtual time")
        return 1 if outcome.violations else 0
    first, _, last = given.seeds.partition(":")
    return run_seeds(list(range(int(first), int(last))), given.mode, given.bug, given.kind, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
