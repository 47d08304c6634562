"""What a strategy holds and sends: bytes, and what formulas say of them; pieces of parameters, norms over parts, whole
states."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

EVERYONE = "mesh"
"""In the place of a dimension: all ranks of the mesh."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and purpose that one rank issues in one optimizer step.

    Attributes:
        kind: `all_reduce`, `broadcast`, `reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`,
            or `send_recv` for messages.
        count: Number of calls.
        payload_bytes: Bytes of all `count` calls together. As in nccl-tests, the size of a call is the tensor for
            all-reduce, broadcast and reduce, the whole (gathered or scattered) tensor for the others, and of messages
            those sent and those received.
        group_size: Ranks in the process group.
        purpose: `gradients`, `parameters`, `activations`, `buffers` or `bookkeeping`.
        dimension: Of the mesh, over whose ranks they are: empty for those that see different samples, or `EVERYONE`.
        rank: Who issues them, where stages differ. Default: every rank.
        made_of: The kind of the calls, one from each rank, of which each is made. Empty: it is a call by itself.
        varies: What a rank sends depends on its samples, and `payload_bytes` is the mean over ranks.
        at_least: No formula of what is sent, but a lower bound of its bytes.
    """

    kind: str
    count: int
    payload_bytes: int
    group_size: int
    purpose: str
    dimension: str = ""
    rank: int | None = None
    made_of: str = ""
    varies: bool = False
    at_least: bool = False

    @property
    def issued(self) -> "Collective":
        """The calls that a process group sees: each scatter with a tensor as large as the whole, each broadcast with
        one rank's part of it."""
        if not self.made_of:
            return self
        size = self.group_size
        payload = self.payload_bytes * (size if self.made_of == "scatter" else 1)
        return replace(self, kind=self.made_of, count=size * self.count, payload_bytes=payload, made_of="")

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends on average: the least that each kind needs (nccl-tests, PERFORMANCE.md). Of messages,
        what it receives is as much."""
        from ddp_lab.collectives.kinds import sent_share  # a strategy alone loads few modules

        return self.payload_bytes * sent_share(self.kind, self.group_size)

    def as_dict(self) -> dict[str, Any]:
        made_of = parts_of(self.made_of, self.group_size) if self.made_of else ""
        return {**asdict(self), "made_of": made_of, "wire_bytes": self.wire_bytes}


def parts_of(kind: str, ranks: int) -> str:
    """`2 scatters`: what a collective is made of, as traces, records and pages say it."""
    return f"{ranks} {kind}{'s' * (ranks > 1)}"


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, or of this rank's part of it, before a strategy changes it. Tied parameters count once.

    Attributes:
        elements: Elements of all parameters.
        trainable_elements: Elements of the trainable ones.
        parameter_bytes: Bytes of all parameters.
        trainable_bytes: Bytes of the trainable ones.
    """

    elements: int
    trainable_elements: int
    parameter_bytes: int
    trainable_bytes: int

    @classmethod
    def of(cls, module: nn.Module) -> "ModelSize":
        return cls.of_parameters(module.parameters())

    @classmethod
    def of_parameters(cls, module_parameters: Iterable[nn.Parameter]) -> "ModelSize":
        parameters = [p.to_local() if hasattr(p, "to_local") else p for p in module_parameters]
        return cls(
            elements=sum(p.numel() for p in parameters),
            trainable_elements=sum(p.numel() for p in parameters if p.requires_grad),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            trainable_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        )


