"""The terms of GPT-2 as a language model, and which shape a configuration has.

Dropout keeps what a CPU's does, as a simulated step: factors in the dtype of its input. A GPU keeps one byte instead.
"""

from dataclasses import dataclass
from typing import Any

from ddp_lab.planner.accounting import FP32
from ddp_lab.planner.decoders import Batch, Decoder, Term
from ddp_lab.runtime.data.reviews import STARS
from ddp_lab.runtime.settings.data import CAUSAL_LM


@dataclass(frozen=True)
class GPT2(Decoder):
    """The shape of a GPT-2.

    Attributes:
        positions: That it has learned.
        drops, drops_first: Whether there is dropout behind layers, and behind the embeddings.
    """

    positions: int = 0
    drops: bool = False
    drops_first: bool = False

    def _block_parameters(self) -> list[Term]:
        d, f, layers = self.d_model, self.d_ff, self.layers
        return [
            Term("positions", "positions d_model", self.positions * d),
            Term("attention", "layers 4 (d_model + 1) d_model", layers * 4 * (d + 1) * d),
            Term("feed-forward", "layers (2 d_model d_ff + d_ff + d_model)", layers * (2 * d * f + f + d)),
            Term("norms", "(2 layers + 1) 2 d_model", (2 * layers + 1) * 2 * d),
        ]

    def _linear(self) -> int:
        return self.layers * self.d_model * (4 * self.d_model + 2 * self.d_ff)

    def _block_activations(self, batch: Batch) -> list[Term]:
        bs, layers, own, low, d = batch.bs, self.layers, batch.own, batch.low, self.d_model
        terms = [
            Term("residual stream", f"2 layers b s d_model {own}", 2 * layers * bs * d * own),
            Term(
                "inputs of attention, its output, of feed-forward",
                f"3 layers b s d_model {low}",
                3 * layers * bs * d * low,
            ),
            Term("queries, keys, values", f"3 layers b s d_model {low}", 3 * layers * bs * d * low),
            Term("statistics of norms", f"4 layers b s {own}", 4 * layers * bs * own),
            Term("log-sum-exp", "layers b s heads 4", layers * bs * self.heads * FP32),
            Term("GELU and its parts", f"layers b s 5 d_ff {low}", layers * bs * 5 * self.d_ff * low),
            Term("last norm and token ids", f"b s ({own} d_model + {2 * own} + 16)", bs * (own * d + 2 * own + 16)),
        ]
        if self.drops or self.drops_first:
            masks = 2 * layers * low * self.drops + own * self.drops_first
            terms.append(Term("what dropout keeps", f"b s d_model (2 layers {low}, {own})", bs * d * masks))
        return terms

    def _last_norm(self, batch: Batch) -> tuple[int, int]:
        return batch.own, batch.own + batch.low


def decoder_of(configuration: Any, task: str) -> Decoder | None:
    """The shape in a configuration of transformers; None if no formula here is for its type."""
    c, is_lm = configuration, task == CAUSAL_LM
    sizes = (
        {
            "d_model": c.hidden_size,
            "layers": c.num_hidden_layers,
            "heads": c.num_attention_heads,
            "vocab": c.vocab_size,
            "labels": None if is_lm else STARS,
            "tied": c.tie_word_embeddings,
        }
        if c.model_type in ("llama", "mistral", "qwen2", "gpt2")
        else {}
    )
    if c.model_type == "gpt2" and is_lm and c.activation_function == "gelu_new":
        return GPT2(
            **sizes,
            d_ff=c.n_inner or 4 * c.n_embd,
            kv_heads=c.n_head,
            head_dim=c.n_embd // c.n_head,
            positions=c.n_positions,
            drops=bool(c.resid_pdrop),
            drops_first=bool(c.embd_pdrop),
        )
    if c.model_type == "gpt2" or not sizes:
        return None
    return Decoder(
        **sizes,
        d_ff=c.intermediate_size,
        kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        qkv_biases=c.model_type == "qwen2",
    )
