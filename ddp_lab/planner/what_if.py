"""`scripts/plan.py what-if RUN`: what another setting of a recorded run would give, by a simulation.

It has the run's own compute and collectives:

- Compute: a roofline says how compute is shared out among operators. One factor on it makes the simulated compute of
  the recorded setting as long as it was. How much collectives slowed it down is thus in it.
- Collectives: the times in the run's traces, fitted by payload. For another number of ranks, latency goes by hops and
  transfer by bytes (`costs/volumes.py`). For another rate, transfers change in proportion, and latencies stay.

The recorded setting is predicted first, and its error is printed beside every answer.
"""

import argparse
from dataclasses import replace
from typing import Any

from rich.console import Console

from ddp_lab.planner.choices import choices
from ddp_lab.planner.contracts import Costs, Setting, Simulated
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.cluster import Cluster, Link
from ddp_lab.planner.costs.links import FittedCosts
from ddp_lab.planner.costs.volumes import volume
from ddp_lab.planner.runs import first_micro_batches, module_maker
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.planner.traced_run import TracedRun, read_run
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.link_model import LinkModel
from ddp_lab.runtime.link.rates import Rate


class WhatIf:
    """Answers for one run.

    Raises:
        UserError: the run's device, model, choice or mesh cannot be simulated.
    """

    def __init__(self, run: TracedRun) -> None:
        if run.config.mesh:
            raise UserError(
                f"--mesh {run.config.mesh}: what-if knows runs over one group of ranks; take plan.py --mesh, or savings"
            )
        self.run = run
        self._device = hardware.device("cpu" if run.kind == "cpu" else str(run.record.get("device_name", "")))
        self._batches = first_micro_batches(run.config, run.world_size)
        self._device = self._device.slowed(run.compute_s / self.answer().compute_s)

    def global_batch_size(self, ranks: int | None) -> int:
        """Each rank keeps its own batch, so the global batch grows with the ranks."""
        return self.run.config.global_batch_size * (ranks or self.run.world_size) // self.run.world_size

    def answer(self, ranks: int | None = None, rate: Rate | None = None, **changes: Any) -> Simulated:
        """A step of the changed run. None: as recorded.

        Args:
            rate: Of every link.
            changes: Other fields of `RunConfig`.

        Raises:
            UserError: the change makes no sense, or cannot be simulated.
        """
        run, backend = self.run, str(self.run.record["backend"])
        changes = {name: value for name, value in changes.items() if value is not None}
        config = replace(run.config, global_batch_size=self.global_batch_size(ranks), **changes)
        models = run.collectives
        if rate is not None and rate.bits_per_s:
            factor = rate.bits_per_s / 8 / recorded_rate(run)
            models = {
                kind: LinkModel(tuple(replace(p, seconds_per_byte=p.seconds_per_byte / factor) for p in model.pieces))
                for kind, model in models.items()
            }
        return simulate(
            Setting(config, module_maker(config), lambda: [dict(batch) for batch in self._batches]),
            Cluster(self._device, 1, ranks or run.world_size, Link("as recorded", 0.0, 1.0), backend=backend),
            Costs(self._device, FittedCosts(models, backend, run.world_size, "as recorded")),
        )


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
    if options.rate is not None and options.rate.bits_per_s is None:
        raise UserError("--rate: give a number, such as 10gbit; how fast an unshaped link is, only a measurement says")
    if options.choice is not None:
        (options.choice,) = choices([options.choice])
    found = read_run(options.run)
    what_if = WhatIf(found)
    same, batch = what_if.answer(), what_if.global_batch_size(options.ranks)
    error = same.step_time_s / found.step_s - 1
    bits = found.record.get("link_bits_per_s")
    console.print(
        f"recorded: {found.config.choice} on {found.config.workload}, {found.world_size} ranks over "
        f"{found.record['backend']}{f', link {Rate(bits)}' if bits else ''}: {found.step_s * 1e3:.1f} ms a step"
    )
    console.print(f"{answer_line('the same, predicted', same, found.config.global_batch_size)}; error {error:+.1%}")
    wordings = {
        "ranks": f"{options.ranks} ranks, global batch {batch}",
        "rate": f"links of {options.rate}",
        "bucket_cap_mb": f"buckets of {options.bucket_cap_mb} MiB",
        "choice": str(options.choice),
    }
    changed = [name for name in wordings if getattr(options, name) is not None]
    if not changed:
        return
    answer = what_if.answer(**{name: getattr(options, name) for name in changed})
    console.print(answer_line(f"predicted, {', '.join(wordings[name] for name in changed)}", answer, batch))
    low, high = sorted((answer.step_time_s, answer.step_time_s / (1 + error)))
    console.print(
        f"If that is off by as much as on the recorded setting: {low * 1e3:.1f} to {high * 1e3:.1f} ms; more if the "
        "setting is far from the recorded one."
    )


def answer_line(what: str, simulated: Simulated, batch: int) -> str:
    return (
        f"{what}: {simulated.step_time_s * 1e3:.1f} ms a step, {batch / simulated.step_time_s:.1f} samples/s; "
        f"communication in flight {simulated.communication_s * 1e3:.1f} ms, exposed {simulated.exposed_s * 1e3:.1f} ms"
    )
