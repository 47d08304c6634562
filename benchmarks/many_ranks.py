"""Memory and time of a report over many ranks, on made-up GPU traces.

    python benchmarks/many_ranks.py --ranks 8,256 --megabytes 50

Each trace has the events of torch.profiler on a GPU: operators with shapes, launches, kernels, arrows between them,
allocations, and NCCL kernels. Ranks differ in their collectives: each arrives at its own time, and one is late. All
else is equal, so its compressed bytes are written again for each rank, as a gzip member of their own.
"""

import argparse
import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil

from benchmarks.collectives import numbers
from ddp_lab.runtime.cli import OneLineParser

STEPS, STEP_US = 4, 400_000
"""Profiled steps, and their length."""
LATE_US = 400
"""By so much rank 3 arrives later than the others, which differ by up to 50 us."""
POLL_S = 0.05
MIB, GIB = 2**20, 2**30
Event = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default="8,256", help="numbers of ranks; default: 8,256")
    parser.add_argument("--megabytes", type=float, default=50, help="of one rank's JSON, uncompressed; default: 50")
    parser.add_argument("--calls", type=int, default=24, help="all-reduces of a step; default: 24")
    parser.add_argument("--processes", action="store_true", help="report with --enable-multiprocessing")
    parser.add_argument("--folder", type=Path, help="for the traces, which are kept (default: a temporary one)")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as temporary:
        root = options.folder or Path(temporary)
        for ranks in options.ranks:
            folder = root / f"profile_{ranks}" / "bucket_ddp_async"
            write_ranks(folder, ranks, options.megabytes, options.calls)
            found = report(folder, options.processes)
            if found.exit_code:
                return found.exit_code
            page = root / "reports" / folder.name / "summary.html"
            print(
                f"{ranks} ranks of {options.megabytes:g} MB: {found.wall_s:.0f} s, {found.wall_s / ranks:.2f} s a rank "
                f"({found.cpu_s / ranks:.2f} s of CPU time); {found.peak_bytes / GIB:.2f} GiB at the peak; "
                f"page {page.stat().st_size / MIB:.1f} MiB",
                flush=True,
            )
    return 0


class Report(NamedTuple):
    """What a report took.

    Attributes:
        cpu_s: Of all its processes together. Other work on the machine matters less to it than to `wall_s`.
        peak_bytes: The most that its processes held together (RSS).
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int
    exit_code: int


def report(folder: Path, processes: bool) -> Report:
    """Make the report on the traces in `folder`, with --enable-multiprocessing if `processes`."""
    command = [sys.executable, str(ROOT / "scripts/analyze_traces_ddp.py"), "--trace-dir", str(folder)]
    start, used, peak = time.perf_counter(), cpu_seconds_of_children(), 0
    child = psutil.Popen([*command, *(["--enable-multiprocessing"] if processes else [])], stdout=subprocess.DEVNULL)
    while child.poll() is None:
        peak = max(peak, resident(child))
        time.sleep(POLL_S)
    return Report(time.perf_counter() - start, cpu_seconds_of_children() - used, peak, child.returncode)


def cpu_seconds_of_children() -> float:
    """Of those that have ended, and their own."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resident(process: psutil.Process) -> int:
    """Bytes of a process and all below it. Pages that they share count for each."""
    held = 0
    try:
        for each in [process, *process.children(recursive=True)]:
            held += each.memory_info().rss
    except psutil.NoSuchProcess:  # it has just ended
        pass
    return held


# Traces --------------------------------------------------------------------------------------------------------------


def write_ranks(folder: Path, ranks: int, megabytes: float, calls: int = 24, late_rank: int = 3) -> None:
    """A trace of each rank in `folder`, under this project's names.

    Args:
        megabytes: Size of the JSON of a rank, in 10^6 bytes.
        calls: All-reduces of a step.
        late_rank: The rank that comes last to each of them.
    """
    bulk = equal_on_all_ranks(megabytes)
    for rank in range(ranks):
        info = {
            "backend": "nccl",
            "rank": rank,
            "world_size": ranks,
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": ranks, "ranks": list(range(ranks))}],
        }
        late = LATE_US if rank == late_rank else 0
        own = [event for step in range(STEPS) for event in collectives(step, calls, rank, ranks, late)]
        head = json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": own})
        path = folder / f"rank_{rank}" / "20261124-000000-0000.step8.pt.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(head[:-2].encode()) + bulk)


