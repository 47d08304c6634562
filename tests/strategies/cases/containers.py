"""What modules take and answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.strategies.cases.case import FEATURES, LoopCase, Run, Samples


@dataclass
class NestedAnswer:
    """Its class is no container that torch knows."""

    prediction: Tensor
    extras: dict[str, Any]


class Pair(NamedTuple):
    prediction: Tensor
    hidden: Tensor


class Answers(nn.Module):
    """Two blocks and a head; `pack` makes the answer from prediction and hidden layer."""

    def __init__(self, pack=lambda prediction, hidden: prediction):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.head, self.pack = nn.Linear(FEATURES, 1), pack

    def forward(self, *args, **kwargs):
        hidden = self.read(*args, **kwargs)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.pack(self.head(hidden), hidden)

    def read(self, x: Tensor) -> Tensor:
        return x


class ReadsNested(Answers):
    """Takes the arguments that `nested` passes."""

    def read(self, scale: float, *parts: Tensor, table: dict[str, Any], mask: None = None) -> Tensor:
        return scale * torch.cat(parts, 1) + table["rows"][1][0] + table["answer"].prediction


def nested(run: Run, batch: Samples) -> Tensor:
    table = {"rows": [None, (batch.x.flip(1), "text")], "answer": NestedAnswer(batch.y, {})}
    return functional.mse_loss(run(0.5, batch.x[:, :2], batch.x[:, 2:], table=table, mask=None), batch.y)


def loss_of_both(read):
    def loss(run: Run, batch: Samples) -> Tensor:
        prediction, hidden = read(run(batch.x))
        return functional.mse_loss(prediction, batch.y) + hidden.square().mean()

    return loss


def other_output_by_step(run: Run, batch: Samples) -> Tensor:
    """The head is unused in step 1."""
    prediction, hidden = run(batch.x)
    return hidden.square().mean() if batch.step == 1 else functional.mse_loss(prediction, batch.y)


class Waves(nn.Module):
    """Answers with complex numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.second(torch.tanh(self.first(x))))


def power(run: Run, batch: Samples) -> Tensor:
    return (run(batch.x).abs() - batch.y).square().mean()


def two_frames(run: Run, batch: Samples) -> Sequence[Tensor] | Tensor:
    """The loss of an answer that is a list with a tuple in it. Two of its tensors have no gradient."""
    (prediction, ids), mean = run(batch.x)
    assert not ids.requires_grad
    return functional.mse_loss(prediction, batch.y) + 0.1 * (mean * prediction).mean()


CASES = {
    "a dict of dicts": LoopCase(
        lambda: Answers(lambda p, h: {"a": {"p": p}, "h": [h]}), loss_of_both(lambda a: (a["a"]["p"], a["h"][0]))
    ),
    "a dataclass": LoopCase(
        lambda: Answers(lambda p, h: NestedAnswer(p, {"h": h})), loss_of_both(lambda a: (a.prediction, a.extras["h"]))
    ),
    "lists with what has no gradient": LoopCase(
        lambda: Answers(lambda p, h: [(p, h.argmax(1)), h.detach().mean()]), two_frames
    ),
    "an output that is unused in a step": LoopCase(lambda: Answers(Pair), other_output_by_step, unused=True),
    "nested arguments": LoopCase(ReadsNested, nested),
    "complex numbers": LoopCase(Waves, power),
}
