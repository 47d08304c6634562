"""Kernels of which `card.py` measures a device, and how one is timed and counted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs.access import CONTIGUOUS, DERIVATIVE, OPTIMIZER, ROWS, SCATTERED
from ddp_lab.planner.costs.timing import Operators, seconds_on

aten = torch.ops.aten
Run = Callable[[], object]
ROUNDS = 5
"""How often a kernel is timed; the median counts."""


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    products: Tokens, features and wider features of products of matrices.
    lengths: Tokens of a sequence in attention, the shortest first; `tokens` are in a batch.
    rows: And columns of a matrix for operators on memory.
    round_s: What the repeats of a kernel in one round take.
    """

    products: Sequence[tuple[int, int, int]]
    lengths: Sequence[int]
    tokens: int
    rows: tuple[int, int]
    round_s: float = 0.05


SIZES = {
    "cuda": Sizes(((4096, 2048, 5632), (8192, 4096, 14336)), (1024, 2048, 4096, 8192), 8192, (16384, 2048)),
    "cpu": Sizes(((256, 256, 704), (512, 512, 1024)), (128, 256, 512), 512, (8192, 512), 0.02),
}


def seconds_of(run: Run, device: torch.device, round_s: float, count: int | None = None) -> float:
    """What a call takes on the device. `count`: calls in a round; None: as many as take `round_s`."""

    def timed(calls: int) -> float:
        return seconds_on(device, lambda: [run() for _ in range(calls)])

    timed(1)  # allocates, and chooses kernels
    calls = count or max(1, min(200, int(round_s / timed(1))))
    return median(timed(calls) for _ in range(ROUNDS)) / calls


def calls_of(run: Run) -> list[OperatorCall]:
    with Operators() as operators:
        run()
    return [call for call in operators.seen if call.bytes_moved]


def products(size: tuple[int, int, int], **to: Any) -> list[Run]:
    """A linear layer's forward, and the gradients of its inputs and weights, without bias."""
    tokens, narrow, wide = size
    shapes = (tokens, narrow), (wide, narrow), (tokens, wide)
    inputs, weights, gradients = (torch.randn(shape, **to) for shape in shapes)
    return [lambda: inputs @ weights.t(), lambda: gradients @ weights, lambda: gradients.t() @ inputs]


def on_memory(rows: tuple[int, int], **to: Any) -> dict[str, list[Run]]:
    """Kernels by the access that `access.py` gives them."""
    one, other = torch.randn(rows, **to), torch.randn(rows, **to)
    row, half = torch.randn(rows[1], **to), rows[1] // 2
    across = one.view(-1, 8, rows[1]).transpose(0, 1)
    _, mean, deviation = aten.native_layer_norm(one, rows[1:], row, row, 1e-5)
    logs = torch.log_softmax(one, 1)
    chosen = [True] * 3
    updated = [torch.nn.Parameter(torch.randn(rows, **to)) for _ in range(4)]
    for each in updated:
        each.grad = torch.randn_like(each)
    return {
        CONTIGUOUS: [lambda: one + other, lambda: one * 2.0, lambda: one.clone()],
        SCATTERED: [lambda: one * row, lambda: one[:, :half].neg(), lambda: across.contiguous(), lambda: one.mean(1)],
        ROWS: [
            *(lambda: aten._log_softmax(one, 1, False), lambda: aten.native_layer_norm(one, rows[1:], row, row, 1e-5)),
            lambda: aten._log_softmax_backward_data(other, logs, 1, one.dtype),
            lambda: aten.native_layer_norm_backward(other, one, rows[1:], mean, deviation, row, row, chosen),
        ],
        DERIVATIVE: [lambda: aten.silu_backward(one, other), lambda: aten.gelu_backward(one, other)],
        OPTIMIZER: [torch.optim.AdamW(updated, fused=True).step],
    }


def attention(length: int, tokens: int, width: int, **to: Any) -> tuple[Run, Run]:
    """Forward and backward, causal, with heads of `width` features."""
    shape = max(1, tokens // length), 2048 // width, length, width
    query, key, value = (torch.randn(shape, requires_grad=True, **to) for _ in range(3))

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    result = forward()
    gradient = torch.randn_like(result)
    return forward, lambda: torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True)
