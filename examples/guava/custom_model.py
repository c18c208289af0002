"""Guava's example of a model, a dataset and a loss of one's own.

python examples/guava/custom_model.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from w5xde_async.facade.guava import DistributedConfig, Orchestrator


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Sine waves of several frequencies with noise, and what they are without it."""

    def __init__(self, count: int = 512) -> None:
        generator = torch.Generator().manual_seed(0)
        frequencies = torch.rand(count, 1, generator=generator) * 6 + 1
        self.clean = torch.sin(frequencies * torch.linspace(0, 1, 64))
        self.noisy = self.clean + 0.3 * torch.randn(count, 64, generator=generator)

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.noisy[index], self.clean[index]


class Denoiser(nn.Module):
    """Its middle is checkpointed: computed again in backward, in place of being kept."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 16, 5, padding=2)
        self.middle = nn.Sequential(nn.Conv1d(16, 16, 5, padding=2), nn.GELU(), nn.Conv1d(16, 16, 5, padding=2))
        self.leave = nn.Conv1d(16, 1, 5, padding=2)

    def forward(self, waves: Tensor) -> Tensor:
        x = torch.relu(self.enter(waves.unsqueeze(1)))
        out: Tensor = self.leave(x + checkpoint(self.middle, x, use_reentrant=False))
        return out.squeeze(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error, and that of the slopes."""
    return F.l1_loss(output, target) + F.l1_loss(output.diff(), target.diff())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--port", type=int, default=29500)
    given = parser.parse_args()
    config = DistributedConfig(
        num_workers=given.workers, learning_rate=3e-3, max_grad_norm=1.0, master_port=given.port, log_step_every=4
    )
    orchestrator = Orchestrator(config)
    orchestrator.register_model(Denoiser(), criterion=loss)
    result = orchestrator.start_training(DataLoader(Waves(), batch_size=32, shuffle=True), num_epochs=given.epochs)
    print(f"{result.outcome} after {result.step} steps: {result.model_path}")
