"""Checks the function of the user that makes an optimizer, and hands its optimizer the parts of cut parameters."""

import gc
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def checked(make_optimizer: MakeOptimizer) -> MakeOptimizer:
    """The same function; it refuses an optimizer over parameters that it was not given, which would train in vain."""
    if not callable(make_optimizer):
        raise UnsupportedError(
            f"make_optimizer is of type {type(make_optimizer).__name__}; give a function of the parameters, such as "
            "lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters)
        ids = set(_ids(parameters))
        if any(id(parameter) not in ids for group in optimizer.param_groups for parameter in group["params"]):
            raise UnsupportedError(
                "make_optimizer has made an optimizer over other parameters than it was given: frozen ones, or those "
                "of before the strategy; pass it those that it is given"
            )
        return optimizer

    return make


def _ids(parameters: Any) -> Iterator[int]:
    """The ids of all tensors in `parameters`: tensors, `(name, tensor)`, or group dicts of these."""
    for entry in parameters:
        if isinstance(entry, dict):
            yield from _ids([entry["params"]] if isinstance(entry["params"], torch.Tensor) else entry["params"])
        else:
            yield id(entry[1] if isinstance(entry, tuple) else entry)


# Optimizers over parts of parameters ---------------------------------------------------------------------------------


ELEMENTWISE = {
    torch.optim.SGD, torch.optim.ASGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop,
}  # fmt: skip
"""Torch's optimizers that treat every element by itself, so that parameters may be cut anywhere."""


def require_elementwise(optimizer: torch.optim.Optimizer, is_vouched_for: bool) -> torch.optim.Optimizer:
    """Refuse an optimizer that may need whole parameters, as Muon, Adafactor and LAMB do.

    Args:
        is_vouched_for: The user says that it does not (`StrategyOptions.elementwise`).
    """
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or "step" in vars(optimizer)
    if is_vouched_for or (type(optimizer) in ELEMENTWISE and not hooks):
        return optimizer
    raise UnsupportedError(
        f"{type(optimizer).__name__}{' with a hook' if hooks else ''} is not known to work on each element by itself, "
        "and sharding cuts parameters into flat pieces: take SGD, AdamW or another elementwise optimizer of torch, or "
        "a replicated strategy; if it does so, give StrategyOptions(elementwise=True)"
    )


class OptimizerPart(NamedTuple):
    """What an optimizer updates in place of a parameter: its elements from number `start` on."""

    tensor: nn.Parameter
    start: int = 0


def hand_over(optimizer: torch.optim.Optimizer, parts: Mapping[nn.Parameter, OptimizerPart]) -> torch.optim.Optimizer:
    """Give an optimizer over whole parameters their `parts`, with their attributes and the states made so far.

    Thus `make_optimizer` sees whole parameters, and may group them by name, shape or attribute. Those without a part
    leave the optimizer; all groups stay, so that every rank has the same.
    """
    groups = []
    for group in optimizer.param_groups:
        indices = [index for index, parameter in enumerate(group["params"]) if parameter in parts]
        entries: dict[str, Any] = {
            name: [group[name][index] for index in indices] for name in ("params", "param_names") if name in group
        }
        groups.append({**group, **entries, "params": [parts[parameter].tensor for parameter in entries["params"]]})
    optimizer.param_groups[:] = groups
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for key, state in states:
        if not isinstance(key, nn.Parameter):
            optimizer.state[key] = state
            continue
        require_values(key, state)  # on all ranks alike, also where one has no part of the parameter
        if key in parts:
            part = parts[key]
            optimizer.state[part.tensor] = {name: _own_state(name, value, key, part) for name, value in state.items()}
    for parameter, part in parts.items():
        copy_attributes(parameter, part.tensor)
    return optimizer


def copy_attributes(parameter: Tensor, target: Tensor) -> None:
    """Copy the attributes that the user has set, such as a learning rate of its own."""
    vars(target).update({**vars(parameter), **vars(target)})


def require_values(parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
    """
    Raises:
        UnsupportedError: a state has copied values from the parameter while it was sharded.
    """
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.isnan().any():
            raise UnsupportedError(
                f"the optimizer copies values of parameters into its state {name} when it is built, where they are in "
                "shards; copy them in its first step, or take zero2"
            )


def _own_state(name: str, value: Any, parameter: nn.Parameter, part: OptimizerPart) -> Any:
    """The part of a state that was made for the whole parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or name == "step":
        return value
    values = value.reshape(-1)[part.start : part.start + part.tensor.numel()]
    dtype = part.tensor.dtype if value.dtype == parameter.dtype else value.dtype
    return values.to(part.tensor.device, dtype, copy=True).view(part.tensor.shape)


def require_given_up(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that an optimizer that was handed parts keeps none of the whole parameters elsewhere."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for item in _reachable(optimizer):
        if id(item) in names:
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps {names[id(item)]} in an attribute or a hook, but sharded strategies "
                "update parts of parameters; read self.param_groups in step, or take a replicated strategy"
            )


def _reachable(root: object) -> Iterator[object]:
    """All objects that `root` holds, directly or through others: not what modules and classes hold, or tensors."""
    visited: set[int] = set()
    pending = [root]
    while pending:
        item = pending.pop()
        if id(item) in visited or isinstance(item, type | ModuleType):
            continue
        visited.add(id(item))
        yield item
        if isinstance(item, FunctionType):  # without its globals
            pending += [item.__closure__, item.__defaults__, item.__kwdefaults__]
        elif not isinstance(item, Tensor):
            pending += gc.get_referents(item)
