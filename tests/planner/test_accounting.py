"""Memory by formulas: published figures to the printed digit, and terms against what torch really builds and keeps."""

from itertools import product

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from ddp_lab.planner import models
from ddp_lab.planner.accounting import STAGES, formula, least_ranks, state_bytes
from ddp_lab.planner.contracts import Setting
from ddp_lab.planner.decoders import Batch, total
from ddp_lab.planner.gpt2 import decoder_of
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.masks import without_useless_mask
from ddp_lab.runtime.settings.data import CAUSAL_LM, CLASSIFICATION
from ddp_lab.strategy.account import ModelSize, expected_state_bytes
from ddp_lab.strategy.options import PRECISIONS
from ddp_lab.strategy.precision import autocast, bring_to
from tests.planner.simulation.test_simulate import simulated
from tests.tables import each_row

GIB = 2**30
LARGEST_BUILT = 10e9
"""Parameters of the models that are built here; modules of more layers take seconds."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Their experts are one module for each layer."""


def test_zero_table():
    """Rajbhandari et al., figure 1: 7.5 B parameters, 64 ranks, K = 12."""
    in_gb = {stage: sum(state_bytes(7.5e9, 64, stage, "mixed").values()) / 1e9 for stage in STAGES}
    assert {stage: f"{held:.1f}" for stage, held in in_gb.items()} == {
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
    assert [held / GIB for held in state_bytes(parameters, 1, "zero3", "bf16").values()] == [819, 819, 1638]
    assert least_ranks(parameters, "zero3", "bf16", 80 * GIB) == 41
    # Activations leave less room: 100 / N + 40 < 50 from N = 11 on (10 gives exactly 50).
    assert least_ranks(100 / 16, "zero3", "fp32", 50, activation_bytes=40) == 11


@each_row(("stage", "shards"), STAGES.items())
def test_states_are_those_that_runs_are_held_against(stage, shards):
    assert state_bytes(1000, 4, stage, "fp32") == expected_state_bytes(ModelSize(1000, 1000, 4000, 4000), 4, shards)


@each_row("name", models.table())
def test_published_models(name):
    """Each built-in shape has as many parameters as the published model; the formula counts the classifier's."""
    model = models.table()[name]
    assert model.parameters is not None
    decoder = decoder_of(model.configuration(), CLASSIFICATION)
    language_model = decoder_of(model.configuration(), CAUSAL_LM)
    assert (decoder is None) == (model.type in ("gpt2", "resnet", *MIXTURES)), "no formula is known"
    assert language_model is None or total(language_model.parameter_terms()) == model.parameters
    if model.parameters < LARGEST_BUILT or model.type in MIXTURES:
        with torch.device("meta"):
            if model.kind == models.TOKENS:
                module = AutoModelForCausalLM.from_config(model.configuration())
            else:
                module = AutoModelForImageClassification.from_config(model.configuration(num_labels=1000))
        assert sum(parameter.numel() for parameter in module.parameters()) == model.parameters
        assert decoder is None or model.elements() == total(decoder.parameter_terms())


TOKENS, VOCABULARY = 24, 100


def llama(kv_heads):
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    labels = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 5}
    config = LlamaConfig(**sizes, **labels, num_key_value_heads=kv_heads, use_cache=False)
    return LlamaForSequenceClassification(config).train()


def kept_bytes(module, samples, tokens, precision):
    """Storage that autograd keeps after forward, parameters left out; with padding where there are several samples."""
    bring_to(module, precision)
    left_out = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr()] = storage  # which keeps its address from being used again
        return tensor

    mask = torch.ones(samples, tokens, dtype=torch.long)
    mask[1:, tokens // 2 :] = 0
    ids = torch.randint(1, VOCABULARY, (samples, tokens)) * mask
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        autocast("cpu", precision),
    ):
        batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(samples, dtype=torch.long)}
        module(**without_useless_mask(batch))
    return sum(storage.nbytes() for storage in kept.values())


@each_row("precision", PRECISIONS)
@each_row(("samples", "kv_heads"), [(1, 2), (3, 2), (3, 4)])
def test_activation_terms_are_what_autograd_keeps(precision, samples, kv_heads):
    """But for a few numbers a sample, at the head."""
    module = llama(kv_heads)
    kept = kept_bytes(module, samples, TOKENS, precision)
    assert (
        0 <= kept - total(classifier(kv_heads).activation_terms(Batch.of(samples, TOKENS, precision))) < 200 * samples
    )


def classifier(kv_heads):
    decoder = decoder_of(llama(kv_heads).config, CLASSIFICATION)
    assert decoder is not None
    return decoder


LANGUAGE = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "llama": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "mistral": {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 64},
}
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}


KINDS = [
    ("gpt2", "fp32", 1, 256),
    ("llama", "bf16-true", 4, 256),
    ("gpt2", "bf16", 64, 256),  # so that backward of blocks is the peak
    ("qwen2", "bf16", 1, 32),  # so that the gradient of a tied embedding is
]
MORE = product(LANGUAGE, ("fp32", "bf16", "bf16-true"), (1, 4), (256,))


@pytest.mark.parametrize(
    ("type", "precision", "chunks", "tokens"),
    [*KINDS, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in MORE)],
)
def test_a_language_model_takes_what_its_formulas_say(type, precision, chunks, tokens):
    """Within 1 % of the peak of a simulated step of two micro-batches."""
    config = {**({} if type == "gpt2" else SIZES), **LANGUAGE[type], "vocab_size": 4000}
    model = models.Model("tiny", type, config, task=CAUSAL_LM)
    decoder, batch = decoder_of(model.configuration(), CAUSAL_LM), Batch.of(2, tokens, precision)
    assert decoder is not None and total(decoder.parameter_terms()) == model.elements()
    settings = {"choice": "baseline", "precision": precision, "loss_chunks": chunks}
    one = Setting(RunConfig.of(**settings), model.build, lambda: model.micro_batches(2, 2, tokens))
    peak = simulated(one, ranks=1, kind="cuda").memory.peak_bytes
    at_peak = decoder.loss_term(batch, chunks)
    assert at_peak is not None
    states = state_bytes(model.elements(), 1, "replicated", precision)
    held = sum(states.values()) + total([*decoder.activation_terms(batch, chunks), at_peak])
    assert held == pytest.approx(peak, rel=0.01)


def test_parameters_that_are_cast():
    """The table of docs/how-it-works/mixed_precision.md."""
    found = {stage: formula(stage, "fp32", casts=True) for stage in ("zero1", "zero2", "zero3")}
    assert found == {"zero1": "6 + 12/N", "zero2": "2 + 16/N", "zero3": "16/N"}
