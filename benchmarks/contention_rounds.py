"""Measures what compute and collectives take from each other: steps of a small network alone, all-reduces alone, and
both at once, on all ranks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.data.synthetic import MLP
from training.profiling.stopwatch import Stopwatch

PAYLOADS = (64 * 2**10, 2**20, 16 * 2**20)
"""Bytes of an all-reduce."""
DEPTH, WIDTH, SAMPLES = 4, 512, 64
"""Of the network: 1 M parameters; steps of a few milliseconds, and no processor's nearest caches hold them."""
DRIFT_SAMPLES = 16 * SAMPLES
"""Of the same network where ranks compute for a while between two all-reduces."""
FEWEST = 3
"""All-reduces under way, and steps, that a measurement has at least."""


@dataclass(frozen=True)
class Round:
    """Seconds of a step, and of one of many all-reduces under way, each alone and while the other goes on; of an
    all-reduce that is waited for before the next; and of handing one over."""

    step_s: float
    all_reduce_s: float
    awaited_s: float
    hand_over_s: float
    step_beside_s: float
    all_reduce_beside_s: float

    @property
    def factors(self) -> tuple[float, float]:
        return self.step_beside_s / self.step_s, self.all_reduce_beside_s / self.all_reduce_s

    @property
    def together(self) -> float:
        return self.all_reduce_s / self.awaited_s


