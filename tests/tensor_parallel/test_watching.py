"""Ranks that hold parts of one model compare what they have issued; messages name ranks with their places."""

import torch
import torch.distributed as dist

from ddp_lab.runtime.errors import SequenceError
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.runtime.watch.cause import RankNames, RankReport, first_cause
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.sequence import recorded_collectives
from ddp_lab.strategy.exchange import Counts, Exchange
from tests.ranks import RankPool
from tests.runtime.test_watching import ended, entry, gone, state
from tests.tables import each_row

MESH = Mesh({"dp": 2, "tp": 2})


def step_on_mesh(differs: bool) -> str | None:
    """All-reduce among parts of a model, on rank 3 perhaps as another dtype, which Gloo does not notice."""
    rank = dist.get_rank()
    flight = FlightRecorder.create(rank)
    with recorded_collectives(flight, names=RankNames(MESH)), mesh_groups(MESH, "cpu") as groups:
        exchange = Exchange(groups.data, groups.everyone, groups.model, torch.device("cpu"))
        size = 4 if rank < 2 else 8  # ranks with other samples may have others
        dtype = torch.int32 if differs and rank == 3 else torch.float32
        dist.all_reduce(torch.zeros(size, dtype=dtype), group=groups.model)
        problem = None
        try:
            rows, _ = exchange.run(Counts(1.0, 1, 0, 0), [True], lambda: torch.zeros(2, dtype=torch.float64))
            exchange.require_same_sequence(rows)
            assert exchange.used(rows, [True]) == [True]
        except SequenceError as error:
            problem = str(error)
    flight.close()
    return problem


def test_ranks_with_parts_of_one_model_compare_what_they_issued(ranks: RankPool):
    """Every rank raises the error, also those whose group is in order."""
    assert ranks.run(4, step_on_mesh, False) == [None] * 4
    (problem,) = set(ranks.run(4, step_on_mesh, True))
    expected = "rank 2 (dp 1, tp 0) all_reduce of 8 float32; rank 3 (dp 1, tp 1) all_reduce of 8 int32"
    assert problem is not None and expected in problem and "no parameter is updated yet" in problem


short, long = entry(1, group="ranks 2,3"), entry(1, group="ranks 2,3", elements=11)
waiting = state(0, short, waits=True)
MESSAGES: dict[str, tuple[dict[int, RankReport], str]] = {
    "several killed": (
        {0: ended(waiting, "connection"), 2: gone(state(2, progress_s=2)), 3: gone(state(3))},
        "ranks 2 (dp 1, tp 0), 3 (dp 1, tp 1); first rank 3 (dp 1, tp 1) was killed",
    ),
    "mismatched": (
        {2: ended(state(2, short), "mismatch"), 3: ended(state(3, long), "noticed")},
        "collective #1 differs between ranks: rank 2 (dp 1, tp 0) all_reduce of 10 float32; rank 3 (dp 1, tp 1) all_",
    ),
    "hung": (
        {0: ended(waiting, "timeout"), 3: ended(state(3), "noticed")},
        "rank 3 (dp 1, tp 1) hangs in step 7 during backward; rank 0 (dp 0, tp 0) waited",
    ),
}


@each_row("how", MESSAGES)
def test_messages_name_ranks_with_their_places(how):
    reports, message = MESSAGES[how]
    ending = first_cause(reports, names=RankNames(MESH))
    assert str(ending.message).startswith(message)
    assert ending.how == how.removeprefix("several ")
    assert "(dp" not in str(first_cause(reports).message)
