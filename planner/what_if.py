"""From a recorded run, what another setting would give: its own compute and its own collectives, another simulation.

- Compute: in each phase of the profiled steps (forward, backward, gradient_sync, optimizer), all time in which the rank
  did not merely wait for a collective. A roofline says how that is shared out among operators; one factor a phase makes
  the simulated phase as long. Time between phases, and in phases in which a simulation has no operator, is added as it
  is. What compute and communication took from each other in the recorded steps stays in it. On a GPU, where the host's
  phases say little of when kernels ran, one factor serves all.
- Collectives: the time that each kept the links, fitted by payload (`link_model.py`). Of several in flight at
  once each counts for its share; of all ranks that were read the shortest counts, since the others waited for the last.
- Another number of ranks: hops and bytes of the algorithms (`planner/volumes.py`). Another rate: transfers in
  proportion, from the rate that the link lab had shaped the link to, or else from what all-reduces reached; latencies
  stay.

How far off that is on the setting that was measured is said beside every answer.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner import hardware
from planner.cluster import Cluster, Link
from planner.collective_fits import FittedCosts
from planner.contracts import CollectiveCost, CollectiveCosts, Contention, OperatorCall, OperatorCosts, Simulated
from planner.costs import roofline
from planner.recorded_run import Recorded
from planner.runs import first_micro_batches, setting
from planner.simulate import simulate
from planner.volumes import volume
from training.communication.rates import Rate
from training.config import RunConfig
from training.errors import UserError


@dataclass(frozen=True)
class Asked:
    """What should differ; None: nothing.

    Attributes:
        rate: Of every link.
        bucket_cap_mb: As `--bucket-cap-mb` of the runner.
    """

    ranks: int | None = None
    rate: Rate | None = None
    bucket_cap_mb: float | str | None = None
    choice: str | None = None


# Costs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factored:
    """Operators of a roofline, each multiplied by the factor of the phases in which it was simulated.

    Attributes:
        factors: By name and shapes.
        mean: For operators that were not simulated, such as another strategy's.
    """

    costs: OperatorCosts
    factors: Mapping[tuple[str, Any], float]
    mean: float

    def seconds(self, call: OperatorCall) -> float | None:
        known = self.costs.seconds(call)
        return None if known is None else known * self.factors.get((call.name, call.shapes), self.mean)


def factored(plain: OperatorCosts, simulated: Simulated, busy_s: Mapping[str, float]) -> tuple[Factored, float]:
    """Costs with which each phase computes as long as it was recorded, and the seconds of a step that no phase's
    operators can stand for.

    Args:
        simulated: A step of the recorded setting, with the costs `plain`.
    """
    phases = [span for span in simulated.spans if span.lane == "phase"]
    parts: dict[str, dict[tuple[str, Any], float]] = defaultdict(lambda: defaultdict(float))
    for span in simulated.spans:
        if span.lane == "compute":
            name = next((p.name for p in phases if p.start_s <= span.start_s < p.end_s), "")
            place = name if name in busy_s and name else ""
            parts[place][span.name, span.details["call"].shapes] += span.end_s - span.start_s
    by_phase = {name: sum(operators.values()) for name, operators in parts.items()}
    whole = not any(busy_s[name] for name in busy_s if name)  # a GPU's: one factor for all
    recorded = {"": busy_s[""]} if whole else {name: seconds for name, seconds in busy_s.items() if name}
    factor = {name: recorded[name] / simulated_s for name, simulated_s in by_phase.items() if name in recorded}
    rest = sum(busy_s.values()) - sum(recorded[name] for name in factor)
    times: dict[tuple[str, Any], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, operators in parts.items():
        for key, seconds in operators.items():
            times[key][0] += seconds * factor.get(name, 0.0)
            times[key][1] += seconds
    scaled = {key: new / old for key, (new, old) in times.items() if old}
    total = sum(by_phase.values())
    mean = sum(factor.get(name, 0.0) * seconds for name, seconds in by_phase.items()) / total if total else 1.0
    return Factored(plain, scaled, mean), max(rest, 0.0)


@dataclass(frozen=True)
class Faster:
    """Transfers `factor` times as fast."""

    costs: CollectiveCosts
    factor: float

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        known = self.costs.cost(kind, payload_bytes, ranks)
        return replace(known, transfer_s=known.transfer_s / self.factor)


def recorded_rate(run: Recorded) -> float:
    """Bytes a second of the recorded link: as the link lab shaped it, or what all-reduces (else another kind) reached.

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


# Answering ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A step of one setting. `step_s` holds what a simulation has no operator for, too."""

    config: RunConfig
    world_size: int
    simulated: Simulated
    step_s: float


class WhatIf:
    """Answers for one run.

    Raises:
        UserError: the run's device, model or choice cannot be simulated.
    """

    def __init__(self, run: Recorded) -> None:
        self.run = run
        name = "cpu" if run.kind == "cpu" else str(run.record.get("device_name", ""))
        self._device = hardware.device(name)
        self._plain = roofline(self._device)
        self._batches = first_micro_batches(run.config, run.world_size)
        self._operators: OperatorCosts = self._plain
        self._rest_s = 0.0
        first = self.answer(Asked())
        self._operators, self._rest_s = factored(self._plain, first.simulated, run.busy_s)

    def answer(self, asked: Asked) -> Answer:
        """A step of the run with what is asked for; each rank keeps its own batch, so the global one grows with ranks.

        Raises:
            UserError: that makes no sense, or cannot be simulated.
        """
        run, ranks = self.run, asked.ranks or self.run.world_size
        changes: dict[str, Any] = {"global_batch_size": run.config.global_batch_size * ranks // run.world_size}
        if asked.bucket_cap_mb is not None:
            changes["bucket_cap_mb"] = asked.bucket_cap_mb
        if asked.choice is not None:
            changes["choice"] = asked.choice
        config = replace(run.config, **changes)
        backend = str(run.record["backend"])
        cluster = Cluster(self._device, 1, ranks, Link("as recorded", 0.0, 1.0), backend=backend)
        collectives: CollectiveCosts = FittedCosts(run.collectives, backend, run.world_size, "as recorded")
        if asked.rate is not None and asked.rate.bits_per_s:
            collectives = Faster(collectives, asked.rate.bits_per_s / 8 / recorded_rate(run))
        found = simulate(
            setting(config, ranks, self._batches), cluster, self._operators, collectives, Contention(), rank=0
        )
        return Answer(config, ranks, found, found.step_time_s + self._rest_s)
