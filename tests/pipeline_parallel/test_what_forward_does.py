"""Whatever forward does with its modules, a pipeline computes what one process does, or refuses it on every rank."""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ddp_lab
from ddp_lab.runtime.errors import AgreedError
from ddp_lab.runtime.mesh import closing_groups
from tests.models import FEATURES
from tests.ranks import RankPool

RIGHT = ""


class MaskedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(FEATURES, FEATURES), 0.5
        self.norm: nn.Module = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | float = 1.0) -> Tensor:
        return torch.tanh(self.norm(self.linear(x))) * mask


class StagedModel(nn.Module):
    """An embedding, four blocks and a head, as `change` leaves them and `run` calls them."""

    def __init__(self, run: "Run", change: "Change | None"):
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.layers: Any = nn.ModuleList(MaskedBlock() for _ in range(4))
        self.head = nn.Linear(FEATURES, FEATURES)
        self._run = run
        if change is not None:
            change(self)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self._run(self, x).square().mean())


Run = Callable[[Any, Tensor], Tensor]
Change = Callable[[Any], object]


# What forward does -------------------------------------------------------------------------------------------------


def blocks(layers: Iterable[Any], x: Tensor) -> Tensor:
    for block in layers:
        x = block(x)
    return x


def in_order(model, x: Tensor) -> Tensor:
    return model.head(blocks(model.layers, model.embed(x)))


def picked(*indices: int) -> Run:
    return lambda model, x: model.head(blocks([model.layers[index] for index in indices], model.embed(x)))


def each_block(step: Callable[[Any, Tensor], Tensor]) -> Run:
    """Blocks run in order, each through `step(block, x)`."""
    return lambda model, x: model.head(blocks([partial(step, block) for block in model.layers], model.embed(x)))


def read_by(head_of: Callable[[Any], Tensor], detaches: bool = False) -> Run:
    """The head is a product with a weight that another module owns."""

    def run(model, x: Tensor) -> Tensor:
        x = model.embed(x)
        return functional.linear(blocks(model.layers, x.detach() if detaches else x), head_of(model))

    return run


def without_gradients(first: int, end: int) -> Run:
    def run(model, x: Tensor) -> Tensor:
        x = blocks(model.layers[:first], model.embed(x))
        with torch.no_grad():
            x = blocks(model.layers[first:end], x)
        return model.head(blocks(model.layers[end:], x))

    return run


def masked(mask_of: Callable[[Tensor], Tensor]) -> Run:
    def run(model, x: Tensor) -> Tensor:
        x = model.embed(x)
        return model.head(blocks([partial(block, mask=mask_of(x)) for block in model.layers], x))

    return run


def leaves_early(model, x: Tensor) -> Tensor:
    x = model.embed(x)
    for block in model.layers:
        x = block(x)
        if x.abs().mean().item() < 100:
            break
    return model.head(x)


def around_all(model, x: Tensor) -> Tensor:
    x = model.embed(x)
    return model.head(x + blocks(model.layers, x))


def unpacked(block: nn.Module, x: Tensor) -> Tensor:
    x, _ = block(x)
    return x


# How the model is built --------------------------------------------------------------------------------------------


def standing(*indices: int) -> Change:
    """Lets some of the blocks stand in the list several times."""

    def change(model):
        model.layers = nn.ModuleList(model.layers[index] for index in indices)

    return change


def sharing(*indices: int) -> Change:
    def change(model):
        for index in indices:
            model.layers[index].linear.weight = model.layers[indices[0]].linear.weight

    return change


def batch_norm(*indices: int) -> Change:
    def change(model):
        norm = nn.BatchNorm1d(FEATURES)
        for index in indices:
            model.layers[index].norm = norm

    return change


def last(name: str) -> Change:
    """Registers a module behind all others."""

    def change(model):
        part = getattr(model, name)
        delattr(model, name)
        setattr(model, name, part)

    return change


def out_is_embed(model):
    del model.head
    model.out = model.embed


