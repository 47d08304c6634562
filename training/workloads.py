"""Model and data pairs by name. Importing this module is cheap: libraries are loaded when a workload is built."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.config import RunConfig

if TYPE_CHECKING:
    from torch import nn

    from training.data import Collate

WORKLOADS = {
    "sample": "13 M-parameter Llama classifier, random weights, on built-in reviews; no download",
    "yelp": "SmolLM2-360M-Instruct on Yelp reviews from the hub, or --model and --dataset",
    "smollm2-360m": "SmolLM2-360M's architecture, random weights, on built-in reviews; no download",
    "mlp": "--depth bias-free linear + ReLU layers of --width features on synthetic regression data",
    "transformer-small": "d_model/d_ff/layers/heads 768/3072/12/12, random tokens",
    "transformer-medium": "d_model/d_ff/layers/heads 1024/4096/24/16, random tokens",
    "transformer-large": "d_model/d_ff/layers/heads 1280/5120/36/20, random tokens",
    "transformer-xl": "d_model/d_ff/layers/heads 1600/6400/48/25, random tokens",
    "transformer-2.7b": "d_model/d_ff/layers/heads 2560/10240/32/32, random tokens",
}
"""Name: sentence for `--help`, in display order."""

TRANSFORMER_SHAPES = {
    "transformer-small": (768, 3072, 12, 12),
    "transformer-medium": (1024, 4096, 24, 16),
    "transformer-large": (1280, 5120, 36, 20),
    "transformer-xl": (1600, 6400, 48, 25),
    "transformer-2.7b": (2560, 10240, 32, 32),
}
"""d_model, d_ff, layers, heads."""


@dataclass(frozen=True)
class Workload:
    """A model with the data to train it on.

    Attributes:
        model: Called as `model(**batch)`; answers with an object that has `.loss`, and `.logits` where it classifies.
        train, evaluation: Samples by index.
        collate: Makes a batch (keyword arguments of the model, CPU tensors) of a list of samples.
        learning_rate: What `--lr` is when it is not given.
        classifies: Whether `logits.argmax(-1) == labels` is a meaningful accuracy.
    """

    model: "nn.Module"
    train: Sequence[Any]
    evaluation: Sequence[Any]
    collate: "Collate"
    learning_rate: float
    classifies: bool


def build_workload(config: RunConfig) -> Workload:
    """The workload that `config.workload` names, the same on every rank. Collective.

    Raises:
        UserError: model or data cannot be found or do not fit.
    """
    if config.workload in ("sample", "smollm2-360m", "yelp"):
        from training import text

        return text.build(config)
    from training import synthetic

    return synthetic.build(config)
