"""The documents' own measurement, through W5XDE's interface: an MLP 10-20-10, one batch of 32 of 1000 samples a step.

A ``CentralServer`` and 1, 2 or 4 ``TrainingNode``s, each a process, between them TCP on loopback. Every batch is one
step of the optimizer that all nodes wait for (the documents' server trained nothing, and each node had batches of its
own). The documents claim 13,876 batches in 30 s with several nodes, stable rates whatever their number, 14 s of network
time in 30, and 755 MB.

Figures: ``batches_per_s_1``, ``_2``, ``_4``; ``two_nodes_over_one`` and ``four_nodes_over_one`` (rates of one round:
aim 1.0); ``batches_in_30_s`` (of two nodes); ``network_share_*``: of a node's time, while messages were sent or being
received; ``server_mb``, ``node_mb``: resident, with two nodes (each process has torch; ``import_mb`` is torch alone).
The bench fails where the loss has not fallen.
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from typing import Any

import torch
from torch import nn

from models import Reply, Rig, classes, cpu_seconds, serve
from report import Report, median, parser
from w5xde_async.errors import W5xdeError
from w5xde_async.facade.w5xde import CentralServer, TrainingNode
from w5xde_async.telemetry.events import Event, StepCommitted, WorkerJoined
from w5xde_async.telemetry.memory import host_bytes

CLAIMS = {
    "batches_in_30_s": "13,876 (2,733 before their changes)", "network_share_2": "0.47 (14 s of 30)",
    "server_mb": "755 (a node's, or the whole)", "node_mb": "755 (a node's, or the whole)",
    "two_nodes_over_one": "stable rates, so 1.0", "four_nodes_over_one": "stable rates, so 1.0",
}  # fmt: skip


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="rounds of 1, 2 and 4 nodes (5; 2 with --quick)")
    flags.add_argument("--seconds", type=float, default=0.0, help="that each of them is measured (4; 2 with --quick)")
    flags.add_argument("--width", type=int, default=20, help="of the hidden layer (20)")
    flags.add_argument("--batch", type=int, default=32, help="samples of a batch (32)")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"server": server, "node": node})
        return
    rounds, seconds = args.rounds or (2 if args.quick else 5), args.seconds or (2.0 if args.quick else 4.0)
    shape = {"width": args.width, "batch": args.batch}
    report = Report({"rounds": rounds, "seconds": seconds, **shape})
    found: dict[str, list[float]] = {}
    with Rig(__file__, ["server", *(f"node-{index}" for index in range(4))]) as rig:
        for _ in range(rounds):
            rates = {}
            for nodes in (1, 2, 4):
                seen = measure(rig, nodes, seconds, shape)
                rates[nodes] = seen["rate"]
                note(found, f"batches_per_s_{nodes}", seen["rate"])
                note(found, f"network_share_{nodes}", seen["network_share"])
                note(found, f"cpu_ms_{nodes}", seen["cpu_ms"])
                if nodes == 2:
                    note(found, "batches_in_30_s", 30 * seen["rate"])
                    note(found, "server_mb", seen["server_mb"])
                    note(found, "node_mb", seen["node_mb"])
                    note(found, "import_mb", seen["import_mb"])
            note(found, "two_nodes_over_one", rates[2] / rates[1])
            note(found, "four_nodes_over_one", rates[4] / rates[1])
    for name, samples in found.items():
        report.add(name, samples)
    report.show()
    print("\nthe documents' claims, of another machine and another work:")
    for name, claim in CLAIMS.items():
        print(f"{name:<22} {report.figures[name]:>12,.4g}   claimed: {claim}")
    report.write(args.json)


def note(found: dict[str, list[float]], name: str, value: float) -> None:
    found.setdefault(name, []).append(value)


def measure(rig: Rig, nodes: int, seconds: float, shape: dict[str, Any]) -> dict[str, float]:
    """One run of so many nodes: batches a second, and what nodes and server said of themselves."""
    names = ["server", *(f"node-{index}" for index in range(nodes))]
    rig["server"].tell("server", nodes=nodes, seconds=seconds, **shape)
    begun = rig["server"].answer()
    for name in names[1:]:
        rig[name].tell("node", port=begun["port"], width=shape["width"])
    rig["server"].answer()  # it is warm
    pids = [rig[name].pid for name in names]
    used = sum(map(cpu_seconds, pids))
    passed = rig["server"].answer()
    used = sum(map(cpu_seconds, pids)) - used
    if not passed["loss_last"] < passed["loss_first"]:
        raise SystemExit(f"the loss has not fallen: {passed['loss_first']:.4f} to {passed['loss_last']:.4f}")
    told = [rig[name].answer() for name in names[1:]]
    return {
        "rate": passed["steps"] / passed["seconds"], "cpu_ms": 1e3 * used / passed["steps"],
        "server_mb": passed["host_mb"], "import_mb": begun["host_mb"],
        "node_mb": median([one["host_mb"] for one in told]),
        "network_share": median([one["network_s"] / one["seconds"] for one in told]),
    }  # fmt: skip


def made(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 10))


_imported_mb = [0.0]


def server(reply: Reply, *, nodes: int, seconds: float, width: int, batch: int) -> None:
    """Answers its port, that it is warm, and what it did in ``seconds``."""
    _imported_mb[0] = _imported_mb[0] or host_bytes() / 1e6
    training = CentralServer(
        made(width), classes(1000, 10), batch_size=batch, port=0, checkpoint_dir=None, log="silent",
        optimizer_kwargs={"lr": 1e-3},
    )  # fmt: skip
    losses: list[float] = []
    there = threading.Semaphore(0)

    def see(event: Event) -> None:
        if isinstance(event, StepCommitted):
            losses.append(event.loss)
        elif isinstance(event, WorkerJoined):
            there.release()

    training.bus.subscribe(see)
    running = threading.Thread(target=training.start)
    running.start()
    training.listening.wait()
    reply(port=training.port, host_mb=_imported_mb[0])
    for _ in range(nodes):
        there.acquire()
    time.sleep(1.0)
    reply(warm=True)
    began, before = time.perf_counter(), len(losses)
    time.sleep(seconds)
    steps, took = len(losses) - before, time.perf_counter() - began
    training.stop()
    running.join()
    last = losses[-50:]
    reply(
        steps=steps, seconds=took, loss_first=sum(losses[:50]) / 50, loss_last=sum(last) / len(last),
        host_mb=host_bytes() / 1e6,
    )  # fmt: skip


def node(reply: Reply, *, port: int, width: int) -> None:
    """Works until the server has gone; answers what it did."""
    spent = [0.0]

    def see(sent: int, received: int, compressing: float, network_s: float, before: int, after: int) -> None:
        spent[0] += network_s

    working = TrainingNode(
        made(width), ("localhost", port), collect_metrics=True, log="silent", timeout_s=0.5, device="cpu"
    )  # fmt: skip
    began = time.perf_counter()
    try:
        working.train(network_callback=see)
    except W5xdeError as error:
        raise SystemExit(f"node: {error}") from None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    reply(seconds=time.perf_counter() - began, network_s=spent[0], host_mb=host_bytes() / 1e6, peak_mb=peak)


if __name__ == "__main__":
    main()
