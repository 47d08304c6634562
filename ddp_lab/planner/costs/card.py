"""`ddp-lab plan measure`: times kernels, and makes an entry for this device in the form of `hardware.toml`.

What a kernel does is counted as the simulator counts it (`calls.py`), and operators of one kind get the mean of what
their kernels reach. No step of a strategy is timed, and nothing is fitted to one.
"""

import argparse
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from math import log2, prod
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ddp_lab.machine import device_name, physical_memory
from ddp_lab.planner.contracts import CAUSAL, SCATTERED
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.cluster import EFFICIENT, FULL_HEAD
from ddp_lab.planner.costs.hardware import entry_of
from ddp_lab.planner.costs.kernels import SIZES, Run, Sizes, attention, calls_of, on_memory, products, seconds_of
from ddp_lab.planner.costs.links import BASE_S, LOW_LATENCY, volume
from ddp_lab.progress import long_work
from ddp_lab.runtime.data.synthetic import MLP
from ddp_lab.runtime.errors import UserError
from ddp_lab.writing import write_text

GRAPHED = 50
"""Small kernels in a CUDA graph."""
COMMAND = "ddp-lab plan measure"


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure, and write the file. Under torchrun it measures the link between the ranks of a node, too."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks:
        raise UserError("plan measure measures one node; start it on one")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks != "1":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with long_work("measuring kernels, for about a minute"):
            key, entry = measure(device)
    except torch.OutOfMemoryError:
        raise UserError("this GPU's memory is in use; plan measure needs some 8 GiB of it") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        write_text(options.output, toml(key, entry))
        link = "" if "link" in entry else " --link LINK"
        console.print(f"{entry['title']}: {options.output}; plan with --gpus {ranks}x{options.output}{link}")


# What kernels reach ---------------------------------------------------------------------------------------------------


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
        intercept = fast - slope / long
        halves.append(min(max(slope / intercept, 0.0), long) if intercept > 0 else float(long))
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
