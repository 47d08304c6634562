"""The training loop and the evaluation: the same for every strategy, of which they know nothing."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import tee, zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist

from training.data.sampling import evaluation_batches, to_device
from training.data.workload import Workload
from training.strategy import MicroBatch, Strategy
from training.watch.phases import begin_step, phase

PHASES = ("forward", "backward", "gradient_sync", "optimizer")
"""Names under which a profile shows the parts of an optimizer step."""


Step = tuple[int, Sequence[MicroBatch]]
"""The samples in the global batch, and this rank's micro-batches."""


class StepFollower(Protocol):
    """What watches the loop: the window profiler, or the memory recorder."""

    @property
    def bends_this_step(self) -> bool:
        """Whether watching makes the current step slower, so that its time says little."""

    def step(self) -> None:
        """An optimizer step is done."""


class Unwatched:
    """Follows the training loop and looks away."""

    bends_this_step = False

    def step(self) -> None:
        pass


@dataclass
class TrainingResult:
    """What a run measured, a value each optimizer step.

    Attributes:
        loss: Mean over the global batch.
        step_time_s: Wall time in seconds, loading of the batch included; None where the profiler ran.
        samples: Samples in the global batch.
    """

    loss: list[float] = field(default_factory=list)
    step_time_s: list[float | None] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def whole_steps(self) -> "TrainingResult":
        """Without a step of which only a part is written down, as another thread may see it."""
        whole = len(self.samples)
        return TrainingResult(self.loss[:whole], self.step_time_s[:whole], self.samples[:whole])


def train(
    strategy: Strategy,
    steps: Iterable[Step],
    profiler: StepFollower,
    clip_grad_norm: float | None,
    on_step: Callable[[TrainingResult], None],
    earlier: TrainingResult | None = None,
) -> TrainingResult:
    """Train over `steps`: for each, the samples in the global batch and this rank's micro-batches.

    Args:
        earlier: What was measured before a checkpoint that the strategy goes on from; to be continued.
    """
    result = earlier or TrainingResult()
    strategy.module.train()
    start = time.perf_counter()
    for (samples, micro_batches), following in with_following(steps):
        begin_step(strategy.optimizer_steps)
        strategy.zero_grad()
        loss = strategy.forward_backward(micro_batches)
        if following is not None:
            strategy.announce(following[1])
        with phase("optimizer"):
            if clip_grad_norm is not None:
                strategy.clip_grad_norm_(clip_grad_norm)
            strategy.step()
        result.loss.append(loss.item())
        result.step_time_s.append(None if profiler.bends_this_step else time.perf_counter() - start)
        result.samples.append(samples)
        profiler.step()
        on_step(result)
        start = time.perf_counter()
    return result


def with_following(steps: Iterable[Step]) -> Iterator[tuple[Step, Step | None]]:
    """Each step and the one after it; None after the last."""
    here, ahead = tee(steps)
    next(ahead, None)
    return zip_longest(here, ahead)


@torch.no_grad()
def evaluate(strategy: Strategy, workload: Workload, batch_size: int, device: torch.device) -> dict[str, Any]:
    """Loss and accuracy over every held-out sample exactly once. Collective.

    Returns:
        `loss` (mean over samples), `accuracy` (a fraction; None where the workload does not classify), `samples`.
    """
    strategy.module.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    rank, size = strategy.data_parallel_rank, strategy.data_parallel_size
    for indices, counted in evaluation_batches(len(workload.evaluation), rank, size, batch_size):
        batch = to_device(workload.collate([workload.evaluation[index] for index in indices]), device)
        with strategy.autocast():
            output = strategy.forward(batch)
        if counted:
            correct = (output.logits.argmax(-1) == batch["labels"]).sum() if workload.classifies else 0
            totals += torch.tensor([output.loss * counted, correct, counted], dtype=torch.float64, device=device)
    dist.all_reduce(totals, group=strategy.process_group)
    loss, correct, samples = totals.tolist()
    return {
        "accuracy": correct / samples if workload.classifies else None,
        "loss": loss / samples,
        "samples": round(samples),
    }
