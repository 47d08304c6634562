"""Memory by formulas, to the printed digit of published figures, and beside simulated stages."""

import re

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
)

from ddp_lab.planner import command, models
from ddp_lab.planner.accounting import STAGES, formula, least_ranks, state_bytes
from ddp_lab.planner.model import TOKENS
from ddp_lab.strategy.account import ModelSize, expected_state_bytes
from tests.in_process import run_in_process
from tests.tables import each_row

GIB = 2**30
LARGEST_BUILT = 10e9
"""Parameters of the models that are built here; modules of more layers take seconds."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Their experts are one module for each layer."""


def test_zero_table():
    """Rajbhandari et al., figure 1: 7.5 B parameters, 64 ranks, K = 12."""
    in_gb = {stage: sum(state_bytes(7.5e9, 64, stage, "mixed").values()) / 1e9 for stage in STAGES}
    assert {stage: f"{nbytes:.1f}" for stage, nbytes in in_gb.items()} == {
        "replicated": "120.0",
        "zero1": "31.4",
        "zero2": "16.6",
        "zero3": "1.9",
    }
    assert [formula(stage, "mixed") for stage in STAGES] == ["16", "4 + 12/N", "2 + 14/N", "16/N"]


def test_ranks_that_a_large_model_needs():
    """126 pairs of linear layers of 16384 and 53248 features: 819 GiB of fp32 weights, as much of gradients, twice for
    Adam; 41 devices of 80 GiB hold these states."""
    parameters = 126 * 2 * 16384 * 53248
    assert [nbytes / GIB for nbytes in state_bytes(parameters, 1, "zero3", "bf16").values()] == [819, 819, 1638]
    assert least_ranks(parameters, "zero3", "bf16", 80 * GIB) == 41
    assert least_ranks(100 / 16, "zero3", "fp32", 10) == 11, "10 gives exactly 10"


@each_row(("stage", "shards"), STAGES.items())
def test_states_are_those_that_runs_are_held_against(stage, shards):
    assert state_bytes(1000, 4, stage, "fp32") == expected_state_bytes(ModelSize(1000, 1000, 4000, 4000), 4, shards)


@each_row("name", models.table())
def test_published_models(name):
    """Each built-in shape has as many parameters as the published model."""
    model = models.table()[name]
    assert model.parameters is not None
    if model.parameters < LARGEST_BUILT or model.type in MIXTURES:
        with torch.device("meta"):
            if model.kind == TOKENS:
                module = AutoModelForCausalLM.from_config(model.configuration())
            else:
                module = AutoModelForImageClassification.from_config(model.configuration(num_labels=1000))
        assert sum(parameter.numel() for parameter in module.parameters()) == model.parameters


def test_parameters_that_are_cast():
    """The table of docs/how-it-works/precision.md."""
    formulas = {stage: formula(stage, "fp32", casts=True) for stage in ("zero1", "zero2", "zero3")}
    assert formulas == {"zero1": "6 + 12/N", "zero2": "2 + 16/N", "zero3": "16/N"}


def test_memory_of_simulated_stages_beside_formulas():
    """On a mesh with tp; and without torch, the formulas alone."""
    model = ["--d-model", "256", "--d-ff", "512", "--layers", "2", "--vocab", "50", "--task", "causal-lm"]
    where = ["--gpus", "4xH100", "--mesh", "dp=2,tp=2", "--sequence-length", "64", "--global-batch-size", "4"]
    answer = run_in_process(command, "memory", *model, *where, "--jobs", "1")
    assert answer.returncode == 0, answer.stderr
    rows = {line.split()[0]: line.split() for line in answer.stdout.splitlines() if line.startswith(tuple(STAGES))}
    assert rows.keys() == STAGES.keys() and rows["replicated"][-8] == "tp@dp2-tp2" and rows["zero3"][1] == "16/N"
    alone = run_in_process(command, "memory", "--parameters", "7.5e9", "--ranks", "64", "--precision", "mixed")
    assert re.search(r"^zero2 +2 \+ 14/N +13\.97 +0\.22 +1\.31 +15\.50 +2 *$", alone.stdout, re.MULTILINE)
    assert "loading" not in alone.stderr
