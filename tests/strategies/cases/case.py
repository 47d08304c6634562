"""A case: a module and what a loop of one's own does with it, through a strategy and in one process.

The one process runs the micro-batches of all ranks one after the other, and divides each loss by their number. So it
sees the global batch, and in each forward pass the samples that a rank sees: a case may use other layers on another
rank, and BatchNorm has the same statistics. Buffers are rank 0's after each step, as with PyTorch DDP.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_lab.strategy.options import StrategyOptions
from tests.parity import load, options_of

FEATURES, SAMPLES, STEPS = 6, 4, 3
Run = Callable[..., Any]


class Samples(NamedTuple):
    """A micro-batch: x (SAMPLES, FEATURES) and y (SAMPLES, 1) in fp32, and whose it is."""

    x: Tensor
    y: Tensor
    step: int
    rank: int
    index: int


def samples(step: int, rank: int, index: int) -> Samples:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    x, y = torch.randn(SAMPLES, FEATURES, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    return Samples(x, y + 2, step, rank, index)  # around 2, lest gradients cancel, which magnifies rounding


def squared_error(run: Run, batch: Samples) -> Tensor:
    return functional.mse_loss(run(batch.x), batch.y)


def nothing(run: Run, module: nn.Module, step: int):
    pass


def momentum(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class LoopCase:
    """What is trained, and how.

    Attributes:
        module: Makes the module.
        loss: `loss(run, batch)` calls `run` in place of the module. Each loss that it returns has a backward pass.
        before: What the loop does before step k: `before(run, module, k)`.
        between: What the loop does between backward and the optimizer's step k.
        schedule: Makes a learning-rate scheduler.
        in_evaluation: The loss needs no gradient, so that it can be evaluated, too.
        unused: Some parameters may get no gradient, which PyTorch DDP must be told.
        tolerance: Relative, of parameters.
    """

    module: Callable[[], nn.Module]
    loss: Callable[[Run, Samples], Tensor | Sequence[Tensor]] = squared_error
    before: Callable[[Run, nn.Module, int], None] = nothing
    between: Callable[[Run, nn.Module, int], None] = nothing
    micro_batches: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    set_to_none: bool | None = True
    in_evaluation: bool = True
    unused: bool = False
    clip: float = 1.0
    clip_value: float = math.inf
    tolerance: float = 1e-5

    def losses(self, run: Run, batch: Samples) -> Sequence[Tensor]:
        loss = self.loss(run, batch)
        return [loss] if isinstance(loss, Tensor) else loss

    def scheduler(self, optimizer: torch.optim.Optimizer):
        return self.schedule(optimizer) if self.schedule else None


class LoopOutcome(NamedTuple):
    """The result of training.

    Attributes:
        norms: Of the gradient in each step.
        evaluation: The loss of samples that are the same on all ranks.
        state: The module's state dict; on rank 0 alone.
        has_buffers: If so, each rank has its own values after the last step.
    """

    norms: list[float]
    evaluation: float
    state: dict[str, Tensor]
    has_buffers: bool


def build(case: LoopCase) -> nn.Module:
    torch.manual_seed(3)
    return case.module()


def evaluate(case: LoopCase, run: Run, module: nn.Module) -> float:
    module.eval()
    if not case.in_evaluation:
        return 0.0
    with torch.no_grad():
        return sum(loss.item() for loss in case.losses(run, samples(99, 0, 0)))


def in_one_process(case: LoopCase, world_size: int) -> LoopOutcome:
    module = build(case)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = case.optimizer(case.groups(module) if case.groups else trained)
    scheduler, norms = case.scheduler(optimizer), []
    for step in range(STEPS):
        case.before(module, module, step)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for rank in reversed(range(world_size)):
            for name, buffer in module.named_buffers():
                buffer.data.copy_(buffers[name])
            for index in range(case.micro_batches):
                for loss in case.losses(module, samples(step, rank, index)):
                    (loss / (world_size * case.micro_batches)).backward()
        nn.utils.clip_grad_value_(trained, case.clip_value)
        norms.append(nn.utils.clip_grad_norm_(trained, case.clip).item())
        case.between(module, module, step)
        optimizer.step()
        if scheduler:
            scheduler.step()
        if case.set_to_none is not None:
            optimizer.zero_grad(case.set_to_none)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return LoopOutcome(norms, evaluate(case, module, module), state, any(True for _ in module.buffers()))


def on_a_rank(case: LoopCase, choice: str, bucket_cap_mb: float) -> LoopOutcome | str:
    """The outcome on this rank by a strategy, or its error."""
    module = build(case)
    options: StrategyOptions = options_of(
        choice,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=case.unused,
        parameter_groups=case.groups,
    )
    try:
        strategy = load(choice)(module, case.optimizer, options)
        scheduler, norms = case.scheduler(strategy.optimizer), []
        for step in range(STEPS):
            case.before(strategy, module, step)
            for index in range(case.micro_batches):
                with strategy.micro_batch(last=index + 1 == case.micro_batches):
                    for loss in case.losses(strategy, samples(step, dist.get_rank(), index)):
                        (loss / case.micro_batches).backward()
            strategy.clip_grad_value_(case.clip_value)
            norms.append(strategy.clip_grad_norm_(case.clip).item())
            case.between(strategy, module, step)
            strategy.step()
            if scheduler:
                scheduler.step()
            if case.set_to_none is not None:
                strategy.zero_grad(case.set_to_none)
    except Exception as error:  # the test decides whether it is right
        return f"{type(error).__name__}: {error}"
    state = strategy.full_state_dict()
    return LoopOutcome(norms, evaluate(case, strategy, module), state, any(True for _ in module.buffers()))
