"""Process groups of all ranks over several backends, and of meshes."""

from contextlib import ExitStack

import torch.distributed as dist

from ddp_lab.runtime.distributed import Ranks, group_config, library_of, meshed
from ddp_lab.runtime.errors import UserError


class Groups:
    """Makes each group once.

    Args:
        stack: Ends the groups of meshes.
    """

    def __init__(self, ranks: Ranks, stack: ExitStack) -> None:
        self._ranks, self._stack = ranks, stack
        self._made: dict[str, dist.ProcessGroup] = {}
        self._meshed: dict[str, Ranks] = {}

    def on_mesh(self, mesh: str | None) -> Ranks:
        """The ranks with the groups of a mesh. Collective.

        Raises:
            UserError: it does not fit them.
        """
        if mesh is None:
            return self._ranks
        if mesh not in self._meshed:
            self._meshed[mesh] = self._stack.enter_context(meshed(self._ranks, mesh))
        return self._meshed[mesh]

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
