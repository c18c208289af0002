"""Guava's transformer example: a small language model on one machine, a worker for each GPU (one on the CPU).

python examples/guava/transformer.py
python examples/guava/transformer.py --workers 2
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from w5xde_async.facade.guava import DistributedConfig, Orchestrator


class Transformer(nn.Module):
    def __init__(self, config: DistributedConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.max_seq_len, config.d_model)
        layer = nn.TransformerEncoderLayer(
            config.d_model, config.n_heads, config.d_ff, config.dropout, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.n_layers)
        self.output = nn.Linear(config.d_model, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.output(self.layers(self.embedding(tokens) + self.position(places)))
        return out


def counting(config: DistributedConfig, samples: int = 512) -> TensorDataset:
    """Sequences that count up from anywhere; each token's target is the next."""
    starts = torch.randint(config.vocab_size, (samples, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(config.max_seq_len)) % config.vocab_size
    return TensorDataset(tokens, (tokens + 1) % config.vocab_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--port", type=int, default=29500)
    given = parser.parse_args()
    config = DistributedConfig(
        vocab_size=64, d_model=64, n_heads=4, n_layers=2, d_ff=128, max_seq_len=16, learning_rate=2e-3,
        num_workers=given.workers, master_port=given.port, log_step_every=4,
    )  # fmt: skip
    orchestrator = Orchestrator(config)
    orchestrator.register_model(Transformer(config))
    loader = DataLoader(counting(config), batch_size=32, shuffle=True)
    result = orchestrator.start_training(loader, num_epochs=given.epochs)
    print(f"{result.outcome} after {result.step} steps: {result.model_path}")