def equal_on_all_ranks(megabytes: float) -> bytes:
    """The end of every trace: a gzip member with the events that all ranks have alike, from the first comma on."""
    of_hundred = len(json.dumps(list(compute(STEPS - 1, 100))))
    operators = max(1, round(100 * megabytes * 1e6 / STEPS / of_hundred))
    text = "".join(", " + json.dumps(event) for step in range(STEPS) for event in compute(step, operators))
    return gzip.compress((text + "]}").encode(), compresslevel=4)


def compute(step: int, operators: int) -> Iterator[Event]:
    """One step: as many operators, each with a launch and a kernel of the same length, then the optimizer."""
    start = float(step * STEP_US)
    yield span("user_annotation", f"ProfilerStep#{step + 5}", start, STEP_US - 1)
    yield span("user_annotation", "forward", start + 10, STEP_US * 0.3)
    yield span("user_annotation", "backward", start + 10 + STEP_US * 0.3, STEP_US * 0.6)
    yield span("user_annotation", "optimizer", start + 20 + STEP_US * 0.9, STEP_US * 0.05)
    each = STEP_US * 0.95 / operators
    for index in range(operators):
        at, link = start + 20 + index * each, 1 + index + step * 10**7
        shapes = {"Input Dims": [[1024, 960], [960, 960]], "Input type": ["float", "float"], "External id": link}
        for depth, name in enumerate(("aten::linear", "aten::matmul", "aten::mm")):
            strides = {"Input Strides": [[960, 1], [1, 960]], "Concrete Inputs": ["", ""], "Ev Idx": 3 * index + depth}
            yield span("cpu_op", name, at + depth * each / 10, each * (0.9 - 0.2 * depth), **shapes, **strides)
        yield {**span("cpu_instant_event", "[memory]", at + each / 2, 0, Bytes=3932160, Addr=link), "ph": "i"}
        grid = {"grid": [15, 8, 1], "block": [128, 1, 1], "registers per thread": 122, "shared memory": 49152}
        yield from kernel(f"sm80_xmma_gemm_f32f32_{index % 40}", at + each / 3, each * 0.8, 7, link, **grid)


def collectives(step: int, calls: int, rank: int, ranks: int, late_us: float) -> Iterator[Event]:
    """The all-reduces of one step. They end on all ranks alike, and begin when a rank has its gradients."""
    start, pause = step * STEP_US + STEP_US * 0.35, STEP_US * 0.6 / calls
    arrivals = random.Random(rank)
    for bucket in range(calls):
        begin, end = start + bucket * pause + 50 * arrivals.random() + late_us, start + (bucket + 0.8) * pause
        said = {"Collective name": "allreduce", "In msg nelems": 2**20, "Out msg nelems": 2**20, "Group size": ranks}
        said |= {"dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg"}
        link = 9 * 10**6 + bucket + step * 10**7
        yield from kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin, end - begin, 20, link, **said)


def kernel(name: str, start: float, duration: float, stream: int, link: int, **args: Any) -> Iterator[Event]:
    """A kernel, its launch 20 us before, and the arrow between them."""
    yield span("cuda_runtime", "cudaLaunchKernel", start - 20, 5, correlation=link, cbid=211)
    yield {"ph": "s", "id": link, "pid": 9, "tid": 1, "ts": start - 20, "cat": "ac2g", "name": "ac2g"}
    yield span("kernel", name, start, duration, stream, stream=stream, correlation=link, device=0, context=1, **args)
    yield {"ph": "f", "id": link, "pid": 0, "tid": stream, "ts": start, "cat": "ac2g", "name": "ac2g", "bp": "e"}


def span(category: str, name: str, start: float, duration: float, tid: int = 1, **args: Any) -> Event:
    times = {"ts": round(start, 3), "dur": round(duration, 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": tid, **times, "args": args}


if __name__ == "__main__":
    sys.exit(main())
