"""The whole report against HTA alone on the same traces: time and peak memory, for several numbers of ranks.

    python benchmarks/analysis.py --ranks 2,8,32

The traces are made from one: recorded here (`sample`, `bucket_ddp_async`, this machine), or given with --trace. HTA
reads no trace without device streams, so where the recorded one is a CPU's, its operators and Gloo spans are added once
more as device kernels with their launches. Each rank gets the trace under its own number, with its times stretched by
up to a percent. HTA alone: load the traces, temporal breakdown and overlap. The report: all pages and CSV files, as
scripts/analyze_traces_ddp.py writes them. Each runs in a process of its own, in alternation; Python's start and imports
count for both.
"""

import argparse
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.cli import OneLineParser, exit_with_error

STEPS = 4
FIRST_CORRELATION = 2**24
"""HTA keeps correlations in as few bytes as they need, and then row numbers in the same column: these must fit."""
NAME = "20260101-000000-0000.step4.pt.trace.json.gz"
TIMEOUT_S = 3600


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8,32", help="numbers of ranks, comma-separated; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="times that both run, in alternation (default: 3)")
    parser.add_argument("--trace", type=Path, help="a GPU trace to make ranks of, instead of recording one")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--hta-alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        options.ranks = [int(number) for number in options.ranks.split(",")]
    except ValueError:
        exit_with_error(f"--ranks {options.ranks}: must be numbers with commas between, such as 2,8,32")
    if options.rounds < 1 or len(set(options.ranks)) < len(options.ranks) or min(options.ranks) < 1:
        exit_with_error("--rounds and --ranks must be at least 1, and no number of ranks may stand twice")
    if options.trace and not options.trace.is_file():
        exit_with_error(f"--trace {options.trace}: no such file")
    return options


def main() -> int:
    options = parse()
    if options.hta_alone:
        hta_alone(options.hta_alone)
        return 0
    import pandas as pd

    rows = []
    with tempfile.TemporaryDirectory(prefix="analysis-benchmark-") as name:
        folder = Path(name)
        trace = options.trace or record(folder)
        for ranks in options.ranks:
            traces = folder / f"profile_{ranks}" / "bucket_ddp_async"
            with ProcessPoolExecutor(
                1, get_context("spawn")
            ) as writer:  # a process that has been large counts as large
                size = writer.submit(write_ranks, trace, ranks, traces).result()
            rows += [measure(traces, ranks, size) for _ in range(options.rounds)]
    table = pd.DataFrame(rows)
    show(table)
    if options.csv:
        table.to_csv(options.csv, index=False)
        print(f"table: {options.csv}")
    return 0


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def record(folder: Path) -> Path:
    """A trace of one rank of a real run of two."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["--ddp-choice", "bucket_ddp_async", "--workload", "sample", "--max-steps", str(STEPS + 2)]
    flags += ["--profile-wait", "0", "--profile-active", str(STEPS), "--output-dir", str(folder)]
    flags += ["--bucket-cap-mb", "25"]  # with fitted ones, the first steps would be of another kind
    command = [*launcher, str(ROOT / "main_ddp.py"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    return next((folder / "profile" / "bucket_ddp_async" / "rank_0").iterdir())


def with_kernels(template: dict[str, Any], path: Path) -> dict[str, Any]:
    """The trace; if it is a CPU's, with its operators and Gloo spans once more as a device's kernels."""
    from analysis.metrics.holistic import name_for_hta
    from analysis.traces.reading import read_trace
    from analysis.traces.timeline import build_timeline

    timeline = build_timeline(read_trace(path), 0, include_last_step=True)
    if timeline.kind == "cuda":
        return template
    grid = {"device": 0, "context": 1, "grid": [80, 1, 1], "block": [256, 1, 1], "registers per thread": 40}
    events, streams = template["traceEvents"], sorted(timeline.kernels["stream"].unique())
    for link, kernel in enumerate(timeline.kernels.itertuples(), FIRST_CORRELATION):
        stream, name = 7 + streams.index(kernel.stream), str(kernel.name)
        common = {"ph": "X", "pid": 0}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": kernel.launch, "dur": 1.0}
        events.append({**common, **launch, "args": {"correlation": link, "cbid": 211}})
        name = name_for_hta(name) if kernel.lane == "communication" else name
        ran = {"cat": "kernel", "name": name, "tid": stream, "ts": kernel.start, "dur": kernel.end - kernel.start}
        events.append({**common, **ran, "args": {"correlation": link, "stream": stream, **grid}})
    return template


def write_ranks(trace: Path, ranks: int, folder: Path) -> int:
    """Write the trace once for each rank, and answer with the bytes of one, decompressed."""
    template = with_kernels(load(trace), trace)
    size = 0
    for rank in range(ranks):
        stretch = 1 + random.Random(rank).uniform(-0.01, 0.01)
        info = {**template.get("distributedInfo", {}), "rank": rank, "world_size": ranks}
        events = [
            {**event, **{name: event[name] * stretch for name in ("ts", "dur") if name in event}}
            for event in template["traceEvents"]
        ]
        text = json.dumps({**template, "distributedInfo": info, "traceEvents": events}, indent=1).encode()
        size = len(text)
        path = folder / f"rank_{rank}" / NAME
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(text, compresslevel=4))
    return size


def measure(traces: Path, ranks: int, size: int) -> dict[str, float]:
    """HTA alone, then the report."""
    me = str(Path(__file__).resolve())
    hta_s, hta_bytes = run([sys.executable, me, "--hta-alone", str(traces)])
    script = str(ROOT / "scripts" / "analyze_traces_ddp.py")
    report_s, report_bytes = run([sys.executable, script, "--trace-dir", str(traces)])
    page = next(traces.parent.parent.glob("reports/**/summary.html"))
    return {
        "ranks": ranks,
        "trace_bytes": size,
        "hta_s": hta_s,
        "report_s": report_s,
        "time_ratio": report_s / hta_s,
        "hta_peak_bytes": hta_bytes,
        "report_peak_bytes": report_bytes,
        "memory_ratio": report_bytes / hta_bytes,
        "page_bytes": page.stat().st_size,
    }


def run(command: list[str]) -> tuple[float, int]:
    """Wall time in seconds and largest resident set in bytes of a command."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    words = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        exit_with_error(f"{' '.join(command)} failed: {words.strip().splitlines()[-1] if words else status}")
    return time.monotonic() - started, usage.ru_maxrss * 1024


