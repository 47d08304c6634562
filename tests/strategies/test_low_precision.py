"""Low-precision copies of weights, which zero3 makes instead of autocast: same numbers, freed with their block."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ddp_lab.strategy.options import StrategyOptions
from sharding.options.units import LowPrecisionWeights
from tests.models import FEATURES, answer, batch, build, make_batch
from tests.parity import OPTIMIZERS, load, one_step
from tests.ranks import RankPool
from tests.tables import each_row


class CastBlock(nn.Module):
    """Two linear layers. Autocast does not simply cast the weight of the second: see `kind`."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        if kind in ("bfloat16", "float64"):
            self.second.to(getattr(torch, kind))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.kind == "no autocast":
            with torch.autocast("cpu", enabled=False):
                return self.second(x.float())
        if self.kind == "used twice":
            x = self.second(x)
        return self.second(x.to(self.second.weight.dtype))


class Casts(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.blocks = nn.ModuleList(CastBlock(kind) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor):
        for block in self.blocks:
            x = block(x.float())
        return answer(x.float().sum(-1, keepdim=True), y)


BUILD = {name: partial(build, name) for name in ("llama", "llama, checkpointed")} | {
    kind: partial(Casts, kind) for kind in ("bfloat16", "float64", "no autocast", "used twice")
}


def copies_in_use(model: str, by_autocast: bool, precision: str) -> tuple[dict[str, Tensor], list[int]]:
    """Parameters after steps in `precision`; bytes of low-precision copies when forward ends, and when all is done."""
    torch.manual_seed(0)
    module = BUILD[model]()
    with mock.patch.object(LowPrecisionWeights, "_use", lambda *_: None) if by_autocast else nullcontext():
        options = StrategyOptions(precision=precision, loss_scale=2.0**8 if precision == "fp16" else None)
        strategy = load("zero3")(module, OPTIMIZERS["adam"], options)
        units, copied_bytes = strategy.units, []

        def count() -> int:
            copies = [copy for unit in units for copy in unit.low_precision._copies.values()]
            return sum(copy.untyped_storage().nbytes() for copy in copies)

        module.register_forward_hook(lambda *_: copied_bytes.append(count()))
        for step in range(3):
            batches = [make_batch("llama" if "llama" in model else "plain", 2, 10 * step + i) for i in range(2)]
            one_step(strategy, batches)
        assert not any("weight" in vars(layer) for layer in module.modules()), "the parameters are in their places"
        return strategy.full_state_dict(), [copied_bytes[-1], count()]


@each_row(
    "model, precision",
    [*((model, "bf16") for model in BUILD if model != "llama"), ("llama", "fp16"), ("used twice", "fp16")],
)
def test_zero3_frees_low_precision_copies_with_their_unit(ranks: RankPool, model, precision):
    """After forward only the last block's copies exist. The results are bitwise those of autocast's own copies."""
    linear = sum(layer.weight.numel() for layer in BUILD[model]().modules() if isinstance(layer, nn.Linear))
    by_autocast, _ = ranks.run(2, copies_in_use, model, True, precision)[0]
    state, (after_forward, at_end) = ranks.run(2, copies_in_use, model, False, precision)[0]
    assert 0 < after_forward <= 2 * linear / 2 and at_end == 0
    assert all(torch.equal(state[name], by_autocast[name]) for name in by_autocast)


def fail_in_a_block():
    module = Casts("used twice")
    strategy = load("zero3")(module, OPTIMIZERS["adam"], StrategyOptions(precision="bf16"))
    module.blocks[1].second.register_forward_pre_hook(lambda *_: 1 / 0)
    with strategy.steps.autocast(), pytest.raises(ZeroDivisionError):
        strategy(**batch(2, 0))
    assert not any("weight" in vars(layer) for layer in module.modules())


def test_an_error_in_a_block_leaves_no_copy_in_a_parameters_place(ranks: RankPool):
    ranks.run(2, fail_in_a_block)
