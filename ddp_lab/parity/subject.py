"""How parameters and gradients are read, whatever wraps a model: a strategy of this project, DDP, FSDP2, DeepSpeed."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.parity import sketch
from ddp_lab.strategy.interface import Strategy

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
"""What wrappers put into a name."""
Part = tuple[str, int, tuple[int, ...], Tensor]
"""Name; first element of a part, or -1 for a whole tensor; shape of the whole; sketch."""


def plain(name: str) -> str:
    """The name in the plain module."""
    return WRAPPERS.sub("", name).lstrip(".")


def module_of(subject: "Strategy | nn.Module") -> nn.Module:
    """The innermost module that is the user's own."""
    module = subject.module if isinstance(subject, Strategy) else subject
    while type(module).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
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


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Megatron keeps it in `main_grad`, DeepSpeed in buffers of its own."""
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        whole: Tensor | None = safe_get_full_grad(parameter)
        return whole
    return getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad


def gradients(subject: "Strategy | nn.Module") -> Iterator[Part]:
    """Of the step that is about to be taken. Collective for a strategy."""
    if isinstance(subject, Strategy):
        wholes = {} if subject.options.overlap_optimizer else subject.full_gradients()
        if subject.model_parallel is not None and dist.get_rank(subject.everyone) != 0:
            return  # these are parts
        for name, gradient in wholes.items():
            yield plain(name), -1, tuple(gradient.shape), sketch.of_tensor(gradient)
        return
    for name, parameter in module_of(subject).named_parameters():
        theirs = gradient_of(parameter)
        if theirs is not None:
            yield part_of(plain(name), theirs)


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
        yield plain(name) in buffers, part_of(plain(name), tensor)


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


def settings(optimizer: torch.optim.Optimizer, names: Callable[[Tensor], str | None]) -> dict[str, dict[str, Any]]:
    """What the optimizer does with each parameter: its group's numbers."""
    found: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        numbers = {
            key: value if isinstance(value, bool | int | float) else list(map(float, value))
            for key, value in group.items()
            if isinstance(value, bool | int | float) or (key == "betas")
        }
        for key in ("fused", "foreach", "capturable", "differentiable"):
            numbers.pop(key, None)
        for parameter in group["params"]:
            name = names(parameter)
            found[name if name else f"group {number}"] = numbers
    return found
