"""The runs of a sweep: every choice once in each pass."""

import os
import random
import time
from collections.abc import Sequence

import msgspec

from ddp_lab.families import EVERY
from ddp_lab.record_format import SWEEP_VARIABLE, SweepPass
from ddp_lab.runtime.process.torchrun import start_ranks
from ddp_lab.runtime.settings.training import LATEST
from ddp_lab.sweep.done import Done
from ddp_lab.sweep.runs import Runs


def planned(labels: Sequence[str], passes: int, seed: int) -> list[tuple[str, int]]:
    """Each choice in each pass: in the first as listed, in each later one in an order that `seed` draws anew."""
    orders = [random.Random(f"{seed} {number}").sample(labels, len(labels)) for number in range(2, passes + 1)]
    return [(label, number) for number, order in enumerate([labels, *orders], 1) for label in order]


def train(runs: Runs, sweep: SweepPass, completed: Done, plan: Sequence[tuple[str, int]], resumes: bool) -> list[str]:
    """Train the runs of `plan` (label, pass) that are not in `completed`. Returns the labels of those that failed.

    Later passes leave a failed choice out. A line before each run says how far the sweep is.
    """
    failed: list[str] = []
    seconds: list[float] = []
    todo = [(label, number) for label, number in plan if number not in completed.get(label, ())]
    for label, number in todo:
        if label in failed:
            continue
        place = plan.index((label, number))
        line = f"{label}: {place + 1} of {len(plan)}" + f" (pass {number} of {sweep.passes})" * (sweep.passes > 1)
        if seconds:
            runs_left = sum(run in todo and run[0] not in failed for run in plan[place:])
            line += f", about {runs_left * sum(seconds) / len(seconds):.0f} s to go"
        print(line, flush=True)
        config = runs.config(label, number)
        if resumes and number == 1 and runs.has_begun(label):
            config = config.but(resume=LATEST)
        began = time.monotonic()
        os.environ[SWEEP_VARIABLE] = msgspec.json.encode(msgspec.structs.replace(sweep, number=number)).decode()
        if start_ranks(config, runs.ranks, EVERY):
            seconds.append(time.monotonic() - began)
        else:
            failed.append(label)
    return failed
