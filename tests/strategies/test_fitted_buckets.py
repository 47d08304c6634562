"""Buckets that fit the link and parameters that are updated early compute what all others do, and agree over ranks."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp.bucket_ddp_async import BucketDDP
from ddp.early_updates import only
from ddp.fitted_buckets import UNKNOWN
from ddp.link_fit import WATCHED_STEPS, measure_all_reduce
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError, UserError
from ddp_lab.runtime.profiling.stopwatch import Stopwatch
from ddp_lab.strategy.communication.agreement import NonFiniteError
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, build_and_step, check_parity, message_of, train_on_rank
from tests.ranks import RankPool
from tests.strategies.test_traffic import profiled_step
from tests.tables import each_row

BUCKETS = ("ddp", "bucket_ddp_async")
STEPS = [[[2, 2], [2, 2]]] * (WATCHED_STEPS + 3)


@each_row("model", ["tied", "odd"])
def test_fitted_buckets_compute_the_same(ranks: RankPool, model: str) -> None:
    check_parity(ranks, BUCKETS, model, STEPS, options={"bucket_cap_mb": "auto"})


def fitted(model: str, tick: float) -> tuple[list[list[str]], list[str], int]:
    """Names of the parameters in each bucket after the fit, the strategy's notes, and the steps' clock readings.

    Rank 0's clock goes evenly, the others' ever faster, so that each rank by itself would plan for another timeline.
    """
    readings = itertools.count()
    rank = dist.get_rank()
    strategy = BucketDDP(
        build(model),
        OPTIMIZERS["sgd"],
        StrategyOptions(bucket_cap_mb="auto", clock=lambda: tick * next(readings) ** (1 + rank)),
    )
    names = {parameter: name for name, parameter in strategy.trainable.items()}
    for step in range(WATCHED_STEPS + 1):
        strategy.forward_backward([make_batch(model, 2, 10 * step + rank)])
        strategy.step()
        strategy.zero_grad()
    return [[names[p] for p in bucket.parameters] for bucket in strategy.buckets], strategy.notes, next(readings)


def test_ranks_agree_on_buckets_whatever_they_measured(ranks: RankPool) -> None:
    """Of a module of which ranks use different parameters, and one is used by none."""
    model = "branching"
    (buckets, notes, read), *others = ranks.run(3, fitted, model, 0.001)
    assert read > 0 and all(other[0] == buckets for other in others)
    held = sorted(itertools.chain.from_iterable(buckets))
    assert held == sorted(name for name, p in build(model).named_parameters() if p.requires_grad)
    assert len(notes) == 1 and ("this link: all are predicted" in notes[0] or notes == [UNKNOWN])


def predicted() -> list[float]:
    """Seconds that all-reduces of a kilobyte and of a megabyte would take, by a clock that is this rank's own."""
    readings, rank = itertools.count(), dist.get_rank()
    stopwatch = Stopwatch(torch.device("cpu"), lambda: 0.001 * next(readings) ** (1 + rank))
    cost, tail, is_known = measure_all_reduce(dist.group.WORLD, torch.device("cpu"), stopwatch)
    sizes = np.array([2**10, 2**20])
    return [float(is_known), *cost(sizes).tolist(), *tail(sizes).tolist(), next(readings)]


def test_ranks_agree_on_what_an_all_reduce_costs(ranks: RankPool) -> None:
    first, *others = ranks.run(3, predicted)
    assert first[-1] > 0.001 and all(other == first for other in others)


def test_where_all_sizes_take_the_same_nothing_is_fitted(ranks: RankPool) -> None:
    """Only the clock's readings tick, so the rate of the link does not show."""
    ((buckets, notes, _), _) = ranks.run(2, fitted, "plain", 1.0)
    assert len(buckets) == 1 and len(buckets[0]) == len(list(build("plain").parameters()))
    assert notes == [UNKNOWN]


