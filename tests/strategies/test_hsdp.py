"""Hybrid sharding, over a part of the ranks, beyond parity: sums and checkpoints."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ddp_lab.runtime.checkpoint.state import tensors_to_save
from tests.models import make_batch
from tests.parity import Case, Options, gone_on, one_step, saved_halfway, strategy_of
from tests.ranks import RankPool
from tests.tables import by_default, each_row

FOUR, TALL = "replicate=2,shard=2", "replicate=3,shard=2"
NAMES = ["zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"]
BF16 = {"param_dtype": "bf16"}
ELEMENTS = 6 * 11 + 11 + 11 * 7 + 7 + 7 + 1
"""Of model `plain`."""


def unlike_gradients(name: str, options: Options) -> list[float]:
    """The reduced gradient, one value for all elements, of gradients that are large in one replica and small in the
    other."""
    with strategy_of(Case(name, "linear", FOUR, options)) as strategy:
        with strategy.micro_batch():
            (strategy(torch.ones(1, 8)) * (256.0, 1.0, 2.0**-9, 2.0**-9)[dist.get_rank()]).sum().backward()
        return strategy.full_gradients().get("weight", torch.empty(0)).unique().tolist()


@each_row("name, options", [("zero1", {}), ("zero2", BF16), ("zero3", BF16)])
def test_replicas_add_up_in_fp32(ranks: RankPool, name, options):
    """Whatever parameters are cast to: in bf16 the first row's 257 would be rounded, and the small ones lost."""
    assert ranks.run(4, unlike_gradients, name, options)[0] == [64.25 + 2.0**-10]


def saved_elements(name: str) -> list[tuple[str, int]]:
    """Keys and lengths of what this rank saves."""
    with strategy_of(Case(name, mesh=FOUR, optimizer="adam", options={"bucket_cap_mb": 0.0005})) as strategy:
        one_step(strategy, [make_batch("plain", 2, 0)])
        return [(key, tensor.numel()) for key, tensor in tensors_to_save(strategy).items()]


@each_row("name", ["zero2", "zero3"])
def test_one_replica_saves_each_element(ranks: RankPool, name):
    saved = [entry for of_rank in ranks.run(4, saved_elements, name) for entry in of_rank]
    for kind in ("parameter/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/"):
        assert sum(length for key, length in saved if key.startswith(kind)) == ELEMENTS, kind
    assert len({key for key, _ in saved}) == len(saved)


@pytest.mark.parametrize("name", by_default(NAMES, "zero3"))
def test_checkpoints_go_on_here_and_elsewhere(ranks: RankPool, tmp_path, name):
    """Bit by bit on the same mesh, and nearly on another one or under a choice that shards nothing."""
    case = Case(name, "tied", FOUR, optimizer="adam")
    expected, resumed = (ranks.run(4, function, case, tmp_path / "saved")[0] for function in (saved_halfway, gone_on))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    target = replace(case, mesh=TALL) if "zero3" in name else replace(case, choice="flat_ddp", mesh="dp=2")
    elsewhere = ranks.run(target.dims.size, gone_on, target, tmp_path / "saved")[0]
    for key, tensor in expected.items():
        assert torch.allclose(elsewhere[key], tensor, rtol=1e-4, atol=1e-6), key
