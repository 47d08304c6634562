"""Activation checkpointing under every choice: the same parameters as without it, to the last bit.

Here ranks also run different numbers of micro-batches. All settings with all choices: `test_settings.py`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.models import LORA, build
from tests.parity import OPTIMIZERS, all_choices, global_batch, load, options_of
from tests.ranks import RankPool

Choice = tuple[str, str]
SETTINGS = ("block", "every:2", "selective", "torch:block")
CASES = [("awkward", "fp32"), ("llama", "fp32"), (LORA, "fp32"), ("awkward", "bf16"), ("llama", "bf16"), (LORA, "bf16")]
STEPS = [[[2, 3], [3, 2]], [[2, 2], [2]], [[3], [3, 2]]]
EVERY = [(choice, setting, *case) for choice in all_choices() for setting in SETTINGS for case in CASES]
TRIED = [choice for choice in all_choices() if not choice[1].startswith("deepspeed")]


def train(choice: Choice, model: str, precision: str, setting: str) -> dict[str, Any]:
    """Three steps on this rank. Adam, since it would show a gradient that is off in any bit."""
    dtypes = {"param_dtype": "bf16"} if precision == "parameters in bf16" else {"precision": precision}
    options = options_of(choice, **dtypes, activation_checkpointing=setting)
    rank = dist.get_rank()
    strategy = load(choice)(build(model), OPTIMIZERS["adam"], options)
    torch.manual_seed(rank)
    losses = []
    for step, split in enumerate(STEPS):
        strategy.zero_grad()
        losses.append(strategy.forward_backward(global_batch(model, split, step)[rank]).item())
        strategy.step()
    return {"loss": torch.tensor(losses), **strategy.full_state_dict()}


def differing(choice: Choice, setting: str, model: str, precision: str) -> list[str]:
    """What differs from a run without checkpointing."""
    plain, checkpointed = (train(choice, model, precision, which) for which in ("none", setting))
    assert plain.keys() == checkpointed.keys()
    return [name for name, tensor in plain.items() if not torch.equal(tensor, checkpointed[name])]


def is_sampled(index: int) -> bool:
    """Each choice with one of the settings, zero3 with all of them; each time with one of the cases."""
    run, case = divmod(index, len(CASES))
    number, setting = divmod(run, len(SETTINGS))
    is_tried = setting == number % len(SETTINGS) or EVERY[index][0][1] == "zero3"
    return is_tried and case == (number + setting) % len(CASES)


@pytest.mark.parametrize(
    ("choice", "setting", "model", "precision"),
    [
        pytest.param(*one, id="-".join((*one[0], *one[1:])))
        for index, one in enumerate(EVERY)
        if one[0] in TRIED and is_sampled(index)
    ],
)
def test_three_steps_are_the_same(ranks: RankPool, choice: Choice, setting: str, model: str, precision: str) -> None:
    assert ranks.run(2, differing, choice, setting, model, precision) == [[], []]


@pytest.mark.parametrize("setting", ["block", "selective"])
@pytest.mark.parametrize("name", ["zero3", "pytorch_zero3"])
def test_parameters_that_are_gathered_in_bf16(ranks: RankPool, name: str, setting: str) -> None:
    case = ("sharding", name), setting, "llama", "parameters in bf16"
    assert ranks.run(2, differing, *case) == [[], []]
