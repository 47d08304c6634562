"""PyTorch's own tensor parallelism: `torch.distributed.tensor.parallel.parallelize_module`, with the same plan.

`ColwiseParallel` and `RowwiseParallel` turn weights into `DTensor`s, whose operators find out which collectives they
need. `PrepareModuleInput` stands where f does, so that queries, keys and values share one all-reduce in backward.
`loss_parallel` keeps logits cut. `pytorch_tp` is this alone, and `pytorch_fsdp_tp` has FSDP2 around it, over `dp`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import CONTEXT, DATA, PIPELINE, SHARD, TENSOR, MeshGroups
from ddp_lab.strategy.building import require_own_memory
from ddp_lab.strategy.capabilities import MeshRefusal
from ddp_lab.strategy.model_parallel import Cut, ModelParallel
from ddp_lab.strategy.optimizers import MakeOptimizer
from ddp_lab.strategy.replicated import ReplicatedStrategy
from ddp_lab.strategy.strategy import Strategy
from reference.dtensors import local
from reference.fsdp2_over_mesh import FSDP2OverMesh, by_mesh
from tensor_parallel.plan import Column, Embedding, Head, Region, Row, Shared, Split, Style, matched, plan_of

NO_DATA_DIMENSION: MeshRefusal = (
    lambda mesh: mesh is not None and mesh.data_size > 1,
    "pytorch_tp has no data-parallel dimension; take pytorch_fsdp_tp, or tp",
)
NO_SHARD_DIMENSION: MeshRefusal = (
    lambda mesh: mesh is not None and SHARD in mesh.degrees,
    "--mesh with shard: pytorch_fsdp_tp shards over dp; write dp, or take zero3",
)
NO_STAGES: MeshRefusal = (
    lambda mesh: mesh is not None and {PIPELINE, CONTEXT} & mesh.degrees.keys(),
    "--mesh with pp or cp: PyTorch's tensor parallelism cuts neither stages nor tokens; take tp, or zero1 to zero3",
)
NOTHING_TO_CUT: MeshRefusal = (
    lambda mesh: mesh is None or mesh.model_size == 1,
    "--mesh without tp: parallelize_module has nothing to cut; take zero3, or tp above 1",
)


def parallelize_by_torch(
    module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device
) -> ModelParallel:
    """Replace parameters by `DTensor`s, cut as the hand-written plan says."""
    if config.plan:
        raise UnsupportedError("--plan: PyTorch's own takes the built-in plans alone; take tp or zero1 to zero3")
    require_own_memory(module)
    mesh = groups.device_mesh[TENSOR]
    cuts_tokens = config.sequence_parallel
    # torch's style of each layer
    plan: dict[str, ParallelStyle] = {}
    styles = matched(module, plan_of(module, mesh.size()))
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if type(layer).__name__ == "Conv1D":
            raise UnsupportedError(f"{name} is a Conv1D, for which torch has no parallel style; take tp, or a Llama")
        if isinstance(style, Region):
            for attribute, value in style.attributes.items():
                setattr(layer, attribute, value)
        if isinstance(style, Column) and style.heads and style.heads % mesh.size():
            raise UnsupportedError(f"{name}: DTensor shares no head between ranks; take tp, or fewer ranks of tp")
        if isinstance(style, Column | Row):
            features = cast(Tensor, layer.weight).shape[0 if isinstance(style, Column) else 1]
            if features % mesh.size():  # its local results would be taken for equally many
                raise UnsupportedError(
                    f"{name}: DTensor cuts {features} features over {mesh.size()} ranks unevenly; take tp"
                )
        if (by_torch := style_of(style, name, cuts_tokens)) is not None:
            plan[name] = by_torch
    if cuts_tokens:
        require_even = partial(require_even_sequences, mesh.size())
        module.register_forward_pre_hook(require_even, prepend=True, with_kwargs=True)
    # DTensors in the place of parameters
    tied = tied_parameters(module)
    parallelize_module(module, mesh, plan)
    for first, tied_names in tied.items():
        for tied_name in tied_names:  # torch has made each a parameter of its own
            holder, _, child = tied_name.rpartition(".")
            setattr(module.get_submodule(holder), child, module.get_parameter(first))
    named = module.named_parameters(remove_duplicate=False)
    cuts = {name: cut for name, p in named if (cut := cut_of(p)) is not None}
    return ModelParallel(groups.model, groups.everyone, cuts, groups.tensor, device_mesh=groups.device_mesh)


def require_even_sequences(size: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Check that sequences can be cut over so many ranks: torch's ranks would expect parts of one size."""
    tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    if tokens.shape[1] % size:
        raise UnsupportedError(
            f"--sequence-parallel: PyTorch's own cannot cut sequences of {tokens.shape[1]} tokens over {size} "
            "ranks; take tp or zero1 to zero3, or another --sequence-length"
        )


