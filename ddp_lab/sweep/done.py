"""What a sweep has done: the runs that have left a record of it."""

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
    """A run of the family's latest sweep, and what has been done of that; None if no run of one has left a record."""
    runs: list[tuple[str, SweepPass, RunEnd]] = []
    for path in sorted(output_dir.glob("profile/*/*.run.json")):
        try:
            end = fitted(msgspec.json.decode(json_bytes(path)), RunEnd, path, "run record")
        except (UserError, ValueError, RecursionError):
            continue  # it does not count, and who compares runs says why
        if end.sweep and end.sweep.family == family:
            runs.append((path.parent.name, end.sweep, end))
    sweep = max((sweep for _, sweep, _ in runs), key=lambda sweep: (sweep.id, sweep.number), default=None)
    done: Done = defaultdict(dict)
    for label, of_run, end in runs:
        if sweep and of_run.id == sweep.id and end.ended.how == COMPLETED:
            done[label][of_run.number] = end.run_id
    return sweep, dict(done)


def how_far(sweep: SweepPass, done: Done) -> str:
    """Such as `2 of 14 runs`."""
    return f"{sum(map(len, done.values()))} of {sweep.runs} runs"


def kept(output_dir: Path, family: str) -> str:
    """What an interrupted sweep leaves, and how to see it, as the beginning of a sentence; empty if nothing."""
    sweep, done = latest_sweep(output_dir, family)
    place = [] if output_dir == Path() else ["--output-dir", str(output_dir)]
    see = shlex.join(["ddp-lab", "compare", family, *place])
    return f"{how_far(sweep, done)} are kept; see them: {see}; " if sweep and done else ""


def unfinished(sweep: SweepPass | None, done: Done) -> str:
    """How far the latest sweep got and how to finish it, if it is not whole; else empty."""
    if sweep is None or sum(map(len, done.values())) >= sweep.runs:
        return ""
    place = f"{how_far(sweep, done)}, pass {sweep.number} of {sweep.passes}"
    return f"The latest sweep is not finished: {place}; finish with: {sweep.command} --resume"
