"""The one interface of all strategies, and the optimizer step that they share.

A step has three parts:
1. The ranks tell each other how many samples and micro-batches each of them holds. So every loss can be weighted by its
   share of the global batch.
2. Forward and backward of each micro-batch, with the communication that the strategy adds to them.
3. The ranks tell each other which parameters received a gradient. They add up their shares of the loss, which also
   shows whether all is finite.

Part 1 and the first half of part 3 are all-gathers of a few bytes between the hosts
(`training.communication.agreement`). The second half is an all-reduce of two numbers between the devices
(`training.communication.verdict`). The first exchange is hidden: behind the optimizer of the step before if the step is
announced (`announce`), or behind the first forward pass if there are several micro-batches.

No part waits for the device. What the host must know of it, it reads a step later: so an error that names step k may be
raised in step k + 1. On a CPU all is known at once.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.checkpoint.ranges import Piece
from training.communication.agreement import (
    COUNTS_ROW_BYTES,
    RECEIVED_BYTES,
    RESULTS_ROW_BYTES,
    GlobalBatch,
    Pending,
    StepAgreement,
    StepResult,
    nonfinite_error,
)
from training.communication.consistency import require_same_parameters, require_supported_parameters
from training.communication.traffic import Collective
from training.communication.verdict import VERDICT_BYTES, Verdict, norm_of, update_unless
from training.config import StrategyOptions
from training.errors import UnsupportedError
from training.profiling.memory import ModelSize, expected_state_bytes, storage_bytes
from training.watch.gradient_watch import GradientWatch
from training.watch.phases import phase
from training.watch.sequence import follow_gradients

MicroBatch = Mapping[str, Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Strategy(ABC):
    """One way to train a module on several ranks.

    Args:
        module: Called as `module(**micro_batch)`; answers with an object whose `.loss` is the mean over the samples
            of the micro-batch (a scalar).
        make_optimizer: Builds the optimizer from what `torch.optim` takes: tensors, or group dicts.
        options: What the strategy may be told (`training.config.StrategyOptions`).
        process_group: The ranks that share the work. Default: all.

    Raises:
        UnsupportedError: The module has no trainable parameter, has one with sparse or complex gradients, or is not the
            same on every rank.
    """

    averages_over_ranks = False
    """Whether all-reduces average gradients, as PyTorch DDP's do. Default: they sum, and losses are weighted before."""
    overlaps_optimizer = False
    """Whether `options.overlap_optimizer` is supported."""
    communicates_in_forward = False
    """Whether forward issues collectives. Then ranks must know the number of micro-batches before the first forward."""

    settling_steps = 0
    """How many of the first optimizer steps decide how later steps are computed. They are not profiled, and not counted
    in throughput."""

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
        self.module = module
        self.options = options or StrategyOptions()
        self.notes: list[str] = []  # decisions of the strategy that the user of a run should know
        self.process_group = group
        self.optimizer_steps = 0
        self.synchronizes_gradients = True
        if self.options.compress and self.shards:
            raise UnsupportedError("--compress: gradients are compressed by replicated strategies alone")
        if self.options.overlap_optimizer and not self.overlaps_optimizer:
            raise UnsupportedError("--overlap-optimizer: this strategy updates no parameter before all are reduced")
        require_supported_parameters(module)
        self._agreement = StepAgreement(group, next(module.parameters()).device)
        require_same_parameters(module, group, self._agreement.device)
        self.device = next(module.parameters()).device
        self._modules = list(module.modules())
        self._latest: MicroBatch | None = None
        self._announced: Pending | None = None
        self._latest_step: tuple[Verdict, Sequence[MicroBatch]] | None = None
        self.replace_parameters()
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.watch = GradientWatch(self.gradient_leaves())
        follow_gradients(self.watch)
        self.prepare()
        self.optimizer = self.build_optimizer(make_optimizer)

    # What a strategy defines -------------------------------------------------------------------------------------

    @abstractmethod
    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """Build the optimizer over those parameters that this rank updates."""

    @abstractmethod
    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        """What one optimizer step of `micro_batches` micro-batches sends for gradients, parameters and buffers."""

    def expected_clipping_traffic(self) -> list[Collective]:
        """What `clip_grad_norm_` sends. Default: nothing, since the rank holds all gradients."""
        return []

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`.

        Returns:
            The norm before that, a scalar.
        """

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model on CPU under the plain module's own names; empty on ranks other than 0. Collective."""

    @abstractmethod
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `full_state_dict` gave to rank 0; the other ranks' `state` is not read. Collective."""

    def replace_parameters(self) -> None:
        """Runs once, first: replace the module's parameters by others. `trainable` is taken from the new ones."""

    def learned(self) -> list[list[str]] | None:
        """What the first steps have decided: names of the parameters in each bucket. Default: nothing.

        A checkpoint keeps it for `relearn`.
        """
        return None

    def relearn(self, learned: list[list[str]] | None, first_step: Callable[[], Sequence[MicroBatch]]) -> None:
        """Decide as the run that saved a checkpoint did, so that sums are rounded as in a run that never stopped. Runs
        before the checkpoint's state is loaded. Collective. Default: nothing to decide.

        Args:
            learned: What `learned` answered in that run; None if something that it depends on has changed.
            first_step: Makes this rank's micro-batches of the first step.
        """

    def gradient_leaves(self) -> Iterable[Tensor]:
        """The tensors whose `.grad` autograd fills on this rank, in the order of `trainable`."""
        return self.trainable.values()

    def prepare(self) -> None:
        """Runs once, before the optimizer is built: make buffers, add hooks."""

    def before_step(self) -> None:
        """Runs before a step's first forward pass."""

    def before_backward(self) -> None:
        """Runs before the backward pass of each micro-batch."""

    def after_backward(self) -> None:
        """Runs after the backward pass of each micro-batch."""

    def finish_gradient_synchronization(self) -> None:
        """Wait for the communication that is still in flight."""

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the last step on CPU, by parameter name, without parameters that no rank used.

        For inspection. Collective: it gathers what is sharded.
        """

    @abstractmethod
    def gradient_share(self) -> Iterable[Tensor]:
        """This rank's part of the reduced gradients; the parts of all ranks make up the whole.

        What is not finite on one rank is not finite in the sum over ranks. So each rank checks only its part.
        """

    def norm_of_share(self) -> Tensor:
        """Of `gradient_share`: a scalar on the device that shows whether it holds NaN or infinity."""
        return norm_of(self.gradient_share(), self.device)

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients of `parameters` to None: no rank has used them in this step."""
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
        if self._announced is not None:
            _, work = self._announced
            work.wait()

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

    # What a checkpoint saves and loads: each rank what it holds ----------------------------------------------------

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose states this rank holds."""
        return self.optimizer

    def parameter_pieces(self) -> list[Piece]:
        """What this rank holds of all parameters, frozen ones included.

        That is its shard if `shards` names parameters, otherwise everything.
        """
        return [Piece(name, 0, parameter) for name, parameter in self.module.named_parameters()]

    def updated_pieces(self) -> list[Piece]:
        """The parameters, or ranges of them, for which this rank's `updating_optimizer` keeps states.

        That is its shard if `shards` names the optimizer's state, otherwise everything.
        """
        return [Piece(name, 0, parameter) for name, parameter in self.trainable.items()]

    def on_this_rank(self, tensor: Tensor) -> Tensor:
        """The elements of a piece, or of an optimizer state of it, that are here."""
        return tensor.detach()

    # The step ----------------------------------------------------------------------------------------------------

    def forward(self, micro_batch: MicroBatch) -> Any:
        return self.module(**micro_batch)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, gradients are added up on this rank only. Wraps forward as well as backward."""
        before, self.synchronizes_gradients = self.synchronizes_gradients, False
        try:
            yield
        finally:
            self.synchronizes_gradients = before

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which forward runs, for training and evaluation alike."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16")

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run forward and backward of one optimizer step's micro-batches. `step` then runs the optimizer.

        Ranks may hold different numbers of samples and of micro-batches. A rank that holds fewer than another runs its
        latest micro-batch again with weight 0, so that it takes part in every collective.

        Args:
            micro_batches: For each, the keyword arguments of the module. Dimension 0 of the first tensor is the sample.

        Returns:
            The mean loss over all samples of the global batch: a detached fp32 scalar, the same on every rank.
            Each trainable parameter's gradient is the gradient of that mean, or None if no rank used the parameter.

        Raises:
            NonFiniteError: On every rank, when any rank's loss or gradient is NaN or infinite, in this step or, on
                CUDA, in the one before. `step` has not updated any parameter with it.
            UnsupportedError: On every rank, when the global batch is empty, or a rank never had a sample.
        """
        micro_batches = with_samples(micro_batches)
        try:
            verdict, _ = self._attempt(micro_batches)
            if self._latest_step is not None:
                self.require_finite()
            self._latest_step = verdict, micro_batches
            if verdict.is_here:
                self.require_finite()
        except BaseException:
            self.abandon_step()
            raise
        return verdict.loss

    def require_finite(self) -> None:
        """Wait until the device has done the latest step whose outcome is not known, and look at it. Collective.

        Raises:
            NonFiniteError: on every rank, if its loss or a gradient is NaN or infinite on any. There are no gradients
                then.
        """
        if self._latest_step is None:
            return
        (verdict, micro_batches), self._latest_step = self._latest_step, None
        what = verdict.nonfinite
        if what is None:
            return
        if what == "the loss":
            culprits = (~self._agreement.all_gather(verdict.own_loss).isfinite()).nonzero().flatten().tolist()
        else:
            culprits = self._find_culprits(micro_batches)
        self.zero_grad()
        raise nonfinite_error(what, verdict.step, culprits, self.options.overlap_optimizer)

    def _find_culprits(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """The ranks that make a gradient that is not finite from these micro-batches. The sum over ranks does not say.

        So the step is run again, and each gradient inspected. A strategy may reduce every micro-batch, which spreads a
        NaN: the ranks that have it first are to blame.
        """
        self.zero_grad()
        self.watch.inspects = True
        try:
            _, result = self._attempt(micro_batches)
        finally:
            self.watch.inspects = False
        bad = result.bad_rounds[result.bad_rounds >= 0]
        return (result.bad_rounds == bad.min()).nonzero().flatten().tolist() if len(bad) else []

    def announce(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Tell the other ranks what the next `forward_backward` will be given, so that it need not wait for this.

        Optional; between `forward_backward` and `step`, on all ranks or on none.

        Args:
            micro_batches: Those of the next step.
        """
        self._announced = self._begin_counts(with_samples(micro_batches))

    def _begin_counts(self, micro_batches: Sequence[MicroBatch]) -> Pending:
        lacks_any = self._latest is None and not micro_batches
        return self._agreement.begin_counts(sum(map(sample_count, micro_batches)), len(micro_batches), lacks_any)

    def _attempt(self, micro_batches: Sequence[MicroBatch]) -> tuple[Verdict, StepResult]:
        """Forward and backward of a whole step on micro-batches that hold samples, and how it went on all ranks."""
        counts, self._announced = self._announced or self._begin_counts(micro_batches), None
        self._latest = micro_batches[-1] if micro_batches else self._latest
        self.watch.begin_step()
        self.before_step()
        global_batch: GlobalBatch | None = None
        losses: list[Tensor] = []
        for index in itertools.count():
            if index + 1 >= len(micro_batches) or self.communicates_in_forward:
                # This may be the last micro-batch of all ranks: from here on the number of rounds must be known.
                global_batch = global_batch or self._agreement.counts(counts, self.optimizer_steps)
            is_last = global_batch is not None and index + 1 == global_batch.rounds
            batch = micro_batches[index] if index < len(micro_batches) else self._latest
            assert batch is not None
            with nullcontext() if is_last else self.no_sync():
                with phase("forward"), self.autocast():
                    loss = self.forward(batch).loss
                global_batch = global_batch or self._agreement.counts(counts, self.optimizer_steps)
                weight = sample_count(batch) / global_batch.samples if index < len(micro_batches) else 0.0
                with phase("backward"):
                    self.watch.begin_round()
                    self.before_backward()
                    (loss * (weight * self.data_parallel_size if self.averages_over_ranks else weight)).backward()
                self.after_backward()
            if weight:
                losses.append(loss.detach().double() * weight)
            if is_last:
                break
        with phase("gradient_sync"):
            self.finish_gradient_synchronization()
        loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=self.device)
        results = self._agreement.begin_results(self.watch.first_nonfinite_round, self.watch.received())
        verdict = self._verdict = Verdict(loss, self.norm_of_share(), self.optimizer_steps, self.process_group)
        result = self._agreement.results(results)
        self.drop_gradients([p for p, used in zip(self.trainable.values(), result.used, strict=True) if not used])
        return verdict, result

    def step(self) -> None:
        """Update the parameters, unless the loss or a gradient is not finite."""
        update_unless(self._verdict.found_inf, self.updating_optimizer, self.update)
        self.optimizer_steps += 1

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
        return expected_state_bytes(size, self.data_parallel_size, self.shards)

    def expected_traffic(self, micro_batches: int = 1, clips: bool = False) -> list[Collective]:
        """The collectives that one rank issues in one optimizer step of `micro_batches` micro-batches a rank.

        Args:
            clips: Whether `clip_grad_norm_` is called in the step.
        """
        size = self.data_parallel_size
        row_bytes = COUNTS_ROW_BYTES + RESULTS_ROW_BYTES + RECEIVED_BYTES * len(self.trainable)
        exchanges = Collective("all_gather", 2, row_bytes * size, size, "bookkeeping")
        verdict = Collective("all_reduce", 1, VERDICT_BYTES, size, "bookkeeping")
        clipping = self.expected_clipping_traffic() if clips else []
        return [*self.expected_gradient_traffic(micro_batches), exchanges, verdict, *clipping]


def with_samples(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Those micro-batches that are not empty."""
    return [batch for batch in micro_batches if sample_count(batch)]


def sample_count(micro_batch: MicroBatch) -> int:
    """Samples in a micro-batch: dimension 0 of its first tensor."""
    return next(iter(micro_batch.values())).shape[0]