def tied_parameters(module: nn.Module) -> dict[str, list[str]]:
    """The other names of each parameter that has several."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    other_names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name != first[parameter]:
            other_names.setdefault(first[parameter], []).append(name)
    return other_names


def style_of(style: Style, name: str, cuts_tokens: bool) -> ParallelStyle | None:
    """Torch's style in the place of ours."""
    between = Shard(1) if cuts_tokens else Replicate()  # hidden states between regions
    match style:
        case Column():
            return ColwiseParallel()
        case Row():
            return RowwiseParallel(output_layouts=between)
        case Region() if name.endswith("attn"):
            return PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        case Region():
            return PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        case Embedding():
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        case Head():
            return ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        case Shared() if cuts_tokens:
            return SequenceParallel(use_local_output=True)
        case Split() if cuts_tokens:
            return PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            )
    return None


def cut_of(parameter: nn.Parameter) -> Cut | None:
    """How DTensor cuts a parameter: as `torch.chunk`."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.placements[0], Shard):
        return None
    dim, size = parameter.placements[0].dim, parameter.device_mesh.size()
    length = parameter.shape[dim]
    chunk = -(-length // size)
    ranges = tuple(((min(chunk * rank, length), min(chunk * (rank + 1), length)),) for rank in range(size))
    return Cut(dim, length, ranges)


class LossParallel(Strategy):
    """Forward and backward within `loss_parallel`."""

    _in_backward = ExitStack()  # what ends with backward; closed, it does nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(loss_parallel())
            output = super().forward(*args, **kwargs)
            if torch.is_grad_enabled():
                self._end_backward()
                self._in_backward = stack.pop_all()
        if isinstance(getattr(output, "loss", None), DTensor):
            output.loss = output.loss.to_local()
        return output

    def _end_backward(self) -> None:
        self._in_backward.close()

    def after_backward(self) -> None:
        super().after_backward()
        self._end_backward()

    def abandon_step(self) -> None:
        self._end_backward()
        super().abandon_step()


class PyTorchTP(LossParallel, ReplicatedStrategy):
    """Tensor parallelism alone: no two ranks see different samples."""

    supports = replace(ReplicatedStrategy.supports, mesh_refusals=(NO_STAGES, NOTHING_TO_CUT, NO_DATA_DIMENSION))

    def prepare(self) -> None:
        if self.group_size > 1:
            raise UnsupportedError(NO_DATA_DIMENSION[1])
        self.make_compression()

    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        return by_mesh(make_optimizer, self.trainable.values())

    def finish_gradient_synchronization(self) -> None:
        """Some gradients come whole, though their parameters are cut: of the head, over an uneven vocabulary."""
        for parameter in self.trainable.values():
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    def gradient_share(self) -> Iterator[Tensor]:
        return (local(p.grad) for p in self.trainable.values() if p.grad is not None and self.speaks_for(p))

    def full_gradients(self) -> dict[str, Tensor]:
        gradients = ((name, p.grad) for name, p in self.trainable.items() if p.grad is not None)
        return self.of_whole_model({name: local(gradient).detach().cpu().clone() for name, gradient in gradients})

    def full_state_dict(self) -> dict[str, Tensor]:
        state = self.module.state_dict()
        return self.of_whole_model({name: local(tensor).detach().cpu().clone() for name, tensor in state.items()})

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        state = self.of_this_part(state)
        for name, tensor in self.module.state_dict().items():
            local(tensor).copy_(state[name])

    def parameter_tensors(self) -> Iterable[Tensor]:
        return map(local, super().parameter_tensors())

    def gradient_tensors(self) -> Iterable[Tensor]:
        return map(local, super().gradient_tensors())

    def optimizer_tensors(self) -> Iterable[Tensor]:
        return map(local, super().optimizer_tensors())


class PyTorchFSDPTP(LossParallel, FSDP2OverMesh):
    """FSDP2 over `dp`, around tensor parallelism over `tp`."""

    supports = replace(FSDP2OverMesh.supports, mesh_refusals=(NO_STAGES, NOTHING_TO_CUT, NO_SHARD_DIMENSION))

    def mesh(self) -> DeviceMesh:
        return self.device_mesh[DATA]
