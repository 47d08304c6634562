"""Small modules that hold the traps, and the batches to train them on. All are called as `module(x=..., y=...)`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FEATURES = 6
DEVICE = torch.device("cpu")
"""Where `build` and `make_batch` put modules and batches in this process. Ranks of `tests.ranks` set it."""


def batch(samples: int, seed: int) -> dict[str, Tensor]:
    """`samples` rows of x (samples, FEATURES), y (samples,), in fp32.

    y lies around 2, so that gradients of samples do not cancel, which would magnify rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, FEATURES, generator=generator), torch.randn(samples, generator=generator)
    return {"x": x, "y": y + 2}


def answer(prediction: Tensor, y: Tensor) -> SimpleNamespace:
    return SimpleNamespace(loss=functional.mse_loss(prediction.float().squeeze(-1), y), logits=prediction)


class Plain(nn.Module):
    """A perceptron with layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return answer(self.net(x), y)


class Tied(nn.Module):
    """The first and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return answer(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).sum(-1, keepdim=True), y)


class Frozen(nn.Module):
    """The middle layer does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(FEATURES, 9), nn.Linear(9, 9), nn.Linear(9, 1)
        self.middle.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return answer(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), y)


class AdaptedBlock(nn.Module):
    """A frozen layer, and then a trainable one, whose gradient is made before backward reads the frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.base.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.adapter(torch.tanh(self.base(hidden)))


class Adapted(nn.Module):
    """Blocks that are partly frozen, as in fine-tuning with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(3))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = block(x)
        return answer(self.head(x), y)


class Normed(nn.Module):
    """A BatchNorm: it has buffers of floats and of an integer. They start at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return answer(self.last(self.norm(self.first(x))), y)


class Odd(nn.Module):
    """0-d and zero-size parameters, mixed dtypes, and one parameter much larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.linspace(-1, 1, FEATURES, dtype=torch.float64))
        self.large = nn.Linear(FEATURES, 301)
        self.last = nn.Linear(301, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        mixed = x * self.wide.float() * self.scale + self.empty.sum()
        return answer(self.last(torch.tanh(self.large(mixed))), y)


class Handed(nn.Module):
    """Two parameters whose gradients share memory, since backward of a sum of views returns its input. So autograd adds
    those of a second backward pass twice, even in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((FEATURES,), value)) for value in (0.3, 0.5))
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return answer(self.last(x * (self.a.view(2, -1) + self.b.view(2, -1)).view(-1)), y)


