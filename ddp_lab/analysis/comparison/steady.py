"""Whether the machine was the same in all runs that are compared: equal work must take equal time.

A choice does the same in every pass of a sweep. So a pass of it is left out where its step, or the compute in it, takes
another time than in its middle pass: by more than a factor, and more than the steps of the faster pass vary. Where that
leaves fewer than two passes of a choice, nobody knows which of them was disturbed, and no verdict is given. Of runs
without passes, compute is compared between choices that do equal compute: replicated ones over one mesh. (A sharded
choice also copies what it gathers and scatters, which counts as compute, so it is compared with itself alone.)
"""

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean, mean
from typing import Any, NamedTuple

import pandas as pd

from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.analysis.metrics.significance import Spread, expected_spread, noise

STEP, COMPUTE = "a step", "compute"
MOST = {STEP: 1.25, COMPUTE: 1.5}
"""How many times as long equal work may take: a step of one choice; compute, of which few steps are profiled, and which
on a CPU takes longer under communication."""
FEWEST_PASSES = 2
RATES = ("samples_per_second", "tokens_per_second", "model_flops_per_second")
Run = dict[str, Any]
Place = tuple[str, int]
"""Label and number of a pass; 0 if there are none."""
Finding = tuple[float, str]
"""How many times as long equal work took, and a sentence on it."""


class Steady(NamedTuple):
    """What may be compared.

    Attributes:
        records: By label, without the passes that are left out; with all passes if no verdict may be given.
        withheld: Why none may; empty if one may.
        left_out: For each pass that is left out, what showed that it was disturbed.
    """

    records: dict[str, Run]
    withheld: str
    left_out: list[str]


def passes_of(record: Run) -> dict[int, Run]:
    """The runs of a choice that are compared by number of the pass: those of a sweep, or this one alone."""
    return record.get("passes") or {1: record}


def timed_steps_ms(record: Run) -> pd.Series:
    """Step times in ms by step, without the first (warm-up), those in which the choice was still adapting, and profiled
    ones."""
    began = (record["resumed_from"] or {"step": 0})["step"]
    times = pd.Series(record["step_time_s"], dtype=float).iloc[began + max(1, record["settling_steps"]) :]
    return times.dropna() * 1000


def expected_of(pairs: Sequence[tuple[Run, Run]]) -> Spread:
    """What to expect of these runs, each beside the one that it is compared with.

    Their medians vary as their steps do. On a busy machine a thread waits for other programs, which do something else in
    the next run: half the share of a step in which it has no core is taken as a standard deviation (`ddp-lab bench aa`).
    """
    noises = [noise(timed_steps_ms(run), timed_steps_ms(base)) for run, base in pairs if run is not base]
    return expected_spread(mean(noises or [0.0]) + mean((without_core(run) / 2) ** 2 for run, _ in pairs))


def without_core(record: Run) -> float:
    """The share of a step in which a training thread could run and had no core, on the rank that has most of it."""
    return max((row["core_s"] / row["step_s"] for row in record.get("throughput", ())), default=0.0)


def all_steps_ms(record: Run) -> pd.Series:
    """The same of all passes, by pass and step."""
    return pd.concat({number: timed_steps_ms(run) for number, run in passes_of(record).items()})


def compute_ms(steps: pd.DataFrame) -> pd.Series:
    """Compute by profiled step, mean over ranks."""
    return steps.groupby("step")["compute_ms"].mean()


def work_of(record: Run) -> str | None:
    """Equal of choices that do equal compute; None if a choice can be compared with itself alone."""
    layout = ("mesh", "pipeline_schedule", "stages_per_rank", "context_parallel", "sequence_parallel")
    return None if record["shards"] else str([record["config"].get(name) for name in layout])


def steady(records: Mapping[str, Run], traced: Mapping[str, Traced]) -> Steady:
    """Leave out passes that were disturbed.

    Args:
        records: Runs whose step times are compared, by label.
        traced: What their traces say; a run may have none.
    """
    withheld: list[Finding] = []
    left_out: list[Finding] = []
    kept = {}
    for label, record in records.items():
        passes = passes_of(record)
        steps = traced[label].passes if label in traced else {}
        found = apart(STEP, {(label, number): timed_steps_ms(run) for number, run in passes.items()})
        found |= apart(COMPUTE, {(label, number): compute_ms(steps[number]) for number in passes if number in steps})
        kept[label] = with_passes(record, {number: passes[number] for number in passes if (label, number) not in found})
        (withheld if len(passes_of(kept[label])) < min(len(passes), FEWEST_PASSES) else left_out).extend(found.values())
    most = max(len(passes_of(record)) for record in records.values())
    if most == 1:
        withheld += across_choices(records, traced)
    swept = any("passes" in record for record in records.values())
    when = "during the sweep" if swept else "between the runs"
    again = "finish a sweep of --passes 2" if swept else "in passes: ddp-lab sweep FAMILY RANKS"
    again = f"--passes {2 * most}" if most > 1 else again
    sentence = f"the machine changed {when}: {max(withheld)[1]}; run again, or {again}" if withheld else ""
    return Steady(dict(records), sentence, []) if sentence else Steady(kept, "", [said for _, said in left_out])


def across_choices(records: Mapping[str, Run], traced: Mapping[str, Traced]) -> list[Finding]:
    """What shows that runs of equal compute were not on an equal machine."""
    works: dict[Any, dict[Place, pd.Series]] = {}
    for label, kept in traced.items():
        if label in records and (work := work_of(records[label])) is not None:
            works.setdefault(work, {})[label, 0] = compute_ms(kept.steps)
    return [one for times in works.values() for one in apart(COMPUTE, times).values()]


def apart(what: str, times: Mapping[Place, pd.Series]) -> dict[Place, Finding]:
    """The runs in which equal work took another time than in the middle one (of an even number, the faster)."""
    medians = {place: float(series.median()) for place, series in times.items() if len(series)}
    ranked = sorted(medians, key=medians.__getitem__)
    found = {}
    for rank, place in enumerate(ranked):
        low, high = (ranked[at] for at in sorted((rank, (len(ranked) - 1) // 2)))
        if medians[high] > max(MOST[what] * medians[low], float(times[low].quantile(0.9))):
            shown = [f"{medians[one]:,.1f} ms ({named(one)})" for one in (low, high)]
            found[place] = medians[high] / medians[low], f"{what} of equal work took {shown[0]} and {shown[1]}"
    return found


def named(place: Place) -> str:
    label, number = place
    return f"{label}, pass {number}" if number else label


def with_passes(record: Run, passes: dict[int, Run]) -> Run:
    """The record of a choice that ran in these passes, with their rates."""
    known = {name: [run[name] for run in passes.values() if run[name]] for name in RATES}
    return record | {name: harmonic_mean(values) for name, values in known.items() if values} | {"passes": passes}
