"""What a strategy demands of its user's module, and what happens to it before the strategy's own hooks do."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map_only

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.groups import exchange_device, settle_at_exit
from ddp_lab.strategy.gradient_watch import GradientWatch, follow_gradients
from ddp_lab.strategy.modules import find_blocks, require_readable
from ddp_lab.strategy.options import BF16_TRUE, FP16, StrategyOptions

if TYPE_CHECKING:
    from ddp_lab.strategy.communication.loss_scale import LossScaler
    from ddp_lab.strategy.compilation import CompiledBlocks

DTYPES: dict[str | None, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {BF16_TRUE: torch.bfloat16}
AUTOCAST = ("bf16", "fp16")


def autocast(device_type: str, precision: str) -> torch.autocast:
    """The context in which forward runs.

    Args:
        precision: One of `ddp_lab.strategy.options.PRECISIONS`.
    """
    return torch.autocast(device_type, DTYPES[precision], enabled=precision in AUTOCAST)


def bring_to(module: nn.Module, precision: str) -> None:
    """For `bf16-true`, make the parameters of `module` bf16, and what it and its blocks are called with. Nothing where
    they are. Buffers stay: angles of rotary embeddings are read as positions times frequencies, which bf16 mixes up.
    """
    dtype = DTYPES[precision]
    castable = [p for p in module.parameters() if p.is_floating_point() and p.dtype != dtype]
    if precision != BF16_TRUE or not castable:
        return
    require_castable(module, f"--precision {precision}")
    for parameter in castable:
        parameter.data = parameter.data.to(dtype)
    cast_inputs([module, *find_blocks(module)], dtype)


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast floating-point arguments of `modules` to `dtype`, as FSDP2 does by default."""
    for module in modules:
        module.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


# Before a strategy's own hooks ----------------------------------------------------------------------------------------


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks that share the work. None: all."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("a strategy needs a process group: call torch.distributed.init_process_group first")
    settle_at_exit(group)
    return group


def prepared(
    module: nn.Module, options: StrategyOptions, group: dist.ProcessGroup, shards: bool
) -> "tuple[LossScaler | None, CompiledBlocks | None]":
    """Refuse what no strategy can train, then change the module as `options` say. Collective."""
    require_readable(module)
    require_supported_parameters(module)
    bring_to(module, options.precision)
    if shards:
        require_own_memory(module)
    if options.param_dtype:
        require_castable(module)
    require_same_parameters(module, group, exchange_device(group, next(module.parameters()).device))
    compiled = scaler = None
    if options.compile_backend:
        from ddp_lab.strategy.compilation import CompiledBlocks

        compiled = CompiledBlocks(module, options.compile_backend)
    if options.recomputes:
        from ddp_lab.strategy.recompute import checkpoint_activations

        checkpoint_activations(module, options.activation_checkpointing)
    if options.loss_chunks > 1:
        from ddp_lab.strategy.chunked_loss import chunk_loss

        chunk_loss(module, options.loss_chunks)
    if FP16 in (options.precision, options.param_dtype):
        from ddp_lab.strategy.communication.loss_scale import LossScaler

        scaler = LossScaler.of(module, options)
    return scaler, compiled


def watch_over(leaves: Mapping[str, Tensor]) -> GradientWatch:
    """The watch over the gradients of `leaves`, which errors name by these names."""
    watch = GradientWatch(leaves)
    follow_gradients(watch)
    return watch


# Checks that stop a strategy before it trains the wrong thing ---------------------------------------------------------


def require_supported_parameters(module: nn.Module) -> None:
    """Refuse what no strategy here can train."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not names:
        raise UnsupportedError("the module has no trainable parameter")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UnsupportedError(f"parameter {name} has no shape yet; run the module once before")
        if parameter.is_complex():
            raise UnsupportedError(f"parameter {name} is complex; train its real and imaginary part as two parameters")
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False) and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedError(f"embedding {name} has sparse gradients; build it with sparse=False")
        if getattr(layer, "max_norm", None) is not None and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedError(
                f"embedding {name} has max_norm: its forward changes the weight, on each rank in another way; build it "
                "without, and normalize what it answers"
            )


def require_own_memory(module: nn.Module) -> None:
    """Refuse parameters that lie where another or a buffer does, which would come apart where they are cut."""
    named = [*module.named_parameters(), *((f"buffer {name}", buffer) for name, buffer in module.named_buffers())]
    spans = [
        (tensor.untyped_storage()._cdata, *_span(tensor), name, tensor) for name, tensor in named if tensor.numel()
    ]
    spans.sort(key=lambda span: span[:3])
    for index, (storage, _, end, name, first) in enumerate(spans):
        for other_storage, begin, _, other_name, second in spans[index + 1 :]:
            if other_storage != storage or begin >= end:
                break
            if (first.requires_grad or second.requires_grad) and _overlap(first, second):
                raise UnsupportedError(
                    f"{name} and {other_name} lie in the same memory, and would come apart in shards; make them "
                    "one parameter (b.weight = a.weight), compute a view in forward, or take a replicated strategy"
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte after its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = int(tensor.storage_offset()), tensor.element_size()
    return first * size, (first + int(last) + 1) * size


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of a storage share an element. Views of different dtypes count as sharing one."""
    if a.dtype != b.dtype:
        return True
    numbers = torch.arange(max(_span(a)[1], _span(b)[1]) // a.element_size(), dtype=torch.int64, device="cpu")
    first, second = (numbers.as_strided(t.shape, t.stride(), t.storage_offset()).flatten() for t in (a, b))
    return bool(torch.isin(first, second).any())


def require_castable(module: nn.Module, flag: str = "--param-dtype") -> None:
    """Refuse modules that take no parameters of another dtype than their buffers."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None:
            raise UnsupportedError(
                f"{flag}: {type(layer).__name__} {name} keeps its statistics in {layer.running_mean.dtype}, and "
                "takes no parameters in another dtype; use --precision bf16"
            )


def require_same_parameters(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse modules that differ between ranks. Gloo mixes such tensors without a word.

    Raises:
        UnsupportedError: on every rank, names those whose parameters or buffers differ from rank 0's.
    """
    lines = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in module.named_parameters()]
    lines += [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
    own_digest = torch.tensor([digest], dtype=torch.int64, device=device)
    all_digests = own_digest.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(all_digests, own_digest, group=group)
    differing = (all_digests != all_digests[0]).nonzero().flatten().tolist()
    if differing:
        raise UnsupportedError(
            f"parameters or buffers differ in name, shape, dtype or requires_grad between rank 0 and "
            f"rank {', '.join(map(str, differing))}; build the same module on every rank"
        )


def require_none_unfrozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Check that no parameter trains that was frozen when the strategy was built: its gradient would stay on one
    rank."""
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise UnsupportedError(
                f"{name} was frozen when the strategy was built, and trains now; build the strategy while it trains, "
                "and freeze it later"
            )
