"""Which samples a forward pass is of, so that runs that cut a batch differently can be compared sample by sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_lab.parity import sketch, store

NOT_CONTENT = ("attention_mask", "position_ids", "cache_position")
IGNORED = -100
"""Labels of filling, by convention of PyTorch."""


class MicroBatches:
    """
    Args:
        part_of_tokens: What this rank has of (samples, tokens), if ranks cut the tokens behind what is seen here.

    Attributes:
        inside: A forward pass of the whole model runs; always in a pipeline, where it has no one beginning.
        number: Of the current micro-batch in the step, from 0; -1 outside of them.
        keys: For each micro-batch of the step, a number for each of its samples, by content.
        tokens: The same, by tokens and their position_ids, if the model is given them (`has_positions`).
    """

    def __init__(self, in_pipeline: bool, part_of_tokens: Callable[[Tensor], Tensor] | None = None) -> None:
        self._in_pipeline = self.inside = in_pipeline
        self._part_of_tokens = part_of_tokens
        self.begin_step()

    def begin_step(self) -> None:
        self.number, self.keys = -1, list[list[int]]()
        self.tokens, self.has_positions = list[list[int]](), False
        self._masks, self._rows, self._lengths = list[Tensor | None](), list[int](), list[int]()
        self._calls: dict[str, int] = {}

    def know(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        """All micro-batches of the step, ahead: a stage of a pipeline does not see them."""
        if self._in_pipeline:
            for batch in micro_batches:
                self._add(batch)

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward pass begins."""
        if self._in_pipeline:
            return
        self._calls.clear()
        self.number, self.inside = self.number + 1, True
        self._add({str(number): one for number, one in enumerate(args)} | dict(kwargs))

    def end(self) -> None:
        self.inside = self._in_pipeline

    def _add(self, batch: Mapping[str, Any]) -> None:
        tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor) and one.dim()}
        mask = tensors.get("attention_mask")
        first = next(iter(tensors.values()), None)
        count = 0 if first is None else len(first)
        self._rows.append(0 if first is None or first.dim() < 2 else count * first.shape[1])
        has_tokens = first is not None and first.dim() == 2 and not first.is_floating_point()
        if first is not None and has_tokens:
            positions = tensors.get("position_ids")
            self.has_positions = positions is not None and positions.dim() < 3 and positions.shape[-1] == first.shape[1]
            self.tokens.append(sketch.fingerprints([first], positions if self.has_positions else None).tolist())
        content = []
        for name, tensor in tensors.items():
            if name in NOT_CONTENT or len(tensor) != count:
                continue
            if mask is not None and mask.shape == tensor.shape:
                tensor = tensor * (mask != 0)
            content.append(tensor.masked_fill(tensor == IGNORED, 0) if not tensor.is_floating_point() else tensor)
        self.keys.append(sketch.fingerprints(content).tolist() if content else [])
        if self._part_of_tokens is not None and first is not None and first.dim() > 1:
            whole = torch.ones_like(first, dtype=torch.bool) if mask is None else mask
            mask = self._part_of_tokens(whole.bool())
            self._rows[-1] = mask.numel()
        self._lengths.append(self._rows[-1] // count if has_tokens else 0)
        is_padded = mask is not None and mask.dim() == 2 and not mask.bool().all()
        self._masks.append(mask.bool() if is_padded else None)  # type: ignore[union-attr]

    def call(self, name: str) -> int:
        """How often the module has been called before in this micro-batch. In a pipeline it is called once in each, and
        this decides which one it is of."""
        before = self._calls.get(name, 0)
        self._calls[name] = before + 1
        if not self._in_pipeline:
            return before
        self.number = before
        return 0

    def are_tokens(self, number: int, rows: int) -> bool:
        """Whether so many rows are one for each token of all samples, in their order."""
        return 0 <= number < len(self._rows) and self._rows[number] == rows

    def are_positions(self, number: int, tensor: Tensor) -> bool:
        """Whether its rows may be one for each token of a sample, without a dimension of samples."""
        return 0 <= number < len(self._lengths) and tensor.dim() == 2 and len(tensor) == self._lengths[number]

    def mask(self, number: int) -> Tensor | None:
        return self._masks[number] if 0 <= number < len(self._masks) else None


def rows_of(tensor: Tensor, batches: MicroBatches, number: int) -> tuple[Tensor, list[int], list[int]]:
    """An output as rows, one for each sample, their keys, and how many elements of each are of no filling. One row if
    it is not of samples.

    Samples are along dimension 0, or 1 if that does not fit; tokens of all samples may be in one dimension.
    """
    keys = batches.keys[number] if 0 <= number < len(batches.keys) else []
    count, mask = len(keys), batches.mask(number)
    if count and tensor.numel() and tensor.dim():
        is_second = tensor.dim() > 1 and tensor.shape[1] == count and not batches.are_tokens(number, tensor.shape[0])
        are_positions = batches.are_positions(number, tensor)
        if (tensor.shape[0] == count and not are_positions) or is_second:
            rows = tensor.transpose(0, 1) if tensor.shape[0] != count or are_positions else tensor
            filled = [tensor.numel() // count] * count
            if mask is not None and rows.dim() > 1 and rows.shape[1] == mask.shape[1]:
                rows = rows * mask.view(*mask.shape, *[1] * (rows.dim() - 2)).to(rows.dtype)
                filled = [tokens * filled[0] // mask.shape[1] for tokens in mask.sum(1).tolist()]
            return rows.reshape(count, -1), keys, filled
        if tensor.shape[0] % count == 0 and not are_positions:
            return tensor.reshape(count, -1), keys, [tensor.numel() // count] * count
    return tensor.reshape(1, -1), [store.WHOLE], [tensor.numel()]
