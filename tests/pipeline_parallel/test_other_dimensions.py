"""Stages whose layers are cut over `tp`: dropout, and what is refused. Parity stands in `test_meshes.py`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensor_parallel
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from tests.models import build, make_batch
from tests.parity import in_stages, strategy_of
from tests.ranks import RankPool
from tests.tables import by_default, each_row

SEQUENCE = {"sequence_parallel": True}


def with_dropout(options: dict[str, Any]):
    """Gradients of what all ranks of tp hold, with the state of random numbers; and on rank 0 all whole gradients."""
    model = "lm, gpt2, dropout"
    with strategy_of(in_stages("tp", "pp=2,tp=2", model, **options)) as strategy:
        strategy.load_full_state_dict(build(model).state_dict() if dist.get_rank() == 0 else {})
        assert strategy.model_parallel is not None
        torch.manual_seed(dist.get_rank() // 2)
        strategy.forward_backward([make_batch(model, samples, samples) for samples in (2, 1, 3)])
        cuts, named = strategy.model_parallel.cuts, strategy.module.named_parameters()
        replicated = {n: p.grad.clone() for n, p in named if n not in cuts and p.grad is not None}
        return replicated | {"random numbers": torch.get_rng_state()}, strategy.full_gradients()


@pytest.mark.parametrize("way", by_default([{}, SEQUENCE], SEQUENCE))
def test_dropout(ranks: RankPool, way):
    """Ranks of one stage draw alike what all of them compute, and a block that runs again draws what it drew."""
    plain = ranks.run(4, with_dropout, way)
    for first in (0, 2):
        assert len(plain[first][0]) > 1
        for name, gradient in plain[first][0].items():
            assert torch.equal(gradient, plain[first + 1][0][name]), name
    again = ranks.run(4, with_dropout, {**way, "activation_checkpointing": "block"})
    for name, gradient in plain[0][1].items():
        torch.testing.assert_close(again[0][1][name], gradient)


@each_row("choice", ["pytorch_tp", "pytorch_fsdp_tp"])
def test_torchs_own_cut_neither_stages_nor_tokens(choice):
    for mesh in ("pp=2,tp=2", "cp=2,tp=2"):
        with pytest.raises(UserError, match="--mesh with pp or cp: PyTorch's tensor parallelism cuts neither"):
            tensor_parallel.load(choice).supports.require_mesh(Mesh.parse(mesh))
