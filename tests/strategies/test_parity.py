"""Every registered choice computes what one process computes on the whole global batch (TRAPS, head)."""

import pytest

from tests.models import MODELS
from tests.parity import TOLERANCE, all_choices, assert_parity, is_refused, oracle, train_on_rank
from tests.ranks import RankPool

EVEN = {2: [[2, 2], [2, 2]], 3: [[2, 2], [2, 2], [2, 2]], 4: [[1, 2], [1, 2], [1, 2], [1, 2]]}
"""Micro-batch sizes by rank, by world size."""


@pytest.mark.parametrize("choice", all_choices(), ids="-".join)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_models(ranks: RankPool, choice: tuple[str, str], world_size: int) -> None:
    """All models with both optimizers at 2 ranks; what more ranks add is how things are divided and in what order."""
    steps = [EVEN[world_size]] * 3
    for model in MODELS if world_size < 4 else ("plain", "odd"):
        if is_refused(ranks, choice, model):
            continue
        for optimizer in ("sgd", "adam") if world_size == 2 else ("sgd",):
            results = ranks.run(world_size, train_on_rank, choice, model, steps, optimizer)
            assert_parity(results, oracle(model, steps, optimizer), TOLERANCE[optimizer])


@pytest.mark.parametrize("choice", all_choices(), ids="-".join)
def test_small_buckets(ranks: RankPool, choice: tuple[str, str]) -> None:
    """Buckets smaller than most parameters, so that there are many, and some hold one parameter larger than the cap."""
    steps = [EVEN[2]] * 3
    for model in ("odd", "plain"):
        if is_refused(ranks, choice, model):
            continue
        results = ranks.run(2, train_on_rank, choice, model, steps, "sgd", None, False, {"bucket_cap_mb": 0.0003})
        assert_parity(results, oracle(model, steps, "sgd"), TOLERANCE["sgd"])


@pytest.mark.parametrize("choice", all_choices(), ids="-".join)
def test_parameter_groups(ranks: RankPool, choice: tuple[str, str]) -> None:
    steps = [EVEN[2]] * 3
    results = ranks.run(2, train_on_rank, choice, "plain", steps, "adam", None, True)
    assert_parity(results, oracle("plain", steps, "adam", groups=True), TOLERANCE["adam"])


@pytest.mark.parametrize("choice", all_choices(), ids="-".join)
def test_bf16_autocast_keeps_fp32_states(ranks: RankPool, choice: tuple[str, str]) -> None:
    """Weights are rounded to bf16 alike, but samples are summed in another order: bf16's own resolution is the bar."""
    steps = [[[4], [4]]] * 3
    results = ranks.run(2, train_on_rank, choice, "llama", steps, "sgd", None, False, {"precision": "bf16"})
    expected = oracle("llama", steps, "sgd", precision="bf16")
    fp32 = oracle("llama", steps, "sgd")
    for name, tensor in results[0]["state"].items():
        assert tensor.dtype == expected["state"][name].dtype
    assert results[0]["loss"] != fp32["loss"], "autocast made no difference"
    for actual, wanted in zip(results[0]["loss"], expected["loss"], strict=True):
        assert abs(actual - wanted) < 2**-8 * abs(wanted)
