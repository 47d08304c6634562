"""LoRA under every choice: as in one process with peft, with the frozen base sharded where parameters are."""

import pytest
import torch

from ddp_lab.strategy.accounting import ModelSize
from tests.models import LORA, build
from tests.parity import all_choices, build_and_step, check_parity
from tests.ranks import RankPool
from tests.strategies.cases.settings import FAMILIES
from tests.tables import by_default, each_row

STEPS = [[[2, 1], [1, 2]], [[2, 2], [1]], [[1], [3, 1]]]


@pytest.mark.parametrize("choice", by_default(all_choices(), *FAMILIES[1:3], *FAMILIES[5:]), ids="-".join)
def test_adapters_train_as_in_one_process(ranks: RankPool, choice: tuple[str, str]) -> None:
    results = check_parity(ranks, choice, LORA, STEPS, "adam")
    start = build(LORA).state_dict()
    for name, tensor in results[0]["state"].items():
        trains = "lora_" in name or "modules_to_save" in name
        assert torch.equal(tensor, start[name]) != trains, f"{name} {'did not train' if trains else 'is not frozen'}"


def held(choice: tuple[str, str]) -> dict[str, int]:
    return build_and_step(choice, LORA).memory_breakdown()


@each_row("name, parts", [("baseline", 1), ("zero1", 1), ("zero3", 2), ("pytorch_zero3", 2)])
def test_the_frozen_base_is_sharded_with_the_parameters(ranks: RankPool, name: str, parts: int) -> None:
    whole = ModelSize.of(build(LORA))
    assert whole.trainable_bytes < whole.parameter_bytes / 2
    for memory in ranks.run(2, held, ("sharding", name)):
        padding = 8 * len(list(build(LORA).parameters()))
        assert whole.parameter_bytes / parts <= memory["parameters"] <= whole.parameter_bytes / parts + padding
        gradients = 1 if name in ("baseline", "zero1") else 2
        assert memory["gradients"] <= whole.trainable_bytes / gradients + padding, "a frozen parameter has a gradient"