def known_as(**getters: Callable[[Any], Any]) -> Change:
    """Lets forward know something by a name of its own."""
    return lambda model: [setattr(model, name, getter(model)) for name, getter in getters.items()]


def forwards(forward: Callable[..., Any], knows: Callable[[Any], Any] = lambda model: None) -> Change:
    """Gives blocks another forward, which reads from `block.shared` what `knows` takes of the model."""

    def change(model):
        kind = type("Other", (MaskedBlock,), {"forward": forward, "shared": None})
        model.layers = nn.ModuleList(kind() for _ in range(4))
        for block in model.layers:
            block.shared = [knows(model)]

    return change


ORDER = "but each stage runs once, in order: register modules"
MORE = "takes more of earlier stages into stage 1 than the hidden states|a stage has NaN for hidden states"
VALUES = r"forward reads values of hidden states between its modules \({}\), and later stages do not know them"
CASES: dict[str, tuple[Run, Change | None, str]] = {
    # What is right
    "in order": (in_order, None, RIGHT),
    "the first block of a stage is left out": (picked(0, 1, 3), None, RIGHT),
    "each block twice in a row": (each_block(lambda block, x: block(block(x))), None, RIGHT),
    "a block stands in both stages": (in_order, standing(0, 1, 2, 0), RIGHT),
    "a block stands twice in the last stage": (in_order, standing(0, 1, 2, 2), RIGHT),
    "all blocks share a matrix": (in_order, sharing(0, 1, 2, 3), RIGHT),
    "the embedding stands behind the blocks, too": (read_by(lambda model: model.out.weight), out_is_embed, RIGHT),
    "the head alone trains the embedding": (read_by(lambda model: model.out.weight, True), out_is_embed, RIGHT),
    "the first blocks of both stages have no graph": (
        without_gradients(0, 3),
        lambda model: model.embed.requires_grad_(False),
        RIGHT,
    ),
    "blocks of a plain list": (
        lambda model, x: model.head(blocks(model.stack[0], model.embed(x))),
        known_as(stack=lambda model: [list(model.layers)]),
        RIGHT,
    ),
    "a number of each block": (each_block(lambda block, x: block(x) * block.factor), None, RIGHT),
    "a mask of the form of hidden states": (masked(lambda x: torch.ones_like(x).tril() > 0), None, RIGHT),
    # What is refused when the model is cut
    "a batch norm in both stages": (
        in_order,
        batch_norm(0, 3),
        r"layers.0.norm.num_batches_tracked and layers.3.norm.num_batches_tracked are one tensor of stages 0 and 1",
    ),
    "the embedding's weight by another name": (
        read_by(lambda model: model.other),
        known_as(other=lambda model: model.embed.weight),
        "other is in no module that a stage could hold",
    ),
    # What is refused in the first step
    "all blocks twice": (
        picked(0, 1, 2, 3, 0, 1, 2, 3),
        None,
        f"runs layers.0 of stage 0 after layers.3 of .* 1, {ORDER}",
    ),
    "across stages": (picked(0, 2, 1, 3), None, f"runs layers.1 of stage 0 after layers.2 of stage 1, {ORDER}"),
    "blocks registered last": (in_order, last("layers"), f"runs head of stage 0 after layers.3 of stage 1, {ORDER}"),
    "the embedding's weight as head": (
        read_by(lambda model: model.embed.weight),
        None,
        "forward reads weight of embed, which is in stage 0 alone; call it, or a module here",
    ),
    "the embedding's weight of a plain list": (
        read_by(lambda model: model.weights[0]),
        known_as(weights=lambda model: [model.embed.weight]),
        "the loss is not finite .*; a stage has NaN for hidden states and parameters of others",
    ),
    "a form of its own in the second micro-batch": (
        lambda model, x: in_order(model, x[: 2 if x[0, 0] < 0 else 3]),
        None,
        r"a pipeline sends .*\[2, 6\]\) where batches of this form lead to .*\[3, 6\]",
    ),
    "a residual around all blocks": (around_all, None, MORE),
    "tuples from block to block": (
        lambda model, x: model.head(blocks(model.layers, model.embed(x))[0]),
        forwards(lambda block, x: (block.linear(x[0] if isinstance(x, tuple) else x),)),
        "hands tuple from stage 0 to layers.2 of stage 1, and not one tensor; let modules take hidden states",
    ),
    "tuples that forward takes apart": (
        each_block(unpacked),
        forwards(lambda block, x: (block.linear(x), x)),
        r"fails in stage 1 after layers.0, which returns one tensor there.* \(ValueError: too many",
    ),
    "a mask of hidden states": (masked(lambda x: x < 100), None, VALUES.format("lt")),
    "an early exit": (leaves_early, None, VALUES.format("item")),
    "a block that calls the head": (
        in_order,
        forwards(lambda block, x: block.shared[0](block.linear(x)), lambda model: model.head),
        "calls head of stage 1 in layers.0; put both into one stage",
    ),
    "no graph in the last stage": (
        without_gradients(2, 3),
        None,
        "a gradient is not finite on rank 0.* for gradients where the next stage runs under no_grad",
    ),
    "checkpoints of its own": (
        each_block(lambda block, x: checkpoint(block, x, use_reentrant=False)),
        None,
        "has a checkpoint around layers.2, the first of its stage",
    ),
    "no last stage": (
        lambda model, x: blocks(model.layers[:2], model.embed(x)),
        None,
        "hands SimpleNamespace from .* to nobody",
    ),
}
TWICE = ("across stages", "an early exit", "a residual around all blocks")
"""Refused under other schedules, and in an evaluation, as well."""


