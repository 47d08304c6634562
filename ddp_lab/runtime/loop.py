"""The training loop and the evaluation. They are the same for every strategy and know none of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import tee, zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.runtime.data.batches import evaluation_batches, to_device
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.watch.phases import begin_step, host_time, phase, waiting
from ddp_lab.strategy.batches import StepData, sample_count
from ddp_lab.strategy.replicated import broadcast_from_rank0
from ddp_lab.strategy.strategy import Strategy
from ddp_lab.strategy.verdict import Verdict

PHASES = ("forward", "backward", "gradient_sync", "optimizer")
"""The parts of an optimizer step, as a profile names them."""
MOST_NATS = 700
"""The perplexity of a larger loss is no finite number."""


class StepFollower:
    """What follows the loop: the window profiler, or the memory recorder. This one does nothing."""

    @property
    def slows_this_step(self) -> bool:
        """Whether the follower slows the current step down, so that the step's time is not recorded."""
        return False

    def step(self) -> None:
        """An optimizer step is done."""


NOBODY = StepFollower()


@dataclass
class TrainingResult:
    """What a run measured: lists with one value for each optimizer step.

    Attributes:
        loss: Mean over the global batch; None if it was not finite in a step that was skipped.
        step_time_s: Wall time in seconds, with the loading of the batch; None for a step that a follower slowed down.
        samples: Samples in the global batch.
        tokens: Tokens in the global batch; 0 if it holds none. This and what follows is None before the run resumed.
        rank_counts: Samples and tokens of this rank.
        host: What this rank's training thread waited for in the step (`phases.host_time`), in seconds, and when that
            `began`, in seconds since the epoch.
        lr: Learning rate of the first parameter group.
        grad_norm: 2-norm of the gradient over the whole model, before clipping; None if the step was skipped.
        loss_scale: Of fp16, else None.
        expert_load: For each layer, how many tokens chose each expert; None without experts over ranks.
        skipped: Whether the step changed nothing, because it overflowed in fp16.
    """

    loss: list[float | None] = field(default_factory=list)
    step_time_s: list[float | None] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    rank_counts: list[tuple[int, int] | None] = field(default_factory=list)
    host: list[dict[str, float] | None] = field(default_factory=list)
    lr: list[float | None] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    loss_scale: list[float | None] = field(default_factory=list)
    expert_load: list[list[list[int]] | None] = field(default_factory=list)
    skipped: list[bool | None] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    @classmethod
    def resumed(cls, loss: list[float | None], samples: list[int]) -> "TrainingResult":
        """What a checkpoint knows of the steps before it."""
        lists: dict[str, Any] = {column.name: [None] * len(loss) for column in fields(cls)}
        return cls(**lists | {"loss": loss, "samples": samples})

    def add(self, samples: int, **measured: Any) -> None:
        """A step: `samples` last, which makes it whole."""
        for name, value in measured.items():
            getattr(self, name).append(value)
        self.samples.append(samples)

    def whole_steps(self) -> "TrainingResult":
        """Without a step of which only a part is recorded yet, as another thread may see it."""
        steps = len(self.samples)
        return TrainingResult(**{column.name: getattr(self, column.name)[:steps] for column in fields(self)})


