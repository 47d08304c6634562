"""What a strategy defines, and when it runs. `ddp_lab.strategy.step` is who calls most of it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.accounting import Accounts
from ddp_lab.strategy.norms import clip_parts, norm_of

if TYPE_CHECKING:
    from ddp_lab.strategy.communication.loss_scale import LossScaler
    from ddp_lab.strategy.compilation import CompiledBlocks
    from ddp_lab.strategy.gradient_watch import GradientWatch
    from ddp_lab.strategy.model_parallel import ModelParallel
    from ddp_lab.strategy.optimizers import MakeOptimizer
    from ddp_lab.strategy.options import StrategyOptions


T = TypeVar("T", bound=Tensor)


class Progress:
    """Where the optimizer step is. The step writes this, and strategies read it.

    Attributes:
        is_ahead: Forward passes run before the first micro-batch (`model_parallel.Balance`).
        in_micro_batch: Between the beginning of forward and the end of `after_backward`.
        another_follows: This micro-batch is not the last of its step.
        reduces_now: The gradients of this micro-batch are to be reduced: it is the last one, or the strategy reduces
            all (`reduces_every_micro_batch`). Never outside of micro-batches.
        counts_gradients: A gradient counts for its bucket to be complete. In a pipeline those of a bucket may come in
            several backward passes, and count when they are their parameters' last ones in the step.
        averages: Reductions of this step average gradients over ranks, instead of adding them up.
        stops_after: As soon as any rank wants to stop: the number of optimizer steps after which all should.
    """

    is_ahead = in_micro_batch = another_follows = reduces_now = False
    averages = counts_gradients = True
    stops_after: int | None = None


class Hooks(Accounts):
    """What is different from strategy to strategy. The attributes are there before `replace_parameters` runs, except
    for `trainable` and `watch`, which `prepare` has, and `optimizer`."""

    always_averages = False
    """Whether reductions average gradients in `forward_backward` too, as PyTorch DDP's do. Default: there they sum, and
    losses are weighted before."""
    reduces_in_backward = False
    """Whether a gradient is reduced while backward goes on. Then a parameter must get only one in a micro-batch."""
    reduces_every_micro_batch = False
    """Whether gradients are reduced at every micro-batch. Default: at the last one of a step."""
    reduces_given_gradients = True
    """Whether gradients are reduced that the loop itself sets, without a backward pass."""
    communicates_in_forward = False
    """Whether forward issues collectives. Then ranks must know the number of micro-batches before the first forward."""
    nonfinite_advice = ""
    """What more an error says about a loss or a gradient that is not finite."""
    deciding_steps = 0
    """How many of the first optimizer steps decide how the strategy computes later ones."""

    options: "StrategyOptions"
    device: torch.device
    steps: Progress
    notes: list[str]  # decisions of the strategy that the user of a run should know
    model_parallel: "ModelParallel | None"
    owned: set[nn.Parameter]  # of `trainable`, with `model_parallel`, those that this rank speaks for
    watch: "GradientWatch"
    scaler: "LossScaler | None"  # of fp16
    compiled: "CompiledBlocks | None"
    optimizer_steps: int  # calls of `step`, those among them in which fp16 overflowed and nothing was changed
    wants_to_stop: Callable[[], bool]  # whether this rank has been asked to stop; set it to your own function
    frozen: dict[str, nn.Parameter]  # by name

    @property
    def is_in_pipeline(self) -> bool:
        """Whether other ranks hold other layers."""
        return self.model_parallel is not None and self.model_parallel.pipeline is not None

    def passes_ahead(self, micro_batches: int) -> int:
        """How many forward passes run before the first of so many micro-batches."""
        balance = self.model_parallel.balance if self.model_parallel else None
        return balance.passes_ahead(micro_batches) if balance else 0

    # When the strategy is built ------------------------------------------------------------------------------------

    def replace_parameters(self) -> None:
        """Runs once, first: replace the module's parameters by others. `trainable` is taken from the new ones."""

    def leaves(self) -> Iterable[Tensor]:
        """The tensors whose `.grad` autograd fills on this rank, in the order of `trainable`."""
        return self.trainable.values()

    def prepare(self) -> None:
        """Runs once, before the optimizer is built: make buffers, add hooks."""

    @property
    def settling_steps(self) -> int:
        """How many of the first optimizer steps differ from later ones. They are not profiled, and not counted in
        throughput."""
        return max(self.deciding_steps, self.compiled.settling_steps if self.compiled else 0)

    def build_optimizer(self, make_optimizer: "MakeOptimizer") -> torch.optim.Optimizer:
        """Build the optimizer over those parameters that this rank updates. Default: all that train."""
        make_groups = self.options.parameter_groups
        return make_optimizer(make_groups(self.module) if make_groups else list(self.trainable.values()))

    # In a step -----------------------------------------------------------------------------------------------------

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

    def whole(self) -> AbstractContextManager[None]:
        """In a pipeline, within this context a stage has its parameters, outside of steps too. Default: always."""
        return nullcontext()

    def update(self) -> None:
        """Run the optimizer."""
        self.optimizer.step()

    def finish_parameter_synchronization(self) -> None:
        """Wait for updated parameters that are still on their way to this rank."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As a `torch.optim.Optimizer`'s."""
        self.optimizer.zero_grad(set_to_none)

    def abandon_step(self) -> None:
        """Runs when forward or backward raises. Afterwards the parameters can be evaluated and saved, and there are no
        gradients."""
        self.zero_grad()

    # Gradients -----------------------------------------------------------------------------------------------------

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

    def group_of(self, parameter: Tensor) -> dist.ProcessGroup:
        """The ranks that share the work and hold this parameter."""
        return self.copies if parameter in self.of_experts else self.process_group

    def by_group(self, tensors: Iterable[T]) -> list[tuple[dist.ProcessGroup, list[T]]]:
        """Parameters and buffers, with the ranks that share the work and hold them: those of experts by themselves."""
        tensors = list(tensors)
        if not self.of_experts:
            return [(self.process_group, tensors)]
        groups = dict.fromkeys([self.process_group, self.copies])
        return [(group, [one for one in tensors if self.group_of(one) is group]) for group in groups]

    def speaks_for(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts its gradient: of a model that is cut over ranks, some hold the same."""
        return self.model_parallel is None or parameter in self.owned

    def norm_of_share(self) -> Tensor:
        """Of `gradient_share`: an fp64 scalar on the device, which is not finite where a gradient is not."""
        return norm_of(self.gradient_share(), self.device)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`.

        Returns:
            The norm before that, a scalar.
        """
        return clip_parts(list(self.gradients()), max_norm, self.everyone, self.device, list(self.gradient_share()))

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp each element of the gradients between `-clip_value` and `clip_value`."""
        self.require_clippable()
        for gradient in self.gradients():
            gradient.clamp_(-clip_value, clip_value)

    def require_clippable(self) -> None:
        """Check that parameters are still to be updated.

        Raises:
            UnsupportedError: they are updated as soon as their own gradients are reduced.
        """
        if self.options.overlap_optimizer:
            raise UnsupportedError("gradients cannot be clipped when parameters are updated before all are reduced")

    def holding(self) -> set[nn.Parameter]:
        """Trainable parameters that have a gradient on this rank, perhaps of zeros."""
        return {parameter for parameter in self.trainable.values() if parameter.grad is not None}

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients of `parameters` to None: no rank has used them in this step, and they had none before."""
        for parameter in parameters:
            parameter.grad = None
