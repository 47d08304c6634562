"""A predicted step as a trace in the format of `torch.profiler`, for this project's reports and for Perfetto.

Whatever the device, what it computes and what is in flight are written as kernels on streams of their own, each with
its launch. Everything in the file says that it is predicted: its metadata, its processes, and the names of kernels.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.cluster import Cluster
from planner.contracts import Simulated, Span
from training.errors import UserError

COMPUTE_STREAM, FIRST_COMMUNICATION_STREAM = 7, 20
HOST, DEVICE = 1, 0
STEP = "ProfilerStep#0"
PREDICTED = "predicted"
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
DTYPES = {"float64": "Double", "int64": "Long", "float32": "Float", "int32": "Int", "bfloat16": "BFloat16"}
DTYPES |= {"float16": "Half"}
"""As NCCL's kernels carry them."""


def write_trace(simulated: Simulated, path: Path, choice: str, cluster: Cluster, rank: int = 0) -> None:
    """Write one step of one rank to `path` (`*.pt.trace.json.gz`), whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    trace = {
        "schemaVersion": 1,
        PREDICTED: True,
        "predicted_by": "planner.simulate",
        "predicted_for": {"choice": choice, "device": cluster.device.name, "link": cluster.inside.name},
        "distributedInfo": {
            "backend": cluster.backend,
            "rank": rank,
            "world_size": cluster.world_size,
            "pg_count": len({span.details["group"] for span in communication(simulated)}),
        },
        "traceEvents": list(events(simulated, choice)),
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not in compact JSON: HTA looks for `"rank": 0` with the space.
        temporary.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=4, mtime=0))
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def communication(simulated: Simulated) -> list[Span]:
    return [span for span in simulated.spans if span.lane.startswith("communication")]


def events(simulated: Simulated, choice: str) -> Iterator[dict[str, Any]]:
    """Chrome trace events, times in microseconds from the beginning of the step."""
    yield named("process_name", HOST, 0, f"{PREDICTED}: {choice}, host")
    yield named("process_name", DEVICE, 0, f"{PREDICTED}: {choice}, device")
    yield named("thread_name", DEVICE, COMPUTE_STREAM, f"{PREDICTED}: compute")
    for stream in sorted({stream_of(span) for span in communication(simulated)}):
        yield named("thread_name", DEVICE, stream, f"{PREDICTED}: communication {stream - FIRST_COMMUNICATION_STREAM}")
    yield complete("user_annotation", STEP, 0.0, simulated.step_time_s, HOST, 1)
    for number, span in enumerate(simulated.spans, start=1):
        if span.lane == "phase":
            yield complete("user_annotation", span.name, span.start_s, span.end_s, HOST, 1)
            continue
        stream = stream_of(span)
        issued = max(span.details.get("issued_s", span.start_s), 0.0)
        yield complete("cuda_runtime", "cudaLaunchKernel", issued, issued, HOST, 1, correlation=number)
        args = {"stream": stream, "correlation": number, "device": DEVICE, PREDICTED: True, **arguments(span)}
        yield complete("kernel", kernel_name(span), span.start_s, span.end_s, DEVICE, stream, **args)


def stream_of(span: Span) -> int:
    if span.lane == "compute":
        return COMPUTE_STREAM
    return FIRST_COMMUNICATION_STREAM + int(span.lane.rpartition(" ")[2])


def kernel_name(span: Span) -> str:
    if span.lane == "compute":
        return f"{span.name} ({PREDICTED})"
    kind = "".join(part.capitalize() for part in span.name.split("_"))
    return f"ncclDevKernel_{kind} ({PREDICTED}, {span.details['backend']})"


def arguments(span: Span) -> dict[str, Any]:
    """What a kernel's event says beyond its times."""
    if span.lane == "compute":
        return {"Input Dims": [list(shape) for shape in span.details["call"].shapes]}
    dtype = span.details["dtype"]
    size = ITEM_BYTES.get(dtype, 1)
    elements = span.details["payload_bytes"] // size
    return {
        "Collective name": span.name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": span.details["group_size"],
        "dtype": DTYPES.get(dtype, "Byte"),
        "Process Group Name": span.details["group"],
        "link": span.details["link"],
    }


def named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def complete(
    category: str, name: str, start_s: float, end_s: float, process: int, thread: int, **args: Any
) -> dict[str, Any]:
    start, duration = round(start_s * 1e6, 3), round((end_s - start_s) * 1e6, 3)
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": duration} | (
        {"args": args} if args else {}
    )
