"""PyTorch's own ZeRO-1: `DistributedDataParallel` with `torch.distributed.optim.ZeroRedundancyOptimizer`.

Every rank holds all parameters and gradients, but the optimizer states of only some parameters. Parameters are assigned
whole, so that each rank owns about as many elements. Gradients are all-reduced as in `pytorch_ddp`, which is more than
a rank needs to update its own parameters. Then each rank updates its parameters and broadcasts them, packed into one
tensor (`parameters_as_bucket_view`), which overlaps with nothing: 3(N-1)/N * P elements on the wire. Reduce-scatter
would need 2(N-1)/N * P. `overlap_with_ddp` updates in backward, before gradients could be clipped, unscaled, or given
to an optimizer that a function makes (docs/how-it-works/README.md#settings-of-the-originals).
"""

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.account import Piece
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.optimizers import MakeOptimizer, OptimizerPart, hand_over
from reference.pytorch_ddp import PyTorchDDP


class PyTorchZero1(PyTorchDDP):
    """DistributedDataParallel, with optimizer states sharded by parameter."""

    shards = frozenset({"optimizer_state"})
    supports = Supports()

    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        make = super().build_optimizer
        groups = [{**group, "params": [*group["params"]]} for group in make(make_optimizer).param_groups]

        def make_own(own_groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
            parameters = [p for group in own_groups for p in group["params"]]
            return hand_over(make(make_optimizer), {p: OptimizerPart(p) for p in parameters})

        try:
            self.sharded: Any = ZeroRedundancyOptimizer(
                groups,
                make_own,  # type: ignore[arg-type]
                self.process_group,
                parameters_as_bucket_view=True,
            )
        except ValueError as error:
            raise UnsupportedError(f"cannot shard the optimizer: {error}") from error
        self._packed_at = self._addresses()
        return self.sharded

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.trainable.values()]

    def update(self) -> None:
        """Torch would broadcast the old values of a parameter whose `.data` has been replaced; so pack all again."""
        if self._packed_at != self._addresses():
            self.sharded._build_param_buckets()
            self._packed_at = self._addresses()
        super().update()

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        return self.sharded.optim

    def updated_pieces(self) -> list[Piece]:
        parameters = {p for group in self.sharded.optim.param_groups for p in group["params"]}
        return [piece for piece in super().updated_pieces() if piece.tensor in parameters]
