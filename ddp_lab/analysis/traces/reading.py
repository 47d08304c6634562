"""Reading one trace file: it is parsed once, and only what a figure needs is kept.

No figure needs most of the arguments in a trace, nor, on a GPU, the operators of the host. So the arguments of events
stay undecoded bytes, except those of collectives and of device events.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import json_bytes, most_bytes

PACED = "paced::"
"""`--link` (docs/link.md) makes operators `paced::all_reduce` and so on, which last as long as Gloo's spans would over
that link. Gloo's own spans show the time in memory."""
DEVICE_CATEGORIES = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
LAUNCH_CATEGORIES = ("_runtime", "_driver")
COLLECTIVE_KERNEL = re.compile(
    r"(?i:nccl|rccl|msccl).*(?i:kernel)|(?!triton_).*"
    r"((?<![A-Za-z])all_?reduce|AllReduce|(?<![A-Za-z])all_?gather|AllGather|reduce_scatter|ReduceScatter|all_?to_?all"
    r"|AllToAll|multimem_|symmetric_memory::|cross_device_reduce|nvshmem|deep_ep::)"
)
"""RCCL names its kernels `ncclDevKernel_Generic`, and those of MSCCL schedules `mscclKernel_Sum_half_Simple_false`.
Behind them: symmetric memory of torch, custom all-reduces of vLLM and TensorRT-LLM, NVSHMEM, DeepEP. Names that begin
with `triton_` are of Inductor: they list what was fused around a collective."""
HOST_CALLS = ("nccl:", "rccl:", "record_param_comms")
"""How the names of host events begin that show a call of NCCL. ProcessGroupNCCL2 leaves no `nccl:` span."""
COLLECTIVE_NAME = re.compile(
    rf"(c10d::|gloo:|{PACED}|issued |composed |{'|'.join(HOST_CALLS)})|{COLLECTIVE_KERNEL.pattern}"
)
OLD_CATEGORIES = {
    "Operator": "cpu_op",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
}
"""Categories as early versions of Kineto wrote them."""
STEP_PREFIX = "ProfilerStep#"
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]")
LONGEST_NAME = 300
LARGEST_TIME_US = 1e17
"""Three thousand years. A larger time is an error in the trace."""
Decoded = TypeVar("Decoded")
REPAIRED = 1 / 8
"""Files up to this share of the largest are repaired. That takes ten times the memory of reading."""
STEP_NAME = re.compile(rb'"ProfilerStep#(\d{1,15})"')


class _Event(msgspec.Struct, gc=False):
    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _File(msgspec.Struct, gc=False):
    traceEvents: list[_Event]
    distributedInfo: Any = None


class _Info(msgspec.Struct):
    distributedInfo: Any = None


class _DeviceArguments(msgspec.Struct, gc=False):
    stream: Any = "?"
    correlation: Any = None


@dataclass(frozen=True)
class RankTrace:
    """What a trace file says.

    Attributes:
        info: The file's `distributedInfo`: backend, rank, world_size, pg_config; empty where there is none.
        events: Events with a duration, in order of start. Columns cat, name, thread (process and thread), start,
            end (microseconds), stream (of device events), launch (of device events: when the host issued it; else NaN),
            launcher (the thread that did), is_unlaunched (its launch is not there, though launches as early
            as it are) and args (a dict, of collectives only; else None). A trace with device events keeps only
            those operators of the host that issue collectives.
        unseen: Launch times in us of kernels that are not in the trace.
        notes: A sentence for each kind of event that was left out.
    """

    path: Path
    info: dict[str, Any]
    events: pd.DataFrame
    unseen: NDArray[np.float64]
    notes: list[str]


def read_trace(path: Path) -> RankTrace:
    """The content of a trace file.

    Raises:
        UserError: it is empty, cut short, not JSON, or no trace of torch.profiler.
    """
    return parse_trace(json_bytes(path), path)


def parse_trace(data: bytes | bytearray, path: Path) -> RankTrace:
    """As `read_trace`, from the file's content; `path` is for messages."""
    if not data:
        raise UserError(f"{path}: the file is empty; the run was probably stopped while it wrote; profile again")
    file = _decode(data, path)
    for event in file.traceEvents:
        if type(event.cat) is str and event.cat in OLD_CATEGORIES:
            is_step = event.cat == "Operator" and str(event.name).startswith(STEP_PREFIX)
            event.cat = "user_annotation" if is_step else OLD_CATEGORIES[event.cat]
    info = file.distributedInfo if isinstance(file.distributedInfo, dict) else {}
    categories = {str(event.cat) for event in file.traceEvents}
    gives_work = any(category.endswith(LAUNCH_CATEGORIES) for category in categories)
    if not categories & DEVICE_CATEGORIES and (
        gives_work or any(str(event.name).startswith(HOST_CALLS) for event in file.traceEvents)
    ):
        raise UserError(f"{path}: shows what was launched on a device, but not what ran there; profile the device too")
    events, unseen, notes = _table(file.traceEvents)
    if events.empty:
        raise UserError(f"{path}: no event with a duration in it, so there is nothing to analyse")
    return RankTrace(path, info, events, unseen, notes)


def peek(path: Path) -> tuple[int | None, int | None]:
    """The rank and the first profiled step that a trace file names; None for what it does not name.

    Raises:
        UserError: the file cannot be read.
    """
    data = json_bytes(path)
    header = _decoded(data, _Info)  # None if the file is broken; `parse_trace` says how
    rank = header.distributedInfo.get("rank") if header and isinstance(header.distributedInfo, dict) else None
    steps = [int(number) for number in STEP_NAME.findall(data)]
    return (rank if type(rank) is int and rank >= 0 else None), min(steps, default=None)


