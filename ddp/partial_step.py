"""An optimizer step for some of an optimizer's parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from training.errors import UnsupportedError


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within this context, `optimizer` knows `parameters` alone; their settings and states are its own.

    Raises:
        UnsupportedError: A step has changed a setting of a whole group, such as a count of steps, so that it matters
            whether parameters are updated together.
    """
    groups, chosen = optimizer.param_groups, set(parameters)
    parts = [{**group, "params": [p for p in group["params"] if p in chosen]} for group in groups]
    optimizer.param_groups = parts
    try:
        yield
    finally:
        optimizer.param_groups = groups
    for group, part in zip(groups, parts, strict=True):
        changed = [name for name in part if name != "params" and part[name] is not group.get(name)]
        if changed:
            name = type(optimizer).__name__
            raise UnsupportedError(
                f"--overlap-optimizer: {name} keeps {', '.join(changed)} for a whole parameter group"
            )
