"""How ZeRO-3's module may not be called: each with its own reason."""

from collections.abc import Sequence

import torch
from torch import nn

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.strategy.gradient_watch import second_gradient


def require_plain_call(in_backward: bool) -> None:
    """For the beginning of a forward pass.

    Args:
        in_backward: A backward pass may follow on an earlier one.

    Raises:
        OneRankError: A transform of `torch.func` calls the module, or a backward pass does.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise OneRankError(
            "a transform of torch.func (vmap, grad, ...) calls the module, but zero3 gathers parameters in place in "
            "forward; take zero2, or call the transform within forward"
        )
    if in_backward and torch._C._current_graph_task_id() != -1:
        raise OneRankError(
            "backward calls the module again, as an activation checkpoint around the whole strategy does; put "
            "checkpoints around blocks, or take zero2"
        )


def require_latest(in_backward: bool) -> None:
    """For what backward reaches.

    Raises:
        OneRankError: No backward pass is expected.
    """
    if not in_backward:
        raise OneRankError(
            "backward runs through a forward pass that was over when another one began; call forward, and backward "
            "behind it, in the same micro_batch"
        )


def refuse_module_by_itself() -> None:
    """For backward behind a block that was called outside of the module's forward pass.

    Raises:
        OneRankError: Always.
    """
    raise OneRankError(
        "a block was called by itself, and not by the strategy's forward pass, after which zero3 reduces its gradient; "
        "call it within forward, or under no_grad"
    )


def late_gradient(parameters: Sequence[nn.Parameter], is_second: bool, is_another_pass: bool) -> OneRankError:
    """What to say when backward comes to one of these, and gradients of it are reduced already.

    Args:
        is_second: They were its own.
        is_another_pass: Of autograd, on the same forward pass.
    """
    if is_second:
        return second_gradient(f"a parameter of shape {tuple(parameters[0].shape)}")
    if any(p.grad is not None and p.grad.isnan().any() for p in parameters):
        cause = "its weight was read outside of the module that holds it, where it is NaN"
    elif is_another_pass:
        cause = "a backward pass for inputs alone came first"
    else:
        cause = "modules, or activation checkpoints around several of them, run in another order than in the first step"
    return OneRankError(
        f"a gradient of a parameter of shape {tuple(parameters[0].shape)} came after its unit was reduced: {cause}; "
        "take zero2"
    )
