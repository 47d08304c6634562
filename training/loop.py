"""The training loop and the evaluation. They are the same for every strategy and know none of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import tee, zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist

from training.communication.verdict import ReadLater
from training.data.copies import to_device
from training.data.sampling import evaluation_batches
from training.data.workload import Workload
from training.step import StepData
from training.strategy import Strategy
from training.watch.phases import begin_step, phase

PHASES = ("forward", "backward", "gradient_sync", "optimizer")
"""The parts of an optimizer step, as a profile names them."""
MOST_NATS = 700
"""The perplexity of a larger loss is no finite number."""


class StepFollower(Protocol):
    """What follows the loop: the window profiler, or the memory recorder."""

    @property
    def slows_this_step(self) -> bool:
        """Whether the follower slows the current step down, so that the step's time is not recorded."""

    def step(self) -> None:
        """An optimizer step is done."""


class Unwatched:
    """Follows the training loop and does nothing."""

    slows_this_step = False

    def step(self) -> None:
        pass


@dataclass
class TrainingResult:
    """What a run measured: lists with one value for each optimizer step.

    Attributes:
        loss: Mean over the global batch.
        step_time_s: Wall time in seconds, with the loading of the batch; None for a step that a follower slowed down.
        samples: Samples in the global batch.
    """

    loss: list[float] = field(default_factory=list)
    step_time_s: list[float | None] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def whole_steps(self) -> "TrainingResult":
        """Without a step of which only a part is recorded yet, as another thread may see it."""
        whole = len(self.samples)
        return TrainingResult(self.loss[:whole], self.step_time_s[:whole], self.samples[:whole])


def train(
    strategy: Strategy,
    steps: Iterable[StepData],
    profiler: StepFollower,
    clip_grad_norm: float | None,
    on_step: Callable[[TrainingResult], None],
    earlier: TrainingResult | None = None,
    is_due: Callable[[int], bool] = lambda step: False,
) -> TrainingResult:
    """Train over `steps`, or until the ranks have agreed to stop (`Strategy.stops_after`).

    A loss is read a step after it was made, so that the host need not wait for the device.

    Args:
        clip_grad_norm: Largest norm of all gradients together; None to leave them as they are.
        on_step: Called with the result of each step once its loss is known: before the next step, or after it.
        earlier: The result up to the checkpoint that the strategy resumes from. It is continued.
        is_due: Whether `on_step` must be called right after this step, counted from 1, to save the model as it is then.
    """
    result = earlier or TrainingResult()
    unread: deque[tuple[ReadLater, float | None, int]] = deque()

    def read(unread_steps: int) -> None:
        """Read losses until those of so many steps are left."""
        while len(unread) > unread_steps:
            loss, step_time_s, samples = unread.popleft()
            result.loss.append(loss.tensor().item())
            result.step_time_s.append(step_time_s)
            result.samples.append(samples)
            on_step(result)

    strategy.module.train()
    start = time.perf_counter()
    for data, following in with_following(steps):
        begin_step(strategy.optimizer_steps)
        strategy.zero_grad()
        loss = ReadLater(strategy.forward_backward(data.micro_batches, data.weights))
        is_last = following is None or strategy.stops_after == strategy.optimizer_steps + 1
        if following is not None and not is_last:
            strategy.announce(following.micro_batches, following.weights)
        with phase("optimizer"):
            if clip_grad_norm is not None:
                strategy.clip_grad_norm_(clip_grad_norm)
            strategy.step(wait=False)
        unread.append((loss, None if profiler.slows_this_step else time.perf_counter() - start, data.samples))
        profiler.step()
        if is_due(strategy.optimizer_steps):
            strategy.require_finite()
            read(unread_steps=0)
        else:
            read(unread_steps=0 if loss.is_here else 1)
        if is_last:
            break
        start = time.perf_counter()
    strategy.require_finite()
    read(unread_steps=0)
    return result


def with_following(steps: Iterable[StepData]) -> Iterator[tuple[StepData, StepData | None]]:
    """Each step and the one after it; None after the last."""
    here, ahead = tee(steps)
    next(ahead, None)
    return zip_longest(here, ahead)


@torch.no_grad()
def evaluate(strategy: Strategy, workload: Workload, batch_size: int, device: torch.device) -> dict[str, Any]:
    """Loss and accuracy on the held-out samples, each of which counts exactly once. Collective.

    Returns:
        `loss` (mean over what `workload.count` counts), `accuracy` (a fraction; None if the workload does not
        classify), `samples`; of language models `perplexity` and `tokens`, over which the loss is a mean, else None.
    """
    strategy.module.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    rank, size = strategy.data_parallel_rank, strategy.data_parallel_size
    for indices, counted in evaluation_batches(len(workload.evaluation), rank, size, batch_size):
        on_host = workload.collate([workload.evaluation[index] for index in indices])
        batch = to_device(on_host, device)
        output = strategy(**batch)
        if counted and (terms := workload.count(on_host)):
            totals += torch.tensor([0, 0, counted, terms], device=device)
            totals[0] += output.loss * terms
            if workload.classifies:
                totals[1] += (output.logits.argmax(-1) == batch["labels"]).sum()
    dist.all_reduce(totals, group=strategy.process_group)
    loss, correct, samples, terms = totals.tolist()
    return {
        "accuracy": correct / samples if workload.classifies else None,
        "loss": loss / terms,
        "perplexity": math.exp(min(loss / terms, MOST_NATS)) if workload.language else None,
        "samples": round(samples),
        "tokens": round(terms) if workload.language else None,
    }
