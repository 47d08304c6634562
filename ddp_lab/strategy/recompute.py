"""Activation checkpointing: a block keeps its inputs for backward, and computes the rest again.

What autograd keeps. An operator's backward needs values of its forward: a matrix product its inputs, an activation
function its argument. Autograd keeps them from forward until backward, for every operator of every block at once.

`block`, by hand.
- Forward runs the block without a graph, so that nothing is kept. Inputs, the state of the random generators and that
  of autocast are noted.
- Backward comes to the block, runs its forward once more, now with a graph, and goes through that graph at once. So the
  activations of a single block exist at a time. Dropout draws the same mask as before, since the generators are set
  back.

It costs one more forward pass of the block: a step of 3 units of compute (forward 1, backward 2) takes 4.

The block's parameters are inputs of the `torch.autograd.Function`, as its tensors are. So autograd knows that the
answer depends on them, also where no input has a gradient (below frozen embeddings). And it adds up the gradients of a
block that runs twice before a parameter gets its own, once: a strategy may reduce it right away. The parameters get
their gradients together, when the block is through.

`selective`, by torch's `checkpoint` and a policy. Results that are dear to compute stay: those of attention and of
every second matrix product, as in torchtitan. What is cheap (norms, activation functions, sums, casts) and the other
products run again. Torch keeps the graph of the first forward pass, with empty places for what it would have saved.
When backward needs the first of them, forward runs again and fills them all.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al., 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.runtime.tensors import PutTensors, taken_apart
from ddp_lab.strategy.blocks import find_blocks
from ddp_lab.strategy.options import NO_RECOMPUTATION, SELECTIVE

FLAG = "--activation-checkpointing"


def checkpoint_activations(module: nn.Module, setting: str) -> None:
    """Replace the `forward` of blocks as `setting` says (`ddp_lab.strategy.options.RECOMPUTATION`).

    The method is replaced, and no module is put around the block: so keys of the state dict stay the same, and hooks on
    the block run in the first forward pass alone. A strategy that gathers parameters in such hooks does not gather them
    again.

    Raises:
        UnsupportedError: the module has no blocks, keeps keys and values of earlier tokens, or computes blocks again
            by itself.
    """
    if setting == NO_RECOMPUTATION:
        return
    blocks = find_blocks(module)
    if not blocks:
        raise UnsupportedError(
            f"{FLAG} {setting}: {type(module).__name__} has no blocks, which are two or more modules of one class in a "
            "list or sequence"
        )
    if any(getattr(getattr(part, "config", None), "use_cache", False) for part in module.modules()):
        raise UnsupportedError(
            f"{FLAG} {setting}: a block that is computed again would add its keys and values to the cache twice; set "
            "config.use_cache = False"
        )
    if any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        raise UnsupportedError(
            f"{FLAG} {setting}: {type(module).__name__} computes its blocks again by itself, so they would run three "
            "times; call gradient_checkpointing_disable()"
        )
    again = SelectiveForward if setting == SELECTIVE else CheckpointedForward
    for block in blocks:
        block.forward = again(block, block.forward)


class CheckpointedForward:
    """Stands in for the `forward` of a block, and keeps nothing but inputs.

    Raises:
        OneRankError: the block changes an input in place, or reads a tensor that trains and is neither an input nor a
            parameter of its own.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.block, self.forward = block, forward
        self.is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        inputs, put_inputs = taken_apart((args, kwargs))
        parameters = [parameter for parameter in self.block.parameters() if parameter.requires_grad]
        run = Run(self, put_inputs)
        outputs = Recompute.apply(run, len(inputs), *inputs, *parameters)
        return run.put_outputs(outputs)


