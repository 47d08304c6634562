"""Activation checkpointing in one process: gradients, random numbers, memory, and what is refused."""

from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.runtime.profiling.memory import allocations_of, counting_on_all_threads
from ddp_lab.strategy.recompute import checkpoint_activations
from tests.models import LORA, build, make_batch
from tests.tables import each_row

SETTINGS = ("block", "selective")


def checkpointed(model, setting):
    module = build(model).train()
    checkpoint_activations(module, setting)
    return module


def gradients(module, model):
    """Gradients of one step, how often each parameter got one, and the next random numbers."""
    counts = Counter[str]()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    torch.manual_seed(1)
    module(**make_batch(model, 4, 1)).loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}, counts, torch.rand(3)


@each_row("model", ["awkward", "adapted", "out of order", "llama", LORA])
@each_row("setting", SETTINGS)
def test_each_parameter_gets_the_same_gradient_once(setting, model):
    plain, module = build(model).train(), checkpointed(model, setting)
    assert list(module.state_dict()) == list(plain.state_dict())
    expected, _, random = gradients(plain, model)
    actual, counts, random_after = gradients(module, model)
    assert actual.keys() == expected.keys() and torch.equal(random_after, random)
    for name, gradient in actual.items():
        assert torch.equal(gradient, expected[name]), name
    assert counts == Counter(dict.fromkeys(expected, 1))
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), f"{name} has counted a sample twice"


@each_row("setting", SETTINGS)
def test_blocks_run_again_and_nothing_else_does(setting):
    module, runs = checkpointed("awkward", setting), 0

    def count(*_):
        nonlocal runs
        runs += 1

    for block in module.blocks:
        block.first.register_forward_pre_hook(count)
    module(**make_batch("awkward", 4, 1)).loss.backward()
    assert runs == 4 * 2
    with torch.no_grad():
        module(**make_batch("awkward", 4, 1))
    assert runs == 4 * 2 + 4


def test_selective_computes_every_second_product_again():
    """Of a Llama block's seven: keys, attention's output, up. The count starts anew in every block, as torchtitan's."""
    flops, batch = {}, make_batch("llama", 4, 1)
    for setting in ("none", "selective"):
        module = checkpointed("llama", setting)
        with FlopCounterMode(display=False) as counter:
            module(**batch).loss.backward()
        flops[setting] = counter.get_total_flops()
    second = [
        p
        for name, p in module.named_parameters()
        if name.endswith(("k_proj.weight", "o_proj.weight", "up_proj.weight"))
    ]
    again = 2 * batch["input_ids"].numel() * sum(map(Tensor.numel, second))
    assert flops["selective"] == flops["none"] + again


# Memory --------------------------------------------------------------------------------------------------------------


class WideBlocks(nn.Module):
    """Eight blocks of seven operators, whose activations are much larger than their parameters."""

    def __init__(self):
        super().__init__()
        parts = [nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Tanh()]
        self.blocks = nn.ModuleList(nn.Sequential(*deepcopy(parts)) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def peak(setting, rows=20_000):
    """The peak of a step's allocations, in tensors of `rows` x 8."""
    module = WideBlocks()
    checkpoint_activations(module, setting)
    x = torch.randn(rows, 8)
    with counting_on_all_threads():
        module(x).sum().backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            module(x).sum().backward()
    return allocations_of(profiler).peak / x.nbytes


def test_the_peak_of_activations_falls():
    """Without checkpointing at least 6 tensors a block; with it, each block's input, and the activations and gradients
    of one block."""
    peaks = {setting: peak(setting) for setting in ("none", *SETTINGS)}
    assert peaks["none"] > 6 * 8
    assert peaks["block"] < 8 + 7 + 5
    assert peaks["block"] < peaks["selective"] < 0.6 * peaks["none"]


# What is refused -----------------------------------------------------------------------------------------------------


class InPlace(nn.Linear):
    """A block that changes its input."""

    def forward(self, x):
        x *= 2
        return super().forward(x)


def test_a_block_that_changes_its_input_is_refused():
    module = nn.Sequential(nn.Linear(4, 4), nn.ModuleList(InPlace(4, 4) for _ in range(2)))
    checkpoint_activations(module, "block")
    refusal = "--activation-checkpointing: InPlace changes an input in place.* use --activation-checkpointing none"
    with pytest.raises(OneRankError, match=refusal):
        module[1][0](module[0](torch.ones(2, 4)))
