"""Ranks as text, for messages about one run."""

from dataclasses import dataclass

from ddp_lab.runtime.mesh import Mesh


@dataclass(frozen=True)
class RankNames:
    """The numbers of ranks, on a mesh with their places: `1, 3`, or `1 (dp 0, tp 1), 3 (dp 1, tp 1)`."""

    mesh: Mesh | None = None

    def __call__(self, *ranks: int) -> str:
        return ", ".join(f"{rank} ({self.mesh.describe(rank)})" if self.mesh else str(rank) for rank in ranks)


NUMBERS = RankNames()
"""Numbers alone."""
