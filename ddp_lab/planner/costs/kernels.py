"""The kernels that `ddp-lab plan measure` times: each runs alone, on large tensors."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.planner.contracts import CONTIGUOUS, DERIVATIVE, OPTIMIZER, ROWS, SCATTERED, OperatorCall
from ddp_lab.planner.costs.calls import NOT_COMPUTE, operator_call

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


class Operators(TorchDispatchMode):
    """Sees each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func.namespace not in NOT_COMPUTE:
            self.calls.append(operator_call(func, args, kwargs or {}, answer))
        return answer


def calls_of(run: Run) -> list[OperatorCall]:
    with Operators() as operators:
        run()
    return [call for call in operators.calls if call.bytes_moved]


def seconds_of(run: Run, device: torch.device, round_s: float, count: int | None = None) -> float:
    """What a call takes: on CUDA from one event in the current stream to another, elsewhere by the host's clock.
    `count`: calls in a round; None: as many as take `round_s`."""

    def timed(calls: int) -> float:
        begin_s = time.perf_counter()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        for _ in range(calls):
            run()
        if device.type != "cuda":
            return time.perf_counter() - begin_s
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    timed(1)  # allocates, and chooses kernels
    calls = count or max(1, min(200, int(round_s / timed(1))))
    return median(timed(calls) for _ in range(ROUNDS)) / calls


def products(size: tuple[int, int, int], **to: Any) -> list[Run]:
    """A linear layer's forward, and the gradients of its inputs and weights, without bias."""
    tokens, narrow, wide = size
    shapes = (tokens, narrow), (wide, narrow), (tokens, wide)
    inputs, weights, gradients = (torch.randn(shape, **to) for shape in shapes)
    return [lambda: inputs @ weights.t(), lambda: gradients @ weights, lambda: gradients.t() @ inputs]


def on_memory(rows: tuple[int, int], **to: Any) -> dict[str, list[Run]]:
    """Kernels by the access that `calls.py` gives them."""
    matrix, gradient = torch.randn(rows, **to), torch.randn(rows, **to)
    row, half = torch.randn(rows[1], **to), rows[1] // 2
    across = matrix.view(-1, 8, rows[1]).transpose(0, 1)
    _, mean, deviation = aten.native_layer_norm(matrix, rows[1:], row, row, 1e-5)
    logs = torch.log_softmax(matrix, 1)
    chosen = [True] * 3
    updated = [torch.nn.Parameter(torch.randn(rows, **to)) for _ in range(4)]
    for parameter in updated:
        parameter.grad = torch.randn_like(parameter)
    return {
        CONTIGUOUS: [lambda: matrix + gradient, lambda: matrix * 2.0, lambda: matrix.clone()],
        SCATTERED: [
            lambda: matrix * row,
            lambda: matrix[:, :half].neg(),
            lambda: across.contiguous(),
            lambda: matrix.mean(1),
        ],
        ROWS: [
            *(
                lambda: aten._log_softmax(matrix, 1, False),
                lambda: aten.native_layer_norm(matrix, rows[1:], row, row, 1e-5),
            ),
            lambda: aten._log_softmax_backward_data(gradient, logs, 1, matrix.dtype),
            lambda: aten.native_layer_norm_backward(gradient, matrix, rows[1:], mean, deviation, row, row, chosen),
        ],
        DERIVATIVE: [lambda: aten.silu_backward(matrix, gradient), lambda: aten.gelu_backward(matrix, gradient)],
        OPTIMIZER: [torch.optim.AdamW(updated, fused=True).step],
    }


def attention(length: int, tokens: int, width: int, **to: Any) -> tuple[Run, Run]:
    """Forward and backward, causal, with heads of `width` features."""
    shape = max(1, tokens // length), 2048 // width, length, width
    query, key, value = (torch.randn(shape, requires_grad=True, **to) for _ in range(3))

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    result = forward()
    gradient = torch.randn_like(result)
    return forward, lambda: torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True)
