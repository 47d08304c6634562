"""FSDP2 around a model that torch's own classes have cut over another dimension of the mesh.

A `DTensor` knows both dimensions, so whole tensors need no help from `model_parallel`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.account import Piece
from ddp_lab.strategy.optimizers import MakeOptimizer
from reference.fsdp2 import FSDP2


class FSDP2OverMesh(FSDP2):
    """What `pytorch_fsdp_tp` and `transformers_ep` share."""

    supports = replace(FSDP2.supports, replicas=False)
    frees_blocks_after_forward = True

    @property
    def device_mesh(self) -> DeviceMesh:
        """Of the run: all its dimensions."""
        assert self.model_parallel is not None and self.model_parallel.device_mesh is not None
        return self.model_parallel.device_mesh

    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        return by_mesh(make_optimizer, self.trainable.values())

    def of_whole_model(self, parts: dict[str, Tensor], with_aliases: bool = False) -> dict[str, Tensor]:
        return parts if dist.get_rank(self.groups.everyone) == 0 else {}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.load_whole(state, self.groups.everyone)

    def parameter_pieces(self) -> list[Piece]:
        raise UnsupportedError("this strategy can neither save nor resume checkpoints; take zero3")


def by_mesh(make_optimizer: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with a group for each mesh: torch's fused ones do not mix `DTensor`s of several, or plain ones."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return make_optimizer([{"params": group} for group in groups.values()])