@closing_groups()
def outcome(choice: str, schedule: str, case: str, evaluates: bool) -> str:
    """Run two steps or an evaluation. Returns why it is refused or how it differs from one process; else ""."""
    run, change, _ = CASES[case]
    torch.manual_seed(0)
    model, x = StagedModel(run, change), torch.randn(6, FEATURES)
    alone, halves = copy.deepcopy(model), [{"x": half} for half in x.chunk(2)]
    make_optimizer = partial(torch.optim.SGD, lr=0.5)
    optimizer = make_optimizer(alone.parameters())
    try:
        strategy = ddp_lab.pipeline(model, "pp=2", schedule).strategy(choice, make_optimizer)
        if evaluates:
            with torch.no_grad():
                off = abs(strategy(**halves[1]).loss - alone(**halves[1]).loss)
            return RIGHT if off <= 1e-6 else f"off by {off}"
        for _ in range(2):
            expected = torch.stack([alone(**half).loss for half in halves]).mean()
            expected.backward()
            loss = strategy.forward_backward(halves)
            if abs(loss - expected) > 1e-6:
                return f"loss {loss}, and not {expected}"
            strategy.step()
            strategy.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        state, expected_state = strategy.full_state_dict(), alone.state_dict()
    except AgreedError as error:
        return str(error)
    different = [name for name in state if not torch.allclose(state[name], expected_state[name], 1e-6, 1e-6)]
    return ", ".join([*(state.keys() ^ expected_state.keys() if state else ()), *different])


def outcomes(choice: str, schedule: str, cases: Sequence[str], evaluates: bool) -> dict[str, str]:
    return {case: outcome(choice, schedule, case, evaluates) for case in cases}


@pytest.mark.parametrize(
    "choice, schedule, evaluates", [("tp", "1f1b", False), ("zero3", "zb-h1", False), ("zero1", "gpipe", True)]
)
def test_it_is_right_or_refused(ranks: RankPool, choice, schedule, evaluates):
    cases = [case for case, (*_, expected) in CASES.items() if choice == "tp" or expected == RIGHT or case in TWICE]
    wrong = []
    for message_by_case in ranks.run(2, outcomes, choice, schedule, cases, evaluates):
        for case, message in message_by_case.items():
            expected = CASES[case][2]
            if not (re.search(expected, message) if expected else message == RIGHT):
                wrong.append(f"{case}: {message}")
    assert not wrong, "\n".join(wrong)
