"""The completed runs of a sweep, from their records."""

import shlex
from collections import defaultdict
from pathlib import Path

import msgspec

from ddp_lab.record_format import COMPLETED, RunEnd, SweepPass
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import fitted, json_bytes

Done = dict[str, dict[int, str]]
"""The ids of the runs that have completed, by label and number of the pass, from 1."""


def latest_sweep(output_dir: Path, family: str) -> tuple[SweepPass | None, Done]:
    """The family's latest sweep, and its completed runs; None if no sweep has left a record."""
    runs: list[tuple[str, SweepPass, RunEnd]] = []
    for path in sorted(output_dir.glob("profile/*/*.run.json")):
        try:
            end = fitted(msgspec.json.decode(json_bytes(path)), RunEnd, path, "run record")
        except (UserError, ValueError, RecursionError):
            continue  # `compare` says why it does not count
        if end.sweep and end.sweep.family == family:
            runs.append((path.parent.name, end.sweep, end))
    sweep = max((sweep for _, sweep, _ in runs), key=lambda sweep: (sweep.id, sweep.number), default=None)
    completed: Done = defaultdict(dict)
    for label, of_run, end in runs:
        if sweep and of_run.id == sweep.id and end.ended.how == COMPLETED:
            completed[label][of_run.number] = end.run_id
    return sweep, dict(completed)


def how_far(sweep: SweepPass, completed: Done) -> str:
    """Such as `2 of 14 runs`."""
    return f"{sum(map(len, completed.values()))} of {sweep.runs} runs"


def kept_runs(output_dir: Path, family: str) -> str:
    """The start of a sentence on the runs that an interrupted sweep keeps, and how to see them; empty without runs."""
    sweep, completed = latest_sweep(output_dir, family)
    place = [] if output_dir == Path() else ["--output-dir", str(output_dir)]
    see = shlex.join(["ddp-lab", "compare", family, *place])
    return f"{how_far(sweep, completed)} are kept; see them: {see}; " if sweep and completed else ""


def unfinished(sweep: SweepPass | None, completed: Done) -> str:
    """How far the latest sweep got and how to finish it; empty if it is complete."""
    if sweep is None or sum(map(len, completed.values())) >= sweep.runs:
        return ""
    place = f"{how_far(sweep, completed)}, pass {sweep.number} of {sweep.passes}"
    return f"The latest sweep is not finished: {place}; finish with: {sweep.command} --resume"