def train(
    strategy: Strategy,
    steps: Iterable[StepData],
    profiler: StepFollower = NOBODY,
    clip_grad_norm: float | None = None,
    on_step: Callable[[TrainingResult], None] = lambda result: None,
    *,
    earlier: TrainingResult | None = None,
    is_due: Callable[[int], bool] = lambda step: False,
    learning_rate: Callable[[int], float] | None = None,
) -> TrainingResult:
    """Train over `steps`, or until the ranks have agreed to stop (`Strategy.stops_after`).

    A loss and a norm are read a step after they were made, so that the host need not wait for the device. So `on_step`
    gets the result of a step before the next step, or after it, and right after a step, counted from 1, that `is_due`,
    to save the model as it is then. `earlier`, up to the checkpoint that the strategy resumes from, is continued.
    `learning_rate`: of each step, counted from 0; default: as the optimizer has it.
    """
    result = earlier or TrainingResult()
    unread: deque[tuple[Verdict, dict[str, Any]]] = deque()
    groups = strategy.optimizer.param_groups

    def read(unread_steps: int) -> None:
        """Read verdicts until those of `unread_steps` steps remain."""
        while len(unread) > unread_steps:
            verdict, step = unread.popleft()
            loss, norm = (value if math.isfinite(value) else None for value in verdict.loss_and_norm)
            scale = verdict.loss_scale
            step |= {"loss_scale": scale, "skipped": scale is not None and verdict.skipped}
            step["expert_load"] = verdict.expert_load
            result.add(loss=loss, grad_norm=norm, tokens=verdict.tokens, **step)
            on_step(result)

    strategy.module.train()
    before, start = host_time(), time.perf_counter()
    begin_step(strategy.optimizer_steps)
    for data, following in with_following(loaded(steps)):
        # forward, backward and update
        if learning_rate is not None:
            for group in groups:
                group["lr"] = learning_rate(strategy.optimizer_steps)
        strategy.zero_grad()
        strategy.forward_backward(data.micro_batches, data.weights, data.tokens, following)
        verdict = strategy.verdict
        is_last = following is None or strategy.steps.stops_after == strategy.optimizer_steps + 1
        with phase("optimizer"):
            if clip_grad_norm is not None:
                strategy.clip_grad_norm_(clip_grad_norm)
            strategy.step(wait=False)
        # the columns of this step, and verdicts of earlier ones
        step_time_s = None if profiler.slows_this_step else time.perf_counter() - start
        columns = {"samples": data.samples, "step_time_s": step_time_s, "lr": groups[0]["lr"]}
        columns["rank_counts"] = sum(map(sample_count, data.micro_batches)), data.tokens
        columns["host"] = {name: until - before.get(name, 0.0) for name, until in host_time().items()}
        columns["host"]["began"] = before["now"]
        unread.append((verdict, columns))
        profiler.step()
        if is_due(strategy.optimizer_steps):
            strategy.require_finite()
            read(unread_steps=0)
        else:
            read(unread_steps=0 if verdict.is_here else 1)
        if is_last:
            break
        before, start = host_time(), time.perf_counter()
        begin_step(strategy.optimizer_steps)
    strategy.require_finite()
    read(unread_steps=0)
    return result


def loaded(steps: Iterable[StepData]) -> Iterator[StepData]:
    """`steps`; the time that each takes to come counts as loading of data."""
    coming = iter(steps)
    while True:
        with phase("loading data", in_profile=False), waiting("data"):
            step = next(coming, None)
        if step is None:
            return
        yield step


def with_following(steps: Iterable[StepData]) -> Iterator[tuple[StepData, StepData | None]]:
    """Each step and the one after it; None after the last."""
    current, following = tee(steps)
    next(following, None)
    return zip_longest(current, following)


@torch.no_grad()
def evaluate(strategy: Strategy, workload: Workload, batch_size: int, device: torch.device) -> dict[str, Any]:
    """Loss and accuracy on the held-out samples, each of which counts exactly once. Collective.

    Buffers are rank 0's on every rank from then on, as in the model that is saved.

    Returns:
        `loss` (mean over what `workload.count` counts), `accuracy` (a fraction; None if the workload does not
        classify), `samples`; of language models `perplexity` and `tokens`, over which the loss is a mean, else None.
    """
    strategy.module.eval()
    broadcast_from_rank0(strategy.buffers(), strategy.process_group)
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
    totals /= strategy.groups.context_size  # of which each rank has counted each sample
    loss, correct, samples, terms = totals.tolist()
    return {
        "accuracy": correct / samples if workload.classifies else None,
        "loss": loss / terms,
        "perplexity": math.exp(min(loss / terms, MOST_NATS)) if workload.language else None,
        "samples": round(samples),
        "tokens": round(terms) if workload.language else None,
    }