class Spiked(Plain):
    """A huge target makes the gradient of one element infinite in fp16, so that one shard has it and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.spike = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        is_huge = y >= 1e6
        output = answer(self.net(x), torch.where(is_huge, 2.0, y))
        output.loss = output.loss + (self.spike * torch.where(is_huge, 1e38, 0.0)).mean()
        return output


class Branching(nn.Module):
    """Uses branch `a` for samples with a positive first feature and branch `b` for others; never uses `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, 1)
        self.a, self.b, self.spare = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return answer(self.last(torch.tanh(either(x[:, :1] > 0, self.first(x), self.a, self.b))), y)


Layer = Callable[[Tensor], Tensor]


def either(chooses: Tensor, hidden: Tensor, a: Layer, b: Layer) -> Tensor:
    """`a(hidden)` for samples that choose it, `b(hidden)` for others. A layer that no sample chooses does not run."""
    if chooses.all():
        return a(hidden)
    return torch.where(chooses, a(hidden), b(hidden)) if chooses.any() else b(hidden)


class InTurns(nn.Module):
    """The signs of each sample decide which parameters run, so that a parameter may have a gradient in one micro-batch
    and none in the next. There are two weights that form one matrix, blocks of one parameter, of which the last is
    frozen, and a layer that may run twice. Two ranks divide each parameter evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 8)
        self.upper, self.lower = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        def halves(hidden: Tensor) -> Tensor:
            return (hidden @ torch.cat([self.upper, self.lower]).t()).view(-1, 2, 8).sum(1)

        hidden = torch.tanh(self.first(x))
        hidden = hidden + torch.tanh(either(x[:, :1] > 0, hidden, halves, self.last))
        for block, feature in zip(self.blocks, x.split(1, 1)[1:], strict=False):
            hidden = either(feature > 0, hidden, block, nn.Identity())
        return answer(self.last(torch.tanh(hidden)).mean(-1, keepdim=True), y)


class Deep(nn.Module):
    """A layer, six equal blocks, of which those in `skipped` do not run, and a head."""

    def __init__(self, inside: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), inside()) for _ in range(6))
        self.last = nn.Linear(20, 1)
        self.skipped: list[int] = []

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        hidden = self.first(x)
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                hidden = block(hidden)
        return answer(self.last(hidden), y)


class OutOfOrder(nn.Module):
    """Blocks run in another order than they are registered in, and one of them twice; the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, 1)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        for index in (2, 0, 3, 1, 0):
            x = x + torch.tanh(self.blocks[index](x))
        return answer(self.last(x), y)


class Lookup(nn.Module):
    """An embedding outside of all blocks. `reads` says what else reads it: nothing, the head, or a checkpoint."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.embedding = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        at = (10 * x.abs()).long() % 30
        if self.reads == "checkpoint":
            hidden = checkpoint(lambda: self.embedding(at).tanh().mean(1), use_reentrant=False)
        else:
            hidden = self.embedding(at).tanh().mean(1)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        if self.reads == "head":
            scores = functional.linear(hidden, self.embedding.weight)
            hidden = hidden + 0.1 * scores.softmax(-1) @ self.embedding.weight
        return answer(self.last(hidden), y)


@dataclass
class Awkward:
    """The output of an `AwkwardBlock`."""

    hidden: Tensor
    extras: tuple[Tensor, str]


class AwkwardBlock(nn.Module):
    """Draws random numbers, counts in buffers, turns autocast off for a part, takes keyword arguments and answers with
    a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 12), nn.Linear(12, FEATURES)
        self.norm, self.dropout = nn.BatchNorm1d(12), nn.Dropout(0.3)

    def forward(self, hidden: Tensor, *, scale: float, beside: dict[str, Tensor | None]) -> Awkward:
        weight = beside["weight"]
        assert weight is not None
        inner = self.dropout(self.norm(self.first(hidden * weight).float()))
        with torch.autocast("cpu", enabled=False):
            out = hidden.float() + scale * torch.tanh(self.last(inner.float()))
        return Awkward(out, (inner.detach().mean(), "not a tensor"))


class AwkwardBlocks(nn.Module):
    """Four such blocks. The first one's inputs have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AwkwardBlock() for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = block(x, scale=0.5, beside={"weight": y[:, None], "none": None}).hidden
        return answer(self.head(x), y)


def llama_classifier() -> nn.Module:
    """A Llama classifier of two thin layers, the real architecture of the sample workload."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(
        LlamaConfig(  # type: ignore[call-arg]
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=40,
            num_key_value_heads=1,
            num_labels=5,
            pad_token_id=0,
            use_cache=False,
        )
    )


def llama_with_adapters() -> nn.Module:
    """The Llama classifier, frozen, with LoRA adapters and a head that trains."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama_classifier(), LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS"))


def checkpointed(reentrant: bool) -> nn.Module:
    module = llama_classifier()
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    return module.train()


def llama_lm(key_heads: int, tied: bool = False, features: int = 31, layers: int = 2) -> nn.Module:
    """A Llama language model with 12 thin heads, biases, and a vocabulary and MLP that no number of ranks
    divides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=24,
            intermediate_size=features,
            num_hidden_layers=layers,
            num_attention_heads=12,
            num_key_value_heads=key_heads,
            vocab_size=41,
            attention_bias=True,
            mlp_bias=True,
            initializer_range=0.1,  # so that no gradient is so small that Adam magnifies its rounding
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def gpt2_lm(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """A GPT-2 with one weight for queries, keys and values, and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=24,
            n_layer=layers,
            n_head=12,
            vocab_size=41,
            n_positions=16,
            initializer_range=0.1,
            use_cache=False,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def qwen2_lm(window: int | None = None) -> nn.Module:
    """A Qwen2 with biases of queries, keys and values alone; with `window`, tokens see so many in its second layer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 41}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "use_cache": False, "initializer_range": 0.1}
    attention = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **attention))


MIXTURE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 41,
    "initializer_range": 0.1,
    "use_cache": False,
    "router_aux_loss_coef": 0.5,
}


def mixtral_lm(term: bool = True) -> nn.Module:
    """Eight experts a layer, of which each token gets two. Without `term`, nothing makes their load even."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**MIXTURE, intermediate_size=20, num_local_experts=8, output_router_logits=term)
    )


def qwen_moe_lm() -> nn.Module:
    """Four experts in the second layer, of which each token gets two, and one that all get."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"intermediate_size": 20, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**MIXTURE, **sizes, **experts, output_router_logits=True))


def qwen3_moe_lm() -> nn.Module:
    """Four experts a layer, of which each token gets two; queries and keys of each head are normed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"intermediate_size": 20, "moe_intermediate_size": 12, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE, **sizes, **experts, output_router_logits=True))


def token_batch(samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 40, (samples, 7), generator=generator),
        "labels": torch.randint(0, 5, (samples,), generator=generator),
    }


def language_batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Sequences of 7 tokens: an odd number, which no number of ranks divides."""
    tokens = torch.randint(0, 41, (samples, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def packed_batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Sequences of 7 tokens, two documents each; the second one begins elsewhere in each sequence."""
    begins = 1 + (torch.arange(samples)[:, None] + seed) % 6
    places = torch.arange(7, dtype=torch.int32).expand(samples, -1)
    batch = language_batch(samples, seed)
    batch["labels"] = batch["labels"].masked_fill(places == begins, -100)
    return batch | {"position_ids": torch.where(places < begins, places, places - begins).int()}


def padded_batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Sequences of 4 tokens, filled up to 7."""
    batch, mask = language_batch(samples, seed), (torch.arange(7) < 4).long().expand(samples, -1)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"].where(mask == 1, -100), "attention_mask": mask}


MODELS = {
    "plain": Plain,
    "tied": Tied,
    "frozen": Frozen,
    "adapted": Adapted,
    "odd": Odd,
    "llama": llama_classifier,
}
"""Their training has an exact counterpart in one process, whatever the split."""
UNUSUAL = {
    "out of order": OutOfOrder,
    "lookup": Lookup,
    "lookup, read by the head": partial(Lookup, "head"),
    "lookup, checkpointed": partial(Lookup, "checkpoint"),
    "llama, checkpointed": partial(checkpointed, False),
    "llama, checkpointed, re-entrant": partial(checkpointed, True),
}
"""They run modules in unusual order or several times."""
LANGUAGE = {
    "lm, llama": partial(llama_lm, 12),
    "lm, gqa": partial(llama_lm, 2, tied=True),
    "lm, gpt2": gpt2_lm,
}
"""Language models; of grouped keys and values, ranks may have to share heads."""
LORA = "llama, lora"
WITH_STATISTICS = ("normed", "awkward", "deep, normed")
"""Their statistics are of a rank's own samples, so no process alone has the same, and ranks differ."""
BRANCHES = {"branching": (), "branching, same": (1, 1), "branching, a-b": (1, -1), "branching, b-a": (-1, 1)}
"""By rank, the sign of its samples' first feature, which selects the branch."""


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = {
        **MODELS,
        **UNUSUAL,
        **LANGUAGE,
        "lm, mixtral": mixtral_lm,
        "lm, mixtral, masked": mixtral_lm,
        "lm, mixtral, no term": partial(mixtral_lm, term=False),
        "lm, qwen": qwen_moe_lm,
        "lm, qwen3": qwen3_moe_lm,
        "lm, even": partial(llama_lm, 12, features=32),
        "lm, even, six": partial(llama_lm, 12, features=32),
        "lm, even, tied": partial(llama_lm, 2, True, 32),
        "lm, gpt2, dropout": partial(gpt2_lm, 0.3),
        "lm, gpt2, padded": gpt2_lm,
        "lm, gpt2, masked": gpt2_lm,
        "lm, long, masked": partial(llama_lm, 12, layers=8),
        "lm, qwen2": qwen2_lm,
        "lm, qwen2, window": partial(qwen2_lm, 4),
        "lm, gqa, documents": partial(llama_lm, 2, tied=True),
        "lm, long": partial(llama_lm, 12, layers=8),
        "lm, long, tied": partial(llama_lm, 2, True, layers=8),
        "lm, long, gpt2": partial(gpt2_lm, layers=8),
        "lm, long, gpt2, dropout": partial(gpt2_lm, 0.3, 8),
        **dict.fromkeys(BRANCHES, Branching),
        "branching, in turns": InTurns,
        "normed": Normed,
        "deep": Deep,
        "deep, normed": partial(Deep, partial(nn.BatchNorm1d, 20)),
        "awkward": AwkwardBlocks,
        "handed": Handed,
        "spiked": Spiked,
        "linear": partial(nn.Linear, 8, 8, bias=False),
        LORA: llama_with_adapters,
    }[name]()  # type: ignore[operator]
    return module if DEVICE.type == "cpu" else module.to(DEVICE)  # a fake module cannot be moved


def masked_batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Sequences of 7 tokens, some of which begin with padding; all have as many targets, from one to five, by seed."""
    batch = language_batch(samples, seed)
    mask = torch.ones_like(batch["labels"])
    mask[::2, :2] = 0
    labels = batch["labels"].masked_fill(torch.arange(7) < 6 - seed % 5, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


def make_batch(model: str, samples: int, seed: int) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in host_batch(model, samples, seed).items()}


def host_batch(model: str, samples: int, seed: int) -> dict[str, Tensor]:
    """The same on the CPU, wherever models are."""
    if model.endswith("masked"):
        return masked_batch(samples, seed)
    if model.endswith("documents"):
        return packed_batch(samples, seed)
    if model.endswith("padded"):
        return padded_batch(samples, seed)
    if model.endswith("six"):  # tokens
        return {name: tensor[:, :6] for name, tensor in language_batch(samples, seed).items()}
    if model.startswith("lm"):
        return language_batch(samples, seed)
    return token_batch(samples, seed) if model.startswith("llama") else batch(samples, seed)