def test_what_runs_after_the_fit_is_what_is_announced(ranks: RankPool) -> None:
    for announced, seen, _ in ranks.run(2, profiled_step, BUCKETS, "llama", 2, {"bucket_cap_mb": "auto"}, 6):
        assert announced == seen


@each_row("model, optimizer", [("llama", "adam"), ("odd", "sgd"), ("branching", "adam")])
def test_overlapping_the_optimizer_is_bitwise_the_same(ranks: RankPool, model: str, optimizer: str) -> None:
    arguments = (BUCKETS, model, STEPS[:4], optimizer, None, model != "branching")
    early = ranks.run(2, train_on_rank, *arguments, {"bucket_cap_mb": 0.0005, "overlap_optimizer": True})
    usual = ranks.run(2, train_on_rank, *arguments, {"bucket_cap_mb": 0.0005})
    assert early[0]["loss"] == usual[0]["loss"]
    for name, tensor in usual[0]["state"].items():
        assert torch.equal(early[0]["state"][name], tensor), name


def nonfinite_gradient(layer: int) -> str:
    """Rank 1's gradient of a layer's weight is NaN: what is reduced before it is updated, and nothing behind it."""
    module = build("plain")
    strategy = BucketDDP(module, OPTIMIZERS["sgd"], StrategyOptions(bucket_cap_mb=0.00001, overlap_optimizer=True))
    order = list(reversed(list(module.parameters())))  # each in a bucket of its own
    bad, before = module.net[layer].weight, [parameter.detach().clone() for parameter in order]
    if dist.get_rank() == 1:
        bad.register_hook(lambda gradient: gradient * math.nan)
    message = message_of(NonFiniteError, strategy.forward_backward, [make_batch("plain", 2, 0)])
    updated = [not torch.equal(now, then) for now, then in zip(order, before, strict=True)]
    place = [parameter is bad for parameter in order].index(True)
    assert updated == [True] * place + [False] * (len(order) - place)
    return message


@pytest.mark.parametrize("layer", [0, 2])
def test_a_bad_gradient_stops_early_updates(ranks: RankPool, layer: int) -> None:
    for message in ranks.run(2, nonfinite_gradient, layer):
        assert "on rank 1" in message and "parameters of earlier buckets are updated already" in message


def clip_early_updates() -> str:
    strategy = build_and_step(BUCKETS, "plain", StrategyOptions(overlap_optimizer=True))
    return message_of(UnsupportedError, strategy.clip_grad_norm_, 1.0)


@each_row(
    "choice, options, wanted",
    [
        (("ddp", "flat_ddp"), StrategyOptions(overlap_optimizer=True), "--overlap-optimizer"),
        (("sharding", "zero1"), StrategyOptions(compress="powersgd"), "replicated strategies alone"),
    ],
)
def test_refusals(ranks: RankPool, choice: tuple[str, str], options: StrategyOptions, wanted: str) -> None:
    said = ranks.run(2, message_of, UnsupportedError, build_and_step, choice, "plain", options)
    assert all(wanted in message for message in said)


def test_early_updates_cannot_be_clipped(ranks: RankPool) -> None:
    assert all("cannot be clipped" in message for message in ranks.run(2, clip_early_updates))


@each_row(
    "settings, wanted",
    [
        ({"overlap_optimizer": True, "clip_grad_norm": 1.0}, "--overlap-optimizer"),
        ({"compress": "zip"}, "--compress zip: must be one of int8, powersgd"),
    ],
)
def test_settings_that_do_not_fit_together(settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        RunConfig.of(**settings)


class CountsByGroup(torch.optim.SGD):
    """Keeps a count of steps for a whole group, as some optimizers do."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


def test_an_optimizer_that_counts_by_group_is_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = CountsByGroup(parameters, lr=0.1)
    with (
        pytest.raises(UnsupportedError, match="keeps steps for a whole parameter group"),
        only(optimizer, parameters[:1]),
    ):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == parameters
