"""In which dtypes parameters and gradients of sharded strategies are, and what is in host memory or in files.

Offload: what a rank takes off its device, and where it goes (`sharding.options.offload`).

Mixed precision: in which dtype the module computes, and in which gradients are reduced.

What FSDP2 has as `MixedPrecisionPolicy(param_dtype, reduce_dtype)`. With `param_dtype` bf16:
- Each rank updates its shard in fp32 (`sharding.parts.flat`). An update is often smaller than half a unit in the last
  place of a bf16 value, which has 8 bits of mantissa, and would be lost.
- Parameters are gathered in bf16: half the bytes. Modules compute in bf16, and so do their inputs: what is fp32 among
  the arguments of the whole module and of each block is cast.
- Gradients are made in bf16, and reduced in `reduce_dtype`, by default fp32, so that a sum over many ranks and
  micro-batches is not rounded at each term.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.account import ModelSize
from ddp_lab.strategy.building import DTYPES
from ddp_lab.strategy.options import StrategyOptions


class Offload(NamedTuple):
    """The parts of `--offload WHAT[:FOLDER]`: `optimizer` or `parameters`, and the folder of the files, if any."""

    part: str
    folder: Path | None = None

    @classmethod
    def of(cls, text: str | None) -> "Offload | None":
        if text is None:
            return None
        part, _, folder = text.partition(":")
        return cls(part, Path(folder) if folder else None)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, is_copied: bool = False) -> Tensor:
        """A tensor in host memory or in a file, of zeros if it is in a file.

        Args:
            is_copied: It is copied from or to a GPU, which needs pinned memory.

        Raises:
            UserError: the file cannot be made.
        """
        if self.folder is None:
            is_pinned = is_copied and torch.cuda.is_available()
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_pinned)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=self.folder, prefix="offload_") as file:  # the mapping outlives the name
                size = math.prod(shape)
                file.truncate(size * dtype.itemsize)
                return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
        except OSError as error:
            raise UserError(f"--offload: cannot write into {self.folder}: {error.strerror}") from error


class Placement(NamedTuple):
    """In which dtypes, and where, parameters and gradients are kept.

    Attributes:
        param_dtype: In which the module computes; None is the parameters' own.
        reduce_dtype: In which gradients are reduced; None is that of the gradients.
        offload: What is in host memory (`sharding.options.offload`).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: Offload | None = None

    @classmethod
    def of(cls, options: StrategyOptions) -> "Placement":
        reduce = options.reduce_dtype or (options.param_dtype and "fp32")
        return cls(DTYPES.get(options.param_dtype), DTYPES.get(reduce), Offload.of(options.offload))

    def expected_memory(self, size: ModelSize, ranks: int, shards: Collection[str]) -> dict[str, int]:
        """Bytes on the device at rest, of those components that this placement changes.

        Args:
            shards: As `Strategy.shards`: what is not whole on each rank.
        """
        expected: dict[str, int] = {}
        computed_with = self.param_dtype.itemsize * size.elements if self.param_dtype else size.parameter_bytes
        frozen_shard = per_rank(size.parameter_bytes - size.trainable_bytes, ranks)
        if "parameters" not in shards and (self.param_dtype or self.offload):
            expected["parameters"] = computed_with + (
                frozen_shard if self.offload else per_rank(size.parameter_bytes, ranks)
            )
        if "parameters" in shards and self.offload:
            trained_with = (
                self.param_dtype.itemsize * size.trainable_elements if self.param_dtype else size.trainable_bytes
            )
            takes_all = self.offload.part == "parameters"
            expected["parameters"] = 0 if takes_all else per_rank(trained_with, ranks) + frozen_shard
        if "gradients" not in shards and self.reduce_dtype:
            sum_bytes = self.reduce_dtype.itemsize * size.trainable_elements
            is_apart = sum_bytes != size.trainable_bytes  # the shard of the sum, which the optimizer reads
            expected["gradients"] = sum_bytes + (per_rank(size.trainable_bytes, ranks) if is_apart else 0)
        if self.offload:
            expected["optimizer_state"] = 0
        return expected

    def expected_host_bytes(self, size: ModelSize, ranks: int, optimizer_values: int = 2) -> int:
        """Bytes in host memory or files at rest: shard, gradient and optimizer states.

        Args:
            optimizer_values: That the optimizer keeps for each element; Adam keeps two.
        """
        if not self.offload:
            return 0
        offloaded = size.parameter_bytes if self.offload.part == "parameters" else size.trainable_bytes
        return per_rank((1 + optimizer_values) * size.trainable_bytes + offloaded, ranks)


def per_rank(size: int, ranks: int) -> int:
    """The largest part, if `size` is cut as evenly as possible."""
    return -(-size // ranks)
