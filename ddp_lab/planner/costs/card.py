"""Measures what a device reaches, kernel by kernel, and makes an entry for it in the form of `hardware.toml`.

Each kernel runs alone, on large tensors. What it does is counted as the simulator counts it (`calls.py`), and operators
of one kind get the mean of what their kernels reach. No step of a strategy is timed, and nothing is fitted to one.
"""

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.machine import device_name, physical_memory
from ddp_lab.planner.contracts import CAUSAL, CONTIGUOUS, DERIVATIVE, OPTIMIZER, ROWS, SCATTERED, OperatorCall
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.calls import NOT_COMPUTE, operator_call
from ddp_lab.planner.costs.cluster import EFFICIENT, FULL_HEAD
from ddp_lab.planner.costs.hardware import entry_of
from ddp_lab.planner.costs.links import BASE_S, LOW_LATENCY, volume
from ddp_lab.runtime.data.synthetic import MLP
from ddp_lab.runtime.errors import UserError

aten = torch.ops.aten
Run = Callable[[], object]
ROUNDS = 5
"""How often a kernel is timed; the median counts."""
GRAPHED = 50
"""Small kernels in a CUDA graph."""
COMMAND = "ddp-lab plan measure"


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

# Kernels --------------------------------------------------------------------------------------------------------------


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


# What they reach ------------------------------------------------------------------------------------------------------


