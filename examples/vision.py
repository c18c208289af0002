"""A vision transformer of transformers on scikit-learn's 1797 handwritten digits, or on your own images.

    python -m w5xde_async.coordinator vision.py:job --workers 2

As it stands nothing is downloaded: a small model begins with random weights. BASE is a folder or a model of the hub to
begin with, such as ``BASE=google/vit-base-patch16-224-in21k``. Workers on other machines need neither this file nor
transformers nor the images.
"""

from __future__ import annotations

import os

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig

from w5xde_async import Job

BASE = os.environ.get("BASE", "")
CLASSES, HELD_OUT, STEPS = 10, 297, 300


def model() -> nn.Module:
    if BASE:  # with a new last layer, for these classes
        return AutoModelForImageClassification.from_pretrained(
            BASE, num_labels=CLASSES, ignore_mismatched_sizes=True, dtype=torch.float32
        )
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=CLASSES, **size)
    return AutoModelForImageClassification.from_config(config)


class Digits(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images as the model wants them: its processor resizes and normalizes them when they are asked for."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """``images``: (samples, 8, 8), from 0 to 1."""
        self.images, self.labels = images.unsqueeze(1), labels
        self.processor = AutoImageProcessor.from_pretrained(BASE) if BASE else None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        if self.processor is None:
            image = image - 0.5
        else:
            image = self.processor(image.expand(3, 8, 8), do_rescale=False, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": image, "labels": self.labels[index]}


def job() -> Job:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(data.images, dtype=torch.float32) / 16)[order]
    labels = torch.tensor(data.target, dtype=torch.int64)[order]
    train, held_out = Digits(images[HELD_OUT:], labels[HELD_OUT:]), Digits(images[:HELD_OUT], labels[:HELD_OUT])

    def evaluate(model: nn.Module) -> dict[str, float]:
        hits, losses = 0, 0.0
        for sample in held_out:
            found = model(**{name: value.unsqueeze(0) for name, value in sample.items()})
            hits += int(found.logits.argmax() == sample["labels"])
            losses += found.loss.item()
        return {"accuracy": hits / len(held_out), "val_loss": losses / len(held_out)}

    return Job(
        model=model,
        dataset=train,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-5 if BASE else 3e-3, fused=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, optimizer.param_groups[0]["lr"], total_steps=STEPS + 1
        ),
        batch_size=64,
        microbatch_size=16,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        evaluate=evaluate,
        keep_best="accuracy",
    )
