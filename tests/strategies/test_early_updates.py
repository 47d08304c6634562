"""Parameters that are updated early get what they get otherwise."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ddp.bucket_ddp_async import BucketDDP
from ddp.early_updates import only
from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, message_of
from tests.ranks import RankPool


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
def test_a_bad_gradient_stops_early_updates(ranks: RankPool, layer):
    for message in ranks.run(2, nonfinite_gradient, layer):
        assert "on rank 1" in message


class CountsByGroup(torch.optim.SGD):
    """Keeps a count of steps for a whole group, as some optimizers do."""

    def step(self, closure: Callable[[], float] | None = None):  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


def test_an_optimizer_that_counts_by_group_is_refused():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = CountsByGroup(parameters, lr=0.1)
    with (
        pytest.raises(UnsupportedError, match="keeps steps for a whole parameter group"),
        only(optimizer, parameters[:1]),
    ):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == parameters
