"""Models that the planner knows by name or by a local configuration, and their batches."""

import json
from dataclasses import replace

import torch

from ddp_lab.planner import models
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data import hub
from ddp_lab.runtime.data.causal_lm import sample_model
from ddp_lab.runtime.data.packing import collate_sequences
from ddp_lab.runtime.data.workloads import BUILT_IN_LANGUAGE
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.data import CAUSAL_LM
from tests.tables import each_row


@each_row(
    ("name", "expected"),
    [
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("qwen/QWEN3", "Qwen/Qwen3-30B-A3B"),
        ("gpt2", "openai-community/gpt2"),
        ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Llama-3.1", None),
        ("Mixtral-8x", None),
        ("", None),
    ],
)
def test_the_beginning_of_a_name_is_enough_where_it_is_unique(name, expected):
    try:
        assert models.find(name).name == expected
    except UserError:
        assert expected is None


def test_a_language_model_is_that_of_the_runner(tmp_path):
    """With tied embeddings and without, on whole sequences of one document."""
    for is_tied in (True, False):
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        shape |= {"vocab_size": 90, "tie_word_embeddings": is_tied}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
        planned = replace(models.find(str(tmp_path)), task=CAUSAL_LM)
        runs, plans = hub.load_causal_lm(str(tmp_path)).model, planned.build()
        assert [p.shape for p in plans.parameters()] == [p.shape for p in runs.parameters()]
        assert planned.elements() == sum(p.numel() for p in runs.parameters())
    for name in BUILT_IN_LANGUAGE:
        runs, plans = sample_model(RunConfig(workload=name)), models.find(name).build()
        assert {n: p.shape for n, p in plans.named_parameters()} == {n: p.shape for n, p in runs.named_parameters()}
        flags = [getattr(model.config, "output_router_logits", None) for model in (runs, plans)]
        assert flags == [True if name == "sample-moe" else None] * 2
    plans = planned.build()
    (batch,) = planned.micro_batches(1, 2, 7)
    sample = {"input_ids": torch.ones(7, dtype=torch.long), "position_ids": torch.arange(7)}
    real = collate_sequences(0)([sample | {"labels": sample["input_ids"]}] * 2)
    assert {name: tensor.shape for name, tensor in batch.items()} == {n: t.shape for n, t in real.items()}
    assert plans(**batch).loss.isfinite() and plans(**batch).logits.shape == (2, 7, 90)


def test_batches_are_those_of_the_runner():
    first, _ = models.find("SmolLM2-135M").micro_batches(2, 3, 7)
    shapes = {name: tuple(tensor.shape) for name, tensor in first.items()}
    assert shapes == {"input_ids": (3, 7), "attention_mask": (3, 7), "labels": (3,)}
    assert first["attention_mask"].sum() == 3 * 7 - 2  # all but the first are padded
    (image,) = models.find("resnet-50").micro_batches(1, 2, 7)
    assert image["pixel_values"].shape == (2, 3, 224, 224)
