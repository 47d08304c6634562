"""What a decoder-only transformer has and keeps, term by term.

Of transformers' Llama, Mistral and Qwen2: SwiGLU, RMSNorm, grouped-query attention by `scaled_dot_product_attention`;
`gpt2` has the other. Activations are those that autograd keeps for backward: they were found with
`torch.autograd.graph.saved_tensors_hooks`, and tests compare them with it, and all with simulated steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from ddp_lab.planner.accounting import FP32, HALF
from ddp_lab.runtime.data.reviews import STARS
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.precision import AUTOCAST

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
class Batch:
    """One micro-batch, and in what it is computed.

    Attributes:
        samples: b. All are whole in a language model's batch; in a classifier's, several have a mask.
        tokens: Of each sample (s).
        own: Bytes of an element of parameters, and of what is no product.
        low: The same of products.
    """

    samples: int
    tokens: int
    own: int = FP32
    low: int = FP32

    @classmethod
    def of(cls, samples: int, tokens: int, precision: str, casts: bool = False) -> "Batch":
        """`casts`: parameters are cast before, as with the runner's `--param-dtype`."""
        if precision in AUTOCAST:
            return cls(samples, tokens, FP32, HALF)
        width = FP32 if precision == "fp32" and not casts else HALF
        return cls(samples, tokens, width, width)

    @property
    def bs(self) -> int:
        return self.samples * self.tokens

    @property
    def autocast(self) -> bool:
        return self.low < self.own


