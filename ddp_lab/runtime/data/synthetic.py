"""Workloads that need no text: regression for an MLP, random tokens for a decoder-only transformer, and for a small CNN
handwritten digits of 8 x 8 pixels, which come with scikit-learn."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.watch.phases import BUILDING, during

VOCABULARY = 10_000
CONTEXT_LENGTH = 128
TRANSFORMER_SHAPES = {
    "transformer-small": (768, 3072, 12, 12),
    "transformer-medium": (1024, 4096, 24, 16),
    "transformer-large": (1280, 5120, 36, 20),
    "transformer-xl": (1600, 6400, 48, 25),
    "transformer-2.7b": (2560, 10240, 32, 32),
}
"""d_model, d_ff, layers, heads."""
HELD_OUT_DIGITS = 360
"""Held out of the 1797 images: the same ones whatever the seed."""
SHADES = 16.0


class MLP(nn.Module):
    """`depth` bias-free linear layers of `width` features, with ReLU between them; mean squared error."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor, targets: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=nn.functional.mse_loss(self.layers(inputs), targets))


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


class SyntheticSamples(Sequence[dict[str, Tensor]]):
    """`count` random samples, made when they are read; the same for the same seed and index. `width`: features of a
    regression sample; None for tokens."""

    def __init__(self, count: int, seed: int, width: int | None) -> None:
        self._count, self._seed, self._width = count, seed, width

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        if self._width is not None:
            inputs = torch.randn(self._width, generator=generator, dtype=torch.float32, device="cpu")
            return {"inputs": inputs, "targets": inputs.flip(0)}
        tokens = torch.randint(VOCABULARY, (CONTEXT_LENGTH,), generator=generator, device="cpu")
        return {"input_ids": tokens, "labels": tokens}


def build(config: RunConfig) -> Workload:
    """Workload `digits`, `mlp` or one of `transformer-*`."""
    if config.workload == "digits":
        return _digits(config)
    is_mlp = config.workload == "mlp"
    width = config.width if is_mlp else None
    return Workload(
        model=MLP(config.depth, config.width) if is_mlp else _transformer(config.workload),
        train=SyntheticSamples(config.train_samples or 512, 2 * config.seed, width),
        evaluation=SyntheticSamples(config.eval_samples or 32, 2 * config.seed + 1, width),
        learning_rate=1e-4,
    )


@during(BUILDING)
def _transformer(name: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    read_no_masks()
    d_model, d_ff, layers, heads = TRANSFORMER_SHAPES[name]
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=d_model,
            intermediate_size=d_ff,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT_LENGTH,
            use_cache=False,
        )
    )


def _digits(config: RunConfig) -> Workload:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images / SHADES).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    samples = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    held_out, training = order[:HELD_OUT_DIGITS], order[HELD_OUT_DIGITS:]
    return Workload(
        DigitsCNN(),
        [samples[index] for index in training[: config.train_samples]],
        [samples[index] for index in held_out[: config.eval_samples]],
        learning_rate=1e-3,
        classifies=True,
    )
