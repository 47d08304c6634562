"""The files of a run: where they are, how they are written, and what the run record says of times, memory and host."""

import contextlib
import os
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_lab.runtime.config import RunConfig, choice_folder
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import gather_objects
from ddp_lab.runtime.loop import TrainingResult
from ddp_lab.runtime.profiling.memory import COMPONENTS, limit_bytes, peak_rss_bytes
from ddp_lab.strategy.account import ModelSize
from ddp_lab.strategy.strategy import Strategy

STEP_MEMORY = (*(f"peak_{component}_bytes" for component in COMPONENTS), "peak_model_states_bytes", "peak_bytes")
STEP_MEMORY += ("peak_ms", "peak_phase", "peak_workspace_bytes", "peak_reserved_bytes", "device_used_bytes")
STEP_MEMORY += ("timeline",)


def make_run_id() -> str:
    """A name that sorts by time, e.g. `20261121-093000-1f2e`."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


def make_trace_folder(config: RunConfig, rank: int) -> Path:
    """Make the folder for this rank's traces, and check that files can be written there. A rank that writes no traces
    gets the strategy's folder."""
    folder = choice_folder(config) / (f"rank_{rank}" if config.profiles(rank) else "")
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


def gather_memory(strategy: Strategy, size: ModelSize, step_memory: dict[str, Any] | None) -> list[dict[str, Any]]:
    """For each rank, in bytes: what it holds at rest, what the formula expects, and what it held in a step
    (`memory_timeline.record_step_memory`). Collective."""
    expected = strategy.expected_memory(size)
    own_row = {
        "rank": dist.get_rank(),
        **{f"{component}_bytes": nbytes for component, nbytes in strategy.memory_breakdown().items()},
        **{f"expected_{component}_bytes": nbytes for component, nbytes in expected.items()},
        "host_bytes": strategy.host_bytes(),
        "expected_host_bytes": strategy.expected_host_bytes(size),
        **(step_memory or dict.fromkeys(STEP_MEMORY)),
        "peak_rss_bytes": peak_rss_bytes(),
        "limit_bytes": limit_bytes(strategy.device),
    }
    return gather_objects(own_row)


def timed_steps(result: TrainingResult, earlier: int, settling: int) -> list[int]:
    """Numbers of the steps that count for a run's speed; arguments as in `step_statistics`."""
    steps = range(earlier + max(1, settling), len(result.step_time_s))
    return [step for step in steps if result.step_time_s[step] is not None]


def step_statistics(result: TrainingResult, earlier: int, settling: int) -> dict[str, float | None]:
    """Throughput and median time of the timed steps, without warm-up: the first step, those before the run resumed
    (`earlier`), and those in which the strategy settled. Throughput is that of all ranks, and this rank's own; None if
    there are no such steps, or no tokens."""
    columns = (result.step_time_s, result.samples, result.tokens, result.rank_counts)
    timed: list[Any] = [[column[step] for column in columns] for step in timed_steps(result, earlier, settling)]
    total_s = sum(seconds for seconds, *_ in timed)
    amounts = {
        "samples": sum(samples for _, samples, _, _ in timed),
        "tokens": sum(tokens for _, _, tokens, _ in timed),
        "own_samples": sum(counts[0] for *_, counts in timed),
        "own_tokens": sum(counts[1] for *_, counts in timed),
    }
    return {
        "step_time_median_s": statistics.median(seconds for seconds, *_ in timed) if timed else None,
        **{f"{name}_per_second": amount / total_s if amount else None for name, amount in amounts.items()},
    }
