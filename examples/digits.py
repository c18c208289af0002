"""Handwritten digits (scikit-learn's 1797 images of 8x8 pixels): an MLP, and a CNN with batch norm and dropout.

    python -m w5xde_async.coordinator examples/digits.py:job --workers 2
    python -m w5xde_async.coordinator examples/digits.py:cnn --workers 2 --name digits-cnn

Both reach more than 95 % on images they have not seen, within seconds on a CPU.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async import Job

HELD_OUT = 360  # a fifth, the same images at every start


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training set, held-out images, held-out labels."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2024))
    images, labels = images[order], labels[order]
    return TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]), images[:HELD_OUT], labels[:HELD_OUT]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def job(make_model=mlp, epochs: int = 12) -> Job:  # type: ignore[no-untyped-def]
    train, images, labels = digits()

    def evaluate(model: nn.Module) -> dict[str, float]:
        logits = model(images)
        return {
            "accuracy": (logits.argmax(1) == labels).float().mean().item(),
            "val_loss": nn.functional.cross_entropy(logits, labels).item(),
        }

    return Job(
        model=make_model,
        dataset=train,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4, fused=True),
        loss=nn.functional.cross_entropy,
        batch_size=64,
        epochs=epochs,
        evaluate=evaluate,
    )


def cnn() -> Job:
    return job(convolutional, epochs=5)
