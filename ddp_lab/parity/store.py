"""A recorded run: for each step and rank a table of quantities (Parquet), and facts (JSON)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddp_lab.parity.sketch import SIZE
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import json_bytes
from ddp_lab.writing import written_whole

WHOLE = 0
"""Key of what is no sample's: a parameter, or an output that is the same for all."""
START, OUTPUT, OUTPUT_GRADIENT, GRADIENT, PARAMETER, BUFFER = (
    "start",
    "output",
    "output gradient",
    "gradient",
    "parameter",
    "buffer",
)
SHARE = "share"
"""Of a sample in the gradient of a bias."""
FORMAT = 1


@dataclass
class Rows:
    """Quantities of one rank in one step, in the order of their calls. Numbers stay on the device until `write`."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    numbers: list[Any] = field(default_factory=list)

    def add(self, numbers: Any, keys: Sequence[int], elements: Sequence[int], **columns: Any) -> None:
        """`numbers`: fp64 of shape (len(keys), `SIZE` + `MOMENTS`)."""
        self.numbers.append(numbers)
        for name, value in columns.items():
            self.columns.setdefault(name, []).extend([value] * len(keys))
        self.columns.setdefault("key", []).extend(keys)
        self.columns.setdefault("elements", []).extend(elements)

    def frame(self) -> pd.DataFrame:
        if not self.numbers:
            return pd.DataFrame()
        values = np.concatenate([numbers.cpu().numpy() for numbers in self.numbers])
        return pd.DataFrame(self.columns | {"numbers": list(values)})


def write(folder: Path, rank: int, step: int, rows: Rows, facts: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write what a rank has recorded of a step: whole files or none."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    stem = f"step_{step:05d}.rank_{rank:05d}"
    with written_whole(folder / f"{stem}.parquet") as temporary:
        rows.frame().to_parquet(temporary)
    if tensors:
        torch.save(tensors, folder / f"{stem}.pt")
    with written_whole(folder / f"{stem}.json") as temporary:
        temporary.write_text(json.dumps(facts | {"format": FORMAT}))


class Place(NamedTuple):
    """Attributes:
    call: How often the module has been called before in the micro-batch.
    """

    kind: str
    name: str
    call: int = 0


@dataclass(frozen=True)
class Recorded:
    """A run as it was recorded.

    Attributes:
        steps: Numbers of the steps, from 0.
        facts: What each rank said of each step, by step and rank.
        is_cut: Each rank has a part of every sample.
        stages: The ranks that get samples from another rank, as those of later stages of a pipeline.
    """

    folder: Path
    facts: dict[int, list[dict[str, Any]]]
    is_cut: bool = False
    stages: frozenset[int] = frozenset()
    _tables: dict[int, "Table"] = field(default_factory=dict)

    def samples(self, step: int) -> list[list[int]]:
        """Keys of all samples of a step, by rank."""
        return [[key for keys in facts["keys"] for key in keys] for facts in self.facts[step]]

    def as_parts_of(self, samples: dict[int, list[int]], stages: frozenset[int] = frozenset()) -> "Recorded":
        """With these samples for those of each rank, by step, in their order. `stages`: for those of these alone, which
        have whole samples."""
        facts = dict[int, list[dict[str, Any]]]()
        for step, keys in samples.items():
            for rank, rank_facts in enumerate(self.facts[step]):
                ends = np.cumsum([len(batch) for batch in rank_facts["keys"]])
                cut = [part.tolist() for part in np.split(np.array(keys), ends[:-1])]
                facts.setdefault(step, []).append(
                    rank_facts | {"keys": cut} if rank in stages or not stages else rank_facts
                )
        return Recorded(self.folder, facts, is_cut=not stages, stages=stages)

    @property
    def steps(self) -> list[int]:
        return sorted(self.facts)

    @cached_property
    def first(self) -> dict[str, Any]:
        """Facts of the first step on rank 0."""
        facts: dict[str, Any] = self.facts[self.steps[0]][0]
        return facts

    @property
    def ranks(self) -> int:
        return len(self.facts[self.steps[0]])

    @property
    def micro_batches(self) -> int:
        """Of a step, on each rank."""
        return max(len(facts["keys"]) for facts in self.facts[self.steps[0]])

    def table(self, step: int) -> "Table":
        if step not in self._tables:
            self._tables[step] = Table(self, step)
        return self._tables[step]

    def frame(self, step: int) -> pd.DataFrame:
        """All quantities of a step, of all ranks, in the order in which rank 0 came to them."""
        tables = []
        for rank, path in enumerate(sorted(self.folder.glob(f"step_{step:05d}.rank_*.parquet"))):
            try:
                table = pd.read_parquet(path).assign(rank=rank)
            except (OSError, ValueError):  # pyarrow's errors are of these
                raise UserError(f"{path}: is damaged; record the run again") from None
            if (self.is_cut or rank in self.stages) and len(table):
                # rows of samples are in the order of the keys of their micro-batch
                keys = self.facts[step][rank]["keys"]
                rows = zip(table["key"], table["micro_batch"], table.groupby("order").cumcount(), strict=True)
                table["key"] = [keys[micro][at] if key != WHOLE else key for key, micro, at in rows]
            tables.append(table)
        return pd.concat([table for table in tables if len(table)], ignore_index=True)


class Table:
    """The quantities of one step: arrays with a row for each rank, micro-batch and sample.

    Attributes:
        sketches: fp64 of shape (rows, `SIZE`); of parameters, those of their updates.
        moments: fp64 of shape (rows, `MOMENTS`).
        norm: Of each row before `_to_updates`; of parameters, that of the parameter.
        is_cut: As of `Recorded`.
        elements: In a sample, without filling, or in a whole tensor, as the rank has it.
        places: Rows by quantity, in the order in which they were made.
        blocks: Sketches of the parts that ranks have of a quantity, by rank; its row has their sum.
    """

    def __init__(self, recorded: Recorded, step: int) -> None:
        frame, self.is_cut = recorded.frame(step), recorded.is_cut
        numbers = np.stack(frame["numbers"].to_list())
        self.sketches, self.moments = numbers[:, :SIZE], numbers[:, SIZE:]
        self.rank = frame["rank"].to_numpy().copy()
        self.micro_batch, self.key = frame["micro_batch"].to_numpy(), frame["key"].to_numpy()
        self.part, self.elements = frame["part"].to_numpy(), frame["elements"].to_numpy().astype(float)
        self.dtype = frame["dtype"].to_numpy(dtype=object)
        self.norm = np.sqrt(self.moments[:, 1])
        self._to_updates(frame, recorded, step)
        order = frame["order"].to_numpy()
        self.blocks = dict[Place, dict[int, np.ndarray]]()
        rows = dict[Place, np.ndarray]()
        for key, at in frame.groupby(["kind", "name", "call"], sort=False).indices.items():
            place = Place(*key)  # type: ignore[misc]
            rows[place] = self._merge_blocks(place, np.sort(at))
        self.places = {place: rows[place] for place in sorted(rows, key=lambda place: order[rows[place]].min())}

    def _to_updates(self, frame: pd.DataFrame, recorded: Recorded, step: int) -> None:
        kind, earlier = (START, frame) if step == 0 else (PARAMETER, recorded.frame(step - 1))
        columns = ["name", "part", "rank"]
        starts = earlier[earlier["kind"] == kind]
        before = dict(zip(starts[columns].itertuples(index=False, name=None), starts["numbers"], strict=True))
        updates = frame[frame["kind"] == PARAMETER]
        for row, place in zip(updates.index, updates[columns].itertuples(index=False, name=None), strict=True):
            if place in before:
                self.sketches[row] -= before[place][:SIZE]

    def _merge_blocks(self, place: Place, rows: np.ndarray) -> np.ndarray:
        """Add up the blocks of a tensor, each once."""
        if (self.part[rows] < 0).all():
            return rows
        _, first = np.unique(self.part[rows], return_index=True)
        blocks = rows[first]
        self.blocks[place] = dict(zip(self.rank[blocks], self.sketches[blocks].copy(), strict=True))
        self.sketches[rows[0]], self.moments[rows[0]] = self.sketches[blocks].sum(0), self.moments[blocks].sum(0)
        self.rank[rows[0]] = -1
        return rows[:1]

    def spread(self, place: Place) -> float:
        """The largest relative difference between ranks."""
        sketches = self.sketches[self.places[place]]
        return float(np.linalg.norm(sketches - sketches[0], axis=1).max() / max(np.linalg.norm(sketches[0]), 1e-300))


def read(folder: Path) -> Recorded:
    paths = sorted(folder.glob("step_*.rank_*.json"))
    if not paths:
        raise UserError(f"{folder}: no recorded run; ddp_lab.parity.watch(model, '{folder}') in a loop records one")
    facts: dict[int, list[dict[str, Any]]] = {}
    for path in paths:
        try:
            content = json.loads(json_bytes(path))
        except (ValueError, RecursionError):
            raise UserError(f"{path}: is damaged; record the run again") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(f"{path}: of another version of ddp-lab; record the run again")
        facts.setdefault(int(path.name[5:10]), []).append(content)
    ranks = facts[min(facts)][0]["ranks"]
    for step, of_ranks in facts.items():
        if len(of_ranks) != ranks:
            raise UserError(f"{folder}: step {step} has files of {len(of_ranks)} of {ranks} ranks; record it again")
    return Recorded(folder, facts)


# Samples of ranks that get parts of them, or what other ranks have made of them ---------------------------------------


def matched(a: Recorded, b: Recorded) -> Recorded:
    """Run B with run A's samples, in their order, if each of its ranks has a part of every sample, or if one has all of
    them and sends its outputs to the others. Otherwise run B as it is."""
    by_rank = {step: b.samples(step) for step in a.steps if step in b.facts}
    samples_of_a = {step: set(a.samples(step)[0]) for step in by_rank} if a.ranks == 1 else {}
    fed = {rank for step, keys in samples_of_a.items() for rank in range(b.ranks) if keys & set(by_rank[step][rank])}
    stages = frozenset(range(b.ranks)) - fed
    table_a, table_b = a.table(a.steps[0]), b.table(a.steps[0])
    if len(fed) == 1 and stages and not _have_the_same(table_b, fed | stages):
        (first,) = fed
        if all(keys == set(by_rank[step][first]) for step, keys in samples_of_a.items()) and all(
            len(keys) == len(of_ranks[first]) for of_ranks in by_rank.values() for keys in of_ranks
        ):
            return b.as_parts_of({step: of_ranks[first] for step, of_ranks in by_rank.items()}, stages)
    place = next((key for key in table_a.places if key.kind == OUTPUT and key in table_b.places), None)
    if place is None or b.ranks < 2:
        return b
    at_a, at_b = table_a.places[place], table_b.places[place]
    size_a, size_b = table_a.elements[at_a][0], table_b.elements[at_b][0]
    if size_b * b.ranks != size_a or set(table_a.key[at_a]) & set(table_b.key[at_b]):
        return b
    samples = {step: a.samples(step)[0] for step in a.steps if step in b.facts}
    is_whole = all(len(keys) == len(samples[step]) for step in samples for keys in b.samples(step))
    return b.as_parts_of(samples) if is_whole else b


def _have_the_same(table: Table, ranks: set[int]) -> bool:
    """Whether ranks have parameters of the same names, as those of a pipeline's stages have not."""
    starts = [set(table.rank[rows]) for place, rows in table.places.items() if place.kind == START]
    return all(of_place >= ranks or -1 in of_place for of_place in starts)
