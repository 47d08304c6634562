"""Whether an optimizer treats every element by itself, as SGD and Adam do, so that parameters may be cut anywhere."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.optimizers import Part, hand_over

STEPS, LR, LARGEST = 6, 0.01, 2**12
TOLERANCE = 1e-6
"""Relative, of an update. What is computed by elements differs by rounding in fp64, or in lower precision inside."""


def require_elementwise(
    make: Callable[[], torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """What `make` makes. Refuse an optimizer that needs whole parameters (Muon, Adafactor, LARS).

    It is found by trying. Of each group a parameter of each shape, halved where it is large, is updated for some steps
    in fp64, whole and on two pretended ranks. An elementwise optimizer moves each element equally far.

    Args:
        make: Makes the optimizer over `parameters`; called several times.
        device: Where it will update.

    Raises:
        UnsupportedError: the optimizer is not elementwise.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    toys = {p: _toy(p.shape, device) for p in _representatives(make(), names)}
    problem, optimizer = "", make()
    try:
        whole = _moves(optimizer, toys, 0, 10)
        first, second = (_moves(make(), toys, *tenths) for tenths in pairwise((0, 3, 10)))
    except UnsupportedError:
        raise
    except Exception as error:  # whatever code of the user's raises
        problem = f": {error}"
    for parameter in toys if not problem else ():
        halves = [moves[parameter] for moves in (first, second) if parameter in moves]
        (before, expected), moved = whole[parameter], torch.cat(halves, -1)[1]
        allowed = TOLERANCE * expected.abs() + 16 * torch.finfo(before.dtype).eps * before.abs()
        if not ((moved - expected).abs() <= allowed).all():
            problem = f", as {names[parameter]} shows"
    if problem:
        raise UnsupportedError(
            f"{type(optimizer).__name__} does not work on each element by itself{problem}; sharding cuts parameters "
            "into flat pieces, so use an elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad), or a replicated "
            "strategy"
        )
    return make()


def _representatives(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> Iterator[nn.Parameter]:
    """Of each group, a parameter of each shape and each set of plain attributes."""
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            plain = [(n, v) for n, v in vars(parameter).items() if isinstance(v, bool | int | float | str)]
            kind = index, parameter.shape, *plain
            if parameter in names and parameter.numel() and kind not in seen:
                seen.add(kind)
                yield parameter


def _toy(shape: torch.Size, device: torch.device) -> Tensor:
    """Values in fp64, of this shape if it is small."""
    lengths = list(shape)
    while torch.Size(lengths).numel() > LARGEST:
        lengths[lengths.index(max(lengths))] //= 2
    generator = torch.Generator().manual_seed(0)
    return torch.randn(lengths, generator=generator, dtype=torch.float64, device="cpu").to(device)


def _moves(
    optimizer: torch.optim.Optimizer, toys: Mapping[nn.Parameter, Tensor], begin: int, end: int
) -> dict[nn.Parameter, Tensor]:
    """Where each element is before each step, and how far it moves: (2, steps, elements), between these tenths."""
    parts, gradients = {}, {}
    for parameter, values in toys.items():
        numel = values.numel()
        own = slice(-(-numel * begin // 10), -(-numel * end // 10))
        piece = values if end - begin == 10 else values.view(-1)[own]
        if piece.numel():
            tensor = nn.Parameter(piece.clone())
            parts[parameter] = Part(tensor, None)
            scale = torch.logspace(-6, 2, numel, dtype=values.dtype, device=values.device)
            every = [scale.roll(step) * torch.sin(step * values.view(-1)) for step in range(1, STEPS + 1)]
            gradients[tensor] = [gradient[own].view(piece.shape) for gradient in every]
    for group in hand_over(optimizer, parts).param_groups:
        if isinstance(group.get("lr"), float | int | Tensor):  # a small one would hide all differences
            group["lr"] = torch.full_like(group["lr"], LR) if isinstance(group["lr"], Tensor) else LR
    found: dict[nn.Parameter, list[Tensor]] = {parameter: [] for parameter in parts}
    for step in range(STEPS):
        before = {tensor: tensor.detach().clone() for tensor in gradients}
        for tensor, of_tensor in gradients.items():
            tensor.grad = of_tensor[step].clone()
        optimizer.step()
        for parameter, (tensor, _) in parts.items():
            found[parameter].append(torch.stack([before[tensor], tensor.detach() - before[tensor]]).view(2, -1))
    return {parameter: torch.stack(steps, 1) for parameter, steps in found.items()}
