"""The loss of a causal language model is a mean over all targets of the global batch, however unevenly ranks hold
them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.data.packing import Documents, TokenSequences, collate_sequences, target_count
from tests.parity import OPTIMIZERS, TOLERANCE, assert_close, for_each_choice, load, options_of
from tests.ranks import RankPool

LENGTH, VOCABULARY, STEPS = 16, 40, 3
PACKED, PROMPTED = "packed", "prompted"
SHARES = {0: [(PACKED, (0, 1)), (PACKED, (2,))], 1: [(PROMPTED, (0, 1)), (PROMPTED, (2,))]}
"""The micro-batches of each rank: 43 targets on rank 0, 5 on rank 1, behind prompts and before padding."""


def tiny_llama(seed: int) -> nn.Module:
    """With tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    read_no_masks()
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(**shape, vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False)  # type: ignore[arg-type]
    )


def samples(step: int) -> dict[str, TokenSequences]:
    source = torch.Generator().manual_seed(step)

    def document(tokens: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (tokens,), generator=source).tolist()

    packed = Documents.of([document(tokens) for tokens in (30, 7, 11)])
    prompted = Documents.of([document(tokens) for tokens in (12, 4, 9)], given=[10, 3, 7])
    return {
        PACKED: TokenSequences(packed, LENGTH),
        PROMPTED: TokenSequences(prompted, LENGTH, packs=False, cuts=False),
    }


def micro_batches(step: int, rank: int) -> list[dict[str, Tensor]]:
    of_step, collate = samples(step), collate_sequences(0)
    return [collate([of_step[kind][index] for index in indices]) for kind, indices in SHARES[rank]]


def train_here(choice: str, chunks: int) -> dict[str, Any]:
    """Three steps on this rank's share."""
    rank = dist.get_rank()
    strategy = load(choice)(tiny_llama(seed=rank), OPTIMIZERS["adam"], options_of(choice, loss_chunks=chunks))
    result: dict[str, Any] = {"loss": []}
    for step in range(STEPS):
        batches = micro_batches(step, rank)
        strategy.zero_grad()
        loss = strategy.forward_backward(batches, [target_count(batch) for batch in batches])
        if step == 0:
            result["gradients"] = strategy.full_gradients()
        strategy.step()
        result["loss"].append(loss.item())
    return result | {"state": strategy.full_state_dict()}


def alone(naive: bool = False) -> dict[str, Any]:
    """The same in one process, on all samples as one batch; or on the plain mean over micro-batches and ranks."""
    module, collate = tiny_llama(seed=0), collate_sequences(0)
    optimizer = OPTIMIZERS["adam"](list(module.parameters()))
    result: dict[str, Any] = {"loss": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        if naive:
            batches = [batch for rank in SHARES for batch in micro_batches(step, rank)]
            loss = torch.stack([module(**batch).loss for batch in batches]).mean()
        else:
            loss = module(**collate([sample for kind in samples(step).values() for sample in kind])).loss
        loss.backward()
        if step == 0:
            result["gradients"] = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        result["loss"].append(loss.item())
    return result | {"state": module.state_dict()}


def test_the_shares_are_uneven_and_the_naive_mean_is_another() -> None:
    counts = [[target_count(batch) for batch in micro_batches(0, rank)] for rank in SHARES]
    assert counts == [[29, 14], [3, 2]]
    right, naive = alone(), alone(naive=True)
    assert abs(right["loss"][0] - naive["loss"][0]) > 1e-3 * right["loss"][0]
    with pytest.raises(AssertionError, match="is off by"):
        assert_close(naive["gradients"], right["gradients"], 0.05, "gradient")


@for_each_choice
def test_ranks_with_few_and_many_targets_equal_one_process(ranks: RankPool, choice: str) -> None:
    expected = alone()
    for chunks in (1, 3):
        results = ranks.run(2, train_here, choice, chunks)
        assert results[0]["loss"] == results[1]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert_close(results[0]["gradients"], expected["gradients"], 1e-6, "gradient")
        assert_close(results[0]["state"], expected["state"], TOLERANCE["adam"], "parameter")
