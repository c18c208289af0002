"""The seeds' headline work: an MLP 10-20-10, batches of 32 of 1000 synthetic samples, 2 and 10 workers on this machine.

Coordinator and workers are processes, between them TCP on loopback. A batch is a leaf: a worker computes its gradient
over 32 samples, the step adds up ``--leaves`` of them in tree order and applies their mean; every batch is applied, at
staleness 0 (synchronous). The 1000 samples are tiled so that a step can have that many leaves. Beside it, in the same
run: plain PyTorch loops over the same leaves without any network, two processes at once: what two cores can do at all.

Figures: ``batches_per_s_2``, ``batches_per_s_10`` (aims: 24,000 and 20,000), ``loss_first``, ``loss_last`` (of the 10
workers' run; the bench fails where the loss has not fallen), ``plain_batches_per_s`` (both processes), and
``cpu_us_2``, ``cpu_us_10``, ``plain_cpu_us``: processor time a batch, all processes, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.nn import functional

from models import Reply, Rig, coordinate, cpu_seconds, make_job, serve, work
from report import Report, median, parser


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--leaves", type=int, default=1280, help="leaves a step (1280)")
    flags.add_argument("--rounds", type=int, default=0, help="windows that are measured (5; 3 with --quick)")
    flags.add_argument("--processes", type=int, default=10, help="processes that hold the 10 workers (10)")
    flags.add_argument("--sweep", action="store_true", help="also other leaves a step and spreads of the 10 workers")
    flags.add_argument("--profile", action="store_true", help="one short run of 2 workers under cProfile, nothing else")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"coordinate": coordinate, "work": work, "plain": plain})
        return
    windows, window_s = args.rounds or (3 if args.quick else 5), 1.5 if args.quick else 4.0
    processes = 10 if args.sweep else max(2, args.processes)
    options = {"leaves": args.leaves}
    report = Report(
        {"leaves": args.leaves, "windows": windows, "window_s": window_s, "processes_of_10": args.processes}
    )
    with Rig(__file__, ["coordinator", *(f"worker-{index}" for index in range(processes))]) as rig:
        if args.profile:
            show_profile(rig, options)
            return
        print(f"{args.leaves} leaves of 32 samples a step, staleness 0, {windows} windows of {window_s:g} s")
        rates, cpu_us = alone(rig, options, windows, window_s / 2)
        report.add("plain_batches_per_s", rates)
        report.add("plain_cpu_us", cpu_us)
        for spread in ([1, 1], shared_out(10, args.processes)):
            run = measure(rig, spread, options, windows, window_s)
            report.add(f"batches_per_s_{sum(spread)}", run["rates"])
            used = zip(run["worker_share"], run["coordinator_share"], run["rates"], strict=True)
            report.add(f"cpu_us_{sum(spread)}", [(w + c) / rate * 1e6 for w, c, rate in used])
            show(run, spread, args.leaves)
        report.add("loss_first", [run["loss_first"]])
        report.add("loss_last", [run["loss_last"]])
        if args.sweep:
            sweep(rig, window_s)
    print()
    report.show()
    report.write(args.json)


def shared_out(workers: int, processes: int) -> list[int]:
    return [workers // processes + (index < workers % processes) for index in range(processes)]


def measure(rig: Rig, spread: list[int], options: dict[str, Any], windows: int, window_s: float) -> dict[str, Any]:
    """One run with ``spread[i]`` workers in process i: the windows' rates, then one more that is observed."""
    pids = [rig[f"worker-{index}"].pid for index in range(len(spread))]
    run: dict[str, Any] = {"rates": [], "coordinator_share": [], "worker_share": []}
    for observe in (False, True):
        count = 1 if observe else windows
        seconds = max(1.0, window_s / 2) if observe else window_s
        begin(rig, spread, options, warm_s=1.0, windows=count, window_s=seconds, observe=observe)
        rig["coordinator"].answer()  # it is warm
        used = sum(map(cpu_seconds, pids))
        for _ in range(count):
            passed = rig["coordinator"].answer()
            now = sum(map(cpu_seconds, pids))
            if not observe:
                run["rates"].append(passed["steps"] * options["leaves"] / passed["seconds"])
                run["coordinator_share"].append(passed["cpu_s"] / passed["seconds"])
                run["worker_share"].append((now - used) / passed["seconds"])
            used = now
        ended = end(rig, spread)
        if observe:
            run["observed"] = ended
        else:
            run |= {"loss_first": ended["loss_first"], "loss_last": ended["loss_last"], "steps": ended["step"]}
    if not run["loss_last"] < run["loss_first"]:
        raise SystemExit(f"the loss has not fallen: {run['loss_first']:.4f} to {run['loss_last']:.4f}")
    return run


