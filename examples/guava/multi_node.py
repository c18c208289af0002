"""Guava's example of several machines: one orchestrator, and workers that hold none of its code.

    MASTER_IP=192.168.1.100 NUM_WORKERS=2 python examples/guava/multi_node.py orchestrator
    MASTER_IP=192.168.1.100 W5XDE_JOIN_FILE=join python examples/guava/multi_node.py worker --gpu-id 0

With PIPELINE_PARALLEL=1 at the orchestrator each worker holds some of the model's layers; off its machine workers then
need ``sandbox="off"`` and ``interface=`` (docs/migrating-from-guava.md).

``join`` is a copy of the file that the orchestrator leaves in its checkpoint_dir. On one machine (MASTER_IP unset)
workers need no file.
"""

from __future__ import annotations

import argparse
import contextlib

from torch.utils.data import DataLoader
from transformer import Transformer, counting

from w5xde_async.facade.guava import DistributedConfig, NetworkWorker, Orchestrator


def orchestrate(config: DistributedConfig) -> None:
    config.vocab_size, config.d_model, config.n_heads, config.n_layers = 64, 64, 4, 2
    config.d_ff, config.max_seq_len, config.learning_rate, config.log_step_every = 128, 16, 2e-3, 4
    orchestrator = Orchestrator(config, mode="orchestrator")
    orchestrator.register_model(Transformer(config))
    result = orchestrator.start_training(DataLoader(counting(config), batch_size=32, shuffle=True), num_epochs=3)
    print(f"{result.outcome} after {result.step} steps: {result.model_path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["orchestrator", "worker"])
    parser.add_argument("--gpu-id", type=int, default=0)
    given = parser.parse_args()
    config = DistributedConfig.from_env()
    if given.role == "orchestrator":
        orchestrate(config)
    else:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: the work under way was finished
            NetworkWorker(given.gpu_id, config, config.master_ip, config.master_port).connect_and_train()
