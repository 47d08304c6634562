"""What a time means for who pays: model FLOPs of a sample, and what a device costs for an hour."""

import tomllib
from dataclasses import dataclass
from functools import cache
from math import expm1
from pathlib import Path
from typing import Any

from torch import nn

from ddp_lab.planner.accounting import PRECISIONS
from ddp_lab.planner.model import TOKENS, Model, skeleton
from ddp_lab.runtime.records.flops import model_flops

TABLE = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True)
class Price:
    """Of one device for an hour.

    Attributes:
        amount: In US dollars.
        source: Who asks it, and when that was read.
    """

    amount: float
    source: str = "as given"


def listed_price(device: str) -> Price | None:
    """What the table says of a device of `hardware.toml`; None without an entry."""
    entry = _table().get(device)
    return entry and Price(entry["dollars"], f"on-demand list price: {entry['source']}; read on {entry['date']}")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())


def best_interval(write_s: float, mtbf_s: float) -> tuple[float, float]:
    """Seconds between two checkpoints with which a run ends first, and the share of its time that writing them, and
    repeating what a failure undoes, adds (Daly, 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", equation 37, of which Young's is the first term)."""
    ratio = (write_s / (2 * mtbf_s)) ** 0.5
    interval_s = (2 * write_s * mtbf_s) ** 0.5 * (1 + ratio / 3 + ratio**2 / 9) - write_s if ratio < 1 else mtbf_s
    return interval_s, mtbf_s / interval_s * expm1((interval_s + write_s) / mtbf_s) - 1


def checkpoint_bytes(model: Model, precision: str) -> int:
    """Of weights, and of Adam's states of those that train."""
    of_weight, _, of_states = PRECISIONS.get(precision, PRECISIONS["fp32"])[0]
    parameters = list(skeleton(model).parameters())
    return sum(parameter.numel() * (of_weight + of_states * parameter.requires_grad) for parameter in parameters)


def flops_of_a_sample(model: Model, sequence_length: int) -> float | None:
    """FLOPs that forward and backward of one sample need, as a run's record has them (`runtime.records.flops`).

    A token of a transformer takes 6 P + 12 L d s (Chowdhery et al., 2022, "PaLM", appendix B): P elements of matrices
    that tokens are multiplied by, L layers, attention d wide over all heads, and s tokens in a sample. What is computed
    again in backward does not count. Of other models it is counted by operator. None if it is not known, or if
    weights are frozen.
    """
    if model.lora_rank:
        return None
    module = skeleton(model)
    if model.kind != TOKENS:
        return model_flops(module, model.micro_batches(1, 1, sequence_length)[0])
    config = model.configuration()
    products = multiplied(module, getattr(config, "num_experts_per_tok", None))
    if products is None:
        return None
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return float(sequence_length * (6 * products + 12 * config.num_hidden_layers * width * sequence_length))


def multiplied(module: nn.Module, experts_per_token: int | None) -> float | None:
    """Elements of the matrices that a token is multiplied by: of E experts k / E of their elements, of all else all.

    None if there are experts, and not said how many a token gets.
    """
    total = 0.0
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.Conv1d):
            continue
        for name, weight in layer.named_parameters(recurse=False):
            if weight.ndim == 2 and "bias" not in name:
                total += weight.numel()
            elif weight.ndim == 3:  # transformers stacks experts
                if experts_per_token is None:
                    return None
                total += weight.numel() * experts_per_token / weight.shape[0]
    return total