def begin(rig: Rig, spread: list[int], options: dict[str, Any], **how: Any) -> None:
    profile = how.get("profile", False)
    rig["coordinator"].tell(
        "coordinate", job="seeds", options=options, workers=sum(spread), pacing={"short_steps": "here"}, **how
    )
    port = rig["coordinator"].answer()["port"]
    for index, count in enumerate(spread):
        told = {"port": port, "job": "seeds", "options": options, "count": count}
        rig[f"worker-{index}"].tell("work", **told, profile=profile and index == 0)


def end(rig: Rig, spread: list[int]) -> dict[str, Any]:
    ended = rig["coordinator"].answer()
    for index in range(len(spread)):
        rig[f"worker-{index}"].answer()
    return ended


def show(run: dict[str, Any], spread: list[int], leaves: int) -> None:
    seen = run["observed"]
    done = sum(share["leaves"] for share in seen["shares"])
    steps = max(seen["observed"], 1)
    print(f"\n{sum(spread)} workers in {len(spread)} processes ({'+'.join(map(str, spread))}): "
          f"{median(run['rates']):,.0f} batches/s, loss {run['loss_first']:.4f} to {run['loss_last']:.4f} "
          f"in {run['steps']} steps")  # fmt: skip
    rows = {
        "worker computes": sum(share["compute_s"] for share in seen["shares"]) / done,
        "worker waits": sum(share["wait_s"] for share in seen["shares"]) / done,
        "coordinator's CPU": median(run["coordinator_share"]) / median(run["rates"]),
        "workers' CPU": median(run["worker_share"]) / median(run["rates"]),
    }
    rows |= {f"step: {name}": seconds / steps / leaves for name, seconds in seen["phases"].items()}
    for name, seconds in rows.items():
        print(f"  {name:<20} {seconds * 1e6:8.2f} us a batch")
    print(f"  coordinator {median(run['coordinator_share']):.2f} core, workers {median(run['worker_share']):.2f} core")


def alone(rig: Rig, options: dict[str, Any], windows: int, window_s: float) -> tuple[list[float], list[float]]:
    """Two plain loops at once: their rates, added up, and the processor time of a batch in each."""
    for index in range(2):
        rig[f"worker-{index}"].tell("plain", options=options, windows=windows, window_s=window_s)
    answers = [rig[f"worker-{index}"].answer() for index in range(2)]
    rates = [sum(pair) for pair in zip(*[answer["rates"] for answer in answers], strict=True)]
    return rates, [answer["cpu_us"] for answer in answers]


def plain(reply: Reply, *, options: dict[str, Any], windows: int, window_s: float) -> None:
    """The same leaves in a plain loop: gradients summed by autograd, the optimizer after every step's leaves."""
    job = make_job("seeds", **options)
    model = job.model()
    optimizer = job.optimizer(model)
    x, y = job.dataset.tensors
    leaves = options["leaves"]

    def step() -> None:
        order = torch.randperm(len(x))[: 32 * leaves]
        xs, ys = x[order], y[order]
        optimizer.zero_grad(set_to_none=False)
        for leaf in range(leaves):
            at = slice(32 * leaf, 32 * leaf + 32)
            (functional.cross_entropy(model(xs[at]), ys[at]) / leaves).backward()
        optimizer.step()

    for _ in range(5):
        step()
    rates, counts, used = [], [], time.process_time()
    for _ in range(windows):
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < window_s:
            step()
            steps += 1
        counts.append(steps)
        rates.append(steps * leaves / (time.perf_counter() - began))
    reply(rates=rates, cpu_us=(time.process_time() - used) / sum(counts) / leaves * 1e6)


def sweep(rig: Rig, window_s: float) -> None:
    print("\nother leaves a step (2 workers; 10 in 2 processes)")
    for leaves in (32, 128, 320, 1280):
        pair = [measure(rig, spread, {"leaves": leaves}, 1, window_s) for spread in ([1, 1], [5, 5])]
        print(f"  {leaves:>5} {median(pair[0]['rates']):>10,.0f} {median(pair[1]['rates']):>10,.0f}")
    print("\nthe 10 workers in so many processes")
    for processes in (1, 2, 5, 10):
        run = measure(rig, shared_out(10, processes), {"leaves": 1280}, 1, window_s)
        print(f"  {processes:>5} {median(run['rates']):>10,.0f}")


def show_profile(rig: Rig, options: dict[str, Any]) -> None:
    begin(rig, [1, 1], options, warm_s=1.0, windows=1, window_s=4.0, profile=True)
    rig["coordinator"].answer()
    passed = rig["coordinator"].answer()
    rig["coordinator"].answer()
    print(f"{passed['steps'] * options['leaves']} batches in {passed['seconds']:.1f} s, under cProfile")
    tables = rig["coordinator"].answer()["profile"]
    rig["worker-0"].answer()
    for who, listed in (("coordinator", tables), ("worker", rig["worker-0"].answer()["profile"])):
        for thread, table in listed:
            print(f"--- {who}, {thread}\n{table}")
    rig["worker-1"].answer()


if __name__ == "__main__":
    main()
