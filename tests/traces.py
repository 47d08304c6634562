"""Small hand-made traces, whose figures can be worked out in one's head. Times are in microseconds."""

import gzip
import json
from pathlib import Path

import numpy as np

from ddp_lab.analysis.record import checked
from ddp_lab.analysis.traces.reading import parse_trace
from ddp_lab.analysis.traces.timeline import build_timeline
from ddp_lab.record_format import RECORD_VERSION


def event(category, name, start, duration, tid=1, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": duration, "args": args}


def cpu_trace(rank=0, world_size=2):
    """Two steps of 1000 us and a third, which is left out. In each step, t being its start:

    compute        t+100 .. t+400 (an `aten::mm` with another operator inside) and t+500 .. t+700
    all-reduce     t+600 .. t+900 (1000 floats), issued at t+590
    so: compute 500, communication 300, of it 100 under compute; exposed 200; kernels span t+100 .. t+900.
    """
    events = []
    for number in range(3):
        t = 1000.0 * number
        events += [
            event("user_annotation", f"ProfilerStep#{number + 5}", t, 999),
            event("user_annotation", "backward", t + 90, 700),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", t + 95, 620),
            event("cpu_op", "aten::mm", t + 100, 300),
            event("cpu_op", "aten::resize_", t + 150, 20),
            event("cpu_op", "aten::add_", t + 500, 200),
            event("cpu_op", "c10d::allreduce_", t + 590, 5, **{"Input Dims": [[[1000]], [], []]}),
            event(
                "user_annotation",
                "gloo:all_reduce",
                t + 600,
                300,
                tid=2,
                **{"Input Dims": [[1000]], "Input type": ["float"]},
            ),
        ]
    return {"distributedInfo": {"rank": rank, "world_size": world_size, "backend": "gloo"}, "traceEvents": events}


def cuda_trace(rank=0, comm_name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", **args):
    """The same times on a device: compute on stream 7, NCCL on stream 20, launched where a host would launch them."""
    events = []
    for number in range(3):
        t = 1000.0 * number
        kernels = [("gemm", 7, 100, 300, {}), ("add", 7, 500, 200, {}), (comm_name, 20, 600, 300, args)]
        events.append(event("user_annotation", f"ProfilerStep#{number + 5}", t, 999))
        for index, (name, stream, start, duration, extra_args) in enumerate(kernels):
            correlation = 10 * number + index + 1
            events.append(event("cuda_runtime", "cudaLaunchKernel", t + start - 50, 4, correlation=correlation))
            extra_args = {"stream": stream, "correlation": correlation, **extra_args}
            events.append(event("kernel", name, t + start, duration, tid=stream, **extra_args))
    return {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}, "traceEvents": events}


def launched(name, at, start, duration, stream=7, **args):
    """A kernel (or a copy, by its name), and its launch by the host at `at`; both have the correlation in `args`."""
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 1, correlation=args["correlation"]),
        event(category, name, start, duration, tid=stream, stream=stream, **args),
    ]


def ahead_trace(rank=0):
    """Host and device, of which the host is ahead: it goes through a step in 100 us, the device in 1000.

    What was launched before the trace began runs on the device from 0 to 400. Then, t being 400, 1400, 2400:

    compute        t .. t+300 and t+400 .. t+700
    all-reduce     t+600 .. t+900, of which 200 are exposed
    copy           t-150 .. t-50 on a stream of its own: the step's batch, which comes early

    So the first step has the time from 400 to 1300, and the second that from 1300 to 2300. Both have compute 600 and
    exposed 200. The first has 100 idle (from t+300 on). Its copy came before it; that of the second step begins while
    the first's all-reduce runs, until 1300, and is exposed from 1300 to 1350. Idle in the second: 50, then 100.
    """
    events = [event("kernel", "gemm", 0, 400, tid=7, stream=7, correlation=0)]
    for number in range(3):
        host, t = 100.0 * number, 400 + 1000.0 * number
        events.append(event("user_annotation", f"ProfilerStep#{number + 5}", host, 99))
        for index, (name, start, duration, stream) in enumerate(
            [
                ("Memcpy HtoD", t - 150, 100, 8),
                ("gemm", t, 300, 7),
                ("add", t + 400, 300, 7),
                ("ncclDevKernel_AllReduce", t + 600, 300, 20),
            ]
        ):
            events += launched(name, host + 10 + index, start, duration, stream, correlation=10 * number + index + 1)
    return {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}, "traceEvents": events}


def parsed(*events, **info):
    """A trace of these events, as it is read."""
    return parse_trace(json.dumps({"distributedInfo": info, "traceEvents": events}).encode(), Path("trace"))


