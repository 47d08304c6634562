"""No strategy races, whatever it is asked to do; and the checker finds what does."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ddp
import sharding
from stream_checker.check import Seen, check
from tests.models import build, make_batch
from tests.stream_checker.planted import PLANTED, Planted
from training.config import StrategyOptions
from training.strategy import Strategy

HAND_WRITTEN = [name for name in (*ddp.CHOICES, *sharding.CHOICES) if "_" not in name or name.split("_")[0] in
                ("simple", "flat", "bucket")]  # fmt: skip
REFERENCES = ["pytorch_ddp", "pytorch_zero1", "pytorch_zero2", "pytorch_zero3"]
IN_BUCKETS = ("bucket_ddp_async", "baseline", "zero1", "zero2")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checked(choice: str, model: str = "llama", micro_batches: int = 1, **more: Any) -> Seen:
    options = {"bucket_cap_mb": 0.0005} if choice in IN_BUCKETS else {}
    options |= more.pop("options", {})
    return check(
        choice, partial(build, model), partial(make_batch, model, 3), micro_batches, StrategyOptions(**options), **more
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("model", ["plain", "llama", "normed"])
@pytest.mark.parametrize("choice", [*HAND_WRITTEN, *REFERENCES])
def test_no_race_and_no_host_wait(choice: str, model: str, micro_batches: int) -> None:
    """Also with clipping; and results are the same however late collectives end."""
    late = checked(choice, model, micro_batches, clip_grad_norm=0.1)
    early = checked(choice, model, micro_batches, clip_grad_norm=0.1, is_late=False)
    assert not late.races and not early.races
    assert late.losses == early.losses and all(torch.tensor(late.losses).isfinite())
    if choice in HAND_WRITTEN:
        assert not late.host_waits


@pytest.mark.parametrize("choice", [*HAND_WRITTEN, "pytorch_ddp", "pytorch_zero2"])
def test_unused_parameters(choice: str) -> None:
    assert not checked(choice, "branching", 2, options={"find_unused_parameters": True}).races


def test_early_updates() -> None:
    seen = checked("bucket_ddp_async", options={"overlap_optimizer": True})
    assert not seen.races and not seen.host_waits


@pytest.mark.parametrize("choice", HAND_WRITTEN)
@pytest.mark.parametrize(("where", "micro_batch"), [("forward", 2), ("backward", 2), ("backward", 3)])
def test_an_abandoned_step_leaves_no_race(choice: str, where: str, micro_batch: int) -> None:
    """A micro-batch fails while communication is under way: of the one before, or of its own later layers."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == micro_batch:
            raise RuntimeError("planted")

    def abandon(strategy: Strategy) -> None:
        layers = [layer for layer in strategy.module.modules() if isinstance(layer, nn.Linear)]
        if where == "forward":
            handle = layers[-1].register_forward_pre_hook(fail)
        else:
            handle = layers[0].register_forward_hook(lambda m, a, output: output.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="planted"):
            strategy.forward_backward([make_batch("llama", 3, index) for index in range(3)])
        handle.remove()

    assert not checked(choice, "llama", 3, also=abandon).races
    assert len(calls) == micro_batch


@pytest.mark.parametrize("planted", PLANTED, ids=[one.what for one in PLANTED])
def test_a_planted_race_is_found(planted: Planted) -> None:
    with planted.there():
        seen = checked(planted.choice, planted.model, 2, options=planted.options, is_late=False)
    assert seen.races and any(planted.says in text for text in seen.races), dict(seen.races)


def test_at_least_twelve_are_planted() -> None:
    assert len(PLANTED) >= 12 and len({one.what for one in PLANTED}) == len(PLANTED)
