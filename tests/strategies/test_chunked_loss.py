"""`--loss-chunks` in one process: numbers, memory, and what is refused. `test_token_weights.py` has it on ranks."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.runtime.profiling.memory import allocations_of, counting_on_all_threads
from ddp_lab.strategy.batches import IGNORED
from ddp_lab.strategy.building import autocast, bring_to
from ddp_lab.strategy.chunked_loss import ChunkedCrossEntropy, chunk_loss
from tests.models import build, make_batch
from tests.tables import each_row


def answers(module, precision, batch):
    """Loss and gradients of a micro-batch that counts 0.3."""
    with autocast("cpu", precision):
        loss = module(**batch).loss
    (0.3 * loss).backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@each_row("model", ["lm, llama", "lm, gqa", "lm, gpt2"])  # untied, tied with grouped keys, tied
@each_row("chunks", [2, 3, 100])
@each_row(("precision", "near"), [("fp32", 1e-6), ("bf16", 2**-7), ("bf16-true", 2**-7)])
def test_loss_and_gradients_are_those_of_whole_logits(model, chunks, precision, near):
    batch = make_batch(model, 3, 1)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][1, 2:] = IGNORED
    plain = build(model).train()
    bring_to(plain, precision)
    module = deepcopy(plain)
    chunk_loss(module, chunks)
    with torch.no_grad():
        assert torch.equal(module(input_ids=batch["input_ids"]).logits, plain(input_ids=batch["input_ids"]).logits)
        assert module(**batch).loss == pytest.approx(plain(**batch).loss.item(), rel=near)
    (loss, gradients), (expected_loss, expected) = (answers(variant, precision, batch) for variant in (module, plain))
    assert loss == pytest.approx(expected_loss.item(), rel=near) and loss.dtype == torch.float32
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == expected[name].dtype
        assert (gradient - expected[name]).abs().max() <= near * expected[name].abs().max(), name


def test_only_the_logits_of_a_chunk_exist():
    """Without chunks the peak is 12 bytes for each pair of a token (512) and a word (4000)."""
    hidden, head, targets = torch.randn(512, 8), nn.Linear(8, 4000, bias=False), torch.arange(512)

    def peak(chunks):
        with counting_on_all_threads(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            rows = hidden.clone().requires_grad_()
            if chunks:
                ChunkedCrossEntropy.apply(rows, head.weight, None, targets, chunks).backward()
            else:
                nn.functional.cross_entropy(head(rows), targets).backward()
        return allocations_of(profiler).peak / (12 * 512 * 4000)

    assert peak(0) == pytest.approx(1, abs=0.05)
    assert peak(8) < 1 / 8 + 0.05


def test_models_with_other_heads_and_losses_are_refused():
    for model, message in (("plain", "Plain is no causal"), ("llama", "has a head or a loss of its own")):
        with pytest.raises(UnsupportedError, match=f"--loss-chunks: .*{message}"):
            chunk_loss(build(model), 2)
    module = build("lm, llama")
    chunk_loss(module, 2)
    module.lm_head.register_forward_hook(lambda _, __, logits: logits * 2)
    with pytest.raises(OneRankError, match="--loss-chunks: the model changes its logits"):
        module(**make_batch("lm, llama", 1, 1))
    with pytest.raises(OneRankError, match="--loss-chunks: takes labels alone"):
        module(**make_batch("lm, llama", 1, 1), num_items_in_batch=3)