class Bench:
    """The kernels of a device, timed."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self._device, self._sizes = device, sizes
        self.host_s = self._host_s()
        self.launch_s = self._launch_s() if device.type == "cuda" else self.host_s

    def _seconds(self, run: Run) -> float:
        """Without the launch, which the planner adds."""
        seconds = seconds_of(run, self._device, self._sizes.round_s)
        return max(seconds - self.launch_s, seconds / 2)

    def _host_s(self) -> float:
        """Of one operator in steps so small that only the host takes time."""
        with self._device:
            module = MLP(8, 8)
            batch = {"inputs": torch.ones(2, 8), "targets": torch.zeros(2, 8)}
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)

        def step() -> None:
            optimizer.zero_grad()
            module(**batch).loss.backward()
            optimizer.step()

        step()
        return seconds_of(step, self._device, self._sizes.round_s) / len(calls_of(step))

    def _launch_s(self) -> float:
        small, graph = torch.zeros(8, device=self._device), torch.cuda.CUDAGraph()
        small.add_(1)
        with torch.cuda.graph(graph):
            for _ in range(GRAPHED):
                small.add_(1)
        return seconds_of(graph.replay, self._device, self._sizes.round_s) / GRAPHED

    def product_rates(self, dtype: str) -> list[float]:
        """Of each product, in FLOP/s."""
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
        to = {"device": self._device, "dtype": getattr(torch, dtype.removeprefix("t"), torch.float32)}
        runs = [run for size in self._sizes.products for run in products(size, **to)]
        rates = [sum(call.flops for call in calls_of(run)) / self._seconds(run) for run in runs]
        torch.backends.cuda.matmul.allow_tf32 = False
        return rates

    def memory_rates(self, dtype: torch.dtype) -> tuple[dict[str, list[float]], float]:
        """Bytes a second of each kernel, by access; and elements a second of those that handle one at a time."""
        rates, elements = dict[str, list[float]](), list[float]()
        for access, runs in on_memory(self._sizes.rows, device=self._device, dtype=dtype).items():
            for run in runs:
                calls, seconds = calls_of(run), self._seconds(run)
                rates.setdefault(access, []).append(sum(call.bytes_moved for call in calls) / seconds)
                if access == SCATTERED:
                    elements.append(sum(max(map(prod, call.shapes)) for call in calls) / seconds)
        return rates, fmean(elements)

    def attention_entry(self, dtype: torch.dtype, peak: float) -> dict[str, float] | None:
        """What `cluster.Attention` takes. None if torch has no kernel of attention for this."""
        parts = dict[tuple[int, int, int], float]()
        widths, lengths = (FULL_HEAD // 2, FULL_HEAD), self._sizes.lengths
        for width, length in ((width, length) for width in widths for length in lengths):
            runs = attention(length, self._sizes.tokens, width, device=self._device, dtype=dtype)
            for backward, run in enumerate(runs):
                calls = [call for call in calls_of(run) if call.access == CAUSAL]
                if not calls:
                    return None
                slower = EFFICIENT if "efficient" in calls[0].name else 1.0
                flops = sum(call.flops for call in calls) / 2 / slower
                parts[backward, width, length] = flops / self._seconds(run) / peak
        return attention_form(parts, lengths)


def attention_form(parts: Mapping[tuple[int, int, int], float], lengths: Sequence[int]) -> dict[str, float]:
    """The parts of a peak that kernels reach, as F x S / (S + half) x (width / 128) ** narrower: the shortest and the
    longest S give half. `parts`: by backward (0, 1), width of a head (64, 128), and S."""
    short, long = lengths[0], lengths[-1]
    halves = []
    for backward in (0, 1):
        slow, fast = 1 / parts[backward, FULL_HEAD, short], 1 / parts[backward, FULL_HEAD, long]
        slope = (slow - fast) / (1 / short - 1 / long)
        whole = fast - slope / long
        halves.append(min(max(slope / whole, 0.0), long) if whole > 0 else float(long))
    half = fmean(halves)
    best = [fmean(parts[way, FULL_HEAD, s] * (s + half) / s for s in lengths) for way in (0, 1)]
    ratios = [parts[way, FULL_HEAD, s] / parts[way, FULL_HEAD // 2, s] for way in (0, 1) for s in lengths]
    return {"forward": best[0], "backward": best[1], "half": half, "narrower": max(0.0, log2(fmean(ratios)))}


def link_entry(device: torch.device, payload_bytes: int) -> dict[str, Any]:
    """What `hardware.link_of` takes of the link between all ranks, by all-reduces of little and of `payload_bytes`."""
    backend, ranks = "nccl" if device.type == "cuda" else "gloo", dist.get_world_size()
    took = []
    for payload, count in ((4096, 20), (payload_bytes, 2)):
        data = torch.zeros(payload // 4, device=device)
        took.append(seconds_of(lambda: dist.all_reduce(data), device, 0.0, count))  # noqa: B023
    ring, base = volume("all_reduce", backend, ranks), BASE_S[backend]
    hop_s = max((took[0] - base) / ring.hops, 1e-7) / (LOW_LATENCY[0] if backend == "nccl" else 1.0)
    rest_s = max(took[1] - base - ring.hops * hop_s, took[1] / 2)
    rate = ring.busiest * payload_bytes / rest_s
    source = f"measured by {COMMAND}: all-reduces of {ranks} ranks over {backend}"
    return {"bytes_per_s": rate, "latency_us": hop_s * 1e6, "efficiency": 1.0, "source": source}


def measure(device: torch.device, sizes: Sizes | None = None) -> tuple[str, dict[str, Any]]:
    """Name and entry of this device. On several ranks of one node, all call it; the entry has their link.

    Peaks are the table's, if it has this GPU, and else the fastest kernel's.
    """
    sizes, on_cuda = sizes or SIZES[device.type], device.type == "cuda"
    name = device_name(device)
    try:
        key, table_entry = entry_of(name if on_cuda else hardware.CPU)
    except UserError:
        key, table_entry = name, {}
    bench, half = Bench(device, sizes), torch.bfloat16
    if on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        half = torch.float16
    rates = {dtype: bench.product_rates(dtype) for dtype in ("float32", *["tfloat32"] * on_cuda, "bfloat16", "float16")}
    memory, elements = bench.memory_rates(torch.float32)
    sheet = table_entry if on_cuda else {}
    peaks = {dtype: sheet.get("flops", {}).get(dtype, max(of_dtype)) for dtype, of_dtype in rates.items()}
    bytes_per_s = sheet.get("bytes_per_s", max(map(max, memory.values())))
    shares = {access: fmean(of_access) / bytes_per_s for access, of_access in memory.items()}
    when = f"{datetime.date.today()}, torch {torch.__version__}"
    source = f"measured by {COMMAND} on {name}, {when}, {torch.get_num_threads()} threads"
    size = torch.cuda.get_device_properties(device).total_memory if on_cuda else physical_memory()
    entry = {
        "title": name,
        "kind": device.type,
        "memory_mib": size // 2**20,
        "flops": peaks,
        "bytes_per_s": bytes_per_s,
        "elements_per_s": bench.memory_rates(half)[1] if on_cuda else elements,
        "efficiency": {
            "compute": {dtype: fmean(rates[dtype]) / peak for dtype, peak in peaks.items()},
            "launch_us": bench.launch_s * 1e6,
        },
        "operators": {**shares, "host_us": bench.host_s * 1e6, "source": source},
        "source": source if not sheet else f"{source}; peaks: {sheet['source']}",
    }
    if form := bench.attention_entry(half, peaks[str(half).removeprefix("torch.")]):
        entry["attention"] = form
    if dist.is_initialized() and dist.get_world_size() > 1:
        entry["link"] = link_entry(device, 4 * prod(sizes.rows))
    elif "link" in sheet:
        entry["link"] = sheet["link"]
    return key, entry


def toml(key: str, entry: Mapping[str, Any]) -> str:
    """The entry as text, which `ddp-lab plan --gpus 2xFILE` reads."""
    lines = [f"{name} = {written(value)}" for name, value in entry.items()]
    return "\n".join([f"[devices.{json.dumps(key)}]", *lines, ""])


def written(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {written(item)}' for name, item in value.items())} }}"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
