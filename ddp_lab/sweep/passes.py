"""The runs of a sweep: every choice once in each pass."""

import random
import time
from collections.abc import Sequence

from ddp_lab.families import EVERY
from ddp_lab.runtime.process.torchrun import start_ranks
from ddp_lab.runtime.settings.training import LATEST
from ddp_lab.sweep.runs import Runs
from ddp_lab.sweep.state import SweepState


def planned(labels: Sequence[str], passes: int, seed: int) -> list[tuple[str, int]]:
    """Each choice in each pass: in the first as listed, in each later one in an order that `seed` draws anew."""
    orders = [random.Random(f"{seed} {number}").sample(labels, len(labels)) for number in range(2, passes + 1)]
    return [(label, number) for number, order in enumerate([labels, *orders], 1) for label in order]


def train(runs: Runs, state: SweepState, plan: Sequence[tuple[str, int]], resumes: bool) -> list[str]:
    """Do the runs of `plan` (label, pass) that `state` has not finished, and return the labels of those that failed.

    A choice that failed is left out of later passes. Before each run, a line says how far the sweep is.
    """
    passes = plan[-1][1]
    failed: list[str] = []
    seconds: list[float] = []
    for place, (label, number) in enumerate(plan, 1):
        if number in state.runs.get(label, ()) or label in failed:
            continue
        said = f"{label}: {place} of {len(plan)}" + f" (pass {number} of {passes})" * (passes > 1)
        if seconds:
            left = sum(again not in state.runs.get(one, ()) for one, again in plan[place - 1 :] if one not in failed)
            said += f", about {left * sum(seconds) / len(seconds):.0f} s to go"
        print(said, flush=True)
        config = runs.config(label, number)
        if resumes and number == 1 and runs.has_begun(label):
            config = config.but(resume=LATEST)
        began = time.monotonic()
        if start_ranks(config, runs.ranks, EVERY):
            state.add(label, number)
            seconds.append(time.monotonic() - began)
        else:
            failed.append(label)
    return failed
