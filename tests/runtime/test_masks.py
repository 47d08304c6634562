"""Forward and backward of the built-in models read nothing from a device, and compute what transformers would."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification
from transformers import masking_utils as masks

from ddp_lab.runtime.data.masks import read_no_masks, without_useless_mask

PATCHED = ("fast_all", "find_packed_sequence_indices", "_ignore_bidirectional_mask_sdpa")
ORIGINAL = {name: getattr(masks, name) for name in PATCHED}


class CountReads(TorchDispatchMode):
    """Counts the values that Python reads from tensors, for which a host waits for its device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def plain_transformers(monkeypatch):
    """transformers as it is without `read_no_masks`; afterwards as it was before the test."""
    for name, function in ORIGINAL.items():
        monkeypatch.setattr(masks, name, function)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def model_named(name):
    torch.manual_seed(0)
    if name == "bert":
        return BertForSequenceClassification(BertConfig(**SMALL, vocab_size=50)).eval()
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, vocab_size=50, pad_token_id=0)).eval()


def batch(pads):
    ids, mask = torch.arange(1, 25).view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    if pads:
        ids[0, 8:] = mask[0, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("pads", [False, True])
def test_nothing_is_read_and_nothing_changes(name, pads, plain_transformers):
    model = model_named(name)
    with CountReads() as reads:
        loss_with_mask = model(**batch(pads)).loss
    assert reads.count > 0, "transformers reads no mask any more: ddp_lab/runtime/data/masks.py can go"
    read_no_masks()
    with CountReads() as reads:
        unmasked = without_useless_mask(batch(pads))
        before = reads.count  # on the CPU, for nothing
        loss = model(**unmasked).loss
        loss.backward()
    assert reads.count == before == 1
    assert torch.equal(loss, loss_with_mask)
