"""Process groups of all ranks over several backends."""

import torch.distributed as dist

from training.distributed import Ranks, group_config, library_of
from training.errors import UserError


class Groups:
    """Makes each group once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._made: dict[str, dist.ProcessGroup] = {}

    def over(self, backend: str | None, label: str) -> dist.ProcessGroup:
        """The group over `backend`; the default group if it is None. Collective.

        Args:
            label: Who asks for it, for the error.

        Raises:
            UserError: the backend needs CUDA, and the ranks are on the CPU.
        """
        if backend is None:
            return dist.group.WORLD  # type: ignore[return-value]
        if library_of(backend) == "nccl" and self._ranks.device.type != "cuda":
            raise UserError(f"{label}: {backend} needs CUDA devices")
        if backend not in self._made:
            self._made[backend] = dist.new_group(backend=group_config(backend))
        return self._made[backend]
