"""Every registered choice computes what one process computes on the whole global batch (TRAPS, head)."""

from functools import partial
from typing import Any

import pytest

from tests.covering import pairwise
from tests.models import MODELS
from tests.parity import Choice, all_choices, check_parity, for_each_choice, oracle, over_choices, train_on_rank
from tests.ranks import RankPool

EVEN = {2: [[2, 2]] * 2, 3: [[2, 2]] * 3, 4: [[1, 2]] * 4}
"""Micro-batch sizes by rank, by world size."""
TRAINED = {
    "model": list(MODELS),
    "ranks": ((2, "adam"), (2, "sgd"), (3, "sgd")),  # with sums of three, Adam would magnify rounding too much
    "bucket_cap_mb": (25.0, 0.0003),  # or smaller than most parameters, so that some hold one that is larger
    "groups": (False, True),
    "clip": (None, 0.5),
}
COVERING = pairwise({"choice": all_choices(), **TRAINED})


def check(ranks: RankPool, choice: Choice, row: dict[str, Any], world_size: int, optimizer: str) -> None:
    options = {"bucket_cap_mb": row["bucket_cap_mb"]}
    steps = [EVEN[world_size]] * 3
    check_parity(ranks, choice, row["model"], steps, optimizer, options, groups=row["groups"], clip=row["clip"])


@for_each_choice
def test_pairs_of_settings(ranks: RankPool, choice: Choice) -> None:
    """Each module that holds a trap, under settings of which each pair is there for some choice or other."""
    rows = [row for row in COVERING if row["choice"] == choice]
    assert {row["model"] for row in rows} == set(MODELS)
    for row in rows:
        check(ranks, choice, row, *row["ranks"])


@pytest.mark.exhaustive
@for_each_choice
@pytest.mark.parametrize("model", MODELS)
def test_all_pairs_of_settings(ranks: RankPool, choice: Choice, model: str) -> None:
    for row in pairwise(TRAINED | {"model": [model]}):
        check(ranks, choice, row, *row["ranks"])
    check_parity(ranks, choice, model, [EVEN[4]] * 3)


@over_choices
def test_bf16_autocast_keeps_fp32_states(ranks: RankPool, choice: Choice) -> None:
    """Weights are rounded to bf16 alike, but samples are summed in another order: bf16's own resolution is the bar."""
    steps = [[[4], [4]]] * 2
    results = ranks.run(2, partial(train_on_rank, options={"precision": "bf16"}), choice, "llama", steps)
    expected = oracle("llama", steps, precision="bf16")
    for name, tensor in results[0]["state"].items():
        assert tensor.dtype == expected["state"][name].dtype
    assert results[0]["loss"] != oracle("llama", steps)["loss"], "autocast made no difference"
    for actual, wanted in zip(results[0]["loss"], expected["loss"], strict=True):
        assert abs(actual - wanted) < 2**-8 * abs(wanted)
