"""Checks the function of the user that makes an optimizer: that it uses what it is given, and for strategies that cut
parameters, that it treats every element by itself, as SGD and Adam do."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ddp_lab.runtime.errors import UnsupportedError

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def checked(make_optimizer: MakeOptimizer) -> MakeOptimizer:
    """The same function; it refuses an optimizer over parameters that it was not given.

    A strategy that shards gives it pieces, so an optimizer over `model.parameters()` would update nothing.

    Raises:
        UnsupportedError: `make_optimizer` is no function.
    """
    if not callable(make_optimizer):
        raise UnsupportedError(
            f"make_optimizer is of type {type(make_optimizer).__name__}; give a function of the parameters, such as "
            "lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )

    def make(given: Any) -> torch.optim.Optimizer:
        optimizer = make_optimizer(given)
        known = set(_ids(given))
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise UnsupportedError(
                "make_optimizer has made an optimizer over other parameters than it was given; pass it those that it "
                "is given, not model.parameters()"
            )
        return optimizer

    return make


def _ids(given: Any) -> Iterator[int]:
    """Of all tensors in `given`: tensors, `(name, tensor)`, or group dicts of these."""
    for entry in given:
        if isinstance(entry, dict):
            yield from _ids([entry["params"]] if isinstance(entry["params"], torch.Tensor) else entry["params"])
        else:
            yield id(entry[1] if isinstance(entry, tuple) else entry)


def require_elementwise(make_optimizer: MakeOptimizer) -> None:
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
