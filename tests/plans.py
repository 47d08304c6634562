"""Plans of steps that are made up."""

from ddp_lab.planner import models
from ddp_lab.planner.contracts import MemoryCurve, Simulated
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.outcome import CaseOutcome
from ddp_lab.planner.rates import Price
from ddp_lab.planner.space import Case
from ddp_lab.runtime.config import RunConfig

GIB = 2**30


def simulation(step_ms, exposed_ms, peak_gib):
    """A step that computes, and waits for a collective that began half-way."""
    step, exposed = step_ms / 1e3, exposed_ms / 1e3
    half, busy = (step - exposed) / 2, step - exposed
    memory = {"parameters": int(peak_gib * GIB / 2), "activations": int(peak_gib * GIB / 2)}
    resting = {"parameters": memory["parameters"], "activations": 0}
    curve = MemoryCurve(resting, memory)
    return Simulated(step, busy, half + exposed, exposed, curve, {})


def case(gpus="2xL4", batch=8, price=None, tokens=None, **settings):
    between = "ndr" if gpus.count("x") > 1 else None
    cluster = hardware.cluster(gpus, "pcie4", between)
    config = RunConfig.of(global_batch_size=batch, **settings)
    rate = None if price is None else Price(price)
    return Case(models.find("SmolLM2-135M"), cluster, config, 128, rate, tokens)


def outcomes_of(price=None, tokens=None, **simulated):
    reason = "this one needs data"
    base = case(price=price, tokens=tokens)
    return [CaseOutcome(base.but(choice=name), step, "" if step else reason) for name, step in simulated.items()]
