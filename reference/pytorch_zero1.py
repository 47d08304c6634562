"""PyTorch's own ZeRO-1: `DistributedDataParallel` with `torch.distributed.optim.ZeroRedundancyOptimizer`.

Every rank holds all parameters and gradients, but the optimizer states of only some parameters. Parameters are assigned
whole, so that each rank owns about as many elements. Gradients are all-reduced as in `pytorch_ddp`, which is more than
a rank needs to update its own parameters. Then each rank updates its parameters and broadcasts them, with one broadcast
per parameter that overlaps with nothing: 3(N-1)/N * P elements on the wire. Reduce-scatter would need 2(N-1)/N * P.
"""

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.accounting import Collective
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.optimizers import MakeOptimizer, Part, hand_over
from ddp_lab.strategy.ranges import Piece
from ddp_lab.strategy.replicated import bytes_of
from reference.pytorch_ddp import PyTorchDDP


class PyTorchZero1(PyTorchDDP):
    """DistributedDataParallel, with optimizer states sharded by parameter."""

    shards = frozenset({"optimizer_state"})
    supports = Supports()

    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        make = super().build_optimizer
        groups = [{**group, "params": [*group["params"]]} for group in make(make_optimizer).param_groups]

        def make_own(own_groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
            own = [p for group in own_groups for p in group["params"]]
            return hand_over(make(make_optimizer), {p: Part(p) for p in own})

        try:
            self.sharded = ZeroRedundancyOptimizer(groups, make_own, self.process_group)  # type: ignore[arg-type]
        except ValueError as error:
            raise UnsupportedError(f"cannot shard the optimizer: {error}") from error
        return self.sharded

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        return self.sharded.optim

    def updated_pieces(self) -> list[Piece]:
        own = {p for group in self.sharded.optim.param_groups for p in group["params"]}
        return [piece for piece in super().updated_pieces() if piece.tensor in own]

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        parameters = [p for group in self.sharded.param_groups for p in group["params"]]
        updates = Collective("broadcast", len(parameters), bytes_of(parameters), self.data_parallel_size, "parameters")
        return [*super().expected_gradient_traffic(micro_batches), updates]
