"""Random numbers where ranks hold different parts of what is random.

Ranks that see the same samples draw the same numbers, so that a dropout that all of them compute is the same on all.
Within a parallel region each rank has heads of its own, and with sequence parallelism each has tokens of its own
between regions. There masks must differ. So there a rank draws from a state that it derives from the common one and its
number. Behind the region the common state goes on, the same on all ranks.

The derived state depends on the common one alone. So activation checkpoints and resumed runs get the same masks again.
"""

import hashlib

import torch


class OwnRandomNumbers:
    """Between `begin` and `end` this rank draws numbers of its own. Neither waits for the device."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._common: torch.Tensor | None = None

    @property
    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator

    def begin(self) -> None:
        if self._common is not None:
            return
        self._common = self._generator.get_state()
        digest = hashlib.sha256(self._common.numpy().tobytes() + self._rank.to_bytes(4, "little")).digest()
        self._generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def end(self) -> None:
        if self._common is None:
            return
        self._generator.set_state(self._common)
        self._common = None
        torch.rand((), dtype=torch.float32, device=self._device)  # or the next region would derive the same state
