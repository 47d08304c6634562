"""The one interface of all strategies. `ddp_lab.strategy.step` is the step that they share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import REPLICATE, Mesh
from ddp_lab.runtime.process.at_exit import settle_at_exit
from ddp_lab.runtime.profiling.memory import ModelSize, expected_state_bytes, storage_bytes
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.runtime.watch.sequence import follow_gradients
from ddp_lab.strategy.communication.agreement import StepAgreement
from ddp_lab.strategy.communication.clipping import clip_parts, clipping_traffic
from ddp_lab.strategy.communication.consistency import (
    require_castable,
    require_matching_state,
    require_same_parameters,
    require_supported_parameters,
)
from ddp_lab.strategy.communication.loss_scale import LossScaler
from ddp_lab.strategy.communication.traffic import EVERYONE, Collective
from ddp_lab.strategy.communication.verdict import VERDICT_BYTES, Verdict, norm_of, update_unless
from ddp_lab.strategy.compilation import SETTLING_STEPS, CompiledBlocks
from ddp_lab.strategy.gradient_watch import GradientWatch
from ddp_lab.strategy.optimizers import MakeOptimizer, checked
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.precision import autocast
from ddp_lab.strategy.ranges import Piece
from ddp_lab.strategy.recompute.apply import checkpoint_activations
from ddp_lab.strategy.step import MicroBatch, StepRunner

NO_REPLICAS = (
    "--mesh with replicate and shard: this strategy cannot shard over a part of the ranks; take zero1, zero2, zero3, "
    "pytorch_zero2 or pytorch_zero3, or --mesh dp=N"
)


class Strategy(ABC):
    """One way to train a module on several ranks.

    Args:
        module: Any. For `forward_backward` it is called as `module(**micro_batch)`, and answers with an object whose
            `.loss` is a mean over the micro-batch (a scalar).
        make_optimizer: Builds the optimizer from what `torch.optim` takes: tensors, or group dicts.
        options: What the strategy may be told (`ddp_lab.strategy.options.StrategyOptions`).
        process_group: The ranks that share the work. Default: all.

    Attributes:
        parameter_dtypes: In which parameters are saved, by name: their own or `options.master_dtype`, though the module
            may compute in `options.param_dtype`.
        wants_to_stop: Answers whether this rank has been asked to stop, in each step. Set it to your own function.
        stops_after: As soon as any rank wants to stop: the number of optimizer steps after which all should.
        optimizer_steps: Calls of `step`, those among them in which fp16 overflowed and nothing was changed.
        scaler: The loss scale; None unless in fp16.

    Raises:
        UnsupportedError: The module has no trainable parameter, has one with sparse or complex gradients, or is not the
            same on every rank.
    """

    always_averages = False
    """Whether reductions average gradients in `forward_backward` too, as PyTorch DDP's do. Default: there they sum, and
    losses are weighted before."""
    overlaps_optimizer = False
    """Whether `options.overlap_optimizer` is supported."""
    offloads: frozenset[str] = frozenset()
    """Values of `options.offload` that are supported."""
    offloads_to_files = False
    """Whether a folder may follow them."""
    compiles = True
    """Whether `options.compile_backend` is supported."""
    casts_parameters = False
    """Whether `options.param_dtype` is supported."""
    rounds_updates = False
    """Whether `options.master_dtype` is supported."""
    replicates_shards = False
    """Whether `options.shard_groups` is supported."""
    reduces_in_backward = False
    """Whether a gradient is reduced while backward goes on. Then a parameter must get only one in a micro-batch."""
    communicates_in_forward = False
    """Whether forward issues collectives. Then ranks must know the number of micro-batches before the first forward."""

    nonfinite_advice = "a lower --lr or --clip-grad-norm may help"
    """What an error says about a loss or a gradient that is not finite."""

    deciding_steps = 0
    """How many of the first optimizer steps decide how the strategy computes later ones."""

    shards: frozenset[str] = frozenset()
    """Those of `parameters`, `gradients` and `optimizer_state` of which a rank holds only its shard at rest."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        options: StrategyOptions | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None:
            raise RuntimeError("a strategy needs a process group: call torch.distributed.init_process_group first")
        settle_at_exit(group)
        self.module = module
        self.options = options or StrategyOptions()
        self.notes: list[str] = []  # decisions of the strategy that the user of a run should know
        self.process_group = group
        self.model_parallel = self.options.model_parallel
        self.everyone = self.model_parallel.everyone if self.model_parallel else group  # who trains this model
        groups = self.options.shard_groups
        self.shard_group = groups.shard if groups else group  # whose ranks hold a shard each
        self.replicate_group = groups.replicate if groups else None  # whose ranks hold the same shard
        self.optimizer_steps = 0
        self.wants_to_stop: Callable[[], bool] = lambda: False
        self.stops_after: int | None = None
        self.in_micro_batch = self.synchronizes_gradients = False
        self.averages_over_ranks = True  # whether reductions of this step do
        self.require_options(self.options)
        require_supported_parameters(module)
        if self.options.param_dtype:
            require_castable(module)
        model = self.model_parallel.group if self.model_parallel else None
        self._agreement = StepAgreement(group, self.everyone, model, next(module.parameters()).device)
        require_same_parameters(module, group, self._agreement.device)
        backend = self.options.compile_backend
        self.compiled = CompiledBlocks(module, backend) if backend else None
        checkpoint_activations(module, self.options.activation_checkpointing)
        self.device = next(module.parameters()).device
        self.scaler = LossScaler.of(module, self.options)
        self.parameter_dtypes = {name: p.dtype for name, p in module.named_parameters()}
        self._modules = list(module.modules())
        self._steps = StepRunner(self, self._agreement)
        self.replace_parameters()
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.owned = self.model_parallel.owned(self.trainable.items()) if self.model_parallel else set()
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self.watch = GradientWatch(dict(zip(self.trainable, self.gradient_leaves(), strict=True)))
        follow_gradients(self.watch)
        self.prepare()
        self.optimizer = self.build_optimizer(checked(make_optimizer))

    @classmethod
    def require_options(cls, options: StrategyOptions) -> None:
        """Check that this strategy can do what `options` ask for.

        Raises:
            UnsupportedError: names the flag that it cannot.
        """
        if options.compress and cls.shards:
            raise UnsupportedError("--compress: gradients are compressed by replicated strategies alone")
        if options.overlap_optimizer and not cls.overlaps_optimizer:
            raise UnsupportedError("--overlap-optimizer: this strategy updates no parameter before all are reduced")
        what, _, folder = (options.offload or "").partition(":")
        if what and what not in cls.offloads:
            ways = " or ".join(sorted(cls.offloads)) or "nothing"
            others = "zero1, zero2 and zero3" if what == "optimizer" else "zero3, pytorch_zero2 and pytorch_zero3"
            raise UnsupportedError(f"--offload {what}: this strategy can take {ways} off the device; {others} can")
        if folder and not cls.offloads_to_files:
            raise UnsupportedError(
                f"--offload {what}:{folder}: this strategy offloads to host memory alone; leave out :{folder}, or take "
                "zero1, zero2 or zero3"
            )
        if options.compile_backend and not cls.compiles:
            raise UnsupportedError("--compile: this strategy has hooks within blocks; take zero1, zero2 or zero3")
        if options.param_dtype and not cls.casts_parameters:
            raise UnsupportedError(
                "--param-dtype: this strategy computes with the parameters that it updates; take zero1, zero2, zero3, "
                "pytorch_zero2 or pytorch_zero3, or --precision bf16"
            )
        if options.master_dtype and not cls.rounds_updates:
            raise UnsupportedError(
                "--master-dtype: this strategy updates in the parameters' own dtype; take zero1, zero2 or zero3"
            )
        if options.shard_groups and not cls.replicates_shards:
            raise UnsupportedError(NO_REPLICAS)

    @classmethod
    def require_mesh(cls, mesh: Mesh | None) -> None:
        """Check that this strategy can train over `mesh`; None: all ranks see different samples.

        Raises:
            UnsupportedError: says what it needs.
        """
        if mesh is not None and REPLICATE in mesh.degrees and not cls.replicates_shards:
            raise UnsupportedError(NO_REPLICAS)

    # What a strategy defines -------------------------------------------------------------------------------------

    @abstractmethod
    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """Build the optimizer over those parameters that this rank updates."""

    @abstractmethod
    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        """What one optimizer step of `micro_batches` micro-batches sends for gradients, parameters and buffers."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`.

        Returns:
            The norm before that, a scalar.
        """
        return clip_parts(
            self.clipped_gradients(), max_norm, self.everyone, self.device, list(self.counted_gradients())
        )

    def expected_clipping_traffic(self) -> list[Collective]:
        """What `clip_grad_norm_` sends."""
        return [clipping_traffic(self.everyone)]

    def clipped_gradients(self) -> list[Tensor]:
        """What `clip_grad_norm_` scales on this rank."""
        return list(self.gradient_tensors())

    @abstractmethod
    def data_parallel_state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the model, on CPU; empty where `data_parallel_rank` is not 0. Collective."""

    @abstractmethod
    def load_data_parallel_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `data_parallel_state_dict` gave to rank 0; the other ranks' `state` is not read. Collective."""

    def replace_parameters(self) -> None:
        """Runs once, first: replace the module's parameters by others. `trainable` is taken from the new ones."""

    def relearn(self, first_step: Callable[[], Sequence[MicroBatch]]) -> None:
        """Decide as the run that saved a checkpoint did, so that sums are rounded as in a run that never stopped. Runs
        before the checkpoint's state is loaded. Collective. Default: nothing to decide.

        Args:
            first_step: Makes this rank's micro-batches of the first step.
        """

    def gradient_leaves(self) -> Iterable[Tensor]:
        """The tensors whose `.grad` autograd fills on this rank, in the order of `trainable`."""
        return self.trainable.values()

    def prepare(self) -> None:
        """Runs once, before the optimizer is built: make buffers, add hooks."""

    def before_step(self) -> None:
        """Runs before a step's first forward pass."""

    def before_micro_batch(self) -> None:
        """Runs before the forward pass of each micro-batch."""

    def after_backward(self) -> None:
        """Runs after the backward pass of each micro-batch."""

    def finish_gradient_synchronization(self) -> None:
        """Wait for the communication that is still in flight."""

    @abstractmethod
    def data_parallel_gradients(self) -> dict[str, Tensor]:
        """`full_gradients` of this rank's part of the model."""

    def gradient_pieces(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Each trainable parameter with this rank's part of its reduced gradient. The parts of all ranks of
        `process_group` make up the whole: of replicas of a shard, the first has it, and the others have nothing.

        What is not finite on one rank is not finite in the sum over ranks. So each rank checks only its part.

        Raises:
            UnsupportedError: the strategy cannot tell parameters apart. It then defines `gradient_share`.
        """
        raise UnsupportedError("--mesh: this strategy does not tell the gradients of parameters apart; take zero1")

    def gradient_share(self) -> Iterable[Tensor]:
        """This rank's part of the reduced gradients."""
        return (gradient for _, gradient in self.gradient_pieces())

    def reduced_gradients(self) -> Iterable[Tensor]:
        """What `clip_grad_norm_` and `step` read of the reduced gradients on this rank, each element once."""
        return self.gradient_tensors()

    def counted_gradients(self) -> Iterable[Tensor]:
        """Of `gradient_share`, what this rank counts: of a model that is cut over ranks, some hold the same."""
        if self.model_parallel is None:
            return self.gradient_share()
        return (gradient for parameter, gradient in self.gradient_pieces() if parameter in self.owned)

    def norm_of_share(self) -> Tensor:
        """Of `counted_gradients`: an fp64 scalar on the device, which is not finite where a gradient is not."""
        return norm_of(self.counted_gradients(), self.device)

    def require_none_unfrozen(self) -> None:
        """Check that no parameter trains that was frozen when the strategy was built.

        Raises:
            UnsupportedError: names one. Its gradient would stay on this rank.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"{name} was frozen when the strategy was built, and trains now; build the strategy while it "
                    "trains, and freeze it later"
                )

    def held_gradients(self) -> set[nn.Parameter]:
        """Parameters that have a gradient on this rank, perhaps of zeros."""
        return {parameter for parameter in self.trainable.values() if parameter.grad is not None}

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients of `parameters` to None: no rank has used them in this step, and they had none before."""
        for parameter in parameters:
            parameter.grad = None

    def abandon_step(self) -> None:
        """Runs when forward or backward raises. Afterwards the parameters can be evaluated and saved, and there are no
        gradients."""
        self.zero_grad()

    def finish_parameter_synchronization(self) -> None:
        """Wait for updated parameters that are still on their way to this rank."""

    def finish_communication(self) -> None:
        """Wait for what may be in flight between two steps: updated parameters, and the next step's announcement."""
        self.finish_parameter_synchronization()
        self._steps.finish_announcement()

    def buffers(self) -> list[Tensor]:
        """Those of all modules, each once. `module.buffers()` would walk the whole tree of modules in every step."""
        found = (buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None)
        return list(dict.fromkeys(found))

    def parameter_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds parameters at this moment."""
        return self.module.parameters()

    def gradient_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds gradients at this moment."""
        return (p.grad for p in self.trainable.values() if p.grad is not None)

    def optimizer_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds optimizer states at this moment."""
        values = (value for entry in self.updating_optimizer.state.values() for value in entry.values())
        return (value for value in values if isinstance(value, Tensor))

    # Whole tensors -----------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model on CPU under the plain module's own names; empty on ranks other than 0. Collective."""
        return self._whole(self.data_parallel_state_dict())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `full_state_dict` gave to rank 0; the other ranks' `state` is not read. Collective.

        Raises:
            ValueError: on every rank, `state` does not fit the module; names what is wrong.
        """
        if self.model_parallel is not None:
            shapes = self.model_parallel.whole_shapes(self.module)
            require_matching_state(shapes, state, self.everyone)
            state = self.model_parallel.scattered(state, self.module) if self.data_parallel_rank == 0 else {}
        self.load_data_parallel_state_dict(state)

    def full_gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the last step on CPU, by parameter name, without parameters that no rank used.

        For inspection: of a model that is cut over ranks, on rank 0. Collective: it gathers what is sharded.
        """
        return self._whole(self.data_parallel_gradients())

    def _whole(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.model_parallel is None or self.data_parallel_rank != 0:
            return parts
        return self.model_parallel.gathered(parts)

    # What a checkpoint saves and loads: each rank what it holds ----------------------------------------------------

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose states this rank holds."""
        return self.optimizer

    def parameter_pieces(self) -> list[Piece]:
        """What this rank holds of all parameters, frozen ones included.

        That is its shard if `saves_shards_of` names parameters, otherwise everything.
        """
        return [Piece(name, 0, parameter) for name, parameter in self.module.named_parameters()]

    def parameters_are_loaded(self) -> None:
        """Runs when a checkpoint has filled the tensors of `parameter_pieces` on all ranks. Collective. Default: these
        are what the module computes with."""

    @property
    def saves_shards_of(self) -> frozenset[str]:
        """Those of `parameters` and `optimizer_state` whose pieces are this rank's, and its replicas', alone."""
        return self.shards

    def updated_pieces(self) -> list[Piece]:
        """The parameters, or ranges of them, for which this rank's `updating_optimizer` keeps states.

        That is its shard if `shards` names the optimizer's state, otherwise everything.
        """
        return [Piece(name, 0, parameter) for name, parameter in self.trainable.items()]

    def on_this_rank(self, tensor: Tensor) -> Tensor:
        """The elements of a piece, or of an optimizer state of it, that are here."""
        return tensor.detach()

    # The step ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Call the strategy where a loop on one device would call the module."""
        with phase("forward"), self.autocast():
            return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def micro_batch(self, last: bool = True) -> AbstractContextManager[None]:
        """Context of one forward and one backward pass, in a loop of your own. Collective.

            for batch in batches:
                with strategy.micro_batch(last=batch is batches[-1]):
                    loss = loss_of(strategy(batch)) / len(batches)
                    strategy.scale_loss(loss).backward()
            strategy.step()
            strategy.zero_grad()

        After the last micro-batch of a step, each gradient is what PyTorch DDP would give: the average over ranks of
        what the backward passes of the step have added up on each rank, or None if no rank used the parameter and
        it had none before.
        All ranks run the same number of micro-batches.

        Args:
            last: Whether this is the last micro-batch before `step`.

        Raises:
            NonFiniteError: On every rank, when any rank's gradient is NaN or infinite, in this step or, on CUDA, in the
                one before. `step` has not updated any parameter with it. In fp16, only at a loss scale below 1; else
                `step` skips the step.
            RuntimeError: In fp16, when backward ran without `scale_loss`.
        """
        return self._steps.micro_batch(last)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to run backward from in a loop of your own, within `micro_batch`.

        In fp16 it is multiplied by the loss scale, and after the last micro-batch gradients are divided by it. In other
        precisions it is the loss itself.
        """
        return self._steps.scale_loss(loss)

    def loss_weights(self, counts: Sequence[float]) -> list[float]:
        """For losses that are means over different numbers of samples or tokens. Collective.

        Args:
            counts: For each micro-batch of this rank in this step, what its loss is a mean over.

        Returns:
            What to multiply each of these losses with before backward. Then the gradient is that of the mean over all
            samples or tokens of the global batch.

        Raises:
            UnsupportedError: On every rank, when all counts of all ranks are 0.
        """
        return self._steps.weights(counts)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, gradients are added up on this rank only. Wraps forward as well as backward.
        `micro_batch` enters it for all micro-batches of a step but the last."""
        before, self.synchronizes_gradients = self.synchronizes_gradients, False
        try:
            yield
        finally:
            self.synchronizes_gradients = before

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which forward runs, for training and evaluation alike."""
        return autocast(self.device.type, self.options.precision)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None = None, tokens: int = 0
    ) -> Tensor:
        """Run forward and backward of one optimizer step's micro-batches. `step` then runs the optimizer.

        Ranks may hold different numbers of samples and of micro-batches. A rank that holds fewer than another runs its
        latest micro-batch again with weight 0, so that it takes part in every collective.

        Args:
            micro_batches: For each, the keyword arguments of the module.
            weights: For each, what its loss is a mean over, such as its number of tokens. Default: its samples, which
                are dimension 0 of its first tensor. Those of weight 0 are skipped.
            tokens: In all of them, for `verdict.tokens`. Not read where the step was announced.

        Returns:
            The mean loss over the global batch: a detached fp32 scalar, the same on every rank.
            Each trainable parameter's gradient is the gradient of that mean, or None if no rank used the parameter.

        Raises:
            NonFiniteError: On every rank, when any rank's loss or gradient is NaN or infinite, in this step or, on
                CUDA, in the one before. `step` has not updated any parameter with it. In fp16, only at a loss scale
                below 1; else `step` skips the step.
            UnsupportedError: On every rank, when the global batch is empty, or a rank never had a sample.
        """
        return self._steps.run(micro_batches, weights, tokens)

    @property
    def verdict(self) -> Verdict:
        """How the latest step went on all ranks: its loss and the norm of its gradients. The host had better read them
        a step later."""
        return self._steps.verdict

    def require_finite(self) -> None:
        """Wait until the device has done the latest step whose outcome is not known, and look at it. Collective.

        Raises:
            NonFiniteError: on every rank, if its loss or a gradient is NaN or infinite on any. There are no gradients
                then. In fp16, only at a loss scale below 1.
        """
        self._steps.require_finite()

    def announce(
        self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None = None, tokens: int = 0
    ) -> None:
        """Tell the other ranks what the next `forward_backward` will be given, so that it need not wait for this.

        Optional; between `forward_backward` and `step`, on all ranks or on none.

        Args:
            micro_batches, weights, tokens: Those of the next step.
        """
        self._steps.announce(micro_batches, weights, tokens)

    def step(self, wait: bool = True) -> None:
        """Update the parameters, unless the loss or a gradient is not finite. In fp16, then update the loss scale.

        Args:
            wait: Return when this rank has all updated parameters. Otherwise they may still arrive while the next
                forward pass begins, and nothing else may read or change them before it has ended.

        Raises:
            RuntimeError: There are no gradients of all ranks: the last micro-batch of the step is still to come.
        """
        found_inf = self._steps.take().found_inf
        update_unless(found_inf, self.updating_optimizer, self.update)
        if self.scaler is not None:
            self.scaler.update(found_inf)
        self.optimizer_steps += 1
        if wait:
            self.finish_parameter_synchronization()

    def update(self) -> None:
        """Run the optimizer."""
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # What a run wants to know ------------------------------------------------------------------------------------

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among those that see different data."""
        return dist.get_rank(self.process_group)

    @property
    def data_parallel_size(self) -> int:
        """How many ranks see different data."""
        return dist.get_world_size(self.process_group)

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

    @property
    def settling_steps(self) -> int:
        """How many of the first optimizer steps differ from later ones. They are not profiled, and not counted in
        throughput."""
        return max(self.deciding_steps, SETTLING_STEPS if self.compiled else 0)

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes of tensor storage that this rank holds now, by component."""
        return {
            "parameters": storage_bytes(self.parameter_tensors()),
            "gradients": storage_bytes(self.gradient_tensors()),
            "optimizer_state": storage_bytes(self.optimizer_tensors()),
            "buffers": storage_bytes(self.module.buffers()),
        }

    def host_tensors(self) -> Iterable[Tensor]:
        """Model states that this rank holds in host memory, or in files, and not on its device."""
        return ()

    def host_bytes(self) -> int:
        """Bytes of `host_tensors`."""
        return storage_bytes(self.host_tensors())

    def expected_host_bytes(self, size: ModelSize) -> int:
        """What `host_bytes` should be after a step, padding left out."""
        return 0

    def expected_memory(self, size: ModelSize) -> dict[str, int]:
        """Bytes by component that this rank should hold after a step, padding and step counters left out."""
        return expected_state_bytes(size, self.shard_size, self.shards)

    def expected_traffic(self, micro_batches: int = 1, clips: bool = False) -> list[Collective]:
        """The collectives that one rank issues in one optimizer step of `micro_batches` micro-batches a rank.

        Args:
            clips: Whether `clip_grad_norm_` is called in the step.
        """
        size, everyone = self.data_parallel_size, dist.get_world_size(self.everyone)
        counts_bytes = self._agreement.counts_row_bytes * everyone
        results_bytes = self._agreement.results_row_bytes(len(self.trainable)) * size
        return [
            *self.expected_gradient_traffic(micro_batches),
            Collective("all_gather", 1, counts_bytes, everyone, "bookkeeping", EVERYONE),
            Collective("all_gather", 1, results_bytes, size, "bookkeeping"),
            Collective("all_reduce", 1, VERDICT_BYTES, everyone, "bookkeeping", EVERYONE),
            *(self.expected_clipping_traffic() if clips else []),
            *(self.model_parallel.expected_traffic(micro_batches) if self.model_parallel else []),
        ]
