"""What TLS costs: a coordinator and two worker processes, exact float32 over loopback, with and without it.

The same job, the same steps, in turn (A B A B) in processes that stay; both must end in the same parameters. Over TLS
the workers join by the join string: certificate pinned, proofs bound to it. A figure is the median of the pairs'
ratios of steps a second: ``over_plain_mlp`` (0.67M parameters), ``over_plain_gpt`` (10.9M). Loopback has no limit of
its own, so this is the most that TLS can cost; a slower network hides it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from models import Rig, coordinate, make_job, serve, work
from report import Report, median, parser

#: Steps of a round and, before them, steps that warm up: (full, quick, warm).
STEPS = {"mlp": (200, 60, 10), "gpt": (16, 5, 2)}
WORKERS = ("worker-0", "worker-1")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=0, help="pairs of rounds of each model (7; 3 with --quick)")
    flags.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS), help="only these")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"coordinate": coordinate, "work": work})
        return
    pairs = args.pairs or (3 if args.quick else 7)
    steps = {name: STEPS[name][int(args.quick)] for name in args.models}
    report = Report({"pairs": pairs, "steps": steps, "workers": 2, "threads": 1})
    with Rig(__file__, ["coordinator", *WORKERS]) as rig, tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            compare(report, rig, name, steps[name], pairs, Path(folder))
    report.show()
    report.write(args.json)


def compare(report: Report, rig: Rig, name: str, steps: int, pairs: int, folder: Path) -> None:
    samples = make_job(name).batch_size
    rates: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        digests = set()
        for tls in (True, False) if pair % 2 else (False, True):
            ended = run(rig, name, steps, folder, tls=tls)
            rates[tls].append(ended["rate"] * samples)
            digests.add(ended["digest"])
        if len(digests) != 1:
            raise SystemExit(f"{name}: the parameters differ with and without TLS")
    report.add(f"over_plain_{name}", [a / b for a, b in zip(rates[True], rates[False], strict=True)])
    for tls, found in rates.items():
        report.add(f"{'tls' if tls else 'plain'}_samples_per_s_{name}", found)
    print(f"{name}: {median(rates[True]):,.1f} samples/s over TLS, {median(rates[False]):,.1f} without")


def run(rig: Rig, name: str, steps: int, folder: Path, *, tls: bool) -> dict[str, Any]:
    warm = STEPS[name][2]
    options = {"steps": steps + warm}
    config = {"join_file": str(folder / "join")} if tls else {}
    rig["coordinator"].tell("coordinate", job=name, options=options, workers=2, warm_steps=warm, config=config)
    told = rig["coordinator"].answer()
    for worker in WORKERS:
        rig[worker].tell("work", port=told["port"], join=told["join"], job=name, options=options)
    rig["coordinator"].answer()  # it is warm
    passed = rig["coordinator"].answer()
    ended = rig["coordinator"].answer()
    for worker in WORKERS:
        rig[worker].answer()
    return ended | {"rate": passed["steps"] / passed["seconds"]}


if __name__ == "__main__":
    main()
