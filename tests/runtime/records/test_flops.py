"""Model FLOPs, held against formulas worked out by hand."""

import torch
from torch import nn

from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.data.synthetic import MLP
from ddp_lab.runtime.records.flops import model_flops


def tokens(samples, length):
    return {name: torch.zeros(samples, length, dtype=torch.long) for name in ("input_ids", "labels")}


def test_a_decoder_is_as_the_paper_counts_it():
    """PaLM, appendix B: 6 N + 12 L d T a token, where tied embeddings are a matrix product at the end only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    read_no_masks()
    length, layers, width = 16, 3, 32
    shape = {"hidden_size": width, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 48}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, tie_word_embeddings=True, use_cache=False))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    before = {name: (p.device.type, p.grad) for name, p in model.named_parameters()}
    a_token = 6 * matrices + 12 * layers * width * length
    rope = 2 * (width // 4 // 2)  # cosines of angles: one small product a token, in forward alone
    assert 0 <= model_flops(model, tokens(2, length)) - a_token * length <= rope * length
    assert {name: (p.device.type, p.grad) for name, p in model.named_parameters()} == before


def test_counting_changes_no_buffer_and_no_random_number():
    class Normed(MLP):
        def __init__(self):
            super().__init__(1, 8)
            self.layers = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), *self.layers)

    model, random = Normed(), torch.get_rng_state()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert model_flops(model, {"inputs": torch.ones(2, 8), "targets": torch.ones(2, 8)}) == 128 * 3
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), random)