def expected_state_bytes(
    size: ModelSize, world_size: int, shards: Collection[str], optimizer_values: int = 2
) -> dict[str, int]:
    """Bytes that parameters, gradients and optimizer states should take on a rank at rest, by component.

    With fp32 parameters (autocast keeps them) and Adam, in bytes per parameter: 16 replicated; 8 + 8/N with optimizer
    states sharded (ZeRO-1); 4 + 12/N with gradients sharded too (ZeRO-2); 16/N with parameters sharded too (ZeRO-3).
    This leaves out padding, and the step counter that Adam keeps for each tensor.

    Args:
        shards: Those components of which a rank holds only 1/N, rounded up.
        optimizer_values: Values that the optimizer keeps for each trainable element; Adam keeps two moments.
    """
    unsharded = {
        "parameters": size.parameter_bytes,
        "gradients": size.trainable_bytes,
        "optimizer_state": optimizer_values * size.trainable_bytes,
    }
    return {name: -(-nbytes // world_size) if name in shards else nbytes for name, nbytes in unsharded.items()}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`. Each counts once, even if several tensors are views into it."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


# Pieces of parameters: ranges of elements in row-major order, whichever way ranks cut a parameter --------------------


class Piece(NamedTuple):
    """Consecutive elements of a parameter that a rank holds.

    Attributes:
        name: The parameter's name in the plain module.
        start: Number of the first element.
        tensor: Holds the elements, in any shape. If this rank updates them, it is the tensor that its optimizer has.
    """

    name: str
    start: int
    tensor: Tensor


class RangePart(NamedTuple):
    """Elements `start` to `end` of the tensor or range with this `number`."""

    number: int
    start: int
    end: int


def share(lengths: Iterable[int], rank: int, size: int) -> list[RangePart]:
    """The elements that `rank` gets if `size` ranks evenly divide tensors of these lengths, laid end to end.

    Each element goes to exactly one rank. A rank gets at most one element more than another.
    """
    lengths = list(lengths)
    total = sum(lengths)
    start, end = total * rank // size, total * (rank + 1) // size
    parts = []
    for index, length in enumerate(lengths):
        if max(start, 0) < min(end, length):
            parts.append(RangePart(index, max(start, 0), min(end, length)))
        start, end = start - length, end - length
    return parts


def cover(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[RangePart]:
    """Assemble elements `start` to `end` from `ranges`, which are (first, end) in any order.

    Returns:
        Parts in order, without gap or overlap. `which` is the number of a range, from whose start the others count.
    """
    parts, position = [], start
    for index, (first, last) in sorted(enumerate(ranges), key=lambda item: item[1]):
        if position >= end or first > position:
            break
        if last > position:
            parts.append(RangePart(index, position - first, min(last, end) - first))
            position = min(last, end)
    if position < end:
        raise ValueError(f"element {position} of {end} is in no range")
    return parts


# Norms over tensors whose parts are on different ranks. None waits for the device. ---------------------------------


def norm_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all elements, an fp64 scalar on `device`, by one fused kernel.

    It is finite if and only if all elements are. A norm that its dtype cannot hold counts as infinite. The tensors may
    be on the host.
    """
    detached = [tensor.detach() for tensor in tensors]
    if not detached:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(detached)), dtype=torch.float64).to(device)


def clip_parts(
    parts: Sequence[Tensor], max_norm: float, group: dist.ProcessGroup, device: torch.device, counted: Iterable[Tensor]
) -> Tensor:
    """Scale `parts` in place so that the norm over all ranks' parts is at most `max_norm`.

    Args:
        counted: Those, or parts of them, whose elements no other rank counts.

    Returns:
        The norm before that, the same on every rank. Squares are added in fp64, which holds those of any fp32 norm.
    """
    square = norm_of(counted, device).square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {part.dtype for part in parts}:
        precise = factor.to(parts[0].device, torch.promote_types(dtype, torch.float32))  # offloaded ones: on the host
        torch._foreach_mul_([part for part in parts if part.dtype == dtype], precise)
    return norm.float()


# Whole states ---------------------------------------------------------------------------------------------------------


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}


def require_matching_state(
    shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], group: dist.ProcessGroup
) -> None:
    """Refuse a state of rank 0 that does not fit a module. Other ranks' states are not read. `shapes`: `shapes_of` it.

    Raises:
        ValueError: on every rank, names the entries that are missing, unknown or of another shape.
    """
    problem = [_state_problem(shapes, state) if dist.get_rank(group) == 0 else ""]
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0]:
        raise ValueError(f"load_full_state_dict: {problem[0]}")


def _state_problem(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> str:
    state_shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    problems = [f"missing {name}" for name in shapes if name not in state_shapes]
    problems += [f"unknown {name}" for name in state_shapes if name not in shapes]
    problems += [
        f"{name} has shape {state_shapes[name]} instead of {shape}"
        for name, shape in shapes.items()
        if state_shapes.get(name, shape) != shape
    ]
    return "; ".join(problems)
