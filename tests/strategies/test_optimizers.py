"""Which optimizers may update parts of parameters, and what `make_optimizer` sees where parameters are cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.elementwise import require_elementwise
from ddp_lab.strategy.optimizers import Part, hand_over, require_given_up
from tests.tables import each_row

Update = Callable[[nn.Parameter, Tensor, dict[str, Any]], Tensor]


class Own(torch.optim.Optimizer):
    """A user's own: moves each parameter by what `update` makes of it, its gradient and its state."""

    def __init__(self, params: Any, update: Update, lr: float, plain: Any = None) -> None:
        super().__init__(params, {"lr": lr, "update": update})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * group["update"](p, p.grad, self.state[p]))


def plain(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    return g


def lion_in_fp32(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    m = state.setdefault("m", torch.zeros_like(p, dtype=torch.float32))
    move = (0.9 * m + 0.1 * g.float()).sign() + 0.1 * p.float()
    m.mul_(0.99).add_(g, alpha=0.01)
    return move


def lars(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    return g * p.norm() / g.norm()


def lamb(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    return state["m"] * p.norm().clamp(0.01, 10) / state["m"].norm().clamp(min=1e-6)


def clipped(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    return g / g.norm().clamp(min=1.0)


def decayed_by_norm(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    return g + 1e-6 * p.norm() * p


def centered(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    return g - g.mean(-1, keepdim=True) if g.ndim > 1 else g


def later(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    state["step"] = state.get("step", 0) + 1
    return g / g.norm() if state["step"] == 5 else g


def by_attribute(p: nn.Parameter, g: Tensor, state: dict[str, Any]) -> Tensor:
    return g * getattr(p, "scale", 1.0) if not getattr(p, "by_norm", False) else g / g.norm()


class ClipsAll(Own):
    """By the norm of all gradients that it holds."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


def own(update: Update, kind: type[Own] = Own) -> Any:
    return lambda ps, lr: kind(ps, update, lr)


def only_last(update: Update) -> Any:
    """In a group of its own, of the last parameter."""
    return lambda ps, lr: Own([{"params": ps[:-1]}, {"params": ps[-1:], "update": update}], plain, lr)


ELEMENTWISE: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "AdamW with a tensor": lambda ps, lr: torch.optim.AdamW(ps, lr=torch.tensor(lr), foreach=False),
    **{name: getattr(torch.optim, name) for name in ("RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta")},
    "Lion": own(lion_in_fp32),
    "a rate in an attribute": own(by_attribute),
}
OTHERS: dict[str, Any] = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda ps, lr: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=lr),
    "LBFGS": torch.optim.LBFGS,
    **{update.__name__: own(update) for update in (lars, lamb, clipped, decayed_by_norm, centered, later)},
    "clips all": own(plain, ClipsAll),
    "in one group": only_last(clipped),
    "by an attribute of one": lambda ps, lr: (setattr(ps[0], "by_norm", True), Own(ps, by_attribute, lr))[1],
}


def parameters() -> dict[str, nn.Parameter]:
    shapes: list[tuple[int, ...]] = [(3, 5), (3, 5), (), (1,), (300, 200), (2, 3, 4), (0,), (7,)]
    named = {f"p{index}": nn.Parameter(torch.rand(shape)) for index, shape in enumerate(shapes)}
    named["p1"].scale = 0.5  # type: ignore[attr-defined]
    return named


def tried(optimizer: Any, lr: float) -> torch.optim.Optimizer:
    given = parameters()
    return require_elementwise(lambda: optimizer(list(given.values()), lr=lr), given, torch.device("cpu"))


@each_row("lr", [0.0, 1e-8, 1e-4, 0.1])
@each_row("name", ELEMENTWISE)
def test_elementwise_optimizers_may_be_cut(name: str, lr: float) -> None:
    optimizer = tried(ELEMENTWISE[name], lr)
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [p.shape for p in parameters().values()]
    assert all(group["lr"] == lr for group in optimizer.param_groups)


@each_row("lr", [0.0, 1e-8, 1e-4, 0.1])
@each_row("name", OTHERS)
def test_others_are_refused(name: str, lr: float) -> None:
    """They would compute something else from a piece than from the whole (TRAPS 15). No learning rate hides that."""
    with pytest.raises(UnsupportedError, match="element by itself"):
        tried(OTHERS[name], lr)


def halved(optimizer: torch.optim.Optimizer, given: dict[str, nn.Parameter]) -> None:
    """As on a rank that has the second half of the first two parameters, and nothing of the others."""
    parts = {p: Part(nn.Parameter(p.detach().view(-1)[7:].clone()), 7) for p in list(given.values())[:2]}
    require_given_up(hand_over(optimizer, parts), given)


def test_parts_take_groups_names_attributes_and_states() -> None:
    given = parameters()
    groups = [{"params": [("p1", given["p1"]), ("p7", given["p7"])], "lr": 0.5}, {"params": [("p0", given["p0"])]}]
    optimizer = torch.optim.Adagrad(groups, initial_accumulator_value=2.0)
    optimizer.state[given["p1"]]["sum"] += torch.arange(15.0).view(3, 5)
    halved(optimizer, given)
    (first, second), (part,) = optimizer.param_groups, optimizer.param_groups[0]["params"]
    assert first["param_names"] == ["p1"] and second["param_names"] == ["p0"] and first["lr"] == 0.5
    assert torch.equal(part, given["p1"].view(-1)[7:]) and part.scale == 0.5
    assert torch.equal(optimizer.state[part]["sum"], torch.arange(9.0, 17.0)) and len(optimizer.state) == 2
    assert groups[0]["params"][0] is given["p1"]  # make_optimizer may be called again with the same groups


def with_hook(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(ps, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(ps, 1.0) and None)
    return optimizer


def with_attribute(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(ps, lr=0.1)
    optimizer.slow = {"weights": [(p, p.clone()) for p in ps]}  # type: ignore[attr-defined]
    return optimizer


def with_copies(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Of values that zero3 does not have then."""
    optimizer = torch.optim.SGD(ps, lr=0.1)
    optimizer.state[ps[0]]["slow"] = torch.full_like(ps[0], float("nan"))
    return optimizer


@each_row(
    ("make", "said"),
    [
        (with_hook, "SGD keeps p. in an attribute or a hook"),
        (with_attribute, "SGD keeps p. in an attribute or a hook"),
        (with_copies, "copies values of parameters into its state slow"),
    ],
)
def test_what_keeps_whole_parameters_is_refused(make: Any, said: str) -> None:
    given = parameters()
    with pytest.raises(UnsupportedError, match=said):
        halved(make(list(given.values())), given)
