"""`scripts/plan.py what-if RUN`: what another setting of a recorded run would give, and how far to trust that."""

import argparse

from rich.console import Console

from planner.flags import require_between
from planner.plan import choices
from planner.traced_run import read_run
from planner.what_if import Answer, Change, WhatIf
from training.communication.rates import Rate
from training.errors import UserError


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the recorded step, the same predicted, and the step of the changed setting.

    Raises:
        UserError: the run cannot be used, or the setting makes no sense.
    """
    require_between(options, "ranks", 1, 2**20)
    if options.rate is not None and options.rate.bits_per_s is None:
        raise UserError("--rate: give a number, such as 10gbit; how fast an unshaped link is, only a measurement says")
    if options.choice is not None:
        (options.choice,) = choices([options.choice])
    found = read_run(options.run)
    what_if = WhatIf(found)
    same = what_if.answer(Change())
    error = same.simulated.step_time_s / found.step_s - 1
    bits = found.record.get("link_bits_per_s")
    console.print(
        f"recorded: {found.config.choice} on {found.config.workload}, {found.world_size} ranks over "
        f"{found.record['backend']}{f', link {Rate(bits)}' if bits else ''}: {found.step_s * 1e3:.1f} ms a step"
    )
    console.print(f"{answer_line('the same, predicted', same)}; error {error:+.1%}")
    change = Change(options.ranks, options.rate, options.bucket_cap_mb, options.choice)
    if change == Change():
        return
    answer = what_if.answer(change)
    step_s = answer.simulated.step_time_s
    console.print(answer_line(described(change, answer), answer))
    low, high = sorted((step_s, step_s / (1 + error)))
    console.print(
        f"If that is off by as much as on the recorded setting: {low * 1e3:.1f} to {high * 1e3:.1f} ms; more if the "
        "setting is far from the recorded one."
    )


def described(change: Change, answer: Answer) -> str:
    shown = {
        "ranks": f"{change.ranks} ranks, global batch {answer.config.global_batch_size}",
        "rate": f"links of {change.rate}",
        "bucket_cap_mb": f"buckets of {change.bucket_cap_mb} MiB",
        "choice": str(change.choice),
    }
    return "predicted, " + ", ".join(text for name, text in shown.items() if getattr(change, name) is not None)


def answer_line(what: str, answer: Answer) -> str:
    simulated = answer.simulated
    samples = answer.config.global_batch_size / simulated.step_time_s
    return (
        f"{what}: {simulated.step_time_s * 1e3:.1f} ms a step, {samples:.1f} samples/s; communication in flight "
        f"{simulated.communication_s * 1e3:.1f} ms, exposed {simulated.exposed_s * 1e3:.1f} ms"
    )
