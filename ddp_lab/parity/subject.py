"""How parameters and gradients are read, whatever wraps a model: a strategy of this project, DDP, FSDP2, DeepSpeed."""

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.parity import sketch
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.strategy import Strategy

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
"""What wrappers put into a name."""
ENGINE = "DeepSpeedEngine"
ENGINES = {"DistributedDataParallel", "DataParallel", ENGINE}
"""Class names of wrappers around the user's module, or of their base classes."""
Part = tuple[str, int, tuple[int, ...], Tensor]
"""Name; first element of a part, or -1 for a whole tensor; shape of the whole; sketch."""


def plain(name: str) -> str:
    """The name in the plain module."""
    return WRAPPERS.sub("", name).lstrip(".")


def module_of(subject: "Strategy | nn.Module") -> nn.Module:
    """The innermost module that is the user's own."""
    module = subject.module if isinstance(subject, Strategy) else subject
    while ENGINES & {base.__name__ for base in type(module).__mro__}:
        module = module.module  # type: ignore[assignment]
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a `DTensor`; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def part_of(name: str, tensor: Tensor) -> Part:
    """What this rank holds of a tensor."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return name, -1, tuple(tensor.shape), sketch.of_tensor(tensor)
    if not any(isinstance(placement, Shard) for placement in tensor.placements):
        return name, -1, tuple(tensor.shape), sketch.of_tensor(tensor.full_tensor())
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    block, first = tensor.to_local().detach(), 0
    for extent, offset in zip(tensor.shape, offsets, strict=True):
        first = first * extent + offset
    if not block.numel():
        return name, tensor.numel(), tuple(tensor.shape), torch.zeros_like(sketch.of_tensor(block.flatten()))
    return name, first, tuple(tensor.shape), sketch.of_block(block.view(shape), offsets, tensor.shape)


def shard_of(name: str, parameter: Any) -> Part | None:
    """This rank's part of a parameter that an engine keeps flat and cut (ZeRO stage 3). None: of another kind."""
    if not hasattr(parameter, "ds_tensor"):
        return None
    shard, shape = parameter.ds_tensor.detach(), tuple(parameter.ds_shape)
    if shard.numel() < parameter.ds_tensor.ds_numel:
        raise UnsupportedError(f"ddp_lab.parity.watch cannot read {name}, which is offloaded to NVMe")
    first = min(shard.numel() * dist.get_rank(parameter.ds_process_group), prod(shape))
    return part_in_order(name, first, shape, shard.flatten()[: prod(shape) - first])


def updated_of(parameter: Any) -> tuple[int, Tensor] | None:
    """The view into a flat tensor that this rank's optimizer updates for a parameter, and its first element in the
    parameter (ZeRO). None: the optimizer updates the parameter itself, or nothing of it on this rank."""
    if hasattr(parameter, "ds_tensor") and parameter.requires_grad:
        engine, size = parameter._z3_optimizer, prod(parameter.ds_shape)
        group, start, count = engine.grad_position[engine.get_param_id(parameter)]
        first = min(count * dist.get_rank(parameter.ds_process_group), size)
        return first, engine.fp32_partitioned_groups_flat[group][start : start + min(count, size - first)]
    linked = getattr(parameter, "_hp_mapping", None)
    return None if linked is None else (linked.lp_fragment_address.start, linked.hp_fragment)


def place_in(flat: Tensor, view: Tensor) -> slice | None:
    """Which elements of a flat tensor a view is of. None: of none."""
    start = int(view.storage_offset() - flat.storage_offset())
    if view.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
        return None
    return slice(start, start + view.numel()) if 0 <= start <= flat.numel() - view.numel() else None


def part_in_order(name: str, first: int, shape: tuple[int, ...], values: Tensor) -> Part:
    """The row of consecutive elements of a parameter."""
    return name, first, shape, sketch.of_block(values, [first], [prod(shape)])


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Megatron keeps it in `main_grad`."""
    return getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad


def gradients(
    subject: "Strategy | nn.Module", optimizer: torch.optim.Optimizer | None, names_read: set[str]
) -> Iterator[Part]:
    """Of the step that is about to be taken, without those of `known` names. Collective for a strategy."""
    if isinstance(subject, Strategy):
        wholes = subject.full_gradients()
        if subject.model_parallel is not None and dist.get_rank(subject.groups.everyone) != 0:
            return  # these are parts
        for name, gradient in wholes.items():
            yield plain(name), -1, tuple(gradient.shape), sketch.of_tensor(gradient)
        return
    for name, parameter in module_of(subject).named_parameters():
        if plain(name) in names_read:
            continue
        if not hasattr(parameter, "ds_tensor") and not hasattr(parameter, "_hp_mapping"):
            if (full := gradient_of(parameter)) is not None:
                yield part_of(plain(name), full)
        elif optimizer is not None and (updated := updated_of(parameter)) is not None:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            for flat in (flat for group in optimizer.param_groups for flat in group["params"] if flat.grad is not None):
                if (place := place_in(flat, updated[1])) is not None:
                    yield part_in_order(plain(name), updated[0], shape, flat.grad.detach().flatten()[place])


def norms(subject: "Strategy | nn.Module") -> list[float]:
    """Norms by which an engine has clipped in its own step: the loop calls nothing for it."""
    if ENGINE not in {base.__name__ for base in type(subject).__mro__}:
        return []
    engine: Any = subject
    norm = engine.get_global_grad_norm() if engine.gradient_clipping() else None
    return [] if norm is None else [float(norm)]


def state(subject: "Strategy | nn.Module") -> Iterator[tuple[bool, Part]]:
    """Parameters and buffers, each with whether it is a buffer. Collective for a strategy."""
    module = module_of(subject)
    buffers = {plain(name) for name, _ in module.named_buffers()}
    if isinstance(subject, Strategy):
        named = subject.full_state_dict()
        if not named and not subject.shards and subject.model_parallel is None:
            named = dict(module.state_dict())  # this rank's replica
        for name, tensor in named.items():
            yield plain(name) in buffers, (plain(name), -1, tuple(tensor.shape), sketch.of_tensor(tensor))
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield plain(name) in buffers, shard_of(plain(name), tensor) or part_of(plain(name), tensor)


def ties(module: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain(name))
    return [sorted(of_one) for of_one in names.values() if len(of_one) > 1]


def hooked(subject: "Strategy | nn.Module") -> list[str]:
    """Names of parameters with a hook of the user's own on their gradients: strategies have theirs there."""
    return [
        plain(name)
        for name, parameter in module_of(subject).named_parameters()
        if not isinstance(subject, Strategy)
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]


def settings(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, dict[str, Any]]:
    """What the optimizer does with each parameter: its group's numbers."""
    named = {plain(name): parameter for name, parameter in module.named_parameters()}
    names = {id(parameter): [name] for name, parameter in named.items()}
    views = {name: updated[1] for name, parameter in named.items() if (updated := updated_of(parameter)) is not None}
    by_name: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        numbers = {
            key: value if isinstance(value, bool | int | float) else list(map(float, value))
            for key, value in group.items()
            if isinstance(value, bool | int | float) or (key == "betas")
        }
        for key in ("fused", "foreach", "capturable", "differentiable"):
            numbers.pop(key, None)
        for parameter in group["params"]:
            within = [name for name, view in views.items() if place_in(parameter, view) is not None]
            by_name |= dict.fromkeys(names.get(id(parameter)) or within or [f"group {number}"], numbers)
    return by_name
