"""The host reads losses and finiteness a step late, as on CUDA. Here CPU tensors pretend not to be there yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist

from ddp_lab.runtime.errors import NonFiniteError
from ddp_lab.runtime.loop import train
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.strategy import Strategy
from ddp_lab.strategy.verdict import ReadLater
from tests.models import make_batch
from tests.parity import FAMILIES, HUGE, built, message_of
from tests.ranks import RankPool
from tests.strategies.test_traps import poison
from tests.tables import each_row

STEPS = 5


class NotHereYet(ReadLater):
    """Says that its values are still on their way, and notes when it was made and when the host reads it."""

    now = 0
    ages: ClassVar[list[int]] = []

    def __init__(self, tensor: torch.Tensor):
        super().__init__(tensor.clone())
        self.is_here, self._created = False, NotHereYet.now

    def tensor(self) -> torch.Tensor:
        NotHereYet.ages.append(NotHereYet.now - self._created)
        return self._host


@contextmanager
def reads_late(strategy: Strategy) -> Iterator[list[int]]:
    """Within this context. Yields how many optimizer steps old each value is when the host reads it."""
    NotHereYet.now, NotHereYet.ages = 0, []

    def count(*_):
        NotHereYet.now += 1

    with (
        mock.patch("ddp_lab.strategy.verdict.ReadLater", NotHereYet),
        mock.patch.object(strategy, "before_step", lambda before=strategy.before_step: (count(), before())),
    ):
        yield NotHereYet.ages


def step_of(index: int, overflows: bool = False) -> StepData:
    batch = make_batch("plain", 2, 10 * index + dist.get_rank())
    if overflows and dist.get_rank() == 1:
        batch["y"][0] = HUGE
    return StepData(4, [batch])


def train_late_and_in_time(choice: str, options: dict[str, Any]):
    """Losses, scales and parameters are the same. When late, the host reads nothing of the current step."""
    ends = []
    for is_late in (True, False):
        strategy = built(choice, "plain", "fused", **options)
        strategy.module.train()
        progress: list[tuple[int, int]] = []

        def on_step(result, strategy: Strategy = strategy, progress: list[tuple[int, int]] = progress):
            progress.append((len(result.loss), strategy.optimizer_steps))

        steps = [step_of(index, bool(options) and index == 2) for index in range(STEPS)]
        if is_late:
            with reads_late(strategy) as ages:
                result = train(strategy, steps, clip_grad_norm=1.0, on_step=on_step, is_due=lambda step: step == 3)
            in_time = {(3, 3), (STEPS, STEPS)}
            assert set(progress) == {(1, 2), (2, 3), (4, 5)} | in_time
            assert ages.count(0) <= (6 if options else 4) * len(in_time), (
                "only what a checkpoint or the end of training must know at once"
            )
        else:
            result = train(strategy, steps, clip_grad_norm=1.0, on_step=on_step)
            assert progress == [(step, step) for step in range(1, STEPS + 1)]
        ends.append(((result.loss, result.loss_scale, result.skipped), strategy.full_state_dict()))
    (numbers, state), (usual_numbers, usual_state) = ends
    assert numbers == usual_numbers and (not options or numbers[2][2])
    assert all(torch.equal(state[name], tensor) for name, tensor in usual_state.items())


@each_row("choice", FAMILIES)
def test_reading_late_changes_nothing(ranks: RankPool, choice):
    for options in ({}, {"precision": "fp16", "loss_scale": 2.0**10, "growth_interval": 2}):
        ranks.run(2, train_late_and_in_time, choice, options)


def diverge_late(choice: str, cause: str, optimizer: str) -> tuple[str, bool]:
    """The error that step 2 raises for step 1, and whether parameters are those from before step 1."""
    strategy = built(choice, "plain", optimizer)
    train(strategy, map(step_of, range(1)))
    before = strategy.full_state_dict()
    steps = [step_of(index) for index in (1, 2)]
    if dist.get_rank() == 1:
        if cause == "the loss":
            steps[0][1][0]["y"][0] = float("inf")
        else:
            poison(strategy.module, steps[0][1][0])
    with reads_late(strategy):
        strategy.zero_grad()
        strategy.forward_backward(steps[0][1])
        strategy.step()
        strategy.zero_grad()
        message = message_of(NonFiniteError, strategy.forward_backward, steps[1][1])
    after = strategy.full_state_dict()
    return message, all(torch.equal(before[name], tensor) for name, tensor in after.items())


@each_row("choice", FAMILIES[::2])
def test_an_error_found_late_names_its_step_and_has_changed_nothing(ranks: RankPool, choice):
    for cause, optimizer in (("the loss", "fused"), ("a gradient", "sgd")):
        for message, unchanged in ranks.run(2, diverge_late, choice, cause, optimizer):
            assert f"step 1: {cause} is not finite on rank 1; no parameter is updated yet" in message
            assert unchanged
