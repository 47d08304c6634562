"""PyTorch's own sharding: `torch.distributed.fsdp.fully_shard` (FSDP2), with one unit per block and one for the rest.

At rest each rank holds 1/N of every parameter, gradient and optimizer state, sharded along dimension 0. The parameters
of a unit are all-gathered before it runs. Its gradients are reduce-scattered after its backward pass, at every
micro-batch; to delay that, a rank would have to hold whole gradients. `pytorch_zero3` reshards a block after forward
and gathers it again for backward: 3(N-1)/N * P elements on the wire per micro-batch. `pytorch_zero2` keeps the block
until its backward pass is done, which saves a third of that. Despite its name it is no ZeRO-2 at rest: it then holds as
little as `pytorch_zero3`.

With replicas (`sharding.options.replicas`) the mesh has two dimensions: FSDP2 shards over `shard`, and all-reduces the
shards of gradients over `replicate` after the last micro-batch.

With `--offload parameters` (`CPUOffloadPolicy`) shards, their gradients and the optimizer's states are in host memory,
and the CPU updates them. A shard is copied to the device when its unit is gathered, and a reduced gradient from it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import REPLICATE, SHARD
from ddp_lab.strategy.account import ModelSize, Piece, require_matching_state, shapes_of, storage_bytes
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.gradient_watch import refuse_graph_of_backward, second_gradient
from ddp_lab.strategy.modules import TensorsBeside, find_blocks
from ddp_lab.strategy.optimizers import MakeOptimizer, copy_attributes, require_elementwise
from ddp_lab.strategy.replicated import broadcast_from_rank0
from ddp_lab.strategy.strategy import Strategy
from reference.dtensors import first_element, local, require_reducible, whole
from sharding.options.placement import Placement


class FSDP2(Strategy):
    """What `pytorch_zero2` and `pytorch_zero3` share."""

    always_averages = True
    reduces_given_gradients = False
    shards = frozenset({"optimizer_state", "gradients", "parameters"})
    reduces_every_micro_batch = True
    supports = Supports(offload=frozenset({"parameters"}), param_dtype=True, replicas=True)
    frees_blocks_after_forward: ClassVar[bool]

    def replace_parameters(self) -> None:
        """Broadcast rank 0's parameters, then replace them by shards (`DTensor`)."""
        require_reducible(dict(self.module.named_parameters()))
        broadcast_from_rank0([*map(local, self.module.parameters()), *self.module.buffers()], self.process_group)
        placement = Placement.of(self.options)
        settings: dict[str, Any] = {
            "mesh": self.mesh(),
            "mp_policy": MixedPrecisionPolicy(placement.param_dtype, placement.reduce_dtype),
        }
        if self.options.offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        self.root, before = TensorsBeside(self.module), dict(self.module.named_parameters())
        try:
            self.shard_within_blocks(settings)
            for block in find_blocks(self.module):
                fully_shard(block, reshard_after_forward=self.frees_blocks_after_forward, **settings)
            self.fsdp = fully_shard(self.root, reshard_after_forward=False, **settings)  # backward begins with it
            self.fsdp.set_reduce_scatter_unused_params(True)  # ranks may use different ones, but must send the same
            self.units = {unit: self._leaves_of(unit) for unit in self.root.modules() if isinstance(unit, FSDPModule)}
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise UnsupportedError(f"FSDP2 cannot shard this module: {error}") from error
        for name, parameter in self.module.named_parameters():
            copy_attributes(before[name], parameter)
        self._has_run, self._sums_replicas = False, True

    def shard_within_blocks(self, settings: dict[str, Any]) -> None:
        """Shard parts of blocks that need other `settings` of `fully_shard`."""

    def mesh(self) -> DeviceMesh:
        """Over which parameters are sharded. With replicas it has two dimensions, and FSDP2 shards over the second."""
        kind = self.device.type
        if self.groups.replicate is None:
            return DeviceMesh.from_group(self.groups.shard, kind)
        ranks = torch.tensor(dist.get_process_group_ranks(self.process_group), device="cpu")
        numbers = ranks.view(self.groups.replicas, -1)
        groups = [self.groups.replicate, self.groups.shard]
        return DeviceMesh.from_group(groups, kind, numbers, mesh_dim_names=(REPLICATE, SHARD))

    def _leaves_of(self, unit: FSDPModule) -> dict[str, Tensor]:
        """The unsharded parameters of a unit, by name. FSDP2 keeps the tensors, and frees and refills their storage."""
        sharded = dict(self.module.named_parameters())
        unit.unshard()
        leaves: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if p is not sharded[n]}
        unit.reshard()
        return leaves

    def leaves(self) -> Iterable[Tensor]:
        leaves = {name: leaf for of_unit in self.units.values() for name, leaf in of_unit.items()}
        self.whole_parameters = {name: leaves[name] for name in self.trainable}
        return self.whole_parameters.values()

    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        return require_elementwise(super().build_optimizer(make_optimizer), self.options.elementwise)

    def before_step(self) -> None:
        require_reducible(self.trainable)
        broadcast_from_rank0(self.buffers(), self.process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._has_run = True
        tensors, answer = self.root(*args, **kwargs)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: refuse_graph_of_backward())
        output_ids = {id(tensor) for tensor in tensors}
        for name, leaf in self.whole_parameters.items():
            if id(leaf) in output_ids:  # its backward would crash the process
                raise UnsupportedError(f"forward returns parameter {name} itself, which FSDP2 cannot; add 0 to it")
        if not torch.is_grad_enabled():
            for unit in self.units:
                unit.reshard()  # otherwise backward does it
        return answer

    def before_micro_batch(self) -> None:
        """Gradients are reduced into shards at every micro-batch. Only replicas wait for the last one."""
        if self.groups.replicate and self._sums_replicas == self.steps.another_follows:
            self._sums_replicas = not self._sums_replicas
            self.fsdp.set_requires_all_reduce(self._sums_replicas)

    def after_backward(self) -> None:
        """Refuse what FSDP2 would lose: a gradient that came after those of its unit were reduced."""
        late = [name for name, leaf in self.whole_parameters.items() if leaf.grad is not None]
        for name in late:
            self.whole_parameters[name].grad = None
        if late:
            raise second_gradient(late[0])

    def abandon_step(self) -> None:
        if self._has_run:  # before, there is nothing to reset
            self.fsdp.reset_iter_state()
        super().abandon_step()

    # Shards and whole tensors --------------------------------------------------------------------------------------

    def gradient_share(self) -> Iterable[Tensor]:
        if self.groups.replica != 0:  # the first replica speaks for all
            return ()
        return [local(p.grad) for p in self.trainable.values() if p.grad is not None and self.speaks_for(p)]

    def gradient_tensors(self) -> Iterable[Tensor]:
        return [local(p.grad) for p in self.trainable.values() if p.grad is not None]

    def parameter_tensors(self) -> Iterable[Tensor]:
        return [*self._shards(), *self._whole_leaves()]

    def _shards(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.module.parameters()]

    def _whole_leaves(self) -> list[Tensor]:
        return [local(leaf) for of_unit in self.units.values() for leaf in of_unit.values()]

    def communication_tensors(self) -> Iterable[Tensor]:
        return self._whole_leaves()

    def optimizer_tensors(self) -> Iterable[Tensor]:
        return map(local, super().optimizer_tensors())

    def memory_breakdown(self) -> dict[str, int]:
        on_device = {"parameters": storage_bytes(self._whole_leaves()), "gradients": 0, "optimizer_state": 0}
        return super().memory_breakdown() | (on_device if self.options.offload else {})

    def expected_memory(self, size: ModelSize) -> dict[str, int]:
        expected = super().expected_memory(size)
        return dict.fromkeys(expected, 0) if self.options.offload else expected

    def host_tensors(self) -> Iterable[Tensor]:
        if not self.options.offload:
            return ()
        return [*self._shards(), *self.gradient_tensors(), *self.optimizer_tensors()]

    def expected_host_bytes(self, size: ModelSize) -> int:
        return Placement.of(self.options).expected_host_bytes(size, self.groups.shard_size)

    def parameter_pieces(self) -> list[Piece]:
        return [Piece(name, first_element(p), p) for name, p in self.module.named_parameters()]

    def updated_pieces(self) -> list[Piece]:
        return [Piece(name, first_element(p), p) for name, p in self.trainable.items()]

    def on_this_rank(self, tensor: Tensor) -> Tensor:
        return local(tensor).detach()

    def full_gradients(self) -> dict[str, Tensor]:
        return self.of_whole_model({n: whole(p.grad) for n, p in self.trainable.items() if p.grad is not None})

    def full_state_dict(self) -> dict[str, Tensor]:
        wholes = ((name, whole(tensor)) for name, tensor in self.module.state_dict().items())  # one at a time
        return self.of_whole_model({name: tensor for name, tensor in wholes if self.group_rank == 0})

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.load_whole(self.of_this_part(state), self.process_group)

    @torch.no_grad()
    def load_whole(self, state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Load whole tensors from rank 0 of `group`, which all its ranks call."""
        require_matching_state(shapes_of(self.module), state, group)
        for name, tensor in self.module.state_dict().items():
            received = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if dist.get_rank(group) == 0:
                received.copy_(state[name])
            broadcast_from_rank0([received], group)
            if isinstance(tensor, DTensor):
                received = distribute_tensor(received, tensor.device_mesh, tensor.placements, src_data_rank=None)
            local(tensor).copy_(local(received))


class PyTorchZero2(FSDP2):
    """`reshard_after_forward=False`: blocks stay unsharded between forward and backward."""

    frees_blocks_after_forward = False


class PyTorchZero3(FSDP2):
    """`reshard_after_forward=True`: blocks are resharded after forward and gathered again for backward."""

    frees_blocks_after_forward = True
