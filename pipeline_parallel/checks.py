"""Simulates a schedule: whether it deadlocks, and how long it takes.

Without torch and without a clock: the caller gives the lengths of passes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline_parallel.actions import Action, Compute, Kind, Shape, list_of, needed_by

UNIT_COSTS: Mapping[Kind, float] = {
    Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1
}  # fmt: skip
"""Of a pass through one rank: backward of a matrix product has two products as large as that of forward."""


@dataclass(frozen=True)
class PipelineTimeline:
    """A simulated step.

    Attributes:
        spans: By rank, each action that computes with its start and end.
    """

    spans: list[list[tuple[Action, float, float]]]

    @property
    def length(self) -> float:
        return max(end for of_rank in self.spans for _, _, end in of_rank)

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank computes nothing, the mean over ranks."""
        busy = sum(end - start for of_rank in self.spans for _, start, end in of_rank)
        return 1 - busy / (self.length * len(self.spans))


def lists_of(schedule: Compute, shape: Shape) -> list[list[Action]]:
    """The actions of each rank."""
    return [list_of(schedule, shape, rank) for rank in range(shape.ranks)]


def run_on_paper(
    lists: list[list[Action]],
    shape: Shape,
    costs: Mapping[Kind, float] = UNIT_COSTS,
    factors: Sequence[float] | None = None,
) -> PipelineTimeline:
    """Walk all lists as ranks would, which wait only for messages. A ValueError names ranks that wait for ever. `costs`
    are of a pass of a micro-batch through all stages of a rank, `factors` of each stage."""
    remaining, clocks = [deque(actions) for actions in lists], [0.0] * len(lists)
    sent: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in lists]
    while any(remaining):
        ready = [
            rank for rank, actions in enumerate(remaining) if actions and needed_by(actions[0], shape) <= sent.keys()
        ]
        if not ready:
            stuck = [f"rank {rank} at {actions[0]}" for rank, actions in enumerate(remaining) if actions]
            raise ValueError(f"the schedule waits for itself: {', '.join(stuck)}")
        for rank in ready:
            action = remaining[rank].popleft()
            if action.kind.computes:
                start = max(clocks[rank], *(sent[message] for message in needed_by(action, shape)), 0)
                factor = factors[action.stage] if factors else 1
                clocks[rank] = start + factor * costs[action.kind] / shape.stages_per_rank
                spans[rank].append((action, start, clocks[rank]))
            else:
                sent[action] = clocks[rank]  # also for a receive, which no action needs
    return PipelineTimeline(spans)
