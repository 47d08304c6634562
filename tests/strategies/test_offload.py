"""--offload beyond parity and memory: what is not finite (with HSDP, too), where gradients are judged, and folders."""

from collections.abc import Callable
from functools import partial
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
from tests.parity import Case, built, message_of, one_step, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row

CASES = [
    *(Case(f"zero{n}", options={"offload": "optimizer"}, optimizer="adam") for n in (1, 2, 3)),
    *(Case(name, options={"offload": "parameters"}, optimizer="adam") for name in ("zero3", "pytorch_zero2")),
    *(Case(name, mesh="replicate=2,shard=2") for name in ("zero3", "pytorch_zero3")),
]


def survive_a_nan(case: Case):
    """The last rank has a NaN in its second step. No parameter changes."""
    with strategy_of(case) as strategy:
        one_step(strategy, [make_batch("plain", 2, 0)])
        before, batch, last = strategy.full_state_dict(), make_batch("plain", 2, 1), case.dims.size - 1
        if dist.get_rank() == last:
            batch["x"][0, 0] = float("nan")
        message = message_of(NonFiniteError, one_step, strategy, [batch])
        assert f"rank {last}" in message and "step 1" in message
        after = strategy.full_state_dict()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


@each_row("case", CASES)
def test_nothing_is_updated_with_what_is_not_finite(ranks: RankPool, case):
    ranks.run(case.dims.size, survive_a_nan, case)


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
    """Asserts that offloaded files have no names. Returns the error for a folder that is a file."""
    one_step(built("zero2", offload=f"optimizer:{folder}"), [make_batch("plain", 2, 0)])
    assert not list(folder.iterdir())
    return message_of(UserError, partial(built, "zero2", offload=f"optimizer:{folder.parent / 'file'}"))


def test_folders(ranks: RankPool, tmp_path):
    (tmp_path / "file").write_text("")
    for message in ranks.run(2, open_files, tmp_path / "folder"):
        assert message == f"--offload: cannot write into {tmp_path / 'file'}: File exists"


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
