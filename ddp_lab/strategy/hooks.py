"""What a strategy defines, and when it runs. `ddp_lab.strategy.loop` is who calls most of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.strategy.account import EVERYONE, Collective, ModelSize, Piece, clip_parts, norm_of

if TYPE_CHECKING:
    from ddp_lab.strategy.batches import MicroBatch, Progress
    from ddp_lab.strategy.communication.loss_scale import LossScaler
    from ddp_lab.strategy.compilation import CompiledBlocks
    from ddp_lab.strategy.gradient_watch import GradientWatch
    from ddp_lab.strategy.groups import Groups
    from ddp_lab.strategy.model_parallel import ModelParallel
    from ddp_lab.strategy.optimizers import MakeOptimizer
    from ddp_lab.strategy.options import StrategyOptions

T = TypeVar("T", bound=Tensor)


class Hooks(ABC):
    """What is different from strategy to strategy."""

    # What a strategy declares
    shards: frozenset[str] = frozenset()
    """Those of `parameters`, `gradients` and `optimizer_state` of which a rank holds only its shard at rest."""
    always_averages = False
    """Whether reductions average gradients in `forward_backward` too, as PyTorch DDP's do. Default: there they sum, and
    losses are weighted before."""
    reduces_in_backward = False
    """Declares that hooks of the strategy reduce gradients while backward goes on. A parameter must then get only one
    in a micro-batch. It decides no timing."""
    reduces_every_micro_batch = False
    """Whether gradients are reduced at every micro-batch. Default: at the last one of a step."""
    reduces_given_gradients = True
    """Whether gradients are reduced that the loop itself sets, without a backward pass."""
    nonfinite_advice = ""
    """What more an error says about a loss or a gradient that is not finite."""
    deciding_steps = 0
    """How many of the first optimizer steps decide how the strategy computes later ones."""

    # What every strategy has: when `replace_parameters` runs, all but `trainable`, `watch` and `optimizer`
    module: nn.Module
    modules: list[nn.Module]  # of the whole tree
    options: "StrategyOptions"
    device: torch.device
    steps: "Progress"
    watch: "GradientWatch"
    scaler: "LossScaler | None"  # of fp16
    compiled: "CompiledBlocks | None"
    optimizer: torch.optim.Optimizer
    optimizer_steps: int  # calls of `step`, those among them in which fp16 overflowed and nothing was changed
    wants_to_stop: Callable[[], bool]  # whether this rank has been asked to stop; set it to your own function
    notes: list[str]  # decisions of the strategy that the user of a run should know
    trainable: dict[str, nn.Parameter]  # by name
    trainable_elements: int
    frozen: dict[str, nn.Parameter]  # by name
    parameter_dtypes: dict[str, torch.dtype]  # in which they are saved, by name: not `options.param_dtype`
    model_parallel: "ModelParallel | None"
    owned: set[nn.Parameter]  # of `trainable`, with `model_parallel`, those that this rank speaks for
    of_experts: set[nn.Parameter]  # that `copies` alone hold
    process_group: dist.ProcessGroup  # ranks that see different samples, or different parts of them: `groups.work`
    groups: "Groups"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As a `torch.optim.Optimizer`'s."""
        self.optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm` over the whole model; the norm before that, a scalar."""
        return clip_parts(list(self.gradients()), max_norm, self.groups.everyone, self.device, self.gradient_share())

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp each element of the gradients between `-clip_value` and `clip_value`."""
        for gradient in self.gradients():
            gradient.clamp_(-clip_value, clip_value)

    # Hooks: when the strategy is built -------------------------------------------------------------------------------

    def replace_parameters(self) -> None:
        """Runs once, first: replace the module's parameters by others. `trainable` is taken from the new ones."""

    def leaves(self) -> Iterable[Tensor]:
        """The tensors whose `.grad` autograd fills on this rank, in the order of `trainable`."""
        return self.trainable.values()

    def prepare(self) -> None:
        """Runs once, before the optimizer is built: make buffers, add hooks."""

    def build_optimizer(self, make_optimizer: "MakeOptimizer") -> torch.optim.Optimizer:
        """Build the optimizer over those parameters that this rank updates. Default: all that train."""
        make_groups = self.options.parameter_groups
        return make_optimizer(make_groups(self.module) if make_groups else list(self.trainable.values()))

    @property
    def settling_steps(self) -> int:
        """How many of the first optimizer steps differ from later ones. They are not profiled, and not counted in
        throughput."""
        return max(self.deciding_steps, self.compiled.settling_steps if self.compiled else 0)

    # Hooks: in a step, in this order ---------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Runs before a step's first forward pass."""

    def before_micro_batch(self) -> None:
        """Runs before the forward pass of each micro-batch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def after_backward(self) -> None:
        """Runs after the backward pass of each micro-batch."""

    def finish_gradient_synchronization(self) -> None:
        """Wait for what is in flight after the last backward pass of a step. Default: nothing is."""

    def update(self) -> None:
        """Run the optimizer."""
        self.optimizer.step()

    def finish_parameter_synchronization(self) -> None:
        """Wait for updated parameters that are still on their way to this rank."""

    def abandon_step(self) -> None:
        """Runs when forward or backward raises. Afterwards the parameters can be evaluated and saved, and there are no
        gradients."""
        self.zero_grad()

    def whole(self) -> AbstractContextManager[None]:
        """In a pipeline, within this context a stage has its parameters, outside of steps too. Default: always."""
        return nullcontext()

    # Hooks: gradients ------------------------------------------------------------------------------------------------

    def gradients(self) -> Iterable[Tensor]:
        """The reduced gradients that `step` reads on this rank, each element once. Clipping and unscaling change them
        in place."""
        return self.gradient_tensors()

    @abstractmethod
    def gradient_share(self) -> Iterable[Tensor]:
        """This rank's part of the reduced gradients: of each element of the whole model, one rank of `everyone` has it
        in its part.

        What is not finite on one rank is not finite in the sum over ranks. So each rank checks only its part.
        """

    def norm_of_share(self) -> Tensor:
        """Of `gradient_share`: an fp64 scalar on the device, which is not finite where a gradient is not."""
        return norm_of(self.gradient_share(), self.device)

    def holding(self) -> set[nn.Parameter]:
        """Trainable parameters that have a gradient on this rank, perhaps of zeros."""
        return {parameter for parameter in self.trainable.values() if parameter.grad is not None}

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients of `parameters` to None: no rank has used them in this step, and they had none before."""
        for parameter in parameters:
            parameter.grad = None

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the last step on CPU, by parameter name, without parameters that no rank used.

        For inspection: of a model that is cut over ranks, on rank 0. Collective: it gathers what is sharded.
        """

    # Hooks: state ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model on CPU under the plain module's own names; empty on ranks other than 0. Collective."""

    @abstractmethod
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `full_state_dict` gave to rank 0; the other ranks' `state` is not read. Collective.

        Raises:
            ValueError: on every rank, `state` does not fit the module; names what is wrong.
        """

    @property
    def saves_shards_of(self) -> frozenset[str]:
        """Those of `parameters` and `optimizer_state` whose pieces are this rank's, and its replicas', alone."""
        return self.shards

    def parameter_pieces(self) -> list[Piece]:
        """What this rank holds of all parameters, frozen ones included: its shard if `saves_shards_of` names
        parameters, otherwise everything."""
        return [Piece(name, 0, parameter) for name, parameter in self.module.named_parameters()]

    def parameters_are_loaded(self) -> None:
        """Runs when a checkpoint has filled the tensors of `parameter_pieces` on all ranks. Collective. Default: these
        are what the module computes with."""

    def updated_pieces(self) -> list[Piece]:
        """The parameters, or ranges of them, for which this rank's `updating_optimizer` keeps states: its shard if
        `shards` names the optimizer's state, otherwise everything."""
        return [Piece(name, 0, parameter) for name, parameter in self.trainable.items()]

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose states this rank holds."""
        return self.optimizer

    def on_this_rank(self, tensor: Tensor) -> Tensor:
        """The elements of a piece, or of an optimizer state of it, that are here."""
        return tensor.detach()

    def relearn(self, first_step: "Callable[[], Sequence[MicroBatch]]") -> None:
        """Decide as the run that saved a checkpoint did, so that sums are rounded as in a run that never stopped. Runs
        before the checkpoint's state is loaded; `first_step` makes this rank's micro-batches of the first step.
        Collective. Default: nothing to decide."""

    # Hooks: memory and traffic ---------------------------------------------------------------------------------------

    def parameter_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds parameters at this moment."""
        return self.module.parameters()

    def gradient_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds gradients at this moment, whole or reduced, this rank's own or of all."""
        return (p.grad for p in self.trainable.values() if p.grad is not None)

    def optimizer_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds optimizer states at this moment."""
        values = (value for entry in self.updating_optimizer.state.values() for value in entry.values())
        return (value for value in values if isinstance(value, Tensor))

    def communication_tensors(self) -> Iterable[Tensor]:
        """Of the tensors that hold parameters and gradients, those that exist for a collective alone: gathered units,
        and buckets whose gradients are kept elsewhere."""
        return ()

    def host_tensors(self) -> Iterable[Tensor]:
        """Model states that this rank holds in host memory, or in files, and not on its device."""
        return ()

    def expected_host_bytes(self, size: ModelSize) -> int:
        """What `host_bytes` should be after a step, padding left out."""
        return 0

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        """What one optimizer step of `micro_batches` micro-batches sends for gradients, parameters and buffers.

        Default, where no formula is known: at least an all-reduce of all gradients; nothing if the model is cut.
        """
        elements = 0 if self.model_parallel else self.trainable_elements
        payload = elements * self.options.least_itemsize
        return [Collective("all_reduce", 1, payload, self.group_size, "gradients", at_least=True)]

    def expected_clipping_traffic(self) -> list[Collective]:
        """What `clip_grad_norm_` sends."""
        return [Collective("all_reduce", 1, 8, dist.get_world_size(self.groups.everyone), "bookkeeping", EVERYONE)]

    # What strategies ask ---------------------------------------------------------------------------------------------

    @property
    def group_rank(self) -> int:
        """This rank's place among those that share the work: they see different samples, or parts of them."""
        return dist.get_rank(self.process_group)

    @property
    def group_size(self) -> int:
        """How many ranks share the work."""
        return dist.get_world_size(self.process_group)

    @property
    def is_in_pipeline(self) -> bool:
        """Whether other ranks hold other layers."""
        return self.model_parallel is not None and self.model_parallel.pipeline is not None

    def buffers(self) -> list[Tensor]:
        """Those of all modules, each once. `module.buffers()` would walk the whole tree of modules in every step."""
        tensors = (buffer for module in self.modules for buffer in module._buffers.values() if buffer is not None)
        return list(dict.fromkeys(tensors))

    def group_of(self, parameter: Tensor) -> dist.ProcessGroup:
        """The ranks that share the work and hold this parameter."""
        return self.groups.copies if parameter in self.of_experts else self.process_group

    def by_group(self, tensors: Iterable[T]) -> list[tuple[dist.ProcessGroup, list[T]]]:
        """Parameters and buffers, with the ranks that share the work and hold them: those of experts by themselves."""
        tensors = list(tensors)
        if not self.of_experts:
            return [(self.process_group, tensors)]
        groups = dict.fromkeys([self.process_group, self.groups.copies])
        return [(group, [tensor for tensor in tensors if self.group_of(tensor) is group]) for group in groups]

    def speaks_for(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts its gradient: of a model that is cut over ranks, some hold the same."""
        return self.model_parallel is None or parameter in self.owned
