"""`scripts/plan.py what-if RUN`: what another setting of a recorded run would give, by a simulation.

It has the run's own compute and collectives:

- Compute: a roofline says how compute is shared out among operators. One factor on it makes the simulated compute of
  the recorded setting as long as it was. How much collectives slowed it down is thus in it.
- Collectives: the times in the run's traces, fitted by payload. For another number of ranks, latency goes by hops and
  transfer by bytes (`planner/costs/volumes.py`). For another rate, transfers change in proportion, and latencies stay.

The recorded setting is predicted first, and its error is printed beside every answer.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from planner.contracts import OperatorCosts, Scaled, Simulated
from planner.costs import hardware
from planner.costs.cluster import Cluster, Link
from planner.costs.fits import FittedCosts
from planner.costs.roofline import Roofline
from planner.costs.volumes import volume
from planner.flags import require_between
from planner.plan import choices, setting
from planner.runs import first_micro_batches, module_maker
from planner.simulation.simulate import simulate
from planner.traced_run import TracedRun, read_run
from training.communication.link_model import LinkModel
from training.communication.rates import Rate
from training.config import RunConfig
from training.errors import UserError


@dataclass(frozen=True)
class Change:
    """What differs from the recorded run; None: nothing.

    Attributes:
        rate: Of every link.
        bucket_cap_mb: As `--bucket-cap-mb` of the runner.
    """

    ranks: int | None = None
    rate: Rate | None = None
    bucket_cap_mb: float | str | None = None
    choice: str | None = None


@dataclass(frozen=True)
class Answer:
    """A simulated step of one setting."""

    config: RunConfig
    simulated: Simulated


class WhatIf:
    """Answers for one run.

    Raises:
        UserError: the run's device, model or choice cannot be simulated.
    """

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self._device = hardware.device("cpu" if run.kind == "cpu" else str(run.record.get("device_name", "")))
        self._batches = first_micro_batches(run.config, run.world_size)
        self._operators: OperatorCosts = Roofline(self._device)
        simulated = self.answer(Change()).simulated
        self._operators = Scaled(self._operators, run.compute_s / simulated.compute_s)

    def answer(self, change: Change) -> Answer:
        """A step of the changed run. Each rank keeps its own batch, so the global batch grows with the ranks.

        Raises:
            UserError: the change makes no sense, or cannot be simulated.
        """
        run, ranks = self.run, change.ranks or self.run.world_size
        changes: dict[str, Any] = {"global_batch_size": run.config.global_batch_size * ranks // run.world_size}
        changes |= {name: value for name in ("bucket_cap_mb", "choice") if (value := getattr(change, name)) is not None}
        config, backend = replace(run.config, **changes), str(run.record["backend"])
        models = run.collectives
        if change.rate is not None and change.rate.bits_per_s:
            factor = change.rate.bits_per_s / 8 / recorded_rate(run)
            models = {
                kind: LinkModel(tuple(replace(p, seconds_per_byte=p.seconds_per_byte / factor) for p in model.pieces))
                for kind, model in models.items()
            }
        simulated = simulate(
            setting(config, module_maker(config), lambda: [dict(batch) for batch in self._batches]),
            Cluster(self._device, 1, ranks, Link("as recorded", 0.0, 1.0), backend=backend),
            self._operators,
            FittedCosts(models, backend, run.world_size, "as recorded"),
        )
        return Answer(config, simulated)


def recorded_rate(run: TracedRun) -> float:
    """Bytes a second of the recorded link: as the link lab shaped it, or what all-reduces (or else another kind)
    reached.

    Raises:
        UserError: the collectives do not show it.
    """
    bits = run.record.get("link_bits_per_s")
    if bits:
        return float(bits) / 8
    kind = "all_reduce" if "all_reduce" in run.collectives else next(iter(run.collectives))
    per_byte = run.collectives[kind].pieces[-1].seconds_per_byte
    if not per_byte:
        raise UserError("the recorded collectives are too small to show the link's rate; --rate needs larger ones")
    return volume(kind, str(run.record["backend"]), run.world_size).busiest / per_byte


# The command ----------------------------------------------------------------------------------------------------------


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
