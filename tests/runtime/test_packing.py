"""Documents in sequences: every token where it belongs, and none that sees another document."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from ddp_lab.runtime.data.causal_lm import keeps_documents_apart
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.data.packing import Documents, TokenSequences, collate_sequences, target_count
from ddp_lab.strategy.batches import IGNORED
from tests.runtime.test_masks import CountReads
from tests.tables import each_row

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"vocab_size": 60, "use_cache": False}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, eager": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager")),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=3)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=60, use_cache=False)),
}


def numbered(lengths):
    """Documents in which no token occurs twice."""
    tokens = iter(range(1, sum(lengths) + 1))
    return [[next(tokens) for _ in range(length)] for length in lengths]


@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=8), length=st.integers(2, 12), packs=st.booleans())
def test_each_token_is_a_target_once_in_its_own_document(lengths, length, packs):
    documents = numbered(lengths)
    sequences = TokenSequences(Documents.of(documents), length, packs)
    before = {token: document[:place] for document in documents for place, token in enumerate(document)}
    targets = []
    for index, sample in enumerate(sequences):
        ids, labels, positions = (sample[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        assert len(ids) <= length and sum(label != IGNORED for label in labels) == sequences.targets[index] > 0
        for place, (token, label, position) in enumerate(zip(ids, labels, positions, strict=True)):
            context = ids[place - position : place]
            assert context == before[token][len(before[token]) - position :], (
                "sees another document, or not all of its own"
            )
            assert label == (token if position > 0 else IGNORED)
            targets += [token] * (label != IGNORED)
    assert len(targets) == len(set(targets))
    if not packs:  # a piece's first token is none
        assert len(targets) == sum(n - -(-n // length) for n in lengths)
    elif len(sequences) > 1:
        assert all(len(sample["input_ids"]) == length for sample in list(sequences)[:-1])


def test_prompts_are_no_targets_and_what_has_no_completion_left_is_left_out():
    documents = Documents.of(numbered([6, 9, 3]), prefix_lengths=[4, 8, 0])
    sequences = TokenSequences(documents, 8, packs=False, cuts=False)
    assert sequences.left_out == 1 and len(sequences) == 2
    batch = collate_sequences(0)(list(sequences))
    assert batch["labels"].tolist() == [[IGNORED] * 4 + [5, 6], [IGNORED, 17, 18] + [IGNORED] * 3]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 3 + [0] * 3] and "position_ids" not in batch
    assert target_count(batch) == 4


@each_row("name", MODELS)
def test_a_packed_document_has_the_logits_of_the_document_alone(name):
    read_no_masks()
    torch.manual_seed(0)
    model, collate = MODELS[name]().eval(), collate_sequences(0)
    documents = numbered([5, 9, 4])
    sequences = TokenSequences(Documents.of(documents), 14)
    batch = collate(list(sequences))
    assert batch["position_ids"].tolist() == [[*range(5), *range(9)], [*range(4), *[0] * 10]]
    with CountReads() as reads:
        output = model(**batch)
        output.loss.backward()
    assert reads.count == 0, "the host reads a mask from the device"
    for row, start, document in ((0, 0, 0), (0, 5, 1), (1, 0, 2)):
        ids = torch.tensor([documents[document]])
        logits = output.logits[row, start : start + ids.shape[1]]
        torch.testing.assert_close(logits, model(input_ids=ids).logits[0], rtol=1e-5, atol=1e-6)
    losses = [
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss * (len(ids) - 1) for ids in documents
    ]
    torch.testing.assert_close(output.loss * target_count(batch), torch.stack(losses).sum())
    assert keeps_documents_apart(model)
