"""`--compile`: compiled blocks compute what the model as written does, under every choice, without being compiled anew.

`aot_eager` makes the same graphs as the default backend, and the same forward and backward functions, but runs them
operator by operator. So it shows what a strategy could break, in a fraction of the time.
"""

from typing import Any

import pytest
import torch

from ddp_lab.runtime.errors import UnsupportedError
from tests.models import build
from tests.parity import (
    OPTIMIZERS,
    build_and_step,
    check_parity,
    global_batch,
    load,
    message_of,
    one_step,
    options_of,
)
from tests.ranks import RankPool
from tests.strategies.test_traffic import profiled_step

QUICK = {"compile_backend": "aot_eager"}
STEPS = [[[2, 2]] * 2] * 2
REPLICATED, ZERO3, FSDP2 = ("ddp", "bucket_ddp_async"), ("sharding", "zero3"), ("sharding", "pytorch_zero3")
sampled = pytest.mark.parametrize(
    "choice", [ZERO3, *(pytest.param(choice, marks=pytest.mark.exhaustive) for choice in (REPLICATED, FSDP2))]
)


@sampled
def test_a_transformer(ranks: RankPool, choice: tuple[str, str]) -> None:
    check_parity(ranks, choice, "llama", STEPS, options=QUICK, clip=0.1)


@sampled
def test_nothing_is_compiled_after_the_steps_that_settle(ranks: RankPool, choice: tuple[str, str]) -> None:
    """Both blocks of the model share a graph, which serves all later steps; a smaller last batch makes one more."""
    for settled, later, smaller in ranks.run(2, records_of_compilation, choice):
        assert settled["blocks"] == 2 and settled["graphs"] == 1 and settled["seconds"] > 0
        assert settled["recompilations"] == settled["graph_breaks"] == {}
        assert later == settled
        assert smaller["graphs"] == 2 and smaller["graph_breaks"] == {}
        assert ["size mismatch" in reason for reason in smaller["recompilations"]] == [True]


def records_of_compilation(choice: tuple[str, str]) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    strategy = load(choice)(build("llama"), OPTIMIZERS["sgd"], options_of(choice, **QUICK))
    assert strategy.compiled and strategy.settling_steps == 2
    rank, records = strategy.data_parallel_rank, []
    for steps, size in ((2, 4), (4, 4), (1, 3)):
        for step in range(steps):
            one_step(strategy, global_batch("llama", [[size, size]] * 2, step)[rank])
        records.append(strategy.compiled.as_record())
    return records


@sampled
def test_traffic_and_memory_are_as_without(ranks: RankPool, choice: tuple[str, str]) -> None:
    for announced, seen, _ in ranks.run(2, profiled_step, choice, "llama", 2, QUICK):
        assert announced == seen
    compiled, plain = (ranks.run(2, held_at_rest, choice, options) for options in (QUICK, {}))
    assert compiled == plain


def held_at_rest(choice: tuple[str, str], options: dict[str, Any]) -> dict[str, int]:
    return build_and_step(choice, "llama", options_of(choice, **options)).memory_breakdown()


def test_zero3_refuses_a_module_without_blocks(ranks: RankPool) -> None:
    for message in ranks.run(
        2, message_of, UnsupportedError, build_and_step, ZERO3, "tied", options_of(ZERO3, **QUICK)
    ):
        assert "--compile: zero3" in message