def hta_alone(folder: Path) -> None:
    import logging

    logging.disable(logging.WARNING)
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.analyzers.communication_analysis import CommunicationAnalysis
    from hta.common.trace import Trace

    files = {int(path.parent.name.removeprefix("rank_")): str(path) for path in folder.glob("rank_*/*.json.gz")}
    trace = Trace(dict(sorted(files.items())), "")
    trace.load_traces(use_multiprocessing=False, use_memory_profiling=False)
    BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False)
    CommunicationAnalysis.get_comm_comp_overlap(trace, visualize=False)


def show(table: "pd.DataFrame") -> None:  # noqa: F821
    from rich.console import Console
    from rich.table import Table

    size = table["trace_bytes"].iloc[0] / 2**20
    shown = Table(
        title=f"medians of {table.groupby('ranks').size().iloc[0]} rounds, {size:.0f} MiB of JSON a rank", box=None
    )
    for heading in ("ranks", "HTA, s", "report, s", "ratio", "HTA, MiB", "report, MiB", "ratio ", "page, MiB"):
        shown.add_column(heading, justify="right")
    for ranks, rows in table.groupby("ranks"):
        middle = rows.median()
        spread = f"{middle['time_ratio']:.2f} ({rows['time_ratio'].min():.2f} to {rows['time_ratio'].max():.2f})"
        mib = [f"{middle[name] / 2**20:,.0f}" for name in ("hta_peak_bytes", "report_peak_bytes")]
        times = [f"{middle[name]:.1f}" for name in ("hta_s", "report_s")]
        shown.add_row(
            str(ranks), *times, spread, *mib, f"{middle['memory_ratio']:.2f}", f"{middle['page_bytes'] / 2**20:.1f}"
        )
    Console(width=110).print(shown)
    medians = table.groupby("ranks")["report_s"].apply(statistics.median)
    for few, many in zip(medians.index, medians.index[1:], strict=False):
        print(f"report of {many} ranks: {medians[many] / medians[few]:.2f} times as long as of {few}")


if __name__ == "__main__":
    sys.exit(main())
