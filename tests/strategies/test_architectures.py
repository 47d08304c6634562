"""Real architectures, tiny and with random weights: three steps as in one process, by every choice.

The test compares the model's own loss, a mean over samples or tokens, of which all ranks have the same number. Dropout
is off. BatchNorm (ResNet) has statistics of a rank's own samples; the one process sees the same micro-batches.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import FAMILIES, NAMES, in_own_loops
from tests.ranks import RankPool
from tests.strategies.cases.case import SAMPLES, LoopCase, LoopOutcome, Run, Samples, in_one_process, on_a_rank
from tests.strategies.cases.outcomes import assert_equal

VOCABULARY, TOKENS = 48, 7
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}


def generator(batch: Samples) -> torch.Generator:
    return torch.Generator().manual_seed(100 * batch.step + batch.rank)


def tokens(batch: Samples) -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, TOKENS), generator=generator(batch))


def images(batch: Samples, size: int = 16) -> dict[str, Tensor]:
    pixels = torch.randn(SAMPLES, 3, size, size, generator=generator(batch))
    return {"pixel_values": pixels, "labels": tokens(batch)[:, 0] % 5}


def text(batch: Samples) -> dict[str, Tensor]:
    ids = tokens(batch)
    return {"input_ids": ids, "labels": ids}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **SMALL, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=5, **sizes))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=5, **sizes))


def case_of(module: Callable[[], nn.Module], batch_of: Callable[[Samples], dict[str, Any]], **settings) -> LoopCase:
    def loss(run: Run, batch: Samples) -> Tensor:
        return run(**batch_of(batch)).loss

    return LoopCase(lambda: module().train(), loss, **settings)


ARCHITECTURES = {"T5": case_of(t5, text), "ViT": case_of(vit, images), "ResNet": case_of(resnet, images)}


def train(name: str, choice: str) -> LoopOutcome | str:
    return on_a_rank(ARCHITECTURES[name], choice, 0.01)


@cache
def expected(name: str) -> LoopOutcome:
    return in_one_process(ARCHITECTURES[name], 2)


def check(ranks: RankPool, choice: str, names: Iterable[str]):
    for name in names:
        assert_equal(name, ranks.run(2, train, name, choice), expected(name), ARCHITECTURES[name].tolerance)


@pytest.mark.parametrize("choice", FAMILIES)
def test_three_steps(ranks: RankPool, choice):
    """Each choice trains one architecture, in turn. zero3 trains T5, too, whose blocks share the first one's tensor."""
    names = list(ARCHITECTURES)[NAMES.index(choice) % len(ARCHITECTURES) :][:1]
    check(ranks, choice, ["T5", *names] if choice == "zero3" else names)


@pytest.mark.exhaustive
@in_own_loops
def test_three_steps_of_all(ranks: RankPool, choice):
    check(ranks, choice, ARCHITECTURES)