def timeline_of(trace, rank=0, include_last_step=False):
    return build_timeline(parse_trace(json.dumps(trace).encode(), Path("trace")), rank, include_last_step)


def write(path, trace):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(trace)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_run(folder, make=cpu_trace, run_id="20261121-093000-0001"):
    """Traces of both ranks under this project's names; answers with the trace folder."""
    for rank in range(2):
        write(folder / f"rank_{rank}" / f"{run_id}.step7.pt.trace.json.gz", make(rank))
    return folder


def record(choice, step):
    """A run record as it is read; `step` is the time of a step in seconds. Its traffic is `cpu_trace`'s."""
    content = {
        "schema_version": RECORD_VERSION,
        "choice": choice,
        "run_id": "r<script>",
        "ended": {"how": "completed"},
        "world_size": 2,
        "backend": "gloo",
        "backend_class": "ProcessGroupGloo",
        "device_name": "cpu",
        "parameters": 1000,
        "samples_per_second": 8 / step,
        "tokens_per_second": 400 / step,
        "model_flops_per_second": 8e6 / step,
        "settling_steps": 0,
        "compile": None,
        "resumed_from": None,
        "expected_traffic": [{"kind": "all_reduce", "count": 1, "payload_bytes": 4000}],
        "train_samples": 12,
        "step_samples": [8, 4],
        "eval_samples": 8,
        "train_loss": [2.0, 1.0],
        "step_time_s": [9.0, None, step, step],
        "eval": {"loss": 1.0, "accuracy": 0.5, "samples": 8},
        "optimizer": "AdamW",
        "shards": ["gradients"],
        "memory": [memory_of(0, 1.0), memory_of(1, 0.5)],
        "config": {
            "workload": "mlp",
            "model": None,
            "dataset": None,
            "epochs": 1,
            "max_steps": None,
            "global_batch_size": 8,
            "grad_accum_steps": 2,
            "precision": "fp32",
            "lr": 0.1,
            "clip_grad_norm": None,
            "bucket_cap_mb": "auto",
            "seed": 0,
        },
    }
    return checked(content, "record")


def record_of_eight_steps(choice, step):
    """`record` of eight steps with 8 samples each, but 4 in the last; traces are of steps 5 and 6."""
    steps = {"train_samples": 60, "step_samples": [8] * 7 + [4], "train_loss": [2.0] * 7 + [1.0]}
    return {**record(choice, step), **steps}


RHYTHM = np.tile([1.0, 1.02, 0.98, 1.01], 11)[:41]
"""Factors of step times over a run: a machine is slower in some steps."""


def timed(choice, seconds, jitter=0.0, steps=41):
    """The record of a run whose steps but the first were timed; `jitter` makes every other batch slower or faster."""
    times = seconds * RHYTHM * (1 + jitter * np.tile([1, 1, 1, 1, -1, -1, -1, -1], 6)[:41])
    times *= 1 + 1e-8 * (seconds + jitter) * np.arange(41)  # no equal pairs, which would make a test take 1 s
    return record_of_eight_steps(choice, seconds) | {"step_time_s": times[:steps].tolist()}


def memory_of(rank, scale):
    """A rank's row: `rank` 0 holds most."""
    sizes = {"parameters": 40, "gradients": 20, "optimizer_state": 80, "buffers": 4}
    row = {"rank": rank}
    for component, size in sizes.items():
        row[f"{component}_bytes"] = int(scale * size * 2**20)
        row[f"peak_{component}_bytes"] = int(scale * (size + 8) * 2**20)
        if component != "buffers":
            row[f"expected_{component}_bytes"] = int(scale * size * 2**20) - 8
    peaks = {"peak_model_states_bytes": 160, "peak_bytes": 200, "peak_workspace_bytes": 3, "peak_rss_bytes": 900}
    row |= {name: int(scale * size * 2**20) for name, size in peaks.items()}
    timeline = {f"{component}_bytes": [row[f"{component}_bytes"]] * 3 for component in sizes}
    timeline |= {"ms": [0.0, 5.0, 9.0], "where": ["start", "<b>layer", "end"]}
    timeline |= {"allocated_bytes": [row["peak_bytes"]] * 3, "highest_bytes": [row["peak_bytes"]] * 3}
    timeline["phases"] = [
        {"name": "forward", "start_ms": 1.0, "end_ms": 4.0},
        {"name": "backward", "start_ms": 4.0, "end_ms": 8.0},
    ]
    return {**row, "peak_ms": 5.0, "peak_phase": "backward", "timeline": timeline}
