"""Operators that strategies and optimizers add to a model's own, over sizes: what a step alone does not show."""

from collections.abc import Callable

import torch
from torch import Tensor

SIZES = tuple(2**power for power in (12, 15, 18, 20, 22, 24, 26))
"""Bytes of one tensor of float32."""
PIECES = 16
"""Tensors in the list of a `_foreach` operator, and in that of a `cat`."""
CALLS, LARGE = 3, 2**23
"""Of each operator and size; one of those that take longest."""


def sweep(device: torch.device) -> Callable[[Callable[[str], None]], None]:
    """A function to record like a step: it runs the operators of strategies on tensors of several sizes.

    Each operator has its turn on all tensors, 480 MiB, before the next one has: so those in use are as little in the
    processor's caches as gradients are when their turn comes.
    """
    tensors = []
    for size in SIZES:
        count = CALLS if size < LARGE else 1
        tensors.append([[torch.ones(size // 4, device=device) for _ in range(5)] for _ in range(count)])
    steps = [torch.zeros((), device=device)]

    def run(on_phase: Callable[[str], None]) -> None:
        on_phase("forward")
        with torch.no_grad():
            for operator in OPERATORS:
                for group in tensors:
                    for one, other, *states in group:
                        operator(one, other, states, steps)

    return run


def update(one: Tensor, other: Tensor, states: list[Tensor], steps: list[Tensor]) -> None:
    """AdamW's, of a flat tensor."""
    gradient, *moments = states
    torch._fused_adamw_(
        [one], [gradient], [moments[0]], [moments[1]], [], steps,
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def pieces(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(PIECES))


OPERATORS: tuple[Callable[[Tensor, Tensor, list[Tensor], list[Tensor]], object], ...] = (
    lambda one, other, *_: one.copy_(other),
    lambda one, other, *_: one.add_(other),
    lambda one, *_: one.mul_(0.5),
    lambda one, other, *_: torch.mul(one, 0.5, out=other),
    lambda one, *_: one.div_(2.0),
    lambda one, *_: one.fill_(1.0),
    lambda one, *_: one.zero_(),
    lambda one, other, *_: torch.add(one, other),
    lambda one, *_: torch.mul(one, 0.5),
    lambda one, *_: torch.zeros_like(one),
    lambda one, *_: one.clone(),
    lambda one, *_: torch.cat(one.chunk(PIECES)),
    lambda one, *_: one.sum(),
    lambda one, *_: one.abs(),
    lambda one, other, *_: torch.linalg.vector_norm(other),
    lambda one, other, *_: torch._foreach_norm(pieces(other)),
    lambda one, other, *_: torch._foreach_mul_(pieces(other), torch.ones((), device=one.device)),
    lambda one, other, *_: torch._foreach_add_(pieces(other), pieces(one)),
    lambda one, *_: one.to(torch.bfloat16).to(torch.float32),
    update,
)
