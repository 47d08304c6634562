"""Which samples a forward pass has. So runs that cut a batch differently are compared sample by sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_lab.parity import sketch, store

NOT_CONTENT = ("attention_mask", "position_ids", "cache_position")
IGNORED = -100
"""Labels of filling, by convention of PyTorch."""


class MicroBatch(NamedTuple):
    """Attributes:
    keys: A number for each of its samples, by content.
    tokens: The same, by tokens and their position_ids.
    has_positions: The model is given position_ids.
    rows: Of an output with a row for each token of all samples; 0 without tokens.
    length: In tokens, of a sample; 0 if samples are not of tokens.
    mask: Which tokens are of no filling, of shape (samples, tokens). None: all.
    """

    keys: list[int]
    tokens: list[int]
    has_positions: bool
    rows: int
    length: int
    mask: Tensor | None


NONE = MicroBatch([], [], False, 0, 0, None)
"""Outside of a forward pass of the model."""


class MicroBatches:
    """
    Args:
        part_of_tokens: What this rank has of (samples, tokens), if ranks cut the tokens behind what is seen here.

    Attributes:
        inside: A forward pass of the whole model runs; always in a pipeline, where it has no one beginning.
        number: Of the current micro-batch in the step, from 0; -1 outside of them.
        of_step: Those that have begun.
    """

    def __init__(self, in_pipeline: bool, part_of_tokens: Callable[[Tensor], Tensor] | None = None) -> None:
        self._in_pipeline = self.inside = in_pipeline
        self._part_of_tokens = part_of_tokens
        self.begin_step()

    def begin_step(self) -> None:
        self.number, self.of_step, self._calls = -1, list[MicroBatch](), dict[str, int]()

    def know(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Read all micro-batches of the step beforehand, since a later stage of a pipeline does not see them."""
        if self._in_pipeline:
            self.of_step += [self._made_of(batch) for batch in micro_batches]

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward pass begins."""
        if self._in_pipeline:
            return
        self._calls.clear()
        self.number, self.inside = self.number + 1, True
        self.of_step.append(self._made_of({str(number): value for number, value in enumerate(args)} | dict(kwargs)))

    def end(self) -> None:
        self.inside = self._in_pipeline

    def _made_of(self, batch: Mapping[str, Any]) -> MicroBatch:
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        if not tensors:
            return NONE
        first, mask = next(iter(tensors.values())), tensors.get("attention_mask")
        count, content = len(first), list[Tensor]()
        for name, tensor in tensors.items():
            if name in NOT_CONTENT or len(tensor) != count:
                continue
            if mask is not None and mask.shape == tensor.shape:
                tensor = tensor * (mask != 0)
            content.append(tensor.masked_fill(tensor == IGNORED, 0) if not tensor.is_floating_point() else tensor)
        rows = count * first.shape[1] if first.dim() > 1 else 0
        if self._part_of_tokens is not None and first.dim() > 1:
            full_mask = torch.ones_like(first, dtype=torch.bool) if mask is None else mask
            mask = self._part_of_tokens(full_mask.bool())
            rows = mask.numel()
        if mask is not None:
            mask = None if mask.dim() != 2 or mask.bool().all() else mask.bool()
        keys = sketch.fingerprints(content).tolist() if content else []
        if first.dim() != 2 or first.is_floating_point():
            return MicroBatch(keys, [], False, rows, 0, mask)
        positions = tensors.get("position_ids")
        if positions is not None and (positions.dim() > 2 or positions.shape[-1] != first.shape[1]):
            positions = None
        tokens = sketch.fingerprints([first], positions).tolist()
        return MicroBatch(keys, tokens, positions is not None, rows, rows // count, mask)

    def call(self, name: str) -> int:
        """How often the module has been called before in this micro-batch. In a pipeline it is called once in each, and
        this decides which one it is of."""
        before = self._calls.get(name, 0)
        self._calls[name] = before + 1
        if not self._in_pipeline:
            return before
        self.number = before
        return 0

    def at(self, number: int) -> MicroBatch:
        return self.of_step[number] if 0 <= number < len(self.of_step) else NONE


def rows_of(tensor: Tensor, batch: MicroBatch) -> tuple[Tensor, list[int], list[int]]:
    """An output as rows, one for each sample, their keys, and how many elements of each are of no filling. One row if
    it is not of samples.

    Samples are along dimension 0, or 1 if that does not fit; tokens of all samples may be in one dimension.
    """
    count, mask = len(batch.keys), batch.mask
    if count and tensor.numel() and tensor.dim():
        is_second = tensor.dim() > 1 and tensor.shape[1] == count and batch.rows != tensor.shape[0]
        are_positions = tensor.dim() == 2 and len(tensor) == batch.length  # of a sample, without one for samples
        if (tensor.shape[0] == count and not are_positions) or is_second:
            rows = tensor.transpose(0, 1) if tensor.shape[0] != count or are_positions else tensor
            filled = [tensor.numel() // count] * count
            if mask is not None and rows.dim() > 1 and rows.shape[1] == mask.shape[1]:
                rows = rows * mask.view(*mask.shape, *[1] * (rows.dim() - 2)).to(rows.dtype)
                filled = [tokens * filled[0] // mask.shape[1] for tokens in mask.sum(1).tolist()]
            return rows.reshape(count, -1), batch.keys, filled
        if tensor.shape[0] % count == 0 and not are_positions:
            return tensor.reshape(count, -1), batch.keys, [tensor.numel() // count] * count
    return tensor.reshape(1, -1), [store.WHOLE], [tensor.numel()]
