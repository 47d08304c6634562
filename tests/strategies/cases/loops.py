"""What loops do: freeze, schedule, evaluate, change parameters; optimizers; functions with a backward of their own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.strategies.cases.case import FEATURES, LoopCase, Run, Samples, samples
from tests.strategies.cases.running import Blocks, blocks_of


def freeze(*frozen: str, steps: tuple[int, ...] = (1,)) -> Callable[[Run, nn.Module, int], None]:
    """Parameters whose names begin so do not train in `steps`."""

    def before(run: Run, module: nn.Module, step: int):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (step in steps and name.startswith(frozen)))

    return before


def evaluates(context) -> Callable[[Run, nn.Module, int], None]:
    def before(run: Run, module: nn.Module, step: int):
        module.eval()
        with context():
            assert not run(samples(7, 0, 0).x).requires_grad
        module.train()

    return before


def runs_without_backward(run: Run, module: nn.Module, step: int):
    assert run(samples(7, 0, 0).x).requires_grad


def clamps(run: Run, module: nn.Module, step: int):
    """As for the critic of a Wasserstein GAN."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.15, 0.15)


def drops_gradients(run: Run, module: nn.Module, step: int):
    """Drops gradients by the optimizer's own `zero_grad`, as many scripts do."""
    getattr(run, "optimizer", module).zero_grad()


def replaces_data(run: Run, module: nn.Module, step: int):
    for parameter in module.parameters():
        parameter.data = 0.9 * parameter.data


def loads(run: Run, module: nn.Module, step: int):
    """Loads a state dict into the module, not through the strategy."""
    torch.manual_seed(9)
    module.load_state_dict(Blocks().state_dict())


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Three groups, of which one trains no parameter of blocks."""
    named = dict(module.named_parameters())
    first = [p for n, p in named.items() if n.startswith("first")]
    vectors = [p for n, p in named.items() if not n.startswith("first") and p.ndim < 2]
    matrices = [p for n, p in named.items() if not n.startswith("first") and p.ndim >= 2]
    return [{"params": first, "lr": 0.001}, {"params": vectors, "weight_decay": 0.0}, {"params": matrices}]


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)  # changes momentum, too


class Cube(torch.autograd.Function):
    """x cubed, times a weight, with a backward of its own that saves both."""

    @staticmethod
    def forward(context, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(context, gradient: Tensor):
        x, weight = context.saved_tensors
        return 3 * x.square() * weight * gradient, (x**3 * gradient).sum(0)


class Cubes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Cube.apply(torch.tanh(self.first(x)), self.weight))


class InPlaceBlocks(nn.Module):
    """Activations, among them blocks' outputs and views, that are changed in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        inner = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(inner)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.leaky_relu_(self.first(x))
        for block in self.blocks:
            hidden = block(hidden).add_(hidden).mul_(0.5)
        hidden = hidden.clone()
        hidden[:, :2] += 1
        hidden.view(-1)[:3].zero_()
        return self.last(hidden).add_(1)


class Lamb(torch.optim.Optimizer):
    """Adam whose update of each parameter is scaled by the norm of that parameter: not elementwise."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["m"] = 0.9 * state.get("m", 0) + 0.1 * parameter.grad
                    trust = parameter.norm().clamp(0.01, 10) / state["m"].norm().clamp(min=1e-6)
                    parameter.sub_(group["lr"] * trust * state["m"])


def by_dimension(params) -> torch.optim.Optimizer:
    """As nanoGPT: weights decay, and vectors do not. Weights that say so have a learning rate of their own."""
    named = {f"p{index}": parameter for index, parameter in enumerate(params)}
    kinds: dict[tuple[bool, float], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named.items():
        kinds.setdefault((parameter.ndim >= 2, getattr(parameter, "rate", 1e-3)), []).append((name, parameter))
    groups = [{"params": kind, "weight_decay": 10.0 * decays, "lr": lr} for (decays, lr), kind in kinds.items()]
    return torch.optim.AdamW(groups)


class WithRates(Blocks):
    def __init__(self):
        super().__init__()
        self.last.weight.rate = 1e-2  # type: ignore[assignment]


def inputs_have_gradients(run: Run, batch: Samples) -> Tensor:
    """A penalty on the gradient for the input, as of a Wasserstein GAN: backward runs through a backward pass."""
    x = batch.x.clone().requires_grad_()
    prediction = run(x)
    (slope,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
    return functional.mse_loss(prediction, batch.y) + slope.square().sum(1).mean()


def attacked(run: Run, batch: Samples) -> Tensor:
    """Trains on inputs that a first backward pass has moved, as adversarial training does."""
    x = batch.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(functional.mse_loss(run(x), batch.y), x)
    return functional.mse_loss(run(batch.x + 0.1 * slope.sign()), batch.y)


def accumulated(run: Run, batch: Samples) -> Tensor:
    """Two losses of one pass, and one of another."""
    prediction = run(batch.x)
    return functional.mse_loss(prediction, batch.y) + functional.l1_loss(prediction, batch.y) + run(-batch.x).mean()


def from_torch(name: str, tolerance: float = 1e-5, **settings) -> LoopCase:
    kind = getattr(torch.optim, name)
    return LoopCase(Blocks, optimizer=lambda params: kind(params, **settings), tolerance=tolerance)


CASES = {
    "frozen, and trained again": LoopCase(Blocks, before=freeze("first", "blocks.1"), unused=True),
    "all but the head frozen": LoopCase(Blocks, before=freeze("first", "blocks", steps=(1, 2)), unused=True),
    "zeros instead of None": LoopCase(Blocks, set_to_none=False),
    "zeros for a block that is passed over": LoopCase(
        Blocks, blocks_of((0, 1, 2, 3), (0, 2, 3)), set_to_none=False, unused=True
    ),
    "gradients that are never dropped": LoopCase(Blocks, set_to_none=None, micro_batches=2),
    "the optimizer's own zero_grad": LoopCase(
        Blocks, blocks_of((0, 1, 2, 3), (0, 2, 3)), drops_gradients, set_to_none=None, unused=True
    ),
    "data is replaced": LoopCase(Blocks, before=replaces_data),
    "states are loaded into the module": LoopCase(Blocks, before=loads),
    "parameter groups": LoopCase(Blocks, groups=groups),
    "parameter groups and one cycle": LoopCase(Blocks, groups=groups, schedule=one_cycle),
    "groups by dimension and attribute": LoopCase(WithRates, optimizer=by_dimension, tolerance=1e-4),
    "gradients clipped by value": LoopCase(Blocks, clip_value=0.1),
    "evaluation between steps": LoopCase(Blocks, before=evaluates(torch.no_grad)),
    "evaluation in inference mode": LoopCase(Blocks, before=evaluates(torch.inference_mode)),
    "forward without backward": LoopCase(Blocks, before=runs_without_backward),
    "forward before the optimizer": LoopCase(Blocks, between=runs_without_backward),
    "parameters are clamped": LoopCase(Blocks, before=clamps),
    "a backward of its own": LoopCase(Cubes),
    "in place": LoopCase(InPlaceBlocks),
    "a penalty on gradients": LoopCase(Blocks, inputs_have_gradients, in_evaluation=False),
    "adversarial inputs": LoopCase(Blocks, attacked, in_evaluation=False),
    "two losses, two passes": LoopCase(Blocks, accumulated, micro_batches=2),
    "LAMB": LoopCase(Blocks, optimizer=Lamb),
    "Adafactor": from_torch("Adafactor", lr=0.05),
    "Adagrad": from_torch("Adagrad", 1e-4, lr=0.05),
}
