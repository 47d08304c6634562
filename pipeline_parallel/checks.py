"""What can be known of a schedule on paper: that it never waits for itself, how long it takes, and what it holds.

Without torch, and without a clock: passes have the lengths that one gives them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline_parallel.actions import Action, Compute, Kind, Shape, messages_of, with_messages

UNIT_COSTS: Mapping[Kind, float] = {
    Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1
}  # fmt: skip
"""Of a pass through one rank: backward of a matrix product has two products as large as that of forward."""
SENT = {Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1), Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1)}
"""What a receive matches, and how far away the stage is that sends it."""


@dataclass(frozen=True)
class Timeline:
    """A step on paper.

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
    return [with_messages(schedule(shape, rank), shape) for rank in range(shape.ranks)]


def run_on_paper(lists: list[list[Action]], shape: Shape, costs: Mapping[Kind, float] = UNIT_COSTS) -> Timeline:
    """Walk all lists as ranks would, which only wait for what they receive.

    Args:
        costs: Of a pass of a micro-batch through all stages of a rank.

    Raises:
        ValueError: the ranks wait for each other for ever; says who waits for what.
    """
    places, clocks = [0] * len(lists), [0.0] * len(lists)
    sent: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in lists]
    while True:
        moved = False
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if action.kind.computes:
                    received, _ = messages_of(action, shape)
                    if received and source_of(received) not in sent:
                        break
                    start = max(clocks[rank], sent[source_of(received)] if received else 0)
                    clocks[rank] = start + costs[action.kind] / shape.stages_per_rank
                    spans[rank].append((action, start, clocks[rank]))
                elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                    sent[action] = clocks[rank]
                places[rank], moved = places[rank] + 1, True
        if all(place == len(actions) for place, actions in zip(places, lists, strict=True)):
            return Timeline(spans)
        if not moved:
            stuck = [f"rank {r} at {a[places[r]]}" for r, a in enumerate(lists) if places[r] < len(a)]
            raise ValueError(f"the schedule waits for itself: {', '.join(stuck)}")


def source_of(received: Action) -> Action:
    """The send that a receive waits for."""
    kind, distance = SENT[received.kind]
    return Action(kind, received.stage + distance, received.micro_batch)


def most_in_flight(actions: list[Action]) -> int:
    """The most passes whose activations a rank holds at a time: from forward until all of backward is done."""
    held = most = 0
    splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
    for action in actions:
        held += action.kind is Kind.FORWARD
        most = max(most, held)
        held -= action.kind is (Kind.BACKWARD_WEIGHT if splits else Kind.BACKWARD)
    return most


def require_whole(lists: list[list[Action]], shape: Shape) -> None:
    """Check that each pass is there once, on the rank of its stage, in an order that autograd can take; and that
    neighbours send and receive in one order, for each direction.

    Raises:
        ValueError: names what is wrong.
    """
    for rank, actions in enumerate(lists):
        computed = [action for action in actions if action.kind.computes]
        splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in computed)
        kinds = [Kind.FORWARD, *([Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if splits else [Kind.BACKWARD])]
        for stage in range(rank, shape.stages, shape.ranks):
            for micro_batch in range(shape.micro_batches):
                wanted = [Action(kind, stage, micro_batch) for kind in kinds]
                found = [action for action in computed if action.stage == stage and action.micro_batch == micro_batch]
                if found != wanted:
                    raise ValueError(f"rank {rank}: stage {stage}, micro-batch {micro_batch} has {found}")
        if len(computed) != len(kinds) * shape.stages_per_rank * shape.micro_batches:
            raise ValueError(f"rank {rank}: passes of other ranks' stages")
    for rank in range(shape.ranks):
        for received_kind, (_, distance) in SENT.items():
            received = [source_of(action) for action in lists[rank] if action.kind is received_kind]
            ours = set(received)
            sent = [action for action in lists[(rank + distance) % shape.ranks] if action in ours]
            if received != sent:
                raise ValueError(
                    f"rank {rank} receives in another order than rank {(rank + distance) % shape.ranks} sends"
                )