def measure_rounds(
    device: torch.device, payload_bytes: int = PAYLOADS[-1], seconds: float = 1.0, rounds: int = 5
) -> list[Round]:
    """Measure on all ranks of the default group; the mean over ranks. Collective.

    Args:
        payload_bytes: Of each all-reduce.
        seconds: How long each of the parts of a round takes, about; that of all-reduces one by one up to twice that.
    """
    model = MLP(DEPTH, WIDTH).to(device)
    step = training_step(model, SAMPLES, device)
    tensor = torch.ones(payload_bytes // 4, device=device)
    for _ in range(FEWEST):
        step()
        dist.all_reduce(tensor)
    counts = torch.tensor([seconds / timed(step, 1, device), seconds / timed_all_reduces(tensor, FEWEST, device)])
    dist.all_reduce(counts, dist.ReduceOp.MIN)
    steps, calls = (max(FEWEST, int(count)) for count in counts)
    answer = []
    for _ in range(rounds):
        step_s = timed(step, steps, device)
        all_reduce_s = timed_all_reduces(tensor, calls, device)
        awaited_s = timed(lambda: dist.all_reduce(tensor), calls, device)
        tensor.fill_(1.0)
        hand_over_s = timed_hand_overs(model, step, tensor, min(steps, 1 + calls // DEPTH))
        step_beside_s, all_reduce_beside_s = timed_together(step, tensor, calls, device)
        mine = torch.tensor(
            [step_s, all_reduce_s, awaited_s, hand_over_s, step_beside_s, all_reduce_beside_s], dtype=torch.float64
        )
        dist.all_reduce(mine)
        answer.append(Round(*(mine / dist.get_world_size()).tolist()))
    return answer


def measure_drift(device: torch.device, seconds: float = 1.0, rounds: int = 5) -> float:
    """How far ranks drift apart while they compute, as `planner.contracts.Contention.drift`: what a blocking all-reduce
    of a gradient that has just become ready takes beyond one of many in a row, over the square root of the seconds that
    the rank has computed since the one before. The median over rounds, at least 0. Collective; for CPUs.

    Args:
        seconds: How long a round takes, about.
    """
    model = MLP(DEPTH, WIDTH).to(device)
    step = training_step(model, DRIFT_SAMPLES, device)
    tensor = torch.ones(PAYLOADS[0] // 4, device=device)
    late_s: list[float] = []
    roots: list[float] = []
    level_s = alone_s = 0.0

    def block(_: torch.Tensor) -> None:
        nonlocal level_s
        began_s = time.perf_counter()
        dist.all_reduce(tensor)
        roots.append((began_s - level_s) ** 0.5)
        level_s = time.perf_counter()
        late_s.append(level_s - began_s - alone_s)

    step()
    count = torch.tensor(seconds / timed(step, 1, device))
    dist.all_reduce(count, dist.ReduceOp.MIN)
    steps, drifts = max(FEWEST, int(count)), torch.zeros(rounds, dtype=torch.float64)
    for number in range(rounds):
        alone_s = timed(lambda: dist.all_reduce(tensor), steps * DEPTH, device)
        hooks = [parameter.register_post_accumulate_grad_hook(block) for parameter in model.parameters()]
        dist.barrier()
        level_s = time.perf_counter()
        late_s.clear()
        roots.clear()
        for _ in range(steps):
            step()
        for hook in hooks:
            hook.remove()
        drifts[number] = sum(late_s) / sum(roots)
    dist.all_reduce(drifts)
    return max(0.0, float(drifts.median()) / dist.get_world_size())


def training_step(model: nn.Module, samples: int, device: torch.device) -> Callable[[], None]:
    """Forward, backward and optimizer of a small network, without communication."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.ones(samples, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch, batch).loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds of one of `count` steps that all ranks begin together."""
    dist.barrier()
    stopwatch = Stopwatch(device)
    begin = stopwatch.mark()
    for _ in range(count):
        step()
    return stopwatch.seconds_since_first([begin, stopwatch.mark()])[1] / count


def timed_all_reduces(tensor: torch.Tensor, count: int, device: torch.device) -> float:
    """Seconds of one of `count` all-reduces that are all under way."""
    dist.barrier()
    stopwatch = Stopwatch(device)
    begin = stopwatch.mark()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(count)]
    wait_for(works, tensor)
    return stopwatch.seconds_since_first([begin, stopwatch.mark()])[1] / count


def timed_hand_overs(model: nn.Module, step: Callable[[], None], tensor: torch.Tensor, steps: int) -> float:
    """Seconds until an all-reduce has been handed over, as strategies do: in backward, when a gradient is ready. Mean
    over all gradients of `steps` steps.
    """
    works: list[Any] = []
    seconds: list[float] = []

    def hand_over(_: torch.Tensor) -> None:
        began_s = time.perf_counter()
        works.append(dist.all_reduce(tensor, async_op=True))
        seconds.append(time.perf_counter() - began_s)

    dist.barrier()
    hooks = [parameter.register_post_accumulate_grad_hook(hand_over) for parameter in model.parameters()]
    for _ in range(steps):
        step()
    for hook in hooks:
        hook.remove()
    wait_for(works, tensor)
    return mean(seconds)


def wait_for(works: Sequence[Any], tensor: torch.Tensor) -> None:
    """Until all are done; their sums then make room for new ones."""
    for work in works:
        work.wait()
    tensor.fill_(1.0)


def timed_together(
    step: Callable[[], None], tensor: torch.Tensor, calls: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a step, and of an all-reduce, while as many all-reduces are under way and steps follow one another."""
    dist.barrier()
    stopwatch = Stopwatch(device)
    begin = stopwatch.mark()
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for _ in range(calls)]
    issued = stopwatch.mark()
    steps, done, issued_s, elapsed_s = 0, 0, 0.0, 0.0
    while done < calls:
        step()
        _, issued_s, elapsed_s = stopwatch.seconds_since_first([begin, issued, stopwatch.mark()])
        steps += 1
        while done < calls and works[done].is_completed():  # one that is done is not asked again: thousands take long
            done += 1
    wait_for(works, tensor)
    return (elapsed_s - issued_s) / steps, elapsed_s / calls


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians, and the spread of the factors, as in `planner.contention.Measured`."""
    compute, communication = zip(*(each.factors for each in rounds), strict=True)
    spreads = [50 * (max(values) - min(values)) / median(values) for values in (compute, communication)]
    return {
        "compute": max(1.0, median(compute)),
        "communication": max(1.0, median(communication)),
        "together": median(each.together for each in rounds),
        "step_s": median(each.step_s for each in rounds),
        "all_reduce_s": median(each.all_reduce_s for each in rounds),
        "hand_over_s": median(each.hand_over_s for each in rounds),
        "rounds": len(rounds),
        "spread_pct": max(spreads),
    }
