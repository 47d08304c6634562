"""This rank's shards, which FSDP2 cuts along dimension 0 (`DTensor`), and the tensors that they are part of."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from ddp_lab.runtime.errors import UnsupportedError


def first_element(parameter: Tensor) -> int:
    """Number of the first element of this rank's shard. Dimension 0 is sharded as by `torch.chunk`."""
    if not isinstance(parameter, DTensor) or not parameter.numel():
        return 0
    rows, mesh = len(parameter), parameter.device_mesh
    shards = mesh.ndim - 1  # the dimension over which it is sharded; over one before it, shards are replicated
    before = -(-rows // mesh.size(shards)) * mesh.get_local_rank(shards)
    return min(before, rows) * (parameter.numel() // rows)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a `DTensor`; any other tensor as it is. No operation: activation checkpoints see these."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on CPU. Collective. Shards that are offloaded are gathered on the device."""
    if isinstance(tensor, DTensor):
        tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return tensor.detach().cpu().clone()


def require_reducible(parameters: Mapping[str, Tensor]) -> None:
    """Refuse what FSDP2 would lose. It calls hooks that run after a gradient is there, of shards alone."""
    for name, parameter in parameters.items():
        if parameter.requires_grad and not parameter.numel():
            raise UnsupportedError(f"FSDP2 cannot reduce the gradient of {name}, which has no elements; remove it")
        if parameter._backward_hooks or (parameter._post_accumulate_grad_hooks and not isinstance(parameter, DTensor)):
            raise UnsupportedError(
                f"{name} has a gradient hook, which FSDP2 never calls; change gradients between the last micro_batch() "
                "and step(), or use zero2"
            )
