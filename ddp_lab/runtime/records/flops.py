"""Model FLOPs: what forward and backward of a sample need, whatever a strategy does beside."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.strategy.batches import sample_count


def model_flops(module: nn.Module, micro_batch: Mapping[str, Tensor]) -> float | None:
    """FLOPs of one forward and backward pass, for each sample, where padding counts. None if the module cannot run
    without data.

    This is what model FLOPs utilization is defined by (Chowdhery et al., 2022, "PaLM", appendix B): of matrix products,
    convolutions and attention; a multiplication and an addition are two. Attention counts with its whole matrix of
    scores, causal or not. What a kernel computes again in backward does not count. It is counted by operator
    (`torch.utils.flop_counter`) on a copy whose tensors are on the meta device, so nothing is computed or allocated.
    """
    tensors = [*module.parameters(), *module.buffers()]
    without_data: dict[int, Any] = {id(tensor): as_meta(tensor) for tensor in tensors}
    try:
        with torch.device("meta"), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model = copy.deepcopy(module, without_data).train()
            model(**{name: as_meta(tensor) for name, tensor in micro_batch.items()}).loss.backward()
    except Exception:  # a model may raise anything where it asks for a value that is not there
        return None
    return counter.get_total_flops() / sample_count(micro_batch) or None


def as_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
