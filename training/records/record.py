"""The files of a run: where they lie, and the run record that is written beside the traces."""

import contextlib
import json
import os
import platform
import re
import secrets
import socket
import statistics
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.communication.traffic import Collective
from training.config import RECORD_VERSION, RunConfig
from training.data.workload import Workload
from training.distributed import Ranks
from training.errors import UserError
from training.loop import TrainingResult
from training.process.environment import VARIABLE, scheduling
from training.profiling.memory import COMPONENTS, ModelSize, peak_rss_bytes
from training.strategy import Strategy
from training.watch.cause import Ending

STEP_MEMORY = (*(f"peak_{component}_bytes" for component in COMPONENTS), "peak_model_states_bytes", "peak_bytes")
STEP_MEMORY += ("peak_ms", "peak_phase", "timeline")
PACKAGES = ("torch", "transformers", "datasets", "holistictraceanalysis", "deepspeed")


def make_run_id() -> str:
    """A name that sorts by time, e.g. `20261121-093000-1f2e`."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


def choice_folder(config: RunConfig) -> Path:
    return Path(config.output_dir) / "profile" / config.choice


def make_trace_folder(config: RunConfig, rank: int) -> Path:
    """Make this rank's trace folder, and make sure that it can be written to.

    Raises:
        UserError: it cannot.
    """
    folder = choice_folder(config) / f"rank_{rank}"
    probe = folder / f".write-test-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"0" * 65536)
    except OSError as error:
        raise UserError(f"--output-dir {config.output_dir}: cannot write to {folder}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    write_text(path, to_json(content))


def write_text(path: Path, text: str) -> None:
    """Write `text` whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def to_json(content: dict[str, Any]) -> str:
    """Indented, but with each list of plain values on one line."""
    text = json.dumps(content, indent=2, allow_nan=False)
    return re.sub(r"\[\n[^\[\]{}]*\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text) + "\n"


def gather_memory(strategy: Strategy, size: ModelSize, step_memory: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What each rank holds at rest, what the formula expects, and what it held through a step, in bytes. Collective.

    Args:
        step_memory: `memory_timeline.record_step_memory`'s answer, just before.
    """
    expected = strategy.expected_memory(size)
    mine = {
        "rank": strategy.data_parallel_rank,
        **{f"{component}_bytes": held for component, held in strategy.memory_breakdown().items()},
        **{f"expected_{component}_bytes": held for component, held in expected.items()},
        **(step_memory or dict.fromkeys(STEP_MEMORY)),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    return rows


def step_statistics(result: TrainingResult, earlier: int, settling: int) -> dict[str, float | None]:
    """`samples_per_second` over the steps that the profiler did not bend, without the run's first, which is warm-up,
    and those in which the strategy settled.

    Args:
        earlier: Steps that another run has made, from whose checkpoint this one went on.
        settling: `Strategy.settling_steps`.
    """
    first = earlier + max(1, settling)
    timed = [
        (samples, seconds)
        for samples, seconds in zip(result.samples[first:], result.step_time_s[first:], strict=True)
        if seconds is not None
    ]
    if not timed:
        return {"samples_per_second": None, "step_time_median_s": None}
    return {
        "samples_per_second": sum(samples for samples, _ in timed) / sum(seconds for _, seconds in timed),
        "step_time_median_s": statistics.median(seconds for _, seconds in timed),
    }


def run_record(
    config: RunConfig,
    ranks: Ranks,
    run_id: str,
    strategy: Strategy,
    optimizer: str,
    result: TrainingResult,
    evaluation: dict[str, Any] | None,
    size: ModelSize,
    memory: list[dict[str, Any]],
    workload: Workload,
    traffic: Iterable[Collective],
    ending: Ending,
    resumed_from: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything about a run that a report or a reader may ask for; `docs/run-record.md` explains each field."""
    return {
        "schema_version": RECORD_VERSION,
        "choice": config.choice,
        "run_id": run_id,
        "ended": ending.as_dict(),
        "world_size": ranks.world_size,
        "backend": ranks.backend,
        "device": ranks.device.type,
        "device_name": device_name(ranks.device),
        "host": socket.gethostname(),
        "threads": torch.get_num_threads(),
        "allocator": os.environ.get(VARIABLE) or None,
        "scheduling": scheduling(),
        "link_bits_per_s": int(os.environ["LINK_BITS_PER_S"]) if os.environ.get("LINK_BITS_PER_S") else None,
        "config": config.as_dict(),
        "versions": package_versions(),
        "parameters": size.elements,
        "optimizer": optimizer,
        "shards": sorted(strategy.shards),
        "settling_steps": strategy.settling_steps,
        "fitted_buckets": len(strategy.learned() or ()) or None,
        "expected_traffic": [collective.as_dict() for collective in traffic],
        "train_samples": len(workload.train),
        "step_samples": result.samples,
        "step_time_s": result.step_time_s,
        **step_statistics(result, resumed_from["step"] if resumed_from else 0, strategy.settling_steps),
        "train_loss": result.loss,
        "eval_samples": len(workload.evaluation),
        "eval": evaluation,
        "resumed_from": resumed_from,
        "remarks": strategy.remarks,
        "memory": memory,
    }


def device_name(device: torch.device) -> str:
    """What the GPU, or the processor, calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
