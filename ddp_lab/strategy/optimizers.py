"""Checks the function of the user that makes an optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

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
