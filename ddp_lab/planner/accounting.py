"""Memory term by term, by formulas that can be checked by hand. Nothing is run.

Psi is the number of parameters, N the number of ranks. Model states follow ZeRO (Rajbhandari et al., ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054, sections 3.1 and 5). Activations are those
that autograd keeps for backward in transformers' Llama, Mistral and Qwen2 (SwiGLU, RMSNorm, grouped-query attention by
`scaled_dot_product_attention`, with a mask where samples of several lengths are padded). They were found with
`torch.autograd.graph.saved_tensors_hooks`, and tests compare them with it. What a step holds besides (buffers of
collectives, temporaries) is in no formula: `ddp-lab plan` without `memory` counts it by running the strategy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ddp_lab.planner.contracts import MODEL_STATES
from ddp_lab.runtime.data.reviews import STARS
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.options import BF16_TRUE
from ddp_lab.strategy.precision import AUTOCAST

STAGES = {
    "replicated": (),
    "zero1": ("optimizer_state",),
    "zero2": ("optimizer_state", "gradients"),
    "zero3": ("optimizer_state", "gradients", "parameters"),
}
"""Components of the model states of which each rank holds only 1/N."""


PRECISIONS = {
    "fp32": ((4, 4, 8), "Everything in fp32; Adam keeps two values a parameter."),
    "bf16": ((4, 4, 8), "Autocast, as the runner's --precision bf16: states stay in fp32, linear layers run in bf16."),
    "fp16": ((4, 4, 8), "Autocast, as the runner's --precision fp16: states stay in fp32, linear layers run in fp16."),
    "bf16-true": ((2, 2, 4), "As the runner's --precision bf16-true: states are in bf16."),
    "mixed": (
        (2, 2, 12),
        "ZeRO's mixed precision: 16-bit parameters and gradients; fp32 master copy and both of Adam's values.",
    ),
}
"""Bytes of a parameter in each of `MODEL_STATES` with Adam, and what it means."""
FP32, HALF = 4, 2
CASTS = "weights of blocks, cast"
"""A term of activations: what autocast makes. zero3 has those of a block or two (`sharding.options.low_precision`)."""


@dataclass(frozen=True)
class Term:
    """One term of a sum.

    Attributes:
        formula: In symbols.
        amount: Elements of parameters, or bytes.
    """

    name: str
    formula: str
    amount: float


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder-only transformer.

    Attributes:
        qkv_biases: Whether queries, keys and values have biases.
        is_part: Tensor parallelism cuts it. Then an input of several layers is cast once, where it is sent.
    """

    d_model: int
    d_ff: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qkv_biases: bool = False
    labels: int = STARS
    is_part: bool = False

    @property
    def d_q(self) -> int:
        return self.heads * self.head_dim

    @property
    def d_kv(self) -> int:
        return self.kv_heads * self.head_dim

    @classmethod
    def of(cls, configuration: Any) -> "Decoder | None":
        """The shape in a configuration of transformers; None if no formula here is for its type."""
        c = configuration
        if c.model_type not in ("llama", "mistral", "qwen2"):
            return None
        return cls(
            d_model=c.hidden_size,
            d_ff=c.intermediate_size,
            layers=c.num_hidden_layers,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            vocab=c.vocab_size,
            qkv_biases=c.model_type == "qwen2",
        )

    def part(self, ranks: int) -> "Decoder":
        """What one of so many ranks has where tensor parallelism cuts layers, without sequence parallelism. Where they
        do not divide, the largest part.

        Raises:
            UserError: heads do not divide.
        """
        require_heads("the model", self.heads, self.kv_heads, ranks)
        return replace(
            self,
            d_ff=ceil(self.d_ff / ranks),
            heads=self.heads // ranks,
            kv_heads=max(self.kv_heads // ranks, 1),
            vocab=ceil(self.vocab / ranks),
            is_part=ranks > 1,
        )

    def parameter_terms(self) -> list[Term]:
        """Elements of a classifier's parameters, without the output layer of a language model."""
        d, f, layers = self.d_model, self.d_ff, self.layers
        terms = [
            Term("token embedding", "vocab d_model", self.vocab * d),
            Term("attention", "layers 2 d_model (d_q + d_kv)", layers * 2 * d * (self.d_q + self.d_kv)),
            Term("feed-forward", "layers 3 d_model d_ff", layers * 3 * d * f),
            Term("norms", "(2 layers + 1) d_model", (2 * layers + 1) * d),
            Term("head", "labels d_model", self.labels * d),
        ]
        if self.qkv_biases:
            terms.append(Term("biases", "layers (d_q + 2 d_kv)", layers * (self.d_q + 2 * self.d_kv)))
        return terms

    def activation_terms(self, samples: int, tokens: int, precision: str) -> list[Term]:
        """Bytes that autograd keeps for the backward pass of one micro-batch. Empty for 16-bit parameters (`mixed`):
        the runner has none.

        Args:
            samples: In the micro-batch (b).
            tokens: Of each sample (s).
            precision: `fp32`, or `bf16` or `fp16` for autocast: linear layers and attention then keep 16-bit copies.
        """
        if precision in ("mixed", BF16_TRUE):
            return []
        bs, layers, low = samples * tokens, self.layers, HALF if precision in AUTOCAST else FP32
        d, f, q, kv = self.d_model, self.d_ff, self.d_q, self.d_kv
        each_casts = low == HALF and not self.is_part
        inputs = {"attention": 3, "feed-forward": 2} if each_casts else {"attention": 1, "feed-forward": 1}
        terms = [
            Term("residual stream", "2 layers b s d_model 4", 2 * layers * bs * d * FP32),
            Term("normalized", "2 layers b s (d_model + 1) 4", 2 * layers * bs * (d + 1) * FP32),
        ]
        for name, copies in inputs.items():
            formula = f"{copies} layers b s d_model {low}".removeprefix("1 ")
            terms.append(Term(f"input of {name}", formula, copies * layers * bs * d * low))
        if samples > 1:  # of unequal lengths: with a mask, keys and values are repeated for every query head
            terms.append(Term("queries, keys, values", f"layers b s 3 d_q {low}", layers * bs * 3 * q * low))
            terms.append(Term("mask", f"layers b s s {low}", layers * bs * tokens * low))
        else:
            held = layers * bs * (q + 2 * kv) * low
            terms.append(Term("queries, keys, values", f"layers b s (d_q + 2 d_kv) {low}", held))
        terms += [
            Term("attention output", f"layers b s d_q {low}", layers * bs * q * low),
            Term("log-sum-exp", "layers b s heads 4", layers * bs * self.heads * FP32),
            Term("gate, its SiLU, up, product", f"layers b s 4 d_ff {low}", layers * bs * 4 * f * low),
            Term("last norm and token ids", "b s (4 (2 d_model + 1) + 8)", bs * (4 * (2 * d + 1) + 8)),
            Term("input of the head", f"b s d_model {low}", bs * d * low),
            Term("cosines and sines", "2 s d_head 4", 2 * tokens * self.head_dim * FP32),
        ]
        if low == HALF:
            linear = layers * (2 * d * (q + kv) + 3 * d * f)
            terms.append(Term(CASTS, "2 for each of a linear layer", HALF * linear))
            terms.append(Term("head, cast", "2 labels d_model", HALF * self.labels * d))
        return terms


def require_heads(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    """Check that attention can be cut between heads over the ranks of `tp`. Several may hold the same keys and values.

    Raises:
        UserError: it cannot.
    """
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        of_keys = f" and {kv_heads} of keys and values" if kv_heads != heads else ""
        raise UserError(f"{name} has {heads} heads{of_keys}, which {ranks} ranks of tp cannot share")


def total(terms: Sequence[Term]) -> float:
    return sum(term.amount for term in terms)


def state_bytes(parameters: float, ranks: int, stage: str, precision: str) -> dict[str, float]:
    """Bytes of model states on one rank between two steps, by component; padding is not in it."""
    return {
        component: parameters * size / (ranks if component in STAGES[stage] else 1)
        for component, size in zip(MODEL_STATES, PRECISIONS[precision][0], strict=True)
    }


def bytes_of_a_parameter(stage: str, precision: str) -> tuple[int, int]:
    """Of one parameter the bytes that every rank holds, and those of which each holds 1/N."""
    sizes = dict(zip(MODEL_STATES, PRECISIONS[precision][0], strict=True))
    shared = sum(sizes[component] for component in STAGES[stage])
    return sum(sizes.values()) - shared, shared


def formula(stage: str, precision: str) -> str:
    """Bytes of a parameter: `4 + 12/N`."""
    whole, shared = bytes_of_a_parameter(stage, precision)
    return " + ".join(part for part in (f"{whole}" if whole else "", f"{shared}/N" if shared else "") if part)


def least_ranks(
    parameters: float, stage: str, precision: str, memory_bytes: float, activation_bytes: float = 0.0
) -> int | None:
    """The smallest number of ranks at which everything takes less than `memory_bytes` on each; None if there is none.

    Args:
        activation_bytes: Of one rank.
    """
    whole, shared = bytes_of_a_parameter(stage, precision)
    left = memory_bytes - parameters * whole - activation_bytes
    return max(1, int(parameters * shared // left) + 1) if left > 0 else None
