"""What a strategy holds and sends: real bytes, and what its formulas say of them. Tests and reports compare the two."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import asdict, astuple, dataclass, replace

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
        others = (self.group_size - 1) / self.group_size
        return self.payload_bytes * {"all_reduce": 2 * others, "send_recv": 1 / 2}.get(self.kind, others)

    def as_dict(self) -> dict[str, str | int | float | None]:
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
    def of_parameters(cls, held: Iterable[nn.Parameter]) -> "ModelSize":
        parameters = [p.to_local() if hasattr(p, "to_local") else p for p in held]
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
    whole = {
        "parameters": size.parameter_bytes,
        "gradients": size.trainable_bytes,
        "optimizer_state": optimizer_values * size.trainable_bytes,
    }
    return {name: -(-held // world_size) if name in shards else held for name, held in whole.items()}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`. Each counts once, even if several tensors are views into it."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


class Accounts(ABC):
    """The accounts of a strategy, and between which ranks its model states lie."""

    shards: frozenset[str] = frozenset()
    """Those of `parameters`, `gradients` and `optimizer_state` of which a rank holds only its shard at rest."""

    context_size = 1
    """Over how many ranks of `process_group`, neighbours there, the tokens of each sample are cut."""

    module: nn.Module
    of_experts: set[nn.Parameter]  # that `copies` alone hold
    trainable: dict[str, nn.Parameter]  # by name; frozen ones are not among them
    optimizer: torch.optim.Optimizer
    process_group: dist.ProcessGroup  # ranks that see different samples, or different parts of them
    copies: dist.ProcessGroup  # those of them that hold the same experts; else all
    everyone: dist.ProcessGroup  # who trains this model: these, and ranks that hold other parts of it
    shard_group: dist.ProcessGroup  # whose ranks hold a shard each
    replicate_group: dist.ProcessGroup | None  # whose ranks hold the same shard
    modules: list[nn.Module]  # of the whole tree

    @property
    def group_rank(self) -> int:
        """This rank's place among those that share the work: they see different samples, or parts of them."""
        return dist.get_rank(self.process_group)

    @property
    def group_size(self) -> int:
        """How many ranks share the work."""
        return dist.get_world_size(self.process_group)

    @property
    def copy_rank(self) -> int:
        """This rank's place among those of them that hold the same part of the model."""
        return dist.get_rank(self.copies)

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among those that see different samples."""
        return self.group_rank // self.context_size

    @property
    def data_parallel_size(self) -> int:
        """How many ranks see different samples."""
        return self.group_size // self.context_size

    @property
    def shard_size(self) -> int:
        """Over how many ranks model states are sharded, if they are."""
        return dist.get_world_size(self.shard_group)

    @property
    def replica(self) -> int:
        """This rank's place among those that hold the same shard."""
        return dist.get_rank(self.replicate_group) if self.replicate_group else 0

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return dist.get_world_size(self.replicate_group) if self.replicate_group else 1

    # Memory --------------------------------------------------------------------------------------------------------

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes of tensor storage that this rank holds now, by component."""
        return {
            "parameters": storage_bytes(self.parameter_tensors()),
            "gradients": storage_bytes(self.gradient_tensors()),
            "optimizer_state": storage_bytes(self.optimizer_tensors()),
            "buffers": storage_bytes(self.module.buffers()),
        }

    def expected_memory(self, size: ModelSize) -> dict[str, int]:
        """Bytes by component that this rank should hold after a step, padding and step counters left out."""
        experts = ModelSize.of_parameters(self.of_experts)
        others = ModelSize(*(whole - part for whole, part in zip(astuple(size), astuple(experts), strict=True)))
        copies = dist.get_world_size(self.copies)
        of_experts = expected_state_bytes(experts, copies, self.shards)
        return {n: of_experts[n] + b for n, b in expected_state_bytes(others, self.shard_size, self.shards).items()}

    def parameter_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds parameters at this moment."""
        return self.module.parameters()

    def buffers(self) -> list[Tensor]:
        """Those of all modules, each once. `module.buffers()` would walk the whole tree of modules in every step."""
        found = (buffer for module in self.modules for buffer in module._buffers.values() if buffer is not None)
        return list(dict.fromkeys(found))

    def gradient_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds gradients at this moment, whole or reduced, this rank's own or of all."""
        return (p.grad for p in self.trainable.values() if p.grad is not None)

    def optimizer_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds optimizer states at this moment."""
        values = (value for entry in self.updating_optimizer.state.values() for value in entry.values())
        return (value for value in values if isinstance(value, Tensor))

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose states this rank holds."""
        return self.optimizer

    def host_tensors(self) -> Iterable[Tensor]:
        """Model states that this rank holds in host memory, or in files, and not on its device."""
        return ()

    def host_bytes(self) -> int:
        """Bytes of `host_tensors`."""
        return storage_bytes(self.host_tensors())

    def expected_host_bytes(self, size: ModelSize) -> int:
        """What `host_bytes` should be after a step, padding left out."""
        return 0

    # Traffic -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        """What one optimizer step of `micro_batches` micro-batches sends for gradients, parameters and buffers."""

    def expected_clipping_traffic(self) -> list[Collective]:
        """What `clip_grad_norm_` sends."""
        return [Collective("all_reduce", 1, 8, dist.get_world_size(self.everyone), "bookkeeping", EVERYONE)]