class Run:
    """One call of a block, without its tensors. `put_inputs`, `put_outputs`: put tensors where the block has them."""

    def __init__(self, call: CheckpointedForward, put_inputs: PutTensors) -> None:
        self.call, self.put_inputs = call, put_inputs
        self.put_outputs: PutTensors

    def compute(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = self.put_inputs(inputs)
        outputs, self.put_outputs = taken_apart(self.call.forward(*args, **kwargs))
        return tuple(outputs)


class Recompute(torch.autograd.Function):
    """A block as one operator of autograd."""

    @staticmethod
    def forward(ctx: Any, run: Run, count: int, *inputs_and_parameters: Tensor) -> tuple[Tensor, ...]:
        """Runs without a graph. The first `count` tensors are inputs."""
        inputs, ctx.parameters = inputs_and_parameters[:count], inputs_and_parameters[count:]
        ctx.run, ctx.state = run, State({tensor.device for tensor in inputs_and_parameters})
        ctx.set_materialize_grads(False)
        versions = [tensor._version for tensor in inputs]
        outputs = run.compute(inputs)
        if versions != [tensor._version for tensor in inputs]:
            raise OneRankError(
                f"{FLAG}: {type(run.call.block).__name__} changes an input in place, so it cannot be computed again: "
                f"use {FLAG} {NO_RECOMPUTATION}"
            )
        ctx.save_for_backward(*inputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.run.call
        # the second forward, with a graph
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad(), ctx.state.again(), buffers_kept(call.block):
            outputs = ctx.run.compute(inputs)
        reached = [
            pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad and pair[1] is not None
        ]
        sources = [*inputs, *ctx.parameters]
        wanted = [tensor for tensor in sources if tensor.requires_grad]
        if not call.is_checked:
            require_known(outputs, wanted, call.block)
            call.is_checked = True
        if not reached:
            return (None, None, *(None for _ in sources))
        # backward through that graph
        ends, end_gradients = zip(*reached, strict=True)
        computed = iter(torch.autograd.grad(ends, wanted, end_gradients, allow_unused=True))
        return (None, None, *(next(computed) if tensor.requires_grad else None for tensor in sources))


class State:
    """What forward depends on besides its inputs: the random generators of the CPU and of `devices`, and autocast."""

    def __init__(self, devices: set[torch.device]) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", *(device.type for device in devices)}
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this context everything is as it was. Afterwards it is as it is now."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(list(self.cuda)))
            torch.set_rng_state(self.cpu)
            for device, state in self.cuda.items():
                torch.cuda.set_rng_state(state, device)
            for settings in self.autocast:
                stack.enter_context(torch.autocast(*settings))
            yield


@contextmanager
def buffers_kept(block: nn.Module) -> Iterator[None]:
    """Within this context a second forward pass may change the block's buffers (BatchNorm: its statistics). Afterwards
    they are as the first one left them."""
    kept = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.data.copy_(before)  # `.data`: autograd may have saved the buffer, and would refuse a changed one


def require_known(outputs: Sequence[Tensor], known: Sequence[Tensor], block: nn.Module) -> None:
    """Check that all that the graph of `outputs` ends in is `known`.

    Raises:
        OneRankError: it ends in another tensor, which would get no gradient.
    """
    ids, seen, waiting = set(map(id, known)), set(), [tensor.grad_fn for tensor in outputs]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
            raise OneRankError(
                f"{FLAG}: {type(block).__name__} reads a tensor of shape {tuple(leaf.shape)} that trains and is "
                f"neither its parameter nor its input, so it cannot be computed again: use {FLAG} {SELECTIVE}"
            )
        waiting += [following for following, _ in node.next_functions]


# Selective checkpointing ---------------------------------------------------------------------------------------------


def operators(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names)


PRODUCTS = operators("mm", "addmm")
"""The results of every second one stay, the first of a block among them."""
KEPT = operators(
    *("bmm", "baddbmm", "convolution"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Results of all of these stay."""


class SelectiveForward:
    """Stands in for the `forward` of a block, and keeps what is dear to compute."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.block, self.forward = block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        forward = partial(self.forward, **kwargs)
        with autocast_uncached():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of the first forward pass, and of the second."""
        products = count()

        def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            keeps = next(products) % 2 == 0 if operator in PRODUCTS else operator in KEPT
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        first, second = create_selective_checkpoint_contexts(policy)
        return first, within(buffers_kept(self.block), second)


@contextmanager
def autocast_uncached() -> Iterator[None]:
    """Within this context, autocast casts a weight each time. Otherwise the two passes of a block that runs twice may
    differ in which of them casts."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def within(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def keeps_outputs() -> bool:
    """Whether selective checkpointing runs, which may keep what the last operator has answered."""
    kinds = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())
