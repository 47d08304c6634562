"""Attention masks that no host has to read from a device.

In every forward pass transformers asks whether a mask hides anything: if not, it can use the faster causal kernel. The
answer is on the device, so the host waits for all that is queued there. But `collate` knows it for nothing. So batches
without padding have no mask, and a mask that is there hides something.

It also asks whether positions begin anew within a row, where several documents are packed into one. A `collate` that
packs says so by the type of its `position_ids`: int32. Those that models make by themselves are int64.
"""

from typing import Any

import torch
from torch import Tensor

from ddp_lab.runtime.watch.phases import IMPORTING, during


def without_useless_mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`batch`, on the CPU, without its `attention_mask` if that hides no token."""
    if bool(batch["attention_mask"].all()):
        return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    return batch


def documents_of_tokens(position_ids: Tensor) -> Tensor | None:
    """The number of each token's document in its row, of the shape of `position_ids`; None where a row is one."""
    if position_ids.dtype != torch.int32:
        return None
    return torch.diff(position_ids, prepend=position_ids[:, :1] - 1).ne(1).cumsum(-1)


def read_no_masks() -> None:
    """Let transformers take a mask as one that hides something, and a row of a batch as one document unless its
    positions are int32, unread."""
    with during(IMPORTING):
        from transformers import PreTrainedModel, PreTrainedTokenizerFast, masking_utils  # noqa: F401  (all that text needs)

    def ignore_bidirectional(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> Any:
        return padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)

    def hides_something(mask: Tensor) -> Any:
        return False

    masking_utils.fast_all = hides_something  # type: ignore[assignment]
    masking_utils.find_packed_sequence_indices = documents_of_tokens
    masking_utils._ignore_bidirectional_mask_sdpa = ignore_bidirectional
