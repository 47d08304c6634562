"""What all replicated strategies have in common: every rank holds the whole model and the whole optimizer."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.strategy.account import Collective, require_matching_state, shapes_of, share
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.strategy import Strategy

if TYPE_CHECKING:
    from ddp_lab.strategy.communication.bf16 import Bf16
    from ddp_lab.strategy.communication.int8 import Int8

ITSELF = 2
"""References to the memory of a tensor that shares it with no other: its own, and the one by which they are counted."""


class ReplicatedStrategy(Strategy):
    """All ranks start with rank 0's parameters and buffers; every rank then makes the same optimizer step.

    Buffers (BatchNorm statistics) are each rank's own within a step. Before the next step they are rank 0's again, as
    in PyTorch DDP by default.
    """

    supports = Supports(compress=True)
    compression: "Bf16 | Int8 | None"

    def prepare(self) -> None:
        self.make_compression()
        self.broadcast()

    def broadcast(self) -> None:
        """Overwrite parameters and buffers with those of the first rank that holds them."""
        for group, tensors in self.by_group([*self.module.parameters(), *self.module.buffers()]):
            broadcast_from_rank0(tensors, group)

    def make_compression(self) -> None:
        """With `options.compress`, or in bf16, gradients are compressed and averaged."""
        self.compression = None
        if self.options.reduce_dtype == "bf16":
            from ddp_lab.strategy.communication.bf16 import Bf16

            self.compression = Bf16(self.process_group)
        elif self.options.compress:
            from ddp_lab.strategy.communication.int8 import Int8

            self.compression = Int8(self.process_group)
        self.always_averages |= self.compression is not None

    def all_reduce(self, gradient: Tensor, async_op: bool = False, group: dist.ProcessGroup | None = None) -> Any:
        """`torch.distributed.all_reduce` of a gradient in place, compressed if that is wanted (`make_compression`).

        Args:
            group: Who holds the parameter (`group_of`). Default: all ranks that share the work.

        Returns:
            A handle to wait for, if `async_op`.
        """
        if self.compression is None:
            op = dist.ReduceOp.AVG if self.steps.averages else dist.ReduceOp.SUM
            return dist.all_reduce(gradient, op, group or self.process_group, async_op)
        handle = self.compression.all_reduce(gradient)
        return handle if async_op else handle.wait()

    def before_micro_batch(self) -> None:
        if self.compression is not None:
            self.compression.begin_round()

    def before_step(self) -> None:
        broadcast_from_rank0(self.buffers(), self.process_group)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        if self.model_parallel is None:
            return nn.utils.clip_grad_norm_(self.trainable.values(), max_norm)
        return super().clip_grad_norm_(max_norm)

    def expected_clipping_traffic(self) -> list[Collective]:
        """Nothing where this rank holds all gradients."""
        return super().expected_clipping_traffic() if self.model_parallel else []

    def full_gradients(self) -> dict[str, Tensor]:
        gradients = ((name, p.grad) for name, p in self.trainable.items() if p.grad is not None)
        return self.of_whole_model({name: gradient.detach().cpu().clone() for name, gradient in gradients})

    def gradient_share(self) -> Iterator[Tensor]:
        for group, parameters in self.by_group(p for p in self.trainable.values() if p.grad is not None):
            lengths = [parameter.numel() for parameter in parameters]
            for index, start, end in share(lengths, dist.get_rank(group), dist.get_world_size(group)):
                gradient = parameters[index].grad
                if gradient is not None and self.speaks_for(parameters[index]):
                    yield gradient if end - start == lengths[index] else gradient.reshape(-1)[start:end]

    def full_state_dict(self) -> dict[str, Tensor]:
        state = self.module.state_dict() if self.groups.is_first_copy else {}
        return self.of_whole_model({n: tensor.detach().cpu().clone() for n, tensor in state.items()}, with_aliases=True)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        state = self.of_this_part(state)
        require_matching_state(shapes_of(self.module), state, self.process_group)
        if self.groups.is_first_copy:
            self.module.load_state_dict(state)
        self.broadcast()

    def buffer_traffic(self) -> list[Collective]:
        """The broadcasts of `before_step`."""
        return buffer_broadcasts(self.module, self.group_size)

    def gradient_all_reduces(
        self, gradients: Iterable[Tensor], calls: Sequence[Tensor] | None = None
    ) -> list[Collective]:
        """What a replicated step sends: all-reduces of all `gradients` together, and broadcasts of buffers.

        Args:
            calls: For each all-reduce, one of the parameters in it. Default: one for each of `gradients`.
        """
        gradients = list(gradients)
        calls = gradients if calls is None else calls
        if self.compression is not None:
            return super().expected_gradient_traffic(1)
        sent = []
        for group, grads in self.by_group(gradients) if calls else ():
            number = sum(self.group_of(parameter) is group for parameter in calls)
            sent.append(Collective("all_reduce", number, bytes_of(grads), dist.get_world_size(group), "gradients"))
        return [*sent, *self.buffer_traffic()]


def references(tensor: Tensor) -> int:
    """How many tensors share its storage, those that autograd has saved among them."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_own(gradient: Tensor | None) -> bool:
    """Whether a gradient fills its memory, one element after the other, and nothing else is there. Otherwise it must
    not be changed in place: where an operator hands on what it was given, gradients are views of one tensor."""
    if gradient is None or gradient.requires_grad or not gradient.is_contiguous():
        return False
    return gradient.untyped_storage().nbytes() == gradient.nbytes and references(gradient) <= ITSELF


def gradient_of(parameter: Tensor) -> Tensor:
    """Its gradient, to be reduced in its place: zeros where this rank has made none but another may have, and a copy
    where another gradient lies in the same memory."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif not is_own(parameter.grad):
        parameter.grad = parameter.grad.clone()
    return parameter.grad


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Tensors with elements, grouped by dtype, in their order."""
    groups = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            groups[tensor.dtype].append(tensor)
    return dict(groups)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of `tensors`, padding and sharing left aside."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def buffer_broadcasts(module: nn.Module, group_size: int) -> list[Collective]:
    """What `broadcast_from_rank0` sends of a module's buffers."""
    sizes = [bytes_of(tensors) for tensors in by_dtype(module.buffers()).values()]
    return [Collective("broadcast", len(sizes), sum(sizes), group_size, "buffers")] if sizes else []


@torch.no_grad()
def broadcast_from_rank0(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` with rank 0's, in one broadcast a dtype."""
    for same_dtype in by_dtype(tensors).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same_dtype])
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, received in zip(same_dtype, flat.split([t.numel() for t in same_dtype]), strict=True):
            tensor.copy_(received.view_as(tensor))
