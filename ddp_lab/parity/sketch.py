"""Small linear summaries of large tensors (count sketches).

A sketch adds the elements of a tensor, each with a sign, into `SIZE` sums: element i goes to sum i modulo `SIZE`, with
a sign that is a hash of i. It is linear, so that a sum of sketches is the sketch of the sum, and sketches of parts add
up to that of the whole. Its squared norm estimates that of the tensor without bias, with a relative deviation of
sqrt(2 / SIZE). (Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002.)

Moments (sum, sum of squares, sum of magnitudes) also add up over parts, wherever a part comes from.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

SIZE = 32
MOMENTS = 3
_CHUNK = 2**22
"""Elements that are hashed at once."""


def signs(indices: Tensor) -> Tensor:
    """1.0 or -1.0 for each index: one bit of a multiplicative hash."""
    return ((indices * 0x9E3779B97F4A7C1 ^ (indices >> 7) * 0x2545F4914F6CDD1) >> 41 & 1).double() * 2 - 1


@lru_cache(maxsize=8)
def _signs_from(start: int, count: int, device: torch.device) -> Tensor:
    return signs(torch.arange(start, start + count, device=device))


def of_rows(rows: Tensor) -> Tensor:
    """Sketches and moments of each row.

    Args:
        rows: Of shape (rows, elements), floating point.

    Returns:
        fp64 of shape (rows, `SIZE` + `MOMENTS`), on the same device.
    """
    total = torch.zeros(len(rows), SIZE + MOMENTS, dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[1], _CHUNK):
        chunk = rows[:, start : start + _CHUNK].double()
        count = chunk.shape[1]
        total[:, SIZE:] += torch.stack([chunk.sum(1), chunk.square().sum(1), chunk.abs().sum(1)], dim=1)
        signed = chunk * _signs_from(start, count, rows.device)
        padded = torch.nn.functional.pad(signed, (0, -count % SIZE))
        total[:, :SIZE] += padded.view(len(rows), -1, SIZE).sum(1)
    return total


def of_tensor(tensor: Tensor) -> Tensor:
    """Of a whole tensor, fp64 of shape (`SIZE` + `MOMENTS`,)."""
    return of_rows(tensor.detach().reshape(1, -1))[0]


def of_block(block: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Of a block of a larger tensor, so that the sketches of all blocks add up to that of the whole.

    Args:
        offsets: Where the block begins in each dimension.
        shape: Of the whole tensor.
    """
    indices, stride = torch.zeros((), dtype=torch.int64, device=block.device), 1
    for dimension in reversed(range(len(shape))):
        along = (torch.arange(block.shape[dimension], device=block.device) + offsets[dimension]) * stride
        indices = indices + along.view(-1, *[1] * (len(shape) - 1 - dimension))
        stride *= shape[dimension]
    values, indices = block.detach().double().flatten(), indices.expand(block.shape).flatten()
    sums = torch.zeros(SIZE, dtype=torch.float64, device=block.device)
    sums.index_add_(0, indices % SIZE, values * signs(indices))
    return torch.cat([sums, torch.stack([values.sum(), values.square().sum(), values.abs().sum()])])


def fingerprints(tensors: Sequence[Tensor], positions: Tensor | None = None) -> Tensor:
    """A number for each row of what tensors hold together; equal rows have equal ones.

    Args:
        tensors: Each of shape (rows, ...). Trailing zeros of a row do not count.
        positions: Of the elements of a row, of shape (elements,) or (rows or 1, elements), by default from 0. Numbers
            of parts of a row, each with its positions, add up to that of the row.

    Returns:
        int64 of shape (rows,).
    """
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        rows = tensor.detach().reshape(len(tensor), -1)
        if rows.is_floating_point():
            rows = rows.float().view(torch.int32)
        places = 1 + (torch.arange(rows.shape[1], device=rows.device) if positions is None else positions)
        weights = (places * 0x9E3779B97F4A7C1 + number * 0x1B873593) ^ (places << 17)
        total = total * 31 + (rows.long() * weights).sum(1)
    return total
