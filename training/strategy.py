"""The one interface of all strategies, and the optimizer step that they share.

A step has three parts. First the ranks tell each other how many samples and micro-batches each of them holds, so that
every loss can be weighted by its share of the global batch. Then come forward and backward of each micro-batch, with
whatever communication the strategy adds to them. Last, the ranks exchange a few numbers each: their part of the loss,
a checksum that shows a gradient that is not finite, and which parameters got a gradient at all. The two exchanges are
all-gathers of a few bytes, the same for every strategy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from training.config import StrategyOptions
from training.consistency import require_same_parameters, require_supported_parameters
from training.gradient_watch import GradientWatch
from training.memory import storage_bytes
from training.traffic import Collective

MicroBatch = Mapping[str, Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class NonFiniteError(RuntimeError):
    """The loss or a gradient is NaN or infinite; raised on every rank, before the optimizer step."""


class Strategy(ABC):
    """One way to train a module on several ranks.

    Args:
        module: Called as `module(**micro_batch)`; answers with an object whose `.loss` is the mean over the samples
            of the micro-batch (a scalar).
        make_optimizer: Builds the optimizer from what `torch.optim` takes: tensors, or group dicts.
        options: What the strategy may be told (`training.config.StrategyOptions`).
        process_group: The ranks that share the work. Default: all.

    Raises:
        ValueError: The module has no trainable parameter, has one with sparse or complex gradients, or is not the
            same on every rank.
    """

    averages_over_ranks = False
    """Whether gradients are averaged over ranks (as PyTorch's own do) rather than summed, which saves a division."""

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
        self.process_group = group
        self.optimizer_steps = 0
        self.synchronizes_gradients = True
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        require_supported_parameters(module)
        self._exchange_device = _exchange_device(group, module)
        require_same_parameters(module, group, self._exchange_device)
        self._latest: MicroBatch | None = None
        self.watch = GradientWatch(self.trainable.values())
        self.prepare()
        self.optimizer = self.build_optimizer(make_optimizer)

    # What a strategy defines -------------------------------------------------------------------------------------

    @abstractmethod
    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """Build the optimizer over those parameters that this rank updates."""

    @abstractmethod
    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        """What one optimizer step of `micro_batches` micro-batches sends, beside the two exchanges."""

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

    def prepare(self) -> None:
        """Runs once, before the optimizer is built: make buffers, add hooks."""

    def before_step(self) -> None:
        """Runs before a step's first forward pass."""

    def after_backward(self) -> None:
        """Runs after the backward pass of each micro-batch."""

    def finish_gradient_synchronization(self) -> None:
        """Wait for the communication that is still in flight."""

    def gradient_tensors(self) -> Iterable[Tensor]:
        """Tensors whose storage holds gradients at this moment."""
        return (p.grad for p in self.module.parameters() if p.grad is not None)

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
        device_type = next(iter(self.trainable.values())).device.type
        return torch.autocast(device_type, torch.bfloat16, enabled=self.options.precision == "bf16")

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run one optimizer step's worth of micro-batches, up to (not with) the optimizer.

        Ranks may hold different numbers of samples and of micro-batches. A rank that holds fewer than another, or
        none, runs its latest micro-batch again with weight 0 so that it takes part in every collective.

        Args:
            micro_batches: Keyword arguments of the module, a dict each; dimension 0 of the first tensor is the sample.

        Returns:
            The mean loss over all samples of the global batch: a detached fp32 scalar, the same on every rank.
            Every trainable parameter's gradient is then the gradient of that mean; one that no rank used has none.

        Raises:
            NonFiniteError: On every rank, when any rank's loss or gradient is NaN or infinite.
            ValueError: On every rank, when the global batch is empty, or a rank without samples never had any.
        """
        micro_batches = [batch for batch in micro_batches if sample_count(batch)]
        self._latest = micro_batches[-1] if micro_batches else self._latest
        total_samples, rounds = self._agree_on_counts(micro_batches)
        self.watch.reset()
        self.before_step()
        losses = []
        for index in range(rounds):
            is_last = index == rounds - 1
            has_samples = index < len(micro_batches)
            batch = micro_batches[index] if has_samples else self._latest
            weight = sample_count(batch) / total_samples if has_samples else 0.0
            with nullcontext() if is_last else self.no_sync():
                with record_function("forward"), self.autocast():
                    loss = self.forward(batch).loss
                scale = weight * self.data_parallel_size if self.averages_over_ranks else weight
                with record_function("backward"):
                    self.watch.begin_round(self.synchronizes_gradients)
                    (loss * scale).backward()
                self.after_backward()
            if has_samples:
                losses.append(loss.detach().double() * weight)
        with record_function("gradient_sync"):
            self.finish_gradient_synchronization()
        return self._agree_on_result(losses)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer_steps += 1

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
        state = (value for entry in self.optimizer.state.values() for value in entry.values())
        return {
            "parameters": storage_bytes(self.module.parameters()),
            "gradients": storage_bytes(self.gradient_tensors()),
            "optimizer_state": storage_bytes(value for value in state if isinstance(value, Tensor)),
            "buffers": storage_bytes(self.module.buffers()),
        }

    def expected_traffic(self, micro_batches: int = 1) -> list[Collective]:
        """The collectives that one rank issues in one optimizer step of `micro_batches` micro-batches a rank."""
        size = self.data_parallel_size
        row_bytes = 8 * (3 + 2 + len(self.trainable))  # the rows of the two exchanges below, in fp64
        exchanges = Collective("all_gather", 2, row_bytes * size, size, "bookkeeping")
        return [*self.expected_gradient_traffic(micro_batches), exchanges]

    # The two exchanges -------------------------------------------------------------------------------------------

    def _exchange(self, row: Sequence[float]) -> Tensor:
        """Every rank's `row`, as a CPU tensor (ranks, len(row)) in fp64. All-gather, since MAX can lose a NaN."""
        mine = torch.tensor(row, dtype=torch.float64, device=self._exchange_device)
        table = mine.new_empty(self.data_parallel_size * len(row))
        dist.all_gather_into_tensor(table, mine, group=self.process_group)
        return table.view(self.data_parallel_size, len(row)).cpu()

    def _agree_on_counts(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
        samples = sum(map(sample_count, micro_batches))
        table = self._exchange([samples, len(micro_batches), self._latest is None])
        if table[:, 2].any() or not table[:, 0].any():
            ranks = table[:, 1].eq(0).nonzero().flatten().tolist()
            raise ValueError(f"step {self.optimizer_steps}: no samples on ranks {ranks}; give each rank at least one "
                             "in the first step, and at least one rank in every later step")  # fmt: skip
        return int(table[:, 0].sum()), int(table[:, 1].max())

    def _agree_on_result(self, losses: Sequence[Tensor]) -> Tensor:
        local_loss = torch.stack(losses).sum().item() if losses else 0.0
        table = self._exchange([local_loss, self.watch.first_nonfinite_round(), *self.watch.received()])
        self._require_finite(table[:, 0], table[:, 1])
        for parameter, users in zip(self.trainable.values(), table[:, 2:].sum(0).tolist(), strict=True):
            if not users:
                parameter.grad = None
        return table[:, 0].sum().to(next(iter(self.trainable.values())).device, torch.float32)

    def _require_finite(self, losses: Tensor, rounds: Tensor) -> None:
        """Raise where a rank's loss, or a gradient of its own, is not finite. Both arguments: (ranks,)."""
        culprits, what = losses.isfinite().logical_not(), "the loss"
        if not culprits.any():
            # A strategy may reduce every micro-batch, which spreads a NaN: the ranks that had it first are to blame.
            first = rounds[rounds >= 0].min() if (rounds >= 0).any() else -2
            culprits, what = rounds == first, "a gradient"
        if culprits.any():
            ranks = ", ".join(map(str, culprits.nonzero().flatten().tolist()))
            raise NonFiniteError(f"step {self.optimizer_steps}: {what} is not finite on rank {ranks}; no rank has "
                                 "updated its parameters; a lower --lr or --clip-grad-norm may help")  # fmt: skip


def sample_count(micro_batch: MicroBatch) -> int:
    """Samples in a micro-batch: dimension 0 of its first tensor."""
    return next(iter(micro_batch.values())).shape[0]


def _exchange_device(group: dist.ProcessGroup, module: nn.Module) -> torch.device:
    """Where the exchanges run: on CPU where the group can, since that does not make the host wait for the device."""
    has_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if has_cpu else next(module.parameters()).device
