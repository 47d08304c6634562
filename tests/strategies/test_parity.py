"""Every registered choice computes what one process computes on the whole global batch (TRAPS, head)."""

from functools import partial

import pytest

from tests.models import MODELS
from tests.parity import check_parity, for_each_choice, oracle, train_on_rank
from tests.ranks import RankPool

EVEN = {2: [[2, 2]] * 2, 3: [[2, 2]] * 3, 4: [[1, 2]] * 4}
"""Micro-batch sizes by rank, by world size."""
STEPS = [EVEN[2]] * 3


@for_each_choice
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_models(ranks: RankPool, choice: tuple[str, str], world_size: int) -> None:
    """All models, with Adam at 2 ranks and SGD at 3; what more ranks add is how things are divided."""
    for model in MODELS if world_size < 4 else ("plain", "odd"):
        check_parity(ranks, choice, model, [EVEN[world_size]] * 3, "adam" if world_size == 2 else "sgd")


@for_each_choice
def test_small_buckets(ranks: RankPool, choice: tuple[str, str]) -> None:
    """Buckets smaller than most parameters, so that there are many, and some hold one parameter larger than the cap."""
    for model in ("odd", "plain"):
        check_parity(ranks, choice, model, STEPS, options={"bucket_cap_mb": 0.0003})


@for_each_choice
def test_parameter_groups(ranks: RankPool, choice: tuple[str, str]) -> None:
    check_parity(ranks, choice, "plain", STEPS, "adam", groups=True)


@for_each_choice
def test_bf16_autocast_keeps_fp32_states(ranks: RankPool, choice: tuple[str, str]) -> None:
    """Weights are rounded to bf16 alike, but samples are summed in another order: bf16's own resolution is the bar."""
    steps = [[[4], [4]]] * 3
    results = ranks.run(2, partial(train_on_rank, options={"precision": "bf16"}), choice, "llama", steps)
    expected = oracle("llama", steps, precision="bf16")
    for name, tensor in results[0]["state"].items():
        assert tensor.dtype == expected["state"][name].dtype
    assert results[0]["loss"] != oracle("llama", steps)["loss"], "autocast made no difference"
    for actual, wanted in zip(results[0]["loss"], expected["loss"], strict=True):
        assert abs(actual - wanted) < 2**-8 * abs(wanted)
