"""What stands for a gradient of which only shards are left."""

from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError


class GradientInShards(Tensor):
    """A parameter's gradient between the last micro-batch and the step. It has no memory; whoever reads it is told so.

    So `torch.nn.utils.clip_grad_norm_` on the module does not find nothing to clip, in silence. What a backward pass
    outside of `micro_batch` adds to it is forgotten.
    """

    @staticmethod
    def of(parameter: nn.Parameter) -> "GradientInShards":
        return Tensor._make_wrapper_subclass(
            GradientInShards, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )

    def data_ptr(self) -> int:
        return 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        is_in_backward = torch._C._current_graph_task_id() >= 0
        if is_in_backward and func is torch.ops.aten.add_.Tensor:
            return args[0]
        raise UnsupportedError(
            "the module's gradients are in shards from the last micro_batch() to step(): clip them by "
            "strategy.clip_grad_norm_(max_norm) or strategy.clip_grad_value_(value), read them by "
            "strategy.full_gradients()"
        )
