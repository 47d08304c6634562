"""--offload: optimizer states, and parameters, in host memory or in files: the same numbers, and less on the device."""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_lab.runtime.errors import NonFiniteError, UserError
from ddp_lab.strategy.accounting import ModelSize
from ddp_lab.strategy.communication.loss_scale import LossScaler
from ddp_lab.strategy.norms import clip_parts, norm_of
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build
from tests.parity import OPTIMIZERS, global_batch, load, weight_decay_groups
from tests.ranks import RankPool
from tests.strategies.test_traffic import profiled_step
from tests.tables import each_row

CASES = [("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer"), ("zero3", "parameters")]
ORIGINALS = [("pytorch_zero2", "parameters"), ("pytorch_zero3", "parameters")]
"""They take no folder, and keep gradients on the host too."""
over_cases = each_row("name, what", CASES + ORIGINALS)
SPLIT = [[2, 1], [3, 1]]


def places(name: str, what: str, folder: Path) -> list[str]:
    """What `--offload` takes here: host memory, and files."""
    return [what] if (name, what) in ORIGINALS else [what, f"{what}:{folder}"]


def train(name: str, model: str, options: dict[str, Any], set_to_none: bool = True) -> dict[str, Any]:
    """Losses, norms and state after steps with uneven micro-batches, parameter groups and clipping."""
    settings = StrategyOptions(**options, parameter_groups=weight_decay_groups)
    strategy = load(("sharding", name))(build(model, seed=dist.get_rank()), OPTIMIZERS["adam"], settings)
    seen: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(4):
        strategy.zero_grad(set_to_none)
        seen["loss"].append(strategy.forward_backward(global_batch(model, SPLIT, step)[dist.get_rank()]).item())
        seen["norm"].append(strategy.clip_grad_norm_(0.5).item())
        strategy.step()
        if step == 1:
            strategy.load_full_state_dict(strategy.full_state_dict())
    return seen | {"state": strategy.full_state_dict()}


@over_cases
def test_it_is_bitwise_training_without_offload(ranks: RankPool, tmp_path: Path, name: str, what: str) -> None:
    """With parameter groups, and whether gradients are dropped or filled with zeros; more in `test_settings.py`."""
    for model, options in (("frozen", {"param_dtype": "bf16"}), ("branching", {})):
        wanted = ranks.run(2, train, name, model, options)[0]
        for offload, set_to_none in zip(places(name, what, tmp_path / "files"), (True, False), strict=False):
            results = ranks.run(2, train, name, model, options | {"offload": offload}, set_to_none)
            for found in results:
                assert found["loss"] == wanted["loss"] and found["norm"] == wanted["norm"], (model, offload)
            assert results[0]["state"].keys() == wanted["state"].keys()
            for key, tensor in wanted["state"].items():
                assert torch.equal(results[0]["state"][key], tensor), (model, offload, key)
    assert (name, what) in ORIGINALS or not list((tmp_path / "files").iterdir()), "files have no names"


def memory(name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    module = build("llama")
    size = ModelSize.of(module)
    strategy = load(("sharding", name))(module, OPTIMIZERS["adam"], StrategyOptions(**options))
    strategy.forward_backward(global_batch("llama", SPLIT, 0)[dist.get_rank()])
    strategy.step()
    device = strategy.memory_breakdown(), strategy.expected_memory(size)
    return *device, strategy.host_bytes(), strategy.expected_host_bytes(size), size.parameter_bytes


@over_cases
def test_memory_is_what_the_formulas_say(ranks: RankPool, tmp_path: Path, name: str, what: str) -> None:
    """Padding aside. On the host: shard, gradient and Adam's two states."""
    for options, offload in itertools.product(({}, {"param_dtype": "bf16"}), places(name, what, tmp_path)):
        for held, expected, host_bytes, expected_host, p4 in ranks.run(2, memory, name, options | {"offload": offload}):
            for component, size in expected.items():
                assert size <= held[component] <= 1.05 * size, component
            assert held["optimizer_state"] == 0
            assert expected_host == 4 * p4 / 2 <= host_bytes <= 1.05 * expected_host
            if what == "parameters":
                assert held["parameters"] == 0
            if (name, what) in ORIGINALS:
                assert held["gradients"] == 0


@over_cases
def test_traffic_is_that_without_offload(ranks: RankPool, name: str, what: str) -> None:
    for announced, seen, _ in ranks.run(2, profiled_step, ("sharding", name), "llama", 2, {"offload": what}):
        assert announced == seen


def survive_a_nan(name: str, offload: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy = load(("sharding", name))(build("plain"), OPTIMIZERS["adam"], StrategyOptions(offload=offload))
    before = strategy.full_state_dict()
    batches = global_batch("plain", SPLIT, 0)[dist.get_rank()]
    if dist.get_rank() == 1:
        batches[0]["x"].fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="rank 1"):
        strategy.forward_backward(batches)
        strategy.step()
    return before, strategy.full_state_dict()


@over_cases
def test_nothing_is_updated_with_what_is_not_finite(ranks: RankPool, name: str, what: str) -> None:
    before, after = ranks.run(2, survive_a_nan, name, what)[0]
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


class OneDevice(TorchDispatchMode):
    """Fails where a GPU would: in an operator on tensors of the device and of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {tensor.device for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        assert len(devices) < 2, f"{func}: {devices}"
        return func(*args, **kwargs or {})


def test_gradients_on_the_host_are_clipped_and_judged_with_what_is_on_the_device() -> None:
    """As FSDP2 keeps them on a GPU, which this pretends to have."""
    device = torch.device("cuda", 0)
    with FakeTensorMode(), OneDevice(), mock.patch.object(dist, "all_reduce"):
        shards = [torch.ones(3), torch.ones(4)]
        assert norm_of(shards, device).device == device
        assert clip_parts(shards, 1.0, mock.Mock(), device, shards).device == device
        LossScaler(StrategyOptions(precision="fp16"), device).unscale_(shards)


def write_into_a_file(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(("sharding", "zero2"))(build("plain"), OPTIMIZERS["adam"], StrategyOptions(offload=f"optimizer:{path}"))
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in ranks.run(2, write_into_a_file, tmp_path / "file"):
        assert said == f"--offload: cannot write into {tmp_path / 'file'}: File exists"
