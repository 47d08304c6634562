"""Step times of runs, those of a sweep in passes, and how much runs differ."""

from collections.abc import Sequence
from statistics import harmonic_mean, mean
from typing import Any

import pandas as pd

from ddp_lab.analysis.metrics.significance import Spread, expected_spread, noise

RATES = ("samples_per_second", "tokens_per_second", "model_flops_per_second")
BUSY = 0.25
"""Share of a step without a core that is usual: ranks that share cores wait for each other's threads."""
Run = dict[str, Any]


def passes_of(record: Run) -> dict[int, Run]:
    """The runs of a choice that are compared by number of the pass: those of a sweep, or this one alone."""
    return record.get("passes") or {1: record}


def timed_steps_ms(record: Run) -> pd.Series:
    """Step times in ms by step, without the first (warm-up), those in which the choice was still adapting, and profiled
    ones."""
    began = (record["resumed_from"] or {"step": 0})["step"]
    times = pd.Series(record["step_time_s"], dtype=float).iloc[began + max(1, record["settling_steps"]) :]
    return times.dropna() * 1000


def all_steps_ms(record: Run) -> pd.Series:
    """`timed_steps_ms` of all passes, by pass and step."""
    return pd.concat({number: timed_steps_ms(run) for number, run in passes_of(record).items()})


def expected_of(pairs: Sequence[tuple[Run, Run]]) -> Spread:
    """The spread to expect of runs, from pairs of a run and the run that it is compared with.

    A median varies as its steps do. On a busy machine a training thread also waits for other programs, which change
    from run to run: its wait beyond `BUSY` of a step is taken as a standard deviation (`ddp-lab bench aa`).
    """
    noises = [noise(timed_steps_ms(run), timed_steps_ms(base)) for run, base in pairs if run is not base]
    return expected_spread(mean(noises or [0.0]) + mean(max(0.0, without_core(run) - BUSY) ** 2 for run, _ in pairs))


def without_core(record: Run) -> float:
    """The share of a step in which a training thread could run but had no core, on the rank with the largest share."""
    return max(((row["core_s"] or 0.0) / row["step_s"] for row in record["throughput"] if row["step_s"]), default=0.0)


def work_of(record: Run) -> str | None:
    """A key, equal for choices that do equal compute; None if no other choice computes what this one does."""
    layout = ("mesh", "pipeline_schedule", "stages_per_rank", "context_parallel", "sequence_parallel")
    return None if record["shards"] else str([record["config"].get(name) for name in layout])


def with_passes(record: Run, passes: dict[int, Run]) -> Run:
    """`record` with the runs of all passes of its choice, and mean rates over them."""
    rates = {name: [run[name] for run in passes.values() if run[name]] for name in RATES}
    return record | {name: harmonic_mean(values) for name, values in rates.items() if values} | {"passes": passes}
