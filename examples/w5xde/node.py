"""W5XDE's node: computes for ``server.py``, and prints what it loses and what it sends.

python examples/w5xde/node.py --server localhost:5555
"""

from __future__ import annotations

import argparse
import contextlib

from digits import DigitClassifier
from w5xde_async.facade.w5xde import TrainingNode


def show_loss(loss: float, batch_id: str) -> None:
    print(f"Batch {batch_id}: loss = {loss:.4f}")


def show_network(sent: int, received: int, comp_time: float, net_time: float, orig_size: int, comp_size: int) -> None:
    rate = (sent + received) / (1024 * max(net_time, 1e-9))
    print(f"  {rate:.0f} KB/s, {comp_time:.3f} s compressing, {net_time:.3f} s network, {orig_size / comp_size:.2f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", default="localhost:5555")
    given = parser.parse_args()
    node = TrainingNode(DigitClassifier, given.server, collect_metrics=True)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: the piece under way was finished, and others do the rest
        node.train(loss_callback=show_loss, network_callback=show_network)
    print(f"{node.bytes_sent / 1e6:.1f} MB sent, {node.bytes_received / 1e6:.1f} MB received")
