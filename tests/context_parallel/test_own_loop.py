"""Context parallelism in a model of one's own, which calls `scaled_dot_product_attention`, and in one's own loop."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ddp_lab
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import closing_groups
from tests.parity import OPTIMIZERS, message_of
from tests.ranks import RankPool
from tests.tables import each_row

SAMPLES, LENGTH, HEADS, FEATURES, WORDS = 4, 11, 6, 24, 17
PROMPT = 4
"""Tokens without a target at the beginning, so that a part may have none."""


class Decoder(nn.Module):
    """Two blocks with grouped keys, and learned positions."""

    def __init__(self, attention: Callable[..., Tensor] = scaled_dot_product_attention):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, FEATURES), nn.Embedding(LENGTH, FEATURES)
        self.q = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))  # half as many heads
        self.head = nn.Linear(FEATURES, WORDS)
        self._attention = attention

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        for to_q, to_kv in zip(self.q, self.kv, strict=True):
            tensors = split_heads(to_q(x), to_kv(x))
            q, k, v = (tensor.unflatten(2, (-1, FEATURES // HEADS)).transpose(1, 2) for tensor in tensors)
            x = x + self._attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.head(functional.gelu(x))


def split_heads(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, *kv.chunk(2, -1)


def samples_of(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and targets that are shifted already."""
    text = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = text[:, 1:].clone()
    targets[:, :PROMPT] = -100
    targets[0, -3:] = -100
    return text[:, :-1], targets


def own_loop(size: int, way: str, choice: str) -> dict[str, Any]:
    """As docs/own-loop.md has it."""
    torch.manual_seed(dist.get_rank())
    with closing_groups():
        context = ddp_lab.context_parallel(size, way)
        model = Decoder(context.attention)
        strategy = ddp_lab.load(choice)(model, OPTIMIZERS["adam"])
        strategy.load_full_state_dict(initial())
        for step in range(3):
            batches = [tensor[context.data_rank :: context.data_size].split(1) for tensor in samples_of(step)]
            targets = [context.part(batch, fill=-100) for batch in batches[1]]
            weights = strategy.loss_weights([int((part != -100).sum()) for part in targets])
            for index, tokens in enumerate(batches[0]):
                with strategy.micro_batch(last=index == len(targets) - 1):
                    logits = strategy(context.part(tokens), context.positions(LENGTH, "cpu"))
                    loss = cross_entropy(logits.flatten(0, 1), targets[index].flatten())
                    strategy.scale_loss(loss * weights[index]).backward()
            strategy.clip_grad_norm_(0.5)
            strategy.step()
            strategy.zero_grad()
        with torch.no_grad():
            tokens = samples_of(9)[0]
            answer = context.whole(strategy(context.part(tokens), context.positions(LENGTH, "cpu")), LENGTH)
        return {"state": strategy.full_state_dict(), "answer": answer, "rank": (context.rank, context.data_rank)}


def initial() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Decoder().state_dict()


def one_process() -> tuple[dict[str, Tensor], Tensor]:
    model, places = Decoder(), torch.arange(LENGTH)[None]
    model.load_state_dict(initial())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for step in range(3):
        tokens, targets = samples_of(step)
        cross_entropy(model(tokens, places).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model.state_dict(), model(samples_of(9)[0], places)


@each_row(
    "ranks_in_all, size, way, choice",
    [
        (4, 2, "zigzag", "zero2"),
        (2, 2, "ring", "bucket_ddp_async"),
        (3, 3, "ulysses", "zero3"),
        (2, 2, "pytorch_cp", "pytorch_ddp"),
    ],
)
def test_a_model_of_ones_own(ranks: RankPool, ranks_in_all, size, way, choice):
    state, answer = one_process()
    results = ranks.run(ranks_in_all, own_loop, size, way, choice)
    for rank, result in enumerate(results):
        assert result["rank"] == (rank % size, rank // size)
        torch.testing.assert_close(result["answer"], answer, rtol=1e-4, atol=1e-4)
    for name, tensor in state.items():
        torch.testing.assert_close(results[0]["state"][name], tensor, rtol=1e-5, atol=1e-5)


def with_documents():
    with closing_groups():
        context = ddp_lab.context_parallel(2)
        q, k, v = torch.randn(3, 2, 4, LENGTH, 8, generator=torch.Generator().manual_seed(0))
        documents = (torch.arange(LENGTH) >= 5).long().expand(2, -1)
        parts = (context.part(tensor.transpose(1, 2)).transpose(1, 2) for tensor in (q, k, v))
        out = context.attention(*parts, is_causal=True, documents=documents)
        mask = (documents[:, None, :, None] == documents[:, None, None]).tril()
        expected = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        torch.testing.assert_close(context.whole(out.transpose(1, 2), LENGTH), expected)


def test_documents_stay_apart(ranks: RankPool):
    ranks.run(2, with_documents)


def attend(size: int, way: str, arguments: dict[str, Any]):
    with closing_groups():
        q, k, v = torch.randn(3, 1, 3, 4, 8)
        heads = arguments.pop("heads", 3)  # of this rank's copy
        ddp_lab.context_parallel(size, way).attention(q, k[:, :heads], v, **arguments)


@each_row(
    "size, way, arguments, expected",
    [
        (3, "zigzag", {}, "over 3 ranks: must be a number that divides the 2 ranks"),
        (2, "zigzagg", {}, "did you mean zigzag?"),
        (2, "zigzag", {}, "attention must have is_causal=True and no attn_mask"),
        (2, "pytorch_cp", {"is_causal": True, "dropout_p": 0.1}, "by pytorch_cp draws no dropout within attention"),
        (2, "ring", {"is_causal": True, "heads": 1}, "say enable_gqa=True"),
        (2, "ulysses", {"is_causal": True}, "do not divide 3 attention heads"),
    ],
)
def test_what_an_own_model_is_refused(ranks: RankPool, size, way, arguments, expected):
    for message in ranks.run(2, message_of, UserError, attend, size, way, arguments):
        assert expected in message
