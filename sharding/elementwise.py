"""Which optimizers may be sharded by elements: those that treat every element by itself, such as SGD and Adam."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_lab.runtime.errors import UnsupportedError


def require_elementwise(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that needs whole parameters (Muon, Adafactor, LARS).

    It is found by trying: an elementwise optimizer computes the same from a matrix as from two flat pieces of it.

    Raises:
        UnsupportedError: the optimizer is not elementwise.
    """
    generator = torch.Generator().manual_seed(0)
    start, scale = torch.randn(4, 6, generator=generator), torch.logspace(-2, 2, 24).view(4, 6)
    whole = nn.Parameter(start.clone())
    cut = [nn.Parameter(piece.clone()) for piece in start.view(-1).split([7, 17])]
    problem = ""
    try:
        for parameters in ([whole], cut):
            optimizer = make_optimizer(parameters)
            for step in range(1, 4):
                gradient = scale.roll(step) * torch.sin(step * start)
                pieces = [gradient] if parameters is not cut else list(gradient.view(-1).split([7, 17]))
                for parameter, piece in zip(parameters, pieces, strict=True):
                    parameter.grad = piece.clone()
                optimizer.step()
    except UnsupportedError:
        raise
    except (ValueError, RuntimeError, TypeError) as error:
        problem = f": {error}"
    if problem or not torch.allclose(whole.detach().view(-1), torch.cat([p.detach() for p in cut]), rtol=1e-4):
        name = type(optimizer).__name__ if not problem else "this optimizer"
        raise UnsupportedError(
            f"{name} does not work on each element by itself{problem}; sharding cuts parameters into flat pieces, so "
            "use an elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad), or a replicated strategy"
        )
