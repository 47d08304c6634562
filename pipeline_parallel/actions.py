"""The actions of a rank of a pipeline, in order: a schedule is a list of them. Imports no torch.

`runner` runs the list, `checks` simulates it without tensors, and reports draw it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import NamedTuple


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """Of the gradient of a stage's input alone, for which the stage before waits."""
    BACKWARD_WEIGHT = "W"
    """The rest of the backward pass: gradients of weights, for which nobody waits."""
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"

    @property
    def computes(self) -> bool:
        return len(self.value) == 1


class Action(NamedTuple):
    """Attributes:
    stage: Of the model, counted from 0 at its input.
    micro_batch: Of the step, counted from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


class Shape(NamedTuple):
    """Attributes:
    ranks: Of the pipeline.
    micro_batches: Of a step.
    stages_per_rank: A rank holds stage `rank`, `rank + ranks`, `rank + 2 ranks` and so on.
    """

    ranks: int
    micro_batches: int
    stages_per_rank: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank


SENT = {Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1), Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1)}
"""What a receive matches, and how far away the stage is that sends it."""

Compute = Callable[[Shape, int], Iterator[Action]]
"""A schedule: what a rank computes in a step, in this order."""


@cache
def list_of(schedule: Compute, shape: Shape, rank: int) -> list[Action]:
    """The actions of a rank in a step. The list is cached: do not change it."""
    return with_messages(schedule(shape, rank), shape)


def with_messages(compute: Iterable[Action], shape: Shape) -> list[Action]:
    """The computations of a rank, with the messages that it sends to its neighbours and receives from them.

    A send follows the action that makes its tensor. A receive is posted one action before the action that needs it, so
    that the message travels while the rank computes.
    """
    actions: list[Action] = []
    start = 0  # where the latest action that computes begins
    for action in compute:
        received, sent = messages_of(action, shape)
        if received:
            made_before = start < len(actions) and actions[start][1:] == action[1:]  # `action` is its gradient
            actions.insert(len(actions) if made_before else start, received)
        start = len(actions)
        actions += [action, *([sent] if sent else [])]
    return actions


def messages_of(action: Action, shape: Shape) -> tuple[Action | None, Action | None]:
    """The message that an action waits for, and the message that it makes for another rank."""
    kind, stage, micro_batch = action
    is_first, is_last = stage == 0 or shape.ranks == 1, stage == shape.stages - 1 or shape.ranks == 1
    received = sent = None
    if kind is Kind.FORWARD:
        received = None if is_first else Kind.RECEIVE_ACTIVATION
        sent = None if is_last else Kind.SEND_ACTIVATION
    elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        received = None if is_last else Kind.RECEIVE_GRADIENT
        sent = None if is_first else Kind.SEND_GRADIENT
    return (
        Action(received, stage, micro_batch) if received else None,
        Action(sent, stage, micro_batch) if sent else None,
    )


def needed_by(action: Action, shape: Shape) -> set[Action]:
    """The send that a pass waits for, if any."""
    received = messages_of(action, shape)[0] if action.kind.computes else None
    return {source_of(received)} if received else set()


def source_of(received: Action) -> Action:
    """The send that a receive waits for."""
    kind, distance = SENT[received.kind]
    return Action(kind, received.stage + distance, received.micro_batch)


@cache
def arrived_by(schedule: Compute, shape: Shape, rank: int) -> Mapping[Action, Sequence[Action]]:
    """For each message that a rank receives: which of its own messages the sender has used before it sent this one."""
    arrived: dict[Action, Sequence[Action]] = {}
    for neighbour in {(rank - 1) % shape.ranks, (rank + 1) % shape.ranks}:
        used: list[Action] = []
        for action in schedule(shape, neighbour):
            used += [message for message in needed_by(action, shape) if message.stage % shape.ranks == rank]
            _, sent = messages_of(action, shape)
            for received, (kind, distance) in SENT.items():
                if sent and sent.kind is kind and (sent.stage - distance) % shape.ranks == rank:
                    arrived[Action(received, sent.stage - distance, sent.micro_batch)], used = used, []
    return arrived
