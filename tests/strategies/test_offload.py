"""--offload beyond parity and memory: what is not finite, where gradients are judged, and folders."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError, UserError
from ddp_lab.strategy.account import clip_parts, norm_of
from ddp_lab.strategy.communication.loss_scale import LossScaler
from ddp_lab.strategy.options import StrategyOptions
from sharding.options.offload import only
from tests.models import make_batch
from tests.parity import built, one_step
from tests.ranks import RankPool
from tests.tables import each_row

CASES = [*((f"zero{n}", "optimizer") for n in (1, 2, 3)), ("zero3", "parameters"), ("pytorch_zero2", "parameters")]


def survive_a_nan(name: str, offload: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy, batch = built(name, "plain", "adam", offload=offload), make_batch("plain", 2, dist.get_rank())
    before = strategy.full_state_dict()
    if dist.get_rank() == 1:
        batch["x"].fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="rank 1"):
        one_step(strategy, [batch])
    return before, strategy.full_state_dict()


@each_row("name, what", CASES)
def test_nothing_is_updated_with_what_is_not_finite(ranks: RankPool, name, what):
    before, after = ranks.run(2, survive_a_nan, name, what)[0]
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


class OneDevice(TorchDispatchMode):
    """Fails where a GPU would: in an operator on tensors of the device and of the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {tensor.device for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        assert len(devices) < 2, f"{func}: {devices}"
        return func(*args, **kwargs or {})


def test_gradients_on_the_host_are_clipped_and_judged_with_what_is_on_the_device():
    """As FSDP2 keeps them on a GPU, which this pretends to have."""
    device = torch.device("cuda", 0)
    with FakeTensorMode(), OneDevice(), mock.patch.object(dist, "all_reduce"):
        shards = [torch.ones(3), torch.ones(4)]
        assert norm_of(shards, device).device == device
        assert clip_parts(shards, 1.0, mock.Mock(), device, shards).device == device
        LossScaler(StrategyOptions(precision="fp16"), device).unscale_(shards)


def open_files(folder: Path) -> str:
    """Files that are made have no names. What is said of a folder that is a file."""
    one_step(built("zero2", offload=f"optimizer:{folder}"), [make_batch("plain", 2, 0)])
    assert not list(folder.iterdir())
    with pytest.raises(UserError) as caught:
        built("zero2", offload=f"optimizer:{folder.parent / 'file'}")
    return str(caught.value)


def test_folders(ranks: RankPool, tmp_path):
    (tmp_path / "file").write_text("")
    for said in ranks.run(2, open_files, tmp_path / "folder"):
        assert said == f"--offload: cannot write into {tmp_path / 'file'}: File exists"


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
