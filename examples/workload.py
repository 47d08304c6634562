"""A workload of your own. From the folder of the project:

    torchrun --standalone --nproc_per_node=2 main_ddp.py --ddp-choice simple_ddp --workload examples/workload.py:build

docs/own-workload.md explains each part.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from ddp_lab import Workload


class Progression(nn.Module):
    """Predicts how a disease goes on, from ten measurements of a patient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).squeeze(-1)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the samples, not the sum."""
    return nn.functional.mse_loss(output, batch["target"])


def build() -> Workload:
    diabetes = load_diabetes(scaled=True)
    features = torch.tensor(diabetes.data, dtype=torch.float32) * len(diabetes.data) ** 0.5
    target = torch.tensor((diabetes.target - diabetes.target.mean()) / diabetes.target.std(), dtype=torch.float32)
    samples = [{"features": row, "target": value} for row, value in zip(features, target, strict=True)]
    return Workload(Progression(), train=samples[:360], evaluation=samples[360:], loss=loss)
