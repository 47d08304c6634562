"""The type of a workload."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from training.data.sampling import Collate
from training.step import sample_count


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
        model: Called as `model(**batch)`. Returns an object that has `.loss`, and `.logits` if it classifies.
        train, evaluation: Samples by index.
        collate: Makes a batch (keyword arguments of the model, CPU tensors) from a list of samples.
        learning_rate: Used if the user gives no `--lr`.
        classifies: Whether `logits.argmax(-1) == labels` is a meaningful accuracy.
        count: How many terms the loss of a batch, on the CPU, is a mean over. Default: its samples.
        language: If the model is a causal language model, whose loss is a mean over tokens.
        notes: Sentences on the data that the user should read.
    """

    model: nn.Module
    train: Sequence[Any]
    evaluation: Sequence[Any]
    collate: Collate
    learning_rate: float
    classifies: bool
    count: Callable[[dict[str, Tensor]], float] = sample_count
    language: Language | None = None
    notes: Sequence[str] = ()
