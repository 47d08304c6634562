"""`scripts/plan.py what-if RUN`: what another setting of a recorded run would give, and how far to trust that."""

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from planner.flags import require_between
from training.communication.rates import Rate
from training.errors import UserError

if TYPE_CHECKING:
    from planner.recorded_run import Recorded
    from planner.what_if import Answer, Asked

MOST_RANKS = 2**20


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the recorded step, the same predicted, and the step that is asked for.

    Raises:
        UserError: the run cannot be used, or the setting makes no sense.
    """
    require_between(options, "ranks", 1, MOST_RANKS)
    if options.rate is not None and options.rate.bits_per_s is None:
        raise UserError("--rate: give a number, such as 10gbit; how fast an unshaped link is, only a measurement says")
    if options.choice is not None:
        from planner.plan import choices

        (options.choice,) = choices([options.choice])
    from planner.recorded_run import read_run
    from planner.what_if import Asked, WhatIf

    found = read_run(options.run)
    what_if = WhatIf(found)
    same = what_if.answer(Asked())
    error = same.step_s / found.step_s - 1
    console.print(recorded_line(found))
    console.print(f"{answer_line('the same, predicted', same)}; error {error:+.1%}")
    asked = Asked(options.ranks, options.rate, options.bucket_cap_mb, options.choice)
    if asked == Asked():
        return
    answer = what_if.answer(asked)
    console.print(answer_line(described(asked, answer), answer))
    low, high = sorted((answer.step_s, answer.step_s / (1 + error)))
    console.print(
        f"If that is off by as much as on the measured setting: {low * 1e3:.1f} to {high * 1e3:.1f} ms; more where the "
        "setting is further from the measured one."
    )


def recorded_line(found: "Recorded") -> str:
    record = found.record
    bits = record.get("link_bits_per_s")
    link = f", link {Rate(bits)}" if bits else ""
    return (
        f"recorded: {record['choice']} on {found.config.workload}, {found.world_size} ranks over {record['backend']}"
        f"{link}: {found.step_s * 1e3:.1f} ms a step"
    )


def described(asked: "Asked", answer: "Answer") -> str:
    shown = {
        "ranks": f"{asked.ranks} ranks, global batch {answer.config.global_batch_size}",
        "rate": f"links of {asked.rate}",
        "bucket_cap_mb": f"buckets of {asked.bucket_cap_mb} MiB",
        "choice": str(asked.choice),
    }
    return "predicted, " + ", ".join(text for name, text in shown.items() if getattr(asked, name) is not None)


def answer_line(what: str, answer: "Answer") -> str:
    simulated = answer.simulated
    samples = answer.config.global_batch_size / answer.step_s
    return (
        f"{what}: {answer.step_s * 1e3:.1f} ms a step, {samples:.1f} samples/s; communication under way "
        f"{simulated.communication_s * 1e3:.1f} ms, exposed {simulated.exposed_s * 1e3:.1f} ms"
    )
