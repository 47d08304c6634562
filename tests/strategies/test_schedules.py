"""Scheduled learning rates reach the optimizer of every choice, as `LambdaLR`'s do in one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_lab.runtime.build import learning_rates
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.loop import train
from ddp_lab.strategy.batches import StepData
from tests.checkpoints import fingerprints, train_to
from tests.models import build
from tests.parity import FAMILIES, OPTIMIZERS, assert_close, global_batch, joined, load, options_of
from tests.ranks import RankPool
from tests.tables import each_row

STEPS, LR = 6, 1e-2
SPLIT = [[2, 2]] * 2
CONFIG = RunConfig(lr=LR, schedule="cosine", warmup_steps=2)


def train_scheduled(choice: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after the last step, and the rates that the run records."""
    strategy = load(choice)(build("plain"), OPTIMIZERS["adam"], options_of(choice))
    steps = [StepData(8, global_batch("plain", SPLIT, step)[dist.get_rank()]) for step in range(STEPS)]
    result = train(strategy, steps, learning_rate=learning_rates(CONFIG, STEPS))
    return strategy.full_state_dict(), [rate for rate in result.lr if rate is not None]


def train_alone() -> tuple[dict[str, torch.Tensor], list[float]]:
    module = build("plain")
    optimizer = OPTIMIZERS["adam"](module.parameters())
    rate = learning_rates(CONFIG, STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step) / LR)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        module(**joined(global_batch("plain", SPLIT, step))).loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return module.state_dict(), rates


@each_row("choice", FAMILIES[::2])
def test_the_schedule_is_that_of_one_process(ranks: RankPool, choice):
    expected, rates = train_alone()
    results = ranks.run(2, train_scheduled, choice)
    for _, actual in results:
        assert actual == pytest.approx(rates, rel=1e-12)
    assert_close(results[0][0], expected, 1e-5, "parameter")


def straight_and_resumed(choice: str, folder: Path):
    """Six scheduled steps, without a stop and with one after the fourth, end alike."""
    scheduled = {"schedule": "cosine", "warmup_steps": 2}
    strategy, straight = train_to(choice, STEPS, **scheduled)
    digests = fingerprints(strategy, straight)
    train_to(choice, 4, folder, planned=STEPS, **scheduled)
    strategy, resumed = train_to(choice, STEPS, folder, resume="latest", **scheduled)
    assert fingerprints(strategy, resumed) == digests
    assert resumed.lr == [None] * 4 + straight.lr[4:]
    assert resumed.grad_norm == [None] * 4 + straight.grad_norm[4:]


@each_row("choice", ["zero3", "pytorch_zero1"])
def test_a_resumed_run_has_the_same_rates(ranks: RankPool, tmp_path, choice):
    ranks.run(2, straight_and_resumed, choice, tmp_path)
