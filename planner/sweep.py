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

    Tensors of one size take turns, so that those in use are as little in the processor's nearest caches as gradients
    are when their turn comes.
    """
    tensors = []
    for size in SIZES:
        count = CALLS if size < LARGE else 1
        tensors.append([[torch.ones(size // 4, device=device) for _ in range(5)] for _ in range(count)])
    steps = [torch.zeros((), device=device)]

    def run(on_phase: Callable[[str], None]) -> None:
        on_phase("forward")
        with torch.no_grad():
            for group in tensors:
                for one, other, *states in group:
                    operators(one, other, states, steps)

    return run


def operators(one: Tensor, other: Tensor, states: list[Tensor], steps: list[Tensor]) -> None:
    one.copy_(other)
    one.add_(other)
    one.mul_(0.5)
    torch.mul(one, 0.5, out=other)
    one.div_(2.0)
    one.fill_(1.0)
    one.zero_()
    torch.add(one, other)
    torch.mul(one, 0.5)
    torch.zeros_like(one)
    one.clone()
    torch.cat(one.chunk(PIECES))
    one.sum()
    one.abs()
    torch.linalg.vector_norm(other)
    pieces = list(other.chunk(PIECES))
    torch._foreach_norm(pieces)
    torch._foreach_mul_(pieces, torch.ones((), device=one.device))
    torch._foreach_add_(pieces, list(one.chunk(PIECES)))
    one.to(torch.bfloat16).to(torch.float32)
    gradient, *moments = states
    torch._fused_adamw_(
        [one], [gradient], [moments[0]], [moments[1]], [], steps,
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
