"""The experts of one rank: each a gated MLP, `down(act(gate(x)) * up(x))`, and a product for all of them at once.

Rows are sorted by expert. On a GPU that can, one kernel multiplies each block of rows with the weight of its expert
(`torch.nn.functional.grouped_mm`). On a CPU a loop does. An expert without rows gets a gradient of zeros, not none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tensor_parallel.operators import Add, Copy
from tensor_parallel.region import as_factor

GROUPED_FROM = (8, 0)
"""The first compute capability that has the kernel."""


class Experts(nn.Module):
    """
    Args:
        gate_up: (experts of this rank, 2 x inner, features): first the gates.
        down: (experts of this rank, features, inner).
        activation: Of the gates.
        ranks: Over how many ranks experts are cut.
        through: Calls `compute` on rows of all ranks, with what forward was given (`parallelize`).
        tensor: The ranks over which each expert is cut, too: each has some of `inner`. Default: none is.
    """

    def __init__(
        self,
        gate_up: nn.Parameter,
        down: nn.Parameter,
        activation: Callable[[Tensor], Tensor],
        ranks: int,
        through: Callable[..., Tensor],
        tensor: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self._activation, self._ranks, self._through, self._tensor = activation, ranks, through, tensor

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Collective. `hidden`: (tokens, features); `chosen`, `weights`: (tokens, k), the experts of each token.

        Over `tensor` all ranks have the same tokens, and of each output one term. So f stands in front of both factors,
        and g after it (`tensor_parallel.operators`).
        """
        experts = self._ranks * len(self.gate_up_proj)
        if self._tensor is None:
            return self._through(hidden, chosen, weights, self.compute, experts)
        hidden, weights = Copy.apply(as_factor(hidden), self._tensor), Copy.apply(weights, self._tensor)
        return Add.apply(self._through(hidden, chosen, weights, self.compute, experts), self._tensor)

    def compute(self, rows: Tensor, lengths: Sequence[int], counts: Tensor) -> Tensor:
        """(rows, features), the first `lengths[0]` of them for this rank's first expert, and so on. `counts`: these on
        the device."""
        gate_up, down = (SharedWeight.apply(weight, self._ranks) for weight in (self.gate_up_proj, self.down_proj))
        gate, up = products(rows, gate_up, lengths, counts).chunk(2, -1)
        return products(self._activation(gate) * up, down, lengths, counts)


class SharedWeight(torch.autograd.Function):
    """A weight that tokens of so many ranks reach: the gradient has come from all of them, each with its loss as if
    gradients were then averaged over all ranks. They are averaged over fewer, so the sum is divided here."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def products(rows: Tensor, weights: Tensor, lengths: Sequence[int], counts: Tensor) -> Tensor:
    """Rows of each expert times its weight. Shapes: (rows, inputs), (experts, outputs, inputs) to (rows, outputs)."""
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.dtype
    takes = not any(extent * dtype.itemsize % 16 for extent in weights.shape[1:])  # rows of a multiple of 16 bytes
    if takes and has_kernel(rows.device):
        return grouped(rows.to(dtype), weights.to(dtype), counts)
    pairs = zip(rows.split(list(lengths)), weights.unbind(), strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in pairs])


def has_kernel(device: torch.device) -> bool:
    """Whether one kernel multiplies the rows of all experts."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= GROUPED_FROM


def grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The same by one kernel. `counts`: rows of each expert, (experts,), on the device."""
    return functional.grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))
