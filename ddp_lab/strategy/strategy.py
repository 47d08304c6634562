"""The one interface of all strategies: what a user calls.

What a strategy defines is in `ddp_lab.strategy.hooks`, and the step that runs these hooks in `loop`. `account` is what
is held and sent, `capabilities` which options are supported.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.strategy.account import (
    Collective,
    ModelSize,
    expected_state_bytes,
    require_matching_state,
    storage_bytes,
)
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.hooks import Hooks

if TYPE_CHECKING:
    from ddp_lab.strategy.batches import MicroBatch, StepData
    from ddp_lab.strategy.forward_backward import ForwardBackward
    from ddp_lab.strategy.optimizers import MakeOptimizer
    from ddp_lab.strategy.options import StrategyOptions
    from ddp_lab.strategy.verdict import Verdict


class Strategy(Hooks):
    """One way to train a module on several ranks.

    Args:
        module: Any. For `forward_backward` it is called as `module(**micro_batch)`, and answers with an object whose
            `.loss` is a mean over the micro-batch, a scalar.
        make_optimizer: Builds the optimizer from what `torch.optim` takes: tensors, or group dicts.
        options: What the strategy may be told (`ddp_lab.strategy.options`).
        process_group: The ranks that share the work. Default: all.

    Raises:
        UnsupportedError: The module cannot be trained, or is not the same on every rank; or an option is not supported.
    """

    supports: ClassVar[Supports] = Supports()
    steps: "ForwardBackward"

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: "MakeOptimizer",
        options: "StrategyOptions | None" = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # What a strategy is built with is imported when one is built: who lists or reads strategies does without.
        from ddp_lab.strategy import building, optimizers
        from ddp_lab.strategy.forward_backward import ForwardBackward
        from ddp_lab.strategy.groups import Groups
        from ddp_lab.strategy.modules import refuse_new_parameters
        from ddp_lab.strategy.options import StrategyOptions

        # Groups
        group = building.group_or_world(process_group)
        self.module, self.options, self.notes = module, options or StrategyOptions(), []
        self.process_group, self.model_parallel = group, self.options.model_parallel
        self.groups = Groups.of(group, self.options)
        if self.groups.copies is not group:
            self.always_averages = True
        # The module
        self.optimizer_steps, self.wants_to_stop = 0, lambda: False
        self.supports.require(self.options)
        self.scaler, self.compiled = building.prepared(module, self.options, group, bool(self.shards))
        self.device = next(module.parameters()).device
        self.steps = ForwardBackward(self)
        self.parameter_dtypes = {name: p.dtype for name, p in module.named_parameters()}
        self.modules = list(module.modules())
        # Parameters and their gradients
        self.replace_parameters()
        named = list(module.named_parameters())
        self.trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.trainable_elements = sum(parameter.numel() for parameter in self.trainable.values())
        self.frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
        self.owned = self.model_parallel.owned(self.trainable.items()) if self.model_parallel else set()
        of_experts = self.model_parallel.of_experts if self.model_parallel else ()
        self.of_experts = {parameter for name, parameter in named if name in of_experts}
        self.watch = building.watch_over(dict(zip(self.trainable, self.leaves(), strict=True)))
        self.prepare()
        self.optimizer = self.build_optimizer(optimizers.checked(make_optimizer))
        refuse_new_parameters(self)

    @classmethod
    def in_stages(cls) -> "type[Strategy]":
        """The class that trains a stage of a pipeline in this way. Default: this one."""
        return cls

    # What a user calls -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Call the strategy where a loop on one device would call the module."""
        return self.steps.answer(*args, **kwargs)

    def micro_batch(self, last: bool = True) -> AbstractContextManager[None]:
        """Context of one forward and one backward pass, in a loop of your own (docs/own-loop.md). Collective.

        After the last micro-batch of a step, each gradient is what PyTorch DDP would give: the average over ranks of
        what the backward passes of the step have added up on each rank, or None if no rank used the parameter and
        it had none before. All ranks run the same number of micro-batches.

        Args:
            last: No other micro-batch follows before `step`.

        Raises:
            NonFiniteError: On every rank, when any rank's gradient is NaN or infinite, in this step or, on CUDA, in the
                one before. No parameter is updated with it. In fp16, only at a loss scale below 1; else `step` skips.
            RuntimeError: In fp16, when backward ran without `scale_loss`.
        """
        return self.steps.micro_batch(last)

    def no_sync(self) -> AbstractContextManager[None]:
        """Micro-batches within this context are not the last of their step, as those of `micro_batch(last=False)`.

        Gradients are reduced at the last one, unless the strategy `reduces_every_micro_batch`.
        """
        return self.steps.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to run backward from in a loop of your own, within `micro_batch`.

        In fp16 it has the loss scale, by which gradients are divided at the end. Elsewhere it is the loss itself.
        """
        return self.steps.scale_loss(loss)

    def loss_weights(self, counts: Sequence[float]) -> list[float]:
        """For losses that are means over different numbers of samples or tokens. Collective.

        Args:
            counts: For each micro-batch of this rank in this step, what its loss is a mean over.

        Returns:
            What to multiply each of these losses with, so that the gradient is of the mean over the global batch.

        Raises:
            UnsupportedError: On every rank, when all counts of all ranks are 0.
        """
        return self.steps.weights(counts)

    def forward_backward(
        self,
        micro_batches: "Sequence[MicroBatch]",
        weights: Sequence[float] | None = None,
        tokens: int = 0,
        following: "StepData | None" = None,
    ) -> Tensor:
        """Run forward and backward of one optimizer step's micro-batches. `step` then runs the optimizer.

        Ranks may hold different numbers of samples and of micro-batches. A rank that holds fewer than another runs its
        latest micro-batch again with weight 0, so that it takes part in every collective.

        Args:
            micro_batches: For each, the keyword arguments of the module.
            weights: For each, what its loss is a mean over, such as its number of tokens; 0: skip it.
                Default: its samples, dimension 0 of its first tensor.
            tokens: In all of them, for `verdict.tokens`.
            following: What the next call will be given, if it is known. Then that one need not ask the other ranks.

        Returns:
            The mean loss over the global batch: a detached fp32 scalar, the same on every rank. Each trainable
            parameter's gradient is the gradient of that mean, or None if no rank used the parameter.

        Raises:
            NonFiniteError: As `micro_batch`, and when any rank's loss is NaN or infinite.
            OneRankError: These are not the micro-batches that the call before had as `following`.
            UnsupportedError: On every rank, when the global batch is empty, or a rank never had a sample.
        """
        return self.steps.run(micro_batches, weights, tokens, following)

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among those that see different samples."""
        return self.group_rank // self.groups.context_size

    @property
    def data_parallel_size(self) -> int:
        """How many ranks see different samples."""
        return self.group_size // self.groups.context_size

    @property
    def verdict(self) -> "Verdict":
        """How the latest step went on all ranks: loss and norm of gradients, for the host to read a step later."""
        return self.steps.verdict

    def require_finite(self) -> None:
        """Wait until the device has done the latest step whose outcome is not known, and look at it. Collective.

        Raises:
            NonFiniteError: as `forward_backward`. There are no gradients then.
        """
        self.steps.require_finite()

    def step(self, wait: bool = True) -> None:
        """Update the parameters, unless the loss or a gradient is not finite; and, in fp16, the loss scale.

        Args:
            wait: Return when this rank has all updated parameters. Otherwise they may still arrive while the next
                forward pass begins, and nothing else may read or change them before it has ended.

        Raises:
            RuntimeError: There are no gradients of all ranks: the last micro-batch of the step is still to come.
        """
        self.steps.update()
        if wait:
            self.finish_parameter_synchronization()

    # Accounts --------------------------------------------------------------------------------------------------------

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes of tensor storage that this rank holds now, by component."""
        return {
            "parameters": storage_bytes(self.parameter_tensors()),
            "gradients": storage_bytes(self.gradient_tensors()),
            "optimizer_state": storage_bytes(self.optimizer_tensors()),
            "buffers": storage_bytes(self.module.buffers()),
        }

    def communication_bytes(self) -> int:
        """Bytes of `memory_breakdown` that are temporary buffers of collectives."""
        return storage_bytes(self.communication_tensors())

    def expected_memory(self, size: ModelSize) -> dict[str, int]:
        """Bytes by component that this rank should hold after a step, padding and step counters left out."""
        experts = ModelSize.of_parameters(self.of_experts)
        other_size = ModelSize(*(total - part for total, part in zip(astuple(size), astuple(experts), strict=True)))
        of_experts = expected_state_bytes(experts, dist.get_world_size(self.groups.copies), self.shards)
        return {
            n: of_experts[n] + b
            for n, b in expected_state_bytes(other_size, self.groups.shard_size, self.shards).items()
        }

    def host_bytes(self) -> int:
        """Bytes of `host_tensors`."""
        return storage_bytes(self.host_tensors())

    def expected_traffic(self, micro_batches: int = 1, clips: bool = False) -> list[Collective]:
        """The collectives that a rank issues in a step of so many micro-batches. `clips`: with `clip_grad_norm_`."""
        between_parts = self.model_parallel.expected_traffic(micro_batches) if self.model_parallel else []
        if self.options.recomputes:  # what runs again sends again
            between_parts = [replace(collective, at_least=True) for collective in between_parts]
        return [
            *self.expected_gradient_traffic(micro_batches),
            *self.steps.exchange.expected_traffic(),
            *(self.expected_clipping_traffic() if clips else []),
            *between_parts,
        ]

    # Models that are cut over ranks ----------------------------------------------------------------------------------

    def of_whole_model(self, parts: dict[str, Tensor], with_aliases: bool = False) -> dict[str, Tensor]:
        """Put together what `process_group` has gathered of its part of the model. Collective.

        Args:
            parts: On CPU, by name; read where `copy_rank` is 0.
            with_aliases: Name a tensor that the model knows by several names by each of them.

        Returns:
            Whole tensors on rank 0 of the ranks that see the same samples, and nothing on the others among them.
        """
        if self.model_parallel is None or not self.groups.is_first_copy:
            return parts
        wholes = self.model_parallel.gathered(parts)
        aliases = self.model_parallel.aliases.items() if with_aliases else ()
        return wholes | {alias: wholes[name] for alias, name in aliases if name in wholes}

    def of_this_part(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The reverse, where rank 0 has whole tensors. Collective.

        Raises:
            ValueError: on every rank, `state` does not fit the module; names what is wrong.
        """
        if self.model_parallel is not None:
            require_matching_state(self.model_parallel.whole_shapes(self.module), state, self.groups.everyone)
            state = self.model_parallel.scattered(state, self.module) if self.groups.is_first_copy else {}
        return state
