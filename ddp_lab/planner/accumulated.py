"""A step of many micro-batches, from steps of a few: from the second on, each takes what the one before took."""

from dataclasses import replace

from ddp_lab.planner.contracts import Costs, MemoryCurve, Setting, Simulated
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.simulation.simulate import simulate

FEW = (2, 3)
"""Micro-batches of the steps that are simulated instead."""


def simulate_step(setting: Setting, cluster: Cluster, costs: Costs) -> Simulated:
    """As `simulate`. Times grow by the same for each micro-batch, and memory by its data (a test holds that to the step
    itself). Not so with a pipeline, which is simulated as it is.

    Raises:
        CannotSimulate, UserError: as `simulate`.
    """
    config = setting.config
    if config.grad_accum_steps <= sum(FEW) or config.has_stages:
        return simulate(setting, cluster, costs)
    fewer, more = (simulate(part_of(setting, count), cluster, costs) for count in FEW)
    further = config.grad_accum_steps - FEW[1]

    def grown(before: float, after: float) -> float:
        return after + further * (after - before)

    rest, peak = dict(more.memory.at_rest), dict(more.memory.at_peak)
    data = {name: int(further * (rest[name] - fewer.memory.at_rest.get(name, 0))) for name in rest}
    at_rest, at_peak = ({name: held.get(name, 0) + data.get(name, 0) for name in held | data} for held in (rest, peak))
    return replace(
        more,
        memory=MemoryCurve(at_rest, at_peak),
        step_time_s=grown(fewer.step_time_s, more.step_time_s),
        compute_s=grown(fewer.compute_s, more.compute_s),
        communication_s=grown(fewer.communication_s, more.communication_s),
        exposed_s=grown(fewer.exposed_s, more.exposed_s),
    )


def part_of(setting: Setting, count: int) -> Setting:
    """A step of so many of its micro-batches."""
    config = setting.config
    samples = config.global_batch_size // config.grad_accum_steps * count
    few = config.but(global_batch_size=samples, grad_accum_steps=count)
    return replace(setting, config=few, make_micro_batches=lambda: setting.make_micro_batches()[:count])
