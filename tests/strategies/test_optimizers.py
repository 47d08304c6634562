"""Which optimizers may update parts of parameters, and what `make_optimizer` sees where parameters are cut."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.optimizers import ELEMENTWISE, OptimizerPart, hand_over, require_elementwise, require_given_up
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build, make_batch
from tests.parity import load, one_step
from tests.ranks import RankPool
from tests.tables import each_row

MAKERS: dict[str, Any] = {
    **{kind.__name__: kind for kind in ELEMENTWISE},
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "AdamW with a tensor": lambda ps, lr: torch.optim.AdamW(ps, lr=torch.tensor(lr), foreach=False),
    "centered RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
}


def parameters() -> dict[str, nn.Parameter]:
    shapes: list[tuple[int, ...]] = [(3, 5), (3, 5), (), (1,), (300, 200), (2, 3, 4), (0,), (7,)]
    named = {f"p{index}": nn.Parameter(torch.rand(shape)) for index, shape in enumerate(shapes)}
    named["p1"].scale = 0.5  # type: ignore[attr-defined]
    return named


def updated(make, pieces: list[Tensor], gradients: list[list[Tensor]]) -> Tensor:
    """The elements of all `pieces` after six steps."""
    copies = [nn.Parameter(piece.clone()) for piece in pieces]
    optimizer = require_elementwise(make(copies, lr=0.01), False)
    for of_step in gradients:
        for piece, gradient in zip(copies, of_step, strict=True):
            piece.grad = gradient.clone()
        optimizer.step()
    return torch.cat([piece.detach().reshape(-1) for piece in copies])


@each_row("name", MAKERS)
def test_what_is_taken_is_elementwise(name):
    """It moves each element as far in a matrix as in flat pieces, for gradients of all sizes."""
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(7, 4, 6, generator=generator, dtype=torch.float64)
    gradients = [gradient * torch.logspace(-6, 2, 24).view(4, 6).roll(step) for step, gradient in enumerate(gradients)]
    expected = updated(MAKERS[name], [matrix], [[gradient] for gradient in gradients])
    flat = [[*gradient.view(-1).split([7, 17])] for gradient in gradients]
    torch.testing.assert_close(
        updated(MAKERS[name], [*matrix.view(-1).split([7, 17])], flat), expected, rtol=1e-12, atol=0
    )
    assert not torch.equal(expected, matrix.view(-1))


class ClipsAll(torch.optim.SGD):
    """Clips by the norm of all gradients that it holds."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Lion(torch.optim.Optimizer):
    """A user's own, which is elementwise but for the decay of matrices."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad.sign() + 0.1 * p * (p.ndim >= 2)))


def with_a_step(ps, lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(ps, lr=lr)
    optimizer.step = partial(ClipsAll.step, optimizer)  # type: ignore[method-assign]
    return optimizer


def with_a_hook(ps, lr: float, is_behind: bool = False) -> torch.optim.Optimizer:
    """The hook sees all parameters of the optimizer."""

    def clip(optimizer: torch.optim.Optimizer, *_):
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)

    optimizer = torch.optim.SGD(ps, lr=lr)
    (optimizer.register_step_post_hook if is_behind else optimizer.register_step_pre_hook)(clip)
    return optimizer


OTHERS: dict[str, Any] = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda ps, lr: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=lr),
    "LBFGS": torch.optim.LBFGS,
    "a class of one's own": Lion,
    "a class on top of torch's": ClipsAll,
    "a step of its own": with_a_step,
    "a hook": with_a_hook,
    "a hook behind it": partial(with_a_hook, is_behind=True),
}


@each_row("name", OTHERS)
def test_others_are_refused_unless_somebody_vouches(name):
    """They may compute something else from a piece than from the whole (TRAPS 15)."""
    optimizer = OTHERS[name](list(parameters().values()), lr=0.1)
    with pytest.raises(UnsupportedError, match="is not known to work on each element by itself"):
        require_elementwise(optimizer, False)
    assert require_elementwise(optimizer, True) is optimizer


class SameStepSGD(torch.optim.SGD):
    """Another class of the same step."""


def trained(name: str, kind: type[torch.optim.SGD]) -> dict[str, Tensor]:
    options = StrategyOptions(elementwise=kind is SameStepSGD)
    strategy = load(name)(build("plain"), partial(kind, lr=0.1), options)
    one_step(strategy, [make_batch("plain", 2, 0)])
    return strategy.full_state_dict()


@each_row("name", ["zero2", "zero3", "pytorch_zero3"])
def test_what_somebody_vouches_for_is_cut(ranks: RankPool, name):
    (state, _), (expected, _) = (ranks.run(2, trained, name, kind) for kind in (SameStepSGD, torch.optim.SGD))
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.items()) and state


def halved(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]):
    """As on a rank that has the second half of the first two parameters, and nothing of the others."""
    parts = {p: OptimizerPart(nn.Parameter(p.detach().view(-1)[7:].clone()), 7) for p in list(named.values())[:2]}
    require_given_up(hand_over(optimizer, parts), named)


def test_parts_take_groups_names_attributes_and_states():
    named = parameters()
    groups = [{"params": [("p1", named["p1"]), ("p7", named["p7"])], "lr": 0.5}, {"params": [("p0", named["p0"])]}]
    optimizer = torch.optim.Adagrad(groups, initial_accumulator_value=2.0)
    optimizer.state[named["p1"]]["sum"] += torch.arange(15.0).view(3, 5)
    halved(optimizer, named)
    (first, second), (part,) = optimizer.param_groups, optimizer.param_groups[0]["params"]
    assert first["param_names"] == ["p1"] and second["param_names"] == ["p0"] and first["lr"] == 0.5
    assert torch.equal(part, named["p1"].view(-1)[7:]) and part.scale == 0.5
    assert torch.equal(optimizer.state[part]["sum"], torch.arange(9.0, 17.0)) and len(optimizer.state) == 2
    assert groups[0]["params"][0] is named["p1"]  # make_optimizer may be called again with the same groups


def with_hook(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(ps, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(ps, 1.0) and None)
    return optimizer


def with_attribute(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(ps, lr=0.1)
    optimizer.slow = {"weights": [(p, p.clone()) for p in ps]}  # type: ignore[attr-defined]
    return optimizer


def with_copies(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Copies values of a parameter, which zero3 does not have when it builds the optimizer."""
    optimizer = torch.optim.SGD(ps, lr=0.1)
    optimizer.state[ps[0]]["slow"] = torch.full_like(ps[0], float("nan"))
    return optimizer


@each_row(
    ("make", "message"),
    [
        (with_hook, "SGD keeps p. in an attribute or a hook"),
        (with_attribute, "SGD keeps p. in an attribute or a hook"),
        (with_copies, "copies values of parameters into its state slow"),
    ],
)
def test_what_keeps_whole_parameters_is_refused(make, message):
    named = parameters()
    with pytest.raises(UnsupportedError, match=message):
        halved(make(list(named.values())), named)
