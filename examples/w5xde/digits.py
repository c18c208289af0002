"""What server and nodes of this example share: a model, and handwritten digits (scikit-learn's 1797 images)."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset


class DigitClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Digits(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        data = load_digits()
        self.images = torch.tensor(data.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(data.target, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.images[index], "labels": self.labels[index]}
