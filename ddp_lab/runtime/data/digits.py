"""Workload `digits`: handwritten digits of 8 x 8 pixels, which come with scikit-learn, and a small CNN."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workload import Workload

EVAL_SAMPLES = 360
"""Held out of the 1797 images: the same ones whatever the seed."""
SHADES = 16.0


class DigitsCNN(nn.Module):
    """Two convolutions with batch normalization, and two linear layers; cross entropy over ten classes.

    Batch normalization has buffers: means and variances of what it has seen, which evaluation uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 2 * 2, 512), nn.ReLU(), nn.Linear(512, 10)),
        )

    def forward(self, images: Tensor, labels: Tensor) -> SimpleNamespace:
        """`images` (samples, 1, 8, 8), `labels` (samples,)."""
        logits = self.layers(images)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def build(config: RunConfig) -> Workload:
    """Workload `digits`."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images / SHADES).float().unsqueeze(1)
    labels = torch.from_numpy(found.target).long()
    samples = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    held_out, training = order[:EVAL_SAMPLES], order[EVAL_SAMPLES:]

    def chosen(indices: Sequence[int], count: int | None) -> list[dict[str, Any]]:
        return [samples[index] for index in indices[:count]]

    return Workload(
        DigitsCNN(),
        chosen(training, config.train_samples),
        chosen(held_out, config.eval_samples),
        learning_rate=1e-3,
        classifies=True,
    )