@dataclass(frozen=True)
class Decoder:
    """The shape of a Llama, Mistral or Qwen2.

    Attributes:
        qkv_biases: Whether queries, keys and values have biases.
        labels: Of a classifier; None for a language model.
        tied: Whether the head of a language model is the token embedding.
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
    labels: int | None = STARS
    tied: bool = False
    is_part: bool = False

    @property
    def d_q(self) -> int:
        return self.heads * self.head_dim

    @property
    def d_kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def outputs(self) -> int:
        """Of the head."""
        return self.vocab if self.labels is None else self.labels

    def part(self, ranks: int) -> "Decoder":
        """What one of so many ranks has where tensor parallelism cuts layers, without sequence parallelism. Where they
        do not divide, the largest part.

        Raises:
            UserError: heads do not divide, or the head is cut, of whose loss no formula is known.
        """
        if ranks > 1 and self.labels is None:
            raise UserError("--tp: no formula is known for the loss of a vocabulary that is cut; plan it with --mesh")
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
        """Elements of parameters."""
        d = self.d_model
        terms = [Term("token embedding", "vocab d_model", self.vocab * d), *self._block_parameters()]
        if self.labels is not None:
            terms.append(Term("head", "labels d_model", self.labels * d))
        elif not self.tied:
            terms.append(Term("head", "vocab d_model", self.vocab * d))
        return terms

    def _block_parameters(self) -> list[Term]:
        d, layers = self.d_model, self.layers
        terms = [
            Term("attention", "layers 2 d_model (d_q + d_kv)", layers * 2 * d * (self.d_q + self.d_kv)),
            Term("feed-forward", "layers 3 d_model d_ff", layers * 3 * d * self.d_ff),
            Term("norms", "(2 layers + 1) d_model", (2 * layers + 1) * d),
        ]
        if self.qkv_biases:
            terms.append(Term("biases", "layers (d_q + 2 d_kv)", layers * (self.d_q + 2 * self.d_kv)))
        return terms

    def activation_terms(self, batch: Batch, chunks: int = 1) -> list[Term]:
        """Bytes that autograd keeps for the backward pass of one micro-batch, without what `loss_term` has.

        Args:
            chunks: In which the loss is computed: then the head's input is kept as it is, not cast.
        """
        low, d = batch.low if chunks == 1 else batch.own, self.d_model
        terms = [*self._block_activations(batch), Term("input of the head", f"b s d_model {low}", batch.bs * d * low)]
        if batch.autocast:
            terms.append(Term(CASTS, "2 for each of a linear layer", HALF * self._linear()))
            terms.append(Term("head, cast", "2 outputs d_model", HALF * self.outputs * d))
        return terms

    def _linear(self) -> int:
        """Elements of the weights of linear layers in blocks."""
        return self.layers * self.d_model * (2 * (self.d_q + self.d_kv) + 3 * self.d_ff)

    def _block_activations(self, batch: Batch) -> list[Term]:
        bs, layers, own, low = batch.bs, self.layers, batch.own, batch.low
        d, q, kv = self.d_model, self.d_q, self.d_kv
        casts_each = batch.autocast and not self.is_part
        inputs = {"attention": 3, "feed-forward": 2} if casts_each else {"attention": 1, "feed-forward": 1}
        terms = [
            Term("residual stream", "2 layers b s d_model 4", 2 * layers * bs * d * FP32),
            Term("normalized", f"2 layers b s ({own} d_model + 4)", 2 * layers * bs * (own * d + FP32)),
        ]
        for name, copies in inputs.items():
            formula = f"{copies} layers b s d_model {low}".removeprefix("1 ")
            terms.append(Term(f"input of {name}", formula, copies * layers * bs * d * low))
        if self.labels is not None and batch.samples > 1:  # with a mask, keys and values are repeated for every query
            terms.append(Term("queries, keys, values", f"layers b s 3 d_q {low}", layers * bs * 3 * q * low))
            terms.append(Term("mask", f"layers b s s {low}", layers * bs * batch.tokens * low))
        else:
            held = layers * bs * (q + 2 * kv) * low
            terms.append(Term("queries, keys, values", f"layers b s (d_q + 2 d_kv) {low}", held))
        return [
            *terms,
            Term("attention output", f"layers b s d_q {low}", layers * bs * q * low),
            Term("log-sum-exp", "layers b s heads 4", layers * bs * self.heads * FP32),
            Term("gate, its SiLU, up, product", f"layers b s 4 d_ff {low}", layers * bs * 4 * self.d_ff * low),
            Term("last norm and token ids", f"b s ((4 + {own}) d_model + 12)", bs * ((FP32 + own) * d + 12)),
            Term("cosines and sines", f"2 s d_head {own}", 2 * batch.tokens * self.head_dim * own),
        ]

    def loss_term(self, batch: Batch, chunks: int = 1) -> Term | None:
        """Of a language model what a step holds at its peak beside what is kept, where gradients of an earlier
        micro-batch are there. None for a classifier.

        That is mostly logits, their log-probabilities and gradients. With few tokens, small vocabularies or chunks, it
        may be what backward makes later, less what it has freed by then.
        """
        if self.labels is not None:
            return None
        logits, head, bsd = batch.bs * self.vocab, self.vocab * self.d_model, batch.bs * self.d_model
        own, low, tied = batch.own, batch.low, batch.own * self.tied  # which waits for the embedding's, to be added up
        norm_keeps, norm_makes = self._last_norm(batch)
        cast = HALF * head * batch.autocast
        freed = bsd * (low + norm_keeps) + cast
        block = batch.bs * self.d_ff * low + bsd * (own + low) + self.d_model * self.d_ff * low
        kept = total(self.activation_terms(batch, chunks))
        moments = [
            Term("backward of the last norm", "by operator", bsd * norm_makes - cast + tied * head),
            Term("backward of a block", "by operator", block - freed + tied * head),
            Term("gradient of the embedding", "instead of activations", (own + 2 * tied) * head - kept),
        ]
        if chunks > 1:
            part = logits / chunks
            held = FP32 * head + own * bsd + max(8 * part, low * part + HALF * head * (low == HALF))
            formula = f"8 b s vocab / {chunks} + 4 vocab d_model + {own} b s d_model"
            moments.append(Term(f"loss in {chunks} chunks", formula, held))
        else:
            moments.append(Term("logits and their gradients", "12 b s vocab", 12 * logits))
            of_both = Term("gradients of head and logits", f"{low} (b s + d_model) vocab", low * (logits + head))
            moments += [of_both, Term("gradient of the head", "4 vocab d_model", 4 * head * batch.autocast)]
        return max(moments, key=lambda term: term.amount)

    def _last_norm(self, batch: Batch) -> tuple[int, int]:
        """Bytes of a feature of a token that the last norm keeps, and that its backward makes."""
        return FP32 + batch.own, FP32 * (3 + (batch.own == HALF))


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
