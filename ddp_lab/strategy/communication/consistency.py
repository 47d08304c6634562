"""Checks that stop a strategy before it trains the wrong thing."""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ddp_lab.runtime.errors import UnsupportedError


def require_supported_parameters(module: nn.Module) -> None:
    """Refuse what no strategy here can train.

    Raises:
        UnsupportedError: no parameter is trainable; one has no shape, or sparse or complex gradients; or forward
            changes one.
    """
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
    """Refuse parameters that lie where another parameter or a buffer does, which would come apart where they are cut.

    Raises:
        UnsupportedError: names both. At least one of them trains.
    """
    named = [*module.named_parameters(), *((f"buffer {name}", buffer) for name, buffer in module.named_buffers())]
    spans = [
        (tensor.untyped_storage()._cdata, *_span(tensor), name, tensor) for name, tensor in named if tensor.numel()
    ]
    spans.sort(key=lambda span: span[:3])
    for index, (storage, _, end, name, one) in enumerate(spans):
        for other_storage, begin, _, other, another in spans[index + 1 :]:
            if other_storage != storage or begin >= end:
                break
            if (one.requires_grad or another.requires_grad) and _overlap(one, another):
                raise UnsupportedError(
                    f"{name} and {other} lie in the same memory, and would come apart in shards; make them "
                    "one parameter (b.weight = a.weight), compute a view in forward, or take a replicated choice"
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a storage that is a tensor's, and the byte behind its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = int(tensor.storage_offset()), tensor.element_size()
    return first * size, (first + int(last) + 1) * size


def _overlap(one: Tensor, another: Tensor) -> bool:
    """Whether two views of a storage have an element in common; if they differ in dtype, taken for granted."""
    if one.dtype != another.dtype:
        return True
    numbers = torch.arange(max(_span(one)[1], _span(another)[1]) // one.element_size(), dtype=torch.int64, device="cpu")
    first, second = (numbers.as_strided(t.shape, t.stride(), t.storage_offset()).flatten() for t in (one, another))
    return bool(torch.isin(first, second).any())


def require_castable(module: nn.Module, flag: str = "--param-dtype") -> None:
    """Refuse modules that take no parameters of another dtype than their buffers.

    Raises:
        UnsupportedError: names one that keeps running statistics, such as BatchNorm.
    """
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
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    all_digests = mine.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(all_digests, mine, group=group)
    differing = (all_digests != all_digests[0]).nonzero().flatten().tolist()
    if differing:
        raise UnsupportedError(
            f"parameters or buffers differ in name, shape, dtype or requires_grad between rank 0 and "
            f"rank {', '.join(map(str, differing))}; build the same module on every rank"
        )


def require_none_unfrozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Check that no parameter trains that was frozen when the strategy was built.

    Raises:
        UnsupportedError: names one. Its gradient would stay on this rank.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise UnsupportedError(
                f"{name} was frozen when the strategy was built, and trains now; build the strategy while it trains, "
                "and freeze it later"
            )
