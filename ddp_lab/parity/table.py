"""The quantities of one step of one run."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from ddp_lab.parity.sketch import SIZE
from ddp_lab.parity.store import PARAMETER, START, Recorded, numbers_of


class Place(NamedTuple):
    """Attributes:
    call: How often the module has been called before in the micro-batch.
    """

    kind: str
    name: str
    call: int = 0


class Table:
    """Arrays with a row for each rank, micro-batch and sample.

    Attributes:
        sketches: fp64 of shape (rows, `SIZE`); of parameters, those of their updates.
        moments: fp64 of shape (rows, `MOMENTS`).
        held: Of parameters, the norm of what is updated.
        is_cut: As of `Recorded`.
        elements: In a sample, without filling, or in a whole tensor, as the rank has it.
        places: Rows by quantity, in the order in which they were made.
    """

    def __init__(self, recorded: Recorded, step: int) -> None:
        frame, self.is_cut = recorded.table(step), recorded.is_cut
        self.sketches, self.moments = numbers_of(frame)
        self.rank, self.micro_batch, self.key = (frame[name].to_numpy() for name in ("rank", "micro_batch", "key"))
        self.part, self.elements = frame["part"].to_numpy(), frame["elements"].to_numpy().astype(float)
        self.dtype = frame["dtype"].to_numpy(dtype=object)
        self.held = np.sqrt(self.moments[:, 1])
        self._to_updates(frame, recorded, step)
        order = frame["order"].to_numpy()
        found = frame.groupby(["kind", "name", "call"], sort=False).indices
        rows = {Place(*place): self._whole(np.sort(at)) for place, at in found.items()}  # type: ignore[misc]
        self.places = {place: rows[place] for place in sorted(rows, key=lambda place: order[rows[place]].min())}

    def _to_updates(self, frame: pd.DataFrame, recorded: Recorded, step: int) -> None:
        kind, earlier = (START, frame) if step == 0 else (PARAMETER, recorded.table(step - 1))
        columns = ["name", "part", "rank"]
        some = earlier[earlier["kind"] == kind]
        before = dict(zip(some[columns].itertuples(index=False, name=None), some["numbers"], strict=True))
        ours = frame[frame["kind"] == PARAMETER]
        for row, place in zip(ours.index, ours[columns].itertuples(index=False, name=None), strict=True):
            if place in before:
                self.sketches[row] -= before[place][:SIZE]

    def _whole(self, rows: np.ndarray) -> np.ndarray:
        """Blocks of a tensor are added up, each once."""
        if (self.part[rows] < 0).all():
            return rows
        _, first = np.unique(self.part[rows], return_index=True)
        blocks = rows[first]
        self.sketches[rows[0]], self.moments[rows[0]] = self.sketches[blocks].sum(0), self.moments[blocks].sum(0)
        self.rank = self.rank.copy()
        self.rank[rows[0]] = -1
        return rows[:1]

    def spread(self, place: Place) -> float:
        """How far ranks are from one another, relative."""
        ours = self.sketches[self.places[place]]
        return float(np.linalg.norm(ours - ours[0], axis=1).max() / max(np.linalg.norm(ours[0]), 1e-300))
