"""Host memory, or files, in which a rank keeps what it has taken off its device (`sharding.options.offload`)."""

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_lab.runtime.errors import UserError


class Offload(NamedTuple):
    """What `--offload WHAT[:FOLDER]` says: `optimizer` or `parameters`, and where files are, if in files."""

    what: str
    folder: Path | None = None

    @classmethod
    def of(cls, text: str | None) -> "Offload | None":
        if text is None:
            return None
        what, _, folder = text.partition(":")
        return cls(what, Path(folder) if folder else None)

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
