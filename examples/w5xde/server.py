"""W5XDE's server: holds the model, hands out batches, trains with what comes back.

    python examples/w5xde/server.py
    python examples/w5xde/node.py          # in other terminals, as many as you like; they may come and go

With ``--ip 0.0.0.0`` nodes of other machines may join: docs/migrating-from-w5xde.md, "Other machines".
"""

from __future__ import annotations

import argparse

from digits import DigitClassifier, Digits
from w5xde_async.facade.w5xde import CentralServer

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ip", default="localhost")
    parser.add_argument("--port", type=int, default=5555)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    server = CentralServer(
        DigitClassifier(), Digits(), batch_size=128, ip=given.ip, port=given.port, num_epochs=given.epochs
    )
    result = server.start()
    print(f"{result.outcome} after {result.step} batches: {result.model_path}")
