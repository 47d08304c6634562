"""`--compile`: blocks are compiled once, and no more when steps have settled. Parity and memory stand in their tables.

`aot_eager` makes the same graphs as the default backend, and the same forward and backward functions, but runs them
operator by operator. So it shows what a strategy could break, in a fraction of the time.
"""

from typing import Any

import pytest
import torch

from tests.parity import Case, built, check, global_batch, one_step
from tests.ranks import RankPool

QUICK = {"compile_backend": "aot_eager"}
sampled = pytest.mark.parametrize(
    "choice", ["zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bucket_ddp_async", "pytorch_zero3"))]
)


@sampled
def test_nothing_is_compiled_after_the_steps_that_settle(ranks: RankPool, choice):
    """Both blocks of the model share a graph, which serves all later steps; a smaller last batch makes one more."""
    for settled, later, smaller in ranks.run(2, records_of_compilation, choice):
        assert settled["blocks"] == 2 and settled["graphs"] == 1 and settled["seconds"] > 0
        assert settled["recompilations"] == settled["graph_breaks"] == {}
        assert later == settled
        assert smaller["graphs"] == 2 and smaller["graph_breaks"] == {}
        assert ["size mismatch" in reason for reason in smaller["recompilations"]] == [True]


def records_of_compilation(choice: str) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    strategy = built(choice, "llama", **QUICK)
    assert strategy.compiled and strategy.settling_steps == 2
    rank, records = strategy.data_parallel_rank, []
    for steps, size in ((2, 4), (2, 4), (1, 3)):
        for step in range(steps):
            one_step(strategy, global_batch("llama", [[size, size]] * 2, step)[rank])
        records.append(strategy.compiled.as_record())
    return records


@sampled
def test_parity(ranks: RankPool, choice):
    check(ranks, Case(choice, "llama", options=QUICK, clip=0.1))
