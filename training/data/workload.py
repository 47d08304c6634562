"""The type of a workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from training.data.sampling import Collate


@dataclass(frozen=True)
class Workload:
    """A model with the data to train it on.

    Attributes:
        model: Called as `model(**batch)`. Returns an object that has `.loss`, and `.logits` if it classifies.
        train, evaluation: Samples by index.
        collate: Makes a batch (keyword arguments of the model, CPU tensors) from a list of samples.
        learning_rate: Used if the user gives no `--lr`.
        classifies: Whether `logits.argmax(-1) == labels` is a meaningful accuracy.
    """

    model: nn.Module
    train: Sequence[Any]
    evaluation: Sequence[Any]
    collate: Collate
    learning_rate: float
    classifies: bool
