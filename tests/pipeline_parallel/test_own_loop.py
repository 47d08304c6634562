"""A pipeline in a training loop of one's own, over a plain `nn.Sequential`."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ddp_lab
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import closing_groups
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, message_of
from tests.ranks import RankPool
from tests.tables import each_row

SAMPLES = 8


class WithLoss(nn.Module):
    """The loss belongs to the last stage, so it is the model's."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()]
        self.body = nn.Sequential(*layers, nn.Linear(16, 3))

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=cross_entropy(self.body(x), y))


def batches_of(step: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(step)
    x, y = torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,))
    return [{"x": x[first : first + 2], "y": y[first : first + 2]} for first in range(0, SAMPLES, 2)]


def own_loop(mesh: str, choice: str, schedule: str, stages_per_rank: int, split) -> tuple[list[float], Any, float]:
    torch.manual_seed(0)
    model, losses = WithLoss(), []
    with closing_groups():
        stages = ddp_lab.pipeline(model, mesh, schedule, stages_per_rank, split)
        strategy = stages.strategy(choice, OPTIMIZERS["adam"])
        ranks, rank = strategy.data_parallel_size, strategy.data_parallel_rank
        for step in range(3):
            losses.append(strategy.forward_backward(batches_of(step)[rank::ranks]).item())
            strategy.clip_grad_norm_(0.5)
            strategy.step()
            strategy.zero_grad()
        with torch.no_grad():
            return losses, strategy.full_state_dict(), strategy(**batches_of(9)[0]).loss.item()


def one_process() -> tuple[list[float], Any, float]:
    torch.manual_seed(0)
    model, losses = WithLoss(), []
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for step in range(3):
        global_batch = {name: torch.cat([batch[name] for batch in batches_of(step)]) for name in ("x", "y")}
        losses.append((loss := model(**global_batch).loss).item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, model.state_dict(), model(**batches_of(9)[0]).loss.item()


@each_row(
    "mesh, choice, schedule, stages_per_rank, split",
    [
        ("pp=2", "zero1", "1f1b", 1, None),
        ("pp=2", "tp", "interleaved", 2, [1, 1, 2, 1]),
        ("dp=2,pp=2", "zero2", "zb-h1", 1, [["body.0", "body.2", "body.3"], ["body.4", "body.6"]]),
    ],
)
def test_a_sequence_in_an_own_loop(ranks: RankPool, mesh, choice, schedule, stages_per_rank, split):
    size = 4 if "dp" in mesh else 2
    expected_losses, expected_state, expected_answer = one_process()
    results = ranks.run(size, own_loop, mesh, choice, schedule, stages_per_rank, split)
    for losses, _, answer in results:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert answer == pytest.approx(expected_answer, rel=1e-5)
    for name, tensor in expected_state.items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-5, atol=1e-6)


def with_layers_cut() -> float:
    with closing_groups():
        strategy = ddp_lab.pipeline(build("lm, gqa"), "pp=2,tp=2").strategy("zero1", OPTIMIZERS["adam"])
        return strategy.forward_backward([make_batch("lm, gqa", 2, 0)]).item()


def test_stages_whose_layers_are_cut(ranks: RankPool):
    expected = build("lm, gqa")(**make_batch("lm, gqa", 2, 0)).loss.item()
    assert ranks.run(4, with_layers_cut) == pytest.approx([expected] * 4, rel=1e-5)


class Twice(nn.Module):
    """Uses its weight in a product, and elsewhere."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.weight.square().sum()


def one_step():
    model = WithLoss()
    model.body = nn.Sequential(*(Twice() for _ in range(4)))
    with closing_groups():
        stages = ddp_lab.pipeline(model, "dp=2,pp=2", "zb-h1")
        stages.strategy("zero1", OPTIMIZERS["adam"]).forward_backward(batches_of(0))


def test_a_weight_in_a_product_and_elsewhere(ranks: RankPool):
    """Its first part would be reduced before the second is there."""
    for message in ranks.run(4, message_of, Exception, one_step):
        assert re.search(r"layer.weight received a second gradient .* zb-h1, use no weight in", message), message


def test_what_is_refused():
    recomputes = StrategyOptions(activation_checkpointing="block")
    for arguments, message in (
        (("dp=2",), "needs pp above 1"),
        (("pp=2", "zb-h1", 1, None, recomputes), "zb-h1: must be without --activation-checkpoi"),
        (("pp=2", "1f1b2"), "gpipe, 1f1b, interleaved"),
    ):
        with pytest.raises(UserError, match=message):
            ddp_lab.pipeline(WithLoss(), *arguments)