def _decode(data: bytes | bytearray, path: Path) -> _File:
    decoder = msgspec.json.Decoder(_File)
    try:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if len(data) > most_bytes() * REPAIRED:
                raise
            return decoder.decode(_repaired(data))
    except RecursionError:
        raise UserError(f"{path}: JSON nested too deeply to be a trace") from None
    except msgspec.ValidationError:
        raise UserError(f"{path}: has no list traceEvents, so it is not a trace of torch.profiler") from None
    except (ValueError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); the file is cut short or not a trace") from None


def _repaired(data: bytes | bytearray) -> bytes:
    """Valid JSON from what a profiler may write but the decoder refuses.

    That is NaN, infinity, control characters and broken UTF-8. Events that are not objects are removed.
    """
    file = json.loads(
        data.decode("utf-8", errors="replace"),
        strict=False,
        parse_constant=lambda _: None,
        parse_float=lambda text: value if math.isfinite(value := float(text)) else None,
    )
    if isinstance(file, dict) and isinstance(file.get("traceEvents"), list):
        file["traceEvents"] = [event for event in file["traceEvents"] if isinstance(event, dict)]
    return json.dumps(file, ensure_ascii=False).encode("utf-8", errors="replace")


def _table(events: list[_Event]) -> tuple[pd.DataFrame, NDArray[np.float64], list[str]]:
    """The events, unseen launches and notes of a `RankTrace`."""
    complete = [event for event in events if event.ph == "X" and isinstance(event.cat, str)]
    on_device = any(event.cat in DEVICE_CATEGORIES for event in complete)
    # the events that figures need
    relevant: list[_Event] = []
    launched: dict[int, _Event] = {}  # one graph launch may have launched many kernels
    for event in complete:
        event.name = _clean(str(event.name))
        if event.cat in DEVICE_CATEGORIES or event.cat == "user_annotation":
            relevant.append(event)
        elif event.cat.endswith(LAUNCH_CATEGORIES) and (link := _device_arguments(event).correlation) is not None:
            launched[link] = event
        elif event.cat == "cpu_op" and (not on_device or COLLECTIVE_NAME.match(event.name)):
            relevant.append(event)
    # a row an event, with its launch
    first, linked, rows = min(launched, default=0), set(), []
    for event in relevant:
        device = _device_arguments(event) if event.cat in DEVICE_CATEGORIES else None
        call = launched.get(device.correlation) if device else None
        launch = (call.ts, f"{call.pid} {call.tid}") if call else (None, None)
        is_unlaunched = device is not None and (device.correlation is None or device.correlation >= first)
        args = _arguments(event) if COLLECTIVE_NAME.match(event.name) else None
        thread, stream = f"{event.pid} {event.tid}", _clean(str(device.stream)) if device else ""
        rows.append((event.cat, event.name, thread, event.ts, event.dur, stream, *launch, is_unlaunched, args))
        linked.add(device.correlation if device else None)
    unseen = [call.ts for link, call in launched.items() if link not in linked and "LaunchKernel" in call.name]
    names = ["cat", "name", "thread", "start", "end", "stream", "launch", "launcher", "is_unlaunched", "args"]
    frame = pd.DataFrame(rows, columns=names)
    # times
    for column in ("start", "end", "launch"):
        frame[column] = _numbers(frame[column])
    frame["is_unlaunched"] &= frame["launch"].isna()
    if frame["name"].str.startswith(PACED).any():
        frame = frame[~frame["name"].str.startswith("gloo:")]
        frame["name"] = frame["name"].replace(f"^{PACED}", "gloo:", regex=True)
    negative = frame["end"] < 0
    frame["end"] += frame["start"]
    usable = np.isfinite(frame["start"]) & np.isfinite(frame["end"]) & ~negative
    notes = [
        f"events {defect} are left out ({count}), so what they lasted is in no figure"
        for defect, count in (("of negative duration", negative.sum()), ("without a time", (~usable & ~negative).sum()))
        if count
    ]
    return (
        frame[usable].sort_values("start", kind="stable").reset_index(drop=True),
        np.array(_numbers(unseen)),
        notes,
    )


@lru_cache(maxsize=10_000)
def _clean(name: str) -> str:
    """A name made safe to show: one line of printable text, at most `LONGEST_NAME` long."""
    text = CONTROL_CHARACTERS.sub(" ", name[: LONGEST_NAME + 1])
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def _numbers(values: Iterable[Any]) -> "pd.Series[float]":
    times = [value if type(value) in (int, float) and abs(value) < LARGEST_TIME_US else np.nan for value in values]
    return pd.Series(times, dtype=float)


def _device_arguments(event: _Event) -> _DeviceArguments:
    arguments = _decoded(event.args, _DeviceArguments) or _DeviceArguments()
    if type(arguments.correlation) is not int or arguments.correlation < 0:
        arguments.correlation = None
    return arguments


def _arguments(event: _Event) -> dict[str, Any] | None:
    arguments = _decoded(event.args, dict)
    return arguments and {name: _clean(value) if isinstance(value, str) else value for name, value in arguments.items()}


def _decoded(data: bytes | bytearray | msgspec.Raw, kind: type[Decoded]) -> Decoded | None:
    """JSON decoded as `kind`; None if it is broken or something else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
