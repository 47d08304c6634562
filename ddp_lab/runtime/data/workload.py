"""The type of a workload. Your own function may return one: docs/own-workload.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import default_collate

from ddp_lab.strategy.batches import sample_count

Collate = Callable[[list[Any]], dict[str, Tensor]]


class Language(NamedTuple):
    """What a causal language model needs to go on with a text.

    Attributes:
        tokenizer: Of `transformers`, with an end-of-sequence token.
        prompt: A text to go on with, if the user gives none.
        context: The most tokens that the model sees at once.
    """

    tokenizer: Any
    prompt: str
    context: int


@dataclass(frozen=True)
class Workload:
    """A model with the data to train it on.

    Attributes:
        model: Called as `model(**batch)`. Returns an object that has `.loss`, and `.logits` if the workload classifies;
            or anything, if there is `loss`.
        train, evaluation: Samples to train on, and held-out ones, by index.
        collate: Makes a batch (keyword arguments of the model, CPU tensors) from a list of samples. Default: stacks
            samples that are dicts.
        learning_rate: Used if the user gives no `--lr`.
        classifies: Whether `logits.argmax(-1) == labels` is a meaningful accuracy.
        count: How many terms the loss of a batch, on the CPU, is a mean over. Default: its samples.
        loss: `loss(output, batch)`, a scalar: the mean over the batch. For models that answer without `.loss`. Such a
            model is called with those entries of a batch that its `forward` names.
        language: If the model is a causal language model, whose loss is a mean over tokens.
        notes: Sentences on the data that the user should read.
    """

    model: nn.Module
    train: Sequence[Any]
    evaluation: Sequence[Any]
    collate: Collate = default_collate
    learning_rate: float = 1e-3
    classifies: bool = False
    count: Callable[[dict[str, Tensor]], float] = sample_count
    loss: Callable[[Any, dict[str, Tensor]], Tensor] | None = None
    language: Language | None = None
    notes: Sequence[str] = ()
