"""`--compile`: compiled blocks compute what the model as written does, under every choice, without being compiled anew.

`aot_eager` makes the same graphs as the default backend, and the same forward and backward functions, but runs them
operator by operator. So it shows what a strategy could break, in a fraction of the time.
"""

from functools import partial
from typing import Any

import pytest
import torch

from tests.models import build
from tests.parity import (
    OPTIMIZERS,
    all_choices,
    check_parity,
    for_each_choice,
    global_batch,
    load,
    message_of,
    one_step,
    options_of,
    oracle,
    train_on_rank,
)
from tests.ranks import RankPool
from training.errors import UnsupportedError

QUICK = {"compile_backend": "aot_eager"}
STEPS = [[[2, 2]] * 2] * 3
REPLICATED, ZERO3, FSDP2 = ("ddp", "bucket_ddp_async"), ("sharding", "zero3"), ("sharding", "pytorch_zero3")
sampled = pytest.mark.parametrize("choice", [REPLICATED, ZERO3, FSDP2], ids="-".join)


@for_each_choice
def test_blocks(ranks: RankPool, choice: tuple[str, str]) -> None:
    """A transformer, and blocks in which a frozen layer's weight is read after the trainable one has its gradient."""
    for model in ("llama", "adapted"):
        check_parity(ranks, choice, model, STEPS, "adam", QUICK)


@pytest.mark.parametrize("choice", [c for c in all_choices() if c[1] not in ("zero3", "deepspeed")], ids="-".join)
def test_without_blocks_the_module_is_compiled(ranks: RankPool, choice: tuple[str, str]) -> None:
    check_parity(ranks, choice, "tied", STEPS, options=QUICK)


@sampled
def test_three_ranks_clipped(ranks: RankPool, choice: tuple[str, str]) -> None:
    check_parity(ranks, choice, "llama", [[[2, 1], [3], [1, 1]]] * 3, options=QUICK, clip=0.1)


@sampled
def test_bf16(ranks: RankPool, choice: tuple[str, str]) -> None:
    """As without --compile (`test_parity.py`): to bf16's own resolution."""
    options = {**QUICK, "precision": "bf16"}
    steps = [[[4], [4]]] * 3
    results = ranks.run(2, partial(train_on_rank, options=options), choice, "llama", steps)
    for actual, wanted in zip(results[0]["loss"], oracle("llama", steps, precision="bf16")["loss"], strict=True):
        assert abs(actual - wanted) < 2**-8 * abs(wanted)


@sampled
@pytest.mark.parametrize("model", ["llama, checkpointed", "llama, checkpointed, re-entrant"])
def test_activation_checkpoints(ranks: RankPool, choice: tuple[str, str], model: str) -> None:
    check_parity(ranks, choice, model, STEPS, options=QUICK)


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


def test_zero3_refuses_a_module_without_blocks(ranks: RankPool) -> None:
    options = options_of(ZERO3, **QUICK)
    for message in ranks.run(2, message_of, UnsupportedError, build_without_blocks, options):
        assert "--compile: zero3" in message


def build_without_blocks(options: Any) -> None:
    load(ZERO3)(build("tied"), OPTIMIZERS["sgd"], options)
